"""Where the random parts of pauses come from: a simulation that repeats gives its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextvars import ContextVar

make_chance: ContextVar[Callable[[], random.Random]] = ContextVar(
    "kvcs_make_chance", default=random.Random
)
"""Makes a source of random numbers for whoever starts in the running task."""


def new_chance() -> random.Random:
    """A source of random numbers; not for anything that must stay secret."""
    return make_chance.get()()

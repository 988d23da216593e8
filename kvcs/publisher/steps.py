"""Long work in steps: all at once, in a thread, or on the event loop with turns for others."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Work that stops after each step and goes on when it is asked to; what it makes is returned."""

RUN_OCTETS: Final = 128 * 1024
"""Octets of one array that are copied in one go, if blocks are smaller; then they are hashed."""

STEP_OCTETS: Final = 1024 * 1024
"""Octets after which others may have a turn: copying and hashing them take a millisecond or two."""


def finished(steps: Steps[T]) -> T:
    """Do all that is left of some work, and return what it makes."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: T = end.value
            return made

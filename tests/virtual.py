"""Tests on virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from kvcs.testing.network import run


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on virtual time: its deadlines pass at once, and none because of the machine."""

    @wraps(test)
    def on_virtual_time(**arguments: Any) -> None:
        run(test(**arguments))

    return on_virtual_time

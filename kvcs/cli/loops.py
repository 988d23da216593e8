"""Which event loop the commands run on: uvloop where it is installed, unless told otherwise."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

from kvcs.errors import UsageError

VARIABLE: Final = "KVCS_EVENT_LOOP"
"""Environment variable that names the loop: ``asyncio``, ``uvloop`` or ``auto``."""

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def loop_factory() -> LoopFactory | None:
    """What makes the loop; None for asyncio's own.

    Raises:
        UsageError: the environment asks for a loop that is unknown or not installed.
    """
    wanted = os.environ.get(VARIABLE) or "auto"
    if wanted == "asyncio":
        return None
    if wanted not in ("auto", "uvloop"):
        raise UsageError(f"{VARIABLE} must be asyncio, uvloop or auto, not {wanted!r}")
    try:
        import uvloop
    except ImportError:
        if wanted == "auto":
            return None
        raise UsageError(
            f"{VARIABLE} asks for uvloop, which is not installed: pip install '.[uvloop]' in the"
            " folder of kvcs's source"
        ) from None
    return uvloop.new_event_loop

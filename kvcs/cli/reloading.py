"""SIGHUP of a command that listens: the issuers are read again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from kvcs.errors import FileError
from kvcs.observe import get_logger


class Listening(Protocol):
    """A relay, or a producer that listens."""

    def reload_issuers(self) -> None:
        """Read the issuers again."""


@asynccontextmanager
async def reloading(running: Listening) -> AsyncIterator[None]:
    """SIGHUP reads the issuers again; a file that is no ring leaves them as they were."""
    loop = asyncio.get_running_loop()

    def reload() -> None:
        try:
            running.reload_issuers()
        except FileError as exc:
            get_logger("kvcs.cli").error("issuers_not_read", reason=str(exc))

    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)

"""Notices streams that wait long for the peer's stream credit, and says so in the log."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

LONG_SECONDS: Final = 1.0
"""Streams wait while none could be opened for this long: the log warns."""


class StreamWait:
    """Watches one session's demand for streams. A warning comes once for each standstill."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: structlog.stdlib.BoundLogger) -> None:
        self._loop = loop
        self._log = log
        self._newest = -1
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = 0
        self._warned = False

    def sent(self, stream_id: int) -> None:
        """Octets go out on a unidirectional stream of ours; a new one means that credit came."""
        if stream_id > self._newest:
            self._newest = stream_id
            self.stop()

    def look(self, waiting: int) -> None:
        """Take how many streams wait for credit now."""
        self._waiting = waiting
        if not waiting:
            self.stop()
        elif self._timer is None and not self._warned:
            self._timer = self._loop.call_later(LONG_SECONDS, self._warn)

    def stop(self) -> None:
        """Nothing waits any more, or the session is over."""
        self._warned = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _warn(self) -> None:
        self._timer = None
        self._warned = True
        self._log.warning("streams_wait_for_credit", waiting=self._waiting, seconds=LONG_SECONDS)

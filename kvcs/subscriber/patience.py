"""How long a retrieval waits for a session, or for its publisher, to come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Patience:
    """Bounds interruptions, beside the deadline that bounds everything.

    One that follows another soon, before anything new has come, is the same one: a relay may take a
    retrieval up and send it away again, for as long as its publisher is gone.

    Args:
        seconds: how long; None waits until the deadline.
        over: called once when it is over.
    """

    def __init__(self, seconds: float | None, over: Callable[[], None]) -> None:
        self._seconds = seconds
        self._over = over
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        """When the interruption began."""
        self._progress = 0
        self._resumed_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def interrupted(self, progress: int) -> None:
        """Nobody serves the retrieval.

        Args:
            progress: Objects that are verified so far.
        """
        if self._seconds is None or self._timer is not None:
            return
        now = self._loop.time()
        lasted = self._resumed_at is not None and now - self._resumed_at >= self._seconds
        if self._since is None or lasted or progress != self._progress:
            self._since, self._progress = now, progress
        self._timer = self._loop.call_at(self._since + self._seconds, self._over)

    def resumed(self) -> None:
        """Somebody serves it again."""
        self._resumed_at = self._loop.time()
        self.stop()

    def stop(self) -> None:
        """Nothing is waited for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

"""Waits that end where nothing comes: one publication must not keep us from the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

MAX_DOUBLINGS: Final = 4
"""How long nothing may come doubles up to 16 times the first one."""


class Listening:
    """Waits for as long as something comes, and a little longer each time that nothing did.

    What was only slow has more time when it is asked the next time.

    Args:
        seconds: how long nothing may come at first.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._doublings = 0

    async def to(self, wait: Awaitable[object], octets: Callable[[], int]) -> bool:
        """Wait for something; it is cancelled where nothing comes.

        Args:
            wait: what is waited for.
            octets: how many have come so far.

        Returns:
            Whether it ended of itself.
        """
        loop = asyncio.get_running_loop()
        seconds = self._seconds * 2**self._doublings
        timer: asyncio.TimerHandle | None = None

        def look(before: int) -> None:
            nonlocal timer
            now = octets()
            if now == before:
                bound.reschedule(loop.time())
            else:
                timer = loop.call_later(seconds, look, now)

        try:
            async with asyncio.timeout(None) as bound:
                timer = loop.call_later(seconds, look, octets())
                try:
                    await wait
                finally:
                    if timer is not None:
                        timer.cancel()
        except TimeoutError:
            if not bound.expired():
                raise
            self._doublings = min(self._doublings + 1, MAX_DOUBLINGS)
            return False
        return True

"""The sessions over which a publication can be got, as they come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvcs.errors import ConnectionClosed
from kvcs.quic.connection import Connection


class Routes:
    """The sessions of a Subscriber, and those that replace them.

    Args:
        sessions: what `kvcs.connect` gave, the preferred one first.
    """

    def __init__(self, sessions: Sequence[Connection]) -> None:
        self._sessions = tuple(sessions)

    @property
    def usable(self) -> list[Connection]:
        """Sessions on which new requests may be made, in order of preference."""
        newest = dict.fromkeys(each.newest for each in self._sessions)
        usable = [each for each in newest if each.is_usable]
        if usable:
            return usable
        # One that is sent away and that nothing will replace is better than none.
        return [each for each in newest if each.is_open and each.link is None]

    @property
    def last(self) -> bool:
        """Whether one is there, or may still come."""
        return any(each.lasts for each in self._sessions)

    @property
    def replaced(self) -> bool:
        """Whether another session may follow one of them."""
        return any(each.link is not None and each.link.is_open for each in self._sessions)

    def error(self) -> ConnectionClosed:
        """Why there is none any more."""
        if not self._sessions:
            return ConnectionClosed("there is no session: only a fallback was given")
        return self._sessions[0].newest.close_error()

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever a session came, went or is sent away."""
        for each in self._sessions:
            if each.link is not None:
                each.link.on_change(callback)
            else:
                each.on_goaway(callback)
                each.on_closed(callback)

    def off_change(self, callback: Callable[[], None]) -> None:
        """Undo `on_change`."""
        for each in self._sessions:
            if each.link is not None:
                each.link.off_change(callback)
            else:
                each.off_goaway(callback)
                each.off_closed(callback)

    async def changed_from(self, sessions: Sequence[Connection], until: float) -> None:
        """Wait until others are usable than ``sessions``, or none will be, or the time is up."""
        changed = asyncio.Event()
        self.on_change(changed.set)
        try:
            async with asyncio.timeout_at(until):
                while self.last and self.usable == list(sessions):
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            pass
        finally:
            self.off_change(changed.set)

    async def wait(self) -> list[Connection]:
        """Wait until there is a usable session.

        Raises:
            ConnectionClosed: none comes any more.
        """
        changed = asyncio.Event()
        self.on_change(changed.set)
        try:
            while not (usable := self.usable):
                if not self.last:
                    raise self.error()
                changed.clear()
                await changed.wait()
            return usable
        finally:
            self.off_change(changed.set)

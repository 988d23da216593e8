"""How long a session is there, who needs it, and what follows it (MOQT §6.6.1, §9.2)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

from kvcs.errors import ConnectionClosed, UsageError
from kvcs.moqt import events

if TYPE_CHECKING:
    from kvcs.quic.link import Link


RelayTrust = Literal["trusted", "untrusted"]
"""Whether the relays between the ends may read what goes through them, and are believed."""


def check_relay_trust(relays: str) -> None:
    """Check what a caller says of its relays.

    Raises:
        UsageError: it is neither "trusted" nor "untrusted".
    """
    if relays not in get_args(RelayTrust):
        raise UsageError(f'relays is "trusted" or "untrusted", not {relays!r}')


class Tenure:
    """The part of a `Connection` that is about its end.

    Args:
        link: what replaces the session when it is lost, if something does.
    """

    def __init__(self, link: Link | None) -> None:
        self.link = link
        """What replaces the session when it is lost, if something does."""
        self.relays: RelayTrust = "trusted"
        """Whether the relays that it leads to may read what goes over it: "untrusted" ones get
        nothing that is not protected, and nothing else is taken from them."""
        self.goaway_received: events.GoawayReceived | None = None
        """The peer's GOAWAY for the session, once it came (§9.2)."""
        self._closed_event: events.SessionClosed | None = None
        self._on_closed: list[Callable[[], None]] = []
        self._on_goaway: list[Callable[[], None]] = []
        self._holders: set[object] = set()
        self._released = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether the session is not over."""
        return self._closed_event is None

    @property
    def lasts(self) -> bool:
        """Whether the session is open, or another one replaces it."""
        return self.is_open or (self.link is not None and self.link.is_open)

    async def gone(self) -> None:
        """Wait until the session is over, or sent away, and no other one follows it."""
        changed = asyncio.Event()
        if self.link is not None:
            self.link.on_change(changed.set)
        else:
            self.on_closed(changed.set)
            self.on_goaway(changed.set)
        try:
            while self.is_usable if self.link is None else self.link.is_open:
                changed.clear()
                await changed.wait()
        finally:
            if self.link is not None:
                self.link.off_change(changed.set)
            self.off_closed(changed.set)
            self.off_goaway(changed.set)

    async def pause(self, seconds: float) -> None:
        """Wait for so long; no longer than the session is there."""
        over = asyncio.Event()
        self.on_closed(over.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await over.wait()
        finally:
            self.off_closed(over.set)

    def close_error(self) -> ConnectionClosed:
        """Why the session is over, and none follows it, as the exception that waiters get."""
        if self.link is not None and not self.is_open and not self.link.is_open:
            return self.link.error()
        closed = self._closed_event
        if closed is None:
            return ConnectionClosed("the session is open")
        return ConnectionClosed(closed.reason, code=closed.code, by_peer=closed.by_peer)

    def check_open(self) -> None:
        """Raise `ConnectionClosed` when the session is over."""
        if not self.is_open:
            raise self.close_error()

    def on_closed(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when the session is over."""
        if not self.is_open:
            callback()
        else:
            self._on_closed.append(callback)

    def off_closed(self, callback: Callable[[], None]) -> None:
        """Undo `on_closed`."""
        if callback in self._on_closed:
            self._on_closed.remove(callback)

    def on_goaway(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once the peer says, or has said, that it will close the session."""
        if self.goaway_received is not None:
            callback()
        else:
            self._on_goaway.append(callback)

    def off_goaway(self, callback: Callable[[], None]) -> None:
        """Undo `on_goaway`."""
        if callback in self._on_goaway:
            self._on_goaway.remove(callback)

    @property
    def is_usable(self) -> bool:
        """Whether new requests may be made: it is open, and the peer does not send us away."""
        return self.is_open and self.goaway_received is None

    def hold(self, holder: object) -> None:
        """Note that ``holder`` still needs the session: who would replace it waits."""
        self._holders.add(holder)
        self._released.clear()

    def release(self, holder: object) -> None:
        """Undo `hold`; quiet where nothing is held."""
        self._holders.discard(holder)
        if not self._holders:
            self._released.set()

    @property
    def is_held(self) -> bool:
        """Whether anybody still needs the session."""
        return bool(self._holders) and self.is_open

    async def released(self) -> None:
        """Wait until nobody needs the session any more, or it is over."""
        while self.is_held:
            await self._released.wait()

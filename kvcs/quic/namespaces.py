"""Watching which namespaces a peer announces under a prefix (MOQT §4, §9.15).

Users of one session who ask for the same prefix, or for one below a prefix that is watched already,
share one SUBSCRIBE_NAMESPACE.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcs.errors import ConnectionClosed, Redirected, RequestError, UsageError
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.names import TrackNamespace, is_prefix, overlaps
from kvcs.quic.chance import new_chance
from kvcs.quic.reconnect import Moves, retry_seconds
from kvcs.quic.replies import refusal

if TYPE_CHECKING:
    from kvcs.quic.connection import Connection

OVERLAP_TRIES = 5
"""Tries of a SUBSCRIBE_NAMESPACE while a narrower one of ours is being cancelled."""

OVERLAP_PAUSE = 0.05
"""Seconds before the first such try again; doubles."""


RETRIES = 8
"""Tries of a SUBSCRIBE_NAMESPACE that is refused with a Retry Interval."""


class NamespaceWatch:
    """One user's view of the namespaces under a prefix."""

    def __init__(self, prefix: TrackNamespace) -> None:
        self.prefix = prefix
        self.namespaces: dict[TrackNamespace, int] = {}
        """Full namespaces that are announced now, with a number that grows with each."""
        self.error: Exception | None = None
        """Why nothing more will be heard, if that is so."""
        self.answered = asyncio.Event()
        """Set once the peer has accepted or refused."""
        self.changed = asyncio.Event()
        """Set on every change; whoever waits clears it."""
        self.on_note: Callable[[TrackNamespace, int | None], None] | None = None
        """Told of each announcement and withdrawal, as `note` is."""

    def note(self, namespace: TrackNamespace, number: int | None) -> None:
        """A namespace was announced as the ``number``-th, or withdrawn."""
        if not is_prefix(self.prefix, namespace):
            return
        if number is None:
            self.namespaces.pop(namespace, None)
        else:
            self.namespaces[namespace] = number
        if self.on_note is not None:
            self.on_note(namespace, number)
        self.changed.set()

    def fail(self, error: Exception) -> None:
        """Nothing more will be heard."""
        self.error = error
        self.answered.set()
        self.changed.set()


class _Shared:
    """One SUBSCRIBE_NAMESPACE and the watches that it serves."""

    def __init__(self, prefix: TrackNamespace) -> None:
        self.prefix = prefix
        self.request_id: int | None = None
        self.watches: list[NamespaceWatch] = []
        self.namespaces: dict[TrackNamespace, int] = {}
        self.answered = False
        self.serial = 0
        self.tries = 0


class Namespaces:
    """The namespace subscriptions of one session."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._shared: list[_Shared] = []
        self._chance = new_chance()
        self._moves = Moves()

    def watch(self, prefix: TrackNamespace) -> NamespaceWatch:
        """Watch a prefix; `release` the watch when it is no longer needed."""
        watch = NamespaceWatch(prefix)
        if not self._connection.is_open:
            watch.fail(self._connection.close_error())
            return watch
        for shared in self._shared:
            if is_prefix(shared.prefix, prefix):
                self._join(shared, watch)
                return watch
        wide = _Shared(prefix)
        for narrow in [shared for shared in self._shared if overlaps(shared.prefix, prefix)]:
            # Two SUBSCRIBE_NAMESPACEs of a session may not overlap (§4): the wide one serves.
            self._end(narrow)
            wide.watches += narrow.watches
            narrow.watches.clear()
        self._shared.append(wide)
        self._join(wide, watch)
        self._request(wide)
        return watch

    def release(self, watch: NamespaceWatch) -> None:
        """Forget a watch; the last one of a prefix ends its subscription."""
        for shared in list(self._shared):
            if watch in shared.watches:
                shared.watches.remove(watch)
                if not shared.watches:
                    self._end(shared)

    def _join(self, shared: _Shared, watch: NamespaceWatch) -> None:
        shared.watches.append(watch)
        for namespace, number in shared.namespaces.items():
            watch.note(namespace, number)
        if shared.answered:
            watch.answered.set()

    def _end(self, shared: _Shared) -> None:
        self._shared.remove(shared)
        if shared.request_id is not None:
            self._connection.cancel(shared.request_id)
            shared.request_id = None

    def _request(self, shared: _Shared) -> None:
        if shared not in self._shared:
            return
        if not self._connection.is_open:  # it closed while a try again was due
            self._fail(shared, self._connection.close_error())
            return
        try:
            request_id = self._connection.core.requester.subscribe_namespace(shared.prefix)
        except UsageError as exc:
            self._fail(shared, exc)  # too many wait for the peer: nobody would ever hear of it
            return
        shared.request_id = request_id
        self._connection.handle(request_id, lambda event: self._take(shared, event))

    def _take(self, shared: _Shared, event: events.Event) -> None:
        if isinstance(event, events.RequestAccepted):
            shared.answered = True
            for watch in shared.watches:
                watch.answered.set()
                watch.changed.set()
        elif isinstance(event, events.NamespaceAnnounced):
            shared.serial += 1
            self._note(shared, event.suffix, shared.serial)
        elif isinstance(event, events.NamespaceWithdrawn):
            self._note(shared, event.suffix, None)
        elif isinstance(event, events.RequestRefused):
            self._refused(shared, event)
        elif isinstance(event, events.GoawayReceived):
            self._moved(shared, event.new_session_uri)
        elif isinstance(event, events.RequestCancelled):
            self._fail(shared, RequestError("the peer ended the namespace subscription"))
        elif isinstance(event, events.SessionClosed):
            self._fail(
                shared, ConnectionClosed(event.reason, code=event.code, by_peer=event.by_peer)
            )

    def _note(self, shared: _Shared, suffix: TrackNamespace, number: int | None) -> None:
        namespace = (*shared.prefix, *suffix)
        if number is None:
            shared.namespaces.pop(namespace, None)
        else:
            shared.namespaces[namespace] = number
        for watch in list(shared.watches):
            watch.note(namespace, number)

    def _moved(self, shared: _Shared, uri: str) -> None:
        """The peer wants the subscription made elsewhere, or anew (§9.2)."""
        if shared.request_id is not None:
            self._connection.cancel(shared.request_id)
            shared.request_id = None
        if uri:
            self._fail(shared, Redirected("the peer sends it elsewhere", uri, shared.prefix))
            return
        for namespace in list(shared.namespaces):
            self._note(shared, namespace[len(shared.prefix) :], None)
        loop = asyncio.get_running_loop()
        pause = self._moves.pause(loop.time(), self._chance)
        if pause:
            loop.call_later(pause, self._request, shared)
        else:
            self._request(shared)

    def _refused(self, shared: _Shared, event: events.RequestRefused) -> None:
        error = event.error
        if error.error_code == RequestCode.PREFIX_OVERLAP and shared.tries < OVERLAP_TRIES:
            # The cancellation of our narrower subscription is still on its way.
            shared.request_id = None
            pause = OVERLAP_PAUSE * 2**shared.tries
            shared.tries += 1
            asyncio.get_running_loop().call_later(pause, self._request, shared)
            return
        refused = refusal(error)
        if refused.retry_after_ms is not None and shared.tries < RETRIES:
            shared.request_id = None
            shared.tries += 1
            pause = retry_seconds(refused.retry_after_ms, self._chance)
            asyncio.get_running_loop().call_later(pause, self._request, shared)
            return
        self._fail(shared, refused)

    def _fail(self, shared: _Shared, error: Exception) -> None:
        if shared in self._shared:
            self._shared.remove(shared)
        for watch in list(shared.watches):
            watch.fail(error)

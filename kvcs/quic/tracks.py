"""Tracks that a peer publishes: SUBSCRIBE_TRACKS, and the PUBLISHes that it leads to (MOQT §9.18).

::

    watch = connection.tracks.watch((b"news",))
    async for offered in watch:
        offered.accept(handler)          # Objects come to ``handler`` from now on
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.names import FullTrackName, TrackNamespace, check_ours, is_prefix
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.quic.replies import refusal

if TYPE_CHECKING:
    from kvcs.quic.answers import Handler, PeerRequest
    from kvcs.quic.connection import Connection

MAX_UNANSWERED = 1024
"""PUBLISHes that wait for their user; more are refused with EXCESSIVE_LOAD."""

MAX_SKIPPED = 1024
"""Skipped Tracks that are remembered; the oldest are forgotten."""


class OfferedTrack:
    """One PUBLISH of the peer that has no answer yet."""

    def __init__(self, connection: Connection, event: events.PublishReceived) -> None:
        self.connection = connection
        """The session that it came on."""
        self._event = event

    @property
    def request_id(self) -> int:
        """Request ID of the PUBLISH, and of the subscription that it begins."""
        return self._event.request_id

    @property
    def name(self) -> FullTrackName:
        """The Track."""
        return self._event.full_track_name

    @property
    def parameters(self) -> Parameters:
        """First settings of the subscription, and the Largest Object."""
        return self._event.parameters

    @property
    def properties(self) -> KeyValues:
        """Track Properties."""
        return self._event.track_properties

    def accept(self, handler: Handler, *, expires_ms: int | None = None) -> int:
        """Take the Track: ``handler`` gets every event of it, those of early Objects first.

        `Requester.update` of the core changes the subscription, `Connection.cancel` ends it.

        Returns:
            The Request ID.
        """
        self.connection.off_cancelled(self.request_id)
        self.connection.handle(self.request_id, handler)
        self.connection.core.responder.accept_publish(self.request_id, expires_ms=expires_ms)
        return self.request_id

    def refuse(self, error: RequestError | None = None) -> None:
        """Do not take it: UNINTERESTED, or what ``error`` says."""
        self.connection.off_cancelled(self.request_id)
        error = error or RequestError("not interested", RequestCode.UNINTERESTED)
        self.connection.core.responder.refuse(self.request_id, error)


class TrackWatch:
    """The Tracks that a peer publishes below a prefix; an async iterator of `OfferedTrack`.

    It ends where the peer refuses or ends the request (`RequestError`), with the session
    (`ConnectionClosed`), or with `close`.
    """

    def __init__(self, tracks: Tracks, prefix: TrackNamespace) -> None:
        self.prefix = prefix
        self.request_id: int | None = None
        """Of the SUBSCRIBE_TRACKS."""
        self.skipped: deque[FullTrackName] = deque(maxlen=MAX_SKIPPED)
        """Tracks that the peer will not PUBLISH; they can be subscribed to (§9.19)."""
        self.answered = asyncio.Event()
        """Set once the peer has accepted or refused."""
        self.error: Exception | None = None
        """Why nothing more comes, if that is so."""
        self._tracks = tracks
        self._offered: deque[OfferedTrack] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def __aiter__(self) -> AsyncIterator[OfferedTrack]:
        return self

    async def __anext__(self) -> OfferedTrack:
        while not self._offered:
            if self._closed:
                raise StopAsyncIteration
            if self.error is not None:
                raise self.error
            self._changed.clear()
            await self._changed.wait()
        return self._offered.popleft()

    def close(self) -> None:
        """End the request; what was accepted goes on, what waits is refused."""
        if not self._closed:
            self._closed = True
            self._tracks.end(self)
            while self._offered:
                self._offered.popleft().refuse()
            self._changed.set()

    def take(self, offered: OfferedTrack) -> None:
        """A PUBLISH below the prefix."""
        if len(self._offered) >= MAX_UNANSWERED:
            offered.refuse(RequestError("too many tracks wait", RequestCode.EXCESSIVE_LOAD, 1000))
            return
        self._offered.append(offered)
        self._changed.set()

    def forget(self, request_id: int) -> None:
        """The peer has taken a PUBLISH back that waits here."""
        self._offered = deque(one for one in self._offered if one.request_id != request_id)

    def event(self, event: events.Event, error: Exception | None) -> None:
        """An event of the SUBSCRIBE_TRACKS; ``error`` where it ends it."""
        if isinstance(event, events.TrackSkipped):
            self.skipped.append(event.full_track_name)
        elif isinstance(event, events.RequestAccepted):
            self.answered.set()
        if error is not None:
            self.error = error
            self.answered.set()
        self._changed.set()


class Tracks:
    """SUBSCRIBE_TRACKS of one session.

    Args:
        connection: the session.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._watches: list[TrackWatch] = []

    def watch(self, prefix: TrackNamespace, parameters: Parameters | None = None) -> TrackWatch:
        """SUBSCRIBE_TRACKS: be offered every Track below a prefix, now and later.

        Args:
            prefix: of their namespaces.
            parameters: first settings of the subscriptions; TRACK_PROPERTY_FILTER selects Tracks.

        Raises:
            UsageError: the prefix overlaps one that is watched on this session, or cannot be sent.
            ConnectionClosed: the session is over.
        """
        connection = self._connection
        check_ours(prefix)
        connection.check_open()
        watch = TrackWatch(self, prefix)
        watch.request_id = connection.core.requester.subscribe_tracks(prefix, parameters)
        connection.handle(watch.request_id, lambda event: self._event(watch, event))
        if not self._watches:
            connection.answer_with(self._answer)
        self._watches.append(watch)
        return watch

    def wants(self, event: PeerRequest) -> bool:
        """Whether a request of the peer brings what a watch has asked it for."""
        if not isinstance(event, events.PublishReceived):
            return False
        namespace = event.full_track_name.namespace
        return any(is_prefix(watch.prefix, namespace) for watch in self._watches)

    def end(self, watch: TrackWatch) -> None:
        """A watch is not wanted any more."""
        if watch in self._watches:
            self._watches.remove(watch)
            if not self._watches:
                self._connection.stop_answering(self._answer)
        if watch.request_id is not None:
            self._connection.cancel(watch.request_id)

    def _event(self, watch: TrackWatch, event: events.Event) -> None:
        error: Exception | None = None
        if isinstance(event, events.RequestRefused):
            error = refusal(event.error)
        elif isinstance(event, events.RequestCancelled):
            error = RequestError("the peer ended the subscription to tracks")
        elif isinstance(event, events.SessionClosed):
            error = self._connection.close_error()
        watch.event(event, error)

    def _answer(self, connection: Connection, event: PeerRequest) -> bool:
        if not isinstance(event, events.PublishReceived):
            return False
        namespace, request_id = event.full_track_name.namespace, event.request_id
        matching = (watch for watch in self._watches if is_prefix(watch.prefix, namespace))
        watch = next(matching, None)
        if watch is None:
            return False
        connection.on_cancelled(request_id, lambda _: watch.forget(request_id))
        watch.take(OfferedTrack(connection, event))
        return True

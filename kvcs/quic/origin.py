"""Serves Tracks that this process publishes to any number of sessions (MOQT §3, §4)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvcs.errors import ConnectionClosed, RequestError, UsageError
from kvcs.moqt import events
from kvcs.moqt.errors import DoesNotExist
from kvcs.moqt.names import FullTrackName, TrackNamespace, is_prefix
from kvcs.moqt.store import Track
from kvcs.observe import get_logger

if TYPE_CHECKING:
    from kvcs.quic.connection import Connection, PeerRequest

_log = get_logger("kvcs.quic")


class Origin:
    """Tracks and namespaces of one process, offered on every session that is attached.

    A Track is found by its Full Track Name; a namespace that was added is announced with
    PUBLISH_NAMESPACE on every session and named to whoever subscribes to a prefix of it.
    """

    def __init__(self) -> None:
        self._tracks: dict[FullTrackName, Track] = {}
        self._namespaces: dict[TrackNamespace, None] = {}
        """In the order of their announcement, which tells a subscriber the latest one."""
        self._connections: dict[Connection, _Attached] = {}

    @property
    def connections(self) -> tuple[Connection, ...]:
        """Sessions that are attached."""
        return tuple(self._connections)

    def attach(self, connection: Connection) -> None:
        """Offer what is here on a session too, until it closes."""
        if connection in self._connections or not connection.is_open:
            return
        self._connections[connection] = _Attached()
        connection.answer_with(self._answer)
        connection.on_closed(lambda: self._detach(connection))
        for namespace in self._namespaces:
            self._offer(connection, namespace)

    def _detach(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        connection.stop_answering(self._answer)

    # Tracks

    def add_track(self, track: Track) -> None:
        """Serve a Track.

        Raises:
            UsageError: there is one of that name.
        """
        if track.name in self._tracks:
            raise UsageError(f"the track {track.name} is published already")
        self._tracks[track.name] = track

    def remove_track(self, name: FullTrackName) -> None:
        """Serve a Track no longer; running subscriptions go on."""
        self._tracks.pop(name, None)

    # Namespaces

    async def add_namespace(self, namespace: TrackNamespace) -> None:
        """Announce a namespace on every session and wait until each has answered.

        Raises:
            RequestError: every session refused it.
            ConnectionClosed: there is no session any more.

        Cancelling withdraws it.
        """
        if not self._connections:
            raise ConnectionClosed("there is no session to announce the namespace on")
        self._namespaces[namespace] = None
        self._name_to_subscribers(namespace)
        try:
            # All at once: an answer that comes before it is waited for would be lost.
            answers = await asyncio.gather(
                *(
                    connection.reply(self._announce(connection, namespace))
                    for connection in self._connections
                ),
                return_exceptions=True,
            )
            failures = [answer for answer in answers if isinstance(answer, BaseException)]
            for failure in failures:
                if not isinstance(failure, RequestError | ConnectionClosed):
                    raise failure
            if len(failures) == len(answers):
                raise failures[0]
        except BaseException:
            self.remove_namespace(namespace)
            raise

    def offer_namespace(self, namespace: TrackNamespace) -> None:
        """Announce a namespace without waiting: a listening server, whose peers may refuse."""
        self._namespaces[namespace] = None
        self._name_to_subscribers(namespace)
        for connection in self._connections:
            self._offer(connection, namespace)

    def remove_namespace(self, namespace: TrackNamespace) -> None:
        """Withdraw a namespace (§6.4.2.3, §9.17)."""
        self._namespaces.pop(namespace, None)
        for connection, attached in self._connections.items():
            request_id = attached.announced.pop(namespace, None)
            if request_id is not None:
                connection.cancel(request_id)
            for subscription, prefix in attached.subscriptions.items():
                if is_prefix(prefix, namespace):
                    suffix = namespace[len(prefix) :]
                    connection.core.responder.namespace_done(subscription, suffix)

    def _announce(self, connection: Connection, namespace: TrackNamespace) -> int:
        request_id = connection.core.requester.publish_namespace(namespace)
        self._connections[connection].announced[namespace] = request_id
        return request_id

    def _offer(self, connection: Connection, namespace: TrackNamespace) -> None:
        request_id = self._announce(connection, namespace)

        def note(event: events.Event) -> None:
            if isinstance(event, events.RequestRefused):
                _log.debug("namespace_refused", peer=connection.peer, code=event.error.error_code)

        connection.handle(request_id, note)

    def _name_to_subscribers(self, namespace: TrackNamespace) -> None:
        for connection, attached in self._connections.items():
            for request_id, prefix in attached.subscriptions.items():
                if is_prefix(prefix, namespace):
                    connection.core.responder.namespace(request_id, namespace[len(prefix) :])

    # Requests of the peer

    def _answer(self, connection: Connection, event: PeerRequest) -> bool:
        responder = connection.core.responder
        if isinstance(event, events.SubscribeNamespaceReceived):
            self._answer_namespaces(connection, event)
            return True
        if isinstance(event, events.PublishNamespaceReceived):
            return False
        name = event.full_track_name
        track = self._tracks.get(name)
        if track is None:
            if name.namespace not in self._namespaces:
                return False
            responder.refuse(event.request_id, DoesNotExist("no such track in this namespace"))
        elif isinstance(event, events.SubscribeReceived):
            responder.accept_subscribe(event.request_id, track, connection.now)
        elif isinstance(event, events.FetchReceived):
            responder.accept_fetch(event.request_id, track, connection.now)
        else:
            responder.answer_track_status(event.request_id, track)
        return True

    def _answer_namespaces(
        self, connection: Connection, event: events.SubscribeNamespaceReceived
    ) -> None:
        responder = connection.core.responder
        subscriptions = self._connections[connection].subscriptions
        prefix = event.track_namespace_prefix
        subscriptions[event.request_id] = prefix
        connection.on_cancelled(event.request_id, lambda _: _drop(subscriptions, event.request_id))
        responder.accept(event.request_id)
        for namespace in self._namespaces:
            if is_prefix(prefix, namespace):
                responder.namespace(event.request_id, namespace[len(prefix) :])


class _Attached:
    """What one session was told and asked for."""

    def __init__(self) -> None:
        self.announced: dict[TrackNamespace, int] = {}
        self.subscriptions: dict[int, TrackNamespace] = {}


def _drop(table: dict[int, TrackNamespace], request_id: int) -> None:
    table.pop(request_id, None)

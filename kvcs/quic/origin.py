"""Serves Tracks that this process publishes to any number of sessions (MOQT §3, §4)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcs.errors import ConnectionClosed, RequestError, UsageError
from kvcs.moqt import events
from kvcs.moqt.errors import DoesNotExist, RequestCode
from kvcs.moqt.names import FullTrackName, TrackNamespace, check_our_track, check_ours, is_prefix
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.track.store import Track
from kvcs.quic.announcements import Announcements
from kvcs.quic.pushing import Pushes

if TYPE_CHECKING:
    from kvcs.quic.connection import Connection, PeerRequest


class Origin:
    """Tracks and namespaces of one process, offered on every session that is attached.

    A Track is found by its Full Track Name; a namespace that was added is announced with
    PUBLISH_NAMESPACE on every session and named to whoever subscribes to a prefix of it.

    Args:
        returns: whether another session may come when all are lost.
    """

    def __init__(self, returns: Callable[[], bool] = lambda: False) -> None:
        self._returns = returns
        self._tracks: dict[FullTrackName, Track] = {}
        self._namespaces: dict[TrackNamespace, None] = {}
        """In the order of their announcement, which tells a subscriber the latest one."""
        self._connections: dict[Connection, _Attached] = {}
        self._waited_for: set[TrackNamespace] = set()
        """Namespaces whose answer somebody waits for, whatever session gives it."""
        self._came: dict[asyncio.Event, None] = {}
        """Set when a session came, or none will come; whoever waits has one of its own. In order:
        a set's would be another one in each run."""
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks of sessions that are over; each leaves when it has ended."""

    @property
    def connections(self) -> tuple[Connection, ...]:
        """Sessions that are attached."""
        return tuple(self._connections)

    def attach(self, connection: Connection) -> None:
        """Offer what is here on a session too, until it closes."""
        if self._adopt(connection):
            for namespace in self._namespaces:
                if namespace not in self._waited_for:
                    self._connections[connection].announcements.offer(namespace)
            self._tell_came()

    async def answered(self, connection: Connection) -> None:
        """Wait until a session has answered what was offered when it was attached."""
        attached = self._connections.get(connection)
        if attached is not None:
            await attached.announcements.answered()

    def leave(self, connection: Connection) -> None:
        """Withdraw everything on one session; what its peer has asked for goes on.

        Who waits for the answer to an announcement there waits for that of another session.
        """
        attached = self._connections.get(connection)
        if attached is not None:
            for namespace in attached.announcements.namespaces:
                attached.announcements.withdraw(namespace, RequestCode.GOING_AWAY)

    def nothing_returns(self) -> None:
        """No session will be attached any more: who waits for one looks again."""
        self._tell_came()

    def _tell_came(self) -> None:
        for event in self._came:
            event.set()

    async def close(self) -> None:
        """Wait until what the sessions have left behind has ended."""
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _adopt(self, connection: Connection) -> bool:
        """Answer a session's requests; False where that is done already, or it is over."""
        if connection in self._connections or not connection.is_open:
            return False
        self._connections[connection] = _Attached(
            Announcements(self, connection), Pushes(connection)
        )
        connection.answer_with(self._answer)
        connection.on_closed(lambda: self._detach(connection))
        return True

    def _detach(self, connection: Connection) -> None:
        attached = self._connections.pop(connection, None)
        connection.stop_answering(self._answer)
        if attached is None:
            return
        for task in attached.announcements.stop():
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        for namespace in attached.redirected:
            self._offer_again(namespace)

    def _offer_again(self, namespace: TrackNamespace) -> None:
        """What was announced elsewhere alone, and is no more, is announced on the others again."""
        everywhere = [each.announcements for each in self._connections.values()]
        if namespace in self._namespaces and not any(namespace in each for each in everywhere):
            for announcements in everywhere:
                announcements.offer(namespace)

    # Tracks

    def add_track(self, track: Track) -> None:
        """Serve a Track.

        Raises:
            UsageError: there is one of that name, or it has a name that cannot be sent.
        """
        check_our_track(track.name)
        if track.name in self._tracks:
            raise UsageError(f"the track {track.name} is published already")
        self._tracks[track.name] = track
        for attached in self._connections.values():
            attached.pushes.offer(track)

    async def push_track(self, name: FullTrackName, parameters: Parameters | None = None) -> None:
        """PUBLISH a Track that is served here on every session, though nobody asked (MOQT §9.8).

        Args:
            name: of the Track.
            parameters: first settings of the subscriptions; with FORWARD 0 nothing is sent before a
                peer wants it.

        Raises:
            UsageError: there is no such Track here.
            RequestError: every session refused it.
            ConnectionClosed: there is no session.

        Cancelling takes it back where it has no answer yet.
        """
        track = self._tracks.get(name)
        if track is None:
            raise UsageError(f"the track {name} is not published here")
        answers = await asyncio.gather(
            *(
                connection.reply(attached.pushes.publish(track, parameters))
                for connection, attached in self._connections.items()
                if connection.may_hear(name.namespace)
            ),
            return_exceptions=True,
        )
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        for failure in failures:
            if not isinstance(failure, RequestError | ConnectionClosed):
                raise failure
        if not answers:
            raise ConnectionClosed("there is no session to publish the track on")
        if len(failures) == len(answers):
            raise failures[0]

    def remove_track(self, name: FullTrackName) -> None:
        """Serve a Track no longer; running subscriptions go on."""
        self._tracks.pop(name, None)

    # Namespaces

    async def add_namespace(self, namespace: TrackNamespace) -> None:
        """Announce a namespace on every session and wait until each has answered.

        Where every session is lost meanwhile and one may come back, it waits for that one's answer.

        Raises:
            RequestError: every session refused it.
            ConnectionClosed: there is no session any more.
            UsageError: it cannot be sent.

        Cancelling withdraws it.
        """
        check_ours(namespace)
        self._namespaces[namespace] = None
        self._name_to_subscribers(namespace)
        self._waited_for.add(namespace)
        came = asyncio.Event()
        self._came[came] = None
        asked = set(self._connections)
        try:
            while not await self._announce_everywhere(namespace):
                if not self._returns():
                    raise ConnectionClosed("there is no session to announce the namespace on")
                await came.wait()
                came.clear()
                asked = set(self._connections)
        except BaseException:
            self.remove_namespace(namespace)
            raise
        finally:
            self._waited_for.discard(namespace)
            self._came.pop(came, None)
        for connection, attached in self._connections.items():
            # One that came before the others had answered: they may be about to go.
            if connection not in asked and namespace not in attached.announcements:
                attached.announcements.offer(namespace)

    async def _announce_everywhere(self, namespace: TrackNamespace) -> bool:
        """Announce on every session at once; whether any has accepted.

        Raises:
            RequestError: all that are left refused it.
            ConnectionClosed: all were lost, and none comes back.
        """
        sessions = self._connections
        # One that sends us away counts only where there is no other.
        usable = [each for session, each in sessions.items() if session.is_usable]
        answers = await asyncio.gather(
            *(each.announcements.announce(namespace) for each in usable or sessions.values()),
            return_exceptions=True,
        )
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        for failure in failures:
            if not isinstance(failure, RequestError | ConnectionClosed):
                raise failure
        if len(failures) < len(answers):
            return True
        for failure in failures:
            if not self._returns() or not _is_passing(failure):
                raise failure
        return False

    async def announce_on(
        self, connection: Connection, namespace: TrackNamespace, hops: int = 0
    ) -> None:
        """Announce one namespace on a session that a redirect names.

        Raises:
            RequestError: it was refused there.
            ConnectionClosed: the session ended.
        """
        self._adopt(connection)
        connection.check_open()
        self._connections[connection].redirected[namespace] = None
        await self._connections[connection].announcements.announce(namespace, hops)
        if namespace not in self._namespaces:  # it was withdrawn meanwhile
            self._connections[connection].announcements.withdraw(namespace)

    def offer_namespace(self, namespace: TrackNamespace) -> None:
        """Announce a namespace without waiting: a listening server, whose peers may refuse.

        Raises:
            UsageError: it cannot be sent.
        """
        check_ours(namespace)
        self._namespaces[namespace] = None
        self._name_to_subscribers(namespace)
        for attached in self._connections.values():
            attached.announcements.offer(namespace)

    def remove_namespace(self, namespace: TrackNamespace) -> None:
        """Withdraw a namespace (§6.4.2.3, §9.17)."""
        self._namespaces.pop(namespace, None)
        for connection, attached in self._connections.items():
            attached.redirected.pop(namespace, None)
            attached.announcements.withdraw(namespace)
            for subscription, prefix in attached.subscriptions.items():
                if is_prefix(prefix, namespace):
                    suffix = namespace[len(prefix) :]
                    connection.core.responder.namespace_done(subscription, suffix)

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
        if isinstance(event, events.SubscribeTracksReceived):
            self._connections[connection].pushes.accept(event, self._tracks.values())
            return True
        if not isinstance(event, _FOR_TRACKS):
            return False
        name = event.full_track_name
        track = self._tracks.get(name)
        if track is None:
            if name.namespace not in self._namespaces:
                return False
            responder.refuse(event.request_id, DoesNotExist("no such track in this namespace"))
        elif isinstance(event, events.SubscribeReceived):
            responder.accept_subscribe(
                event.request_id,
                track,
                connection.now,
                expires_ms=connection.expires_ms(event.request_id),
            )
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
        connection.on_update(event.request_id, lambda update: self._moved(connection, update))
        responder.accept(event.request_id, expires_ms=connection.expires_ms(event.request_id))
        self._name_all(connection, event.request_id, prefix)

    def _moved(self, connection: Connection, update: events.RequestUpdateReceived) -> None:
        """A SUBSCRIBE_NAMESPACE was updated: below another prefix everything is named anew."""
        connection.core.responder.accept_update(
            update.request_id,
            update.update_id,
            expires_ms=connection.expires_ms(update.request_id),
        )
        prefix: TrackNamespace | None = update.parameters.get(ParameterType.TRACK_NAMESPACE_PREFIX)
        attached = self._connections.get(connection)
        if prefix is not None and attached is not None:
            attached.subscriptions[update.request_id] = prefix
            self._name_all(connection, update.request_id, prefix)

    def _name_all(self, connection: Connection, request_id: int, prefix: TrackNamespace) -> None:
        for namespace in self._namespaces:
            if is_prefix(prefix, namespace):
                connection.core.responder.namespace(request_id, namespace[len(prefix) :])


_FOR_TRACKS = (events.SubscribeReceived, events.FetchReceived, events.TrackStatusReceived)
"""Requests for one Track."""


def _is_passing(failure: BaseException) -> bool:
    """Whether an announcement failed because its session ends: another one may follow."""
    if isinstance(failure, RequestError):
        return failure.code == RequestCode.GOING_AWAY
    return isinstance(failure, ConnectionClosed)


class _Attached:
    """What one session was told and asked for."""

    def __init__(self, announcements: Announcements, pushes: Pushes) -> None:
        self.announcements = announcements
        self.pushes = pushes
        self.redirected: dict[TrackNamespace, None] = {}
        """Namespaces that another session's peer has sent here."""
        self.subscriptions: dict[int, TrackNamespace] = {}


def _drop(table: dict[int, TrackNamespace], request_id: int) -> None:
    table.pop(request_id, None)

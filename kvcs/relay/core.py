"""The relay without its I/O: sessions and their events in, requests and answers out (MOQT §7).

`RelayCore` joins many session cores. The shell tells it of every session and every event, and calls
`receive_timer` when `next_timer` is due; everything it does is a command to one of the sessions.
It never opens a payload.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import DoesNotExist, NotSupported, RequestCode
from kvcs.moqt.names import FullTrackName, TrackNamespace, is_prefix, namespace_text
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.session import Session
from kvcs.relay.cache import RETRY_MS, CachedTrack, RelayCache
from kvcs.relay.namespaces import NamespaceTable, Notice, Place
from kvcs.relay.policy import check_announcement, check_interest
from kvcs.relay.settings import RelayLimits
from kvcs.relay.stats import Fact, RelayStats, Report
from kvcs.relay.timers import Callback, Timer, Timers
from kvcs.relay.tracks import RelayTrack, StreamEvent
from kvcs.relay.upstream import Ask, Waiting

MAX_REPORTS = 4096
"""Lines for the log that wait to be taken; the oldest are dropped."""


@dataclass(slots=True)
class _Peer:
    """One session, as the relay sees it."""

    core: Session
    opened_at: float
    announced: set[int] = field(default_factory=set)
    """Request IDs of its PUBLISH_NAMESPACEs."""

    interests: set[int] = field(default_factory=set)
    """Request IDs of its SUBSCRIBE_NAMESPACEs."""

    downstream: dict[int, RelayTrack] = field(default_factory=dict)
    """Its SUBSCRIBEs, FETCHes and TRACK_STATUSes, and their Tracks."""

    upstream: dict[int, RelayTrack] = field(default_factory=dict)
    """Requests that we made on it, and their Tracks."""

    banned: set[FullTrackName] = field(default_factory=set)
    """Tracks of which it sent what is malformed."""

    going_away: bool = False
    fetching: int = 0
    """FETCHes of ours that run on it."""

    queue: deque[Callback] = field(default_factory=deque)
    """FETCHes of ours that wait for their turn."""

    starting: bool = False
    """Whether they are being started."""

    requests: int = 0
    """Requests it has made so far."""


class RelayCore:
    """Routes announcements, subscriptions, fetches and Objects between sessions.

    Args:
        limits: see `RelayLimits`.
        on_wake: called when `next_timer` may be earlier than it was, outside of an input.
    """

    def __init__(
        self, limits: RelayLimits | None = None, on_wake: Callable[[], None] | None = None
    ) -> None:
        self.limits = RelayLimits() if limits is None else limits
        self.stats = RelayStats()
        self.cache = RelayCache(
            self.limits.cache_octets,
            self.limits.max_tracks,
            self._in_use,
            self.stats,
            self._let_go,
        )
        self._on_wake = on_wake
        self._peers: dict[int, _Peer] = {}
        self._namespaces = NamespaceTable()
        self._tracks: dict[FullTrackName, RelayTrack] = {}
        self._names: list[FullTrackName] = []
        """Keys of `_tracks` in order: those below a namespace stand together."""
        self._timers = Timers()
        self._soon: list[Callback] = []
        self._reports: deque[Report] = deque(maxlen=MAX_REPORTS)

    # Inputs

    def session_opened(self, key: int, core: Session, now: float) -> None:
        """A session is there; ``key`` names it from now on and is never used again."""
        self._peers[key] = _Peer(core, now)
        self.stats.sessions_total += 1

    def event(self, key: int, event: events.Event, now: float) -> None:
        """An event of a session."""
        peer = self._peers.get(key)
        if peer is None:
            return
        if isinstance(event, StreamEvent):
            track = peer.upstream.get(event.request_id)
            if track is not None:
                track.stream_event(key, event, now)
            if self._soon:
                self._run_soon(now)
            return
        self.cache.receive_timer(now)
        if isinstance(event, events.SessionClosed):
            self.session_closed(key, event, now)
        elif isinstance(event, events.GoawayReceived):
            peer.going_away = peer.going_away or event.request_id is None
        elif isinstance(event, events.SessionEstablished):
            pass
        elif isinstance(event, _REQUESTS):
            peer.requests += 1
            self._request(key, peer, event, now)
        elif isinstance(event, events.PublishReceived | events.SubscribeTracksReceived):
            peer.core.responder.refuse(event.request_id, NotSupported("not supported here"))
        elif isinstance(event, events.RequestUpdateReceived):
            peer.core.responder.accept_update(event.request_id, event.update_id)
        elif isinstance(event, events.RequestCancelled) and not event.ours:
            self._cancelled(Place(key, event.request_id), peer, now)
        else:
            track = peer.upstream.get(event.request_id)
            if track is not None:
                track.event(Place(key, event.request_id), event, now)
        self._run_soon(now)

    def session_closed(self, key: int, closed: events.SessionClosed, now: float) -> None:
        """A session is over: its announcements, requests and what it brought end with it."""
        peer = self._peers.pop(key, None)
        if peer is None:
            return
        for request_id in peer.announced:
            self._withdraw(Place(key, request_id))
        for request_id in peer.interests:
            self._namespaces.unsubscribe(Place(key, request_id))
        for request_id, track in list(peer.downstream.items()):
            track.downstream_gone(Place(key, request_id), now)
        for track in dict.fromkeys(peer.upstream.values()):
            track.session_lost(key, now)
        for start in peer.queue:
            start(now)
        self.report(
            "session_ended",
            session=key,
            code=None if closed.code is None else int(closed.code),
            reason=closed.reason,
            by_peer=closed.by_peer,
            seconds=round(now - peer.opened_at, 3),
            requests=peer.requests,
        )
        self._run_soon(now)

    def receive_timer(self, now: float) -> None:
        """`next_timer` is due."""
        self.cache.receive_timer(now)
        self._timers.run(now)
        self._run_soon(now)

    # Outputs

    def next_timer(self) -> float | None:
        """When `receive_timer` wants to be called; a time that has passed means at once."""
        if self._soon:
            return 0.0
        times = (self._timers.next(), self.cache.next_timer())
        return min((time for time in times if time is not None), default=None)

    def next_report(self) -> Report | None:
        """The oldest line for the log that was not taken yet."""
        return self._reports.popleft() if self._reports else None

    def snapshot(self) -> RelayStats:
        """The counters, with the gauges of now."""
        stats = self.stats
        stats.sessions = len(self._peers)
        stats.namespaces = len(self._namespaces)
        stats.tracks = len(self.cache)
        stats.cache_octets = self.cache.octets
        stats.objects_out, stats.octets_out = self.cache.sent
        return stats

    # Hub

    def session(self, key: int) -> Session | None:
        """An open session by its key."""
        peer = self._peers.get(key)
        return None if peer is None or peer.core.closed else peer.core

    def publishers(self, name: FullTrackName) -> list[int]:
        """Sessions that announced a prefix of the Track's namespace and may be asked."""
        found: list[int] = []
        for key in self._namespaces.publishers(name.namespace):
            peer = self._peers.get(key)
            if peer is None or peer.core.closed or peer.going_away or name in peer.banned:
                continue
            found.append(key)
        return found

    def ban(self, key: int, name: FullTrackName) -> None:
        """Never ask a session for a Track again."""
        peer = self._peers.get(key)
        if peer is not None and len(peer.banned) < self.limits.max_tracks:
            peer.banned.add(name)

    def bind(self, place: Place, track: RelayTrack) -> None:
        """Events of a request of ours concern ``track``."""
        peer = self._peers.get(place.session)
        if peer is not None:
            peer.upstream[place.request_id] = track

    def unbind(self, place: Place) -> None:
        """A request, of ours or of the peer, is over."""
        peer = self._peers.get(place.session)
        if peer is not None:
            peer.upstream.pop(place.request_id, None)
            peer.downstream.pop(place.request_id, None)

    def at(self, when: float, callback: Callback) -> Timer:
        """Call ``callback`` with the time, at ``when`` or soon after, unless it is cancelled."""
        before = self._timers.next()
        timer = self._timers.at(when, callback)
        if before is None or when < before:
            self._wake()
        return timer

    def soon(self, callback: Callback) -> None:
        """Call ``callback`` with the time, with the next input or timer."""
        self._soon.append(callback)
        self._wake()

    def take_slot(self, key: int, start: Callback, now: float) -> None:
        """Call ``start`` once a FETCH may run on a session."""
        peer = self._peers.get(key)
        if peer is None:
            start(now)
        elif peer.fetching < self.limits.max_upstream_fetches:
            peer.fetching += 1
            start(now)
        else:
            peer.queue.append(start)

    def free_slot(self, key: int, now: float) -> None:
        """A FETCH on a session has ended; the next one begins."""
        peer = self._peers.get(key)
        if peer is None:
            return
        peer.fetching -= 1
        if peer.starting:
            return  # one that was started has ended at once: the loop below goes on
        peer.starting = True
        try:
            while peer.queue and peer.fetching < self.limits.max_upstream_fetches:
                peer.fetching += 1
                peer.queue.popleft()(now)
        finally:
            peer.starting = False

    def leave_queue(self, key: int, start: Callback) -> None:
        """A FETCH that waits for its turn is not wanted any more; quiet where it has begun."""
        peer = self._peers.get(key)
        if peer is not None and start in peer.queue:
            peer.queue.remove(start)

    def reopen(self, name: FullTrackName) -> CachedTrack:
        """Begin a Track anew."""
        self.cache.drop(name)
        return self.cache.open(name)

    def release(self, track: RelayTrack) -> None:
        """Nobody needs a Track any more."""
        if self._tracks.get(track.name) is track:
            del self._tracks[track.name]
            del self._names[bisect_left(self._names, track.name)]
            self.cache.drop_if_empty(track.name)

    def report(self, event: str, **facts: Fact) -> None:
        """Write a line to the log."""
        self._reports.append(Report(event, facts))

    # Inner workings: requests of peers

    def _request(self, key: int, peer: _Peer, event: _Request, now: float) -> None:
        place = Place(key, event.request_id)
        try:
            if isinstance(event, events.PublishNamespaceReceived):
                self._announce(place, peer, event.track_namespace, now)
            elif isinstance(event, events.SubscribeNamespaceReceived):
                self._subscribe_namespace(place, peer, event.track_namespace_prefix)
            elif isinstance(event, events.SubscribeReceived):
                waiting = Waiting(place, Ask.SUBSCRIBE, event.parameters)
                self._serve(event.full_track_name, waiting, peer, now)
            elif isinstance(event, events.FetchReceived):
                waiting = Waiting(place, Ask.FETCH, event.parameters)
                self._serve(event.full_track_name, waiting, peer, now)
            else:
                waiting = Waiting(place, Ask.STATUS, Parameters())
                self._serve(event.full_track_name, waiting, peer, now)
        except RequestError as exc:
            peer.core.responder.refuse(event.request_id, exc)

    def _serve(self, name: FullTrackName, waiting: Waiting, peer: _Peer, now: float) -> None:
        track = self._tracks.get(name)
        if track is None:
            if (
                self.cache.get(name) is None
                and waiting.ask is not Ask.SUBSCRIBE
                and not self.publishers(name)
            ):
                raise DoesNotExist("nobody publishes this track here")
            if len(self._tracks) >= self.limits.max_tracks:
                raise RequestError("too many tracks", RequestCode.EXCESSIVE_LOAD, RETRY_MS)
            track = self._tracks[name] = RelayTrack(self, self.cache.open(name))
            insort(self._names, name)
        peer.downstream[waiting.place.request_id] = track
        track.serve(waiting, now)

    def _cancelled(self, place: Place, peer: _Peer, now: float) -> None:
        """The peer cancelled a request of its own."""
        request_id = place.request_id
        if request_id in peer.announced:
            peer.announced.remove(request_id)
            self._withdraw(place)
        elif request_id in peer.interests:
            peer.interests.remove(request_id)
            self._namespaces.unsubscribe(place)
        else:
            track = peer.downstream.get(request_id)
            if track is not None:
                track.downstream_gone(place, now)

    # Inner workings: namespaces

    def _announce(self, place: Place, peer: _Peer, namespace: TrackNamespace, now: float) -> None:
        check_announcement(namespace)
        if len(peer.announced) >= self.limits.max_namespaces_per_session:
            raise RequestError("too many namespaces", RequestCode.EXCESSIVE_LOAD, RETRY_MS)
        peer.announced.add(place.request_id)
        peer.core.responder.accept(place.request_id)
        self._tell(self._namespaces.announce(place, namespace), there=True)
        self.report("announced", session=place.session, namespace=namespace_text(namespace))
        for track in self._tracks_below(namespace):
            track.publisher_came(place.session, now)

    def _tracks_below(self, namespace: TrackNamespace) -> list[RelayTrack]:
        found: list[RelayTrack] = []
        index = bisect_left(self._names, FullTrackName(namespace, b""))
        while index < len(self._names) and is_prefix(namespace, self._names[index].namespace):
            found.append(self._tracks[self._names[index]])
            index += 1
        return found

    def _withdraw(self, place: Place) -> None:
        namespace, notices = self._namespaces.withdraw(place)
        self._tell(notices, there=False)
        if namespace is not None:
            text = namespace_text(namespace)
            self.report("withdrawn", session=place.session, namespace=text)

    def _subscribe_namespace(self, place: Place, peer: _Peer, prefix: TrackNamespace) -> None:
        check_interest(prefix)
        matches = 0
        for _ in self._namespaces.under(prefix):
            matches += 1
            if matches > self.limits.max_namespace_matches:
                raise RequestError("too many namespaces", RequestCode.NAMESPACE_TOO_LARGE)
        peer.interests.add(place.request_id)
        responder = peer.core.responder
        responder.accept(place.request_id)
        for suffix in self._namespaces.subscribe(place, prefix):
            responder.namespace(place.request_id, suffix)

    def _tell(self, notices: list[Notice], *, there: bool) -> None:
        for (key, request_id), suffix in notices:
            session = self.session(key)
            if session is None:
                continue
            if there:
                session.responder.namespace(request_id, suffix)
            else:
                session.responder.namespace_done(request_id, suffix)

    # Inner workings

    def _in_use(self, name: FullTrackName) -> bool:
        return name in self._tracks

    def _let_go(self) -> None:
        for track in self._tracks.values():
            track.retriever.let_go()

    def _run_soon(self, now: float) -> None:
        while self._soon:
            callbacks, self._soon = self._soon, []
            for callback in callbacks:
                callback(now)

    def _wake(self) -> None:
        if self._on_wake is not None:
            self._on_wake()


_REQUESTS = (
    events.SubscribeReceived,
    events.FetchReceived,
    events.TrackStatusReceived,
    events.PublishNamespaceReceived,
    events.SubscribeNamespaceReceived,
)

_Request = (
    events.SubscribeReceived
    | events.FetchReceived
    | events.TrackStatusReceived
    | events.PublishNamespaceReceived
    | events.SubscribeNamespaceReceived
)

"""The relay without its I/O: sessions and their events in, requests and answers out (MOQT §7).

`RelayCore` joins many session cores. The shell tells it of every session and every event, and calls
`receive_timer` when `next_timer` is due; everything it does is a command to one of the sessions.
It never opens a payload.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import get_args

from kvcs.access.permits import Place
from kvcs.access.policy import Policy, Request, asked
from kvcs.errors import RequestError, SessionError
from kvcs.moqt import events
from kvcs.moqt.errors import (
    DoesNotExist,
    MalformedTrack,
    RequestCode,
    SessionCode,
)
from kvcs.moqt.names import FullTrackName, TrackNamespace
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.session import Session
from kvcs.relay.backlogs import Backlogs
from kvcs.relay.cache import RETRY_MS, CachedTrack, RelayCache
from kvcs.relay.directory import Directory
from kvcs.relay.enforcing import Enforcer
from kvcs.relay.kept import Kept
from kvcs.relay.peers import Peer
from kvcs.relay.pressure import Pressure
from kvcs.relay.routing import Routing
from kvcs.relay.scopes import SHARES, Scopes
from kvcs.relay.sessions import Sessions
from kvcs.relay.settings import RelayLimits
from kvcs.relay.stats import Fact, RelayStats, Report
from kvcs.relay.timers import Callback, Timer, Timers
from kvcs.relay.tracks import RelayTrack, StreamEvent
from kvcs.relay.upstream import Ask, Waiting
from kvcs.relay.upstreams import Upstreams

MAX_REPORTS = 4096
"""Lines for the log that wait to be taken; the oldest are dropped."""


class RelayCore(Sessions):
    """Routes announcements, subscriptions, fetches and Objects between sessions.

    Args:
        limits: see `RelayLimits`.
        on_wake: called when `next_timer` may be earlier than it was, and when there is a line for
            the log.
        policy: who may do what; anyone everything by default.
        relay_id: what this relay tells other relays that it is; see `kvcs.relay.upstreams`.
    """

    def __init__(
        self,
        limits: RelayLimits | None = None,
        on_wake: Callable[[], None] | None = None,
        policy: Policy | None = None,
        relay_id: bytes = b"",
    ) -> None:
        super().__init__(RelayLimits() if limits is None else limits)
        self.cache = RelayCache(
            self.limits.cache_octets,
            self.limits.max_tracks,
            self._in_use,
            self.stats,
            self._let_go,
        )
        self._on_wake = on_wake
        self._reports: deque[Report] = deque(maxlen=MAX_REPORTS)
        self._tracks = Directory()
        self.cache.on_due = self._wake
        self.cache.pressure = Pressure(self, self._tracks)
        self.relay_id = relay_id
        self._upstreams = Upstreams(self, relay_id, self._heard)
        self._routing = Routing(self, self._tracks.below, self._upstreams)
        self._kept = Kept(self, self._heard)
        self._timers = Timers()
        self._soon: list[Callback] = []
        self._enforcer = Enforcer(self, self._routing, policy or Policy())
        self.scopes = Scopes(self.limits, self.stats, self.report)
        self._backlogs = Backlogs(self, self._peers)

    # Inputs

    def session_opened(
        self,
        key: int,
        core: Session,
        now: float,
        upstream: int | None = None,
        queued: Callable[[], int] = int,
        facts: Callable[[], dict[str, Fact]] = dict,
    ) -> None:
        """A session is there; ``key`` names it from now on and is never used again.

        Args:
            key: a number that is new.
            core: the session.
            now: the time.
            upstream: where it is one with an upstream, how many others are asked before it.
            queued: octets that were handed over for its peer and wait below; 0 by default.
            facts: what the log is to tell of it beside, when it is over.
        """
        self._peers[key] = Peer(core, now, upstream, queued, facts)
        core.requests.on_over = lambda request_id: self.scopes.over(Place(key, request_id))
        self.stats.sessions_total += 1

    def shelf_opened(self, now: float) -> None:
        """What is on the cache's shelf has been read."""
        self._kept.open(now)
        self.run_soon(now)

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
                self.run_soon(now)
            return
        self.cache.receive_timer(now)
        if isinstance(event, events.SessionClosed):
            self.session_closed(key, event, now)
        elif isinstance(event, events.GoawayReceived):
            if event.request_id is None:
                peer.going_away = True
            else:
                self._upstreams.event(key, event.request_id, event, now)
        elif isinstance(event, events.SessionEstablished):
            self._admit(key, peer, event, now)
        elif isinstance(event, _REQUESTS):
            peer.requests += 1
            self._request(key, peer, event, now)
        elif isinstance(event, events.RequestUpdateReceived):
            self._update(Place(key, event.request_id), peer, event, now)
        elif isinstance(event, events.RequestCancelled) and not event.ours:
            self.cancelled(Place(key, event.request_id), peer, now)
        else:
            track = peer.upstream.get(event.request_id)
            if track is not None:
                track.event(Place(key, event.request_id), event, now)
            elif (track := peer.downstream.get(event.request_id)) is not None:
                track.downstream_event(Place(key, event.request_id), event, now)
            else:
                self._upstreams.event(key, event.request_id, event, now)
        self.run_soon(now)

    def session_closed(self, key: int, closed: events.SessionClosed, now: float) -> None:
        """A session is over: its announcements, requests and what it brought end with it."""
        peer = self._peers.pop(key, None)
        if peer is None:
            return
        peer.core.requests.on_over = None
        self._enforcer.permits.close(key)
        self.scopes.session_closed(key)
        self._routing.session_closed(key, peer, now)
        self._upstreams.closed(key, now)
        for request_id, track in list(peer.downstream.items()):
            track.downstream_gone(Place(key, request_id), now)
        for track in dict.fromkeys(peer.upstream.values()):
            track.session_lost(key, now)
        for start in peer.turns or ():
            start(now)
        self.report(
            "session_ended",
            session=key,
            code=None if closed.code is None else int(closed.code),
            reason=closed.reason,
            by_peer=closed.by_peer,
            seconds=round(now - peer.opened_at, 3),
            requests=peer.requests,
            **peer.facts(),
        )
        self.run_soon(now)

    def receive_timer(self, now: float) -> None:
        """`next_timer` is due."""
        self.cache.receive_timer(now)
        self._timers.run(now)
        self.run_soon(now)

    def cancelled(self, place: Place, peer: Peer, now: float) -> None:
        """The peer cancelled a request of its own, or it is allowed no longer."""
        self._enforcer.permits.forget(place)
        self.scopes.over(place)
        request_id = place.request_id
        if self._routing.cancelled(place, peer, now):
            return
        track = peer.downstream.get(request_id)
        if track is not None:
            track.downstream_gone(place, now)
            return
        track = peer.upstream.get(request_id)
        if track is not None:
            track.event(place, events.RequestCancelled(request_id, False, None), now)

    def issuers_changed(self, now: float) -> None:
        """Keys of issuers came or went: requests that are allowed no longer end."""
        self._enforcer.permits.look_again(now)
        self.run_soon(now)

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
        stats.namespaces = len(self._routing.namespaces)
        stats.tracks = len(self.cache)
        stats.groups = self.cache.groups
        stats.cache_octets = self.cache.octets
        stats.scopes = len(self.scopes)
        stats.objects_out, stats.octets_out = self.cache.sent
        return stats

    def peer(self, key: int) -> Peer | None:
        """What is held of a session that is open."""
        return self._peers.get(key)

    # Hub

    def publishers(self, name: FullTrackName) -> list[int]:
        """Sessions that PUBLISH a Track, or announced its namespace, and may be asked."""
        track = self._tracks.get(name)
        published = [] if track is None else track.sources.sessions(published=True)
        found: list[int] = []
        announced = self._routing.namespaces.publishers(name.namespace)
        for key in dict.fromkeys((*published, *announced)):
            peer = self._peers.get(key)
            if peer is None or peer.core.closed or peer.going_away or name in peer.banned:
                continue
            found.append(key)
        return found

    def upstreams(self, name: FullTrackName) -> list[int]:
        """Upstream sessions that may be asked for a Track that nobody announced, best first."""
        keys = self._upstreams.sessions(name.namespace)
        return [key for key in keys if name not in self._peers[key].banned]

    def askable(self, name: FullTrackName) -> list[int]:
        """`publishers`, or where there are none `upstreams`."""
        return self.publishers(name) or self.upstreams(name)

    def from_elsewhere(self, key: int, sources: list[int]) -> bool:
        """Whether one of ``sources`` is not the relay at the other end of ``key``."""
        return self._upstreams.from_elsewhere(key, sources)

    def expires_ms(self, place: Place) -> int | None:
        """Milliseconds after which a request of a peer will be ended; None where nothing does."""
        return self._enforcer.permits.expires_ms(place)

    def watch(self, now: float) -> None:
        """Look from now on at what peers do not take."""
        self._backlogs.watch(now)

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

    def run_soon(self, now: float) -> None:
        """An input was taken: call what `soon` was given."""
        while self._soon:
            callbacks, self._soon = self._soon, []
            for callback in callbacks:
                callback(now)

    def reopen(self, name: FullTrackName) -> CachedTrack:
        """Begin a Track anew."""
        self.cache.forget(name)
        return self.cache.open(name)

    def release(self, track: RelayTrack) -> None:
        """Nobody needs a Track any more."""
        if self._tracks.remove(track):
            self.cache.drop_if_empty(track.name)

    def report(self, event: str, **facts: Fact) -> None:
        """Write a line to the log."""
        self._reports.append(Report(event, facts))
        self._wake()

    # Inner workings: requests of peers

    def _admit(self, key: int, peer: Peer, event: events.SessionEstablished, now: float) -> None:
        if not self._upstreams.introduced(key, event.options):
            self.report("upstream_is_this_relay", session=key)
            peer.core.close(SessionCode.NO_ERROR, "a relay is no upstream of its own")
            return
        try:
            self._enforcer.permits.open(key, event.tokens)
        except SessionError as exc:
            if peer.rank is not None:
                self._enforcer.permits.open(key, ())  # what it may announce is another matter
                self._upstream_opened(key, peer.rank, now)
                return
            self.stats.sessions_refused += 1
            self.report("session_refused", session=key, code=exc.code, reason=exc.reason)
            peer.core.close(exc.code, exc.reason)
            return
        if peer.rank is not None:
            self._upstream_opened(key, peer.rank, now)

    def _upstream_opened(self, key: int, rank: int, now: float) -> None:
        self._upstreams.opened(key, rank)
        for track in self._tracks:
            track.upstream_came(now)

    def _heard(self, key: int, namespace: TrackNamespace, there: bool, now: float) -> None:
        """An upstream has named a namespace, or has it no longer."""
        self._routing.heard(key, namespace, there)
        if there:
            for track in self._tracks.below(namespace):
                track.upstream_came(now)

    def _request(self, key: int, peer: Peer, event: Request, now: float) -> None:
        place = Place(key, event.request_id)
        try:
            if not self._is_asked(key, event):
                self._enforcer.check(place, event, now)
                about = asked(event)
                self.scopes.enter(place, about.namespace, SHARES[about.action], now)
            if isinstance(event, events.PublishNamespaceReceived):
                self._routing.announce(place, peer, event.track_namespace, now)
            elif isinstance(event, events.SubscribeNamespaceReceived):
                self._routing.subscribe_namespace(place, peer, event.track_namespace_prefix, now)
            elif isinstance(event, events.SubscribeTracksReceived):
                self._routing.subscribe_tracks(place, peer, event.track_namespace_prefix, now)
            elif isinstance(event, events.PublishReceived):
                self._published(place, peer, event, now)
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
            self._enforcer.permits.forget(place)
            peer.core.responder.refuse(event.request_id, exc)

    def _is_asked(self, key: int, event: Request) -> bool:
        """Whether an upstream PUBLISHes what it was asked for by SUBSCRIBE_TRACKS."""
        if not isinstance(event, events.PublishReceived):
            return False
        return self._upstreams.wants_tracks(key, event.full_track_name.namespace)

    def _update(
        self, place: Place, peer: Peer, event: events.RequestUpdateReceived, now: float
    ) -> None:
        """A REQUEST_UPDATE with tokens or another prefix; a refused one ends its request."""
        responder = peer.core.responder
        prefix: TrackNamespace | None = event.parameters.get(ParameterType.TRACK_NAMESPACE_PREFIX)
        try:
            self._enforcer.check_update(place, event, now)
            if prefix is not None:
                self._routing.check_move(place, peer, prefix)
        except RequestError as exc:
            responder.refuse_update(event.request_id, event.update_id, exc)
            return
        expires_ms = self.expires_ms(place)
        responder.accept_update(event.request_id, event.update_id, expires_ms=expires_ms)
        if prefix is not None:
            self._routing.move(place, peer, prefix, now)

    def _serve(self, name: FullTrackName, waiting: Waiting, peer: Peer, now: float) -> None:
        if (
            name not in self._tracks
            and self.cache.get(name) is None
            and waiting.ask is not Ask.SUBSCRIBE
            and not self.askable(name)
        ):
            raise DoesNotExist("nobody publishes this track here")
        track = self._use(name)
        peer.downstream[waiting.place.request_id] = track
        track.serve(waiting, now)

    def _use(self, name: FullTrackName) -> RelayTrack:
        """The Track of a name, in use from now on.

        Raises:
            RequestError: there are too many.
        """
        track = self._tracks.get(name)
        if track is None:
            if len(self._tracks) >= self.limits.max_tracks:
                raise RequestError("too many tracks", RequestCode.EXCESSIVE_LOAD, RETRY_MS)
            track = RelayTrack(self, self.cache.open(name))
            self._tracks.add(track)
        return track

    def _published(
        self, place: Place, peer: Peer, event: events.PublishReceived, now: float
    ) -> None:
        """A session begins to PUBLISH a Track: it is a source of it, and others hear of it."""
        name = event.full_track_name
        if name in peer.banned:
            raise MalformedTrack("what came of this track was malformed")
        if len(peer.published) >= self.limits.max_published_per_session:
            raise RequestError("too many published tracks", RequestCode.EXCESSIVE_LOAD, RETRY_MS)
        track = self._use(name)
        peer.published.add(place.request_id)
        held = track.consumers.held_sessions()
        track.sources.take(place, event, now)
        self.report("published", session=place.session, track=str(name))
        self._routing.published(track, now, but_for=held)

    # Inner workings

    def _in_use(self, name: FullTrackName) -> bool:
        return name in self._tracks

    def _let_go(self) -> None:
        for track in self._tracks:
            track.retriever.let_go()

    def _wake(self) -> None:
        if self._on_wake is not None:
            self._on_wake()


_REQUESTS = get_args(Request)

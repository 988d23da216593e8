"""One Track in the relay: its upstream subscriptions, and who wants it downstream (MOQT §7)."""

from __future__ import annotations

from kvcs.access.permits import Place
from kvcs.errors import RequestError, StoreFull
from kvcs.moqt import events
from kvcs.moqt.data import FetchHeader, SubgroupHeader
from kvcs.moqt.datagrams import ObjectDatagram
from kvcs.moqt.errors import (
    DoesNotExist,
    MalformedTrack,
    PublishDoneCode,
    StreamCode,
)
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectHeader
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.sending.publishing import location_filter
from kvcs.moqt.track.store import Track
from kvcs.relay.cache import CachedTrack
from kvcs.relay.consumers import Consumers
from kvcs.relay.failover import Failover
from kvcs.relay.hub import Hub
from kvcs.relay.inflow import Inflow, StreamKey, take_end, take_items
from kvcs.relay.intake import Bay, Intake
from kvcs.relay.new_groups import NewGroups
from kvcs.relay.retrieving import Retriever
from kvcs.relay.sources import Sources
from kvcs.relay.upstream import Ask, Retrieval, Upstream, Waiting

StreamEvent = events.ObjectsReceived | events.DataStreamEnded
"""An event of a data stream that has begun: by far the most frequent ones."""


class RelayTrack:
    """A Track that somebody wants.

    Args:
        hub: the relay's core.
        entry: the Track in the cache.
    """

    def __init__(self, hub: Hub, entry: CachedTrack) -> None:
        self._hub = hub
        self.name = entry.track.name
        self.retriever = Retriever(hub, self)
        self.consumers = Consumers(hub, self)
        self.sources = Sources(hub, self)
        self.failover = Failover(hub, self)
        self.new_groups = NewGroups(hub, self)
        self.streams: dict[StreamKey, tuple[Intake, Upstream | Retrieval]] = {}
        """Data streams that are taken, and whose they are."""
        self.caused_by: int | None = None
        """The session that wanted it first, when it was asked for elsewhere last."""
        self._idle_since: float | None = None
        self._checking = False
        self._use(entry)

    def _use(self, entry: CachedTrack) -> None:
        self._entry = entry
        limits = self._hub.limits
        largest = min(limits.max_object_octets, limits.cache_octets // 2)
        self.bay = Bay(self._hub.cache, entry, largest, self._hub.stats)
        entry.track.on_unfollowed = self.check_idle_soon

    @property
    def track(self) -> Track:
        """The Track in the cache."""
        return self._entry.track

    @property
    def established(self) -> bool:
        """Whether an upstream subscription is Established."""
        return self.sources.established

    @property
    def needed(self) -> bool:
        """Whether anybody downstream needs what is published."""
        return self.consumers.waiting or self.track.readers > 0 or self.consumers.forwarding

    # Downstream requests

    def serve(self, request: Waiting, now: float) -> None:
        """Answer a downstream request, at once or when upstream has answered (§7)."""
        self._idle_since = None
        consumers, sources, limits = self.consumers, self.sources, self._hub.limits
        if request.ask is Ask.SUBSCRIBE:
            rendezvous_ms = request.parameters.get(ParameterType.RENDEZVOUS_TIMEOUT, 0)
            request.patient_until = now + min(rendezvous_ms / 1000, limits.max_rendezvous)
        key = request.place.session
        if sources and not self._hub.from_elsewhere(key, sources.sessions()):
            if self._in_cache(request):
                consumers.answer(request, now)
            else:  # its relay asks back what we ask of it
                consumers.refuse(request, DoesNotExist("it is got from the relay that asks"))
            self.check_idle_soon()
            return
        if request.ask is Ask.SUBSCRIBE and sources.established:
            self.new_groups.ask(request.parameters)
        forwards = consumers.forwards(request)
        if sources.flowing or (sources.established and not forwards):
            if forwards:
                sources.resume(now)
            consumers.answer(request, now)
        elif self._in_cache(request):
            consumers.answer(request, now)
        elif sources.awaiting_publisher:
            self._wait_for_publisher(request, now)
        elif sources:
            consumers.hold(request, limits.upstream_wait, now)
            sources.resume(now)
        elif publishers := self._hub.publishers(self.name):
            if self._may_cause([request]):
                consumers.hold(request, limits.upstream_wait, now)
                sources.subscribe_to(publishers, now)
        elif upstreams := self._upstreams_for([request]):
            if self._may_cause([request]):
                consumers.hold(request, limits.upstream_wait, now)
                sources.try_upstreams(upstreams, now)
        else:
            self._wait_for_publisher(request, now)
        self.check_idle_soon()

    def _may_cause(self, requests: list[Waiting]) -> bool:
        """Whether one of the sessions that want the Track may have it asked for elsewhere; those
        before it that may not are refused."""
        for request in requests:
            try:
                self._hub.cause(request.place.session, self)
            except RequestError as exc:
                self.consumers.turn_away(request, exc)
            else:
                return True
        return False

    def _wait_for_publisher(self, request: Waiting, now: float) -> None:
        """Nobody has the Track: hold a request that waits for a publisher, refuse others."""
        if request.patient_until > now:
            self.consumers.hold(request, request.patient_until - now, now)
        else:
            nothing = DoesNotExist("nobody publishes this track here")
            self.consumers.refuse(request, nothing)

    def offer(self, place: Place, now: float) -> None:
        """PUBLISH the Track to a SUBSCRIBE_TRACKS, unless its session has it already (§7)."""
        session = self._hub.session(place.session)
        if session is None or self._hub.is_leaving(place.session):
            return
        sources = self.sources.sessions()
        if sources and not self._hub.from_elsewhere(place.session, sources):
            return  # it is not told of what its relay has sent
        if place.session in sources:
            return  # it is not told of what it publishes itself
        if session.asked_prefixes.selects(place.request_id, self.track):
            if self.consumers.may_offer(place):
                self.serve(Waiting(place, Ask.PUBLISH, Parameters()), now)

    def may_forward(self, place: Place) -> bool:
        """Whether a paused subscription may go on at once, or after its upstream (§7)."""
        session = self._hub.session(place.session)
        if session is None or not self.sources:
            return True
        now = session.now
        if not self.sources.flowing:
            waiting = Waiting(place, Ask.FORWARD, Parameters())
            if not self.consumers.hold(waiting, self._hub.limits.upstream_wait, now):
                return True
        self.sources.resume(now)
        return self.sources.flowing

    def downstream_event(self, place: Place, event: events.Event, now: float) -> None:
        """An event of a subscription that is served from here."""
        if isinstance(event, events.SubscriptionUpdated):
            self.new_groups.ask(event.parameters)
            self.consumers.updated(place)
            self.check_idle_soon()
        elif isinstance(event, events.RequestRefused | events.RequestCancelled):
            self.downstream_gone(place, now)

    def publisher_came(self, key: int, now: float) -> None:
        """A session announced a namespace that matches: it is asked too, where anybody waits."""
        if key in self.sources.sessions() or key not in self._hub.publishers(self.name):
            return
        live = bool(self.track.listeners) and self.track.ended is None
        waiting = self.consumers.unanswered()
        if live or self.sources or self._may_cause(waiting):
            if not live and not waiting:
                return
            self.consumers.publisher_asked(now)
            self.sources.subscribe_to([key], now)

    def upstream_came(self, now: float) -> None:
        """A session with an upstream opened, or named a namespace: whoever waits is served."""
        waiting = self.consumers.unanswered()
        if waiting and not self.sources and not self._hub.publishers(self.name):
            upstreams = self._upstreams_for(waiting)
            if upstreams and self._may_cause(waiting):
                self.sources.try_upstreams(upstreams, now)

    def _upstreams_for(self, requests: list[Waiting]) -> list[int]:
        """Upstreams that may be asked for requests: not the relay alone that makes them."""
        return [
            key
            for key in self._hub.upstreams(self.name)
            if any(self._hub.from_elsewhere(one.place.session, [key]) for one in requests)
        ]

    def downstream_gone(self, place: Place, now: float) -> None:
        """A downstream request was cancelled, or its session is gone."""
        self.consumers.gone(place)
        self.check_idle(now)

    def _in_cache(self, request: Waiting) -> bool:
        """Whether the cache alone can serve a request: nothing new can come of what it asks."""
        track, entry = self.track, self._entry
        if entry.finished and not set(self._hub.publishers(self.name)) - entry.finished_by:
            span = self.consumers.past(request)
            # Who asks for nothing of the past gets the end: nothing else can come.
            if track.largest is not None if span is None else self.consumers.known(span):
                if track.ended != PublishDoneCode.TRACK_ENDED:
                    track.reopen()  # its publisher left behind the End of Track
                    track.end(PublishDoneCode.TRACK_ENDED)
                return True
        if request.ask is not Ask.FETCH:
            return False
        chosen = location_filter(request.parameters) or LocationFilter.none()
        span = chosen.for_fetch(track.largest)
        if span is None or span.end is None or span.end != chosen.for_subscription(None).end:
            return False  # where it ends depends on the Largest Object, which upstream knows
        return self.consumers.known(span)

    # For what comes from upstream

    @property
    def whole(self) -> bool:
        """Whether everything of the Track is cached, and its end known."""
        return self._entry.whole

    def lacks(self, start: Location, end: Location) -> bool:
        """Whether the cache lacks something of a range, and its shelf too."""
        return self._entry.lacks(start, end)

    def begin_anew(self, now: float) -> None:
        """What is cached is of an earlier publication."""
        self._use(self._hub.reopen(self.name))
        self.retriever.begin_anew(now)

    def finished_by(self, key: int) -> None:
        """A session said that the Track has ended."""
        finished = self._entry.finished_by
        finished.add(key)
        finished.intersection_update(
            [other for other in finished if self._hub.session(other) is not None]
        )

    def take_properties(self, properties: KeyValues) -> None:
        """Track Properties came from upstream: a later set replaces the cached one (§10)."""
        if properties != self.track.properties:
            self.track.properties = properties
            self._hub.cache.schedule(self._entry)

    def forget_streams(self, owner: Upstream) -> None:
        """Streams of an upstream subscription are not taken any more."""
        self.streams = {
            stream: pair for stream, pair in self.streams.items() if pair[1] is not owner
        }

    def session_lost(self, key: int, now: float) -> None:
        """A session that was asked for the Track, or published it, is gone."""
        self.sources.session_lost(key, now)
        self.retriever.session_lost(key, now)

    # Events of our requests

    def event(self, place: Place, event: events.Event, now: float) -> None:
        """An event of a request that was made upstream for this Track; not a `StreamEvent`."""
        upstream = self.sources.find(place)
        if upstream is not None:
            self._upstream_event(upstream, event, now)
            return
        retrieval = self.retriever.find(place)
        if retrieval is None:
            self.sources.claims.event(place, event, now)
            return
        if isinstance(event, events.DataStreamOpened):
            self._open_range(retrieval, place, event.stream_id, now)
        elif isinstance(event, events.TrackMalformed):
            self.malformed(place.session, event.reason, now)
        else:
            self.retriever.event(retrieval, event, now)

    def _upstream_event(self, upstream: Upstream, event: events.Event, now: float) -> None:
        key = upstream.place.session
        if isinstance(event, events.DataStreamOpened):
            self._open_stream(upstream, event, now)
        elif isinstance(event, events.TrackMalformed):
            self.malformed(key, event.reason, now)
        elif isinstance(event, events.DatagramReceived):
            self._datagram(key, event.datagram, now)
        else:
            self.sources.event(upstream, event, now)

    def _open_stream(self, upstream: Upstream, event: events.DataStreamOpened, now: float) -> None:
        key = upstream.place.session
        if isinstance(event.header, SubgroupHeader):
            self._give_directly(upstream.place)
            intake = upstream.open_stream(self.bay, event.stream_id, event.header)
            self.streams[key, event.stream_id] = (intake, upstream)
        elif isinstance(event.header, FetchHeader):
            fill = upstream.fill
            if fill is not None and fill.fill and fill.place == upstream.place:
                self._open_range(fill, upstream.place, event.stream_id, now)
            else:
                self._stop(key, event.stream_id, StreamCode.CANCELLED)

    def _open_range(self, retrieval: Retrieval, place: Place, stream_id: int, now: float) -> None:
        self._give_directly(place)
        intake = self.retriever.stream_opened(retrieval, stream_id, now)
        self.streams[place.session, stream_id] = (intake, retrieval)

    def _give_directly(self, place: Place) -> None:
        """What the streams of a request bring comes here without an event for each datagram."""
        session = self._hub.session(place.session)
        if session is not None:
            inflow = Inflow(self._hub, self, place.session, session)
            session.receptions.sink_to(place.request_id, inflow)

    def stream_event(self, key: int, event: StreamEvent, now: float) -> None:
        """An event of a data stream of a request that was made upstream for this Track."""
        stream = key, event.stream_id
        if stream not in self.streams:  # it is not taken any more, or of a check
            self.sources.claims.stream_event(stream, event, now)
        elif isinstance(event, events.ObjectsReceived):
            take_items(self._hub, self, stream, event.items, now)
        else:
            take_end(self._hub, self, stream, event.reset_code, now)

    def stream_ended(self, stream: StreamKey, reset_code: int | None, now: float) -> None:
        """A data stream that is taken has ended: with FIN where ``reset_code`` is None.

        Raises:
            MalformedTrack: it may not end there.
            StoreFull: what it leads to has no room.
        """
        intake, owner = self.streams.pop(stream)
        if isinstance(owner, Retrieval):
            self.retriever.stream_ended(owner, reset_code, now)
        else:
            owner.streams.pop(stream[1], None)
            intake.ended(reset_code)

    def _datagram(self, key: int, datagram: ObjectDatagram, now: float) -> None:
        header = ObjectHeader(
            group_id=datagram.group_id,
            object_id=datagram.object_id,
            subgroup_id=None,
            publisher_priority=datagram.publisher_priority,
            status=datagram.status,
            properties=datagram.properties,
            payload_length=len(datagram.payload),
        )
        stats = self._hub.stats
        try:
            self.track.take_datagram(header, bytes(datagram.payload), now)
        except MalformedTrack as exc:
            self.malformed(key, exc.reason, now)
        except StoreFull:
            stats.too_large += 1
        else:
            self._hub.cache.began(self._entry, header.location, now)
            stats.objects_in += 1
            stats.octets_in += len(datagram.payload)

    # What goes wrong

    def too_much(
        self, stream: StreamKey, owner: Upstream | Retrieval, reason: str, now: float
    ) -> None:
        """An Object cannot be held: its stream ends downstream too, the Track goes on."""
        key, stream_id = stream
        code = StreamCode.EXCESSIVE_LOAD
        if isinstance(owner, Retrieval):
            self.retriever.cut(owner, now)
            return
        self._hub.stats.too_large += 1
        self._hub.report("not_carried", track=str(self.name), session=key, reason=reason)
        self.stop_arriving(owner, stream_id, code)

    def stop_arriving(self, owner: Upstream, stream_id: int, code: int) -> None:
        """Take no more of a Subgroup from upstream; its stream ends downstream too."""
        key = owner.place.session
        found = self.streams.pop((key, stream_id), None)
        if found is not None:
            self._stop(key, stream_id, code)
            owner.streams.pop(stream_id, None)
            found[0].ended(code)

    def malformed(self, key: int, reason: str, now: float) -> None:
        """What a session sent breaks §12.1: the Track ends for everybody, nothing stays cached."""
        code = StreamCode.MALFORMED_TRACK
        self._hub.stats.malformed += 1
        self._hub.report("malformed", track=str(self.name), session=key, reason=reason)
        self._hub.ban(key, self.name)
        self.consumers.end_malformed(MalformedTrack("the track is malformed"))
        self._cancel_upstreams(code, now, published=True)
        self._use(self._hub.reopen(self.name))
        self.check_idle(now)

    def _cancel_upstreams(self, code: int, now: float, *, published: bool) -> None:
        self.failover.abort(now)
        self.retriever.cancel(code, now)
        self.sources.cancel(code, published=published)

    def _stop(self, key: int, stream_id: int, code: int) -> None:
        session = self._hub.session(key)
        if session is not None:
            session.requester.stop_stream(stream_id, code)

    def forget_stream(self, place: Place | None, stream_id: int | None) -> None:
        """A stream is not taken any more; what still comes of it is dropped."""
        if place is not None and stream_id is not None:
            self.streams.pop((place.session, stream_id), None)

    # Idle

    def check_idle_soon(self) -> None:
        """Look soon whether anybody still needs the Track."""
        if not self._checking:
            self._checking = True
            self._hub.soon(self._check)

    def _check(self, now: float) -> None:
        self._checking = False
        self.check_idle(now)

    def check_idle(self, now: float) -> None:
        """Let go of upstream subscriptions that nobody has used for a while, then of the Track."""
        if self.needed:
            self._idle_since = None
            return
        linger = self._hub.limits.upstream_linger
        if self.sources:
            if self._idle_since is None:
                self._idle_since = now
                self._hub.at(now + linger, self.check_idle)
            if now < self._idle_since + linger:
                return
            self.sources.pause(now)
            if not self.track.followed:
                self._cancel_upstreams(StreamCode.CANCELLED, now, published=False)
        if self.track.followed:
            return  # by subscriptions that are paused
        self.failover.abort(now)
        self.retriever.cancel(StreamCode.CANCELLED, now)
        self.consumers.release()
        if not self.sources:
            self._hub.release(self)

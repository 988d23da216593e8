"""One Track in the relay: its upstream subscriptions, and who wants it downstream (MOQT §7)."""

from __future__ import annotations

from kvcs.errors import RequestError, StoreFull, UsageError
from kvcs.moqt import events
from kvcs.moqt.data import FetchHeader, SubgroupHeader
from kvcs.moqt.datagrams import ObjectDatagram
from kvcs.moqt.errors import (
    DoesNotExist,
    MalformedTrack,
    PublishDoneCode,
    RequestCode,
    StreamCode,
)
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.messages import SubscribeOk
from kvcs.moqt.names import GroupOrder, Location
from kvcs.moqt.objects import ObjectHeader
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.publishing import location_filter
from kvcs.moqt.store import Track
from kvcs.relay.cache import CachedTrack
from kvcs.relay.consumers import Consumers
from kvcs.relay.hub import Hub
from kvcs.relay.intake import Bay, Intake
from kvcs.relay.namespaces import Place
from kvcs.relay.retrieving import Retriever
from kvcs.relay.upstream import Ask, Retrieval, Upstream, Waiting

StreamKey = tuple[int, int]
"""Session and stream ID of an upstream data stream."""

StreamEvent = (
    events.ObjectStarted
    | events.ObjectChunk
    | events.ObjectEnded
    | events.RangeMarked
    | events.DataStreamEnded
)
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
        self._upstreams: dict[int, Upstream] = {}
        self._streams: dict[StreamKey, tuple[Intake, Upstream | Retrieval]] = {}
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
        return any(upstream.established for upstream in self._upstreams.values())

    # Downstream requests

    def serve(self, request: Waiting, now: float) -> None:
        """Answer a downstream request, at once or when upstream has answered (§7)."""
        self._idle_since = None
        consumers, limits = self.consumers, self._hub.limits
        if self.established or self._in_cache(request):
            consumers.answer(request, now)
        elif self._upstreams:
            consumers.hold(request, limits.upstream_wait, now)
        elif publishers := self._hub.publishers(self.name):
            consumers.hold(request, limits.upstream_wait, now)
            self._subscribe_to(publishers, now)
        else:
            rendezvous_ms = 0
            if request.ask is Ask.SUBSCRIBE:
                rendezvous_ms = request.parameters.get(ParameterType.RENDEZVOUS_TIMEOUT, 0)
            if rendezvous_ms:
                consumers.hold(request, min(rendezvous_ms / 1000, limits.max_rendezvous), now)
            else:
                consumers.refuse(request, DoesNotExist("nobody publishes this track here"))
        self.check_idle_soon()

    def publisher_came(self, key: int, now: float) -> None:
        """A session announced a namespace that matches: it is asked too, where anybody waits."""
        if key in self._upstreams or key not in self._hub.publishers(self.name):
            return
        live = bool(self.track.listeners) and self.track.ended is None
        if self.consumers.waiting or live:
            self.consumers.publisher_asked(now)
            self._subscribe_to([key], now)

    def downstream_gone(self, place: Place, now: float) -> None:
        """A downstream request was cancelled, or its session is gone."""
        self.consumers.gone(place)
        self.check_idle(now)

    def _in_cache(self, request: Waiting) -> bool:
        """Whether the cache alone can serve a request: nothing new can come of what it asks."""
        track, entry = self.track, self._entry
        if entry.finished and not set(self._hub.publishers(self.name)) - entry.finished_by:
            span = self.consumers.past(request)
            if entry.whole if span is None else self.consumers.known(span):
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

    # Upstream subscriptions

    def _subscribe_to(self, publishers: list[int], now: float) -> None:
        """SUBSCRIBE to every one of them; the first is also asked for the past that is wanted."""
        fill_start = self.consumers.fill_start()
        for key in publishers:
            if key in self._upstreams:
                continue
            session = self._hub.session(key)
            if session is None:
                continue
            parameters = Parameters.of(
                location_filter=LocationFilter.next_object(), group_order=GroupOrder.ASCENDING
            )
            if fill_start is not None:
                fill = Parameters.of(location_filter=LocationFilter.absolute_start(*fill_start))
                parameters = parameters.replace(fill_parameters=fill)
            asked = self.consumers.new_group_request()
            if asked is not None:
                parameters = parameters.replace(new_group_request=asked)
            try:
                request_id = session.requester.subscribe(self.name, parameters)
            except UsageError:
                continue
            upstream = self._upstreams[key] = Upstream(Place(key, request_id))
            self._hub.bind(upstream.place, self)
            self._hub.stats.upstream_subscriptions += 1
            if fill_start is not None:
                self._hub.stats.upstream_fills += 1
                upstream.fill = self.retriever.begin_fill(upstream.place, fill_start, now)
                fill_start = None
        if not self._upstreams:
            self.consumers.refuse_waiting(DoesNotExist("no publisher of this track can be asked"))

    def _accepted(self, upstream: Upstream, reply: SubscribeOk, now: float) -> None:
        largest: Location | None = reply.parameters.get(ParameterType.LARGEST_OBJECT)
        known = self.track.largest
        alone = not self.established and not self.track.listeners
        if alone and known is not None and (largest is None or largest < known):
            # Its publisher began anew at Locations that are cached of an earlier publication.
            self._use(self._hub.reopen(self.name))
        upstream.established = True
        self.take_properties(reply.track_properties)
        if self.track.ended is not None:
            self.track.reopen()
        if largest is not None:
            self.track.note_largest(largest)
        if upstream.fill is not None:
            self.retriever.fill_accepted(upstream.fill, largest, now)
        self.consumers.answer_waiting(now)
        self.check_idle_soon()

    def take_properties(self, properties: KeyValues) -> None:
        """Track Properties came from upstream: a later set replaces the cached one (§10)."""
        if properties != self.track.properties:
            self.track.properties = properties
            self._hub.cache.schedule(self._entry)

    def _gone(
        self,
        upstream: Upstream,
        now: float,
        *,
        status: int,
        reason: str,
        error: RequestError,
        code: int = StreamCode.INTERNAL_ERROR,
    ) -> None:
        """An upstream subscription is over; with the last one the Track ends downstream too."""
        key = upstream.place.session
        if self._upstreams.pop(key, None) is None:
            return
        self._hub.unbind(upstream.place)
        self._streams = {
            stream: pair for stream, pair in self._streams.items() if pair[1] is not upstream
        }
        upstream.close_streams(code)
        fill, upstream.fill = upstream.fill, None
        if fill is not None and fill.place == upstream.place:
            self.retriever.failed(fill, now)
        if status == PublishDoneCode.TRACK_ENDED:
            finished = self._entry.finished_by
            finished.add(key)
            finished.intersection_update(
                [other for other in finished if self._hub.session(other) is not None]
            )
        if self._upstreams:
            return
        if upstream.established:
            if status != PublishDoneCode.TRACK_ENDED and self._entry.whole:
                status, reason = PublishDoneCode.TRACK_ENDED, ""  # nothing of it can be missing
            self.track.end(status, reason)
        self.consumers.refuse_waiting(error)
        self.check_idle(now)

    def session_lost(self, key: int, now: float) -> None:
        """A session that was asked for the Track is gone."""
        upstream = self._upstreams.get(key)
        if upstream is not None:
            self._gone(
                upstream,
                now,
                status=PublishDoneCode.INTERNAL_ERROR,
                reason="the publisher was lost",
                error=DoesNotExist("the publisher was lost"),
            )
        self.retriever.session_lost(key, now)

    # Events of our requests

    def event(self, place: Place, event: events.Event, now: float) -> None:
        """An event of a request that was made upstream for this Track; not a `StreamEvent`."""
        upstream = self._upstreams.get(place.session)
        if upstream is not None and upstream.place == place:
            self._upstream_event(upstream, event, now)
            return
        retrieval = self.retriever.find(place)
        if retrieval is None:
            return
        if isinstance(event, events.DataStreamOpened):
            self._open_range(retrieval, place, event.stream_id, now)
        elif isinstance(event, events.TrackMalformed):
            self._malformed(place.session, event.reason, now)
        else:
            self.retriever.event(retrieval, event, now)

    def _upstream_event(self, upstream: Upstream, event: events.Event, now: float) -> None:
        key = upstream.place.session
        if isinstance(event, events.DataStreamOpened):
            self._open_stream(upstream, event, now)
        elif isinstance(event, events.RequestAccepted):
            if isinstance(event.reply, SubscribeOk):
                self._accepted(upstream, event.reply, now)
        elif isinstance(event, events.RequestRefused):
            error = _passed_on(event)
            status, reason = PublishDoneCode.INTERNAL_ERROR, error.reason
            self._gone(upstream, now, status=status, reason=reason, error=error)
        elif isinstance(event, events.SubscriptionEnded):
            error = DoesNotExist(event.reason or "the track has ended")
            self._gone(upstream, now, status=event.status, reason=event.reason, error=error)
        elif isinstance(event, events.RequestCancelled):
            self._gone(
                upstream,
                now,
                status=PublishDoneCode.INTERNAL_ERROR,
                reason="the publisher ended the subscription",
                error=DoesNotExist("the publisher ended the subscription"),
            )
        elif isinstance(event, events.TrackMalformed):
            self._malformed(key, event.reason, now)
        elif isinstance(event, events.DatagramReceived):
            self._datagram(key, event.datagram, now)

    def _open_stream(self, upstream: Upstream, event: events.DataStreamOpened, now: float) -> None:
        key = upstream.place.session
        if isinstance(event.header, SubgroupHeader):
            intake = upstream.open_stream(self.bay, event.stream_id, event.header)
            self._streams[key, event.stream_id] = (intake, upstream)
        elif isinstance(event.header, FetchHeader):
            fill = upstream.fill
            if fill is not None and fill.fill and fill.place == upstream.place:
                self._open_range(fill, upstream.place, event.stream_id, now)
            else:
                self._stop(key, event.stream_id, StreamCode.CANCELLED)

    def _open_range(self, retrieval: Retrieval, place: Place, stream_id: int, now: float) -> None:
        intake = self.retriever.stream_opened(retrieval, stream_id, now)
        self._streams[place.session, stream_id] = (intake, retrieval)

    def stream_event(self, key: int, event: StreamEvent, now: float) -> None:
        """An event of a data stream of a request that was made upstream for this Track."""
        found = self._streams.get((key, event.stream_id))
        if found is None:
            return  # a stream that is not taken any more
        intake, owner = found
        if isinstance(owner, Retrieval):
            owner.progress_at = now
        try:
            if isinstance(event, events.ObjectChunk):
                intake.chunk(event.data)
            elif isinstance(event, events.ObjectStarted):
                intake.started(event.header, now)
            elif isinstance(event, events.ObjectEnded):
                intake.completed()
            elif isinstance(event, events.RangeMarked):
                intake.marked(event.kind, event.location)
            else:
                self._stream_ended(key, event, intake, owner, now)
        except MalformedTrack as exc:
            self._malformed(key, exc.reason, now)
        except StoreFull as exc:
            self._too_much(key, event.stream_id, owner, str(exc), now)

    def _stream_ended(
        self,
        key: int,
        event: events.DataStreamEnded,
        intake: Intake,
        owner: Upstream | Retrieval,
        now: float,
    ) -> None:
        del self._streams[key, event.stream_id]
        if isinstance(owner, Retrieval):
            if event.reset_code is not None:
                intake.ended(event.reset_code)
            self.retriever.stream_ended(owner, event.reset_code, now)
        else:
            owner.streams.pop(event.stream_id, None)
            intake.ended(event.reset_code)

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
            self._malformed(key, exc.reason, now)
        except StoreFull:
            stats.too_large += 1
        else:
            self._hub.cache.began(self._entry, header.location, now)
            stats.objects_in += 1
            stats.octets_in += len(datagram.payload)

    # What goes wrong

    def _too_much(
        self, key: int, stream_id: int, owner: Upstream | Retrieval, reason: str, now: float
    ) -> None:
        """An Object cannot be held: its stream ends downstream too, the Track goes on."""
        code = StreamCode.EXCESSIVE_LOAD
        if isinstance(owner, Retrieval):
            self.retriever.cut(owner, now)
            return
        self._hub.stats.too_large += 1
        self._hub.report("not_carried", track=str(self.name), session=key, reason=reason)
        intake, _ = self._streams.pop((key, stream_id))
        self._stop(key, stream_id, code)
        owner.streams.pop(stream_id, None)
        intake.ended(code)

    def _malformed(self, key: int, reason: str, now: float) -> None:
        """What a session sent breaks §12.1: the Track ends for everybody, nothing stays cached."""
        code = StreamCode.MALFORMED_TRACK
        self._hub.stats.malformed += 1
        self._hub.report("malformed", track=str(self.name), session=key, reason=reason)
        self._hub.ban(key, self.name)
        self.consumers.end_malformed(MalformedTrack("the track is malformed"))
        self._cancel_upstreams(code, now)
        self._use(self._hub.reopen(self.name))
        self.check_idle(now)

    def _cancel_upstreams(self, code: int, now: float) -> None:
        upstreams, self._upstreams = self._upstreams, {}
        self.retriever.cancel(code, now)
        for upstream in upstreams.values():
            self._hub.unbind(upstream.place)
            session = self._hub.session(upstream.place.session)
            if session is not None:
                session.requester.cancel(upstream.place.request_id, code)
            upstream.close_streams(code)
        self._streams.clear()

    def _stop(self, key: int, stream_id: int, code: int) -> None:
        session = self._hub.session(key)
        if session is not None:
            session.requester.stop_stream(stream_id, code)

    def forget_stream(self, place: Place | None, stream_id: int | None) -> None:
        """A stream is not taken any more; what still comes of it is dropped."""
        if place is not None and stream_id is not None:
            self._streams.pop((place.session, stream_id), None)

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
        if self.consumers.waiting or self.track.followed:
            self._idle_since = None
            return
        linger = self._hub.limits.upstream_linger
        if self._upstreams:
            if self._idle_since is None:
                self._idle_since = now
                self._hub.at(now + linger, self.check_idle)
            if now < self._idle_since + linger:
                return
            self._cancel_upstreams(StreamCode.CANCELLED, now)
        self.retriever.cancel(StreamCode.CANCELLED, now)
        self.consumers.release()
        self._hub.release(self)


def _passed_on(event: events.RequestRefused) -> RequestError:
    """The error of upstream as it goes downstream; a redirect is not followed."""
    error = event.error
    if error.error_code == RequestCode.REDIRECT:
        return DoesNotExist("the publisher is elsewhere")
    retry = error.retry_interval - 1 if error.retry_interval else None
    return RequestError(error.reason, error.error_code, retry)

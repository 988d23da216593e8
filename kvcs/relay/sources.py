"""The upstream subscriptions of one Track: asked for by SUBSCRIBE, or begun by PUBLISH (MOQT §7).

Downstream requests are served while one of them flows: it is established and its Forward State
is 1. What a PUBLISH has begun lives as long as its publisher wants; while nobody downstream needs
the Track it is paused, and the cache tells what it lacks as it does after an eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from kvcs.access.permits import Place
from kvcs.errors import RequestError, UsageError
from kvcs.moqt import events
from kvcs.moqt.errors import DoesNotExist, PublishDoneCode, RequestCode, StreamCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.intervals import FIRST, LAST, following
from kvcs.moqt.messages import SubscribeOk
from kvcs.moqt.names import GroupOrder, Location
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.sending.publishing import SubscriptionDelivery
from kvcs.moqt.track.bridge import finish_open
from kvcs.relay.claims import Claims
from kvcs.relay.failover import End
from kvcs.relay.hub import Hub
from kvcs.relay.steering import Steering
from kvcs.relay.upstream import Retrieval, Upstream

if TYPE_CHECKING:
    from kvcs.relay.tracks import RelayTrack


class Sources:
    """Where the Objects of one Track come from as they are published.

    Args:
        hub: the relay's core.
        owner: the Track.
    """

    def __init__(self, hub: Hub, owner: RelayTrack) -> None:
        self._hub = hub
        self._owner = owner
        self._upstreams: dict[Place, Upstream] = {}
        self.claims = Claims(hub, owner)
        self._steering = Steering(hub, owner, self)
        self._untried: list[int] = []
        """Upstreams that are asked if those before them refuse, or take long."""
        self._patient = False
        """Whether upstreams are asked to wait for a publisher."""
        self._refusal: RequestError | None = None
        """What tells most of why upstreams refused: the first that is not that there is nothing."""
        self._missed_streams = False
        self.live_from = FIRST
        """The first Location that was to come live since something flows."""

    def __bool__(self) -> bool:
        """Whether there is any, established or not."""
        return bool(self._upstreams)

    @property
    def established(self) -> bool:
        """Whether one is Established."""
        return any(upstream.established for upstream in self._upstreams.values())

    @property
    def flowing(self) -> bool:
        """Whether one brings what is published."""
        return any(upstream.flowing for upstream in self._upstreams.values())

    @property
    def awaiting_publisher(self) -> bool:
        """Whether no upstream has the Track, and they were asked to wait for a publisher."""
        return self._patient and bool(self._upstreams) and not self.established

    @property
    def published(self) -> bool:
        """Whether a PUBLISH has begun one."""
        return any(upstream.published for upstream in self._upstreams.values())

    def sessions(self, *, published: bool = False) -> list[int]:
        """Sessions that are sources; those only that PUBLISH where ``published``."""
        found = (
            up.place.session for up in self._upstreams.values() if up.published or not published
        )
        return list(dict.fromkeys(found))

    def subscriptions(self) -> list[Upstream]:
        """Those that are Established."""
        return [upstream for upstream in self._upstreams.values() if upstream.established]

    def find(self, place: Place) -> Upstream | None:
        """The upstream subscription of a request."""
        return self._upstreams.get(place)

    # Beginning

    def subscribe_to(self, publishers: list[int], now: float) -> None:
        """SUBSCRIBE to every one of them; the first is also asked for the past that is wanted."""
        filling = False  # one of them alone is asked for the past
        for key in publishers:
            upstream = self._subscribe(key, now, fill=not filling)
            filling = filling or (upstream is not None and upstream.fill is not None)
        if not self._upstreams:
            error = DoesNotExist("no publisher of this track can be asked")
            self._owner.consumers.refuse_waiting(error)

    def try_upstreams(self, keys: list[int], now: float) -> None:
        """SUBSCRIBE to one upstream after the other, until one accepts.

        Nobody announced the Track here, so each is as good as the next. One that refuses is
        followed by the next at once; one that says nothing is joined by the next, and whoever
        accepts first is kept. Where all refuse, those that wait for a publisher to come wait at
        every upstream at the same time.
        """
        self._patient = False
        self._refusal = None
        self._untried = list(keys)
        self._try_next(now)

    def _try_next(self, now: float) -> None:
        """Ask the next upstream; refuse whoever waits after the last one."""
        while self._untried:
            upstream = self._subscribe(self._untried.pop(0), now, tried=True)
            if upstream is not None:
                self._owner.consumers.publisher_asked(now)
                self._limit_try(upstream, now)
                return
        if not self._upstreams:
            nothing = DoesNotExist("no upstream has this track")
            self._nobody_has_it(self._refusal or nothing, now)

    def _limit_try(self, upstream: Upstream, now: float) -> None:
        def check(later: float) -> None:
            place = upstream.place
            if self._upstreams.get(place) is upstream and not self.established and self._untried:
                track = str(self._owner.name)
                self._hub.report("upstream_slow", track=track, session=place.session)
                self._try_next(later)

        self._hub.at(now + self._hub.limits.upstream_try, check)

    def _nobody_has_it(self, error: RequestError, now: float) -> None:
        """Every upstream has refused: who waits for a publisher to come waits there."""
        if self._owner.failover.asking:
            self._owner.failover.fail(now)
            return
        consumers = self._owner.consumers
        patience = consumers.refuse_impatient(error, now)
        if patience <= 0 or self._patient:
            return
        self._patient = True
        for key in self._hub.upstreams(self._owner.name):
            self._subscribe(key, now, tried=True, patience=patience)

    def _keep_alone(self, accepted: Upstream, now: float) -> None:
        """An upstream has accepted: the others that were asked in case it does not are let go."""
        self._untried.clear()
        self._patient = False
        for place, other in list(self._upstreams.items()):
            if not other.tried or other.established or other is accepted:
                continue
            del self._upstreams[place]
            self._hub.unbind(place)
            session = self._hub.session(place.session)
            if session is not None:
                session.requester.cancel(place.request_id, StreamCode.CANCELLED)
            self.end_fill(other, now)

    def end_fill(self, upstream: Upstream, now: float) -> None:
        """A subscription is over that was asked for a fill; what lacks comes by FETCH."""
        fill: Retrieval | None
        fill, upstream.fill = upstream.fill, None
        if fill is not None and fill.place == upstream.place:
            if fill.bridge is not None:
                self._owner.retriever.drop(fill, now)  # the next source is asked for it
            else:
                self._owner.retriever.failed(fill, now)

    def _subscribe(
        self,
        key: int,
        now: float,
        *,
        fill: bool = True,
        tried: bool = False,
        patience: float = 0.0,
    ) -> Upstream | None:
        """SUBSCRIBE to a session; None where that cannot be, or it is a source already."""
        owner, stats = self._owner, self._hub.stats
        session = self._hub.session(key)
        if session is None or key in self.sessions():
            return None
        bridge = owner.failover.bridge
        if bridge is not None:
            fill_start = owner.failover.missing
        else:
            fill_start = owner.consumers.fill_start() if fill else None
        parameters = self._parameters(fill_start)
        if patience > 0:
            parameters = parameters.replace(rendezvous_timeout=max(1, round(patience * 1000)))
        try:
            request_id = session.requester.subscribe(owner.name, parameters)
        except UsageError:
            return None
        upstream = Upstream(Place(key, request_id), tried=tried)
        self._upstreams[upstream.place] = upstream
        self._hub.bind(upstream.place, owner)
        stats.upstream_subscriptions += 1
        if fill_start is not None:
            stats.upstream_fills += 1
            upstream.fill = owner.retriever.begin_fill(upstream.place, fill_start, now, bridge)
        return upstream

    def _parameters(self, fill_start: Location | None) -> Parameters:
        parameters = Parameters.of(
            location_filter=LocationFilter.next_object(), group_order=GroupOrder.ASCENDING
        )
        if fill_start is not None:
            fill = Parameters.of(location_filter=LocationFilter.absolute_start(*fill_start))
            parameters = parameters.replace(fill_parameters=fill)
        asked = self._owner.consumers.new_group_request()
        if asked is not None:
            parameters = parameters.replace(new_group_request=asked)
        return parameters

    def take(self, place: Place, event: events.PublishReceived, now: float) -> None:
        """Accept a PUBLISH: a subscription that is established from now on."""
        session = self._hub.session(place.session)
        if session is None:
            return
        upstream = Upstream(place, published=True)
        upstream.forward = upstream.wanted = bool(event.parameters.get(ParameterType.FORWARD, 1))
        self._upstreams[place] = upstream
        self._hub.bind(place, self._owner)
        self._hub.stats.upstream_publishes += 1
        expires_ms = self._hub.expires_ms(place)
        session.responder.accept_publish(place.request_id, expires_ms=expires_ms)
        largest = event.parameters.get(ParameterType.LARGEST_OBJECT)
        self._named(upstream, largest, event.track_properties, now)
        if self._owner.needed:
            self.resume(now)

    def _established(
        self, upstream: Upstream, largest: Location | None, properties: KeyValues, now: float
    ) -> None:
        owner = self._owner
        known = owner.track.largest
        alone = not self.established and not owner.track.listeners
        if alone and known is not None and (largest is None or largest < known):
            # Its publisher began anew at Locations that are cached of an earlier publication.
            owner.begin_anew(now)
        if known is not None and largest is not None and largest > known:
            if self.established:
                upstream.before = known, largest  # the others bring it, or leave
            elif not owner.failover.asking:
                self._go_on_anew()
        if not self.flowing and not owner.failover.asking:
            self.live_from = FIRST if largest is None else following(largest) or LAST
        upstream.established = True
        self._keep_alone(upstream, now)
        owner.take_properties(properties)
        if owner.track.ended is not None:
            owner.track.reopen()
        if largest is not None:
            owner.track.note_largest(largest)
        if owner.failover.asking:
            owner.failover.accepted(upstream, now)
        if upstream.fill is not None:
            owner.retriever.fill_accepted(upstream.fill, largest, now)
        if upstream.flowing:
            owner.consumers.answer_waiting(now)
        owner.check_idle_soon()

    def _named(
        self, upstream: Upstream, largest: Location | None, properties: KeyValues, now: float
    ) -> None:
        """A publisher serves the Track; it may have to show its Largest Object first."""
        self.claims.named(upstream, largest, properties, self._established, self.not_there, now)

    def not_there(self, upstream: Upstream, now: float) -> None:
        """A publisher has not what it names as its Largest Object."""
        status, reason = PublishDoneCode.GOING_AWAY, "the publisher has not what it names"
        self._gone(upstream, now, status=status, reason=reason, error=DoesNotExist(reason))

    # Pausing what was published

    def resume(self, now: float) -> None:
        """Somebody downstream needs the Track: every publisher is to send (§7)."""
        for upstream in list(self._upstreams.values()):
            if upstream.published:
                self._steering.steer(upstream, forward=True, now=now)

    def pause(self, now: float) -> None:
        """Nobody downstream needs the Track."""
        for upstream in list(self._upstreams.values()):
            if upstream.published:
                self._steering.steer(upstream, forward=False, now=now)

    # What upstream says

    def event(self, upstream: Upstream, event: events.Event, now: float) -> None:
        """An event of an upstream subscription that is not about its data."""
        if isinstance(event, events.RequestAccepted):
            if isinstance(event.reply, SubscribeOk):
                largest = event.reply.parameters.get(ParameterType.LARGEST_OBJECT)
                self._named(upstream, largest, event.reply.track_properties, now)
        elif isinstance(event, events.RequestUpdateAnswered):
            self._steering.answered(upstream, event, now)
        elif isinstance(event, events.StateNotified):
            largest = event.parameters.get(ParameterType.LARGEST_OBJECT)
            if largest is not None:
                self.claims.noted(upstream, largest)
        elif isinstance(event, events.RequestRefused):
            error = passed_on(event)
            status, reason = PublishDoneCode.INTERNAL_ERROR, error.reason
            self._gone(upstream, now, status=status, reason=reason, error=error)
        elif isinstance(event, events.SubscriptionEnded):
            error = DoesNotExist(event.reason or "the track has ended")
            if not event.every_stream_seen:
                self._streams_missed()
            self._gone(upstream, now, status=event.status, reason=event.reason, error=error)
        elif isinstance(event, events.RequestCancelled):
            self._gone(
                upstream,
                now,
                status=PublishDoneCode.INTERNAL_ERROR,
                reason="the publisher ended the subscription",
                error=DoesNotExist("the publisher ended the subscription"),
            )

    def arriving(self) -> Iterator[tuple[int, int, Callable[[int], None]]]:
        """Publisher Priorities of what arrives, octets that it keeps, and how it is stopped."""
        for upstream in self._upstreams.values():
            for stream_id, priority, octets in upstream.arriving():
                yield priority, octets, partial(self._owner.stop_arriving, upstream, stream_id)

    # Ends

    def _streams_missed(self) -> None:
        """Streams from upstream never came: who follows the Track may lack what was on them."""
        self._missed_streams = True
        for listener in self._owner.track.listeners:
            if isinstance(listener, SubscriptionDelivery):
                listener.streams_missed = True

    def _lacks_what_was_before(self) -> bool:
        """Whether each upstream that is left began behind Objects that have not come."""
        left = [upstream.before for upstream in self._upstreams.values() if upstream.established]
        unknown = self._owner.track.first_unknown
        return bool(left) and all(
            gap is not None and unknown(following(gap[0]) or gap[1], gap[1]) for gap in left
        )

    def _go_on_anew(self) -> None:
        """Objects were published while no upstream was followed that brings them: who follows the
        Track asks again, with a fill, as where its publisher was lost."""
        for listener in list(self._owner.track.listeners):
            if isinstance(listener, SubscriptionDelivery):
                listener.host.subscription_failed(
                    listener, PublishDoneCode.GOING_AWAY, "a publisher was lost"
                )

    def end_subgroups(self, status: int) -> None:
        """End what no stream brings any more: where the Track has ended, that was all of it."""
        if status == PublishDoneCode.TRACK_ENDED and not self._missed_streams:
            finish_open(self._owner.track)

    def session_lost(self, key: int, now: float) -> None:
        """A session is gone, and what came from it.

        Who is served is told GOING_AWAY, not that the publication failed: the publisher may be back
        soon, and whoever asks again then goes on where this ends.
        """
        for upstream in [up for up in self._upstreams.values() if up.place.session == key]:
            self._gone(
                upstream,
                now,
                status=PublishDoneCode.GOING_AWAY,
                reason="the publisher was lost",
                error=DoesNotExist("the publisher was lost"),
            )

    def cancel(self, code: int, *, published: bool) -> None:
        """End what was asked for; also what a PUBLISH has begun where ``published``."""
        for place, upstream in list(self._upstreams.items()):
            if upstream.published and not published:
                continue
            del self._upstreams[place]
            self._hub.unbind(place)
            self.claims.left(upstream)
            session = self._hub.session(place.session)
            if session is not None:
                session.requester.cancel(place.request_id, code)
            self._owner.forget_streams(upstream)
            upstream.close_streams(code)

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
        owner = self._owner
        if self._upstreams.pop(upstream.place, None) is None:
            return
        self._hub.unbind(upstream.place)
        self.claims.left(upstream)
        if upstream.flowing and (not self.established or self._lacks_what_was_before()):
            if owner.failover.goes_on(upstream, End(status, reason, error), now):
                return
        owner.forget_streams(upstream)
        upstream.close_streams(code)
        self.end_fill(upstream, now)
        if status == PublishDoneCode.TRACK_ENDED:
            owner.finished_by(upstream.place.session)
        if upstream.tried and not upstream.established and not self.established:
            self._hub.report(
                "upstream_failed",
                track=str(owner.name),
                session=upstream.place.session,
                code=int(error.code),
                reason=error.reason,
            )
            if self._refusal is None and error.code != RequestCode.DOES_NOT_EXIST:
                self._refusal = error
            if not self._patient:
                self._try_next(now)  # sooner than its time was up
            elif not self._upstreams:
                owner.consumers.refuse_impatient(error, now)
            owner.check_idle(now)
            return
        if self._upstreams:
            if upstream.established and self._lacks_what_was_before():
                self._go_on_anew()
            return
        if upstream.established:
            if status != PublishDoneCode.TRACK_ENDED and owner.whole:
                status, reason = PublishDoneCode.TRACK_ENDED, ""  # nothing of it can be missing
            self.end_subgroups(status)
            owner.track.end(status, reason)
        owner.consumers.publication_over(error)
        owner.check_idle(now)


def passed_on(event: events.RequestRefused) -> RequestError:
    """The error of upstream as it goes downstream; a redirect is not followed."""
    error = event.error
    if error.error_code == RequestCode.REDIRECT:
        return DoesNotExist("the publisher is elsewhere")
    retry = error.retry_interval - 1 if error.retry_interval else None
    return RequestError(error.reason, error.error_code, retry)

"""Who wants one Track downstream: requests that wait, and those that are served (MOQT §7)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvcs.access.permits import Place
from kvcs.errors import RequestError
from kvcs.moqt.errors import PublishDoneCode, RequestCode, StreamCode
from kvcs.moqt.filters import LocationFilter, LocationFilterType, Range
from kvcs.moqt.intervals import LAST
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.sending.publishing import location_filter
from kvcs.moqt.session import Session
from kvcs.relay.cache import RETRY_MS
from kvcs.relay.hub import Hub
from kvcs.relay.upstream import Ask, Waiting

if TYPE_CHECKING:
    from kvcs.relay.tracks import RelayTrack

SWEEP_AT = 64
"""Requests served, before those that are over are looked for among them."""


class Consumers:
    """The downstream requests of one Track.

    Args:
        hub: the relay's core.
        owner: the Track.
    """

    def __init__(self, hub: Hub, owner: RelayTrack) -> None:
        self._hub = hub
        self._owner = owner
        self._waiting: list[Waiting] = []
        self._served: dict[Place, Ask] = {}
        self._sweep_at = SWEEP_AT
        self._awake: dict[Place, None] = {}
        """Subscriptions that are served and may not be paused: the many that are cost nothing."""
        self._offered: dict[int, dict[Place, int | None]] = {}
        """By session, SUBSCRIBE_TRACKS that this publication was offered to, and the PUBLISH of
        each; None where none was made."""
        self._sweep_offers_at = SWEEP_AT

    @property
    def waiting(self) -> bool:
        """Whether a request has no answer yet."""
        return bool(self._waiting)

    def forwards(self, request: Waiting) -> bool:
        """Whether a request needs what is published, or what upstream knows of it."""
        if request.ask is Ask.SUBSCRIBE:
            return bool(request.parameters.get(ParameterType.FORWARD, 1))
        if request.ask is Ask.PUBLISH:
            session = self._hub.session(request.place.session)
            return session is not None and session.asked_prefixes.forwards(request.place.request_id)
        return True

    @property
    def forwarding(self) -> bool:
        """Whether a subscription that is served, or soon will be, is not paused."""
        while self._awake:
            place, _ = self._awake.popitem()
            if self._forwards(place):
                self._awake[place] = None
                return True
        return False

    def _forwards(self, place: Place) -> bool:
        session = self._hub.session(place.session)
        if session is None:
            return False
        delivery = session.deliveries.subscription(place.request_id)
        if delivery is not None:
            return bool(delivery.forward)
        # A PUBLISH may wait for its stream.
        return self._served.get(place) is Ask.PUBLISH and self._hub.is_open(place)

    def updated(self, place: Place) -> None:
        """A subscription that is served was updated: it may be paused no longer."""
        if place in self._served:
            self._awake[place] = None

    def sessions(self) -> set[int]:
        """Sessions that are served, or wait."""
        waiting = [request.place.session for request in self._waiting]
        return {place.session for place in self._served} | set(waiting)

    # Requests that wait

    def unanswered(self) -> list[Waiting]:
        """Requests that have no answer yet."""
        return list(self._waiting)

    def hold(self, request: Waiting, seconds: float, now: float) -> bool:
        """Let a request wait for a publisher or for its answer; TIMEOUT when it takes longer.

        Returns:
            False where too many wait, and it was refused.
        """
        if len(self._waiting) >= self._hub.limits.max_waiting_per_track:
            error = RequestError("too many requests wait", RequestCode.EXCESSIVE_LOAD, RETRY_MS)
            self.refuse(request, error)
            return False
        self._waiting.append(request)
        self._limit(request, seconds, now)
        return True

    def publisher_asked(self, now: float) -> None:
        """A publisher is there: who waits now waits for its answer, however long it waited."""
        for request in self._waiting:
            self._limit(request, self._hub.limits.upstream_wait, now)

    def _limit(self, request: Waiting, seconds: float, now: float) -> None:
        def expire(later: float) -> None:
            self._waiting.remove(request)
            error = RequestError("no publisher answered in time", RequestCode.TIMEOUT)
            self.refuse(request, error)
            self._owner.check_idle(later)

        request.stop_waiting()
        request.timer = self._hub.at(now + seconds, expire)

    def fill_start(self) -> Location | None:
        """Where the past begins that waiting subscriptions want and the cache lacks."""
        starts: list[Location] = []
        for request in self._waiting:
            chosen = self._fill_filter(request) if request.ask is Ask.SUBSCRIBE else None
            if chosen is not None and chosen.type in (
                LocationFilterType.NONE,
                LocationFilterType.ABSOLUTE_START,
            ):
                starts.append(chosen.for_subscription(None).start)
        if not starts:
            return None
        track = self._owner.track
        missing = track.first_unknown(min(starts), LAST)
        if missing is None or track.next_stored(missing[0], LAST) is not None:
            return None  # it would bring what is here again: a FETCH names the gaps
        return missing[0]

    def new_group_request(self) -> int | None:
        """NEW_GROUP_REQUEST for upstream, where somebody asks for a new Group."""
        asked = [
            request.parameters.get(ParameterType.NEW_GROUP_REQUEST) for request in self._waiting
        ]
        values: list[int] = [value for value in asked if value is not None]
        return max(values, default=None)

    # Answers

    def answer(self, request: Waiting, now: float) -> None:
        """Serve a request: an upstream is Established, or the cache alone has the answer."""
        request.stop_waiting()
        self._hub.watch(now)
        place, track = request.place, self._owner.track
        session = self._hub.session(place.session)
        if session is None:
            return
        responder, stats = session.responder, self._hub.stats
        if request.ask is Ask.STATUS:
            responder.answer_track_status(place.request_id, track)
            self._hub.unbind(place)
            return
        if request.ask is Ask.FORWARD:
            responder.forward_ready(place.request_id)
            return
        if request.ask is Ask.PUBLISH:
            self._publish(place, session)
            return
        span = self.past(request)
        cached = None if span is None else self.known(span)
        if cached is not None:
            stats.hits += cached
            stats.misses += not cached
        self._sweep()
        self._served[place] = request.ask
        on_unknown = self._owner.retriever.on_unknown
        if request.ask is Ask.SUBSCRIBE:
            stats.subscribes += 1
            expires_ms = self._hub.expires_ms(place)
            responder.accept_subscribe(
                place.request_id,
                track,
                now,
                on_unknown,
                expires_ms=expires_ms,
                before_forward=partial(self._owner.may_forward, place),
            )
            self._awake[place] = None
        else:
            stats.fetches += 1
            responder.accept_fetch(place.request_id, track, now, on_unknown)
        self._hub.report(
            "serving",
            track=str(track.name),
            session=place.session,
            request=request.ask.name.lower(),
            largest=None if track.largest is None else str(track.largest),
            past=None if span is None else f"{span.start}-{span.end}",
            cached=cached,
            upstream=self._owner.established,
        )

    def answer_waiting(self, now: float) -> None:
        """Serve every request that waits."""
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self.answer(request, now)

    def refuse(self, request: Waiting, error: RequestError) -> None:
        """Refuse a request."""
        request.stop_waiting()
        session = self._hub.session(request.place.session)
        if request.ask in (Ask.PUBLISH, Ask.FORWARD):
            if session is None:
                return
            if request.ask is Ask.PUBLISH:
                session.responder.publish_skipped(request.place.request_id, self._owner.name)
            else:
                session.responder.forward_ready(request.place.request_id)
            return
        self._hub.unbind(request.place)
        if session is not None:
            session.responder.refuse(request.place.request_id, error)

    def turn_away(self, request: Waiting, error: RequestError) -> None:
        """Refuse one request, whether it waits already or not."""
        if request in self._waiting:
            self._waiting.remove(request)
        self.refuse(request, error)

    def refuse_waiting(self, error: RequestError) -> None:
        """Refuse every request that waits."""
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self.refuse(request, error)

    # PUBLISH

    def may_offer(self, place: Place) -> bool:
        """Whether a SUBSCRIBE_TRACKS is to get a PUBLISH (§7).

        Not where it has had one of this publication, its session still has one, or the session's
        SUBSCRIBE is being held: that one is served instead.
        """
        offered = self._offered.get(place.session, {})
        if place in offered:
            return False
        if any(
            offer is not None and self._hub.is_open(Place(place.session, offer))
            for offer in offered.values()
        ):
            return False
        if place.session in self.held_sessions():
            return False
        # Its other SUBSCRIBE_TRACKS have no PUBLISH now: those that are over may be forgotten.
        kept = {tracks: offer for tracks, offer in offered.items() if self._hub.is_open(tracks)}
        self._offered[place.session] = {**kept, place: None}
        self._sweep_offers()
        return True

    def _sweep_offers(self) -> None:
        """Forget offers to sessions that are over, from time to time."""
        if len(self._offered) < self._sweep_offers_at:
            return
        self._offered = {
            key: offers
            for key, offers in self._offered.items()
            if self._hub.session(key) is not None
        }
        self._sweep_offers_at = 2 * len(self._offered) + SWEEP_AT

    def held_sessions(self) -> set[int]:
        """Sessions whose SUBSCRIBE waits."""
        return {request.place.session for request in self._waiting if request.ask is Ask.SUBSCRIBE}

    def _publish(self, place: Place, session: Session) -> None:
        owner, stats = self._owner, self._hub.stats
        if not self._hub.scopes.may_offer(owner.name.namespace):
            session.responder.publish_skipped(place.request_id, owner.name)
            return
        offered = self._offered.setdefault(place.session, {})
        offer = session.responder.publish_tracks(
            place.request_id,
            owner.track,
            owner.retriever.on_unknown,
            lambda: owner.may_forward(Place(place.session, offered[place] or 0)),
        )
        if offer is not None:
            stats.published += 1
            offered[place] = offer
            self._sweep()
            served = Place(place.session, offer)
            self._hub.scopes.offer(served, owner.name.namespace)
            self._served[served] = Ask.PUBLISH
            self._awake[served] = None
            self._hub.bind_downstream(served, owner)
            self._hub.report("publishing", track=str(owner.name), session=place.session)

    def end_offer(self, place: Place, status: int, reason: str) -> None:
        """End the subscription that a SUBSCRIBE_TRACKS has led to."""
        offer = self._offered.get(place.session, {}).get(place)
        session = self._hub.session(place.session)
        if offer is not None and session is not None:
            session.responder.end_subscription(offer, status, reason)

    def publication_over(self, error: RequestError) -> None:
        """No publisher is left: who waits is refused, and the next publication is offered anew."""
        self._offered.clear()
        self.refuse_waiting(error)

    def refuse_impatient(self, error: RequestError, now: float) -> float:
        """Refuse what waits, but for those that asked to wait for a publisher to come (§9.6).

        Returns:
            Seconds that these are ready to wait yet; 0 where there are none.
        """
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            left = request.patient_until - now
            if left > 0:
                self._waiting.append(request)
                self._limit(request, left, now)
            else:
                self.refuse(request, error)
        return max((request.patient_until - now for request in self._waiting), default=0.0)

    # What a request is about

    def known(self, span: Range) -> bool:
        """Whether the cache knows every Location of a range."""
        return span.end is not None and not self._owner.lacks(span.start, span.end)

    def _fill_filter(self, request: Waiting) -> LocationFilter | None:
        """The Location Filter of the fill that a SUBSCRIBE asks for (§3.4); None without one."""
        fill: Parameters | None = request.parameters.get(ParameterType.FILL_PARAMETERS)
        if fill is None or request.parameters.get(ParameterType.FORWARD, 1) == 0:
            return None
        outer = location_filter(request.parameters)
        return location_filter(fill) or outer or LocationFilter.none()

    def past(self, request: Waiting) -> Range | None:
        """The range of the past that a request asks for."""
        if request.ask is Ask.FETCH:
            chosen = location_filter(request.parameters) or LocationFilter.none()
        else:
            fill = self._fill_filter(request)
            if fill is None:
                return None
            chosen = fill
        return chosen.for_fetch(self._owner.track.largest)

    # Ends

    def gone(self, place: Place) -> None:
        """A request was cancelled, or its session is gone."""
        self._served.pop(place, None)
        self._awake.pop(place, None)
        for request in self._waiting:
            if request.place == place:
                request.stop_waiting()
        self._waiting = [waiting for waiting in self._waiting if waiting.place != place]
        self._hub.unbind(place)

    def end_malformed(self, error: RequestError) -> None:
        """End everything at once: the Track is malformed (§12.1)."""
        for place, ask in self._served.items():
            session = self._hub.session(place.session)
            if session is None:
                continue
            if ask in (Ask.SUBSCRIBE, Ask.PUBLISH):
                session.responder.end_subscription(
                    place.request_id, PublishDoneCode.MALFORMED_TRACK, error.reason
                )
            else:
                session.responder.fail_fetch(place.request_id, StreamCode.MALFORMED_TRACK)
        self.release()
        self.publication_over(error)

    def release(self) -> None:
        """Forget what is served: nobody needs the Track any more."""
        for place in self._served:
            self._hub.unbind(place)
        self._served.clear()
        self._awake.clear()

    def _sweep(self) -> None:
        """Forget requests that ended by themselves, from time to time."""
        if len(self._served) < self._sweep_at:
            return
        for place in [place for place in self._served if not self._hub.is_open(place)]:
            del self._served[place]
            self._hub.unbind(place)
        self._sweep_at = 2 * len(self._served) + SWEEP_AT

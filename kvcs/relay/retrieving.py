"""Gets what the cache lacks of one Track from upstream, once for all who wait (MOQT §7, §3.4).

A cold Track's past comes with the upstream SUBSCRIBE as a fill: one round trip, no FETCH, of which
a publisher allows few at a time, and the seam to what is live is exact. Everything else that is
missing, after eviction, expiry or a relative join, comes by FETCH.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet, ref

from kvcs.access.permits import Place
from kvcs.errors import UsageError
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode, StreamCode
from kvcs.moqt.intervals import LAST, LocationSet, preceding
from kvcs.moqt.messages import FetchOk
from kvcs.moqt.names import MAX_VI64, GroupOrder, Location
from kvcs.moqt.objects import RangeKind
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.sending.delivery import RangeSender
from kvcs.moqt.track.bridge import Bridge
from kvcs.moqt.track.ranges import UnknownRun
from kvcs.relay.hub import Hub
from kvcs.relay.intake import RangeIntake
from kvcs.relay.shelved import FromShelf
from kvcs.relay.upstream import MAX_RETRIES, Retrieval

if TYPE_CHECKING:
    from kvcs.relay.tracks import RelayTrack


MAX_RETRIEVALS = 1024
"""Ranges of one Track that are got or wait for their turn; what is beyond is told as unknown."""

WAIT_STEP = 0.05
"""Seconds between looks at a reader whose time is over while it has something to send."""


class Retriever:
    """The ranges of one Track that are being got from upstream.

    Args:
        hub: the relay's core.
        owner: the Track.
    """

    def __init__(self, hub: Hub, owner: RelayTrack) -> None:
        self._hub = hub
        self._owner = owner
        self._active: list[Retrieval] = []
        self._kept: list[Retrieval] = []
        """Retrievals that are over, while readers have not passed what they brought."""
        self._tried: WeakKeyDictionary[RangeSender, LocationSet] = WeakKeyDictionary()
        self._timed: WeakSet[RangeSender] = WeakSet()
        self._shelved = FromShelf(hub, owner)
        self._one_group: set[int] = set()
        """Sessions that take FETCHes of one Group alone."""

    # What readers ask

    def on_unknown(self, reader: RangeSender, run: UnknownRun) -> bool:
        """Look up a run that a reader met; see `kvcs.moqt.sending.delivery.UnknownHandler`."""
        now = reader.asked_at
        if reader.fill_timeout_ms == 0:
            reader.give_up(RangeKind.TIMED_OUT)  # it must not wait (§9.20)
            return False
        tried = self._tried.get(reader)
        missing: tuple[Location, Location] | None = (run.start, run.end)
        if tried is not None:
            missing = tried.first_outside(run.start, run.end)
        if missing is None:
            return False
        if self._shelved.ask(reader, missing[0].group):
            self._limit_wait(reader, now)
            return True
        retrieval = self._find(missing[0]) or self._begin(*missing, reader, now)
        if retrieval is None:
            return False
        retrieval.join(reader)
        self._limit_wait(reader, now)
        return True

    def _find(self, start: Location) -> Retrieval | None:
        return next((one for one in self._active if one.covers(start)), None)

    def _begin(
        self, start: Location, end: Location, reader: RangeSender, now: float
    ) -> Retrieval | None:
        candidates = self._hub.askable(self._owner.name)
        if not candidates or not self._has_room(now):
            return None
        for other in self._active:
            if start < other.start <= end:
                end = preceding(other.start) or start  # the rest is on its way already
        order = reader.group_order
        retrieval = Retrieval(start, end, order, candidates, now, now, owner=reader.host)
        self._active.append(retrieval)
        self._next_candidate(retrieval, now)
        return retrieval if retrieval in self._active else None

    def _has_room(self, now: float) -> bool:
        """Whether one more retrieval may be under way; those whose readers have gone make room."""
        if len(self._active) >= MAX_RETRIEVALS:
            for retrieval in list(self._active):
                if retrieval.place is None and not retrieval.wanted:
                    self._conclude(retrieval, now)
        return len(self._active) < MAX_RETRIEVALS

    def _limit_wait(self, reader: RangeSender, now: float) -> None:
        """Hold a reader to its FILL_TIMEOUT, or to ours where it has none."""
        if reader in self._timed:
            return
        self._timed.add(reader)
        timeout_ms = reader.fill_timeout_ms
        limits = self._hub.limits
        limit = limits.fetch_wait
        if timeout_ms is not None:
            limit = min(timeout_ms / 1000, limits.max_fill_wait)
        # A timer does not keep a reader that is gone, nor what that refers to.
        weak = ref(reader)

        def check(later: float) -> None:
            reader = weak()
            if reader is None:
                return
            self._timed.discard(reader)
            left = limit - reader.waited(later)
            if reader.closed:
                return
            if left <= 0 and not reader.has_more:
                reader.give_up(RangeKind.TIMED_OUT)
            else:
                self._timed.add(reader)
                self._hub.at(later + max(left, WAIT_STEP), check)

        self._hub.at(now + max(limit - reader.waited(now), 0), check)

    # Fills of upstream subscriptions

    def begin_fill(
        self, place: Place, start: Location, now: float, bridge: Bridge | None = None
    ) -> Retrieval:
        """A SUBSCRIBE went upstream that asks for everything from ``start``."""
        order = GroupOrder.ASCENDING
        retrieval = Retrieval(start, LAST, order, [], now, now, place=place, fill=True)
        retrieval.bridge = bridge
        self._active.append(retrieval)
        return retrieval

    def begin_range(
        self, start: Location, end: Location, bridge: Bridge, now: float
    ) -> Retrieval | None:
        """Get a range that subscriptions lack; None where nobody can be asked."""
        candidates = self._hub.askable(self._owner.name)
        if not candidates:
            return None
        retrieval = Retrieval(start, end, GroupOrder.ASCENDING, candidates, now, now)
        retrieval.bridge = bridge
        self._active.append(retrieval)
        self._hub.soon(lambda later: self._retry(retrieval, later))
        return retrieval

    def fill_accepted(self, fill: Retrieval, largest: Location | None, now: float) -> None:
        """SUBSCRIBE_OK came: the fill ends at the Largest Object, or is empty."""
        if fill not in self._active:
            return
        fill.end_known = True
        if largest is None or largest < fill.start:
            self._drop(fill, now)
            return
        fill.end = fill.confirmed_end = largest
        if fill.stream_done:
            self._finish(fill, now, complete=True)
            return

        def check(later: float) -> None:
            if fill in self._active and fill.fill and fill.intake is None:
                self.failed(fill, later)  # it does not come: ask by FETCH
            elif fill in self._active and fill.fill:
                self._watch_progress(fill, later)

        self._hub.at(now + self._hub.limits.fill_wait, check)

    # What upstream says

    def find(self, place: Place) -> Retrieval | None:
        """The retrieval that runs as a request of ours."""
        return next((one for one in self._active if one.place == place), None)

    def stream_opened(self, retrieval: Retrieval, stream_id: int, now: float) -> RangeIntake:
        """The data stream of a retrieval began."""
        start, end = retrieval.asked
        intake = RangeIntake(
            self._owner.bay, retrieval.order, start, end, retrieval.held, retrieval.bridge
        )
        retrieval.intake, retrieval.stream_id = intake, stream_id
        retrieval.progress_at = now
        return intake

    def stream_ended(self, retrieval: Retrieval, code: int | None, now: float) -> None:
        """Its data stream ended."""
        if code is not None:
            self.failed(retrieval, now)
            return
        retrieval.stream_done = True
        if retrieval.end_known:
            self._finish(retrieval, now, complete=True)

    def event(self, retrieval: Retrieval, event: events.Event, now: float) -> None:
        """An event of a FETCH of ours, other than those of its stream."""
        retrieval.progress_at = now
        if isinstance(event, events.RequestAccepted):
            if isinstance(event.reply, FetchOk):
                retrieval.end_known = True
                retrieval.confirmed_end = event.reply.end_location
                self._owner.take_properties(event.reply.track_properties)
            if retrieval.stream_done:
                self._finish(retrieval, now, complete=True)
        elif isinstance(event, events.RequestRefused):
            error = event.error
            if self._is_too_long(retrieval, error.error_code):
                self._ask_again(retrieval, now)
                return
            wait = (error.retry_interval - 1) / 1000
            again = error.error_code == RequestCode.EXCESSIVE_LOAD and (
                0 <= wait <= self._hub.limits.upstream_wait
            )
            if again and retrieval.retries < MAX_RETRIES and retrieval.place is not None:
                retrieval.retries += 1
                key = retrieval.place.session
                self._end_request(retrieval, now)
                retrieval.candidates.insert(0, key)
                self._hub.at(now + wait, lambda later: self._retry(retrieval, later))
            else:
                self.failed(retrieval, now)
        elif isinstance(event, events.RequestCancelled):
            self.failed(retrieval, now)

    def failed(self, retrieval: Retrieval, now: float) -> None:
        """A retrieval did not come to its end: the next candidate is asked for what lacks."""
        if retrieval.fill:
            retrieval.candidates = self._hub.askable(self._owner.name)
        self._finish(retrieval, now, complete=False)

    def begin_anew(self, now: float) -> None:
        """The Track is another one now: what has begun to come went into the one before."""
        for retrieval in list(self._active):
            if retrieval.intake is not None:
                retrieval.let_go(self._owner.track, all_of_it=True)
                self.failed(retrieval, now)

    def session_lost(self, key: int, now: float) -> None:
        """A session is gone, and with it what was asked of it."""
        self._one_group.discard(key)
        for retrieval in list(self._active):
            if retrieval.place is not None and retrieval.place.session == key:
                self.failed(retrieval, now)

    def cancel(self, code: int, now: float) -> None:
        """Give up every retrieval; readers are not told."""
        active, self._active = self._active, []
        for retrieval in active:
            self._leave_queue(retrieval)
        for retrieval in [*active, *self._kept]:
            self._end_request(retrieval, now, cancel=code)
            retrieval.let_partial_go(self._owner.track)
            retrieval.let_go(self._owner.track, all_of_it=True)
        self._kept.clear()

    def cut(self, retrieval: Retrieval, now: float) -> None:
        """The cache is full of what its readers have yet to read: they ask for the rest later."""
        brought = retrieval.objects + (0 if retrieval.intake is None else retrieval.intake.objects)
        retrieval.candidates.clear()
        self._finish(retrieval, now, complete=False, told=brought == 0)

    def let_go(self) -> None:
        """Unmark what was brought and has been read."""
        for retrieval in [*self._active, *self._kept]:
            retrieval.let_go(self._owner.track)
        self._kept = [retrieval for retrieval in self._kept if retrieval.held]

    def pinning(self) -> Iterator[tuple[RangeSender, int]]:
        """Readers for which Groups stay in the cache, and the octets of these."""
        for retrieval in [*self._active, *self._kept]:
            for reader in retrieval.readers:
                octets = retrieval.kept_for(reader)
                if octets:
                    yield reader, octets

    # Inner workings

    def _is_too_long(self, retrieval: Retrieval, code: int) -> bool:
        """Whether a FETCH was refused because it spans several Groups: some servers take none."""
        start, end = retrieval.asked
        if code != RequestCode.NOT_SUPPORTED or start.group == end.group or retrieval.place is None:
            return False
        self._one_group.add(retrieval.place.session)
        return True

    def _ask_again(self, retrieval: Retrieval, now: float) -> None:
        """Make a retrieval's next FETCH of the session that was asked last."""
        if retrieval.place is not None:
            key = retrieval.place.session
            self._end_request(retrieval, now)
            retrieval.candidates.insert(0, key)
        self._next_candidate(retrieval, now)

    def _retry(self, retrieval: Retrieval, now: float) -> None:
        if retrieval in self._active and retrieval.place is None:
            self._next_candidate(retrieval, now)

    def _next_candidate(self, retrieval: Retrieval, now: float) -> None:
        """Send the FETCH to the next session, when that has a slot free."""
        while retrieval.candidates:
            key = retrieval.candidates.pop(0)
            if self._hub.session(key) is not None:
                start = partial(self._start, retrieval, key)
                retrieval.turn = key, start
                self._hub.take_slot(key, retrieval.owner, start, now)
                return
        self._conclude(retrieval, now)

    def _start(self, retrieval: Retrieval, key: int, now: float) -> None:
        retrieval.turn = None
        session = self._hub.session(key)
        if retrieval not in self._active or session is None or not retrieval.wanted:
            self._hub.free_slot(key, retrieval.owner, now)
            if not retrieval.wanted:
                self._conclude(retrieval, now)
            elif retrieval in self._active:
                self._next_candidate(retrieval, now)
            return
        retrieval.one_group = key in self._one_group
        if retrieval.one_group:
            retrieval.steps += 1
        parameters = Parameters.of(
            location_filter=retrieval.location_filter(), group_order=retrieval.order
        )
        try:
            request_id = session.requester.fetch(self._owner.name, parameters)
        except UsageError:
            self._hub.free_slot(key, retrieval.owner, now)
            self._next_candidate(retrieval, now)
            return
        self._hub.stats.upstream_fetches += 1
        retrieval.place = Place(key, request_id)
        retrieval.progress_at = now
        self._hub.bind(retrieval.place, self._owner)
        self._watch_progress(retrieval, now)

    def _leave_queue(self, retrieval: Retrieval) -> None:
        turn, retrieval.turn = retrieval.turn, None
        if turn is not None:
            self._hub.leave_queue(*turn)

    def _watch_progress(self, retrieval: Retrieval, now: float) -> None:
        place, wait = retrieval.place, self._hub.limits.upstream_wait

        def check(later: float) -> None:
            if retrieval not in self._active or retrieval.place != place:
                return
            if later - retrieval.progress_at >= wait:
                self.failed(retrieval, later)
            else:
                self._hub.at(retrieval.progress_at + wait, check)

        self._hub.at(now + wait, check)

    def _end_request(self, retrieval: Retrieval, now: float, cancel: int | None = None) -> None:
        """Part a retrieval from the request that it runs as."""
        place, retrieval.place = retrieval.place, None
        retrieval.close_intake(self._owner.track)
        self._owner.forget_stream(place, retrieval.stream_id)
        stream_id, retrieval.stream_id = retrieval.stream_id, None
        retrieval.end_known = retrieval.stream_done = False
        retrieval.confirmed_end = None
        if place is None:
            return
        session = self._hub.session(place.session)
        if retrieval.fill:
            retrieval.fill = False  # its subscription lives on, only the stream is stopped
            if session is not None and stream_id is not None and cancel is not None:
                session.requester.stop_stream(stream_id, cancel)
            return
        self._hub.unbind(place)
        if session is not None and cancel is not None:
            session.requester.cancel(place.request_id, cancel)
        self._hub.free_slot(place.session, retrieval.owner, now)

    def _finish(
        self, retrieval: Retrieval, now: float, *, complete: bool, told: bool = True
    ) -> None:
        """The request of a retrieval is over; go on with what is still unknown of its range.

        Args:
            retrieval: whose.
            now: the time.
            complete: whether its stream ended with FIN.
            told: whether what is still unknown is what upstream could not tell.
        """
        if retrieval not in self._active:
            return
        end = retrieval.learnt_end()
        if complete and retrieval.intake is not None and end is not None:
            retrieval.intake.complete(end)
            self._infer_status(end)
        self._report(retrieval, now, complete)
        retrieval.close_intake(self._owner.track)
        unknown = retrieval.not_brought(self._owner.track)
        if retrieval.partial is not None and not retrieval.partial.complete:
            unknown.add(*[retrieval.partial.header.location] * 2)
        waiting = retrieval.awaited
        cursor = retrieval.next_cursor(unknown) if complete and waiting else None
        if cursor is not None:
            retrieval.cursor = cursor
            self._ask_again(retrieval, now)
            return
        retrieval.cursor = None
        self._end_request(retrieval, now, cancel=None if complete else StreamCode.CANCELLED)
        if len(unknown) and waiting and retrieval.candidates:
            retrieval.start = unknown.ranges()[0][0]
            self._next_candidate(retrieval, now)
        else:
            self._conclude(retrieval, now, told=told)

    def _infer_status(self, end: Location) -> None:
        """Learn from the Largest Object where a complete fill or FETCH did not bring it.

        It exists, and fetch streams carry no statuses: so it is End of Group or End of Track, and
        nothing follows it in its Group.
        """
        track = self._owner.track
        if end == track.largest and end in track.known and track.get(end) is None:
            track.learn(end, Location(end.group, MAX_VI64))

    def _conclude(self, retrieval: Retrieval, now: float, *, told: bool = True) -> None:
        """Nobody can tell more now: readers go on with what there is."""
        if retrieval not in self._active:
            return
        self._active.remove(retrieval)
        self._leave_queue(retrieval)
        self._kept.append(retrieval)
        if retrieval.partial is not None and self._owner.failover.keeps(retrieval.partial):
            retrieval.partial = None
        retrieval.let_partial_go(self._owner.track)
        unknown = retrieval.not_brought(self._owner.track).ranges() if told else []
        self.let_go()
        for reader in retrieval.readers:
            if reader.closed:
                continue
            tried = self._tried.setdefault(reader, LocationSet())
            for start, end in unknown:
                tried.add(start, end)
            reader.ask_again()
        if retrieval.bridge is not None:
            whole = retrieval.end < LAST and not len(retrieval.not_brought(self._owner.track))
            self._owner.failover.range_over(retrieval, now, whole=whole)
        self._owner.check_idle_soon()

    def drop(self, retrieval: Retrieval, now: float) -> None:
        """A range that subscriptions wait for is asked for anew, or not needed any more."""
        retrieval.bridge = None
        if retrieval in self._active:
            self._end_request(retrieval, now, cancel=StreamCode.CANCELLED)
            self._conclude(retrieval, now, told=False)

    def _drop(self, retrieval: Retrieval, now: float) -> None:
        """A fill turned out to be empty."""
        bridge, retrieval.bridge = retrieval.bridge, None
        self._end_request(retrieval, now)
        self._conclude(retrieval, now)
        if bridge is not None:
            self._owner.failover.range_over(retrieval, now, whole=True)  # nothing lacks

    def _report(self, retrieval: Retrieval, now: float, complete: bool) -> None:
        intake = retrieval.intake
        self._hub.report(
            "retrieved",
            track=str(self._owner.name),
            session=None if retrieval.place is None else retrieval.place.session,
            by="fill" if retrieval.fill else "fetch",
            start=str(retrieval.start),
            end=str(retrieval.end),
            complete=complete,
            objects=retrieval.objects + (0 if intake is None else intake.objects),
            octets=retrieval.octets + (0 if intake is None else intake.octets),
            seconds=round(now - retrieval.began_at, 6),
        )

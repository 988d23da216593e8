"""What a publisher sends for one subscription, fill or fetch, octet by octet (MOQT §3, §11).

Each class here is a `Sendable`: the session asks the scheduler for the one that goes next and calls
`next_piece`, which yields a bounded run of Objects that have one place in the order, so that
priorities hold between any two Objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

from kvcs.moqt.actions import Buffer
from kvcs.moqt.data import (
    FetchEncoder,
    FetchHeader,
    ObjectHeader,
    ObjectStatus,
    RangeKind,
    SubgroupEncoder,
    SubgroupHeader,
)
from kvcs.moqt.errors import StreamCode
from kvcs.moqt.filters import Range, RangeFilters
from kvcs.moqt.names import GroupOrder, Location, TrackNamespace
from kvcs.moqt.sending.pieces import Host, Piece, passes, whole_objects
from kvcs.moqt.sending.scheduler import SendKey, send_key
from kvcs.moqt.sending.timeouts import Timeouts
from kvcs.moqt.track.ranges import RangeReader, UnknownRun
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import StoredObject, Subgroup

__all__ = ["Host", "ObjectSender", "Piece", "RangeSender", "SubgroupSender", "UnknownHandler"]

UnknownHandler = Callable[["RangeSender", UnknownRun], bool]
"""Asked once for each run that is unknown: True when it is being looked up and `wake` or `give_up`
will follow, False when nobody can tell."""


class ObjectSender(ABC):
    """Common part: one data stream towards the peer."""

    needs_stream = True  # whether it opens a stream, for which there has to be credit

    def __init__(self, host: Host, track: Track, subscriber_priority: int) -> None:
        self.host = host
        self.track = track
        self.family: TrackNamespace = track.name.namespace
        self.queued = 0
        self.subscriber_priority = subscriber_priority
        self.stream_id: int | None = None  # set by the session when the first piece goes out
        self.prioritized_by: int | None = None  # request whose updates change the priority
        self.told: SendKey | None = None  # where the stream stands, as the shell knows
        self.closed = False
        """Whether the stream has ended or will never be opened."""
        self.may_reopen = True
        """False once the peer has stopped the stream, or a delivery timeout did: what comes of its
        Subgroup is not sent on another stream (§11.4.3)."""
        self.on_opened: Callable[[], None] | None = None
        self.on_closed: Callable[[], None] | None = None
        self._current: StoredObject | None = None
        """The Object of which a part was sent."""

    @abstractmethod
    def key(self) -> SendKey:
        """Place in the order (MOQT §5.1)."""

    @abstractmethod
    def next_piece(self, limit: int, now: float) -> Piece | None:
        """Octets to send now: Objects of one place in the order, ``limit`` octets of payload.

        Returns:
            None where there is nothing to send before `wake`; or, with `has_more`, where the place
            in the order has changed and others may go first now.
        """

    @property
    @abstractmethod
    def has_more(self) -> bool:
        """Whether another call of `next_piece` may give something now."""

    def wake(self) -> None:
        """What this waited for may be there."""
        if not self.closed:
            self.host.schedule(self)

    def close(self) -> None:
        """The stream is over; nothing more is sent."""
        if not self.closed:
            self.closed = True
            self.host.unschedule(self)
            self.track.unwatch(self)
            if self._current is not None:
                self._current.unwatch(self)
            if self.on_closed is not None:
                self.on_closed()

    def _count(self, stored: StoredObject) -> None:
        """An Object was handed over whole."""
        self.track.objects_sent += 1
        self.track.octets_sent += stored.header.payload_length

    def _payload(self, stored: StoredObject, offset: int, limit: int, data: list[Buffer]) -> int:
        """Append payload views to ``data``; returns the new offset."""
        for view in stored.views(offset, limit):
            data.append(view)
            offset += len(view)
        return offset


class SubgroupSender(ObjectSender):
    """Delivers one Subgroup of a subscription on one stream.

    Args:
        host: the session.
        track: the Track.
        subgroup: what is delivered, from ``index`` on.
        track_alias: the subscription's alias.
        span: the subscription's range.
        filters: its range filters.
        timeouts: after them what was not handed over is given up.
    """

    def __init__(
        self,
        host: Host,
        track: Track,
        subgroup: Subgroup,
        index: int,
        *,
        track_alias: int,
        span: Range,
        filters: RangeFilters,
        subscriber_priority: int,
        group_order: GroupOrder,
        timeouts: Timeouts,
    ) -> None:
        super().__init__(host, track, subscriber_priority)
        self.subgroup = subgroup
        self.span = span
        self.filters = filters
        self.timeouts = timeouts
        self.continues_at: int | None = None
        """Index of the first Object that must go on a stream of its own, once that is known."""
        self._index = index
        self._offset = 0
        self._track_alias = track_alias
        self._group_order = group_order
        self._encoder: SubgroupEncoder | None = None
        self._omitted = False
        """Whether Objects were left out, so that FIN would be a lie (§11.3.2)."""

    @property
    def place(self) -> tuple[int, int]:
        """Index of the Object that goes next in the Subgroup, and what has gone of it."""
        return self._index, self._offset

    def key(self) -> SendKey:
        """Place in the order (MOQT §5.1)."""
        return send_key(
            subscriber_priority=self.subscriber_priority,
            publisher_priority=self.subgroup.priority,
            group_id=self.subgroup.group_id,
            group_order=self._group_order,
            is_fill=False,
            position=self.subgroup.subgroup_id,
        )

    def next_piece(self, limit: int, now: float) -> Piece | None:
        """Octets to send now; see `ObjectSender`."""
        subgroup = self.subgroup
        data: list[Buffer] = []
        while limit > 0 and self._index < len(subgroup.objects):
            if self._current is None and self._encoder is not None and not self.filters:
                limit -= self._run(self._encoder, limit, now, data)
                if limit <= 0 or self._index == len(subgroup.objects):
                    break
            stored = subgroup.objects[self._index]
            if self._current is None:
                if not self._wanted(stored):
                    self._index += 1
                    continue
                if stored.failed:
                    self._index += 1
                    self._omitted = True  # its rest never came
                    continue
                code = self._reset_before(stored, now)
                if code is not None:
                    # A reset takes back what was not sent yet: what is due goes ahead of it.
                    return Piece(data) if data else self._reset(code)
                data.extend(self._object_start(stored))
                self._current = stored
            before = self._offset
            self._offset = self._payload(stored, before, limit, data)
            limit -= self._offset - before
            if self._offset < stored.header.payload_length:
                if stored.failed:
                    if self._index + 1 < len(subgroup.objects):
                        self.continues_at = self._index + 1
                    code = subgroup.reset_code
                    return Piece(data, reset=StreamCode.INTERNAL_ERROR if code is None else code)
                if self._offset == stored.received:
                    stored.watch(self)
                return Piece(data) if data else None
            self._index += 1
            self._offset, self._current = 0, None
            self._count(stored)
        return self._ending(data)

    def _run(self, encoder: SubgroupEncoder, limit: int, now: float, data: list[Buffer]) -> int:
        """Append Objects to ``data`` that need no second look; their payload octets."""
        track, late, objects = self.track, self.timeouts.object, self.subgroup.objects
        octets, run = whole_objects(track, objects, self._index, self.span, late, limit, now)
        for stored in run:
            data.append(encoder.object(stored.header))
            data += stored.parts
        self._index += len(run)
        track.objects_sent += len(run)
        track.octets_sent += octets
        return octets

    @property
    def has_more(self) -> bool:
        """Whether another call of `next_piece` would give something now."""
        objects = self.subgroup.objects
        if self._index >= len(objects):
            return False
        return self._current is None or objects[self._index].received > self._offset

    def _ending(self, data: list[Buffer]) -> Piece | None:
        subgroup = self.subgroup
        if self._index < len(subgroup.objects):
            return Piece(data)
        if subgroup.reset_code is not None:
            return Piece(data, reset=subgroup.reset_code)
        if subgroup.finished:
            if self._encoder is None and not data:
                return Piece(data, fin=True)  # nothing passed: the session opens no stream
            if self._omitted:
                return Piece(data, reset=StreamCode.CANCELLED)
            return Piece(data, fin=True)
        return Piece(data) if data else None

    def _wanted(self, stored: StoredObject) -> bool:
        header = stored.header
        if header.location not in self.span:
            # Objects before the start were never owed, unless an update has moved it past them.
            late = self._encoder is not None or header.location > self.span.start
            self._omitted = self._omitted or late
            return False
        if not self.filters or passes(self.filters, header, self.track.default_priority):
            return True
        if self._encoder is not None and self._encoder.header.end_of_group:
            self._omitted = True  # FIN would name another last Object of the Group
        return False

    def _reset_before(self, stored: StoredObject, now: float) -> int | None:
        """The code to reset the stream with instead of sending an Object; None to send it."""
        if self._encoder is not None and not stored.continues:
            return StreamCode.CANCELLED
        if self.track.expired(stored, now) or stored.is_late(self.timeouts.object, now):
            return StreamCode.DELIVERY_TIMEOUT
        return None

    def _reset(self, code: int) -> Piece:
        if code == StreamCode.CANCELLED:
            self.continues_at = self._index
        else:
            self.may_reopen = False
        return Piece([], reset=code)

    def _object_start(self, stored: StoredObject) -> list[Buffer]:
        pieces: list[Buffer] = []
        if self._encoder is None:
            subgroup = self.subgroup
            header = SubgroupHeader(
                track_alias=self._track_alias,
                group_id=subgroup.group_id,
                subgroup_id=subgroup.subgroup_id,
                publisher_priority=subgroup.priority,
                # With filters the last Object here need not be the last of the Group.
                end_of_group=subgroup.end_of_group and not self.filters,
                first_object=subgroup.from_start and self._index == 0,
                has_properties=subgroup.has_properties,
            )
            self._encoder = SubgroupEncoder(header)
            pieces.append(header.encode())
        pieces.append(self._encoder.object(stored.header))
        return pieces


class RangeSender(ObjectSender):
    """Delivers a fetch or fill: a range of the Track on one stream (MOQT §3.2, §3.4).

    Args:
        request_id: goes into FETCH_HEADER.
        span: inclusive range.
        on_unknown: see `UnknownHandler`.
        live_order: for a fill, its subscription's Group Order.
    """

    def __init__(
        self,
        host: Host,
        track: Track,
        *,
        request_id: int,
        span: Range,
        group_order: GroupOrder,
        filters: RangeFilters,
        subscriber_priority: int,
        on_unknown: UnknownHandler | None,
        fill_timeout_ms: int | None = None,
        live_order: GroupOrder | None = None,
    ) -> None:
        super().__init__(host, track, subscriber_priority)
        self.request_id = request_id
        self.fill_timeout_ms = fill_timeout_ms
        """FILL_TIMEOUT of the request; None where it has none."""
        self._group_order = group_order
        self._order_differs = live_order is not None and live_order is not group_order
        self._filters = filters
        self._reader = RangeReader(track, span, group_order)
        self._encoder = FetchEncoder(group_order)
        self._on_unknown = on_unknown
        self._opened = False
        self._offset = 0
        self._group_id = span.start.group
        self._priority = 0
        """With the Group, the place of the next Object; the first may go at once to learn it."""
        self.asked_at = 0.0
        """When `UnknownHandler` was asked last, in the caller's clock."""
        self._moved_at = 0.0
        self._asked: UnknownRun | None = None
        self._give_up: RangeKind | None = None
        self._failure: int | None = None
        self._waiting = False
        self._waited = 0.0
        self._waiting_since: float | None = None
        track.readers += 1

    def close(self) -> None:
        """The stream is over; nothing more is sent."""
        was_open = not self.closed
        super().close()
        if was_open:
            self.track.reader_left()

    def key(self) -> SendKey:
        """Place in the order (MOQT §5.1)."""
        return send_key(
            subscriber_priority=self.subscriber_priority,
            publisher_priority=self._priority,
            group_id=self._group_id,
            group_order=self._group_order,
            is_fill=True,
            position=0,
            order_differs=self._order_differs,
        )

    @property
    def has_more(self) -> bool:
        """Whether another call of `next_piece` may give something now."""
        return not self._waiting

    @property
    def group_order(self) -> GroupOrder:
        """Order of the Groups on the stream."""
        return self._group_order

    @property
    def moved_at(self) -> float:
        """When it handed something over last, or asked for more, in the caller's clock."""
        return max(self._moved_at, self.asked_at)

    def waited(self, now: float) -> float:
        """Seconds in all that this waited for runs that were looked up (FILL_TIMEOUT, §9.20)."""
        since = self._waiting_since
        return self._waited if since is None else self._waited + now - since

    def has_passed(self, location: Location) -> bool:
        """Whether the reader is behind a Location of its range, or has ended."""
        return self.closed or self._reader.has_passed(location)

    def ask_again(self) -> None:
        """The answer for the run that was asked for is out: ask again for what is still unknown."""
        self._asked = None
        self.wake()

    def give_up(self, kind: RangeKind) -> None:
        """Mark runs that are unknown from here on as ``kind`` instead of waiting for them."""
        self._give_up = kind
        self.wake()

    def fail(self, code: int) -> None:
        """End the stream with a reset: the range cannot be delivered."""
        self._failure = code
        self.wake()

    def wake(self) -> None:
        """What this waited for may be there."""
        self._waiting = False
        super().wake()

    def next_piece(self, limit: int, now: float) -> Piece | None:
        """Octets to send now; see `ObjectSender`."""
        data: list[Buffer] = []
        if not self._opened:
            self._opened = True
            data.append(FetchHeader(self.request_id).encode())
        if self._failure is not None:
            return Piece(data, reset=self._failure)
        if self._current is None:
            place = self.key()
            upcoming = self._settle(data, now)
            if upcoming is None:
                return Piece(data, fin=True)
            if isinstance(upcoming, UnknownRun):
                self._waiting = True
                if self._waiting_since is None:
                    self._waiting_since = now
                self.track.watch(self)
                return Piece(data) if data else None
            if self.key() > place:
                return Piece(data) if data else None  # others may go first now
            self._start(upcoming, data, now)
        while (stored := self._current) is not None:
            before = self._offset
            self._offset = self._payload(stored, before, limit, data)
            limit -= self._offset - before
            self._moved_at = now
            if self._offset < stored.header.payload_length:
                if stored.failed:
                    return Piece(data, reset=StreamCode.INTERNAL_ERROR)
                if self._offset == stored.received:
                    self._waiting = True
                    stored.watch(self)
                return Piece(data) if data else None
            self._reader.passed(stored.header.location)
            self._current, self._offset = None, 0
            self._count(stored)
            before_next = (self._priority, self._group_id)
            following = self._next(now)
            if following is None:
                return Piece(data, fin=True)
            if limit > 0 and isinstance(following, StoredObject):
                if (self._priority, self._group_id) == before_next:
                    self._start(following, data, now)
        return Piece(data)

    def _next(self, now: float) -> StoredObject | UnknownRun | None:
        """What goes next, past what is not sent; `key` tells where an Object stands."""
        while True:
            upcoming = self._reader.peek(now)
            if not isinstance(upcoming, StoredObject):
                return upcoming
            header = upcoming.header
            # Status Objects never travel on fetch streams (§11.4.1).
            if header.status is ObjectStatus.NORMAL and passes(
                self._filters, header, self.track.default_priority
            ):
                self._describe(header)
                return upcoming
            self._reader.passed(header.location)

    def _settle(self, data: list[Buffer], now: float) -> StoredObject | UnknownRun | None:
        """What goes next, past runs that are given up; what is returned of them is waited for."""
        while True:
            upcoming = self._next(now)
            if not isinstance(upcoming, UnknownRun) or not self._resolve(upcoming, data, now):
                return upcoming

    def _describe(self, header: ObjectHeader) -> None:
        self._group_id = header.group_id
        priority = header.publisher_priority
        self._priority = self.track.default_priority if priority is None else priority

    def _start(self, stored: StoredObject, data: list[Buffer], now: float) -> None:
        header = stored.header
        self.track.touch(header.group_id)
        if header.publisher_priority is None:
            header = replace(header, publisher_priority=self._priority)
        self._current, self._offset = stored, 0
        self._waited, self._waiting_since = self.waited(now), None
        data.append(self._encoder.object(header))

    def _resolve(self, run: UnknownRun, data: list[Buffer], now: float) -> bool:
        """Have an unknown run looked up, or give it up; False while it is being looked up."""
        if self._give_up is None:
            if self._asked == run:
                return False  # woken by something else, the answer is still out
            self._asked, self.asked_at = run, now
            if self._on_unknown is not None and self._on_unknown(self, run):
                return False
        kind = RangeKind.UNKNOWN if self._give_up is None else self._give_up
        last = run.last_delivered(self._group_order)
        data.append(self._encoder.marker(kind, last))
        self._reader.passed(run.end)
        return True

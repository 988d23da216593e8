"""Senders without a session: a host that records, and ways to read what they send."""

from __future__ import annotations

from collections.abc import Callable

from kvcs.moqt.filters import Range, RangeFilter, RangeFilters
from kvcs.moqt.names import GroupOrder, Location
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.sending.delivery import ObjectSender, Piece, RangeSender, SubgroupSender
from kvcs.moqt.sending.timeouts import Timeouts
from kvcs.moqt.streams import SubgroupHeader
from kvcs.moqt.track.ranges import UnknownRun
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import Subgroup

EVERYTHING = Range(Location(0, 0), None)
MANY = 1 << 20


class Host:
    """Records what senders ask of a session."""

    def __init__(self) -> None:
        self.ready: list[ObjectSender] = []
        self.moved: list[ObjectSender] = []

    def schedule(self, sendable: ObjectSender) -> None:
        self.ready.append(sendable)

    def reschedule(self, sendable: ObjectSender) -> None:
        self.moved.append(sendable)

    def unschedule(self, sendable: ObjectSender) -> None:
        self.ready = [one for one in self.ready if one is not sendable]


def subgroup_of(source: Track, group: int = 0, subgroup: int = 0) -> Subgroup:
    return source.groups[group].subgroups[subgroup]


def live(
    source: Track,
    *,
    index: int = 0,
    span: Range = EVERYTHING,
    filters: RangeFilters | None = None,
    host: Host | None = None,
    timeouts: Timeouts | None = None,
) -> SubgroupSender:
    return SubgroupSender(
        Host() if host is None else host,
        source,
        subgroup_of(source),
        index,
        track_alias=3,
        span=span,
        filters=RangeFilters() if filters is None else filters,
        subscriber_priority=128,
        group_order=GroupOrder.ASCENDING,
        timeouts=Timeouts() if timeouts is None else timeouts,
    )


def fetch(
    source: Track,
    span: Range,
    *,
    order: GroupOrder = GroupOrder.ASCENDING,
    filters: RangeFilters | None = None,
    on_unknown: Callable[[RangeSender, UnknownRun], bool] | None = None,
    host: Host | None = None,
    live_order: GroupOrder | None = None,
) -> RangeSender:
    return RangeSender(
        Host() if host is None else host,
        source,
        request_id=6,
        span=span,
        group_order=order,
        filters=RangeFilters() if filters is None else filters,
        subscriber_priority=128,
        on_unknown=on_unknown,
        live_order=live_order,
    )


def octets(piece: Piece | None) -> bytes:
    assert piece is not None
    return b"".join(piece.data)


def drain(sender: ObjectSender, limit: int = MANY, now: float = 0.0) -> Piece:
    """All that a sender has to send now, as one piece."""
    data = b""
    while True:
        piece = sender.next_piece(limit, now)
        if piece is not None:
            data += octets(piece)
            if piece.fin or piece.reset is not None:
                return Piece([data], piece.fin, piece.reset)
        if not sender.has_more:
            return Piece([data])


def of(**filters: RangeFilter) -> RangeFilters:
    return RangeFilters.of(Parameters.of(**{name: [one] for name, one in filters.items()}).items)


HEADER = SubgroupHeader(3, 0, 0, 0, end_of_group=True, first_object=True)

"""What a publisher sends for one subscription, fill or fetch (MOQT §3, §7, §11)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcs.moqt.delivery import ObjectSender, Piece, RangeSender, SubgroupSender
from kvcs.moqt.errors import StreamCode
from kvcs.moqt.filters import Range, RangeFilter, RangeFilters
from kvcs.moqt.names import GroupOrder, Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus, RangeKind
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.ranges import UnknownRun
from kvcs.moqt.store import Track
from kvcs.moqt.stored import Subgroup
from kvcs.moqt.streams import FetchHeader, SubgroupHeader
from kvcs.testing.tracks import fetch_stream, payload, put, put_group, subgroup_stream, track

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


# A subgroup of a subscription


@pytest.mark.parametrize("limit", [1, 3, MANY])
def test_a_subgroup_goes_out_whole_with_fin(limit: int) -> None:
    source = track()
    put_group(source, 0, 2)
    end = ObjectHeader(0, 2, 0, 0, ObjectStatus.END_OF_GROUP)
    piece = drain(live(source), limit)
    assert piece == Piece([subgroup_stream(HEADER, 0, 1, end)], fin=True)


def test_a_piece_holds_at_most_one_object_and_the_limit_of_its_payload() -> None:
    source = track()
    put_group(source, 0, 2)
    sender = live(source)
    first = sender.next_piece(5, 0.0)
    assert octets(first).endswith(payload(Location(0, 0))[:5])
    second = sender.next_piece(100, 0.0)
    assert octets(second) == payload(Location(0, 0))[5:]
    assert sender.has_more


def test_fin_follows_when_the_subgroup_ends_later() -> None:
    source = track()
    put(source, 0, 0)
    sender = live(source)
    assert not drain(sender).fin
    assert sender.next_piece(MANY, 0.0) is None
    source.finish_subgroup(0, 0)
    assert sender.next_piece(MANY, 0.0) == Piece([], fin=True)


def test_a_stream_that_begins_in_the_middle_does_not_claim_the_first_object() -> None:
    source = track()
    put_group(source, 0, 2)
    later = SubgroupHeader(3, 0, 0, 0, end_of_group=True)
    end = ObjectHeader(0, 2, 0, 0, ObjectStatus.END_OF_GROUP)
    assert drain(live(source, index=1)) == Piece([subgroup_stream(later, 1, end)], fin=True)


def test_an_unfinished_subgroup_of_an_ended_track_is_reset() -> None:
    source = track()
    put(source, 0, 0)
    sender = live(source)
    source.end()
    assert drain(sender).reset == StreamCode.CANCELLED


def test_objects_beyond_the_end_of_the_range_are_left_out_and_the_stream_reset() -> None:
    source = track()
    put_group(source, 0, 3)
    span = Range(Location(0, 0), Location(0, 1))
    piece = drain(live(source, span=span))
    assert piece == Piece([subgroup_stream(HEADER, 0, 1)], reset=StreamCode.CANCELLED)


def test_objects_before_the_start_were_never_owed() -> None:
    source = track()
    put_group(source, 0, 2)
    piece = drain(live(source, span=Range(Location(0, 1), None)))
    assert piece.fin


def test_a_start_that_moved_past_objects_of_an_open_stream_resets_it() -> None:
    source = track()
    put_group(source, 0, 3)
    sender = live(source)
    sender.next_piece(MANY, 0.0)
    sender.span = Range(Location(0, 2), None)
    piece = drain(sender)
    assert piece.reset == StreamCode.CANCELLED
    assert octets(piece).count(b"0/2;") == 2


def test_nothing_that_passes_opens_no_stream() -> None:
    source = track()
    put_group(source, 0, 2)
    span = Range(Location(1, 0), None)
    assert live(source, span=span).next_piece(MANY, 0.0) == Piece([], fin=True)


def test_filtered_objects_leave_fin_and_take_the_end_of_group_bit() -> None:
    source = track()
    put_group(source, 0, 3)
    piece = drain(live(source, filters=of(objectid_filter=RangeFilter(0, ((1, 1),)))))
    header = SubgroupHeader(3, 0, 0, 0, first_object=False)
    end = ObjectHeader(0, 3, 0, 0, ObjectStatus.END_OF_GROUP)
    assert piece == Piece([subgroup_stream(header, 1, end)], fin=True)


def test_filters_that_come_behind_the_end_of_group_bit_reset_the_stream() -> None:
    source = track()
    put_group(source, 0, 3)
    sender = live(source)
    sender.next_piece(MANY, 0.0)
    sender.filters = of(objectid_filter=RangeFilter(0, ((0, 1),)))
    assert drain(sender).reset == StreamCode.CANCELLED


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (of(priority_filter=RangeFilter(0, ((0, 3),))), False),
        (of(priority_filter=RangeFilter(0, ((128, None),))), True),
        (of(subgroup_filter=RangeFilter(0, ((1, None),))), False),
        (of(object_property_filter=RangeFilter(0, ((5, 5),), 0x78)), True),
        (of(object_property_filter=RangeFilter(0, ((6, 6),), 0x78)), False),
        (of(object_property_filter=RangeFilter(0, ((5, 5),), 0x7A)), False),
    ],
)
def test_filters_look_at_priority_subgroup_and_properties(
    filters: RangeFilters, expected: bool
) -> None:
    source = track()
    properties = KeyValues.of({0x78: 5}).write()
    header = ObjectHeader(0, 0, 0, None, properties=properties)
    source.publish(header, (), 0.0)
    assert bool(octets(drain(live(source, filters=filters)))) is expected


def test_a_partly_arrived_object_goes_out_as_it_comes() -> None:
    source = track(authoritative=False)
    stream = source.open_stream(SubgroupHeader(9, 0, 0, 0, first_object=True))
    writer = stream.begin(ObjectHeader(0, 0, 0, 0, payload_length=8), 0.0)
    host = Host()
    sender = live(source, host=host)
    first = sender.next_piece(MANY, 0.0)
    assert not sender.has_more
    for at in (0, 5):
        host.ready.clear()
        writer.write(memoryview(payload(Location(0, 0))[at : at + 5]))
        assert host.ready == [sender]
        first = Piece([octets(first), octets(sender.next_piece(MANY, 0.0))])
    assert octets(first).endswith(payload(Location(0, 0)))


def test_an_object_whose_rest_never_comes_resets_the_stream() -> None:
    source = track(authoritative=False)
    stream = source.open_stream(SubgroupHeader(9, 0, 0, 0, first_object=True))
    writer = stream.begin(ObjectHeader(0, 0, 0, 0, payload_length=8), 0.0)
    writer.write(memoryview(b"abc"))
    sender = live(source)
    sender.next_piece(MANY, 0.0)
    stream.reset(StreamCode.CANCELLED)
    assert drain(sender).reset is not None


def test_a_gap_that_was_not_proved_goes_on_a_stream_of_its_own() -> None:
    source = track(authoritative=False)
    header = SubgroupHeader(9, 0, 0, 0, first_object=True)
    for object_id in (0, 2):
        stream = source.open_stream(header)
        stream.begin(ObjectHeader(0, object_id, 0, 0), 0.0)
        stream.reset(StreamCode.CANCELLED)
    subgroup_of(source).reset_code = None
    sender = live(source)
    assert not drain(sender).fin
    assert sender.continues_at == 1


def test_an_expired_object_is_not_begun_and_the_subgroup_not_opened_again() -> None:
    properties = KeyValues.of({Property.MAX_CACHE_DURATION: 1000})
    source = track(authoritative=False, properties=properties)
    stream = source.open_stream(SubgroupHeader(9, 0, 0, 0, first_object=True))
    stream.begin(ObjectHeader(0, 0, 0, 0), 5.0)
    stream.finish()
    sender = live(source)
    assert drain(sender, now=6.0).fin
    sender = live(source)
    assert drain(sender, now=6.5).reset == StreamCode.DELIVERY_TIMEOUT
    assert not sender.may_reopen


def test_a_sender_that_is_closed_is_not_woken_and_leaves_no_watch() -> None:
    source = track(authoritative=False)
    stream = source.open_stream(SubgroupHeader(9, 0, 0, 0, first_object=True))
    writer = stream.begin(ObjectHeader(0, 0, 0, 0, payload_length=8), 0.0)
    host = Host()
    closed: list[str] = []
    sender = live(source, host=host)
    sender.on_closed = lambda: closed.append("once")
    sender.next_piece(MANY, 0.0)
    sender.close()
    sender.close()
    writer.write(memoryview(b"abc"))
    sender.wake()
    assert host.ready == []
    assert closed == ["once"]
    assert not source.groups[0].objects[0]._watchers


# Fetches and fills


SPAN = Range(Location(0, 0), Location(2, 9))
PLACES = [Location(0, 0), Location(0, 1), Location(1, 0), Location(1, 1)]


def two_groups() -> Track:
    source = track()
    put_group(source, 0, 2)
    put_group(source, 1, 2)
    return source


@pytest.mark.parametrize("limit", [1, 5, MANY])
def test_a_fetch_brings_normal_objects_in_order_and_no_status(limit: int) -> None:
    assert drain(fetch(two_groups(), SPAN), limit) == Piece([fetch_stream(6, *PLACES)], fin=True)


def test_a_descending_fetch_turns_the_groups_not_the_objects() -> None:
    order = GroupOrder.DESCENDING
    places = [*PLACES[2:], *PLACES[:2]]
    piece = drain(fetch(two_groups(), SPAN, order=order))
    assert piece == Piece([fetch_stream(6, *places, order=order)], fin=True)


def test_a_fetch_of_nothing_is_a_header_and_fin() -> None:
    span = Range(Location(0, 2), Location(0, 9))
    assert drain(fetch(two_groups(), span)) == Piece([FetchHeader(6).encode()], fin=True)


def test_filters_drop_objects_of_a_fetch() -> None:
    filters = of(objectid_filter=RangeFilter(0, ((1, 1),)))
    piece = drain(fetch(two_groups(), SPAN, filters=filters))
    assert piece == Piece([fetch_stream(6, PLACES[1], PLACES[3])], fin=True)


def test_the_tracks_default_priority_is_spelt_out() -> None:
    properties = KeyValues.of({Property.DEFAULT_PUBLISHER_PRIORITY: 9})
    source = track(properties=properties)
    put(source, 0, 0, priority=None)
    piece = drain(fetch(source, SPAN))
    assert octets(piece) == fetch_stream(6, Location(0, 0), priority=9)


def test_a_fetch_that_fails_before_it_was_opened_still_names_itself() -> None:
    sender = fetch(two_groups(), SPAN)
    sender.fail(StreamCode.UNKNOWN_OBJECT_STATUS)
    piece = sender.next_piece(MANY, 0.0)
    assert piece == Piece([FetchHeader(6).encode()], reset=StreamCode.UNKNOWN_OBJECT_STATUS)


def test_key_tells_where_the_next_object_stands_before_it_is_sent() -> None:
    source = track()
    put_group(source, 0, 1, priority=3)
    put_group(source, 1, 1, priority=7)
    sender = fetch(source, SPAN)
    assert octets(sender.next_piece(MANY, 0.0)) == FetchHeader(6).encode()
    assert sender.has_more
    assert sender.key()[1:4] == (3, False, 0)
    assert octets(sender.next_piece(MANY, 0.0)).endswith(payload(Location(0, 0)))
    # The End of Group object, which is not sent, does not count.
    assert sender.key()[1:4] == (7, False, 1)
    assert octets(sender.next_piece(MANY, 0.0)).endswith(payload(Location(1, 0)))


def test_a_place_that_moved_while_it_was_waited_for_is_told_first() -> None:
    source = track(authoritative=False)
    known(source, 0, 0, priority=0)
    known(source, 1, 0, priority=9)
    asked: list[UnknownRun] = []
    sender = fetch(source, Range(Location(0, 0), Location(1, 0)), on_unknown=taker(asked))
    drain(sender)
    source.learn(Location(0, 0), Location(1, 0))
    assert sender.next_piece(MANY, 0.0) is None
    assert sender.has_more
    assert sender.key().publisher_priority == 9
    assert octets(sender.next_piece(MANY, 0.0)).endswith(payload(Location(1, 0)))


@pytest.mark.parametrize(
    ("live_order", "differs"),
    [(None, False), (GroupOrder.ASCENDING, False), (GroupOrder.DESCENDING, True)],
)
def test_a_fill_in_another_order_than_its_subscription_says_so(
    live_order: GroupOrder | None, differs: bool
) -> None:
    assert fetch(two_groups(), SPAN, live_order=live_order).key().order_differs is differs


# What a store that is not the origin's does not know


def known(source: Track, group: int, object_id: int, *, priority: int = 0) -> None:
    place = Location(group, object_id)
    writer = source.begin_fetched(ObjectHeader(*place, 0, priority, payload_length=8), 0.0)
    writer.write(memoryview(payload(place)))


def taker(
    asked: list[UnknownRun], answer: bool = True
) -> Callable[[RangeSender, UnknownRun], bool]:
    def ask(_: RangeSender, run: UnknownRun) -> bool:
        asked.append(run)
        return answer

    return ask


def test_nobody_to_ask_leaves_a_marker() -> None:
    source = track(authoritative=False)
    known(source, 0, 1)
    piece = drain(fetch(source, Range(Location(0, 0), Location(0, 3))))
    unknown = RangeKind.UNKNOWN
    expected = fetch_stream(6, (unknown, Location(0, 0)), Location(0, 1), (unknown, Location(0, 3)))
    assert piece == Piece([expected], fin=True)


def test_who_cannot_tell_leaves_a_marker_too() -> None:
    asked: list[UnknownRun] = []
    source = track(authoritative=False)
    known(source, 0, 1)
    drain(fetch(source, Range(Location(0, 0), Location(0, 1)), on_unknown=taker(asked, False)))
    assert asked == [UnknownRun(Location(0, 0), Location(0, 0))]


def test_an_unknown_run_is_asked_for_once_and_waited_for() -> None:
    asked: list[UnknownRun] = []
    source = track(authoritative=False)
    known(source, 0, 1)
    host = Host()
    span = Range(Location(0, 0), Location(0, 1))
    sender = fetch(source, span, on_unknown=taker(asked), host=host)
    drain(sender)
    source.learn(Location(7, 0), Location(7, 1))
    assert host.ready == [sender]
    drain(sender)
    assert asked == [UnknownRun(Location(0, 0), Location(0, 0))]
    known(source, 0, 0)
    source.wake()
    piece = drain(sender)
    assert (octets(piece), piece.fin) == (fetch_stream(6, *PLACES[:2])[2:], True)


def test_what_turns_out_not_to_exist_leaves_an_unmarked_gap() -> None:
    source = track(authoritative=False)
    known(source, 0, 1)
    sender = fetch(source, Range(Location(0, 0), Location(0, 1)), on_unknown=taker([]))
    head = octets(drain(sender))
    source.learn(Location(0, 0), Location(0, 0))
    assert head + octets(drain(sender)) == fetch_stream(6, Location(0, 1))


def test_a_run_is_asked_for_again_where_the_answer_left_a_part_of_it() -> None:
    asked: list[UnknownRun] = []
    source = track(authoritative=False)
    sender = fetch(source, Range(Location(0, 0), Location(0, 5)), on_unknown=taker(asked))
    drain(sender)
    source.learn(Location(0, 0), Location(0, 2))
    drain(sender)
    assert asked[1:] == [UnknownRun(Location(0, 3), Location(0, 5))]
    sender.ask_again()
    drain(sender)
    assert asked[2:] == asked[1:2]


def test_giving_up_marks_what_is_missing_and_goes_on() -> None:
    source = track(authoritative=False)
    known(source, 0, 1)
    sender = fetch(source, Range(Location(0, 0), Location(0, 3)), on_unknown=taker([]))
    head = octets(drain(sender))
    sender.give_up(RangeKind.TIMED_OUT)
    piece = drain(sender)
    timed_out = RangeKind.TIMED_OUT
    expected = fetch_stream(
        6, (timed_out, Location(0, 0)), Location(0, 1), (timed_out, Location(0, 3))
    )
    assert (head + octets(piece), piece.fin) == (expected, True)


def test_failing_resets_a_fetch_that_waits() -> None:
    source = track(authoritative=False)
    host = Host()
    sender = fetch(source, SPAN, on_unknown=taker([]), host=host)
    drain(sender)
    sender.fail(StreamCode.INTERNAL_ERROR)
    assert host.ready == [sender]
    assert sender.next_piece(MANY, 0.0) == Piece([], reset=StreamCode.INTERNAL_ERROR)


def test_a_fetch_that_is_closed_leaves_no_watch() -> None:
    source = track(authoritative=False)
    for _ in range(3):
        sender = fetch(source, SPAN, on_unknown=taker([]))
        drain(sender)
        assert len(source._watchers) == 1
        sender.close()
    assert len(source._watchers) == 0
    assert not source.followed


def test_an_object_that_still_arrives_is_sent_as_it_comes_and_reset_if_it_breaks_off() -> None:
    source = track(authoritative=False)
    place = Location(0, 0)
    writer = source.begin_fetched(ObjectHeader(*place, 0, 0, payload_length=8), 0.0)
    host = Host()
    sender = fetch(source, Range(place, place), host=host)
    head = drain(sender)
    writer.write(memoryview(payload(place)[:3]))
    assert host.ready == [sender]
    assert octets(head) + octets(drain(sender)) == fetch_stream(6, place)[:-5]
    source.abandon(writer)
    assert sender.next_piece(MANY, 0.0) == Piece([], reset=StreamCode.INTERNAL_ERROR)


def test_an_object_behind_its_cache_duration_counts_as_unknown() -> None:
    properties = KeyValues.of({Property.MAX_CACHE_DURATION: 1000})
    source = track(authoritative=False, properties=properties)
    known(source, 0, 0)
    span = Range(Location(0, 0), Location(0, 0))
    assert octets(drain(fetch(source, span), now=1.0)) == fetch_stream(6, Location(0, 0))
    piece = drain(fetch(source, span), now=1.5)
    assert octets(piece) == fetch_stream(6, (RangeKind.UNKNOWN, Location(0, 0)))

"""What a publisher sends for one Subgroup of a subscription (MOQT §3, §7, §11)."""

from __future__ import annotations

import pytest

from kvcs.moqt.errors import StreamCode
from kvcs.moqt.filters import Range, RangeFilter, RangeFilters
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.sending.delivery import Piece, SubgroupSender
from kvcs.moqt.sending.timeouts import Timeouts
from kvcs.moqt.streams import SubgroupHeader
from kvcs.testing.tracks import payload, put, put_group, subgroup_stream, track
from tests.unit.moqt.senders import (
    EVERYTHING,
    HEADER,
    MANY,
    Host,
    drain,
    live,
    octets,
    of,
    subgroup_of,
)

# A subgroup of a subscription


@pytest.mark.parametrize("limit", [1, 3, MANY])
def test_a_subgroup_goes_out_whole_with_fin(limit: int) -> None:
    source = track()
    put_group(source, 0, 2)
    end = ObjectHeader(0, 2, 0, 0, ObjectStatus.END_OF_GROUP)
    piece = drain(live(source), limit)
    assert piece == Piece([subgroup_stream(HEADER, 0, 1, end)], fin=True)


def test_a_piece_holds_objects_up_to_the_limit_of_their_payload() -> None:
    source = track()
    put_group(source, 0, 3)
    sender = live(source)
    one, two = payload(Location(0, 0)), payload(Location(0, 1))
    first = sender.next_piece(5, 0.0)
    assert octets(first).endswith(one[:5])
    second = sender.next_piece(len(one) - 5 + 3, 0.0)
    assert octets(second).startswith(one[5:]) and octets(second).endswith(two[:3])
    third = sender.next_piece(len(two) - 3, 0.0)
    assert octets(third) == two[3:]
    assert sender.has_more


def obstructed(kind: str) -> SubgroupSender:
    """A sender of six Objects, the fourth of which is not like the others."""
    source = track()
    put_group(source, 0, 6)
    span, timeouts, filters = EVERYTHING, Timeouts(), RangeFilters()
    fourth = subgroup_of(source).objects[3]
    if kind == "failed":
        fourth.failed = True
    elif kind == "begins anew":
        fourth.continues = False
    elif kind == "arriving":
        fourth.received -= 1
    elif kind == "late":
        timeouts, fourth.born = Timeouts(object=1.0), -2.0
    elif kind == "expired":
        source.authoritative, source.cache_seconds, fourth.born = False, 1.0, -2.0
    elif kind == "beyond the range":
        span = Range(Location(0, 0), Location(0, 2))
    elif kind == "before the range":
        span = Range(Location(0, 4), None)
    elif kind == "filtered":
        filters = of(objectid_filter=RangeFilter(0, ((0, 2), (4, 9))))
    return live(source, span=span, timeouts=timeouts, filters=filters)


@pytest.mark.parametrize("limit", [2, 10, 30, MANY])
@pytest.mark.parametrize(
    "kind",
    [
        "none",
        "failed",
        "begins anew",
        "arriving",
        "late",
        "expired",
        "beyond the range",
        "before the range",
        "filtered",
    ],
)
def test_many_objects_go_out_at_once_as_they_do_octet_by_octet(kind: str, limit: int) -> None:
    one_by_one, together = obstructed(kind), obstructed(kind)
    assert drain(together, limit) == drain(one_by_one, 1)
    assert together.place == one_by_one.place
    assert together.continues_at == one_by_one.continues_at
    assert together.track.objects_sent == one_by_one.track.objects_sent
    assert together.track.octets_sent == one_by_one.track.octets_sent


def test_objects_of_several_lengths_go_out_at_once_as_octet_by_octet() -> None:
    source = track()
    lengths = (5, 5, 200, 200, 5, 70_000, 70_000, 5)
    run = [
        (ObjectHeader(0, n, 0, 0, payload_length=size), (memoryview(bytes((n,)) * size),))
        for n, size in enumerate(lengths)
    ]
    source.publish_run(run, 0.0)
    source.finish_subgroup(0, 0)
    assert drain(live(source), MANY) == drain(live(source), 1000) == drain(live(source), 3)


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
    sender.next_piece(len(payload(Location(0, 0))), 0.0)
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
    sender.next_piece(len(payload(Location(0, 0))), 0.0)
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

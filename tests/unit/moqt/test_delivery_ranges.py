"""What a publisher sends for a fetch or fill (MOQT §3.2, §3.4, §11.4)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcs.moqt.errors import StreamCode
from kvcs.moqt.filters import Range, RangeFilter
from kvcs.moqt.names import GroupOrder, Location
from kvcs.moqt.objects import ObjectHeader, RangeKind
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.sending.delivery import Piece, RangeSender
from kvcs.moqt.streams import FetchHeader
from kvcs.moqt.track.ranges import UnknownRun
from kvcs.moqt.track.store import Track
from kvcs.testing.tracks import fetch_stream, payload, put, put_group, track
from tests.unit.moqt.senders import (
    MANY,
    Host,
    drain,
    fetch,
    octets,
    of,
)

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
        sender.close()
    assert len(source._watchers) == 0
    assert not source.followed


def test_a_fetch_tells_its_order_what_it_passed_and_how_long_it_waited() -> None:
    source = track(authoritative=False)
    known(source, 0, 0)
    sender = fetch(source, SPAN, on_unknown=taker([]))
    assert sender.group_order is GroupOrder.ASCENDING
    assert not sender.has_passed(Location(0, 0))
    assert sender.waited(9.0) == 0.0
    drain(sender, now=1.0)
    assert sender.has_passed(Location(0, 0))
    assert not sender.has_passed(Location(1, 0))
    assert sender.waited(3.5) == 2.5
    sender.close()
    assert sender.has_passed(Location(1, 0))


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

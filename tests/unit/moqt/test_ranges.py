"""Reading a range of a Track in request order, and the range of a FETCH (MOQT §3.2, §9.11)."""

from __future__ import annotations

import pytest

from kvcs.moqt.errors import InvalidRange
from kvcs.moqt.filters import LocationFilter, Range
from kvcs.moqt.names import MAX_VI64, GroupOrder, Location
from kvcs.moqt.objects import ObjectHeader
from kvcs.moqt.track.ranges import RangeReader, UnknownRun, fetch_end, fetch_span
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import StoredObject
from kvcs.testing.tracks import end_track, put, put_group, track

ASCENDING, DESCENDING = GroupOrder.ASCENDING, GroupOrder.DESCENDING


def at(group: int, object_id: int) -> Location:
    return Location(group, object_id)


def cache(*places: tuple[int, int]) -> Track:
    """A Track of a relay that holds some Objects and knows nothing else."""
    target = track(authoritative=False)
    for place in places:
        target.begin_fetched(ObjectHeader(*place, 0, 0), 0.0)
    return target


def read(source: Track, start: Location, end: Location, order: GroupOrder) -> list[object]:
    """All that a reader finds, giving up what is unknown."""
    reader = RangeReader(source, Range(start, end), order)
    found: list[object] = []
    while (upcoming := reader.peek(0.0)) is not None:
        if isinstance(upcoming, StoredObject):
            found.append(upcoming.header.location)
            reader.passed(upcoming.header.location)
        else:
            found.append(upcoming)
            reader.passed(upcoming.end)
    return found


def test_an_origin_has_no_unknown_runs() -> None:
    source = track()
    for group, object_id in ((0, 3), (2, 0), (2, 4)):
        put(source, group, object_id)
    assert read(source, at(0, 0), at(9, 9), ASCENDING) == [at(0, 3), at(2, 0), at(2, 4)]
    assert read(source, at(0, 0), at(9, 9), DESCENDING) == [at(2, 0), at(2, 4), at(0, 3)]
    assert read(source, at(0, 4), at(2, 3), DESCENDING) == [at(2, 0)]
    assert read(source, at(1, 0), at(1, 9), DESCENDING) == []


def test_ascending_runs_reach_over_groups() -> None:
    found = read(cache((1, 2)), at(0, 5), at(3, 1), ASCENDING)
    assert found == [
        UnknownRun(at(0, 5), at(1, 1)),
        at(1, 2),
        UnknownRun(at(1, 3), at(3, 1)),
    ]


def test_descending_runs_lie_between_groups_that_hold_something() -> None:
    found = read(cache((1, 2), (5, 0)), at(0, 5), at(6, 1), DESCENDING)
    assert found == [
        UnknownRun(at(6, 0), at(6, 1)),
        at(5, 0),
        UnknownRun(at(5, 1), at(5, MAX_VI64)),
        UnknownRun(at(2, 0), at(4, MAX_VI64)),
        UnknownRun(at(1, 0), at(1, 1)),
        at(1, 2),
        UnknownRun(at(1, 3), at(1, MAX_VI64)),
        UnknownRun(at(0, 5), at(0, MAX_VI64)),
    ]


@pytest.mark.parametrize(
    ("run", "order", "last"),
    [
        (UnknownRun(at(1, 0), at(3, 4)), ASCENDING, at(3, 4)),
        (UnknownRun(at(1, 2), at(1, 4)), DESCENDING, at(1, 4)),
        (UnknownRun(at(1, 2), at(3, MAX_VI64)), DESCENDING, at(1, MAX_VI64)),
    ],
)
def test_a_run_ends_where_its_last_location_is_delivered(
    run: UnknownRun, order: GroupOrder, last: Location
) -> None:
    assert run.last_delivered(order) == last


def test_what_arrives_while_a_run_is_waited_for_is_read() -> None:
    source = cache((0, 0))
    reader = RangeReader(source, Range(at(0, 0), at(4, 0)), DESCENDING)
    assert reader.peek(0.0) == UnknownRun(at(4, 0), at(4, 0))
    source.learn(at(3, 0), at(4, 0))
    assert reader.peek(0.0) == UnknownRun(at(1, 0), at(2, MAX_VI64))
    source.begin_fetched(ObjectHeader(2, 1, 0, 0), 0.0)
    source.learn(at(0, 1), at(2, MAX_VI64))
    for expected in (at(2, 1), at(0, 0)):
        upcoming = reader.peek(0.0)
        assert isinstance(upcoming, StoredObject)
        assert upcoming.header.location == expected
        reader.passed(expected)
    assert reader.peek(0.0) is None


def test_the_last_location_of_all_ends_a_range() -> None:
    last = at(MAX_VI64, MAX_VI64)
    assert read(cache(last), at(MAX_VI64, 0), last, ASCENDING)[1:] == [last]


@pytest.mark.parametrize(
    ("order", "ahead", "behind"),
    [
        (ASCENDING, [at(1, 0), at(1, 5), at(2, 0)], [at(0, 0)]),
        (DESCENDING, [at(1, 0), at(1, 5), at(0, 9)], [at(2, 0)]),
    ],
)
def test_what_a_reader_has_passed(
    order: GroupOrder, ahead: list[Location], behind: list[Location]
) -> None:
    source = cache((0, 0), (1, 0), (2, 0))
    source.learn(at(0, 0), at(2, 9))
    reader = RangeReader(source, Range(at(0, 0), at(2, 9)), order)
    while True:
        upcoming = reader.peek(0.0)
        assert isinstance(upcoming, StoredObject)
        if upcoming.header.group_id == 1:
            break
        reader.passed(upcoming.header.location)
    assert not any(reader.has_passed(place) for place in ahead)
    assert all(reader.has_passed(place) for place in behind)
    reader.passed(at(1, 0))
    upcoming = reader.peek(0.0)
    assert isinstance(upcoming, StoredObject)
    last = upcoming.header.location
    reader.passed(last)
    assert reader.has_passed(at(1, 0))
    assert reader.has_passed(last)
    assert reader.peek(0.0) is None
    assert all(reader.has_passed(place) for place in (*ahead, *behind))


# FETCH


def four() -> Track:
    """0/0 to 0/1, 2/0 to 2/3, each Group with its end behind; Largest Object 2/4."""
    source = track()
    put_group(source, 0, 2)
    put_group(source, 2, 4)
    return source


@pytest.mark.parametrize(
    ("chosen", "span"),
    [
        (None, (at(0, 0), at(2, 4))),
        (LocationFilter.none(), (at(0, 0), at(2, 4))),
        (LocationFilter.relative_start(1), (at(2, 0), at(2, 4))),
        (LocationFilter.relative_start(3), (at(0, 0), at(2, 4))),
        (LocationFilter.relative_start(99), (at(0, 0), at(2, 4))),
        (LocationFilter.absolute_start(1, 7), (at(1, 7), at(2, 4))),
        (LocationFilter.group_end(0, 1, 0), (at(0, 1), at(0, MAX_VI64))),
        (LocationFilter.group_end(0, 0, 9), (at(0, 0), at(2, 4))),
        (LocationFilter.absolute_range(0, 1, 2, 2), (at(0, 1), at(2, 2))),
        (LocationFilter.absolute_range(0, 1, 2, 99), (at(0, 1), at(2, 4))),
    ],
)
def test_range_of_a_fetch(chosen: LocationFilter | None, span: tuple[Location, Location]) -> None:
    assert fetch_span(four(), chosen) == Range(*span)


@pytest.mark.parametrize(
    "chosen",
    [
        LocationFilter.next_object(),
        LocationFilter.relative_start(0),
        LocationFilter.absolute_start(2, 5),
        LocationFilter.absolute_start(3, 0),
        LocationFilter.absolute_range(1, 5, 1, 4),
    ],
)
def test_an_empty_range_is_refused(chosen: LocationFilter) -> None:
    with pytest.raises(InvalidRange):
        fetch_span(four(), chosen)


def test_a_range_of_nothing_published_is_refused() -> None:
    with pytest.raises(InvalidRange):
        fetch_span(track(), None)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (at(0, 0), at(2, 4), at(2, 4)),
        (at(0, 0), at(1, 3), at(1, 3)),
        (at(0, 0), at(0, MAX_VI64), at(0, 2)),
        (at(0, 9), at(0, MAX_VI64), at(0, 9)),
        (at(0, 0), at(1, MAX_VI64), at(0, MAX_VI64)),
        (at(1, 3), at(1, MAX_VI64), at(1, 3)),
    ],
)
def test_end_location_is_the_last_that_is_known(
    start: Location, end: Location, expected: Location
) -> None:
    assert fetch_end(four(), Range(start, end)) == (expected, False)


def test_a_cache_that_does_not_know_how_far_a_group_goes_names_the_end_that_was_asked_for() -> None:
    source = cache((0, 3))
    end = at(0, MAX_VI64)
    assert fetch_end(source, Range(at(0, 0), end)) == (end, False)
    source.learn(at(0, 0), end)
    assert fetch_end(source, Range(at(0, 0), end)) == (at(0, 3), False)


def test_end_of_track_is_told_where_the_range_reaches_it() -> None:
    source = four()
    end_track(source, 3)
    assert fetch_end(source, fetch_span(source, None)) == (at(3, 0), True)
    assert fetch_end(source, fetch_span(source, LocationFilter.group_end(0, 0, 9)))[1]
    assert fetch_end(source, fetch_span(source, LocationFilter.group_end(0, 0, 2))) == (
        at(2, 4),
        False,
    )

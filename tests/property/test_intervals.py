"""A set of Locations against a plain set, on a line short enough to write out."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvcs.moqt.intervals import LocationSet, Runs, following, preceding
from kvcs.moqt.names import MAX_VI64, Location

# Groups of a few Objects at both ends of the Object IDs: neighbours lie within and across Groups.
LINE = [
    Location(group, object_id)
    for group in (0, 1, 2, MAX_VI64)
    for object_id in (0, 1, 2, MAX_VI64 - 1, MAX_VI64)
]
places = st.sampled_from(LINE)
steps = st.lists(st.tuples(st.sampled_from(["add", "remove"]), places, places), max_size=30)


def build(what: list[tuple[str, Location, Location]]) -> tuple[LocationSet, set[Location]]:
    known, model = LocationSet(), set[Location]()
    for step, start, end in what:
        covered = {place for place in LINE if start <= place <= end}
        if step == "add":
            known.add(start, end)
            model |= covered
        else:
            known.remove(start, end)
            model -= covered
    return known, model


@given(steps)
def test_holds_what_was_added_and_not_removed(what: list[tuple[str, Location, Location]]) -> None:
    known, model = build(what)
    assert {place for place in LINE if place in known} == model


@given(steps, st.lists(places, max_size=8))
def test_one_location_is_put_as_it_is_added(
    what: list[tuple[str, Location, Location]], more: list[Location]
) -> None:
    (put, _), (added, _) = build(what), build(what)
    for place in more:
        put.put(place)
        added.add(place, place)
    assert put.ranges() == added.ranges()


@given(steps, st.lists(st.tuples(places, places), max_size=8))
def test_a_run_of_one_group_is_put_as_it_is_added(
    what: list[tuple[str, Location, Location]], more: list[tuple[Location, Location]]
) -> None:
    (put, _), (added, _) = build(what), build(what)
    for first, last in more:
        if first.group == last.group and first <= last:
            put.put_run(first, last)
            added.add(first, last)
    assert put.ranges() == added.ranges()


@given(steps)
def test_ranges_are_sorted_disjoint_and_do_not_touch(
    what: list[tuple[str, Location, Location]],
) -> None:
    known, _ = build(what)
    ranges = known.ranges()
    assert len(ranges) == len(known)
    for start, end in ranges:
        assert start <= end
    for (_, end), (start, _) in pairwise(ranges):
        behind = following(end)
        assert behind is not None
        assert behind < start


@given(steps, places, places)
def test_first_outside_is_the_first_run_that_is_not_held(
    what: list[tuple[str, Location, Location]], start: Location, end: Location
) -> None:
    known, model = build(what)
    missing = [place for place in LINE if start <= place <= end and place not in model]
    found = known.first_outside(start, end)
    if found is None:
        assert missing == []
        return
    low, high = found
    assert start <= low <= high <= end
    if missing:
        assert low <= missing[0]
    inside = [place for place in LINE if low <= place <= high]
    assert not [place for place in inside if place in model]
    if low != start:
        before = preceding(low)
        assert before is not None
        assert before in known
    if high != end:
        after = following(high)
        assert after is not None
        assert after in known


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5), st.booleans()), max_size=40))
def test_runs_are_the_set_of_what_was_added(steps: list[tuple[int, int, bool]]) -> None:
    runs, model = Runs(), set[int]()
    for low, more, one in steps:
        before = len(runs)
        if one:
            assert before + runs.append(low) == len(runs)
            model.add(low)
        else:
            runs.add(low, low + more)
            model |= set(range(low, low + more + 1))
        assert {number for number in range(40) if number in runs} == model
        assert len(runs) == sum(number - 1 not in model for number in model)
        assert runs.last == max(model)
        inside = [number for number in model if low <= number <= low + more]
        assert runs.first_in(low, low + more) == min(inside, default=None)
    runs.forget_half()
    assert all((number in runs) <= (number in model) for number in range(40))

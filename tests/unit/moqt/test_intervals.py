"""Sets of Locations, and stepping from one Location to the next."""

from __future__ import annotations

import pytest

from kvcs.moqt.intervals import FIRST, LAST, LocationSet, following, preceding
from kvcs.moqt.names import MAX_VI64, Location


def at(group: int, object_id: int) -> Location:
    return Location(group, object_id)


def of(*ranges: tuple[Location, Location]) -> LocationSet:
    known = LocationSet()
    for start, end in ranges:
        known.add(start, end)
    return known


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (at(0, 0), at(0, 1)),
        (at(3, MAX_VI64), at(4, 0)),
        (at(MAX_VI64, MAX_VI64 - 1), LAST),
    ],
)
def test_neighbours(before: Location, after: Location) -> None:
    assert following(before) == after
    assert preceding(after) == before


def test_the_ends_have_no_neighbour() -> None:
    assert preceding(FIRST) is None
    assert following(LAST) is None


def test_an_empty_set_knows_nothing() -> None:
    known = LocationSet()
    assert FIRST not in known
    assert len(known) == 0
    assert known.ranges() == []
    assert known.first_outside(FIRST, LAST) == (FIRST, LAST)


def test_ranges_that_touch_or_overlap_are_one() -> None:
    known = of((at(1, 0), at(1, 3)), (at(1, 4), at(1, 9)), (at(0, 5), at(1, 1)))
    assert known.ranges() == [(at(0, 5), at(1, 9))]


def test_ranges_touch_across_groups() -> None:
    assert len(of((at(0, 0), at(0, MAX_VI64)), (at(1, 0), at(1, 5)))) == 1


def test_a_range_that_covers_others_swallows_them() -> None:
    known = of((at(1, 0), at(1, 1)), (at(2, 0), at(2, 1)), (at(3, 0), at(3, 1)))
    known.add(at(1, 1), at(2, 5))
    assert known.ranges() == [(at(1, 0), at(2, 5)), (at(3, 0), at(3, 1))]


def test_nothing_is_added_or_removed_where_the_end_comes_first() -> None:
    known = of((at(1, 0), at(1, 9)))
    known.add(at(5, 0), at(4, 0))
    known.remove(at(1, 5), at(1, 4))
    assert known.ranges() == [(at(1, 0), at(1, 9))]
    assert known.first_outside(at(5, 0), at(4, 0)) is None


def test_removing_the_middle_leaves_both_sides() -> None:
    known = of((at(1, 0), at(1, 9)))
    known.remove(at(1, 3), at(1, 5))
    assert known.ranges() == [(at(1, 0), at(1, 2)), (at(1, 6), at(1, 9))]
    assert at(1, 4) not in known
    assert at(1, 6) in known


def test_removing_over_several_ranges_keeps_the_outer_parts() -> None:
    known = of((at(1, 0), at(1, 5)), (at(2, 0), at(2, 5)), (at(3, 0), at(3, 5)))
    known.remove(at(1, 4), at(3, 1))
    assert known.ranges() == [(at(1, 0), at(1, 3)), (at(3, 2), at(3, 5))]


def test_removing_what_is_not_there_changes_nothing() -> None:
    known = of((at(1, 0), at(1, 5)))
    known.remove(at(2, 0), at(2, 5))
    known.remove(at(0, 0), at(0, 5))
    assert known.ranges() == [(at(1, 0), at(1, 5))]


def test_the_whole_line_can_be_known_and_forgotten() -> None:
    known = of((FIRST, LAST))
    assert known.first_outside(FIRST, LAST) is None
    known.remove(at(4, 0), at(4, MAX_VI64))
    assert known.first_outside(FIRST, LAST) == (at(4, 0), at(4, MAX_VI64))
    known.remove(FIRST, LAST)
    assert len(known) == 0


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (at(1, 2), at(1, 4), None),
        (at(1, 0), at(1, 9), (at(1, 0), at(1, 1))),
        (at(1, 3), at(1, 9), (at(1, 6), at(1, 9))),
        (at(1, 3), at(3, 0), (at(1, 6), at(1, MAX_VI64))),
        (at(0, 0), at(0, 5), (at(0, 0), at(0, 5))),
        (at(2, 1), LAST, (at(2, 4), LAST)),
    ],
)
def test_first_run_outside(
    start: Location, end: Location, expected: tuple[Location, Location] | None
) -> None:
    known = of((at(1, 2), at(1, 5)), (at(2, 0), at(2, 3)))
    assert known.first_outside(start, end) == expected

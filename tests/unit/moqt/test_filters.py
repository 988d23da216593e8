"""Location Filters and Range Filters (MOQT §3.3)."""

from __future__ import annotations

import pytest

from kvcs.errors import UsageError
from kvcs.moqt.errors import InvalidFilter, ProtocolViolation
from kvcs.moqt.filters import (
    LocationFilter,
    LocationFilterType,
    Range,
    RangeFilter,
    RangeFilterKind,
    RangeFilters,
)
from kvcs.moqt.names import MAX_VI64, Location
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.wire import Reader

LARGEST = Location(5, 3)
F = LocationFilter


@pytest.mark.parametrize(
    ("chosen", "subscription", "fetch"),
    [
        (F.none(), ((0, 0), None), ((0, 0), (5, 3))),
        (F.relative_start(0), ((6, 0), None), None),
        (F.relative_start(1), ((5, 0), None), ((5, 0), (5, 3))),
        (F.relative_start(9), ((0, 0), None), ((0, 0), (5, 3))),
        (F.absolute_start(10, 0), ((10, 0), None), None),
        (F.group_end(2, 0, 4), ((2, 0), (4, MAX_VI64)), ((2, 0), (4, MAX_VI64))),
        (F.group_end(2, 0, 5), ((2, 0), (5, MAX_VI64)), ((2, 0), (5, 3))),
        (F.absolute_range(5, 2, 5, 9), ((5, 2), (5, 9)), ((5, 2), (5, 3))),
        (F.absolute_range(4, 9, 4, 2), ((4, 9), (4, 2)), None),
        (F.next_object(), ((5, 4), None), None),
    ],
)
def test_filters_resolve_against_the_largest_object(
    chosen: LocationFilter,
    subscription: tuple[tuple[int, int], tuple[int, int] | None],
    fetch: tuple[tuple[int, int], tuple[int, int]] | None,
) -> None:
    got = chosen.for_subscription(LARGEST)
    assert (got.start, got.end) == subscription
    span = chosen.for_fetch(LARGEST)
    assert (None if span is None else (span.start, span.end)) == fetch


def test_before_the_first_object_a_fetch_has_no_range() -> None:
    for chosen in (F.none(), F.relative_start(3), F.next_object(), F.absolute_start(0, 0)):
        assert chosen.for_subscription(None) == Range(Location(0, 0), None)
        assert chosen.for_fetch(None) is None


def test_resolving_stays_within_64_bits() -> None:
    last_group = Location(MAX_VI64, 0)
    assert F.relative_start(0).for_subscription(last_group).start == (MAX_VI64, 0)
    last_object = Location(7, MAX_VI64)
    assert F.next_object().for_subscription(last_object).start == (8, 0)


def test_ranges_include_both_ends() -> None:
    span = Range(Location(2, 5), Location(4, 1))
    inside = [(2, 5), (2, MAX_VI64), (3, 0), (4, 1)]
    assert all(Location(*place) in span for place in inside)
    assert not any(Location(*place) in span for place in [(2, 4), (4, 2), (0, 9)])
    assert Location(MAX_VI64, 0) in Range(Location(0, 0), None)
    assert Location(4, 5) not in Range(Location(4, 9), Location(4, 2))


def test_filters_that_cannot_be_sent() -> None:
    with pytest.raises(UsageError):
        F.group_end(5, 0, 4)
    for bad in (
        LocationFilter(LocationFilterType.ABSOLUTE_GROUP_END, MAX_VI64, 0, 1),
        LocationFilter(LocationFilterType.NONE, 1),
        LocationFilter(LocationFilterType.ABSOLUTE_START, 1, 1, 1),
        LocationFilter(LocationFilterType.RELATIVE_START, -1),
    ):
        with pytest.raises(UsageError):
            bad.write()


def test_range_filters_that_cannot_be_sent() -> None:
    plain, with_property = RangeFilterKind(False), RangeFilterKind(True)
    for bad in (
        RangeFilter(256),
        RangeFilter(0, ((5, 4),)),
        RangeFilter(0, ((5, 9), (8, 10))),
        RangeFilter(0, ((5, None), (9, 10))),
        RangeFilter(0, ((0, 1),), 2),
        RangeFilter(None, ((0, 1),)),
    ):
        with pytest.raises(UsageError):
            plain.write(bad)
    for bad in (RangeFilter(0, ((0, 1),)), RangeFilter(None, (), 2)):
        with pytest.raises(UsageError):
            with_property.write(bad)


@pytest.mark.parametrize(("with_property", "hex_"), [(False, "020080"), (True, "0100")])
def test_a_filter_that_does_not_fill_its_length_closes_the_session(
    with_property: bool, hex_: str
) -> None:
    with pytest.raises(ProtocolViolation):
        RangeFilterKind(with_property).read(Reader(bytes.fromhex(hex_)))


def objects(*ranges: tuple[int, int | None], set_id: int = 0) -> RangeFilter:
    return RangeFilter(set_id, ranges)


def test_bounds_beyond_64_bits_are_read_and_then_refused() -> None:
    value = RangeFilterKind(False).read(Reader(bytes.fromhex("0b00" + "ff" * 9 + "01")))
    assert value.ranges == ((MAX_VI64, MAX_VI64 + 1),)
    with pytest.raises(InvalidFilter):
        RangeFilters.of([(ParameterType.OBJECTID_FILTER, value)]).check(100)
    open_ended = RangeFilter(0, ((0, MAX_VI64), (MAX_VI64 + 1, None)))
    with pytest.raises(InvalidFilter):
        RangeFilters.of([(ParameterType.OBJECTID_FILTER, open_ended)]).check(100)


@pytest.mark.parametrize(
    "parameters",
    [
        Parameters.of(objectid_filter=[objects((0, 1)), objects((5, 6))]),
        Parameters.of(priority_filter=objects((0, 256))),
        Parameters.of(priority_filter=objects((256, None))),
        Parameters.of(object_property_filter=RangeFilter(0, ((0, 1),), 3)),
        Parameters.of(
            object_property_filter=[RangeFilter(0, ((0, 1),), 2), RangeFilter(0, ((3, 4),), 2)]
        ),
    ],
)
def test_filters_that_refuse_the_request(parameters: Parameters) -> None:
    with pytest.raises(InvalidFilter):
        RangeFilters.of(parameters).check(100)


def test_filters_of_one_set_may_differ_in_type_or_property() -> None:
    RangeFilters.of(
        Parameters.of(
            subgroup_filter=objects((0, 1)),
            objectid_filter=[objects((0, 1)), objects((0, 1), set_id=1)],
            priority_filter=objects((0, 255)),
            object_property_filter=[RangeFilter(0, ((0, 1),), 2), RangeFilter(0, ((0, 1),), 4)],
        )
    ).check(6)


def test_ranges_are_counted_over_all_filters() -> None:
    filters = RangeFilters.of(
        Parameters.of(
            objectid_filter=objects((0, 1), (3, 4)), subgroup_filter=objects((0, 1), set_id=1)
        )
    )
    assert filters.range_count == 3
    filters.check(3)
    with pytest.raises(InvalidFilter, match="limit 2"):
        filters.check(2)


def test_without_an_allowance_no_filter_passes_and_none_is_needed() -> None:
    RangeFilters().check(0)
    with pytest.raises(InvalidFilter):
        RangeFilters.of(Parameters.of(objectid_filter=objects())).check(0)
    RangeFilters.of(Parameters.of(objectid_filter=RangeFilter(None))).check(0)


def test_an_update_replaces_types_whole() -> None:
    before = RangeFilters.of(
        Parameters.of(
            objectid_filter=[objects((0, 1)), objects((5, 6), set_id=1)],
            subgroup_filter=objects((0, 1)),
        )
    )
    after = before.replaced_by(Parameters.of(objectid_filter=objects((9, 9)), forward=1))
    assert after[ParameterType.OBJECTID_FILTER] == (objects((9, 9)),)
    assert after[ParameterType.SUBGROUP_FILTER] == before[ParameterType.SUBGROUP_FILTER]
    removed = after.replaced_by(Parameters.of(objectid_filter=RangeFilter(None)))
    assert list(removed) == [ParameterType.SUBGROUP_FILTER]
    assert dict(before) == dict(RangeFilters(before))
    assert len(before) == 2
    assert "OBJECTID_FILTER" in repr(before)


def passes(filters: RangeFilters, object_id: int = 0, subgroup_id: int | None = 0) -> bool:
    return filters.passes(0, subgroup_id, object_id, 128, KeyValues())


def test_no_filter_lets_everything_pass_and_no_range_nothing() -> None:
    assert passes(RangeFilters())
    assert not passes(RangeFilters.of(Parameters.of(objectid_filter=objects())))


def test_datagrams_have_no_subgroup_to_match() -> None:
    filters = RangeFilters.of(Parameters.of(subgroup_filter=objects((0, None))))
    assert passes(filters, subgroup_id=0)
    assert not passes(filters, subgroup_id=None)


def test_a_property_counts_from_the_immutable_list_too() -> None:
    filters = RangeFilters.of(Parameters.of(object_property_filter=RangeFilter(0, ((5, 6),), 0x3C)))
    inside = KeyValues.of({0x0B: KeyValues.of({0x3C: 5}).write()})
    assert filters.passes(0, 0, 0, 0, inside)
    assert not filters.passes(0, 0, 0, 0, KeyValues.of({0x3C: 7}))
    assert not filters.passes(0, 0, 0, 0, None)


def test_track_property_filters_select_tracks_and_not_objects() -> None:
    filters = RangeFilters.of(
        Parameters.of(
            track_property_filter=[RangeFilter(0, ((1, 1),), 0x30), RangeFilter(1, ((9, None),), 4)]
        )
    )
    assert passes(filters)
    assert filters.passes_track(KeyValues.of({0x30: 1}))
    assert filters.passes_track(KeyValues.of({0x30: 0, 0x04: 10}))
    assert not filters.passes_track(KeyValues.of({0x30: 0}))
    assert not filters.passes_track(KeyValues())
    assert RangeFilters().passes_track(KeyValues())

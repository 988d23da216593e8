"""Location Filters and Range Filters (MOQT §3.3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from kvcs.errors import UsageError
from kvcs.moqt.errors import InvalidFilter, ProtocolViolation
from kvcs.moqt.names import MAX_VI64, Location
from kvcs.moqt.properties import KeyValues, find_property
from kvcs.moqt.registry import ParameterType
from kvcs.moqt.wire import NeedMore, Reader, encode_vi64

__all__ = [
    "LOCATION_FILTER",
    "LocationFilter",
    "LocationFilterType",
    "Range",
    "RangeFilter",
    "RangeFilterKind",
    "RangeFilters",
]

_ORIGIN = Location(0, 0)
_MAX_PRIORITY = 255


@dataclass(frozen=True, slots=True)
class Range:
    """A range of Locations, both ends inclusive."""

    start: Location
    """First Location."""

    end: Location | None
    """Last Location; None without an end. Object 2^64-1 stands for the whole Group."""

    def __contains__(self, location: Location) -> bool:
        return self.start <= location and (self.end is None or location <= self.end)


class LocationFilterType(IntEnum):
    """Form of a Location Filter."""

    NONE = 0x00
    RELATIVE_START = 0x01
    ABSOLUTE_START = 0x02
    ABSOLUTE_GROUP_END = 0x03
    ABSOLUTE_RANGE = 0x04
    NEXT_OBJECT = 0x05


_FIELDS = {
    LocationFilterType.NONE: (),
    LocationFilterType.RELATIVE_START: ("start_group",),
    LocationFilterType.ABSOLUTE_START: ("start_group", "start_object"),
    LocationFilterType.ABSOLUTE_GROUP_END: ("start_group", "start_object", "end_group_delta"),
    LocationFilterType.ABSOLUTE_RANGE: (
        "start_group",
        "start_object",
        "end_group_delta",
        "end_object",
    ),
    LocationFilterType.NEXT_OBJECT: (),
}


@dataclass(frozen=True, slots=True)
class LocationFilter:
    """Which Locations a request asks for; relative forms count from the Largest Object.

    Fields that ``type`` does not have are 0.
    """

    type: LocationFilterType
    """Form of the filter."""

    start_group: int = 0
    """Group to start at; with RELATIVE_START how many Groups before the next one."""

    start_object: int = 0
    """Object ID to start at."""

    end_group_delta: int = 0
    """Last Group, counted from ``start_group``."""

    end_object: int = 0
    """Last Object ID, inclusive."""

    @classmethod
    def none(cls) -> LocationFilter:
        """Every Location; in REQUEST_UPDATE it removes the filter."""
        return cls(LocationFilterType.NONE)

    @classmethod
    def relative_start(cls, groups: int) -> LocationFilter:
        """From the next Group (0), the current one (1), or ``groups`` - 1 before it."""
        return cls(LocationFilterType.RELATIVE_START, groups)

    @classmethod
    def absolute_start(cls, group: int, object_id: int) -> LocationFilter:
        """From one Location on."""
        return cls(LocationFilterType.ABSOLUTE_START, group, object_id)

    @classmethod
    def group_end(cls, group: int, object_id: int, end_group: int) -> LocationFilter:
        """From one Location to the last Object of ``end_group``."""
        delta = _delta(group, end_group)
        return cls(LocationFilterType.ABSOLUTE_GROUP_END, group, object_id, delta)

    @classmethod
    def absolute_range(
        cls, group: int, object_id: int, end_group: int, end_object: int
    ) -> LocationFilter:
        """From one Location to another, inclusive."""
        delta = _delta(group, end_group)
        return cls(LocationFilterType.ABSOLUTE_RANGE, group, object_id, delta, end_object)

    @classmethod
    def between(cls, first: Location, last: Location) -> LocationFilter:
        """From one Location to another; to the end of the Group where ``last`` is the largest.

        There are servers that take 2^64-1 for too large an Object ID.
        """
        if last.object == MAX_VI64:
            return cls.group_end(*first, last.group)
        return cls.absolute_range(*first, *last)

    @classmethod
    def next_object(cls) -> LocationFilter:
        """From the Object behind the Largest Object."""
        return cls(LocationFilterType.NEXT_OBJECT)

    @property
    def end_group(self) -> int:
        """Last Group of the forms that have one."""
        return self.start_group + self.end_group_delta

    @classmethod
    def read(cls, reader: Reader) -> LocationFilter:
        """Read a filter, which says itself how long it is (§9.20).

        Raises:
            ProtocolViolation: the type is unknown, or the last Group is above 2^64-1.
        """
        number = reader.vi64()
        if number > LocationFilterType.NEXT_OBJECT:
            raise ProtocolViolation(f"Location Filter Type {number:#x} is not defined")
        type_ = LocationFilterType(number)
        value = cls(type_, *[reader.vi64() for _ in _FIELDS[type_]])
        if value.end_group > MAX_VI64:
            raise ProtocolViolation("Location Filter ends at a Group above 2^64-1")
        return value

    def write(self) -> bytes:
        """Encode the filter.

        Raises:
            UsageError: a field is out of bounds, or not of this type.
        """
        if self.end_group > MAX_VI64:
            raise UsageError("Location Filter ends at a Group above 2^64-1")
        names = _FIELDS[self.type]
        for name in _FIELDS[LocationFilterType.ABSOLUTE_RANGE]:
            if name not in names and getattr(self, name):
                raise UsageError(f"Location Filter {self.type.name} has no {name}")
        return encode_vi64(self.type) + b"".join(encode_vi64(getattr(self, n)) for n in names)

    def for_subscription(self, largest: Location | None) -> Range:
        """Return the range for a subscription.

        Args:
            largest: Largest Object when the request is processed; None before the first one.
        """
        match self.type:
            case LocationFilterType.NONE:
                return Range(_ORIGIN, None)
            case LocationFilterType.RELATIVE_START:
                if largest is None:
                    return Range(_ORIGIN, None)
                group = largest.group + 1 - self.start_group
                return Range(Location(min(max(group, 0), MAX_VI64), 0), None)
            case LocationFilterType.NEXT_OBJECT:
                if largest is None:
                    return Range(_ORIGIN, None)
                if largest.object == MAX_VI64:
                    return Range(Location(largest.group + 1, 0), None)
                return Range(Location(largest.group, largest.object + 1), None)
        start = Location(self.start_group, self.start_object)
        match self.type:
            case LocationFilterType.ABSOLUTE_GROUP_END:
                return Range(start, Location(self.end_group, MAX_VI64))
            case LocationFilterType.ABSOLUTE_RANGE:
                return Range(start, Location(self.end_group, self.end_object))
        return Range(start, None)

    def for_fetch(self, largest: Location | None) -> Range | None:
        """Return the range for a FETCH or a fill, which ends at the Largest Object at the latest.

        Args:
            largest: as in `for_subscription`.

        Returns:
            The range; None when it is empty: INVALID_RANGE for a FETCH, no stream for a fill.
        """
        if largest is None:
            return None
        wanted = self.for_subscription(largest)
        end = largest if wanted.end is None else min(wanted.end, largest)
        return Range(wanted.start, end) if wanted.start <= end else None


def _delta(group: int, end_group: int) -> int:
    if end_group < group:
        raise UsageError(f"a range from Group {group} cannot end at Group {end_group}")
    return end_group - group


class _LocationFilterKind:
    def read(self, reader: Reader) -> LocationFilter:
        return LocationFilter.read(reader)

    def write(self, value: LocationFilter) -> bytes:
        if not isinstance(value, LocationFilter):
            raise UsageError(f"LOCATION_FILTER takes a LocationFilter, not {value!r}")
        return value.write()


LOCATION_FILTER = _LocationFilterKind()


# ------------------------------------------------------------------------------ Range Filters

_WITH_PROPERTY = (ParameterType.OBJECT_PROPERTY_FILTER, ParameterType.TRACK_PROPERTY_FILTER)
_OBJECT_FILTERS = (
    ParameterType.SUBGROUP_FILTER,
    ParameterType.OBJECTID_FILTER,
    ParameterType.PRIORITY_FILTER,
    ParameterType.OBJECT_PROPERTY_FILTER,
)
_RANGE_FILTERS = (*_OBJECT_FILTERS, ParameterType.TRACK_PROPERTY_FILTER)


@dataclass(frozen=True, slots=True)
class RangeFilter:
    """Ranges of one quantity, in one set."""

    set_id: int | None
    """SetID; None is the zero-length value that removes the type in REQUEST_UPDATE."""

    ranges: tuple[tuple[int, int | None], ...] = ()
    """First and last value of each range, inclusive; None without an upper bound, last only.

    A bound above 2^64-1 is what a peer's deltas can add up to; `RangeFilters.check` refuses it.
    """

    property_type: int | None = None
    """Property the filter looks at, for the two property filters."""

    def matches(self, value: int) -> bool:
        """Whether ``value`` is in one of the ranges; no range matches nothing."""
        return any(low <= value and (high is None or value <= high) for low, high in self.ranges)


class RangeFilterKind:
    """A Range Filter behind its Length.

    Args:
        with_property: whether a Property Type follows the SetID.
    """

    def __init__(self, with_property: bool) -> None:
        self.with_property = with_property

    def read(self, reader: Reader) -> RangeFilter:
        block = reader.sub(reader.vi64())
        if not block.remaining:
            return RangeFilter(None)
        try:
            set_id = block.uint8()
            property_type = block.vi64() if self.with_property else None
            ranges: list[tuple[int, int | None]] = []
            previous = 0
            while block.remaining:
                low = previous + block.vi64()
                if not block.remaining:
                    ranges.append((low, None))
                    break
                previous = low + block.vi64()
                ranges.append((low, previous))
        except NeedMore as exc:
            raise ProtocolViolation("Range Filter: its Length ends inside a field") from exc
        return RangeFilter(set_id, tuple(ranges), property_type)

    def write(self, value: RangeFilter) -> bytes:
        if not isinstance(value, RangeFilter):
            raise UsageError(f"a Range Filter takes a RangeFilter, not {value!r}")
        if value.set_id is None:
            if value.ranges or value.property_type is not None:
                raise UsageError("a zero-length Range Filter has neither ranges nor a property")
            return b"\x00"
        if not 0 <= value.set_id <= 255:
            raise UsageError(f"SetID is {value.set_id}, not 0 to 255")
        if (value.property_type is not None) != self.with_property:
            raise UsageError("a property filter, and no other, names a Property Type")
        parts = [bytes((value.set_id,))]
        if value.property_type is not None:
            parts.append(encode_vi64(value.property_type))
        previous: int | None = 0
        for low, high in value.ranges:
            if previous is None:
                raise UsageError("a range without an upper bound has to be the last one")
            if low < previous or (high is not None and high < low):
                raise UsageError(f"range {low} to {high} is not in ascending order")
            parts.append(encode_vi64(low - previous))
            if high is not None:
                parts.append(encode_vi64(high - low))
            previous = high
        octets = b"".join(parts)
        return encode_vi64(len(octets)) + octets


class RangeFilters(Mapping[ParameterType, tuple[RangeFilter, ...]]):
    """The Range Filters of one subscription or fetch, by parameter type.

    Filters of one SetID all have to match; an Object passes when one set matches.
    """

    __slots__ = ("_by_type",)

    def __init__(
        self, by_type: Mapping[ParameterType, tuple[RangeFilter, ...]] | None = None
    ) -> None:
        self._by_type = {} if by_type is None else dict(by_type)

    @classmethod
    def of(cls, parameters: Iterable[tuple[ParameterType, Any]]) -> RangeFilters:
        """Collect the filters of a message's parameters (``Parameters`` or its ``items``)."""
        return cls().replaced_by(parameters)

    def replaced_by(self, parameters: Iterable[tuple[ParameterType, Any]]) -> RangeFilters:
        """Return the filters after an update, or those of a fill (§9.5).

        A type that is present replaces that type; a zero-length filter removes it.
        """
        present: dict[ParameterType, list[RangeFilter]] = {}
        for type_, value in parameters:
            if type_ in _RANGE_FILTERS:
                present.setdefault(type_, []).append(value)
        merged = dict(self._by_type)
        for type_, filters in present.items():
            kept = tuple(value for value in filters if value.set_id is not None)
            if kept:
                merged[type_] = kept
            else:
                merged.pop(type_, None)
        return RangeFilters(merged)

    def __getitem__(self, type_: ParameterType) -> tuple[RangeFilter, ...]:
        return self._by_type[type_]

    def __iter__(self) -> Iterator[ParameterType]:
        return iter(self._by_type)

    def __len__(self) -> int:
        return len(self._by_type)

    def __repr__(self) -> str:
        return f"RangeFilters({self._by_type!r})"

    @property
    def range_count(self) -> int:
        """Ranges in all filters, as MAX_FILTER_RANGES counts them."""
        return sum(len(value.ranges) for filters in self.values() for value in filters)

    def check(self, max_ranges: int) -> None:
        """Hold the filters to the rules that refuse a request (§3.3).

        Args:
            max_ranges: MAX_FILTER_RANGES we advertised; 0 allows no Range Filter at all.

        Raises:
            InvalidFilter: one set has the same filter twice, a bound is above 2^64-1 or, for a
                priority, 255, a Property Type is odd, or there are too many ranges.
        """
        if self and (max_ranges == 0 or self.range_count > max_ranges):
            raise InvalidFilter(f"{self.range_count} filter ranges, limit {max_ranges}")
        for type_, filters in self.items():
            top = _MAX_PRIORITY if type_ is ParameterType.PRIORITY_FILTER else MAX_VI64
            seen = set()
            for value in filters:
                key = (value.set_id, value.property_type)
                if key in seen:
                    raise InvalidFilter(f"{type_.name} twice in set {value.set_id}")
                seen.add(key)
                if value.property_type is not None and value.property_type & 1:
                    raise InvalidFilter(f"{type_.name} of an odd Property Type")
                if any((low if high is None else high) > top for low, high in value.ranges):
                    raise InvalidFilter(f"{type_.name} has a bound above {top}")

    def passes(
        self,
        group_id: int,
        subgroup_id: int | None,
        object_id: int,
        priority: int,
        properties: KeyValues | None = None,
    ) -> bool:
        """Whether an Object passes.

        Args:
            group_id: its Group ID; no filter looks at it today.
            subgroup_id: its Subgroup ID; None fails a SUBGROUP_FILTER.
            object_id: its Object ID.
            priority: its Publisher Priority, defaults applied.
            properties: its Properties; one it lacks fails the filter.

        TRACK_PROPERTY_FILTER does not count here: see `passes_track`.
        """
        if not self._by_type:
            return True
        verdicts: dict[int | None, bool] = {}
        for type_ in _OBJECT_FILTERS:
            for value in self._by_type.get(type_, ()):
                number: object
                if type_ is ParameterType.SUBGROUP_FILTER:
                    number = subgroup_id
                elif type_ is ParameterType.OBJECTID_FILTER:
                    number = object_id
                elif type_ is ParameterType.PRIORITY_FILTER:
                    number = priority
                else:
                    number = _property(properties, value)
                fits = isinstance(number, int) and value.matches(number)
                verdicts[value.set_id] = verdicts.get(value.set_id, True) and fits
        return not verdicts or any(verdicts.values())

    def passes_track(self, properties: KeyValues) -> bool:
        """Whether the TRACK_PROPERTY_FILTERs of a SUBSCRIBE_TRACKS select a Track."""
        return self.for_track(properties) is not None

    def for_track(self, properties: KeyValues) -> RangeFilters | None:
        """What is left for the Objects of a Track, once its Properties are known.

        Returns:
            The filters of the sets that the Track may pass, without TRACK_PROPERTY_FILTERs; none
            where such a set leaves no Object out. None where the Track passes no set.
        """
        verdicts: dict[int | None, bool] = {
            value.set_id: True for values in self.values() for value in values
        }
        for value in self._by_type.get(ParameterType.TRACK_PROPERTY_FILTER, ()):
            number = _property(properties, value)
            fits = isinstance(number, int) and value.matches(number)
            verdicts[value.set_id] = verdicts[value.set_id] and fits
        if verdicts and not any(verdicts.values()):
            return None
        left: dict[ParameterType, tuple[RangeFilter, ...]] = {
            type_: tuple(value for value in values if verdicts[value.set_id])
            for type_, values in self.items()
            if type_ is not ParameterType.TRACK_PROPERTY_FILTER
        }
        left = {type_: values for type_, values in left.items() if values}
        narrowed = {value.set_id for values in left.values() for value in values}
        passing = {set_id for set_id, verdict in verdicts.items() if verdict}
        return RangeFilters(left if narrowed == passing else None)


def _property(properties: KeyValues | None, value: RangeFilter) -> object:
    if properties is None or value.property_type is None:
        return None
    return find_property(properties, value.property_type)

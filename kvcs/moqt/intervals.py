"""A set of Locations kept as sorted, disjoint, inclusive ranges (MOQT §2.1.2).

A cache records with it what it *knows*: inside a range, what is not stored does not exist; outside,
the status of an Object is unknown.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from kvcs.moqt.names import MAX_VI64, Location

FIRST = Location(0, 0)
LAST = Location(MAX_VI64, MAX_VI64)

MAX_KNOWN_RANGES = 65536
"""Ranges of Locations whose status is remembered of one Track; beyond them it is unknown."""


class Span(NamedTuple):
    """A range of Locations of a track, both ends inclusive."""

    first: Location
    """Smallest Location."""

    last: Location
    """Largest Location."""

    @classmethod
    def of_group(cls, group_id: int) -> Span:
        """A whole Group."""
        return cls(Location(group_id, 0), Location(group_id, MAX_VI64))


EVERYTHING = Span(FIRST, LAST)
"""A whole track."""


def following(location: Location) -> Location | None:
    """The smallest Location after ``location``; None after the last one."""
    if location.object < MAX_VI64:
        return Location(location.group, location.object + 1)
    if location.group < MAX_VI64:
        return Location(location.group + 1, 0)
    return None


def preceding(location: Location) -> Location | None:
    """The largest Location before ``location``; None before 0/0."""
    if location.object > 0:
        return Location(location.group, location.object - 1)
    if location.group > 0:
        return Location(location.group - 1, MAX_VI64)
    return None


class LocationSet:
    """Sorted, disjoint, inclusive ranges of Locations; ranges that touch are one."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[Location] = []
        self._ends: list[Location] = []

    def __len__(self) -> int:
        """Number of disjoint ranges: what the set costs."""
        return len(self._starts)

    def __contains__(self, location: Location) -> bool:
        if not self._starts:
            return False
        index = bisect_right(self._starts, location) - 1
        return index >= 0 and location <= self._ends[index]

    def ranges(self) -> list[tuple[Location, Location]]:
        """The ranges in order, both ends inclusive."""
        return list(zip(self._starts, self._ends, strict=True))

    def add(self, start: Location, end: Location) -> None:
        """Add ``start`` to ``end``, both inclusive; merges with neighbours."""
        if end < start:
            return
        before = preceding(start)
        after = following(end)
        # Ranges from `low` to `high` overlap or touch the new one.
        low = 0 if before is None else bisect_left(self._ends, before)
        high = len(self._starts) if after is None else bisect_right(self._starts, after)
        if low < high:
            start = min(start, self._starts[low])
            end = max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]

    def put(self, location: Location) -> None:
        """Add one Location; cheap where it comes right behind a range, or is in one."""
        index = bisect_right(self._starts, location) - 1
        if index >= 0:
            end = self._ends[index]
            if location <= end:
                return
            if end.group == location.group and end.object + 1 == location.object:
                behind = index + 1
                if behind == len(self._starts) or self._starts[behind] != following(location):
                    self._ends[index] = location
                    return
        self.add(location, location)

    def put_run(self, first: Location, last: Location) -> None:
        """Add Locations of one Group, as `add`; cheap where they come right behind a range."""
        starts, ends = self._starts, self._ends
        index = bisect_right(starts, first) - 1
        if index >= 0:
            group_id, object_id = ends[index]
            if group_id == first.group and object_id + 1 == first.object:
                behind = index + 1
                if behind == len(starts) or starts[behind].group != group_id:
                    if last.object < MAX_VI64:
                        ends[index] = last
                        return
        self.add(first, last)

    def remove(self, start: Location, end: Location) -> None:
        """Take ``start`` to ``end``, both inclusive, out of the set."""
        if end < start:
            return
        low = bisect_left(self._ends, start)
        high = bisect_right(self._starts, end)
        if low >= high:
            return
        starts: list[Location] = []
        ends: list[Location] = []
        if self._starts[low] < start:
            before = preceding(start)
            assert before is not None  # something lies before `start`
            starts.append(self._starts[low])
            ends.append(before)
        if self._ends[high - 1] > end:
            after = following(end)
            assert after is not None  # something lies after `end`
            starts.append(after)
            ends.append(self._ends[high - 1])
        self._starts[low:high] = starts
        self._ends[low:high] = ends

    def first_outside(self, start: Location, end: Location) -> tuple[Location, Location] | None:
        """The first run of Locations in ``start``..``end`` that is not in the set.

        Returns:
            Both inclusive ends of that run, cut to ``end``; None when all are in the set.
        """
        if end < start:
            return None
        index = bisect_right(self._starts, start) - 1
        if index >= 0 and start <= self._ends[index]:
            after = following(self._ends[index])
            if after is None or after > end:
                return None
            start = after
        index += 1
        if index < len(self._starts) and self._starts[index] <= end:
            before = preceding(self._starts[index])
            assert before is not None  # `start` lies before it
            return start, before
        return start, end


class Runs:
    """A set of integers kept as sorted, disjoint, inclusive runs; runs that touch are one."""

    __slots__ = ("_bounds",)

    def __init__(self) -> None:
        self._bounds: list[int] = []
        """First and last number of each run, flat; equal where it has one number."""

    def __len__(self) -> int:
        """Number of runs: what the set costs."""
        return len(self._bounds) // 2

    @property
    def last(self) -> int:
        """The largest number; -1 while there is none."""
        return self._bounds[-1] if self._bounds else -1

    def first_in(self, low: int, high: int) -> int | None:
        """The smallest number of the set in ``low``..``high``; None where there is none."""
        bounds = self._bounds
        index = bisect_left(bounds, low)
        if index & 1:
            return low  # inside a run, or its last number
        if index < len(bounds) and bounds[index] <= high:
            return bounds[index]
        return None

    def __contains__(self, number: int) -> bool:
        return self.first_in(number, number) is not None

    def append(self, number: int) -> int:
        """Add a number; returns how many runs more there are now: 1, 0 or -1.

        Cheap where numbers come in ascending order.
        """
        bounds = self._bounds
        last = bounds[-1] if bounds else -1
        if number > last:
            if number == last + 1 and bounds:
                bounds[-1] = number
                return 0
            bounds += (number, number)
            return 1
        before = len(self)
        self.add(number, number)
        return len(self) - before

    def extend(self, low: int, high: int) -> bool:
        """Add ``low`` to ``high`` where they lie right behind the largest one; whether they do."""
        bounds = self._bounds
        if bounds and bounds[-1] == low - 1:
            bounds[-1] = high
            return True
        return False

    def add(self, low: int, high: int) -> None:
        """Add ``low`` to ``high``, both inclusive; merges with neighbours."""
        bounds = self._bounds
        # Runs from `start` to `stop` overlap or touch the new one.
        start = bisect_left(bounds, low - 1) & ~1
        stop = (bisect_right(bounds, high + 1) + 1) & ~1
        if start < stop:
            low = min(low, bounds[start])
            high = max(high, bounds[stop - 1])
        bounds[start:stop] = [low, high]

    def forget_half(self) -> None:
        """Drop the lower half of the runs, to make room."""
        del self._bounds[: len(self) // 2 * 2]

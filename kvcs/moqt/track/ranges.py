"""Reads a range of a Track in request order, and says what is unknown on the way (MOQT §3.2)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from kvcs.moqt.errors import InvalidRange
from kvcs.moqt.filters import LocationFilter, Range
from kvcs.moqt.intervals import following, preceding
from kvcs.moqt.names import MAX_VI64, GroupOrder, Location
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import StoredObject


@dataclass(frozen=True, slots=True)
class UnknownRun:
    """A run of Locations of one kind that the store cannot tell about; both ends inclusive."""

    start: Location
    end: Location

    def last_delivered(self, order: GroupOrder) -> Location:
        """The Location of the run that comes last in delivery order."""
        if order is GroupOrder.ASCENDING or self.start.group == self.end.group:
            return self.end
        return Location(self.start.group, MAX_VI64)


class RangeReader:
    """Walks a range of a Track: Groups in the order asked for, Objects ascending within each.

    Args:
        track: what is read; it may grow meanwhile.
        span: inclusive range with an end.
        order: order of the Groups.
    """

    def __init__(self, track: Track, span: Range, order: GroupOrder) -> None:
        assert span.end is not None  # a fetch or fill always has one
        self._track = track
        self._order = order
        self._low, self._high = span.start, span.end
        self._at: Location | None
        """Next Location to look at, within the current segment; None when all is read."""
        if order is GroupOrder.ASCENDING:
            self._at, self._end = span.start, span.end
        else:
            self._at = self._end = span.end  # replaced by the next call
            self._enter(span.end.group)

    def peek(self, now: float) -> StoredObject | UnknownRun | None:
        """What comes next: an Object, a run whose status is unknown, or None at the end.

        An Object older than the Track's MAX_CACHE_DURATION is dropped here and counts as unknown.
        """
        track = self._track
        while self._at is not None:
            self._split()
            stored = track.next_stored(self._at, self._end)
            if stored is not None and track.expired(stored, now):
                track.forget(stored)
                continue
            gap_end = self._end if stored is None else preceding(stored.header.location)
            if gap_end is not None and self._at <= gap_end:
                unknown = track.first_unknown(self._at, gap_end)
                if unknown is not None:
                    return UnknownRun(*unknown)
            if stored is not None:
                return stored
            self._leave()
        return None

    def passed(self, location: Location) -> None:
        """Go on behind ``location``, which was delivered or given up."""
        after = following(location)
        if after is None or after > self._end or self._spans_groups:
            self._leave()
        else:
            self._at = after

    def has_passed(self, location: Location) -> bool:
        """Whether ``location`` of the range needs not be there any more."""
        at = self._at
        if at is None or at.group == location.group:
            return at is None or at > location
        if self._order is GroupOrder.ASCENDING:
            return at.group > location.group
        return self._end.group < location.group

    def _enter(self, group_id: int) -> None:
        self._at = max(self._low, Location(group_id, 0))
        self._end = min(self._high, Location(group_id, MAX_VI64))

    @property
    def _spans_groups(self) -> bool:
        """Whether the segment is one of several Groups of a descending range."""
        return (
            self._order is GroupOrder.DESCENDING
            and self._at is not None
            and self._at.group != self._end.group
        )

    def _split(self) -> None:
        """Enter the highest Group of a segment of several, once something of it is stored."""
        if self._spans_groups and self._at is not None:
            if self._track.next_stored(self._at, self._end) is not None:
                self._descend(self._end.group + 1)

    def _leave(self) -> None:
        """Go from the current segment to the next one in order."""
        if self._order is GroupOrder.ASCENDING or self._at is None:
            self._at = None
        else:
            self._descend(self._at.group)

    def _descend(self, group_id: int) -> None:
        """Go to the segment that comes before ``group_id`` of a descending range."""
        if group_id <= self._low.group:
            self._at = None
            return
        ids = self._track.group_ids()
        index = bisect_left(ids, group_id) - 1
        stored = ids[index] if index >= 0 and ids[index] >= self._low.group else None
        floor = self._low if stored is None else Location(stored + 1, 0)
        between = Location(group_id - 1, MAX_VI64)
        if floor <= between and self._track.first_unknown(floor, between) is not None:
            # Nothing is stored in between: one segment over several Groups, given up as a whole.
            self._at, self._end = floor, between
        elif stored is None:
            self._at = None
        else:
            self._enter(stored)


def fetch_span(track: Track, chosen: LocationFilter | None) -> Range:
    """Range of a FETCH with a Location Filter (§9.11).

    Raises:
        InvalidRange: nothing was published, or the range is empty.
    """
    if track.largest is None:
        raise InvalidRange("nothing was published yet")
    span = (chosen or LocationFilter.none()).for_fetch(track.largest)
    if span is None:
        raise InvalidRange(f"the range is empty; the Largest Object is {track.largest}")
    return span


def fetch_end(track: Track, span: Range) -> tuple[Location, bool]:
    """End Location of a FETCH_OK, and whether the Track ends there (§9.12)."""
    end = span.end
    assert end is not None
    if track.final is not None and end >= track.final:
        return max(track.final, span.start), True
    if end.object == MAX_VI64:
        if track.first_unknown(max(span.start, Location(end.group, 0)), end) is not None:
            return end, False  # a cache that does not know how far the Group goes
        # A whole Group: the largest Object known of it, status included.
        group = track.groups.get(end.group)
        if group is not None and group.object_ids:
            return max(Location(end.group, group.object_ids[-1]), span.start), False
        before = preceding(Location(end.group, 0))
        return max(span.start, before or span.start), False
    return end, False

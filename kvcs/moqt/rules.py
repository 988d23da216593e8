"""What makes a Track malformed, as its receiver sees it (MOQT §12.1)."""

from __future__ import annotations

from typing import TypeVar

from kvcs.moqt.data import ObjectHeader, ObjectStatus
from kvcs.moqt.errors import MalformedTrack
from kvcs.moqt.names import Location

_K = TypeVar("_K")
_V = TypeVar("_V")

MAX_SUBGROUPS_REMEMBERED = 65536
"""Groups and Subgroups of one Track whose rules are remembered; the oldest are forgotten."""


class TrackRules:
    """Holds the Objects of one Track, from one publisher, against each other.

    Payloads are compared where they are stored; this looks at fields only.
    """

    def __init__(self) -> None:
        self.default_priority: int | None = None
        """Publisher Priority of streams that name none; None until the Track Properties are here,
        and then such a stream agrees with every priority."""
        self._priorities: dict[tuple[int, int], int | None] = {}
        self._subgroup_finals: dict[tuple[int, int], int] = {}
        self._group_finals: dict[int, int] = {}
        self._group_ends: dict[int, int] = {}
        self._largest: dict[int, int] = {}
        self._last: Location | None = None
        self._end: Location | None = None

    def check_object(self, header: ObjectHeader) -> None:
        """Check an Object against what came before, and remember it.

        Raises:
            MalformedTrack: it breaks a condition of §12.1.
        """
        group_id, object_id = header.group_id, header.object_id
        location = header.location
        if self._end is not None and location > self._end:
            raise MalformedTrack(f"{location} lies beyond the end of the Track, {self._end}")
        final = self._group_finals.get(group_id)
        if final is not None and object_id > final:
            raise MalformedTrack(f"{location} lies beyond its Group's last Object, {final}")
        if header.subgroup_id is not None:
            self._check_subgroup(header, (group_id, header.subgroup_id))
        if header.status is ObjectStatus.NORMAL:
            if object_id == self._group_ends.get(group_id):
                raise MalformedTrack(f"{location} lies where its Group has ended")
            if object_id > self._largest.get(group_id, -1):
                _remember(self._largest, group_id, object_id)
            if self._last is None or location > self._last:
                self._last = location
        else:
            self._end_group(group_id, object_id)
            if header.status is ObjectStatus.END_OF_TRACK:
                self._end_track(location)

    def _check_subgroup(self, header: ObjectHeader, subgroup: tuple[int, int]) -> None:
        priority = header.publisher_priority
        known = self._priorities.get(subgroup, priority)
        if not self._same_priority(known, priority):
            raise MalformedTrack(f"Subgroup {subgroup} has priorities {known} and {priority}")
        _remember(self._priorities, subgroup, known if priority is None else priority)
        final = self._subgroup_finals.get(subgroup)
        if final is not None and header.object_id > final:
            raise MalformedTrack(f"{header.location} lies beyond its Subgroup's end, {final}")

    def _same_priority(self, a: int | None, b: int | None) -> bool:
        if a is None or b is None:
            explicit = b if a is None else a
            return explicit is None or self.default_priority in (None, explicit)
        return a == b

    def _end_group(self, group_id: int, end: int) -> None:
        """Neither ``end`` nor a larger Object ID exists, but for the status Object itself."""
        if self._largest.get(group_id, -1) >= end:
            raise MalformedTrack(
                f"Group {group_id} ends at {end}, but Object {self._largest[group_id]} exists"
            )
        known = self._group_ends.get(group_id, end)
        if known != end:
            raise MalformedTrack(f"Group {group_id} ends at {known} and at {end}")
        _remember(self._group_ends, group_id, end)
        _remember(self._group_finals, group_id, end)

    def _end_track(self, end: Location) -> None:
        if self._last is not None and self._last > end:
            raise MalformedTrack(f"the Track ends at {end}, but {self._last} exists")
        if self._end is not None and self._end != end:
            raise MalformedTrack(f"the Track ends at {self._end} and at {end}")
        self._end = end

    def finish_subgroup(
        self, group_id: int, subgroup_id: int, last_object_id: int, end_of_group: bool
    ) -> None:
        """A subgroup stream ended with FIN behind ``last_object_id``.

        Raises:
            MalformedTrack: another stream of the Subgroup ended elsewhere, or Objects behind it
                were received.
        """
        place = (group_id, subgroup_id)
        known = self._subgroup_finals.get(place)
        if known is not None and known != last_object_id:
            raise MalformedTrack(f"Subgroup {place} ended at {known} and at {last_object_id}")
        _remember(self._subgroup_finals, place, last_object_id)
        if end_of_group:
            if self._largest.get(group_id, -1) > last_object_id:
                raise MalformedTrack(
                    f"Group {group_id} ended at {last_object_id},"
                    f" but Object {self._largest[group_id]} exists"
                )
            _remember(self._group_finals, group_id, last_object_id)


def _remember(table: dict[_K, _V], key: _K, value: _V) -> None:
    table[key] = value
    if len(table) > MAX_SUBGROUPS_REMEMBERED:
        del table[next(iter(table))]

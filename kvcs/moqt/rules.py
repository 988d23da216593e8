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
        self._priorities: dict[tuple[int, int], int | None] = {}
        self._subgroup_finals: dict[tuple[int, int], int] = {}
        self._group_finals: dict[int, int] = {}
        self._largest: dict[int, int] = {}
        self._end: Location | None = None

    def check_object(self, header: ObjectHeader) -> None:
        """Check an Object against what came before, and remember it.

        Raises:
            MalformedTrack: it breaks a condition of §12.1.
        """
        group_id, object_id = header.group_id, header.object_id
        if self._end is not None and header.location > self._end:
            raise MalformedTrack(f"{header.location} lies beyond the end of the Track, {self._end}")
        final = self._group_finals.get(group_id)
        if final is not None and object_id > final:
            raise MalformedTrack(f"{header.location} lies beyond its Group's last Object, {final}")
        if header.subgroup_id is not None:
            self._check_subgroup(header, (group_id, header.subgroup_id))
        if header.status is ObjectStatus.NORMAL:
            largest = self._largest.get(group_id, -1)
            if object_id > largest:
                _remember(self._largest, group_id, object_id)
        elif header.status is ObjectStatus.END_OF_GROUP:
            self._end_group(group_id, object_id)
        else:
            self._end_group(group_id, object_id)
            if any(group > group_id for group in self._largest):
                raise MalformedTrack(f"End of Track at {header.location}, but later Groups exist")
            self._end = header.location

    def _check_subgroup(self, header: ObjectHeader, subgroup: tuple[int, int]) -> None:
        priority = header.publisher_priority
        known = self._priorities.get(subgroup, priority)
        if known != priority:
            raise MalformedTrack(f"Subgroup {subgroup} has priorities {known} and {priority}")
        _remember(self._priorities, subgroup, priority)
        final = self._subgroup_finals.get(subgroup)
        if final is not None and header.object_id > final:
            raise MalformedTrack(f"{header.location} lies beyond its Subgroup's end, {final}")

    def _end_group(self, group_id: int, final: int) -> None:
        if self._largest.get(group_id, -1) >= final:
            raise MalformedTrack(
                f"Group {group_id} ends at {final}, but Object {self._largest[group_id]} exists"
            )
        _remember(self._group_finals, group_id, final)

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

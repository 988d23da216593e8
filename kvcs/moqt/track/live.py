"""Subgroup streams on their way into a Track's store (MOQT §7, §11.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.moqt.errors import MalformedTrack
from kvcs.moqt.objects import ObjectHeader
from kvcs.moqt.streams import SubgroupHeader
from kvcs.moqt.track.bridge import hold, reset_subgroup
from kvcs.moqt.track.stored import (
    DuplicateObject,
    Group,
    StoredObject,
    Subgroup,
    arriving,
    second_copy,
)

if TYPE_CHECKING:
    from kvcs.moqt.track.store import Track


class LiveStream:
    """One subgroup stream that comes through a subscription, on its way into the store.

    Gives `begin` for each Object, and `finish` or `reset` once.
    """

    __slots__ = ("_current", "_group", "_header", "_last", "_opened", "_track")

    def __init__(self, track: Track, header: SubgroupHeader) -> None:
        self._track = track
        self._header = header
        self._opened: Subgroup | None = None
        self._group: Group | None = None
        self._last: StoredObject | None = None
        self._current: StoredObject | DuplicateObject | None = None

    def begin(self, header: ObjectHeader, now: float) -> StoredObject | DuplicateObject:
        """Begin an Object; write its payload to what is returned.

        Raises:
            MalformedTrack: a stored Object has other fields at this Location, or it lies beyond
                the end of its Group or Track.
            StoreFull: the budget has no room.
        """
        track = self._track
        location = header.location
        group = track.groups.get(header.group_id)
        stored = None if group is None else group.objects.get(header.object_id)
        if stored is not None:
            writer: StoredObject | DuplicateObject = second_copy(
                stored, header, track.default_priority
            )
        else:
            if group is not None and group.final is not None and location.object > group.final:
                raise MalformedTrack(f"{location} lies beyond the end of its Group, {group.final}")
            if track.final is not None and location > track.final:
                raise MalformedTrack(f"{location} lies beyond the end of its Track, {track.final}")
            writer = stored = arriving(header, now)
            track._insert_arriving(stored)
        subgroup = track._subgroup(header)
        if subgroup is not self._opened:
            self._join(subgroup)
        if stored.live:
            pass  # another stream has brought it
        elif location in track.delivered:
            stored.live = True  # subscriptions had it, before its Group was evicted
            subgroup.from_start = subgroup.from_start and bool(subgroup.objects)
        elif track.bridge is not None:
            track._learn_status(header)
            track.bridge.came_live(subgroup, stored, self._last)
        else:
            # New, or known from a FETCH only: subscriptions are owed it (§7).
            last = subgroup.objects[-1] if subgroup.objects else None
            stored.continues = last is None or (
                last is self._last or last.header.object_id + 1 == header.object_id
            )
            track._learn_status(header)
            track._append_live(subgroup, (stored,))
        self._last, self._current = stored, writer
        return writer

    def finish(self) -> None:
        """The stream ended with FIN: the Subgroup has its last Object."""
        if self._opened is not None:
            self._leave(self._opened)
            final = None
            if self._header.end_of_group and self._last is not None:
                final = self._last.header.object_id
            if self._track.bridge is not None:
                self._track.bridge.stream_ended(self._opened, final=final)
            else:
                self._track._finish(self._opened, final)

    def reset(self, code: int) -> None:
        """The stream was reset: a partial Object is dropped, the Subgroup is open-ended."""
        current, self._current = self._current, None
        if current is not None:
            self._track.abandon(current)
        subgroup = self._opened
        if subgroup is None:
            return
        self._leave(subgroup)
        if subgroup.finished or subgroup.streams:
            return  # it is whole, or another publisher still brings it
        if self._track.bridge is not None:
            self._track.bridge.stream_ended(subgroup, code=code)
        else:
            reset_subgroup(self._track, subgroup, code)

    def part(self) -> StoredObject | None:
        """Its source is gone, and the next one may go on: the Subgroup stays open.

        Returns:
            The Object of which a part has come, which `kvcs.moqt.track.bridge.hold` keeps.
        """
        current, self._current = self._current, None
        held = None if current is None else hold(self._track, current)
        if self._opened is not None:
            self._leave(self._opened)
        return held

    def _join(self, subgroup: Subgroup) -> None:
        if self._opened is not None:
            self._leave(self._opened)  # its Group was evicted under way
        self._opened = subgroup
        self._group = self._track.groups[subgroup.group_id]
        self._group.arriving += 1
        subgroup.streams += 1
        if not subgroup.objects:
            subgroup.from_start = self._header.first_object and self._last is None
        # A stream that goes on downstream may yet get Objects with Properties.
        subgroup.has_properties = True
        subgroup.end_of_group = subgroup.end_of_group or self._header.end_of_group
        subgroup.reset_code = None

    def _leave(self, subgroup: Subgroup) -> None:
        subgroup.streams -= 1
        if self._group is not None:
            self._group.arriving -= 1
            self._track.drop_if_empty(self._group)

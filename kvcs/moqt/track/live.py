"""Subgroup streams on their way into a Track's store (MOQT §7, §11.3)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvcs.moqt.errors import MalformedTrack
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectHeader
from kvcs.moqt.streams import SubgroupHeader
from kvcs.moqt.track.bridge import hold, reset_subgroup
from kvcs.moqt.track.stored import (
    FIRST_PART_OCTETS,
    OBJECT_BOOKKEEPING_OCTETS,
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

    def begin_run(
        self, like: ObjectHeader, first: Location, count: int, whole: Sequence[bytes], now: float
    ) -> StoredObject | None:
        """Begin Objects that are alike and follow each other on the stream, in one step.

        That is done where none of them needs a second look: they lie behind all that is stored of
        their Group, whose end nobody has told, and there is room for them.

        Args:
            like: header of each, but for its place; NORMAL, with a payload.
            first: Location of the first one.
            count: how many there are, 1 at least.
            whole: payloads, from the first one on; of the last one it may be missing.
            now: the caller's clock, seconds.

        Returns:
            The last of them, to write to where its payload is missing. None where nothing was done:
            each of them has to `begin`.
        """
        track, subgroup, group = self._track, self._opened, self._group
        last = Location(first.group, first.object + count - 1)
        if (
            subgroup is None
            or group is None
            or track.groups.get(first.group) is not group
            or subgroup.subgroup_id != like.subgroup_id
            or not subgroup.objects
            or group.object_ids[-1] >= first.object
            or group.final is not None
            or track.final is not None
            or track.bridge is not None
            or (
                len(track.delivered) and track.delivered.first_outside(first, last) != (first, last)
            )
        ):
            return None
        before, length = subgroup.objects[-1], like.payload_length
        octets = length + len(like.properties) + OBJECT_BOOKKEEPING_OCTETS
        if before is not self._last and before.header.object_id + 1 != first.object:
            return None
        if not track.budget.has_room(count * octets):
            return None
        group_id, subgroup_id, priority = like.group_id, like.subgroup_id, like.publisher_priority
        status, properties = like.status, like.properties
        run: list[StoredObject] = []
        for object_id in range(first.object, last.object + 1):
            header = ObjectHeader(
                group_id, object_id, subgroup_id, priority, status, properties, length
            )
            if len(run) < len(whole):
                parts = (memoryview(whole[len(run)]),)
                stored = StoredObject(header, parts, length, now, octets)
            else:
                stored = arriving(header, now)
                if length > FIRST_PART_OCTETS:
                    stored.grow = partial(track._grow, group, stored)
            stored.continues = True
            run.append(stored)
        track._insert(run)
        track._append_live(subgroup, run)
        self._last = self._current = run[-1]
        return run[-1]

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

"""What makes a Track malformed, as its receiver sees it (MOQT §12.1).

Here Objects of one Track are held against each other: priorities, ends of Subgroups, Groups and
the Track, and gaps that were announced. Payloads are compared where they are stored; what one
Object says alone is in `kvcs.moqt.properties`.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from kvcs.moqt.data import ObjectHeader, ObjectStatus
from kvcs.moqt.errors import MalformedTrack
from kvcs.moqt.intervals import LocationSet, Runs
from kvcs.moqt.limits import Budget
from kvcs.moqt.names import MAX_VI64, Location

MAX_RULE_ENTRIES = 262_144
"""Groups, Subgroups and runs of Objects of one Track that are remembered; the Groups that came
first are forgotten first, and of a Group the runs that lie lowest."""

MAX_GROUP_GAPS = 1024
"""Runs of Groups of one Track that are remembered not to exist; the lower half is forgotten."""

_NORMAL = ObjectStatus.NORMAL


class _Group:
    """What is known of one Group."""

    __slots__ = ("end", "final", "gap", "gaps", "runs", "subgroups")

    def __init__(self) -> None:
        self.runs = Runs()
        """IDs of the NORMAL Objects received."""
        self.end: int | None = None
        """Where a status Object says that nothing is any more."""
        self.final: int | None = None
        """The largest Object ID that there can be, a status Object's included."""
        self.gap: int | None = None
        """PRIOR_GROUP_ID_GAP that an Object of the Group has told."""
        self.gaps = Runs()
        """Object IDs that PRIOR_OBJECT_ID_GAP has told not to exist."""
        self.subgroups: dict[int, tuple[int | None, int | None]] = {}
        """Publisher Priority and last Object ID of each Subgroup; None where not known."""

    @property
    def entries(self) -> int:
        """What the Group weighs."""
        return 1 + len(self.runs) + len(self.gaps) + len(self.subgroups)


class TrackRules:
    """Holds the Objects of one Track, from one publisher, against each other.

    Args:
        budget: entries that all Tracks of a server may have; None for one of its own.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self.default_priority: int | None = None
        """Publisher Priority of streams that name none; None until the Track Properties are here,
        and then such a stream agrees with every priority."""
        self._budget = Budget(MAX_RULE_ENTRIES) if budget is None else budget
        self._entries = 0
        self._groups: dict[int, _Group] = {}
        self._ids: list[int] = []
        """Group IDs in order."""
        self._group_gaps = LocationSet()
        """Groups that do not exist, each run from 0 of the first to the last ID of the last."""
        self._last_group = self._last_object = -1
        """The largest Location of a NORMAL Object, as numbers: every Object is compared."""
        self._end: Location | None = None
        self._final: Location | None = None
        self.forgotten = 0
        """Times something was forgotten for want of room."""

    @property
    def entries(self) -> int:
        """What this Track weighs in the budget."""
        return self._entries

    def release(self) -> None:
        """Nobody needs the rules any more: give the budget back."""
        self._budget.used -= self._entries
        self._entries = 0
        self._groups.clear()
        self._ids.clear()

    def check_object(
        self,
        header: ObjectHeader,
        group_gap: int | None = None,
        object_gap: int | None = None,
    ) -> None:
        """Check an Object against what came before, and remember it.

        Args:
            header: the Object's.
            group_gap: its PRIOR_GROUP_ID_GAP, no larger than its Group ID.
            object_gap: its PRIOR_OBJECT_ID_GAP, no larger than its Object ID.

        Raises:
            MalformedTrack: it breaks a condition of §12.1.
        """
        group_id, object_id = header.group_id, header.object_id
        if self._end is not None and header.location > self._end:
            raise MalformedTrack(f"{header.location} lies beyond the end of the Track, {self._end}")
        group = self._groups.get(group_id)
        if group is None:
            group = self._new_group(group_id)
        final = group.final
        if final is not None and object_id > final:
            raise MalformedTrack(f"{header.location} lies beyond its Group's last Object, {final}")
        subgroup_id = header.subgroup_id
        if subgroup_id is not None:
            # Nearly always the Subgroup is known, with this priority, and goes on.
            if group.subgroups.get(subgroup_id) != (header.publisher_priority, None):
                self._check_subgroup(header, group)
        if group_gap is not None and group_gap != group.gap:
            self._take_group_gap(group_id, group, group_gap)
        if object_gap:
            self._take_object_gap(header.location, group, object_gap)
        if header.status is _NORMAL:
            self._take_object(header, group)
        else:
            self._end_group(group_id, group, object_id)
            if header.status is ObjectStatus.END_OF_TRACK:
                self._end_track(header.location)

    def take_run(self, header: ObjectHeader, first: int, last: int) -> bool:
        """Check Objects that are like another of their Subgroup and lie right behind all others.

        Nearly every Object is one, of a Group and a Track whose ends nobody has told. For them this
        does what `check_object` does, with fewer steps. No gap holds them: a gap lies before an
        Object that was received.

        Args:
            header: of the other one, which has passed: NORMAL, and with no gap before it.
            first: Object ID of the first of them.
            last: Object ID of the last of them.

        Returns:
            Whether it was so; else nothing is remembered, and `check_object` has to say.
        """
        group_id, subgroup_id = header.group_id, header.subgroup_id
        group = self._groups.get(group_id)
        if (
            group is None
            or group.final is not None
            or self._end is not None
            or self._final is not None
            or (
                subgroup_id is not None
                and group.subgroups.get(subgroup_id) != (header.publisher_priority, None)
            )
            or not group.runs.extend(first, last)
        ):
            return False
        if group_id > self._last_group:
            self._last_group, self._last_object = group_id, last
        elif group_id == self._last_group and last > self._last_object:
            self._last_object = last
        return True

    def finish_subgroup(
        self, group_id: int, subgroup_id: int, last_object_id: int, end_of_group: bool
    ) -> None:
        """A subgroup stream ended with FIN behind ``last_object_id``.

        Raises:
            MalformedTrack: another stream of the Subgroup ended elsewhere, or Objects behind it
                were received.
        """
        group = self._groups.get(group_id)
        if group is None:
            return  # forgotten for want of room
        priority, known = group.subgroups.get(subgroup_id, (None, None))
        if known is not None and known != last_object_id:
            place = (group_id, subgroup_id)
            raise MalformedTrack(f"Subgroup {place} ended at {known} and at {last_object_id}")
        if subgroup_id not in group.subgroups:
            self._grow(group_id, 1)
        group.subgroups[subgroup_id] = (priority, last_object_id)
        if end_of_group:
            self.finish_group(group_id, last_object_id)

    def finish_group(self, group_id: int, last_object_id: int) -> None:
        """``last_object_id`` is the last one of its Group: the END_OF_GROUP bit said so.

        Raises:
            MalformedTrack: Objects behind it were received.
        """
        group = self._groups.get(group_id)
        if group is None:
            return
        if group.runs.last > last_object_id:
            raise MalformedTrack(
                f"Group {group_id} ended at {last_object_id}, but Object {group.runs.last} exists"
            )
        group.final = last_object_id

    def finish_track(self, final: Location) -> None:
        """FETCH_OK said that no NORMAL Object lies beyond ``final`` (§9.12).

        Raises:
            MalformedTrack: one was received.
        """
        if self._last > final:
            raise MalformedTrack(f"the Track ends at {final}, but {self._last} exists")
        if self._final is None or final < self._final:
            self._final = final

    # Inner workings

    def _new_group(self, group_id: int) -> _Group:
        if Location(group_id, 0) in self._group_gaps:
            raise MalformedTrack(f"Group {group_id} lies in a gap that was announced")
        group = self._groups[group_id] = _Group()
        insort(self._ids, group_id)
        self._grow(group_id, 1)
        return group

    def _take_object(self, header: ObjectHeader, group: _Group) -> None:
        group_id, object_id = header.group_id, header.object_id
        if object_id == group.end:
            raise MalformedTrack(f"{header.location} lies where its Group has ended")
        if self._final is not None and header.location > self._final:
            raise MalformedTrack(
                f"{header.location} lies beyond the end of the Track, {self._final}"
            )
        if len(group.gaps) and object_id in group.gaps:
            raise MalformedTrack(f"{header.location} lies in a gap that was announced")
        more = group.runs.append(object_id)
        if more:
            self._grow(group_id, more)
        if group_id > self._last_group:
            self._last_group, self._last_object = group_id, object_id
        elif group_id == self._last_group and object_id > self._last_object:
            self._last_object = object_id

    @property
    def _last(self) -> Location:
        """The largest Location of a NORMAL Object; below all while there is none."""
        return Location(self._last_group, self._last_object)

    def _check_subgroup(self, header: ObjectHeader, group: _Group) -> None:
        subgroup_id, priority = header.subgroup_id, header.publisher_priority
        assert subgroup_id is not None
        found = group.subgroups.get(subgroup_id)
        if found is None:
            group.subgroups[subgroup_id] = (priority, None)
            self._grow(header.group_id, 1)
            return
        known, final = found
        if final is not None and header.object_id > final:
            raise MalformedTrack(f"{header.location} lies beyond its Subgroup's end, {final}")
        if known == priority:
            return
        if not self._same_priority(known, priority):
            raise MalformedTrack(
                f"Subgroup {subgroup_id} of Group {header.group_id} has priorities {known} and"
                f" {priority}"
            )
        if known is None:
            group.subgroups[subgroup_id] = (priority, final)

    def _same_priority(self, a: int | None, b: int | None) -> bool:
        if a is None or b is None:
            explicit = b if a is None else a
            return explicit is None or self.default_priority in (None, explicit)
        return a == b

    def _take_group_gap(self, group_id: int, group: _Group, gap: int) -> None:
        """``gap`` Groups right before this one do not exist."""
        if group.gap is not None:
            raise MalformedTrack(f"Group {group_id} has the gaps {group.gap} and {gap} before it")
        group.gap = gap
        if not gap:
            return
        first = group_id - gap
        index = bisect_left(self._ids, first)
        if self._ids[index] < group_id:
            raise MalformedTrack(
                f"Group {self._ids[index]} was received, and lies in the gap before Group"
                f" {group_id}"
            )
        gaps = self._group_gaps
        gaps.add(Location(first, 0), Location(group_id - 1, MAX_VI64))
        if len(gaps) > MAX_GROUP_GAPS:
            runs = gaps.ranges()  # many at a time: each look at them costs as much as there are
            gaps.remove(runs[0][0], runs[len(runs) // 2][1])

    def _take_object_gap(self, location: Location, group: _Group, gap: int) -> None:
        """``gap`` Objects right before this one do not exist."""
        low, high = location.object - gap, location.object - 1
        received = group.runs.first_in(low, high)
        if received is not None:
            raise MalformedTrack(
                f"Object {received} was received, and lies in the gap before {location}"
            )
        before = len(group.gaps)
        group.gaps.add(low, high)
        self._grow(location.group, len(group.gaps) - before)

    def _end_group(self, group_id: int, group: _Group, end: int) -> None:
        """Neither ``end`` nor a larger Object ID exists, but for the status Object itself."""
        if group.runs.last >= end:
            raise MalformedTrack(
                f"Group {group_id} ends at {end}, but Object {group.runs.last} exists"
            )
        if group.end is not None and group.end != end:
            raise MalformedTrack(f"Group {group_id} ends at {group.end} and at {end}")
        group.end = group.final = end

    def _end_track(self, end: Location) -> None:
        if self._last > end:
            raise MalformedTrack(f"the Track ends at {end}, but {self._last} exists")
        if self._end is not None and self._end != end:
            raise MalformedTrack(f"the Track ends at {self._end} and at {end}")
        self._end = end

    def _grow(self, group_id: int, entries: int) -> None:
        """Count what was added to a Group, and make room."""
        self._entries += entries
        self._budget.used += entries
        while self._entries > MAX_RULE_ENTRIES or (self._budget.overdrawn and self._entries > 1):
            if not self._forget_some(group_id):
                break

    def _forget_some(self, keep: int) -> bool:
        """Forget the Group that came first, or half the runs of the one in use."""
        oldest = next(iter(self._groups))
        freed = 0
        if oldest != keep:
            freed = self._groups.pop(oldest).entries
            del self._ids[bisect_left(self._ids, oldest)]
        elif len(self._groups) > 1:
            self._groups[oldest] = self._groups.pop(oldest)  # it is in use: the next one goes
            return True
        else:
            freed = self._shrink(self._groups[oldest])
        freed = min(freed, self._entries)
        self._entries -= freed
        self._budget.used -= freed
        self.forgotten += 1
        return freed > 0

    def _shrink(self, group: _Group) -> int:
        """Forget the lower half of what one Group holds; returns how many entries that were."""
        before = group.entries
        group.runs.forget_half()
        group.gaps.forget_half()
        for subgroup_id in list(group.subgroups)[: len(group.subgroups) // 2]:
            del group.subgroups[subgroup_id]
        return before - group.entries

"""Subscriptions of a Track that go on while its source changes (MOQT §7).

A relay that loses its upstream may have another one. What subscribers follow stays as it is then:
their streams are not reset, and an Object of which a part has come is continued. What was published
meanwhile comes as a range, by fill or FETCH, and is delivered as it would have been live; what the
new source sends live waits for it, so that Objects of a Subgroup keep their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.moqt.intervals import LAST, MAX_KNOWN_RANGES, following, preceding
from kvcs.moqt.names import MAX_VI64, Location
from kvcs.moqt.track.stored import DuplicateObject, Group, StoredObject, Subgroup

if TYPE_CHECKING:
    from kvcs.moqt.track.store import Track


class Bridge:
    """Carries the subscriptions of one Track from one source to the next.

    Open from `resume` to `settle`; what it holds stays in the store until `release`.

    Args:
        track: the Track.
    """

    def __init__(self, track: Track) -> None:
        self._track = track
        self._groups: dict[Group, None] = {}
        """Groups that must not leave: Subgroups of them go on."""
        self._partial: dict[StoredObject, None] = {}
        """Objects of which a part is there and whose stream is gone."""
        self._waiting: list[tuple[Subgroup, StoredObject, StoredObject | None]] = []
        """What came live, and what preceded it on its stream."""
        self._ends: dict[Subgroup, tuple[int | None, int | None]] = {}
        """Subgroups whose streams have ended: the last Object ID of the Group after FIN, if that is
        known; or the code of a reset. However often it is reset, and FIN of one of them counts."""

    # Beginning

    def resume(self) -> None:
        """A source is gone, or soon will be: Subgroups that are open wait for the next one."""
        track = self._track
        track.bridge = self
        for group in track.groups.values():
            if any(_is_open(subgroup) for subgroup in group.subgroups.values()):
                self._hold(group)

    def keep(self, stored: StoredObject) -> None:
        """Keep what is there of an Object, which `hold` gave, for who brings its rest."""
        if stored in self._partial:
            let_go(self._track, stored)  # once is enough
        else:
            self._partial[stored] = None

    def first_missing(self, start: Location) -> Location | None:
        """The first Location from ``start`` on that subscribers may be owed.

        Args:
            start: the first one that was to come live.
        """
        track = self._track
        at: Location | None = start
        missing: Location | None = None
        while at is not None and (run := track.first_unknown(at, LAST)) is not None:
            behind = track.delivered.first_outside(run[0], run[1])
            if behind is not None:
                missing = behind[0]
                break
            at = following(run[1])
        while (
            stored := track.next_stored(start, LAST if missing is None else missing)
        ) is not None:
            if not stored.live or not stored.complete:
                return stored.header.location
            after = following(stored.header.location)
            if after is None:
                break
            start = after
        return missing

    # What comes

    def take(self, stored: StoredObject) -> None:
        """Deliver an Object that came as part of the range, unless that was done before."""
        track, header = self._track, stored.header
        if stored.live or header.location in track.delivered:
            return
        group = track.groups[header.group_id]
        subgroup = track._subgroup(header)
        self._hold(group)
        if not subgroup.objects:
            subgroup.from_start = self._is_first(group, stored)
            subgroup.has_properties = True
        subgroup.reset_code = None
        self._deliver(subgroup, stored, None)

    def came_live(
        self, subgroup: Subgroup, stored: StoredObject, before: StoredObject | None
    ) -> None:
        """An Object came on a subgroup stream: it is delivered behind the range.

        Args:
            subgroup: its Subgroup.
            stored: the Object.
            before: what preceded it on its stream.
        """
        self._hold(self._track.groups[subgroup.group_id])
        self._track.note_largest(stored.header.location)
        self._waiting.append((subgroup, stored, before))

    def stream_ended(
        self, subgroup: Subgroup, *, final: int | None = None, code: int | None = None
    ) -> None:
        """The last stream of a Subgroup has ended: with FIN, or with a reset ``code``."""
        known, reset = self._ends.get(subgroup, (None, code))
        if reset is None and code is not None:
            return  # it is whole
        self._ends[subgroup] = known if final is None else final, code

    # Ends

    def settle(self) -> None:
        """The range is whole: deliver what came live, and go on as ever."""
        track = self._track
        track.bridge = None
        waiting, self._waiting = self._waiting, []
        for subgroup, stored, before in sorted(waiting, key=_location):
            if not stored.live and track.get(stored.header.location) is stored:
                self._deliver(subgroup, stored, before)
        ends, self._ends = self._ends, {}
        for subgroup, (final, code) in ends.items():
            if subgroup.streams:
                continue  # another stream brings it now
            if code is None:
                track._finish(subgroup, final)
            else:
                reset_subgroup(track, subgroup, code)
        self._finish_known()

    def release(self) -> None:
        """Hold nothing any more; what is missing of Objects and Subgroups does not come."""
        track = self._track
        if track.bridge is self:
            track.bridge = None
        self._waiting.clear()
        self._ends.clear()
        partial, self._partial = self._partial, {}
        for stored in partial:
            let_go(track, stored)
        groups, self._groups = self._groups, {}
        for group in groups:
            group.arriving -= 1
            track.drop_if_empty(group)

    # Inner workings

    def _hold(self, group: Group) -> None:
        if group not in self._groups:
            self._groups[group] = None
            group.arriving += 1

    def _deliver(
        self, subgroup: Subgroup, stored: StoredObject, before: StoredObject | None
    ) -> None:
        last = subgroup.objects[-1] if subgroup.objects else None
        stored.continues = last is None or last is before or self._adjoin(last, stored)
        self._track._append_live(subgroup, (stored,))

    def _adjoin(self, last: StoredObject, stored: StoredObject) -> bool:
        """Whether nothing lies between two Objects of a Subgroup: the next-object rule (§7)."""
        first, end = last.header.object_id + 1, stored.header.object_id - 1
        group = self._track.groups[stored.header.group_id]
        if first > end:
            return last.header.object_id <= stored.header.object_id
        between = (Location(group.group_id, first), Location(group.group_id, end))
        if self._track.first_unknown(*between) is not None:
            return False
        return not _has_between(group, stored.header.subgroup_id, first, end)

    def _is_first(self, group: Group, stored: StoredObject) -> bool:
        """Whether nothing of its Subgroup can lie before an Object."""
        location = stored.header.location
        start, before = Location(location.group, 0), preceding(location)
        if location.object and before is not None:
            if self._track.first_unknown(start, before) is not None:
                return False
        return not _has_between(group, stored.header.subgroup_id, 0, location.object - 1)

    def _finish_known(self) -> None:
        """End Subgroups of which no stream is open and nothing more can come: no FIN is invented
        (§7), every Object of them is here."""
        track = self._track
        for group in self._groups:
            for subgroup in group.subgroups.values():
                if not _is_open(subgroup) or subgroup.streams or not subgroup.objects:
                    continue
                last = subgroup.objects[-1]
                behind = following(last.header.location)
                end = Location(group.group_id, MAX_VI64)
                whole = all(each.complete for each in subgroup.objects)
                if whole and (behind is None or track.first_unknown(behind, end) is None):
                    if not _has_between(
                        group, subgroup.subgroup_id, last.header.object_id + 1, MAX_VI64
                    ):
                        track._finish(subgroup, None)


def hold(track: Track, writer: StoredObject | DuplicateObject) -> StoredObject | None:
    """A stream ended inside an Object, and another source may bring the rest: keep what is there.

    Returns:
        The Object, which stays until `let_go`; None where nothing of it lacks.
    """
    stored = writer.stored if isinstance(writer, DuplicateObject) else writer
    stored.followers += 1
    if isinstance(writer, DuplicateObject):
        writer.fail()
    else:
        stored.orphaned = True
    if stored.complete or stored.failed:
        stored.followers -= 1
        return None
    return stored


def let_go(track: Track, stored: StoredObject) -> None:
    """Undo `hold`: the Object is dropped where nobody brings it any more."""
    stored.followers -= 1
    track.drop_orphan(stored)


def reset_subgroup(track: Track, subgroup: Subgroup, code: int) -> None:
    """A Subgroup's last stream was reset: it is open-ended."""
    subgroup.reset_code = code
    for listener in list(track.listeners):
        listener.subgroup_ended(subgroup)


def note_delivered(track: Track, group: Group) -> None:
    """Remember what subscriptions have got of a Group that leaves: they get it once."""
    if track.authoritative or not track.listeners or len(track.delivered) >= MAX_KNOWN_RANGES:
        return
    live = [number for number in group.object_ids if group.objects[number].live]
    for number in live:
        track.delivered.add(*[Location(group.group_id, number)] * 2)
    if live and group.final is not None and len(live) == len(group.object_ids):
        behind = Location(group.group_id, live[-1])
        track.delivered.add(behind, Location(group.group_id, MAX_VI64))


def finish_open(track: Track) -> None:
    """A Track has ended, and all of it came: Subgroups that no stream brings are whole."""
    for group in list(track.groups.values()):
        for subgroup in group.subgroups.values():
            if _is_open(subgroup) and not subgroup.streams and subgroup.objects:
                track._finish(subgroup, None)


def _is_open(subgroup: Subgroup) -> bool:
    """Whether more may come of a Subgroup; those of datagrams have no end."""
    return subgroup.subgroup_id >= 0 and not subgroup.finished and subgroup.reset_code is None


def _has_between(group: Group, subgroup_id: int | None, first: int, last: int) -> bool:
    """Whether a Group has an Object of a Subgroup among some Object IDs."""
    return any(
        first <= object_id <= last and stored.header.subgroup_id == subgroup_id
        for object_id, stored in group.objects.items()
    )


def _location(item: tuple[Subgroup, StoredObject, StoredObject | None]) -> Location:
    return item[1].header.location

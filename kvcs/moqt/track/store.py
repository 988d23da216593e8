"""A Track's Objects: the origin publishes from it and a relay caches in it (MOQT §2, §7).

An Object enters in one of three ways: whole, by `publish`; piece by piece from a subscription, by a
`LiveStream`; or piece by piece from a FETCH or fill, by `begin_fetched`. Readers (subscriptions and
fetches of `kvcs.moqt.sending.delivery`) hold references into the store, so payload octets are
stored once however many read them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import partial

from kvcs.errors import StoreFull
from kvcs.moqt.errors import PublishDoneCode, StreamCode
from kvcs.moqt.intervals import FIRST, LAST, MAX_KNOWN_RANGES, LocationSet
from kvcs.moqt.names import MAX_VI64, FullTrackName, Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.properties import KeyValues, Property, find_property
from kvcs.moqt.streams import SubgroupHeader
from kvcs.moqt.track.bridge import Bridge, note_delivered, reset_subgroup
from kvcs.moqt.track.followed import Followed
from kvcs.moqt.track.live import LiveStream
from kvcs.moqt.track.publishable import check_publishable, check_whole
from kvcs.moqt.track.stored import (
    DEFAULT_PRIORITY,
    FIRST_PART_OCTETS,
    UNLIMITED,
    DuplicateObject,
    Group,
    StoreBudget,
    StoredObject,
    Subgroup,
    arriving,
    second_copy,
)


class Track(Followed):
    """All that is known of one Track.

    Args:
        name: its Full Track Name.
        authoritative: True at the Original Publisher, where what is not stored does not exist;
            False in a relay, where it is unknown unless something said otherwise.
        properties: Track Properties, sent with SUBSCRIBE_OK and FETCH_OK.
        budget: shared octets; None for no limit of its own.
    """

    def __init__(
        self,
        name: FullTrackName,
        *,
        authoritative: bool,
        properties: KeyValues | None = None,
        budget: StoreBudget | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.authoritative = authoritative
        self.properties = KeyValues() if properties is None else properties
        self.budget = StoreBudget(UNLIMITED) if budget is None else budget
        self.largest: Location | None = None
        """Largest Object, statuses included (§3.1.4)."""
        self.final: Location | None = None
        """Location of the End of Track, once known: nothing exists there or beyond but it."""
        self.ended: int | None = None
        """PUBLISH_DONE status once no more Objects come."""
        self.ended_reason = ""
        self.abandoned = False
        """Whether it ended before its time: subscribers are told at once, not after the rest."""
        self.octets = 0
        self.objects_sent = 0
        """Objects that were handed over whole, over all subscriptions and fetches."""
        self.octets_sent = 0
        """Their payload octets."""
        self.known = LocationSet()
        """Where what is not stored does not exist: at first everywhere, if ``authoritative``."""
        if authoritative:
            self.known.add(FIRST, LAST)
        self.groups: dict[int, Group] = {}
        self.delivered = LocationSet()  # what subscriptions got, and was evicted
        self.bridge: Bridge | None = None  # while its source changes
        self._group_ids: list[int] = []

    # What is there

    @property
    def properties(self) -> KeyValues:
        """Track Properties; a later set takes the place of the one before (§10)."""
        return self._properties

    @properties.setter
    def properties(self, properties: KeyValues) -> None:
        self._properties = properties
        value = find_property(properties, Property.DEFAULT_PUBLISHER_PRIORITY)
        self.default_priority = (
            value if isinstance(value, int) and value <= 255 else DEFAULT_PRIORITY
        )
        """DEFAULT_PUBLISHER_PRIORITY of the Track, else 128 (§10)."""
        value = find_property(properties, Property.MAX_CACHE_DURATION)
        self.cache_seconds = value / 1000 if isinstance(value, int) else None
        """MAX_CACHE_DURATION in seconds; None where the Track names none."""

    def get(self, location: Location) -> StoredObject | None:
        """The Object at ``location``, if it is stored."""
        group = self.groups.get(location.group)
        return None if group is None else group.objects.get(location.object)

    def group_ids(self) -> Sequence[int]:
        """Group IDs with stored Objects, ascending."""
        return self._group_ids

    def next_stored(self, start: Location, end: Location) -> StoredObject | None:
        """The stored Object with the smallest Location in ``start``..``end``, inclusive."""
        index = bisect_left(self._group_ids, start.group)
        while index < len(self._group_ids):
            group = self.groups[self._group_ids[index]]
            if group.group_id > end.group:
                return None
            low = start.object if group.group_id == start.group else 0
            position = bisect_left(group.object_ids, low)
            if position < len(group.object_ids):
                stored = group.objects[group.object_ids[position]]
                return stored if stored.header.location <= end else None
            index += 1
        return None

    def first_unknown(self, start: Location, end: Location) -> tuple[Location, Location] | None:
        """The first run in ``start``..``end`` whose status is unknown; None where there is none."""
        return self.known.first_outside(start, end)

    def expired(self, stored: StoredObject, now: float) -> bool:
        """Whether a cache must not start to send the Object any more (§10, MAX_CACHE_DURATION)."""
        seconds = self.cache_seconds
        return seconds is not None and not self.authoritative and now > stored.born + seconds

    def touch(self, group_id: int) -> None:
        """Note that a Group was used, for least-recently-used eviction."""
        group = self.groups.get(group_id)
        if group is not None:
            group.used = self.budget.tick()

    # What comes in

    def note_largest(self, location: Location) -> None:
        """Take over a LARGEST_OBJECT that upstream named (§7, Largest Object rule)."""
        if self.largest is None or location > self.largest:
            self.largest = location

    def publish(
        self,
        header: ObjectHeader,
        parts: tuple[memoryview, ...],
        now: float,
        *,
        end_of_group: bool = False,
        octets: int | None = None,
    ) -> None:
        """Publish one whole Object as the Original Publisher.

        The Object joins its Subgroup, which `finish_subgroup` ends.

        Args:
            header: its fields; ``subgroup_id`` is an integer.
            parts: views of the payload, together ``header.payload_length`` octets.
            now: the caller's clock, seconds.
            end_of_group: whether the Subgroup will hold the largest Object of the Group.
            octets: what it counts in the budget; its payload and bookkeeping where None. 0 for
                what the caller has reserved already.

        Raises:
            UsageError: the Location was used, or lies behind an end or out of order; an Object
                never changes (MOQT §2.1, KVCS "Publisher Behavior"). Or the payload is not as long
                as the header says, or no number of it can be sent.
            StoreFull: the budget has no room.
        """
        check_whole(header, parts)
        self.publish_run(((header, parts),), now, end_of_group=end_of_group, octets=octets)

    def publish_run(
        self,
        objects: Sequence[tuple[ObjectHeader, tuple[memoryview, ...]]],
        now: float,
        *,
        end_of_group: bool = False,
        octets: int | None = None,
    ) -> None:
        """Publish whole Objects of one Subgroup whose IDs follow each other; as `publish`.

        All of them are published, or none.

        Args:
            objects: header and parts of each; but for one alone, they are NORMAL.
            now: as for `publish`.
            end_of_group: as for `publish`.
            octets: of each; as for `publish`.

        Raises:
            UsageError: as for `publish`, or they do not belong together.
            StoreFull: the budget has no room.
        """
        check_publishable(self, [header for header, _ in objects])
        run: list[StoredObject] = []
        for header, parts in objects:
            stored = StoredObject(header, parts, header.payload_length, now, octets)
            stored.continues = stored.live = True
            run.append(stored)
        self._insert(run)
        header = run[-1].header
        subgroup = self._subgroup(header)
        if not subgroup.objects:
            subgroup.from_start = True
            subgroup.has_properties = bool(header.properties)
        subgroup.end_of_group = subgroup.end_of_group or end_of_group
        self._learn_status(header)
        self._append_live(subgroup, run)

    def finish_subgroup(self, group_id: int, subgroup_id: int) -> None:
        """Say that a Subgroup has its last Object: its streams end with FIN.

        Nothing happens where its Group was evicted.
        """
        group = self.groups.get(group_id)
        subgroup = None if group is None else group.subgroups.get(subgroup_id)
        if subgroup is not None:
            last = subgroup.objects[-1].header.object_id
            self._finish(subgroup, last if subgroup.end_of_group else None)

    def open_stream(self, header: SubgroupHeader) -> LiveStream:
        """Begin to take over one subgroup stream that came through a subscription."""
        return LiveStream(self, header)

    def begin_fetched(self, header: ObjectHeader, now: float) -> StoredObject | DuplicateObject:
        """Begin to take over an Object that a FETCH or fill brought; it is not delivered live.

        Raises:
            MalformedTrack: a stored Object has other fields at this Location.
            StoreFull: the budget has no room.
        """
        stored = self.get(header.location)
        if stored is not None:
            return second_copy(stored, header, self.default_priority)
        fresh = arriving(header, now)
        self._insert_arriving(fresh)
        return fresh

    def take_datagram(self, header: ObjectHeader, payload: bytes, now: float) -> None:
        """Take over an Object that came as a datagram through a subscription (§11.2).

        Raises:
            MalformedTrack: a stored Object has other fields or another payload at this Location.
            StoreFull: the budget has no room.
        """
        have = self.get(header.location)
        if have is not None:
            second_copy(have, header, self.default_priority).write(memoryview(payload))
            return
        parts = (memoryview(payload),) if payload else ()
        stored = StoredObject(header, parts, len(payload), now)
        self._insert((stored,))
        subgroup = self._subgroup(header)
        self._learn_status(header)
        self._append_live(subgroup, (stored,))

    def abandon(self, writer: StoredObject | DuplicateObject) -> None:
        """A stream ended inside an Object: drop it, unless another stream brings it too."""
        if isinstance(writer, DuplicateObject):
            stored = writer.stored
            writer.fail()
        else:
            stored = writer
            stored.orphaned = True
        self.drop_orphan(stored)

    def drop_orphan(self, stored: StoredObject) -> None:
        """Drop an Object that no stream brings any more, unless it is whole."""
        if stored.orphaned and not stored.followers and not stored.complete:
            self.discard(stored)

    def discard(self, stored: StoredObject) -> None:
        """Drop an Object that will not be completed; its status is unknown again."""
        group = self._take_out(stored)
        if group is not None:
            group.octets -= stored.octets
            self._release(stored.octets)
            self.drop_if_empty(group)
        stored.fail()  # also where it has left the store: somebody may wait for its rest

    def forget(self, stored: StoredObject) -> None:
        """Take an Object that expired out; its status is unknown, whoever sends it goes on.

        Its octets stay counted until its Group leaves, since the Subgroup still refers to it.
        """
        group = self._take_out(stored)
        if group is not None:
            self.drop_if_empty(group)

    def drop_if_empty(self, group: Group) -> None:
        """Drop a Group without Objects that no stream writes to any more."""
        if not group.objects and not group.arriving and self.groups.get(group.group_id) is group:
            del self.groups[group.group_id]
            self._group_ids.remove(group.group_id)
            self._release(group.octets)

    def learn(self, start: Location, end: Location) -> None:
        """Record that in ``start``..``end`` nothing exists but what is stored."""
        if len(self.known) < MAX_KNOWN_RANGES:
            self.known.add(start, end)
        self.wake()

    def end_group(self, group_id: int, final: int) -> None:
        """Record the largest Object ID of a Group that can exist (END_OF_GROUP with FIN)."""
        group = self.groups.get(group_id)
        if group is not None:
            group.final = final
        self.learn(Location(group_id, final), Location(group_id, MAX_VI64))

    def end(
        self,
        status: int = PublishDoneCode.TRACK_ENDED,
        reason: str = "",
        *,
        abandoned: bool = False,
    ) -> None:
        """Say that no more Objects come; subscriptions end with PUBLISH_DONE ``status``.

        Args:
            status: of PUBLISH_DONE.
            reason: of PUBLISH_DONE.
            abandoned: what subscriptions are still owed is of no use: their streams are reset and
                PUBLISH_DONE goes out now. Otherwise they get everything first.
        """
        if self.ended is not None:
            return
        self.ended, self.ended_reason, self.abandoned = status, reason, abandoned
        for group in list(self.groups.values()):
            for subgroup in group.subgroups.values():
                if not subgroup.finished and subgroup.reset_code is None:
                    # A FIN must not be invented (§7): what is unfinished ends with a reset.
                    reset_subgroup(self, subgroup, StreamCode.CANCELLED)
        for listener in list(self.listeners):
            listener.track_ended()
        self.wake()

    def reopen(self) -> None:
        """Say that the Track goes on after all: a publisher of it came back."""
        self.ended, self.ended_reason, self.abandoned = None, "", False

    # Leaving

    def evict_group(self, group_id: int) -> int:
        """Drop a Group, return its octets; its Objects become unknown, never non-existent (§7)."""
        group = self.groups.pop(group_id, None)
        if group is None:
            return 0
        self._group_ids.remove(group_id)
        note_delivered(self, group)
        last = MAX_VI64
        if len(self.known) < MAX_KNOWN_RANGES:
            # That nothing lies behind the end of the Group, if so, stays true for ever (§2.1.2).
            if group.final is not None:
                last = max([group.final, *group.object_ids[-1:]])
            elif group.object_ids and not self.authoritative:
                last = group.object_ids[-1]
        self.known.remove(Location(group_id, 0), Location(group_id, last))
        self._release(group.octets)
        for listener in list(self.listeners):
            listener.group_evicted(group)
        return group.octets

    def clear(self) -> None:
        """Drop every Group and give the octets back."""
        for group_id in list(self._group_ids):
            self.evict_group(group_id)

    # Inner workings

    def _release(self, octets: int) -> None:
        self.octets -= octets
        self.budget.release(octets)

    def _insert(self, run: Sequence[StoredObject]) -> None:
        """Take in Objects of one Group whose IDs follow each other; all but the last are whole."""
        octets = sum([stored.octets for stored in run])
        first, last = run[0].header.location, run[-1].header.location
        group = self._group_for(first.group, octets)
        for object_id, stored in enumerate(run, first.object):
            group.objects[object_id] = stored
        ids = group.object_ids
        index = len(ids) if not ids or first.object > ids[-1] else bisect_left(ids, first.object)
        ids[index:index] = range(first.object, last.object + 1)
        if len(run) > 1 or last not in self.known:
            self.known.put_run(first, last)

    def _insert_arriving(self, stored: StoredObject) -> None:
        """Take in an Object whose payload is to come, if it has any."""
        header = stored.header
        group = self._group_for(header.group_id, stored.octets)
        object_id = header.object_id
        group.objects[object_id] = stored
        if header.payload_length > FIRST_PART_OCTETS:
            stored.grow = partial(self._grow, group, stored)
        ids = group.object_ids
        if not ids or object_id > ids[-1]:
            ids.append(object_id)
        else:
            insort(ids, object_id)
        self.known.put(header.location)

    def _group_for(self, group_id: int, octets: int) -> Group:
        """The Group that so many octets go to, which the budget has room for; used just now."""
        self.budget.reserve(octets)
        group = self.groups.get(group_id)
        if group is None:
            group = self.groups[group_id] = Group(group_id)
            insort(self._group_ids, group_id)
        group.octets += octets
        self.octets += octets
        group.used = self.budget.tick()
        return group

    def _grow(self, group: Group, stored: StoredObject, octets: int) -> None:
        """Count more of an Object that is arriving; `StoreFull` where it does not fit."""
        self.budget.reserve(octets)
        if self.groups.get(group.group_id) is not group:
            self.budget.release(octets)
            raise StoreFull(f"the Group of {stored.header.location} has left the store")
        stored.octets += octets
        group.octets += octets
        self.octets += octets

    def _subgroup(self, header: ObjectHeader) -> Subgroup:
        group = self.groups[header.group_id]
        # Datagram-mode Objects belong to no Subgroup; -1 keeps them apart from Subgroup 0.
        key = -1 if header.subgroup_id is None else header.subgroup_id
        subgroup = group.subgroups.get(key)
        if subgroup is None:
            priority = header.publisher_priority
            subgroup = group.subgroups[key] = Subgroup(
                header.group_id, key, self.default_priority if priority is None else priority
            )
        return subgroup

    def _take_out(self, stored: StoredObject) -> Group | None:
        """Take an Object out of its Group; None where it was not there."""
        location = stored.header.location
        group = self.groups.get(location.group)
        if group is None or group.objects.get(location.object) is not stored:
            return None
        del group.objects[location.object]
        group.object_ids.remove(location.object)
        self.known.remove(location, location)
        return group

    def _append_live(self, subgroup: Subgroup, run: Sequence[StoredObject]) -> None:
        for stored in run:
            stored.live = True
            subgroup.octets += stored.header.payload_length
        subgroup.objects += run
        last = run[-1].header.location
        if self.largest is None or last > self.largest:
            self.largest = last
        for listener in tuple(self.listeners):
            listener.object_added(subgroup, len(run))
        if self._watchers:
            self.wake()

    def _finish(self, subgroup: Subgroup, final: int | None) -> None:
        """A Subgroup is whole; ``final`` is the last Object ID of its Group, if that is known."""
        subgroup.finished = True
        if final is not None:
            self.end_group(subgroup.group_id, final)
        for listener in list(self.listeners):
            listener.subgroup_ended(subgroup)

    def _learn_status(self, header: ObjectHeader) -> None:
        if header.status is ObjectStatus.END_OF_GROUP:
            self.end_group(header.group_id, header.object_id)
        elif header.status is ObjectStatus.END_OF_TRACK:
            self.final = header.location
            self.learn(header.location, LAST)

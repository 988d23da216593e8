"""A Track's Objects: the origin publishes from it and a relay caches in it (MOQT §2, §7).

An Object enters in one of three ways: whole, by `publish`; piece by piece from a subscription, by a
`LiveStream`; or piece by piece from a FETCH or fill, by `begin_fetched`. Readers (subscriptions and
fetches of `kvcs.moqt.delivery`) hold references into the store, so payload octets are stored once
however many read them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvcs.errors import StoreFull, UsageError
from kvcs.moqt.data import ObjectHeader, ObjectStatus, SubgroupHeader
from kvcs.moqt.errors import MalformedTrack, PublishDoneCode, StreamCode
from kvcs.moqt.intervals import LAST, LocationSet
from kvcs.moqt.names import MAX_VI64, FullTrackName, Location
from kvcs.moqt.properties import KeyValues, Property, find_property

OBJECT_BOOKKEEPING_OCTETS = 640
"""What one stored Object costs beside its payload (measured: slots, header, views, index)."""

UNLIMITED = 2**63
"""A budget that never fills, for a Track that is bounded elsewhere."""

DEFAULT_PRIORITY = 128
"""Publisher Priority where neither the stream nor the Track names one (§5.1)."""


class Watcher(Protocol):
    """Whoever waits for more octets of an Object, or for a range to become known."""

    def wake(self) -> None:
        """What was waited for may be there now."""


class TrackListener(Protocol):
    """A subscription that follows a Track."""

    def object_added(self, subgroup: Subgroup) -> None:
        """``subgroup.objects[-1]`` was published or began to arrive."""

    def subgroup_ended(self, subgroup: Subgroup) -> None:
        """The Subgroup got its FIN or was reset."""

    def group_evicted(self, group: Group) -> None:
        """The Group left the store; a reader that still needs it is too far behind."""

    def track_ended(self) -> None:
        """``track.ended`` was set: no more Objects come."""


class StoreBudget:
    """Octets that several Tracks share, bookkeeping included.

    Args:
        limit: most octets held.
        make_room: called with the octets wanted when they do not fit; frees what it can.
    """

    def __init__(self, limit: int, make_room: Callable[[int], None] | None = None) -> None:
        self.limit = limit
        self.used = 0
        self._make_room = make_room
        self._tick = 0

    def tick(self) -> int:
        """A number that grows with each use, to tell which Group was used least recently."""
        self._tick += 1
        return self._tick

    def reserve(self, octets: int) -> None:
        """Take ``octets`` from the budget.

        Raises:
            StoreFull: they do not fit and nothing could be freed.
        """
        if self.used + octets > self.limit and self._make_room is not None:
            self._make_room(self.used + octets - self.limit)
        if self.used + octets > self.limit:
            raise StoreFull(
                f"{octets} octets do not fit: {self.used} of {self.limit} are in use and nothing"
                " can be freed; raise the store's limit or close finished publications"
            )
        self.used += octets

    def release(self, octets: int) -> None:
        """Give ``octets`` back."""
        self.used -= octets


class StoredObject:
    """One Object with its payload, whole or still arriving."""

    __slots__ = ("_watchers", "born", "continues", "failed", "header", "parts", "received")

    def __init__(
        self, header: ObjectHeader, parts: tuple[memoryview, ...], received: int, born: float
    ) -> None:
        self.header = header
        self.parts = parts
        """Views that together hold ``header.payload_length`` octets."""
        self.received = received
        """Payload octets that are there, from the start."""
        self.born = born
        """When its first octet came, in the caller's clock (MAX_CACHE_DURATION counts from it)."""
        self.failed = False
        """Whether the rest will never come (its stream was reset)."""
        self.continues = False
        """Whether it directly follows the Object before it in its Subgroup (§7, next object)."""
        self._watchers: list[Watcher] | None = None

    @property
    def complete(self) -> bool:
        """Whether every payload octet is there."""
        return self.received == self.header.payload_length

    @property
    def octets(self) -> int:
        """What the Object costs in the store."""
        return self.header.payload_length + OBJECT_BOOKKEEPING_OCTETS

    def write(self, data: memoryview) -> None:
        """Append payload octets that arrived: the one copy of the receiving path."""
        end = self.received + len(data)
        self.parts[0][self.received : end] = data
        self.received = end
        self._notify()

    def fail(self) -> None:
        """Mark that the rest will never come."""
        self.failed = True
        self._notify()

    def watch(self, watcher: Watcher) -> None:
        """Wake ``watcher`` once, when more octets are there or none will come."""
        if self._watchers is None:
            self._watchers = []
        self._watchers.append(watcher)

    def _notify(self) -> None:
        watchers, self._watchers = self._watchers, None
        for watcher in watchers or ():
            watcher.wake()

    def views(self, offset: int, limit: int) -> Iterator[memoryview]:
        """Payload octets from ``offset``, at most ``limit`` and what has been received."""
        left = min(limit, self.received - offset)
        for part in self.parts:
            if left <= 0:
                return
            size = len(part)
            if offset >= size:
                offset -= size
                continue
            view = part[offset : offset + left]
            yield view
            left -= len(view)
            offset = 0

    def same_start(self, offset: int, data: memoryview) -> bool:
        """Whether ``data`` equals the stored payload at ``offset``, as far as it is there."""
        position = 0
        for view in self.views(offset, len(data)):
            if view != data[position : position + len(view)]:
                return False
            position += len(view)
        return True


class Subgroup:
    """Objects of one Subgroup in the order in which they were published or came live."""

    __slots__ = (
        "end_of_group",
        "finished",
        "from_start",
        "group_id",
        "has_properties",
        "objects",
        "priority",
        "reset_code",
        "subgroup_id",
    )

    def __init__(self, group_id: int, subgroup_id: int, priority: int) -> None:
        self.group_id = group_id
        self.subgroup_id = subgroup_id
        self.priority = priority
        self.objects: list[StoredObject] = []
        self.from_start = False
        """Whether ``objects[0]`` is the first Object ever published in the Subgroup."""
        self.end_of_group = False
        self.has_properties = False
        self.finished = False
        """Whether the last Object is there (FIN)."""
        self.reset_code: int | None = None
        """Set when the Subgroup's stream was reset; a new stream clears it."""


class Group:
    """Objects of one Group, by Object ID."""

    __slots__ = ("final", "group_id", "object_ids", "objects", "octets", "subgroups", "used")

    def __init__(self, group_id: int) -> None:
        self.group_id = group_id
        self.objects: dict[int, StoredObject] = {}
        self.object_ids: list[int] = []
        self.subgroups: dict[int, Subgroup] = {}
        self.final: int | None = None
        """Largest Object ID that can exist, once known."""
        self.octets = 0
        self.used = 0
        """Tick of the last use, for eviction."""


class DuplicateObject:
    """Compares an Object that came again with the stored one (§12.1, condition 6)."""

    __slots__ = ("_offset", "_stored")

    def __init__(self, stored: StoredObject) -> None:
        self._stored = stored
        self._offset = 0

    def write(self, data: memoryview) -> None:
        """Compare the next octets.

        Raises:
            MalformedTrack: they differ from the stored payload.
        """
        if not self._stored.same_start(self._offset, data):
            raise MalformedTrack(f"two payloads at {self._stored.header.location}")
        self._offset += len(data)

    def fail(self) -> None:
        """The second copy ended early; the stored one stands."""


class Track:
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
        self.octets = 0
        self.known = LocationSet()
        self.groups: dict[int, Group] = {}
        self.listeners: list[TrackListener] = []
        self._group_ids: list[int] = []
        self._watchers: list[Watcher] = []

    # What is there

    @property
    def default_priority(self) -> int:
        """DEFAULT_PUBLISHER_PRIORITY of the Track, else 128 (§10)."""
        value = find_property(self.properties, Property.DEFAULT_PUBLISHER_PRIORITY)
        return value if isinstance(value, int) and value <= 255 else DEFAULT_PRIORITY

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
        if self.authoritative:
            return None
        return self.known.first_outside(start, end)

    def expired(self, stored: StoredObject, now: float) -> bool:
        """Whether a cache must not start to send the Object any more (§10, MAX_CACHE_DURATION)."""
        if self.authoritative:
            return False
        seconds = self.cache_seconds
        return seconds is not None and now > stored.born + seconds

    @property
    def cache_seconds(self) -> float | None:
        """MAX_CACHE_DURATION in seconds; None where the Track names none."""
        value = find_property(self.properties, Property.MAX_CACHE_DURATION)
        return value / 1000 if isinstance(value, int) else None

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
    ) -> None:
        """Publish one whole Object as the Original Publisher.

        The Object joins its Subgroup, which `finish_subgroup` ends.

        Args:
            header: its fields; ``subgroup_id`` is an integer.
            parts: views of the payload, together ``header.payload_length`` octets.
            now: the caller's clock, seconds.
            end_of_group: whether the Subgroup will hold the largest Object of the Group.

        Raises:
            UsageError: something was already published at the Location; an Object never changes
                (MOQT §2.1, KVCS "Publisher Behavior").
            StoreFull: the budget has no room.
        """
        location = header.location
        if self.get(location) is not None:
            raise UsageError(
                f"{self.name} already has an Object at {location}; Objects never change"
            )
        if self.ended is not None or (self.final is not None and location > self.final):
            raise UsageError(f"{self.name} has ended; nothing can be published at {location}")
        stored = StoredObject(header, parts, header.payload_length, now)
        stored.continues = True
        self._insert(stored)
        subgroup = self._subgroup(header)
        subgroup.from_start = True
        subgroup.end_of_group = subgroup.end_of_group or end_of_group
        self._learn_status(header)
        self._append_live(subgroup, stored)

    def finish_subgroup(self, group_id: int, subgroup_id: int) -> None:
        """Say that a Subgroup has its last Object: its streams end with FIN."""
        subgroup = self.groups[group_id].subgroups[subgroup_id]
        self._finish(subgroup)

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
            return self._duplicate(stored, header)
        fresh = _arriving(header, now)
        self._insert(fresh)
        return fresh

    def discard(self, stored: StoredObject) -> None:
        """Drop an Object that will not be completed; its status is unknown again."""
        location = stored.header.location
        group = self.groups.get(location.group)
        if group is None or group.objects.get(location.object) is not stored:
            return
        del group.objects[location.object]
        group.object_ids.remove(location.object)
        group.octets -= stored.octets
        self._release(stored.octets)
        self.known.remove(location, location)
        stored.fail()
        self._drop_if_empty(group)

    def learn(self, start: Location, end: Location) -> None:
        """Record that in ``start``..``end`` nothing exists but what is stored."""
        self.known.add(start, end)
        self.wake()

    def end_group(self, group_id: int, final: int) -> None:
        """Record the largest Object ID of a Group that can exist (END_OF_GROUP with FIN)."""
        group = self.groups.get(group_id)
        if group is not None:
            group.final = final
        self.learn(Location(group_id, final), Location(group_id, MAX_VI64))

    def end(self, status: int = PublishDoneCode.TRACK_ENDED, reason: str = "") -> None:
        """Say that no more Objects come; subscriptions end with PUBLISH_DONE ``status``."""
        if self.ended is not None:
            return
        self.ended, self.ended_reason = status, reason
        for group in self.groups.values():
            for subgroup in group.subgroups.values():
                if not subgroup.finished and subgroup.reset_code is None:
                    # A FIN must not be invented (§7): what is unfinished ends with a reset.
                    subgroup.reset_code = StreamCode.CANCELLED
                    for listener in list(self.listeners):
                        listener.subgroup_ended(subgroup)
        for listener in list(self.listeners):
            listener.track_ended()
        self.wake()

    # Waiting

    def watch(self, watcher: Watcher) -> None:
        """Wake ``watcher`` once, when more becomes known of the Track."""
        self._watchers.append(watcher)

    def wake(self) -> None:
        """Wake all who wait for the Track."""
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.wake()

    # Leaving

    def evict_group(self, group_id: int) -> int:
        """Drop a Group; its Objects become unknown, never non-existent (§7).

        Returns:
            The octets freed.
        """
        group = self.groups.pop(group_id, None)
        if group is None:
            return 0
        self._group_ids.remove(group_id)
        self.known.remove(Location(group_id, 0), Location(group_id, MAX_VI64))
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

    def _insert(self, stored: StoredObject) -> None:
        self.budget.reserve(stored.octets)
        location = stored.header.location
        group = self.groups.get(location.group)
        if group is None:
            group = self.groups[location.group] = Group(location.group)
            insort(self._group_ids, location.group)
        group.objects[location.object] = stored
        if not group.object_ids or location.object > group.object_ids[-1]:
            group.object_ids.append(location.object)
        else:
            insort(group.object_ids, location.object)
        group.octets += stored.octets
        self.octets += stored.octets
        group.used = self.budget.tick()
        if not self.authoritative:
            self.known.add(location, location)

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

    def _append_live(self, subgroup: Subgroup, stored: StoredObject) -> None:
        subgroup.objects.append(stored)
        self.note_largest(stored.header.location)
        for listener in list(self.listeners):
            listener.object_added(subgroup)
        self.wake()

    def _finish(self, subgroup: Subgroup) -> None:
        subgroup.finished = True
        if subgroup.end_of_group and subgroup.objects:
            self.end_group(subgroup.group_id, subgroup.objects[-1].header.object_id)
        for listener in list(self.listeners):
            listener.subgroup_ended(subgroup)

    def _learn_status(self, header: ObjectHeader) -> None:
        if header.status is ObjectStatus.END_OF_GROUP:
            self.end_group(header.group_id, header.object_id)
        elif header.status is ObjectStatus.END_OF_TRACK:
            self.final = header.location
            self.learn(header.location, LAST)

    def _duplicate(self, stored: StoredObject, header: ObjectHeader) -> DuplicateObject:
        have = stored.header
        if (have.payload_length, have.status, have.subgroup_id, self._priority(have)) != (
            header.payload_length,
            header.status,
            header.subgroup_id,
            self._priority(header),
        ):
            raise MalformedTrack(f"two Objects with different fields at {header.location}")
        return DuplicateObject(stored)

    def _priority(self, header: ObjectHeader) -> int:
        priority = header.publisher_priority
        return self.default_priority if priority is None else priority

    def _drop_if_empty(self, group: Group) -> None:
        if not group.objects:
            del self.groups[group.group_id]
            self._group_ids.remove(group.group_id)


class LiveStream:
    """One subgroup stream that comes through a subscription, on its way into the store.

    Gives `begin` for each Object, and `finish` or `reset` once.
    """

    __slots__ = ("_current", "_header", "_last", "_opened", "_track")

    def __init__(self, track: Track, header: SubgroupHeader) -> None:
        self._track = track
        self._header = header
        self._opened: Subgroup | None = None
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
        stored = track.get(location)
        if stored is not None:
            self._last = stored
            self._current = track._duplicate(stored, header)
            return self._current
        group = track.groups.get(location.group)
        if group is not None and group.final is not None and location.object > group.final:
            raise MalformedTrack(f"{location} lies beyond the end of its Group, {group.final}")
        if track.final is not None and location > track.final:
            raise MalformedTrack(f"{location} lies beyond the end of its Track, {track.final}")
        fresh = _arriving(header, now)
        track._insert(fresh)
        subgroup = track._subgroup(header)
        self._join(subgroup, fresh)
        track._learn_status(header)
        track._append_live(subgroup, fresh)
        self._last = self._current = fresh
        return fresh

    def finish(self) -> None:
        """The stream ended with FIN: the Subgroup has its last Object."""
        if self._opened is not None:
            self._track._finish(self._opened)

    def reset(self, code: int) -> None:
        """The stream was reset: a partial Object is dropped, the Subgroup is open-ended."""
        if isinstance(self._current, StoredObject) and not self._current.complete:
            self._track.discard(self._current)
        subgroup = self._opened
        if subgroup is None or subgroup.finished:
            return
        subgroup.reset_code = code
        for listener in list(self._track.listeners):
            listener.subgroup_ended(subgroup)

    def _join(self, subgroup: Subgroup, fresh: StoredObject) -> None:
        if self._opened is None:
            self._opened = subgroup
            if not subgroup.objects:
                subgroup.from_start = self._header.first_object
                subgroup.has_properties = self._header.has_properties
            subgroup.end_of_group = subgroup.end_of_group or self._header.end_of_group
            subgroup.reset_code = None
        last = subgroup.objects[-1] if subgroup.objects else None
        fresh.continues = last is None or (
            last is self._last or last.header.object_id + 1 == fresh.header.object_id
        )


def _arriving(header: ObjectHeader, now: float) -> StoredObject:
    if header.payload_length == 0:
        return StoredObject(header, (), 0, now)
    return StoredObject(header, (memoryview(bytearray(header.payload_length)),), 0, now)

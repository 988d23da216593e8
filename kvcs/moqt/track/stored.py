"""Objects at rest: what a store keeps of each, and the octets that it may keep (MOQT §2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from kvcs.errors import StoreFull
from kvcs.moqt.errors import MalformedTrack
from kvcs.moqt.objects import ObjectHeader

DEFAULT_PRIORITY = 128
"""Publisher Priority where neither the stream nor the Track names one (§5.1)."""

OBJECT_BOOKKEEPING_OCTETS = 640
"""What one stored Object costs beside its payload (measured: slots, header, views, index)."""

FIRST_PART_OCTETS = 64 * 1024
"""Room for an arriving payload at first; later there is as much again as has come. So a length that
was only announced costs next to nothing."""

LEAST_PART_OCTETS = 16 * 1024
"""Payload octets that come as one piece are a part of their own from this size on: what a part
takes beside its octets is little of it."""

MANY_PARTS = 256
"""What comes as one piece is no part of its own where that many of its size have come before it:
each reader looks past the parts that are before its place."""

UNLIMITED = 2**63
"""A budget that never fills, for a Track that is bounded elsewhere."""


class Watcher(Protocol):
    """Whoever waits for more octets of an Object, or for a range to become known."""

    def wake(self) -> None:
        """What was waited for may be there now."""


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

    def has_room(self, octets: int) -> bool:
        """Whether ``octets`` fit, and nothing has to be freed for them."""
        return self.used + octets <= self.limit

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

    __slots__ = (
        "_at",
        "_room",
        "_watchers",
        "born",
        "continues",
        "failed",
        "followers",
        "grow",
        "header",
        "live",
        "octets",
        "orphaned",
        "parts",
        "received",
    )

    def __init__(
        self,
        header: ObjectHeader,
        parts: tuple[memoryview, ...],
        received: int,
        born: float,
        octets: int | None = None,
    ) -> None:
        self.header = header
        self.parts = parts
        """Views that hold the payload in order; of one that is arriving, what has room so far."""
        self.received = received
        """Payload octets that are there, from the start."""
        self.born = born
        """When its first octet came, in the caller's clock (MAX_CACHE_DURATION counts from it)."""
        self.failed = False
        """Whether the rest will never come (its stream was reset)."""
        self.continues = False
        """Whether it directly follows the Object before it in its Subgroup (§7, next object)."""
        self.live = False
        """Whether it was delivered to subscriptions; what a FETCH brought was not."""
        self.orphaned = False
        """Whether the stream that began it ended early."""
        self.followers = 0
        """Streams that bring a second copy; one of them may overtake the first."""
        self.grow: Callable[[int], None] | None = None
        """Reserves octets beyond the first part, while the payload arrives; raises `StoreFull`."""
        self._at = received
        self._room = received
        self.octets = (
            header.payload_length + len(header.properties) + OBJECT_BOOKKEEPING_OCTETS
            if octets is None
            else octets
        )
        """What the Object counts in the store's budget."""
        self._watchers: dict[Watcher, None] | None = None

    @property
    def complete(self) -> bool:
        """Whether every payload octet is there."""
        return self.received == self.header.payload_length

    def write(self, data: bytes | memoryview) -> None:
        """Take payload octets of the stream that began the Object.

        Raises:
            MalformedTrack: a second copy overtook this one, and they differ.
            StoreFull: the budget has no room for the rest.
        """
        at, size = self._at, len(data)
        self._at = at + size
        if at == self._room == self.received and size and not self.failed:
            least = max(LEAST_PART_OCTETS, at // MANY_PARTS)
            if size >= least or at + size == self.header.payload_length:
                self._take_part(bytes(data))
                return
            self._add_part()
        if at == self.received and size <= self._room - at and not self.failed:
            # One stream brings it, and there is room: all that is left of `merge`.
            part = self.parts[-1]
            start = len(part) - (self._room - at)
            part[start : start + size] = data
            self.received = at + size
            if self.received == self.header.payload_length:
                self.grow = None
            if self._watchers is not None:
                self._notify()
        else:
            self.merge(at, data)

    def merge(self, offset: int, data: bytes | memoryview) -> None:
        """Compare payload octets at ``offset`` with what is there, and append what is new.

        Where one stream brings the Object nothing is there yet, and this is the one copy of the
        receiving path.

        Raises:
            MalformedTrack: they differ.
            StoreFull: the budget has no room for the rest.
        """
        known = self.received - offset
        if known > 0:
            if not self.same_start(offset, data):
                raise MalformedTrack(f"two payloads at {self.header.location}")
            data = data[known:]
        if self.failed or not len(data):
            return
        try:
            self._append(data)
        finally:
            self._notify()

    def _append(self, data: bytes | memoryview) -> None:
        while len(data):
            if self.received == self._room:
                self._add_part()
            part = self.parts[-1]
            start = len(part) - (self._room - self.received)
            piece = data[: self._room - self.received]
            part[start : start + len(piece)] = piece
            self.received += len(piece)
            data = data[len(piece) :]
        if self.complete:
            self.grow = None

    def _add_part(self) -> None:
        """Make room for more of the payload: as much again as has come."""
        left = self.header.payload_length - self._room
        assert left > 0  # the parser hands over no more than was announced
        size = min(left, max(FIRST_PART_OCTETS - self._room, self._room))
        self._reserve(size)
        self.parts += (memoryview(bytearray(size)),)
        self._room += size

    def _take_part(self, data: bytes) -> None:
        """Take the next octets as they are, which leaves no memory to be cleared first."""
        self._reserve(len(data))
        self.parts += (memoryview(data),)
        self._room += len(data)
        self.received = self._room
        if self.complete:
            self.grow = None
        if self._watchers is not None:
            self._notify()

    def _reserve(self, size: int) -> None:
        """Count more of the payload in the budget, beyond what counts from the start."""
        more = self._room + size - max(FIRST_PART_OCTETS, self._room)
        if more > 0 and self.grow is not None:
            self.grow(more)

    def fail(self) -> None:
        """Mark that the rest will never come; what came of it is dropped."""
        self.failed = True
        self.grow = None
        if not self.complete:
            self.parts = ()
        self._notify()

    def is_late(self, timeout: float | None, now: float) -> bool:
        """Whether it is older than a delivery timeout, in seconds (§5.2)."""
        return timeout is not None and now > self.born + timeout

    def watch(self, watcher: Watcher) -> None:
        """Wake ``watcher`` once, when more octets are there or none will come."""
        if self._watchers is None:
            self._watchers = {}
        self._watchers[watcher] = None

    def unwatch(self, watcher: Watcher) -> None:
        """Undo `watch`; quiet where it was woken already."""
        if self._watchers is not None:
            self._watchers.pop(watcher, None)

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

    def same_start(self, offset: int, data: bytes | memoryview) -> bool:
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
        "octets",
        "priority",
        "reset_code",
        "streams",
        "subgroup_id",
    )

    def __init__(self, group_id: int, subgroup_id: int, priority: int) -> None:
        self.group_id = group_id
        self.subgroup_id = subgroup_id
        self.priority = priority
        self.objects: list[StoredObject] = []
        self.octets = 0
        """Payload octets of ``objects``, those that are yet to come included."""
        self.from_start = False
        """Whether ``objects[0]`` is the first Object ever published in the Subgroup."""
        self.end_of_group = False
        self.has_properties = False
        self.finished = False
        """Whether the last Object is there (FIN)."""
        self.reset_code: int | None = None
        """Set when the Subgroup's last stream was reset; a new stream clears it."""
        self.streams = 0
        """Streams that bring it now: one for each publisher."""


class Group:
    """Objects of one Group, by Object ID."""

    __slots__ = (
        "arriving",
        "final",
        "group_id",
        "object_ids",
        "objects",
        "octets",
        "subgroups",
        "used",
        "wanted",
    )

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
        self.arriving = 0
        """Streams that bring Objects of it now; a cache keeps it meanwhile where it can."""
        self.wanted = 0
        """Fetches that brought it and whose readers have not passed it; it is evicted last."""


class TrackListener(Protocol):
    """A subscription that follows a Track."""

    def object_added(self, subgroup: Subgroup, count: int = 1) -> None:
        """The last ``count`` of ``subgroup.objects`` were published or began to arrive."""

    def subgroup_ended(self, subgroup: Subgroup) -> None:
        """The Subgroup got its FIN or was reset."""

    def group_evicted(self, group: Group) -> None:
        """The Group left the store; a reader that still needs it is too far behind."""

    def track_ended(self) -> None:
        """``track.ended`` was set: no more Objects come."""


class DuplicateObject:
    """Compares an Object that came again with the stored one (§12.1, condition 6).

    While the stored one is still arriving the copy may overtake it, and then brings it itself.
    """

    __slots__ = ("_ended", "_offset", "stored")

    def __init__(self, stored: StoredObject) -> None:
        self.stored = stored
        self._offset = 0
        self._ended = False
        stored.followers += 1

    def write(self, data: bytes | memoryview) -> None:
        """Compare the next octets, and append those that the stored Object lacks.

        Raises:
            MalformedTrack: they differ from the stored payload.
        """
        self.stored.merge(self._offset, data)
        self._offset += len(data)
        if self._offset == self.stored.header.payload_length:
            self.fail()

    def fail(self) -> None:
        """The second copy has ended, early or not; the stored one stands."""
        if not self._ended:
            self._ended = True
            self.stored.followers -= 1


def arriving(header: ObjectHeader, now: float) -> StoredObject:
    """An Object whose payload is to come: it counts its first part until more has come."""
    first = min(header.payload_length, FIRST_PART_OCTETS)
    octets = first + len(header.properties) + OBJECT_BOOKKEEPING_OCTETS
    return StoredObject(header, (), 0, now, octets)


def second_copy(
    stored: StoredObject, header: ObjectHeader, default_priority: int
) -> DuplicateObject:
    """Takes a second copy of a stored Object.

    Args:
        stored: the Object that is there.
        header: the copy's.
        default_priority: of the Track, where a header names none.

    Raises:
        MalformedTrack: their fields differ.
    """
    have = stored.header
    priorities = [
        default_priority if each is None else each
        for each in (have.publisher_priority, header.publisher_priority)
    ]
    if priorities[0] != priorities[1] or (
        (have.payload_length, have.status, have.subgroup_id)
        != (header.payload_length, header.status, header.subgroup_id)
    ):
        raise MalformedTrack(f"two Objects with different fields at {header.location}")
    return DuplicateObject(stored)

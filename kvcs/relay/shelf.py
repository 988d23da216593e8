"""Where Groups go that the cache has no room for, and how they come back: no I/O here (MOQT §7.1).

The cache puts whole Groups on a `Shelf` and asks for them again; what the shelf does meanwhile is
its own. A Group that does not come back is unknown, and is asked for upstream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.names import MAX_VI64, FullTrackName, Location
from kvcs.moqt.objects import ObjectHeader
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import Group, StoredObject

MAX_SHELVED_RANGES = 16
"""Ranges of Locations whose status goes on the shelf with a Group; with more none does."""


@dataclass(frozen=True, slots=True)
class ShelvedTrack:
    """What is known of a Track beside its Groups."""

    properties: KeyValues
    """Track Properties."""

    largest: Location | None
    """Largest Object."""

    final: Location | None
    """Location of the End of Track."""

    ended: bool
    """Whether its publisher said that it has ended."""

    known: tuple[tuple[Location, Location], ...]
    """Where nothing exists, outside of all Groups that were in memory."""


@dataclass(frozen=True, slots=True)
class ShelvedObject:
    """One whole Object."""

    header: ObjectHeader
    born: float
    """When its first octet came, in the clock of whoever holds it."""

    parts: tuple[memoryview, ...] = field(repr=False)
    """Its payload."""


@dataclass(frozen=True, slots=True)
class ShelvedGroup:
    """One Group of which every Object is there."""

    name: FullTrackName
    group_id: int
    known_to: int
    """Largest Object ID up to which nothing but `objects` exists: beyond, the status is unknown."""

    track: ShelvedTrack
    objects: tuple[ShelvedObject, ...]

    @property
    def octets(self) -> int:
        """Payload octets."""
        return sum(each.header.payload_length for each in self.objects)

    @property
    def born(self) -> float:
        """When its oldest Object came."""
        return min(each.born for each in self.objects)


class Shelf(Protocol):
    """Keeps Groups for a cache."""

    on_lost: Callable[[FullTrackName], None] | None
    """Called when something of a Track has left it."""

    def names(self) -> Collection[FullTrackName]:
        """Tracks of which something is here."""

    def seconds_left(self, name: FullTrackName) -> float | None:
        """Until the first Group of a Track expires; None where none does."""

    def put(self, group: ShelvedGroup) -> None:
        """Keep a Group, if there is room and time; its views must not change."""

    def groups(self, name: FullTrackName) -> Mapping[int, int]:
        """Groups of a Track that are here, and `ShelvedGroup.known_to` of each."""

    def track(self, name: FullTrackName) -> ShelvedTrack | None:
        """What was last known of a Track of which a Group is here."""

    def load(
        self, name: FullTrackName, group_id: int, done: Callable[[ShelvedGroup | None], None]
    ) -> bool:
        """Get a Group; ``done`` gets it later, or None where it is not good.

        Returns:
            False where it is not here, or too many are being read; then ``done`` is not called.
        """

    def forget(self, name: FullTrackName) -> None:
        """Drop what is here of a Track."""


def shelved(track: Track, group: Group) -> ShelvedGroup | None:
    """A Group in the form in which it is put on a shelf.

    Args:
        track: the Track.
        group: one of its Groups, which is still stored.

    Returns:
        None where something of it is missing or unknown: then it is not worth keeping.
    """
    if not group.objects or group.arriving:
        return None
    first, last = Location(group.group_id, 0), Location(group.group_id, MAX_VI64)
    unknown = track.first_unknown(first, last)
    known_to = MAX_VI64 if unknown is None else unknown[0].object - 1
    if known_to < group.object_ids[-1]:
        return None
    objects = [group.objects[object_id] for object_id in group.object_ids]
    if not all(each.complete and not each.failed for each in objects):
        return None
    return ShelvedGroup(
        track.name,
        group.group_id,
        known_to,
        _known(track),
        tuple(ShelvedObject(each.header, each.born, each.parts) for each in objects),
    )


def _known(track: Track) -> ShelvedTrack:
    known: tuple[tuple[Location, Location], ...] = ()
    if len(track.known) <= MAX_SHELVED_RANGES:
        held = sorted(track.groups)
        pieces: list[tuple[Location, Location]] = []
        for start, end in track.known.ranges():
            # What is in memory may be gone when this is read: its absence must not be believed.
            for group_id in held:
                if start > end or group_id < start.group:
                    continue
                if group_id > end.group:
                    break
                if group_id > start.group:
                    pieces.append((start, Location(group_id - 1, MAX_VI64)))
                start = Location(min(group_id + 1, MAX_VI64), 0)
                if group_id == MAX_VI64:
                    start, end = Location(1, 0), Location(0, 0)
            if start <= end:
                pieces.append((start, end))
        known = tuple(pieces)
    return ShelvedTrack(
        track.properties,
        track.largest,
        track.final,
        track.ended == PublishDoneCode.TRACK_ENDED,
        known,
    )


def restore(track: Track, held: ShelvedTrack) -> None:
    """Give an empty Track what was known of it."""
    track.properties = held.properties
    track.final = held.final
    if held.largest is not None:
        track.note_largest(held.largest)
    for start, end in held.known:
        track.learn(start, end)
    if held.ended:
        track.end(PublishDoneCode.TRACK_ENDED)


def take_back(track: Track, group: ShelvedGroup) -> list[tuple[Location, float]]:
    """Store a Group again.

    Returns:
        Locations that were stored, and when each Object's first octet came.

    Raises:
        MalformedTrack: a stored Object differs.
        StoreFull: there is no room; whole Objects stay, and the rest is unknown.
    """
    fresh: list[tuple[Location, float]] = []
    held: Group | None = None
    try:
        for each in group.objects:
            writer = track.begin_fetched(each.header, each.born)
            if held is None:
                # Making room for the rest must not take what is here of it.
                held = track.groups[group.group_id]
                held.arriving += 1
            try:
                for part in each.parts:
                    writer.write(part)
            except BaseException:
                if isinstance(writer, StoredObject):
                    track.discard(writer)
                else:
                    writer.fail()
                raise
            if isinstance(writer, StoredObject):
                fresh.append((each.header.location, each.born))
    finally:
        if held is not None:
            held.arriving -= 1
            track.drop_if_empty(held)
    track.learn(Location(group.group_id, 0), Location(group.group_id, group.known_to))
    return fresh

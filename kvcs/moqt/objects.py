"""Objects as data streams carry them: header fields, status, and the items a parser yields.

MOQT §2.1, §11.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from kvcs.moqt.names import Location

__all__ = [
    "FETCH_DATAGRAM",
    "FETCH_FIRST_MARKER",
    "FETCH_GROUP_DELTA",
    "FETCH_OBJECT_DELTA",
    "FETCH_PRIORITY",
    "FETCH_PROPERTIES",
    "FETCH_SUBGROUP_MODE",
    "FETCH_SUBGROUP_NEXT",
    "FETCH_SUBGROUP_PRESENT",
    "FETCH_SUBGROUP_PRIOR",
    "MAX_OBJECT_PROPERTIES",
    "OBJECT_STATUSES",
    "Item",
    "ObjectChunk",
    "ObjectEnded",
    "ObjectHeader",
    "ObjectStarted",
    "ObjectStatus",
    "RangeKind",
    "RangeMarked",
]

MAX_OBJECT_PROPERTIES = 65535
"""Octets of one Object's Properties that we take. The draft sets no limit; they are held in memory
before the Object can be named, so one is needed."""

# Serialization Flags of an Object on a fetch stream (§11.4.1).
FETCH_SUBGROUP_MODE = 0x03
FETCH_SUBGROUP_PRIOR = 0x01
FETCH_SUBGROUP_NEXT = 0x02
FETCH_SUBGROUP_PRESENT = 0x03
FETCH_OBJECT_DELTA = 0x04
FETCH_GROUP_DELTA = 0x08
FETCH_PRIORITY = 0x10
FETCH_PROPERTIES = 0x20
FETCH_DATAGRAM = 0x40
FETCH_FIRST_MARKER = 0x80


class ObjectStatus(IntEnum):
    """What an Object says beyond its payload (§11.2)."""

    NORMAL = 0x0
    END_OF_GROUP = 0x3
    END_OF_TRACK = 0x4


OBJECT_STATUSES: dict[int, ObjectStatus] = {int(status): status for status in ObjectStatus}
"""Statuses by their code: a lookup is faster than the enumeration's constructor."""


class RangeKind(IntEnum):
    """Why Objects up to a marker are not on a fetch stream; the value is its flags (§11.4.1)."""

    NON_EXISTENT = 0x8C
    UNKNOWN = 0x10C
    TIMED_OUT = 0x20C


@dataclass(slots=True, unsafe_hash=True)
class ObjectHeader:
    """All of an Object but its Track and payload; nobody changes one."""

    # Not frozen: that makes it six times as dear to make one, and every Object needs some.

    group_id: int
    """Group ID."""

    object_id: int
    """Object ID, unique in its Group."""

    subgroup_id: int | None = 0
    """Subgroup ID; None for delivery mode Datagram."""

    publisher_priority: int | None = None
    """0 to 255, lower first; None for the Track's default. Never None from a fetch stream."""

    status: ObjectStatus = ObjectStatus.NORMAL
    """NORMAL on fetch streams, which carry no other."""

    properties: bytes = b""
    """Object Properties as they came, undecoded: Key-Value-Pairs for `KeyValues.decode`."""

    payload_length: int = 0
    """Octets of payload."""

    location: Location = field(init=False, repr=False, compare=False)
    """Group ID and Object ID; asked for a dozen times on the way of one Object."""

    def __post_init__(self) -> None:
        self.location = Location(self.group_id, self.object_id)


class ObjectStarted(NamedTuple):
    """An Object's header is complete; its payload follows in chunks."""

    header: ObjectHeader
    """The header."""


class ObjectChunk(NamedTuple):
    """The next octets of the payload of the Object that started last."""

    data: memoryview
    """Slice of the data that was fed; valid as long as that is."""


@dataclass(frozen=True, slots=True)
class ObjectEnded:
    """The Object that started last is complete."""


class RangeMarked(NamedTuple):
    """Objects behind the last item, up to and including a Location, are not on this stream."""

    kind: RangeKind
    """Why not."""

    location: Location
    """Last Location of the range, in delivery order."""


Item = ObjectStarted | ObjectChunk | ObjectEnded | RangeMarked
"""What a parser yields."""

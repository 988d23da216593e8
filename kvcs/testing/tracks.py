"""Tracks for tests: short ways to publish, and what a subscriber got, put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcs.moqt import events
from kvcs.moqt.encoders import FetchEncoder, SubgroupEncoder
from kvcs.moqt.events import Event
from kvcs.moqt.names import FullTrackName, GroupOrder, Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus, RangeKind
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.streams import FetchHeader, SubgroupHeader
from kvcs.moqt.track.store import Track

NAME = FullTrackName((b"kvcs-1", b"test"), b"k.raw.s0")
"""A Full Track Name, where any will do."""


def track(
    name: FullTrackName = NAME,
    *,
    authoritative: bool = True,
    properties: KeyValues | None = None,
) -> Track:
    """An empty Track."""
    return Track(name, authoritative=authoritative, properties=properties)


def payload(location: Location, octets: int = 8) -> bytes:
    """Octets that no other Location of a test has."""
    text = f"{location.group}/{location.object};".encode()
    return (text * (octets // len(text) + 1))[:octets]


def put(
    target: Track,
    group: int,
    object_id: int,
    *,
    octets: int = 8,
    priority: int | None = 0,
    subgroup: int = 0,
    status: ObjectStatus = ObjectStatus.NORMAL,
    now: float = 0.0,
) -> None:
    """Publish one Object."""
    place = Location(group, object_id)
    data = payload(place, octets) if status is ObjectStatus.NORMAL else b""
    header = ObjectHeader(group, object_id, subgroup, priority, status, b"", len(data))
    target.publish(header, (memoryview(data),) if data else (), now, end_of_group=True)


def bring(target: Track, group: int, object_id: int, *, octets: int = 8) -> None:
    """Have a FETCH bring one whole Object."""
    place = Location(group, object_id)
    writer = target.begin_fetched(ObjectHeader(*place, 0, 0, payload_length=octets), 0.0)
    writer.write(memoryview(payload(place, octets)))


def put_group(
    target: Track, group: int, objects: int, *, octets: int = 8, priority: int | None = 0
) -> None:
    """Publish a whole Group: its Objects, End of Group behind them, FIN."""
    for object_id in range(objects):
        put(target, group, object_id, octets=octets, priority=priority)
    put(target, group, objects, priority=priority, status=ObjectStatus.END_OF_GROUP)
    target.finish_subgroup(group, 0)


def end_track(target: Track, group: int, *, priority: int | None = 0) -> None:
    """Publish End of Track alone in a Group of its own, and end the Track."""
    put(target, group, 0, priority=priority, status=ObjectStatus.END_OF_TRACK)
    target.finish_subgroup(group, 0)
    target.end()


def subgroup_stream(header: SubgroupHeader, *items: ObjectHeader | int, octets: int = 8) -> bytes:
    """Octets of a subgroup stream.

    Args:
        header: its header.
        items: Objects; a bare Object ID is a NORMAL one with `payload`.
        octets: payload octets of those.
    """
    encoder = SubgroupEncoder(header)
    parts = [header.encode()]
    for item in items:
        one = item
        if isinstance(one, int):
            priority = header.publisher_priority
            one = ObjectHeader(
                header.group_id, one, header.subgroup_id, priority, payload_length=octets
            )
        parts += (encoder.object(one), payload(one.location, one.payload_length))
    return b"".join(parts)


def fetch_stream(
    request_id: int,
    *items: Location | tuple[RangeKind, Location],
    octets: int = 8,
    priority: int = 0,
    order: GroupOrder = GroupOrder.ASCENDING,
) -> bytes:
    """Octets of a fetch or fill stream: Objects with `payload`, and End of Range markers."""
    encoder = FetchEncoder(order)
    parts = [FetchHeader(request_id).encode()]
    for item in items:
        if isinstance(item, Location):
            header = ObjectHeader(*item, 0, priority, payload_length=octets)
            parts += (encoder.object(header), payload(item, octets))
        else:
            parts.append(encoder.marker(*item))
    return b"".join(parts)


@dataclass(slots=True)
class Received:
    """One Object that a subscriber got."""

    header: ObjectHeader
    stream_id: int
    payload: bytearray = field(default_factory=bytearray)
    whole: bool = False


def objects(seen: Iterable[Event], request_id: int | None = None) -> list[Received]:
    """The Objects among events, in the order in which they began.

    Args:
        seen: events of a session core.
        request_id: only those of one request.
    """
    received: list[Received] = []
    open_objects: dict[int, Received] = {}
    for event in seen:
        if request_id is not None and getattr(event, "request_id", None) != request_id:
            continue
        if isinstance(event, events.ObjectStarted):
            new = Received(event.header, event.stream_id)
            received.append(new)
            open_objects[event.stream_id] = new
        elif isinstance(event, events.ObjectChunk):
            open_objects[event.stream_id].payload += event.data
        elif isinstance(event, events.ObjectEnded):
            open_objects[event.stream_id].whole = True
    return received


def locations(seen: Iterable[Event], request_id: int | None = None) -> list[Location]:
    """Locations of the whole NORMAL Objects among events, in the order in which they began."""
    return [
        item.header.location
        for item in objects(seen, request_id)
        if item.whole and item.header.status is ObjectStatus.NORMAL
    ]


def joined(seen: Iterable[Event]) -> list[object]:
    """The events, with neighbouring chunks of a payload made one: the same for every cut."""
    result: list[object] = []
    for event in seen:
        if isinstance(event, events.ObjectChunk):
            last = result[-1]
            if isinstance(last, tuple) and last[:2] == (event.request_id, event.stream_id):
                result[-1] = (*last[:2], last[2] + bytes(event.data))
            else:
                result.append((event.request_id, event.stream_id, bytes(event.data)))
        else:
            result.append(event)
    return result

"""Two relays that have one Track, one below both, and a publisher of Objects in parts."""

from __future__ import annotations

from kvcs.moqt.errors import StreamCode
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectHeader
from kvcs.moqt.streams import SubgroupHeader
from kvcs.moqt.track.live import LiveStream
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import DuplicateObject, StoredObject
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import ConsumerPeer, PublisherPeer
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import payload, put_group
from tests.unit.relay.chains import OBJECTS, A, B, C

OCTETS = 40
"""Octets of an Object that comes in two parts."""


class Streaming:
    """Publishes Objects in parts; the same steps give the same Track at another publisher."""

    def __init__(self, track: Track) -> None:
        self.track = track
        self._streams: dict[tuple[int, int], LiveStream] = {}
        self._writers: dict[Location, StoredObject | DuplicateObject] = {}

    def open(self, group: int, subgroup: int = 0) -> None:
        header = SubgroupHeader(
            track_alias=0,
            group_id=group,
            subgroup_id=subgroup,
            publisher_priority=0,
            end_of_group=False,
            first_object=True,
            has_properties=False,
        )
        self._streams[group, subgroup] = self.track.open_stream(header)

    def begin(self, group: int, object_id: int, subgroup: int = 0) -> None:
        location = Location(group, object_id)
        header = ObjectHeader(group, object_id, subgroup, 0, payload_length=OCTETS)
        self._writers[location] = self._streams[group, subgroup].begin(header, 0.0)
        self._write(location, slice(0, OCTETS // 2))

    def complete(self, group: int, object_id: int) -> None:
        self._write(Location(group, object_id), slice(OCTETS // 2, OCTETS))

    def finish(self, group: int, subgroup: int = 0) -> None:
        self._streams.pop((group, subgroup)).finish()

    def reset(self, group: int, subgroup: int = 0) -> None:
        self._streams.pop((group, subgroup)).reset(StreamCode.INTERNAL_ERROR)

    def _write(self, location: Location, part: slice) -> None:
        self._writers[location].write(memoryview(payload(location, OCTETS))[part])


class World:
    """Two relays that have the Track, one below both, and a consumer there."""

    def __init__(self, limits: RelayLimits | None = None) -> None:
        self.uppers = [Hub(relay_id=A), Hub(relay_id=C)]
        self.lower = Hub(limits, relay_id=B)
        self.links = [self.lower.link(upper, rank) for rank, upper in enumerate(self.uppers)]
        self.producers = [PublisherPeer(upper) for upper in self.uppers]
        self.tracks = [producer.track() for producer in self.producers]
        self.streaming = [Streaming(track) for track in self.tracks]
        self.consumer = ConsumerPeer(self.lower)

    def put_group(self, group: int) -> None:
        for track in self.tracks:
            put_group(track, group, OBJECTS)
        self.lower.run()

    def lose(self, which: int = 0) -> None:
        """The session with an upstream is lost."""
        self.uppers[which].disconnect(self.links[which])
        self.lower.run()

    @property
    def stats(self) -> tuple[int, int]:
        return self.lower.core.stats.failovers, self.lower.core.stats.failovers_failed

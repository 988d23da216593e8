"""A publication made by hand, with whatever faults a test wants, behind a real server.

Its live tracks go to subscribers, its stored ones to FETCH: so what a subscription lost or damaged
can be whole where it is fetched again, or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from kvcs.kv import HEADER_OCTETS, MANIFEST, MANIFEST_COSE, DataTrack, ManifestWriter, PayloadHeader
from kvcs.moqt import events
from kvcs.moqt.data import SubgroupEncoder, SubgroupHeader
from kvcs.moqt.errors import DoesNotExist, NotSupported, PublishDoneCode
from kvcs.moqt.filters import LocationFilterType
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.sending.delivery import RangeSender
from kvcs.moqt.sending.publishing import location_filter
from kvcs.moqt.track.live import LiveStream
from kvcs.moqt.track.ranges import UnknownRun
from kvcs.moqt.track.store import Track
from kvcs.quic.connection import Connection, PeerRequest
from kvcs.quic.endpoint import Server
from tests.builders import Toy, toy_prefix
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import accepting, serving
from tests.unit.kv.toy import K0, V0

Blocks = Mapping[tuple[DataTrack, int], bytes | None]
"""Payloads instead of the right ones, by track and block; None leaves the Object out."""


def damaged(payload: bytes) -> bytes:
    """A payload with one octet of Data changed: its digest no longer fits."""
    return payload[:-1] + bytes([payload[-1] ^ 1])


def relabelled(payload: bytes, **fields: Any) -> bytes:
    """A payload whose header says something else."""
    header = replace(PayloadHeader.unpack(payload), **fields)
    return header.pack() + payload[HEADER_OCTETS:]


class RawPublication:
    """Tracks of a toy publication that a test fills by hand.

    Args:
        toy: what it should hold.
        manifest: name of its manifest track.
        publication_id: 16 octets.
    """

    def __init__(
        self, toy: Toy, *, manifest: bytes = MANIFEST, publication_id: bytes = bytes(16)
    ) -> None:
        self.toy = toy
        prefix = toy_prefix(sum(toy.blocks), descriptor=toy.descriptor)
        self.namespace = prefix.namespace(publication_id, toy.blocks[0])
        self.manifest_track = self.track(manifest)
        self.live = {name: self.track(name.name) for names in toy.segments for name in names}
        self.stored = {name: self.track(name.name) for names in toy.segments for name in names}
        self.requests: list[PeerRequest] = []
        """What peers asked for, in order."""
        self.asked = asyncio.Event()
        """Set on every request."""
        self.announced = True
        self.fetchable = True
        self.one_group_alone = False
        """Whether a FETCH of several Groups is refused as NOT_SUPPORTED."""
        self.revoked_fetches = 0
        """FETCHes that are accepted and taken back at once, from the next one on."""
        self.reset_fills: int | None = None
        """Code with which a fill is reset where something is unknown."""
        self.reset_at_once = False
        """Whether it is reset before anything of it is sent."""
        self.connections: list[Connection] = []
        self._versions = 0

    def track(self, name: bytes, *, authoritative: bool = True) -> Track:
        """A track of the publication."""
        return Track(FullTrackName(self.namespace, name), authoritative=authoritative)

    # Publishing

    def manifest(self, octets: bytes | None = None, *, layers: int | None = None) -> None:
        """Publish a version: of ``layers`` listed layers, by default all and complete."""
        if octets is None:
            count = self.toy.descriptor.layers
            writer: ManifestWriter = self.toy.writer(
                [count if layers is None else layers] * len(self.toy.blocks)
            )
            octets = writer.to_json_bytes()
        header = ObjectHeader(self._versions, 0, 0, 0, ObjectStatus.NORMAL, b"", len(octets))
        self.manifest_track.publish(header, (memoryview(octets),), self.now, end_of_group=True)
        self.manifest_track.finish_subgroup(self._versions, 0)
        self._versions += 1

    def layer(self, layer: int, live: Blocks | None = None, stored: Blocks | None = None) -> None:
        """Publish a layer on every track, right where nothing else is said."""
        for tracks, changed in ((self.live, live or {}), (self.stored, stored or {})):
            for name, track in tracks.items():
                self.group(track, name, layer, changed)

    def group(
        self, track: Track, name: DataTrack, layer: int, changed: Blocks | None = None
    ) -> None:
        """Publish a layer on one track."""
        blocks = self.toy.blocks[name.segment]
        for block in range(blocks):
            right = self.toy.objects[name, Location(layer, block)]
            payload = right if changed is None else changed.get((name, block), right)
            if payload is not None:
                self.put_object(track, Location(layer, block), payload)
        priority = 128 * layer // self.toy.descriptor.layers
        header = ObjectHeader(layer, blocks, 0, priority, ObjectStatus.END_OF_GROUP, b"", 0)
        track.publish(header, (), self.now, end_of_group=True)
        track.finish_subgroup(layer, 0)

    def layers(self, *layers: int) -> None:
        """Publish layers as they should be."""
        for layer in layers:
            self.layer(layer)

    def end(self, *, everywhere: bool = True) -> None:
        """End of Track and PUBLISH_DONE, on live tracks alone or on the stored ones, too."""
        for track in (*self.live.values(), *(self.stored.values() if everywhere else ())):
            self.end_of_track(track)
            track.end()

    def end_of_track(self, track: Track) -> None:
        """End of Track on one track."""
        layers = self.toy.descriptor.layers
        header = ObjectHeader(layers, 0, 0, 127, ObjectStatus.END_OF_TRACK, b"", 0)
        track.publish(header, (), self.now, end_of_group=True)
        track.finish_subgroup(header.group_id, 0)

    def abort(self, reason: str) -> None:
        """PUBLISH_DONE INTERNAL_ERROR on every track."""
        for track in (self.manifest_track, *self.live.values()):
            track.end(PublishDoneCode.INTERNAL_ERROR, reason, abandoned=True)

    def put_object(self, track: Track, location: Location, payload: bytes) -> None:
        """Publish one Object."""
        priority = 128 * location.group // self.toy.descriptor.layers
        header = ObjectHeader(*location, 0, priority, ObjectStatus.NORMAL, b"", len(payload))
        track.publish(header, (memoryview(payload),), self.now, end_of_group=True)

    def begin(
        self, name: DataTrack, layer: int, whole: int, part: int = 0, *, first: int = 0
    ) -> LiveStream:
        """Bring blocks of a layer live, from ``first`` up to ``whole``, and octets of the next.

        Returns:
            The stream, for `LiveStream.finish` or `LiveStream.reset`.
        """
        track = self.live[name]
        priority = 128 * layer // self.toy.descriptor.layers
        fresh = first == 0
        stream = track.open_stream(SubgroupHeader(0, layer, 0, priority, True, fresh, False))
        for block in range(first, whole + (part > 0)):
            payload = self.toy.objects[name, Location(layer, block)]
            header = ObjectHeader(layer, block, 0, priority, ObjectStatus.NORMAL, b"", len(payload))
            writer = stream.begin(header, self.now)
            writer.write(memoryview(payload[: len(payload) if block < whole else part]))
        return stream

    @property
    def now(self) -> float:
        """The loop's clock."""
        return asyncio.get_running_loop().time()

    # Serving

    @asynccontextmanager
    async def serve(self, files: PemFiles) -> AsyncIterator[Server]:
        """A server that has this publication and nothing else."""
        async with serving(files, observer=accepting(self.answer)) as server:
            yield server

    def answer(self, connection: Connection, request: PeerRequest) -> bool:
        """Answer one request of a peer."""
        responder = connection.core.responder
        if connection not in self.connections:
            self.connections.append(connection)
        self.requests.append(request)
        self.asked.set()
        if isinstance(request, events.SubscribeNamespaceReceived):
            prefix = request.track_namespace_prefix
            responder.accept(request.request_id)
            if self.announced and self.namespace[: len(prefix)] == prefix:
                responder.namespace(request.request_id, self.namespace[len(prefix) :])
            return True
        if isinstance(request, events.PublishNamespaceReceived | events.TrackStatusReceived):
            return False
        is_fetch = isinstance(request, events.FetchReceived)
        tracks = self.stored if is_fetch else self.live
        known = {track.name: track for track in (*tracks.values(), self.manifest_track)}
        track = known.get(request.full_track_name)
        if track is None or (is_fetch and not self.fetchable):
            responder.refuse(request.request_id, DoesNotExist("no such track"))
        elif is_fetch and self.one_group_alone and _spans_groups(request):
            responder.refuse(request.request_id, NotSupported("one Group at a time"))
        elif is_fetch:
            responder.accept_fetch(request.request_id, track, connection.now)
            if self.revoked_fetches:
                self.revoked_fetches -= 1
                responder.revoke(request.request_id)
        else:
            responder.accept_subscribe(request.request_id, track, connection.now, self._unknown)
        return True

    def _unknown(self, sender: RangeSender, run: UnknownRun) -> bool:
        if self.reset_fills is None:
            return False
        if self.reset_at_once:
            sender.fail(self.reset_fills)
        else:
            asyncio.get_running_loop().call_soon(sender.fail, self.reset_fills)
        return True

    # Faults that no Track would let through

    async def subscribed(self, name: DataTrack, times: int = 1) -> HandMade:
        """Wait until a peer subscribes to a track, for the so-manieth time.

        Returns:
            What writes streams to it.
        """
        full_track_name = self.live[name].name
        while True:
            found = [
                request
                for request in self.requests
                if isinstance(request, events.SubscribeReceived)
                and request.full_track_name == full_track_name
            ]
            if len(found) >= times:
                request_id = found[times - 1].request_id
                return HandMade(self.connections[-1], request_id, self.toy, name)
            self.asked.clear()
            await self.asked.wait()

    def asks(self, kind: type[PeerRequest]) -> list[PeerRequest]:
        """Requests of one kind so far."""
        return [request for request in self.requests if isinstance(request, kind)]


def _spans_groups(request: PeerRequest) -> bool:
    chosen = location_filter(request.parameters)
    bounded = (LocationFilterType.ABSOLUTE_GROUP_END, LocationFilterType.ABSOLUTE_RANGE)
    return chosen is None or chosen.type not in bounded or chosen.end_group_delta > 0


class HandMade:
    """Writes octets of subgroup streams past the session core that would refuse them."""

    def __init__(self, connection: Connection, request_id: int, toy: Toy, name: DataTrack) -> None:
        self._connection = connection
        self._toy = toy
        self._name = name
        self._request_id = request_id
        self._alias = connection.core.deliveries._subscriptions[request_id].track_alias

    def stream(
        self,
        layer: int,
        *objects: tuple[int, bytes | int],
        end_of_group: bool = True,
        fin: bool = True,
    ) -> None:
        """One whole stream of a layer: Object IDs with payloads, or with status codes."""
        priority = 128 * layer // self._toy.descriptor.layers
        header = SubgroupHeader(self._alias, layer, 0, priority, end_of_group, True, False)
        encoder = SubgroupEncoder(header)
        octets = bytearray(header.encode())
        for object_id, content in objects:
            if isinstance(content, bytes):
                fields = ObjectHeader(layer, object_id, payload_length=len(content))
                octets += encoder.object(fields) + content
            else:
                placeholder = ObjectHeader(layer, object_id, status=ObjectStatus.END_OF_GROUP)
                octets += encoder.object(placeholder)[:-1] + bytes([content])
        transport = self._connection.transport
        stream_id = self._connection.core._take_uni()
        transport.send(stream_id, bytes(octets), fin)
        transport.flush()

    def drop(self, status: int | None, reason: str = "") -> None:
        """End the subscription with PUBLISH_DONE, or without where ``status`` is None."""
        responder = self._connection.core.responder
        if status is None:
            responder.revoke(self._request_id)
        else:
            responder.end_subscription(self._request_id, status, reason)

    def reset(self, layer: int) -> None:
        """Open the stream of a layer and reset it before its first Object."""
        header = SubgroupHeader(self._alias, layer, 0, 0, True, True, False)
        transport = self._connection.transport
        stream_id = self._connection.core._take_uni()
        transport.send(stream_id, header.encode(), False)
        transport.flush()
        transport.reset(stream_id, 1)
        transport.flush()

    def blocks(self, layer: int, *blocks: int) -> list[tuple[int, bytes | int]]:
        """The right Objects of some blocks, for `stream`."""
        return [(block, self._toy.objects[self._name, Location(layer, block)]) for block in blocks]


__all__ = [
    "K0",
    "MANIFEST_COSE",
    "V0",
    "HandMade",
    "RawPublication",
    "damaged",
    "relabelled",
]

"""Layers leave in the order in which a consumer needs them, K and V side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import kvcs
from kvcs.moqt.data import (
    FetchHeader,
    FetchParser,
    ObjectStarted,
    SubgroupHeader,
    SubgroupParser,
    read_stream_header,
)
from kvcs.moqt.events import RequestAccepted
from kvcs.moqt.names import GroupOrder
from kvcs.moqt.wire import Reader
from kvcs.publisher.segment import layer_priority
from kvcs.quic.connection import Connection
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import Wire, joined, serving

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@dataclass
class Sent:
    """What a session hands to the QUIC library, held back until `release`."""

    connection: Connection
    groups: list[tuple[str, int]] = field(default_factory=list)
    """Track or stream, and Group, of each Object with a payload in the order it was handed over."""
    _parsers: dict[int, tuple[str, SubgroupParser | FetchParser]] = field(default_factory=dict)
    _octets: Callable[[], int] | None = None

    def hold(self, due: Callable[[], bool] = lambda: True) -> None:
        """Give no credit for Objects from when it is due, and note what is handed over."""
        transport: Any = self.connection.transport
        self._octets, send_all = transport.octets, transport.send_all
        octets = self._octets
        transport.octets = lambda: 0 if due() else octets()

        def noting(stream_id: int, parts: Any, fin: bool) -> None:
            self._note(stream_id, memoryview(b"".join(parts)))
            send_all(stream_id, parts, fin)

        transport.send_all = noting

    def release(self) -> None:
        """Give credit again."""
        transport: Any = self.connection.transport
        transport.octets = self._octets
        self.connection.batch_received()

    def _note(self, stream_id: int, data: memoryview) -> None:
        if stream_id not in self._parsers:
            if stream_id & 3 != 3:
                return  # not a unidirectional stream of the server
            reader = Reader(data)
            header = read_stream_header(reader)
            if isinstance(header, SubgroupHeader):
                parser: Any = SubgroupParser(header)
                name = f"alias {header.track_alias}"
            elif isinstance(header, FetchHeader):
                parser, name = FetchParser(GroupOrder.ASCENDING), f"request {header.request_id}"
            else:
                return
            self._parsers[stream_id] = name, parser
            data = data[reader.pos :]
        name, parser = self._parsers[stream_id]
        for item in parser.feed(data):
            if isinstance(item, ObjectStarted) and item.header.payload_length == 68 + 128:
                self.groups.append((name, item.header.group_id))


def in_use_order(sent: Sent, layers: range) -> bool:
    """Whether both tracks' Objects of a layer precede those of the next, on every track."""
    assert len({name for name, _ in sent.groups}) == 2
    return [group for _, group in sent.groups] == [layer for layer in layers for _ in range(6)]


@pytest.mark.parametrize("layers", [8, 140])
async def test_layers_that_wait_leave_in_order_and_k_with_v(files: PemFiles, layers: int) -> None:
    """Beyond 128 layers neighbours share a priority: then the Group decides."""
    toy = toy_publication(layers=layers)
    prefix, wire = toy_prefix(descriptor=toy.descriptor), Wire()
    async with serving(files) as server, joined(server, files, wire) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                await wire.until(lambda: len(wire.of(RequestAccepted)) == 4)
                (connection,) = server.connections
                sent = Sent(connection)
                sent.hold()
                await put(await publication.segment(), toy)
                assert sent.groups == []
                sent.release()
                assert all([same(layer, toy) async for layer in cache])
            assert in_use_order(sent, range(layers))


async def test_a_late_consumer_of_some_layers_gets_them_in_order(files: PemFiles) -> None:
    toy = toy_publication(layers=8)
    prefix, wire = toy_prefix(descriptor=toy.descriptor), Wire()
    async with serving(files) as server, joined(server, files, wire) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            segment = await publication.segment()
            await put(segment, toy)
            for options, layers in (({}, range(8)), ({"layers": (4, 7)}, range(4, 8))):
                (connection,) = server.connections
                sent = Sent(connection)
                # The manifest may go; nothing else once a data track is asked for.
                sent.hold(lambda: any(track.followed for track in segment.tracks))
                wire.events.clear()
                opening = kvcs.Subscriber(client, settings=QUICK).open(prefix, **options)  # type: ignore[arg-type]
                async with opening as cache:
                    await wire.until(lambda: len(wire.of(RequestAccepted)) == 4)
                    assert sent.groups == []
                    sent.release()
                    assert all([same(layer, toy) async for layer in cache])
                assert in_use_order(sent, layers)


async def test_what_waits_below_the_session_leaves_in_order_too(files: PemFiles) -> None:
    """The session hands over megabytes at once; on the wire one layer follows the other."""
    descriptor = kvcs.Descriptor(
        model="order",
        weights=kvcs.UNPINNED,
        layers=4,
        kv_heads=4,
        head_dim=64,
        dtype="float32",
        block_tokens=64,
    )
    tokens = 4 * descriptor.block_tokens
    prefix = kvcs.Prefix(kvcs.Scope(key=bytes(32)), descriptor, range(tokens))
    layer = np.zeros((tokens, 4, 64), np.float32)
    wire = Wire()
    async with serving(files) as server, joined(server, files, wire) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                await wire.until(lambda: len(wire.of(RequestAccepted)) == 4)
                (connection,) = server.connections
                sent = Sent(connection)
                sent.hold()
                frames, reached = _frames(connection)
                segment = await publication.segment()
                for index in range(4):
                    await segment.put(index, layer, layer)
                sent.release()
                assert [each.index async for each in cache] == [0, 1, 2, 3]
            layers: dict[int, int] = {}
            for stream_id, (_, parser) in sent._parsers.items():
                if reached.get(stream_id, 0) > layer.nbytes:  # not the manifest's
                    assert isinstance(parser, SubgroupParser)
                    layers[stream_id] = parser.header.group_id
    order = [layers[stream_id] for stream_id in frames if stream_id in layers]
    assert len(layers) == 8 and len(order) > 16 and order == sorted(order)
    of_first = [stream_id for stream_id in frames if layers.get(stream_id) == 0]
    assert len(set(of_first[:6])) == 2, "K and V of a layer have turns"


def _frames(connection: Connection) -> tuple[list[int], dict[int, int]]:
    """Streams of Objects in the order in which their octets first leave, and how far each came.

    Both go on to grow.
    """
    transport: Any = connection.transport
    quic = transport._quic
    streams: list[int] = []
    reached: dict[int, int] = {}
    register = quic._register

    def noting(filling: Any, now: float) -> None:
        for number in sorted(filling.sent):
            for sender, start, stop, _ in getattr(filling.sent[number], "frames", ()):
                stream_id = sender._stream_id
                if start >= reached.get(stream_id, 0):
                    streams.append(stream_id)
                    reached[stream_id] = stop
        register(filling, now)

    quic._register = noting
    return streams, reached


def test_priorities_spread_over_half_the_range_and_never_beyond() -> None:
    assert [layer_priority(layer, 8) for layer in range(8)] == list(range(0, 128, 16))
    for layers in range(1, 1001):
        priorities = [layer_priority(layer, layers) for layer in range(layers)]
        assert priorities == sorted(priorities)
        assert priorities[0] == 0 and priorities[-1] <= 127

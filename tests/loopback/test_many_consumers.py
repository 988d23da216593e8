"""Many consumers of one live publication through our relay: each Object once, and sent once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

import kvcs
from kvcs.moqt.data import (
    FetchHeader,
    FetchParser,
    ObjectChunk,
    ObjectStarted,
    SubgroupHeader,
    SubgroupParser,
    read_stream_header,
)
from kvcs.moqt.names import GroupOrder, Location
from kvcs.moqt.wire import Reader
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import open_connection
from kvcs.quic.transport import Buffer
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import SESSION, Wire

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

CONSUMERS = 10
LAYERS = 9
TRACKS = ("k.raw.s0", "v.raw.s0")


class Outgoing:
    """The octets that a connection sends on unidirectional streams, by stream."""

    def __init__(self, connection: Connection) -> None:
        self._streams: dict[int, bytearray] = {}
        self._send_all = connection.transport.send_all
        connection.transport.send_all = self._note  # type: ignore[method-assign]

    def _note(self, stream_id: int, pieces: Sequence[Buffer], fin: bool) -> None:
        if stream_id & 2:
            for piece in pieces:
                self._streams.setdefault(stream_id, bytearray()).extend(piece)
        self._send_all(stream_id, pieces, fin)

    def objects(self) -> Counter[tuple[bytes, Location]]:
        """How often each KVCS Object was sent: by its component and codec, and its Location."""
        found: Counter[tuple[bytes, Location]] = Counter()
        for octets in self._streams.values():
            reader = Reader(bytes(octets))
            header = read_stream_header(reader)
            parser: SubgroupParser | FetchParser
            if isinstance(header, SubgroupHeader):
                parser = SubgroupParser(header)
            elif isinstance(header, FetchHeader):
                parser = FetchParser(GroupOrder.ASCENDING)
            else:
                continue
            location = Location(0, 0)
            begun = False
            for item in parser.feed(memoryview(octets)[reader.pos :]):
                if isinstance(item, ObjectStarted):
                    location, begun = item.header.location, True
                elif isinstance(item, ObjectChunk) and begun:
                    begun = False
                    payload = PayloadStart(item.data)
                    if payload.is_data:
                        found[payload.component, location] += 1
        return found


class PayloadStart:
    """The first octets of a payload: KVCS data, or a manifest."""

    def __init__(self, octets: memoryview) -> None:
        self.is_data = bytes(octets[:4]) == b"KVO1"
        self.component = bytes(octets[5:6])


@pytest.mark.parametrize("seed", [1, 2])
async def test_ten_consumers_through_a_relay_get_every_object_once(
    files: PemFiles, seed: int
) -> None:
    chance = random.Random(seed)
    toy = toy_publication(layers=LAYERS)
    prefix = toy_prefix(descriptor=toy.descriptor)
    moments = [chance.randrange(-1, LAYERS) for _ in range(CONSUMERS)]
    joining = {moment: asyncio.Event() for moment in range(-1, LAYERS)}
    settings = kvcs.RelaySettings(
        cert=files.cert, key=files.key, port=0, allow_anyone=True, session=SESSION
    )
    async with kvcs.Relay(settings) as relay, AsyncExitStack() as stack:
        wires = [Wire() for _ in range(CONSUMERS)]

        async def client(wire: Wire) -> Connection:
            connection = await open_connection(relay.url, ca=files.ca, observer=wire.observe)
            stack.push_async_callback(connection.close)
            wire.attach(connection)
            return connection

        clients = [await client(wire) for wire in wires]
        producer = await open_connection(relay.url, ca=files.ca)
        stack.push_async_callback(producer.close)
        outgoing = Outgoing(producer)

        async def consume(number: int) -> kvcs.CacheReport:
            await joining[moments[number]].wait()
            async with kvcs.Subscriber(clients[number], settings=QUICK).open(prefix) as cache:
                seen = []
                async for layer in cache:
                    assert same(layer, toy)
                    seen.append(layer.index)
            assert seen == list(range(LAYERS))
            return cache.report

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(consume(number)) for number in range(CONSUMERS)]
            async with kvcs.Publisher(producer).publish(prefix) as publication:
                joining[-1].set()
                segment = await publication.segment()
                for layer in range(LAYERS):
                    await put(segment, toy, [layer])
                    joining[layer].set()
                    # Some who join now are waited for, so that joins fall at every stage.
                    for wire, moment in zip(wires, moments, strict=True):
                        if moment == layer and chance.random() < 0.5:
                            await wire.until(lambda wire=wire: len(wire.asked) > 1)  # type: ignore[misc]
                reports = [await task for task in tasks]

    blocks = sum(toy.blocks)
    once = {Location(layer, block): 1 for layer in range(LAYERS) for block in range(blocks)}
    for wire, report in zip(wires, reports, strict=True):
        assert [wire.objects(name) for name in TRACKS] == [once, once]
        assert (report.objects, report.duplicates, report.refetches) == (
            2 * blocks * LAYERS,
            0,
            0,
        )
    # However many consumers there were, the producer sent each Object once.
    sent = outgoing.objects()
    assert all(count == 1 for count in sent.values())
    assert len(sent) == 2 * blocks * LAYERS

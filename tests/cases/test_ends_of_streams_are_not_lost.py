"""A FIN that follows octets which were acknowledged long ago arrives, and no layer waits for it."""

from __future__ import annotations

import random

import pytest

import kvcs
from tests.builders import QUICK, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import joined
from tests.loopback.raw_publication import K0, V0, RawPublication
from tests.loopback.recorder import connect, end, serve
from tests.loopback.shim import Shim
from tests.unit.quic.pair import Pair

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LOSS = 0.01


@pytest.mark.parametrize("count", [500, pytest.param(5000, marks=pytest.mark.slow)])
async def test_late_fins_arrive_on_a_path_that_loses(count: int) -> None:
    rng = random.Random(count)
    pair = Pair()
    for side in (pair.client, pair.server):
        side.drop = lambda data: rng.random() < LOSS
    client, arrived = pair.client.transport, pair.server.receiver
    ended = 0
    while ended < count:
        streams = [2 + 4 * (ended + index) for index in range(min(client.uni_streams(), 100))]
        streams = streams[: count - ended]
        for stream_id in streams:
            client.send(stream_id, b"group", False)
        client.flush()
        pair.clock.run_until(lambda: client.unacknowledged() == 0)
        for stream_id in streams:
            client.send(stream_id, b"", True)
            client.flush()
        ended += len(streams)
        pair.clock.run_until(lambda: len(arrived.finished) == ended and client.uni_streams() > 0)  # noqa: B023
    pair.clock.run_until(lambda: client.unacknowledged() == 0)
    assert all(data == b"group" for data in arrived.data.values())
    assert len(arrived.data) == count


async def test_late_fins_arrive_over_sockets(files: PemFiles) -> None:
    rng = random.Random(52)
    server = await serve(files)
    shim = await Shim.start(server.port, lost=lambda data: rng.random() < LOSS)
    client = await connect(server, port=shim.port)
    accepted = await server.receiver()
    transport = client.transport
    streams = [2 + 4 * index for index in range(200)]
    for stream_id in streams:
        transport.send(stream_id, b"group", False)
    transport.flush()
    await client.until(lambda: transport.unacknowledged() == 0)
    for stream_id in streams:
        transport.send(stream_id, b"", True)
        transport.flush()
    await accepted.until(lambda: accepted.finished == set(streams))
    await client.until(lambda: transport.unacknowledged() == 0)
    assert all(accepted.data[stream_id] == b"group" for stream_id in streams)
    await end(server, client)
    shim.close()


async def test_layers_are_usable_though_no_stream_ever_ends(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest()
    async with raw.serve(files) as server, joined(server, files) as client:
        async with kvcs.Subscriber(client, settings=QUICK).open(toy_prefix()) as cache:
            keys, values = await raw.subscribed(K0), await raw.subscribed(V0)
            for layer in range(raw.toy.descriptor.layers):
                for hand in (keys, values):
                    hand.stream(layer, *hand.blocks(layer, 0, 1, 2), fin=False)
                assert same(await cache.layer(layer), raw.toy)

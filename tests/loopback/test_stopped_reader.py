"""A consumer whose process reads nothing costs a relay and a producer a bounded buffer."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import pytest

import kvcs
from kvcs.kv import UNPINNED
from tests.builders import QUICK
from tests.certificates import PemFiles

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

BUDGET = 64 * 1024
SMALL = kvcs.QuicSettings(send_buffer=BUDGET, send_buffer_limit=BUDGET)

CONTROL = 1024
"""Octets of control messages and FINs, which no budget holds up."""

LAYERS, BLOCKS = 8, 16
DESCRIPTOR = kvcs.Descriptor(
    model="toy",
    weights=UNPINNED,
    layers=LAYERS,
    kv_heads=4,
    head_dim=64,
    dtype="float16",
    block_tokens=16,
)
PREFIX = kvcs.Prefix(kvcs.Scope(key=bytes(range(32))), DESCRIPTOR, list(range(16 * BLOCKS)))

Pairs = list[tuple[np.ndarray, np.ndarray]]


def arrays() -> Pairs:
    """K and V of each layer, 2 MiB in all."""
    rng = np.random.default_rng(3)
    shape = (16 * BLOCKS, 4, 64)
    return [
        (rng.random(shape).astype(np.float16), rng.random(shape).astype(np.float16))
        for _ in range(LAYERS)
    ]


async def read(cache: kvcs.Cache, wanted: Pairs) -> None:
    """Take every layer, and hold it to what was published."""
    seen = 0
    async for layer in cache:
        assert np.array_equal(layer.k, wanted[layer.index][0])
        assert np.array_equal(layer.v, wanted[layer.index][1])
        seen += 1
    assert seen == LAYERS


def held(connection: kvcs.Connection) -> int:
    """Octets that a session has given its QUIC library, which keeps them until acknowledged."""
    return connection.transport.unacknowledged()


async def test_a_relay_holds_a_bounded_buffer_for_a_consumer_that_stops_reading(
    files: PemFiles,
) -> None:
    layers, loop = arrays(), asyncio.get_running_loop()
    settings = kvcs.RelaySettings(
        cert=files.cert, key=files.key, port=0, allow_anyone=True, quic=SMALL
    )
    async with AsyncExitStack() as stack:
        relay = await stack.enter_async_context(kvcs.Relay(settings))
        session = await stack.enter_async_context(kvcs.connect(relay.url, ca=files.ca, quic=SMALL))
        publication = await stack.enter_async_context(kvcs.Publisher(session).publish(PREFIX))
        segment = await publication.segment(blocks=BLOCKS)
        await segment.put(0, *layers[0])
        caches = []
        consumers = []
        for _ in range(2):
            consumers.append(await stack.enter_async_context(kvcs.connect(relay.url, ca=files.ca)))
            opening = kvcs.Subscriber(consumers[-1], settings=QUICK).open(PREFIX, deadline=50)
            caches.append(await stack.enter_async_context(opening))
        reading, stopped = caches
        await stopped.layer(0)
        wire = consumers[1].transport._wire  # type: ignore[attr-defined]
        loop.remove_reader(wire._sock)
        for index, (k, v) in enumerate(layers[1:], 1):
            await segment.put(index, k, v)
            await reading.layer(index)
            for connection in (session, *relay._keys):
                assert held(connection) <= BUDGET + CONTROL
        segment.finish()
        await read(reading, layers)
        waiting = [held(connection) for connection in relay._keys]
        assert max(waiting) > BUDGET // 2, "what the stopped one does not take waits with the relay"
        wire._watch()
        await read(stopped, layers)


async def test_a_producer_holds_a_bounded_buffer_for_a_consumer_that_stops_reading(
    files: PemFiles,
) -> None:
    layers, loop = arrays(), asyncio.get_running_loop()
    async with (
        kvcs.serve("127.0.0.1", 0, cert=files.cert, key=files.key, quic=SMALL) as server,
        kvcs.connect(server.url, ca=files.ca) as consumer,
        kvcs.Publisher(server).publish(PREFIX) as publication,
    ):
        segment = await publication.segment(blocks=BLOCKS)
        await segment.put(0, *layers[0])
        async with kvcs.Subscriber(consumer, settings=QUICK).open(PREFIX, deadline=50) as cache:
            await cache.layer(0)
            [connection] = server.connections
            wire = consumer.transport._wire  # type: ignore[attr-defined]
            loop.remove_reader(wire._sock)
            for index, (k, v) in enumerate(layers[1:], 1):
                await segment.put(index, k, v)
                assert held(connection) <= BUDGET + CONTROL
            segment.finish()
            wire._watch()
            await read(cache, layers)

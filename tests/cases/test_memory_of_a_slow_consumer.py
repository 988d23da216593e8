"""A producer's memory does not grow with what a consumer leaves lying."""

from __future__ import annotations

import asyncio
import tracemalloc

import numpy as np
import pytest

import kvcs
from kvcs.kv import UNPINNED
from tests.builders import QUICK
from tests.certificates import PemFiles

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

MIB = 2**20
BUDGET = MIB
LAYERS, TOKENS = 16, 1024
DESCRIPTOR = kvcs.Descriptor(
    model="toy",
    weights=UNPINNED,
    layers=LAYERS,
    kv_heads=4,
    head_dim=64,
    dtype="float16",
    block_tokens=64,
)
PREFIX = kvcs.Prefix(kvcs.Scope(key=bytes(range(32))), DESCRIPTOR, list(range(TOKENS)))


@pytest.mark.parametrize("lend", [True, False], ids=["lent", "copied"])
async def test_put_waits_for_no_consumer_and_holds_one_buffer_for_it(
    files: PemFiles, lend: bool
) -> None:
    k = np.random.default_rng(5).random((TOKENS, 4, 64)).astype(np.float16)
    cache_octets = 2 * LAYERS * k.nbytes
    quic = kvcs.QuicSettings(send_buffer=BUDGET, send_buffer_limit=BUDGET)
    async with (
        kvcs.serve("127.0.0.1", 0, cert=files.cert, key=files.key, quic=quic) as server,
        kvcs.connect(server.url, ca=files.ca) as consumer,
        kvcs.Publisher(server).publish(PREFIX) as publication,
    ):
        segment = await publication.segment()
        await segment.put(0, k, k, lend=lend)
        async with kvcs.Subscriber(consumer, settings=QUICK).open(PREFIX, deadline=60) as cache:
            await cache.layer(0)
            [connection] = server.connections
            wire = consumer.transport._wire  # type: ignore[attr-defined]
            asyncio.get_running_loop().remove_reader(wire._sock)
            tracemalloc.start()
            try:
                for layer in range(1, LAYERS):
                    await segment.put(layer, k, k, lend=lend)
                    assert connection.transport.unacknowledged() <= BUDGET + 4096
                async with asyncio.timeout(20):
                    # No event tells when what may wait below us is there.
                    while connection.transport.unacknowledged() <= BUDGET // 2:  # noqa: ASYNC110
                        await asyncio.sleep(0)
                grown, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert grown < BUDGET + MIB + (0 if lend else cache_octets), "and its own copies"
            wire._watch()
            async for each in cache:
                assert each.k.tobytes() == each.v.tobytes() == k.tobytes()

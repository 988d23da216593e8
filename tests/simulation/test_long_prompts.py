"""A long prompt of a deep model, all counts real and the heads tiny: what it costs is so much for
each Object, in time and in memory, whatever its length. `docs/limits.md` states the bounds."""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from dataclasses import dataclass
from time import process_time
from typing import Any

import numpy as np
import pytest

import kvcs
from kvcs.moqt.track.stored import OBJECT_BOOKKEEPING_OCTETS
from kvcs.testing.network import Conditions, Network, leftovers, run

LAYERS = 80
TOKENS = 131_072
BLOCK_TOKENS = 128
HEADER = 68

MANIFEST_OCTETS = 67
"""Of one digest: 64 characters, two quotes and a comma."""

LEDGER_OCTETS = 33
"""Of one Object in the consumer's ledger: its state and its digest."""

PEAK_OCTETS = 4096
"""Of one Object in producer and consumer together, at most, all of Python's objects included."""


@dataclass
class Cost:
    """What one publication and one retrieval of it took."""

    objects: int
    seconds: float = 0.0
    """CPU time of both ends."""

    manifest: int = 0
    """Octets of the last manifest."""

    held: int = 0
    """Octets that the producer's store counts."""

    ledger: int = 0
    """Octets of the consumer's ledger, without the tensors."""


def retrieved(tokens: int, block_tokens: int) -> Cost:
    """Publish a prompt and retrieve it, through whole sessions on a virtual network."""
    cost = Cost(tokens // block_tokens * LAYERS * 2)
    began = process_time()  # what other processes take does not count
    run(_main(tokens, block_tokens, cost))
    cost.seconds = process_time() - began
    return cost


async def _main(tokens: int, block_tokens: int, cost: Cost) -> None:
    network = Network(1, conditions=Conditions(delay=0.001))
    descriptor = kvcs.Descriptor(
        model="deep",
        weights=kvcs.UNPINNED,
        layers=LAYERS,
        kv_heads=1,
        head_dim=1,
        dtype="int8",
        block_tokens=block_tokens,
    )
    prefix = kvcs.Prefix(kvcs.Scope(key=bytes(32)), descriptor, range(tokens))
    tensor = np.random.default_rng(1).integers(-128, 128, (tokens, 1, 1), dtype=np.int8)
    over = asyncio.Event()

    async def produce(publisher: kvcs.Publisher) -> None:
        async with publisher.publish(prefix) as publication:
            segment = await publication.segment()
            for layer in range(LAYERS):
                await segment.put(layer, np.roll(tensor, layer), np.roll(tensor, -layer))
            cost.held = publisher.held_octets
            cost.manifest = publication._writer.octets
            await over.wait()

    with network.host("producer") as host:
        async with kvcs.serve(host.address, 4433, cert="unused", key="unused") as server:
            producing = asyncio.create_task(produce(kvcs.Publisher(server)))
            with network.host("consumer"):
                async with kvcs.connect("moqt://producer:4433") as session:
                    async with kvcs.Subscriber(session).open(prefix, deadline=3000.0) as cache:
                        async for layer in cache:
                            assert np.array_equal(layer.k, np.roll(tensor, layer.index))
                            assert np.array_equal(layer.v, np.roll(tensor, -layer.index))
                        await cache.complete()
                        assert cache.report.objects == cost.objects
                        assert cache.usable_tokens == tokens
                        cost.ledger = _octets(cache)
            over.set()
            await producing
    await asyncio.sleep(60.0)
    assert leftovers(network) == []


def _octets(cache: kvcs.Cache) -> int:
    ledger: Any = cache._retrieval.ledger
    return sum(
        sys.getsizeof(row) + sys.getsizeof(row.states) + sys.getsizeof(row.digests)
        for lane in ledger._lanes.values()
        for row in lane.rows.values()
    )


def check_octets(cost: Cost, block_tokens: int) -> None:
    """What is counted stays within what `docs/limits.md` states."""
    rows = LAYERS * 2
    assert cost.manifest <= MANIFEST_OCTETS * cost.objects + 3 * rows + 2048
    payload = HEADER + block_tokens
    versions = 16 * cost.manifest  # none repeats what the one before it had, so far fewer
    assert cost.held <= cost.objects * (payload + OBJECT_BOOKKEEPING_OCTETS) + versions
    assert cost.ledger <= LEDGER_OCTETS * cost.objects + 256 * rows


@pytest.mark.slow
def test_memory_for_an_object_is_bounded() -> None:
    retrieved(64, 16)  # what is imported and made once does not count
    tracemalloc.start()
    try:
        cost = retrieved(512, 16)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    check_octets(cost, 16)
    assert peak <= PEAK_OCTETS * cost.objects + (8 << 20)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_131072_tokens_of_80_layers_cost_as_much_for_each_object_as_a_tenth() -> None:
    part = retrieved(TOKENS // 10 // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS)
    whole = retrieved(TOKENS, BLOCK_TOKENS)
    assert whole.objects == 163_840
    check_octets(whole, BLOCK_TOKENS)
    for_each = [cost.seconds / cost.objects for cost in (part, whole)]
    assert for_each[1] < 3 * for_each[0], "time is not linear in the number of Objects"

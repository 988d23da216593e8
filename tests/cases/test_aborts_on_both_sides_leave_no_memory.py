"""Publications and retrievals that both sides give up at any moment: memory does not grow."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path

import pytest

import kvcs
from tests.builders import QUICK, put, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import joined, serving
from tests.loopback.test_lifetimes import back_to, exchange, server_side, tables, turns

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

STATM = Path("/proc/self/statm")
PAGE_OCTETS = 4096


def resident_octets() -> int:
    """Memory of this process now."""
    gc.collect()
    return int(STATM.read_text().split()[1]) * PAGE_OCTETS


@pytest.mark.skipif(not STATM.exists(), reason="reads the memory of the process from /proc")
@pytest.mark.parametrize("cycles", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
async def test_memory_is_what_it_was(files: PemFiles, cycles: int) -> None:
    """The kind of fault: state that waits for an event which cannot come any more."""
    chance = random.Random(31)
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        publisher = kvcs.Publisher(server)
        await exchange(client)
        peer = server_side(server)
        before = tables(client), tables(peer)

        async def produce(opened: asyncio.Event) -> None:
            async with publisher.publish(prefix) as publication:
                segment = await publication.segment()
                opened.set()
                await put(segment, toy, range(2))
                await asyncio.Event().wait()

        async def consume() -> None:
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                await cache.layer(1)
                await cache.layer(3)

        async def cycle() -> None:
            opened = asyncio.Event()
            producer = asyncio.create_task(produce(opened))
            await opened.wait()
            consumer = asyncio.create_task(consume())
            tasks = [producer, consumer]
            chance.shuffle(tasks)
            for task in tasks:
                await turns(chance.randrange(120))
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, (asyncio.CancelledError, kvcs.KvcsError)), result

        after_first = 0
        for number in range(cycles):
            await cycle()
            if number == cycles // 10:
                await back_to(before, client, peer)
                after_first = resident_octets()
        await back_to(before, client, peer)
        assert publisher.held_octets == 0 and publisher.publications == ()
        if cycles >= 1000:
            assert resident_octets() <= 1.05 * after_first

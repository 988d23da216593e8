"""Roles that show what a relay keeps of many publications: one makes and reads them, one relays."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import numpy as np

import kvcs
from kvcs.bench.parent import Parent
from kvcs.bench.roles.streaming import layers_of, prefix_of
from kvcs.bench.usage import Meter, resident_octets
from kvcs.bench.workload import KIB, MIB, Workload

SMALL: Final = Workload(32 * KIB, blocks=1, layers=1)
"""64 KiB in two Objects."""

LARGE: Final = Workload(256 * KIB, blocks=4, layers=4)
"""8 MiB in 32 Objects."""

CACHE_OCTETS: Final = 64 * MIB

AT_ONCE: Final = 8
"""Publications under way at a time."""

READ_SECONDS: Final = 120.0
"""Longest time for one of them."""


async def churner(parent: Parent, options: dict[str, Any]) -> None:
    """Make publications and read each through the relay, a batch for each word."""
    url, made = options["relay"], 0
    tensors = {load: list(layers_of(load, "same")) for load in (SMALL, LARGE)}
    gate = asyncio.Semaphore(AT_ONCE)
    async with (
        kvcs.connect(url, ca=options["ca"]) as producing,
        kvcs.connect(url, ca=options["ca"]) as consuming,
    ):
        publisher, subscriber = kvcs.Publisher(producing), kvcs.Subscriber(consuming)

        async def one(load: Workload, number: int) -> None:
            prefix = prefix_of(load, start=number * load.blocks * load.block_tokens)
            async with gate, publisher.publish(prefix) as publication:
                segment = await publication.segment()
                for index, (k, v) in enumerate(tensors[load]):
                    await segment.put(index, k, v)
                async with subscriber.open(prefix, deadline=READ_SECONDS) as cache:
                    async for layer in cache:
                        if not np.array_equal(layer.k.view(np.uint16), k.view(np.uint16)):
                            raise ValueError(
                                "the tensors that arrived are not those that were sent"
                            )
                        cache.drop(layer.index)

        parent.ready()
        await parent.word("go")
        meter = Meter()
        for _ in range(options["batches"]):
            loads = [SMALL] * options["small"] + [LARGE] * options["large"]
            await asyncio.gather(*(one(load, made + at) for at, load in enumerate(loads)))
            made += len(loads)
            parent.tell("batch")
            await parent.word("on")
        meter.stop()
        parent.tell("sent", **meter.reading())


async def relay(parent: Parent, options: dict[str, Any]) -> None:
    """Relay with a small cache, and tell how much memory is resident when asked."""
    settings = kvcs.RelaySettings(
        cert=options["cert"],
        key=options["key"],
        port=0,
        allow_anyone=True,
        limits=kvcs.RelayLimits(cache_octets=CACHE_OCTETS),
    )
    async with kvcs.Relay(settings) as listening:
        parent.ready(listening.url)
        await parent.word("go")
        meter = Meter()
        for _ in range(options["batches"]):
            await parent.word("look")
            parent.tell("memory", octets=resident_octets())
        meter.stop()
        parent.tell("sent", **meter.reading())

"""Memory of a relay under publications that come, are read, and go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import linear_regression
from typing import Any, Final

from kvcs.bench.children import ChildFailed, child
from kvcs.bench.figures import Process, Ratio, Sample
from kvcs.bench.plan import Case, Group, Scale
from kvcs.bench.roles.churn import CACHE_OCTETS, LARGE, SMALL
from kvcs.bench.transfer import Certificates

BATCHES: Final = 20

WARM: Final = 8
"""Batches after which the relay's cache is full and its memory is what it works with."""

SECONDS_EACH: Final = 2.0
"""Longest time for one small publication; a large one may take as long as a hundred."""

LARGE_PART: Final = 100
"""Small publications for each large one."""

GROWTH: Final = "relay_memory_growth_over_cache"


def churn(scale: Scale) -> Group:
    """Slope of a relay's memory under publications, small ones and large ones in turn."""
    each = max(1, scale.publications // (10 if scale.short else 1) // BATCHES)

    async def run(certificates: Certificates, _: int) -> Sample:
        return await measure(certificates, small=each, large=max(1, each // LARGE_PART))

    label = f"relay with a 64 MiB cache, {BATCHES * each} small publications"
    cases = [Case("churn_relay", label, run)]
    ratios = [Ratio(GROWTH, "churn_relay", metric=GROWTH)]
    about = "memory of a relay as publications come and go"
    return Group("churn", about, cases, ratios, rounds=1)


async def measure(certificates: Certificates, *, small: int, large: int) -> Sample:
    """Let publications through a relay, and look at its memory after each batch.

    Args:
        certificates: of the relay.
        small: small publications in a batch.
        large: large ones.

    Raises:
        ChildFailed: a process failed, or it took too long.
    """
    seconds = 60 + BATCHES * SECONDS_EACH * (small + LARGE_PART * large)
    options: dict[str, Any] = {
        "seconds": seconds,
        "batches": BATCHES,
        "small": small,
        "large": large,
        **certificates.to_json(),
    }
    try:
        async with asyncio.timeout(seconds), AsyncExitStack() as stack:
            relay = await stack.enter_async_context(child("watched-relay"))
            churner = await stack.enter_async_context(child("churner"))
            options["relay"] = await relay.ready(options)
            await churner.ready(options)
            for each in (relay, churner):
                each.tell("go")
            memory = []
            for _ in range(BATCHES):
                await churner.event("batch")
                relay.tell("look")
                memory.append(int((await relay.event("memory"))["octets"]))
                churner.tell("on")
            sent, relayed = await churner.event("sent"), await relay.event("sent")
    except TimeoutError:
        raise ChildFailed(f"publications were not through within {seconds:.0f} s") from None
    octets = BATCHES * (small * SMALL.octets + large * LARGE.octets)
    return Sample(
        octets=octets,
        seconds=sent["at"] - sent["started_at"],
        processes={"sender": _process(sent), "relay": _process(relayed)},
        objects=BATCHES * (small * SMALL.objects + large * LARGE.objects),
        values=slope_values(memory, small + large),
    )


def slope_values(memory: Sequence[int], batch: int) -> dict[str, float]:
    """What the memory of a relay does once it is warm.

    Args:
        memory: resident octets after each batch.
        batch: publications of a batch.
    """
    warm = memory[WARM:]
    slope = linear_regression(range(len(warm)), warm).slope
    return {
        "relay_memory_octets_per_publication": slope / batch,
        GROWTH: slope * (len(warm) - 1) / CACHE_OCTETS,
    }


def _process(said: dict[str, Any]) -> Process:
    return Process(said["cpu_seconds"], said["peak_octets"], said["before_octets"])

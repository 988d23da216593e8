"""Roles of kvcs itself: producer, consumer and relay, by the names that users type."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import kvcs
from bench.parent import Parent
from bench.usage import Meter
from bench.workload import DTYPE, HEAD_DIM, KV_HEADS, LAYERS, Workload

SCOPE_KEY: Final = bytes(range(32))
DEADLINE_SECONDS: Final = 60.0

Array = npt.NDArray[Any]


def prefix_of(workload: Workload) -> kvcs.Prefix:
    """The prefix that both sides know."""
    descriptor = kvcs.Descriptor(
        model="bench",
        weights=kvcs.UNPINNED,
        layers=LAYERS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=DTYPE,
        block_tokens=workload.block_tokens,
    )
    tokens = range(workload.blocks * workload.block_tokens)
    return kvcs.Prefix(kvcs.Scope(key=SCOPE_KEY), descriptor, tokens)


def layers_of(workload: Workload) -> Iterator[tuple[Array, Array]]:
    """K and V of each layer, in buffers that are used again, as an engine's are."""
    descriptor = prefix_of(workload).descriptor
    shape = (workload.blocks, workload.block_tokens, KV_HEADS, HEAD_DIM)
    random = np.random.default_rng(22)
    k, v = (random.integers(0, 2**16, shape, dtype=np.uint16) for _ in "kv")
    for layer in range(LAYERS):
        for component, array in enumerate((k, v)):
            array[:, 0, 0, 0] = 2 * layer + component  # every block differs in every layer
        joined = (-1, KV_HEADS, HEAD_DIM)
        dtype = descriptor.numpy_dtype
        yield k.view(dtype).reshape(joined), v.view(dtype).reshape(joined)


def digest_of(layers: Iterator[tuple[Array, Array]]) -> str:
    """SHA-256 over every octet of K and V of each layer."""
    digest = hashlib.sha256()
    for pair in layers:
        for array in pair:
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


async def producer(parent: Parent, options: dict[str, Any]) -> None:
    """Publish one layer after the other as fast as `put` takes them."""
    workload = Workload(**options["workload"])
    async with AsyncExitStack() as stack:
        session: kvcs.Connection | kvcs.Server
        if "relay" in options:
            url = options["relay"]
            session = await stack.enter_async_context(kvcs.connect(url, ca=options["ca"]))
        else:
            session = await stack.enter_async_context(
                kvcs.serve("127.0.0.1", 0, cert=options["cert"], key=options["key"])
            )
            url = session.url
        publisher = kvcs.Publisher(session)
        publication = await stack.enter_async_context(publisher.publish(prefix_of(workload)))
        segment = await publication.segment()
        layers = layers_of(workload)
        first = next(layers)
        parent.tell("ready", url=url)
        await parent.word("go")
        meter = Meter()
        await segment.put(0, *first)
        for layer, (k, v) in enumerate(layers, 1):
            await segment.put(layer, k, v)
        await parent.word("stop")
        meter.stop()
        reading = meter.reading()
        parent.tell("sent", digest=digest_of(layers_of(workload)), **reading)


async def consumer(parent: Parent, options: dict[str, Any]) -> None:
    """Take every layer, verified, until the manifest says that this was all."""
    workload = Workload(**options["workload"])
    async with kvcs.connect(options["url"], ca=options["ca"]) as session:
        subscriber = kvcs.Subscriber(session)
        async with subscriber.open(prefix_of(workload), deadline=DEADLINE_SECONDS) as cache:
            parent.tell("ready", url="")
            await parent.word("go")
            meter = Meter()
            layers = [(layer.k, layer.v) async for layer in cache]
            meter.stop()
            facts, reading = cache.report, meter.reading()
            parent.tell(
                "received",
                octets=facts.tensor_octets,
                objects=facts.objects,
                digest=digest_of(iter(layers)),
                **reading,
            )


async def relay(parent: Parent, options: dict[str, Any]) -> None:
    """Relay until told to stop."""
    settings = kvcs.RelaySettings(
        cert=options["cert"], key=options["key"], port=0, allow_anyone=True
    )
    async with kvcs.Relay(settings) as listening:
        parent.tell("ready", url=listening.url)
        await parent.word("go")
        meter = Meter()
        await parent.word("stop")
        meter.stop()
        parent.tell("sent", **meter.reading())

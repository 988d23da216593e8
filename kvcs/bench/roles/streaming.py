"""Roles of kvcs itself: producer, consumer and relay, by the names that users type."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import kvcs
from kvcs.bench.keys import key_ring, protection_ring, signing_key
from kvcs.bench.parent import Parent
from kvcs.bench.usage import Meter, clock
from kvcs.bench.workload import DTYPE, HEAD_DIM, KV_HEADS, Workload

SCOPE_KEY: Final = bytes(range(32))

Array = npt.NDArray[Any]
Pair = tuple[Array, Array | None]
"""K and V of one layer, or the joint tensor alone."""


def prefix_of(workload: Workload, start: int = 0) -> kvcs.Prefix:
    """The prefix that both sides know; its token ids count from ``start``."""
    descriptor = kvcs.Descriptor(
        model="bench",
        weights=kvcs.UNPINNED,
        layers=workload.layers,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        v_head_dim=0 if workload.components == 1 else HEAD_DIM,
        dtype=DTYPE,
        block_tokens=workload.block_tokens,
    )
    tokens = range(start, start + workload.blocks * workload.block_tokens)
    return kvcs.Prefix(kvcs.Scope(key=SCOPE_KEY), descriptor, tokens)


def layers_of(workload: Workload, lend: str = "") -> Iterator[Pair]:
    """Tensors of each layer.

    They lie in buffers that are used again, as an engine's are; unless they are lent, when each
    layer has arrays of its own ("distinct") or all have the same ("same").
    """
    dtype = prefix_of(workload).descriptor.numpy_dtype
    shape = (workload.blocks, workload.block_tokens, KV_HEADS, HEAD_DIM)
    random = np.random.default_rng(22)
    buffers = [
        random.integers(0, 2**16, shape, dtype=np.uint16) for _ in range(workload.components)
    ]
    for layer in range(workload.layers):
        if lend == "distinct" and layer:
            buffers = [buffer.copy() for buffer in buffers]
        for component, buffer in enumerate(buffers):
            if lend != "same":
                # Every block differs in every layer.
                buffer[:, 0, 0, 0] = workload.components * layer + component
        k, *v = (b.view(dtype).reshape((-1, KV_HEADS, HEAD_DIM)) for b in buffers)
        yield k, v[0] if v else None


def memory_of(workload: Workload, prefix: kvcs.Prefix) -> dict[int, tuple[Array, Array | None]]:
    """Memory for each layer, as an engine has it that has used it before."""
    tokens = workload.blocks * workload.block_tokens
    shape = (workload.layers, workload.components, tokens, KV_HEADS, HEAD_DIM)
    pool = np.empty(shape, prefix.descriptor.numpy_dtype)
    pool.view(np.uint8)[:] = 0
    return {layer: (k, v[0] if len(v) else None) for layer, (k, *v) in enumerate(pool)}


def digest_of(layers: Iterable[Pair]) -> str:
    """SHA-256 over every octet of the tensors of each layer."""
    digest = hashlib.sha256()
    for pair in layers:
        for array in pair:
            if array is not None:
                digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def quic_of(options: dict[str, Any]) -> kvcs.QuicSettings:
    """Settings of the transport: the defaults, or one datagram size for every path."""
    return kvcs.QuicSettings(datagram_size=options["datagram"])


def secured(options: dict[str, Any]) -> tuple[bool, bool]:
    """Whether manifests are signed, and whether Objects are sealed."""
    return options["secure"] in ("signed", "both"), options["secure"] in ("sealed", "both")


async def producer(parent: Parent, options: dict[str, Any]) -> None:
    """Publish one layer after the other, as fast as `put` takes them or as they are computed."""
    workload = Workload(**options["workload"])
    lend = options["lend"]
    quic = quic_of(options)
    layers: Iterable[Pair] = layers_of(workload, lend)
    if lend:
        layers = list(layers)  # what is lent is there before anything is measured
    async with AsyncExitStack() as stack:
        session: kvcs.Connection | kvcs.Server
        if "relay" in options:
            url = options["relay"]
            connecting = kvcs.connect(url, ca=options["ca"], quic=quic)
            session = await stack.enter_async_context(connecting)
        else:
            serving = kvcs.serve(
                "127.0.0.1", 0, cert=options["cert"], key=options["key"], quic=quic
            )
            session = await stack.enter_async_context(serving)
            url = session.url
        publisher = kvcs.Publisher(session)
        signs, seals = secured(options)
        publication = await stack.enter_async_context(
            publisher.publish(
                prefix_of(workload),
                sign=signing_key() if signs else None,
                protect=protection_ring() if seals else None,
            )
        )
        segment = await publication.segment()
        ready = iter(layers)
        first = next(ready)
        parent.ready(url)
        await parent.word("go")
        meter = Meter()
        computed_at = []
        for layer in range(workload.layers):
            if options["compute_ms"]:
                # A model computes on another device, so waiting is what this process sees of it.
                await asyncio.sleep(options["compute_ms"] / 1000)
            k, v = next(ready) if layer else first
            computed_at.append(clock())
            await segment.put(layer, k, v, lend=bool(lend))
        if options["late"]:
            parent.tell("put")
        await parent.word("stop")
        meter.stop()
        reading = meter.reading()
        digest = digest_of(layers_of(workload, lend)) if options["keep"] else None
        parent.tell("sent", digest=digest, computed_at=computed_at, **reading)


async def consumer(parent: Parent, options: dict[str, Any]) -> None:
    """Take every layer, verified, until the manifest says that this was all."""
    workload = Workload(**options["workload"])
    deadline = options["seconds"]
    connecting = kvcs.connect(options["url"], ca=options["ca"], quic=quic_of(options))
    async with connecting as session:
        signs, seals = secured(options)
        subscriber = kvcs.Subscriber(
            session,
            keys=key_ring() if signs else None,
            require_signed=signs,
            protection=protection_ring() if seals else None,
        )
        prefix = prefix_of(workload)
        into = memory_of(workload, prefix) if options["into"] else None
        if options["late"]:
            parent.ready()
            await parent.word("go")
        async with subscriber.open(prefix, deadline=deadline, into=into) as cache:
            if not options["late"]:
                parent.ready()
                await parent.word("go")
            meter = Meter()
            kept: list[Pair] = []
            verified_at = []
            async for layer in cache:
                verified_at.append(clock())
                if options["keep"]:
                    kept.append((layer.k, layer.v if workload.components == 2 else None))
                else:
                    cache.drop(layer.index)
            meter.stop()
            facts, reading = cache.report, meter.reading()
            parent.tell(
                "received",
                octets=facts.tensor_octets,
                objects=facts.objects,
                verified_at=verified_at,
                **reading,
            )
            await parent.word("check")
            parent.tell("checked", digest=digest_of(kept) if options["keep"] else None)


async def relay(parent: Parent, options: dict[str, Any]) -> None:
    """Relay until told to stop."""
    settings = kvcs.RelaySettings(
        cert=options["cert"],
        key=options["key"],
        port=0,
        allow_anyone=True,
        quic=quic_of(options),
    )
    async with kvcs.Relay(settings) as listening:
        parent.ready(listening.url)
        await parent.word("go")
        meter = Meter()
        await parent.word("stop")
        meter.stop()
        parent.tell("sent", **meter.reading())

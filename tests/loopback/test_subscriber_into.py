"""Layers that are received into memory of the caller's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcs
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.beside import Side, named, raw_of, session_with
from tests.loopback.kv_fixtures import Wire, joined, serving
from tests.loopback.raw_publication import K0, V0, RawPublication

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

TOY, PREFIX = toy_publication(), toy_prefix()
THEIRS = toy_publication(seed=1)


def pool(tokens: int = 12) -> dict[int, tuple[Any, Any]]:
    """One piece of memory for K and V of the toy's four layers."""
    memory = np.zeros((4, 2, tokens, 2, 8), PREFIX.descriptor.numpy_dtype)
    return {index: (memory[index, 0], memory[index, 1]) for index in range(4)}


def holds(into: dict[int, tuple[Any, Any]], toy: Any = TOY) -> list[bool]:
    """Whether each layer's memory has what was published."""
    return [same(kvcs.Layer(index, k[:12], v[:12]), toy) for index, (k, v) in into.items()]


async def test_layers_come_into_the_callers_memory(files: PemFiles) -> None:
    into = pool(tokens=16)
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(PREFIX) as publication:
            segment = await publication.segment()
            subscriber = kvcs.Subscriber(client, settings=QUICK)
            async with subscriber.open(PREFIX, into=into) as cache:
                await put(segment, TOY)
                async for layer in cache:
                    assert same(layer, TOY)
                    assert np.shares_memory(layer.k, into[layer.index][0])
                    assert np.shares_memory(layer.v, into[layer.index][1])
                    cache.drop(layer.index)
                await cache.complete()
    assert holds(into) == [True] * 4
    assert not any(array[12:].view(np.uint16).any() for pair in into.values() for array in pair)


async def test_each_reader_gets_its_own(files: PemFiles) -> None:
    first, second = pool(), pool()
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(PREFIX) as publication:
            await put(await publication.segment(), TOY)
            subscriber = kvcs.Subscriber(client, settings=QUICK)
            async with (
                subscriber.open(PREFIX, into=first) as one,
                subscriber.open(PREFIX, into=second) as other,
                subscriber.open(PREFIX) as none,
            ):
                for cache in (one, other, none):
                    await cache.complete()
    assert holds(first) == holds(second) == [True] * 4


async def test_memory_that_does_not_fit_is_refused_before_anything_is_asked(
    files: PemFiles,
) -> None:
    async with serving(files) as server, joined(server, files) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        with pytest.raises(kvcs.UsageError, match="into: k of layer 0: expected shape"):
            async with subscriber.open(PREFIX, into=pool(tokens=8)):
                pass
        # The first two of its blocks fit.
        async with kvcs.Publisher(server).publish(PREFIX) as publication:
            await put(await publication.segment(), TOY)
            async with subscriber.open(PREFIX, into=pool(tokens=8), blocks=2) as cache:
                await cache.complete()
                assert cache.usable_tokens == 8


async def test_nothing_is_written_once_the_context_was_left(files: PemFiles) -> None:
    into, raw, wire = pool(), RawPublication(TOY), Wire()
    raw.manifest(layers=0)
    payload = TOY.objects[K0, Location(1, 1)]
    header = ObjectHeader(1, 1, 0, 32, ObjectStatus.NORMAL, b"", len(payload))
    async with raw.serve(files) as server, joined(server, files, wire) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        async with subscriber.open(PREFIX, into=into) as cache:
            await raw.subscribed(K0)
            await raw.subscribed(V0)
            raw.layers(0)
            writer = raw.begin(K0, 1, 1).begin(header, raw.now)
            writer.write(memoryview(payload[:90]))
            assert same(await cache.layer(0), TOY)
            await wire.until(lambda: Location(1, 1) in wire.objects("k.raw.s0"))
        for pair in into.values():
            for array in pair:
                array.view(np.uint16)[:] = 7
        writer.write(memoryview(payload[90:]))
        raw.layers(2, 3)
        async with subscriber.open(PREFIX) as other:  # what was on its way is here after it
            await raw.subscribed(V0, 2)
            await other.layer(2)
    assert all((array.view(np.uint16) == 7).all() for pair in into.values() for array in pair)


async def test_a_segment_of_another_publication_comes_into_it_too(files: PemFiles) -> None:
    into = pool()
    ours, theirs = raw_of(TOY, 1, [(V0, 2, 1)]), raw_of(THEIRS, 2)
    async with session_with(Side(ours, theirs), files) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        async with subscriber.open(PREFIX, publication=named(ours), whole=True, into=into) as cache:
            assert all([same(layer, THEIRS) async for layer in cache])
    assert holds(into, THEIRS) == [True] * 4

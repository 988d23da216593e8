"""Layers that a reader lets go while it reads on, alone and beside others."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

import kvcs
from kvcs.integrations.block_loads import BlockLoads
from kvcs.moqt.names import Location
from kvcs.quic.connection import Connection
from tests.builders import QUICK, put, same, tensors, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import joined, serving
from tests.simulation.retrievals.means import Saved, tap

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

TOY, PREFIX = toy_publication(), toy_prefix()


@asynccontextmanager
async def published(files: PemFiles) -> AsyncIterator[tuple[kvcs.Segment, Connection]]:
    """A publication that has begun, and a session with who serves it."""
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(PREFIX) as publication:
            yield await publication.segment(), client


def memory_of(layer: kvcs.LayerTensors) -> weakref.ref[Any]:
    """Tells whether the ledger's own array behind a layer's keys is still there."""
    base = layer.k.base
    assert base is not None  # what is handed out are views
    return weakref.ref(base)


async def test_a_reader_lets_each_layer_go_before_the_next_one(files: PemFiles) -> None:
    async with published(files) as (segment, client):
        async with kvcs.Subscriber(client, settings=QUICK).open(PREFIX) as cache:
            with pytest.raises(kvcs.UsageError, match="layer 0 is not whole"):
                cache.drop(0)
            await put(segment, TOY)
            kept = []
            async for layer in cache:
                assert same(layer, TOY)
                kept.append(memory_of(layer))
                cache.drop(layer.index)
            del layer
            assert [one() for one in kept] == [None] * 4
            await cache.complete()
            assert (cache.usable_tokens, cache.missing) == (12, ())
            assert (cache.report.objects, cache.progress.layers_ready) == (24, 4)
            with pytest.raises(kvcs.UsageError, match="layer 1 was dropped"):
                await cache.layer(1)
            with pytest.raises(kvcs.UsageError, match="layer 0 was dropped"):
                [layer async for layer in cache]
        with pytest.raises(kvcs.UsageError, match="the cache was closed"):
            cache.drop(0)


@pytest.mark.parametrize("whole", [False, True])
async def test_a_layer_that_is_there_is_given_without_waiting(files: PemFiles, whole: bool) -> None:
    async with published(files) as (segment, client):
        async with kvcs.Subscriber(client, settings=QUICK).open(PREFIX, whole=whole) as cache:
            assert cache.layer_now(0) is None
            await put(segment, TOY)
            await cache.complete()
            for index in range(4):
                layer = cache.layer_now(index)
                assert layer is not None and same(layer, TOY)
            cache.drop(2)
            assert cache.layer_now(2) is None
            with pytest.raises(kvcs.UsageError, match="layer 9 was not selected"):
                cache.layer_now(9)


LAYER_OCTETS = TOY.k[0].nbytes + TOY.v[0].nbytes


async def until_nobody_follows(segment: kvcs.Segment) -> None:
    """Wait until no consumer takes any data track."""
    unfollowed = segment._publication._unfollowed
    async with asyncio.timeout(20):
        while any(track.followed for track in segment.tracks):
            unfollowed.clear()
            await unfollowed.wait()


async def test_layers_that_nobody_drops_are_held_up_to_a_limit(files: PemFiles) -> None:
    settings = replace(QUICK, held_octets=2 * LAYER_OCTETS)
    async with published(files) as (segment, client):
        subscriber = kvcs.Subscriber(client, settings=settings)
        async with subscriber.open(PREFIX) as cache:
            for index in range(2):
                await put(segment, TOY, [index])
                assert same(await cache.layer(index), TOY)
            await put(segment, TOY, [2])  # it begins to come
            with pytest.raises(kvcs.CacheIncomplete, match=r"set SubscriberSettings\.held_octets"):
                await cache.complete()
            for index in range(2):  # what is there stays
                assert same(await cache.layer(index), TOY)
            with pytest.raises(kvcs.CacheIncomplete) as raised:
                await cache.layer(3)
            assert {3} <= {run.layer for run in raised.value.missing} <= {2, 3}
            await until_nobody_follows(segment)  # nothing more is taken
            await put(segment, TOY, [3])  # it is published all the same
            # That nobody dropped anything is not the publication's fault.
            assert subscriber._authenticity.rank(cache.namespace, True) == 0


async def test_layers_that_are_never_whole_are_held_up_to_the_limit_too(files: PemFiles) -> None:
    """Each lacks its last block: what was lost, and comes late, takes as much memory."""
    settings = replace(QUICK, held_octets=2 * LAYER_OCTETS)
    async with published(files) as (segment, client):
        tap(segment.tracks[0], Saved(), [Location(layer, 2) for layer in range(4)], Random(1))
        async with kvcs.Subscriber(client, settings=settings).open(PREFIX) as cache:
            await put(segment, TOY)
            with pytest.raises(kvcs.CacheIncomplete, match=r"set SubscriberSettings\.held_octets"):
                await cache.complete()
            assert cache.progress.layers_ready == 0


async def test_an_engine_that_has_stored_a_layer_needs_no_room_for_it(files: PemFiles) -> None:
    stored: dict[tuple[int, int], bytes] = {}
    there = asyncio.Event()

    def store(block_id: int, tensors: kvcs.LayerTensors) -> None:
        stored[block_id, tensors.index] = tensors.k.tobytes() + tensors.v.tobytes()
        there.set()

    loads, settings = BlockLoads(store), replace(QUICK, held_octets=LAYER_OCTETS)
    async with published(files) as (segment, client):
        async with kvcs.Subscriber(client, settings=settings).open(PREFIX) as cache:
            loading = loads.start("request", cache, [7, 8, 9], drop=True)
            for index in range(4):
                await put(segment, TOY, [index])
                while (9, index) not in stored:
                    there.clear()
                    await there.wait()
            await loading
            await cache.complete()
    assert not loads.failures and loads.get_block_ids_with_load_errors() == set()
    for layer in range(4):
        k, v = tensors(TOY, layer)
        for block_id, tokens in ((7, slice(0, 4)), (8, slice(4, 8)), (9, slice(8, 12))):
            assert stored[block_id, layer] == k[tokens].tobytes() + v[tokens].tobytes()


@pytest.mark.parametrize("limit", [2 * LAYER_OCTETS, None])
async def test_layers_that_are_dropped_need_no_room(files: PemFiles, limit: int | None) -> None:
    async with published(files) as (segment, client):
        settings = replace(QUICK, held_octets=limit)
        async with kvcs.Subscriber(client, settings=settings).open(PREFIX) as cache:
            for index in range(4):
                await put(segment, TOY, [index])
                assert same(await cache.layer(index), TOY)
                cache.drop(index)
            await cache.complete()


async def test_a_cache_of_just_the_limit_is_complete(files: PemFiles) -> None:
    settings = replace(QUICK, held_octets=4 * LAYER_OCTETS)
    async with published(files) as (segment, client):
        async with kvcs.Subscriber(client, settings=settings).open(PREFIX) as cache:
            await put(segment, TOY)
            assert [same(layer, TOY) async for layer in cache] == [True] * 4


async def test_a_layer_stays_until_every_reader_has_dropped_it(files: PemFiles) -> None:
    async with published(files) as (segment, client):
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        async with subscriber.open(PREFIX) as one:
            async with subscriber.open(PREFIX) as other:
                await put(segment, TOY)
                memory = [memory_of(await other.layer(index)) for index in range(4)]
                one.drop(0)
                one.drop(1)
                with pytest.raises(kvcs.UsageError, match="layer 0 was dropped"):
                    await one.layer(0)
                assert same(await other.layer(0), TOY)
                other.drop(0)
                assert [each() is None for each in memory] == [True, False, False, False]
            # Who has left needs nothing any more.
            assert [each() is None for each in memory] == [True, True, False, False]
            assert same(await one.layer(2), TOY)


async def test_who_comes_after_something_was_dropped_gets_all_of_it(files: PemFiles) -> None:
    async with published(files) as (segment, client):
        await put(segment, TOY)
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        async with subscriber.open(PREFIX) as first:
            await first.complete()
            first.drop(3)
            async with subscriber.open(PREFIX) as second:
                assert all([same(layer, TOY) async for layer in second])
                assert same(await first.layer(2), TOY)
            assert same(await first.layer(0), TOY)


async def test_who_joins_while_something_is_dropped_gets_all_of_it(files: PemFiles) -> None:
    async with published(files) as (segment, client):
        await put(segment, TOY)
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        seen: list[int] = []

        async def read() -> None:
            async with subscriber.open(PREFIX) as second:
                seen.extend([layer.index async for layer in second if same(layer, TOY)])

        async with subscriber.open(PREFIX) as first:
            await first.complete()
            joining = asyncio.create_task(read())
            for index in range(4):
                await asyncio.sleep(0)  # it joins somewhere between these
                first.drop(index)
            await joining
        assert seen == [0, 1, 2, 3]

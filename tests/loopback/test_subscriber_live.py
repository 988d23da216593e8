"""Retrieval while a publication is produced: exactly once, in order, before it is whole."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest

import kvcs
from kvcs.kv import Ledger
from kvcs.moqt import events
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import ParameterType
from tests.builders import BRIEF, QUICK, Toy, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import Wire, joined, serving
from tests.loopback.raw_publication import K0, V0, RawPublication
from tests.loopback.retrieving import meeting
from tests.virtual import virtual

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

TRACKS = ("k.raw.s0", "v.raw.s0")


def once(toy: Toy) -> dict[Location, int]:
    """Every Object of a track, once."""
    layers, blocks = toy.descriptor.layers, sum(toy.blocks)
    return {Location(layer, block): 1 for layer in range(layers) for block in range(blocks)}


async def retrieve(client: kvcs.Connection, prefix: kvcs.Prefix, toy: Toy) -> kvcs.CacheReport:
    """Read a whole cache and hold it to what was published."""
    async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
        seen = []
        async for layer in cache:
            assert same(layer, toy)
            seen.append(layer.index)
        assert seen == list(range(toy.descriptor.layers))
        assert cache.usable_tokens == prefix.blocks * toy.descriptor.block_tokens
    return cache.report


# Exactly once


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_ten_subscribers_that_join_at_any_moment_get_every_object_once(
    files: PemFiles, seed: int
) -> None:
    chance = random.Random(seed)
    toy = toy_publication(layers=9)
    prefix = toy_prefix(descriptor=toy.descriptor)
    moments = [chance.randrange(-1, 9) for _ in range(10)]
    joining = {moment: asyncio.Event() for moment in range(-1, 9)}
    async with serving(files) as server, AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        wires = [Wire() for _ in moments]
        clients = [await stack.enter_async_context(joined(server, files, w)) for w in wires]

        def stage(wire: Wire) -> bool:
            """How far a subscriber is when the producer goes on, drawn anew at each look."""
            reached = (
                True,
                len(wire.asked) > 0,
                len(wire.asked) > 1,
                "k.raw.s0" in wire.tracks("subscribe"),
                bool(wire.got),
            )
            return reached[chance.randrange(len(reached))]

        async def consume(number: int) -> kvcs.CacheReport:
            await joining[moments[number]].wait()
            return await retrieve(clients[number], prefix, toy)

        tasks = [group.create_task(consume(number)) for number in range(10)]
        async with kvcs.Publisher(server).publish(prefix) as publication:
            segment = await publication.segment()
            for layer in range(-1, 9):
                if layer >= 0:
                    await put(segment, toy, [layer])
                joining[layer].set()
                for wire, moment in zip(wires, moments, strict=True):
                    if moment == layer:
                        await wire.until(partial(stage, wire))
            reports = [await task for task in tasks]
        for wire, report in zip(wires, reports, strict=True):
            assert [wire.objects(name) for name in TRACKS] == [once(toy), once(toy)]
            assert (report.objects, report.duplicates, report.refetches) == (54, 0, 0)
            assert wire.tracks("subscribe") == ["manifest.cose", "manifest", *TRACKS]
            assert not wire.tracks("fetch")


async def test_a_track_is_asked_for_with_next_object_and_a_fill_from_its_start(
    files: PemFiles,
) -> None:
    toy, prefix, wire = toy_publication(), toy_prefix(), Wire()
    async with serving(files) as server, joined(server, files, wire) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            await put(await publication.segment(), toy)
            await retrieve(client, prefix, toy)
    fills = {}
    for kind, name, parameters in wire.asked:
        assert kind == "subscribe"
        assert parameters.get(ParameterType.LOCATION_FILTER) == LocationFilter.next_object()
        fill = parameters.get(ParameterType.FILL_PARAMETERS)
        fills[name.name.decode()] = fill.get(ParameterType.LOCATION_FILTER)
    assert fills == {
        "manifest.cose": LocationFilter.relative_start(1),
        "manifest": LocationFilter.relative_start(1),
        "k.raw.s0": LocationFilter.absolute_start(0, 0),
        "v.raw.s0": LocationFilter.absolute_start(0, 0),
    }


# While it is produced


async def test_each_layer_is_there_before_the_next_one_is_put(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            segment = await publication.segment()
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                layers = aiter(cache)
                for index in range(4):
                    assert publication.progress.layers == index
                    await put(segment, toy, [index])
                    layer = await anext(layers)
                    assert layer.index == index and same(layer, toy)
                    assert cache.progress.layers_ready == index + 1
                assert cache.manifest.complete or publication.complete
                with pytest.raises(StopAsyncIteration):
                    await anext(layers)
                assert cache.manifest.complete
                progress = cache.progress
    assert (progress.layers, progress.objects_verified, progress.objects) == (4, 24, 24)
    report = cache.report
    assert report.first_layer_seconds is not None and report.last_layer_seconds is not None
    assert report.open_seconds <= report.first_layer_seconds <= report.last_layer_seconds
    assert (report.tracks, report.lossless, report.tokens) == (TRACKS, True, 12)
    assert (report.octets, report.tensor_octets) == (24 * (68 + 128), 24 * 128)


async def test_layers_can_be_awaited_in_any_order(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                waiting = [asyncio.create_task(cache.layer(index)) for index in (3, 0, 2, 1, 3)]
                await put(await publication.segment(), toy)
                got = await asyncio.gather(*waiting)
                assert [layer.index for layer in got] == [3, 0, 2, 1, 3]
                assert all(same(layer, toy) for layer in got)
                assert not got[0].k.flags.writeable
                await cache.complete()
                with pytest.raises(kvcs.UsageError, match=r"layers 0\.\.3 are"):
                    await cache.layer(4)


@virtual
@pytest.mark.parametrize("ready", [0, 2])
async def test_a_producer_that_pauses_loses_nobody(ready: int) -> None:
    """The bound of recovery counts from a loss; a pause in production is none."""
    toy, prefix, wire = toy_publication(), toy_prefix(), Wire()
    impatient = kvcs.SubscriberSettings(
        least_deadline=10.0, least_recovery=0.01, listen=0.1, stall=0.001, retry_pause=0.001
    )
    async with meeting(wire=wire) as (server, client):
        async with kvcs.Publisher(server).publish(prefix) as publication:
            segment = await publication.segment()
            await put(segment, toy, range(ready))
            async with kvcs.Subscriber(client, settings=impatient).open(prefix) as cache:
                for index in range(ready):
                    await cache.layer(index)
                waiting = asyncio.create_task(cache.layer(3))
                await asyncio.sleep(5.0)
                assert not waiting.done()
                await put(segment, toy, range(ready, 4))
                assert same(await waiting, toy)
                await cache.complete()
            assert cache.report.refetches == 0
    assert [wire.objects(name) for name in TRACKS] == [once(toy), once(toy)]


async def test_a_selection_of_a_live_publication_is_done_before_the_rest(
    files: PemFiles,
) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            segment = await publication.segment()
            opening = kvcs.Subscriber(client, settings=QUICK).open(prefix, layers=(1, 1), blocks=2)
            async with opening as cache:
                await put(segment, toy, range(2))
                got = [layer async for layer in cache]  # ends while layers 2 and 3 are to come
                assert [layer.index for layer in got] == [1] and same(got[0], toy, blocks=2)
                assert got[0].k.shape == (8, 2, 8)
                assert (cache.layers, cache.blocks) == ((1,), 2)
            await put(segment, toy, range(2, 4))


async def test_several_passes_become_one_cache(files: PemFiles) -> None:
    toy, prefix, wire = toy_publication((1, 1, 1)), toy_prefix(), Wire()
    async with serving(files) as server, joined(server, files, wire) as client:
        publishing = kvcs.Publisher(server).publish(prefix, first_segment_blocks=1)
        async with publishing as publication:
            opening = kvcs.Subscriber(client, settings=QUICK).open(
                prefix, publication=publication.uri(server.url)
            )
            async with opening as cache:
                waiting = asyncio.create_task(cache.layer(0))
                for _ in range(3):
                    assert not waiting.done()
                    await put(await publication.segment(blocks=1), toy)
                assert same(await waiting, toy)
                assert all([same(layer, toy) async for layer in cache])
    assert wire.tracks("subscribe")[2:] == [
        f"{component}.raw.s{segment}" for segment in range(3) for component in "kv"
    ]


async def test_a_publication_that_ends_short_of_the_prefix_is_incomplete(
    files: PemFiles,
) -> None:
    toy, prefix = toy_publication((1, 2)), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        publishing = kvcs.Publisher(server).publish(prefix, first_segment_blocks=1)
        async with publishing as publication:
            opening = kvcs.Subscriber(client, settings=BRIEF).open(
                prefix, blocks=3, publication=publication.uri(server.url)
            )
            cache = await opening.__aenter__()
            await put(await publication.segment(), toy)
        with pytest.raises(kvcs.CacheIncomplete, match="ended with 1 of 3 blocks") as caught:
            await cache.complete()
        await opening.__aexit__(None, None, None)
    assert caught.value.usable_tokens == 4
    assert str(caught.value.missing[0]) == "k layer 0 blocks 0-1 (tokens 4-11)"


async def test_a_publication_that_ends_short_is_taken_as_far_as_it_goes(files: PemFiles) -> None:
    toy, prefix = toy_publication((1, 2)), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix, first_segment_blocks=1) as publication:
            uri = publication.uri(server.url)
            async with kvcs.Subscriber(client, settings=QUICK).open(
                prefix, publication=uri
            ) as cache:
                assert cache.blocks == 3  # it is produced still: more may come
                await put(await publication.segment(), toy)
                assert await cache.settled() == 4
                assert all([same(layer, toy, 1) async for layer in cache])
                report = cache.report
    assert (cache.blocks, report.tokens, report.prefix_tokens) == (1, 4, 12)


async def test_what_was_whole_stays_usable_when_the_session_ends(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        with pytest.raises(kvcs.UsageError, match="2 of 4 layers"):
            async with kvcs.Publisher(server).publish(prefix) as publication:
                opening = kvcs.Subscriber(client, settings=QUICK).open(prefix)
                cache = await opening.__aenter__()
                await put(await publication.segment(), toy, range(2))
                assert same(await cache.layer(1), toy)
                await client.close()
        with pytest.raises(kvcs.CacheIncomplete, match="session closed by this side") as caught:
            await cache.layer(2)
        assert isinstance(caught.value.__cause__, kvcs.ConnectionClosed)
        assert {run.layer for run in caught.value.missing} == {2, 3}
        assert same(await cache.layer(0), toy)
        await opening.__aexit__(None, None, None)


async def test_an_object_costs_the_same_however_many_layers_there_are(
    files: PemFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether all layers are there is asked when one became whole, not for each Object."""
    asked = 0
    was: Any = Ledger.__dict__["complete"]

    def counting(ledger: Ledger) -> bool:
        nonlocal asked
        asked += 1
        return bool(was.fget(ledger))

    monkeypatch.setattr(Ledger, "complete", property(counting))
    toy = toy_publication((40,), layers=5)
    prefix = toy_prefix(40, descriptor=toy.descriptor)
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            segment = await publication.segment()
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                await put(segment, toy)
                assert all([same(layer, toy) async for layer in cache])
                assert cache.report.objects == 400
    assert 5 <= asked < 60


# The order of what is handed to the transport


async def test_the_manifest_is_there_before_any_data_track_is_asked_for(
    files: PemFiles,
) -> None:
    raw, wire = RawPublication(toy_publication()), Wire()
    async with raw.serve(files) as server, joined(server, files, wire) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        retrieval = subscriber.open(toy_prefix())
        opening = asyncio.create_task(retrieval.__aenter__())
        await wire.until(lambda: "manifest" in wire.tracks("subscribe"))
        raw.layers(0, 1)
        await wire.until(lambda: len(wire.of(events.RequestAccepted)) == 2)
        assert not opening.done()
        assert wire.tracks("subscribe") == ["manifest.cose", "manifest"]
        raw.manifest(layers=2)
        cache = await opening
        raw.layers(2, 3)
        raw.end()
        raw.manifest()
        got = [layer async for layer in cache]
        assert all(same(layer, raw.toy) for layer in got) and len(got) == 4
        assert [wire.objects(name) for name in TRACKS] == [once(raw.toy), once(raw.toy)]
        await retrieval.__aexit__(None, None, None)
    assert set(raw.live) == {K0, V0}

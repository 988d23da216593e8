"""Two requests of one process read one retrieval: what fails is told to both (case 9)."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

import kvcs
from kvcs.moqt import events
from kvcs.moqt.names import Location
from tests.builders import BRIEF, same, toy_prefix, toy_publication
from tests.loopback.kv_fixtures import Wire
from tests.loopback.raw_publication import K0, V0, RawPublication, damaged
from tests.loopback.retrieving import meeting
from tests.virtual import virtual

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@virtual
async def test_a_damaged_object_is_told_to_both() -> None:
    toy = toy_publication()
    raw = RawPublication(toy)
    wrong = {(V0, 1): damaged(toy.objects[V0, Location(2, 1)])}
    raw.manifest(layers=0)
    wire = Wire()
    async with meeting(raw, wire) as (_, client):
        subscriber = kvcs.Subscriber(client, settings=BRIEF)
        async with AsyncExitStack() as stack:
            opened = await asyncio.gather(
                *(stack.enter_async_context(subscriber.open(toy_prefix())) for _ in range(2))
            )
            assert wire.tracks("subscribe") == ["manifest.cose", "manifest", str(K0), str(V0)]
            waiting = [asyncio.ensure_future(cache.layer(2)) for cache in opened]
            raw.layers(0, 1)
            raw.layer(2, wrong, wrong)
            raw.layers(3)
            raw.end()
            failures = await asyncio.gather(*waiting, return_exceptions=True)
            for cache, failure in zip(opened, failures, strict=True):
                assert isinstance(failure, kvcs.CacheIncomplete)
                assert [str(run) for run in failure.missing] == [
                    "v layer 2 blocks 1-1 (tokens 4-7)"
                ]
                with pytest.raises(kvcs.CacheIncomplete) as again:
                    await cache.layer(2)
                assert again.value.missing == failure.missing
                for layer in (0, 1, 3):
                    assert same(await cache.layer(layer), toy)


@virtual
async def test_a_search_that_finds_nothing_is_told_to_both() -> None:
    raw = RawPublication(toy_publication())
    raw.announced = False
    async with meeting(raw) as (_, client):
        subscriber = kvcs.Subscriber(client, settings=BRIEF)

        async def read() -> None:
            async with subscriber.open(toy_prefix(), wait=0.0, probe=0):
                raise AssertionError("there is nothing to open")

        results = await asyncio.gather(*(read() for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in results] == [kvcs.PublicationNotFound] * 3
        assert all(each.absent for each in results)  # type: ignore[union-attr]
        assert len(raw.asks(events.SubscribeNamespaceReceived)) == 1

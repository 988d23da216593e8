"""The bound of recovery: what ends at it, what does not count, all on virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

import kvcs
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import ParameterType
from tests.builders import BRIEF, same, toy_publication
from tests.loopback.raw_publication import K0, V0, RawPublication, damaged
from tests.loopback.retrieving import ALL, opened_on_virtual_time, spoiled
from tests.virtual import virtual

HASTY = kvcs.SubscriberSettings(least_recovery=0.25, listen=0.1, stall=0.001, retry_pause=0.001)
"""Recovery ends soon."""

LONGER = 5.0
"""Seconds: many times as long as recovery has."""


@virtual
async def test_an_object_that_stays_damaged_is_told_at_the_bound_of_recovery() -> None:
    raw = RawPublication(toy_publication())
    raw.layer(0)
    bad = {(V0, 1): spoiled(raw.toy, V0, 1, 1, damaged)}
    raw.layer(1, bad, bad)
    raw.layers(2, 3)
    raw.end()
    raw.manifest()
    async with opened_on_virtual_time(raw, BRIEF) as it:
        began = asyncio.get_running_loop().time()
        with pytest.raises(kvcs.CacheIncomplete) as caught:
            await it.all_layers()
        assert asyncio.get_running_loop().time() - began < 2.0  # the deadline is 50 s
        error = caught.value
        assert [str(run) for run in error.missing] == ["v layer 1 blocks 1-1 (tokens 4-7)"]
        assert (error.missing[0].component, error.missing[0].layer) == ("v", 1)
        assert (error.missing[0].first_token, error.missing[0].last_token) == (4, 7)
        assert error.usable_tokens == 4
        assert "recovery ended after 1.5 s (an object failed its digest check)" in str(error)
        for index in (0, 2, 3):
            assert same(await it.cache.layer(index), raw.toy)
        report = it.cache.report
        assert report.rejected["digest"] == 1 + report.refetches and report.refetches > 1
        assert report.objects == 23
        with pytest.raises(kvcs.CacheIncomplete):
            await it.cache.complete()


@virtual
@pytest.mark.parametrize(("per_1k", "bound"), [(500.0, 6.0), (10.0, 0.25)])
async def test_recovery_has_the_time_that_recomputing_the_tokens_takes(
    per_1k: float, bound: float
) -> None:
    raw = RawPublication(toy_publication())
    for layer in ALL:
        hole = {(V0, 1): None} if layer == 2 else None
        raw.layer(layer, hole, hole)
    raw.end()
    raw.manifest()
    settings = replace(HASTY, recompute_per_1k_tokens=per_1k)  # of 12 tokens
    async with opened_on_virtual_time(raw, settings) as it:
        began = asyncio.get_running_loop().time()
        with pytest.raises(kvcs.CacheIncomplete, match=f"recovery ended after {bound:g} s"):
            await it.all_layers()
        assert bound <= asyncio.get_running_loop().time() - began < bound + 0.5


@virtual
async def test_a_layer_that_is_still_produced_is_not_lost_with_its_stream() -> None:
    """A relay opens a new stream for what comes later; it may take longer than recovery."""
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened_on_virtual_time(raw, HASTY) as it:
        await it.follow()
        raw.layers(0)
        for name in (K0, V0):
            await it.cut(name, 1, 1, 0)
        await it.wire.until(lambda: len(it.wire.of(events.RequestRefused)) >= 3)
        await asyncio.sleep(LONGER)
        for name in (K0, V0):
            raw.begin(name, 1, 3, first=1).finish()
        assert same(await it.cache.layer(1), raw.toy)
        for layer in (2, 3):
            for name, track in raw.live.items():
                raw.group(track, name, layer)
        raw.end(everywhere=False)
        raw.manifest()
        await it.all_layers()


@virtual
async def test_a_range_nobody_knows_is_named() -> None:
    raw = RawPublication(toy_publication())
    for tracks in (raw.live, raw.stored):
        tracks[V0] = raw.track(b"v.raw.s0", authoritative=False)
    for layer in ALL:
        hole = {(V0, 1): None} if layer == 2 else None
        raw.layer(layer, hole, hole)
    raw.end()
    raw.manifest()
    async with opened_on_virtual_time(raw, BRIEF) as it:
        with pytest.raises(kvcs.CacheIncomplete, match="marked UNKNOWN") as caught:
            await it.all_layers()
        assert [str(run) for run in caught.value.missing] == ["v layer 2 blocks 1-1 (tokens 4-7)"]
        assert same(await it.cache.layer(1), raw.toy)


@virtual
async def test_a_fill_that_is_reset_costs_what_it_owed_and_no_later_layer() -> None:
    raw = RawPublication(toy_publication())
    raw.live[K0] = raw.track(b"k.raw.s0", authoritative=False)
    raw.reset_fills = 0x9
    raw.layers(0)
    raw.layer(1, {(K0, 1): None})
    raw.manifest(layers=2)
    async with opened_on_virtual_time(raw, HASTY) as it:
        assert same(await it.cache.layer(1), raw.toy)
        # Layers 2 and 3 take longer than recovery would wait for what was lost.
        await asyncio.sleep(LONGER)
        raw.layers(2, 3)
        raw.end()
        raw.manifest()
        await it.all_layers()
        assert it.fetched == [("k.raw.s0", LocationFilter.absolute_range(1, 1, 1, 2))]


@virtual
async def test_a_fill_of_which_nothing_is_ever_heard_is_fetched() -> None:
    """A reset that overtakes a stream's first octets leaves nothing to tell whose it was."""
    raw = RawPublication(toy_publication())
    raw.live[K0] = raw.track(b"k.raw.s0", authoritative=False)
    raw.reset_fills, raw.reset_at_once = 0x9, True
    raw.layer(0, {(K0, 0): None})
    raw.manifest(layers=1)
    settings = replace(HASTY, quiet=0.1)
    async with opened_on_virtual_time(raw, settings) as it:
        assert same(await it.cache.layer(0), raw.toy)
        (wanted,) = {chosen for name, chosen in it.fetched}
        assert wanted == LocationFilter.absolute_range(0, 0, 0, 2)
        # It was a doubt, not a loss: the producer may take its time.
        await asyncio.sleep(LONGER)
        raw.layers(1, 2, 3)
        raw.end()
        raw.manifest()
        await it.all_layers()


@virtual
async def test_listed_objects_that_exist_nowhere_yet_are_waited_for() -> None:
    """A relay that is slow to bring what the manifest promises is no loss."""
    raw = RawPublication(toy_publication())
    raw.manifest(raw.toy.writer(complete=False).to_json_bytes())
    settings = replace(HASTY, quiet=0.02)
    async with opened_on_virtual_time(raw, settings) as it:
        await it.follow()
        await it.wire.until(lambda: len(it.wire.of(events.RequestRefused)) >= 5)
        await asyncio.sleep(LONGER)
        raw.layers(*ALL)
        raw.end()
        raw.manifest()
        await it.all_layers()


@virtual
@pytest.mark.parametrize(
    "status", [PublishDoneCode.TOO_FAR_BEHIND, PublishDoneCode.EXCESSIVE_LOAD, 0x77, None]
)
async def test_a_subscription_that_is_dropped_in_production_is_made_again(
    status: int | None,
) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened_on_virtual_time(raw, HASTY) as it:
        await it.follow()
        raw.layers(0)
        assert same(await it.cache.layer(0), raw.toy)
        stream = raw.begin(K0, 1, 1)
        await it.wire.until(lambda: Location(1, 0) in it.wire.objects("k.raw.s0"))
        for name in (K0, V0):
            (await raw.subscribed(name)).drop(status, "too slow")
        for name in (K0, V0):
            await raw.subscribed(name, times=2)
        stream.reset(1)
        # The rest is produced later than recovery would wait for a loss.
        await asyncio.sleep(LONGER)
        raw.begin(K0, 1, 3, first=1).finish()
        raw.group(raw.live[V0], V0, 1)
        for layer in (2, 3):
            for name in (K0, V0):
                raw.group(raw.live[name], name, layer)
        raw.end(everywhere=False)
        raw.manifest()
        await it.all_layers()
        assert it.cache.report.duplicates == 0
        # The stream that was open was reset, and what it owed asked for, in vain.
        assert set(it.fetched) <= {("k.raw.s0", LocationFilter.absolute_range(1, 1, 1, 2))}
        fills = [
            parameters.get(ParameterType.FILL_PARAMETERS).get(ParameterType.LOCATION_FILTER)
            for kind, name, parameters in it.wire.asked
            if (kind, name.name) == ("subscribe", b"k.raw.s0")
        ]
        assert fills == [
            LocationFilter.absolute_start(0, 0),
            LocationFilter.absolute_start(1, 1),
        ]


@virtual
async def test_a_subscription_that_is_dropped_again_and_again_is_given_up() -> None:
    raw = RawPublication(toy_publication())
    raw.layers(0)
    raw.manifest(layers=1)
    async with opened_on_virtual_time(raw, HASTY) as it:
        waiting = asyncio.create_task(it.cache.layer(1))
        times = 0
        while not waiting.done() and times < 100:
            times += 1
            await asyncio.wait(
                [waiting, drop := asyncio.create_task(raw.subscribed(K0, times))],
                return_when=asyncio.FIRST_COMPLETED,
            )
            if drop.done():
                drop.result().drop(PublishDoneCode.TOO_FAR_BEHIND, "too slow")
            drop.cancel()
        with pytest.raises(kvcs.CacheIncomplete, match="status 0x5: too slow"):
            await waiting
        assert 3 < times < 30


@virtual
async def test_a_fetch_that_is_always_refused_says_why() -> None:
    raw = RawPublication(toy_publication())
    raw.fetchable = False
    raw.layer(0, {(K0, 1): None})
    raw.layers(1, 2, 3)
    raw.end()
    raw.manifest()
    async with opened_on_virtual_time(raw, BRIEF) as it:
        with pytest.raises(kvcs.CacheIncomplete, match="refused with 0x10: no such track") as info:
            await it.all_layers()
        assert [str(run) for run in info.value.missing] == ["k layer 0 blocks 1-1 (tokens 4-7)"]


@virtual
async def test_time_for_recovery_counts_anew_from_each_loss() -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened_on_virtual_time(raw, HASTY) as it:
        await it.follow()
        raw.layers(0, 1)
        for layer in (2, 3):
            raw.layer(layer, {(V0, 2): spoiled(raw.toy, V0, layer, 2, damaged)})
            assert same(await it.cache.layer(layer), raw.toy)
            await asyncio.sleep(LONGER)
        raw.end()
        raw.manifest()
        await it.all_layers()
        assert it.cache.report.rejected == {"digest": 2}


@virtual
async def test_objects_that_no_manifest_confirms_are_incomplete_at_the_bound() -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened_on_virtual_time(raw, BRIEF) as it:
        await it.follow()
        raw.layers(*ALL)
        raw.end()
        raw.manifest(layers=3)
        got = [await it.cache.layer(index) for index in ALL]
        assert all(same(layer, raw.toy) for layer in got)
        with pytest.raises(kvcs.CacheIncomplete, match="no manifest called") as caught:
            await it.cache.complete()
        assert caught.value.missing == () and caught.value.usable_tokens == 12
        assert not it.fetched

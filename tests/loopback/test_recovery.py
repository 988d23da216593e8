"""What a subscription lost, damaged or contradicted: fetched again, or told, within its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

import kvcs
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import ParameterType
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import Server
from tests.builders import QUICK, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import Wire, joined
from tests.loopback.raw_publication import K0, V0, RawPublication, damaged, relabelled
from tests.unit.kv.toy import Toy

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

ALL = range(4)


@dataclass
class Opened:
    """A cache that is being retrieved from a raw publication."""

    raw: RawPublication
    cache: kvcs.Cache
    wire: Wire
    server: Server
    client: Connection

    @property
    def fetched(self) -> list[tuple[str, LocationFilter]]:
        """What was asked for again."""
        return [
            (name.name.decode(), parameters.get(ParameterType.LOCATION_FILTER))
            for kind, name, parameters in self.wire.asked
            if kind == "fetch"
        ]

    async def all_layers(self) -> None:
        """Every layer comes, with the producer's bits."""
        got = [layer async for layer in self.cache]
        assert [layer.index for layer in got] == list(ALL)
        assert all(same(layer, self.raw.toy) for layer in got)

    async def cut(self, name: Any, layer: int, whole: int, part: int, code: int = 1) -> None:
        """Bring a part of a layer, and reset its stream once that is here."""
        stream = self.raw.begin(name, layer, whole, part)
        last = Location(layer, whole if part else whole - 1)
        await self.wire.until(lambda: last in self.wire.objects(str(name)))
        stream.reset(code)

    async def follow(self) -> None:
        """Wait until the data tracks are subscribed to."""
        await self.raw.subscribed(K0)
        await self.raw.subscribed(V0)
        await self.wire.until(lambda: len(self.wire.of(events.RequestAccepted)) >= 4)


@asynccontextmanager
async def opened(
    files: PemFiles, raw: RawPublication, settings: kvcs.SubscriberSettings = QUICK
) -> AsyncIterator[Opened]:
    """Open the cache of ``raw`` over a session of its own."""
    wire = Wire()
    prefix = toy_prefix(sum(raw.toy.blocks), descriptor=raw.toy.descriptor)
    async with raw.serve(files) as server, joined(server, files, wire) as client:
        async with kvcs.Subscriber(client, settings=settings).open(prefix) as cache:
            yield Opened(raw, cache, wire, server, client)


HASTY = kvcs.SubscriberSettings(least_recovery=0.25, listen=0.1, stall=0.001, retry_pause=0.001)
"""Recovery ends soon; enough for a fetch on a busy machine."""


async def longer_than_recovery(opened: Opened, files: PemFiles) -> None:
    """Something else that takes a while: sessions that come and go."""
    loop = asyncio.get_running_loop()
    until = loop.time() + 0.3
    while loop.time() < until:
        async with joined(opened.server, files):
            pass


def spoiled(toy: Toy, name: Any, layer: int, block: int, change: Callable[[bytes], bytes]) -> bytes:
    """An Object of the toy, spoiled."""
    return change(toy.objects[name, Location(layer, block)])


# Damaged objects


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("digest", damaged),
        ("layer", lambda payload: relabelled(payload, layer=2)),
        ("block", lambda payload: relabelled(payload, block=2)),
        ("component", lambda payload: relabelled(payload, component=2)),
        ("token_start", lambda payload: relabelled(payload, token_start=5)),
        ("token_count", lambda payload: relabelled(payload, token_count=3)),
        ("codec", lambda payload: relabelled(payload, codec=7)),
        ("length", lambda payload: relabelled(payload, data_length=127)),
        ("magic", lambda payload: b"KVO2" + payload[4:]),
        ("version", lambda payload: payload[:4] + b"\x02" + payload[5:]),
        ("length", lambda payload: payload[:-1]),
        ("length", lambda payload: payload[:60]),
    ],
)
async def test_a_damaged_object_is_dropped_counted_and_fetched_again(
    files: PemFiles, check: str, change: Callable[[bytes], bytes]
) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened(files, raw) as it:
        await it.follow()
        raw.layers(0)
        raw.layer(1, {(K0, 1): spoiled(raw.toy, K0, 1, 1, change)})
        # It is there again before the producer goes on.
        assert same(await it.cache.layer(1), raw.toy)
        raw.layers(2, 3)
        raw.end()
        raw.manifest()
        await it.all_layers()
        report = it.cache.report
        assert report.rejected == {check: 1}
        assert (report.objects, report.duplicates, report.refetches) == (24, 0, 1)
        assert it.fetched == [("k.raw.s0", LocationFilter.absolute_range(1, 1, 1, 1))]
        counts = it.wire.objects("k.raw.s0")
        assert counts.pop(Location(1, 1)) == 2 and set(counts.values()) == {1}


async def test_flags_and_reserved_are_ignored(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened(files, raw) as it:
        await it.follow()
        odd = spoiled(raw.toy, V0, 0, 0, lambda payload: relabelled(payload, flags=9, reserved=5))
        raw.layer(0, {(V0, 0): odd})
        raw.layers(1, 2, 3)
        raw.end()
        raw.manifest()
        await it.all_layers()
        assert it.cache.report.rejected == {} and not it.fetched


async def test_an_object_that_stays_damaged_is_told_at_the_bound_of_recovery(
    files: PemFiles,
) -> None:
    raw = RawPublication(toy_publication())
    raw.layer(0)
    bad = {(V0, 1): spoiled(raw.toy, V0, 1, 1, damaged)}
    raw.layer(1, bad, bad)
    raw.layers(2, 3)
    raw.end()
    raw.manifest()
    async with opened(files, raw) as it:
        began = asyncio.get_running_loop().time()
        with pytest.raises(kvcs.CacheIncomplete) as caught:
            await it.all_layers()
        assert asyncio.get_running_loop().time() - began < 2.0  # the deadline is 10 s
        error = caught.value
        assert [str(run) for run in error.missing] == ["v layer 1 blocks 1-1 (tokens 4-7)"]
        assert (error.missing[0].component, error.missing[0].layer) == ("v", 1)
        assert (error.missing[0].first_token, error.missing[0].last_token) == (4, 7)
        assert error.usable_tokens == 4
        assert "recovery ended after 0.4 s (an object failed its digest check)" in str(error)
        for index in (0, 2, 3):
            assert same(await it.cache.layer(index), raw.toy)
        report = it.cache.report
        assert report.rejected["digest"] == 1 + report.refetches and report.refetches > 1
        assert report.objects == 23
        with pytest.raises(kvcs.CacheIncomplete):
            await it.cache.complete()


# Streams that end early


@pytest.mark.parametrize(("whole", "part"), [(0, 0), (0, 50), (1, 100), (2, 195)])
async def test_a_stream_that_is_reset_in_mid_layer_goes_on_by_fetch(
    files: PemFiles, whole: int, part: int
) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened(files, raw) as it:
        await it.follow()
        raw.layers(0)
        hand = await raw.subscribed(K0)
        for block in range(3):
            at = Location(1, block)
            raw.put_object(raw.stored[K0], at, raw.toy.objects[K0, at])
        if whole + part:
            await it.cut(K0, 1, whole, part)
        else:
            hand.reset(1)  # before its first Object
        for track in (raw.live[V0], raw.stored[V0]):
            raw.group(track, V0, 1)
        assert same(await it.cache.layer(1), raw.toy)
        assert it.fetched == [("k.raw.s0", LocationFilter.absolute_range(1, whole, 1, 2))]
        raw.layers(2, 3)
        raw.end()
        raw.manifest()
        await it.all_layers()
        assert it.cache.report.duplicates == 0
        counts = it.wire.objects("k.raw.s0")
        again = {location for location, count in counts.items() if count > 1}
        assert again == ({Location(1, whole)} if part else set())


async def test_a_subscriber_whose_streams_are_reset_gets_each_object_once(
    files: PemFiles,
) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened(files, raw) as it:
        await it.follow()
        raw.layers(0)
        for layer in (1, 2, 3):
            for name, track in raw.stored.items():
                raw.group(track, name, layer)
        for name in (K0, V0):
            for layer in (1, 2, 3):
                await it.cut(name, layer, 1 if layer == 1 else 0, 20, code=5)  # TOO_FAR_BEHIND
        raw.manifest()
        await it.all_layers()
        assert it.cache.report.duplicates == 0
        for track_name in ("k.raw.s0", "v.raw.s0"):
            counts = it.wire.objects(track_name)
            again = {location: count for location, count in counts.items() if count > 1}
            assert again == {Location(1, 1): 2, Location(2, 0): 2, Location(3, 0): 2}


async def test_a_layer_that_is_still_produced_is_not_lost_with_its_stream(
    files: PemFiles,
) -> None:
    """A relay opens a new stream for what comes later; it may take longer than recovery."""
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened(files, raw, HASTY) as it:
        await it.follow()
        raw.layers(0)
        for name in (K0, V0):
            await it.cut(name, 1, 1, 0)
        await it.wire.until(lambda: len(it.wire.of(events.RequestRefused)) >= 3)
        await longer_than_recovery(it, files)
        for name in (K0, V0):
            raw.begin(name, 1, 3, first=1).finish()
        assert same(await it.cache.layer(1), raw.toy)
        for layer in (2, 3):
            for name, track in raw.live.items():
                raw.group(track, name, layer)
        raw.end(everywhere=False)
        raw.manifest()
        await it.all_layers()


# Fills


async def test_an_unknown_range_in_a_fill_is_fetched(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.live[V0] = raw.track(b"v.raw.s0", authoritative=False)
    for layer in ALL:
        raw.layer(layer, {(V0, 1): None} if layer == 2 else None)
    raw.end()
    raw.manifest()
    async with opened(files, raw) as it:
        await it.all_layers()
        (marked,) = it.wire.of(events.RangeMarked)[:1]
        assert marked.location >= Location(2, 1)
        assert it.fetched == [("v.raw.s0", LocationFilter.absolute_range(2, 1, 2, 1))]
        assert it.cache.report.duplicates == 0


async def test_a_range_nobody_knows_is_named(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    for tracks in (raw.live, raw.stored):
        tracks[V0] = raw.track(b"v.raw.s0", authoritative=False)
    for layer in ALL:
        hole = {(V0, 1): None} if layer == 2 else None
        raw.layer(layer, hole, hole)
    raw.end()
    raw.manifest()
    async with opened(files, raw) as it:
        with pytest.raises(kvcs.CacheIncomplete, match="marked UNKNOWN") as caught:
            await it.all_layers()
        assert [str(run) for run in caught.value.missing] == ["v layer 2 blocks 1-1 (tokens 4-7)"]
        assert same(await it.cache.layer(1), raw.toy)


async def test_a_fill_that_is_reset_costs_what_it_owed_and_no_later_layer(
    files: PemFiles,
) -> None:
    raw = RawPublication(toy_publication())
    raw.live[K0] = raw.track(b"k.raw.s0", authoritative=False)
    raw.reset_fills = 0x9
    raw.layers(0)
    raw.layer(1, {(K0, 1): None})
    raw.manifest(layers=2)
    async with opened(files, raw, HASTY) as it:
        assert same(await it.cache.layer(1), raw.toy)
        # Layers 2 and 3 take longer than recovery would wait for what was lost.
        await longer_than_recovery(it, files)
        raw.layers(2, 3)
        raw.end()
        raw.manifest()
        await it.all_layers()
        assert it.fetched == [("k.raw.s0", LocationFilter.absolute_range(1, 1, 1, 2))]


async def test_a_fill_of_which_nothing_is_ever_heard_is_fetched(files: PemFiles) -> None:
    """A reset that overtakes a stream's first octets leaves nothing to tell whose it was."""
    raw = RawPublication(toy_publication())
    raw.live[K0] = raw.track(b"k.raw.s0", authoritative=False)
    raw.reset_fills, raw.reset_at_once = 0x9, True
    raw.layer(0, {(K0, 0): None})
    raw.manifest(layers=1)
    settings = replace(HASTY, quiet=0.1)
    async with opened(files, raw, settings) as it:
        assert same(await it.cache.layer(0), raw.toy)
        (wanted,) = {chosen for name, chosen in it.fetched}
        assert wanted == LocationFilter.absolute_range(0, 0, 0, 2)
        # It was a doubt, not a loss: the producer may take its time.
        await longer_than_recovery(it, files)
        raw.layers(1, 2, 3)
        raw.end()
        raw.manifest()
        await it.all_layers()


async def test_listed_objects_that_exist_nowhere_yet_are_waited_for(files: PemFiles) -> None:
    """A relay that is slow to bring what the manifest promises is no loss."""
    raw = RawPublication(toy_publication())
    raw.manifest(raw.toy.writer(complete=False).to_json_bytes())
    settings = replace(HASTY, quiet=0.02)
    async with opened(files, raw, settings) as it:
        await it.follow()
        await it.wire.until(lambda: len(it.wire.of(events.RequestRefused)) >= 5)
        await longer_than_recovery(it, files)
        raw.layers(*ALL)
        raw.end()
        raw.manifest()
        await it.all_layers()


# Gaps


async def test_what_a_stream_leaves_out_is_fetched_before_the_next_layer(
    files: PemFiles,
) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened(files, raw) as it:
        await it.follow()
        raw.layer(0, {(K0, 0): None, (K0, 2): None})
        assert same(await it.cache.layer(0), raw.toy)
        assert it.fetched == [
            ("k.raw.s0", LocationFilter.absolute_range(0, block, 0, block)) for block in (0, 2)
        ]
        raw.layers(1, 2, 3)
        raw.end()
        raw.manifest()
        await it.all_layers()
        assert it.cache.report.duplicates == 0


async def test_a_group_that_never_comes_is_fetched_at_the_end(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened(files, raw) as it:
        await it.follow()
        for layer in ALL:
            for name in (K0, V0):
                raw.group(raw.stored[name], name, layer)
                if (name, layer) != (V0, 1):
                    raw.group(raw.live[name], name, layer)
        raw.end()
        raw.manifest()
        await it.all_layers()
        assert it.fetched == [("v.raw.s0", LocationFilter.absolute_range(1, 0, 1, 2))]


async def test_the_manifest_alone_tells_the_end_where_the_tracks_do_not(
    files: PemFiles,
) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened(files, raw) as it:
        await it.follow()
        raw.layers(0, 1, 2)
        for name in (K0, V0):
            raw.group(raw.stored[name], name, 3)  # live, layer 3 and every end are lost
        raw.manifest()
        await it.all_layers()
        assert it.fetched == [
            (f"{component}.raw.s0", LocationFilter.absolute_range(3, 0, 3, 2)) for component in "kv"
        ]


async def test_a_subscription_that_is_ended_early_goes_on_by_fetch(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened(files, raw) as it:
        await it.follow()
        raw.layers(0, 1)
        for name in (K0, V0):
            for layer in (2, 3):
                raw.group(raw.stored[name], name, layer)
            raw.live[name].end(PublishDoneCode.TOO_FAR_BEHIND, "too slow")
        raw.manifest()
        await it.all_layers()
        assert it.cache.report.duplicates == 0


@pytest.mark.parametrize(
    "status", [PublishDoneCode.TOO_FAR_BEHIND, PublishDoneCode.EXCESSIVE_LOAD, 0x77, None]
)
async def test_a_subscription_that_is_dropped_in_production_is_made_again(
    files: PemFiles, status: int | None
) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened(files, raw, HASTY) as it:
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
        await longer_than_recovery(it, files)
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


async def test_a_subscription_that_is_dropped_again_and_again_is_given_up(
    files: PemFiles,
) -> None:
    raw = RawPublication(toy_publication())
    raw.layers(0)
    raw.manifest(layers=1)
    async with opened(files, raw, HASTY) as it:
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


async def test_a_data_track_that_is_refused_is_fetched(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.layers(*ALL)
    raw.end()
    raw.manifest()
    del raw.live[V0]
    async with opened(files, raw) as it:
        await it.all_layers()
        assert it.fetched == [("v.raw.s0", LocationFilter.absolute_range(0, 0, 3, 2))]


async def test_a_fetch_whose_request_is_taken_back_is_made_again(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.layer(0, {(K0, 1): None})
    raw.layers(1, 2, 3)
    raw.end()
    raw.manifest()
    raw.revoked_fetches = 2
    async with opened(files, raw) as it:
        await it.all_layers()
        assert it.cache.report.refetches == 3


# Refetching that fails


async def test_a_fetch_that_is_refused_is_tried_again(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    raw.fetchable = False
    async with opened(files, raw) as it:
        await it.follow()
        raw.layer(0, {(K0, 1): spoiled(raw.toy, K0, 0, 1, damaged)})
        await it.wire.until(lambda: len(it.wire.of(events.RequestRefused)) >= 3)
        raw.fetchable = True
        raw.layers(1, 2, 3)
        raw.end()
        raw.manifest()
        await it.all_layers()
        assert it.cache.report.refetches >= 3


async def test_a_fetch_that_is_always_refused_says_why(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.fetchable = False
    raw.layer(0, {(K0, 1): None})
    raw.layers(1, 2, 3)
    raw.end()
    raw.manifest()
    async with opened(files, raw) as it:
        with pytest.raises(kvcs.CacheIncomplete, match="refused with 0x10: no such track") as info:
            await it.all_layers()
        assert [str(run) for run in info.value.missing] == ["k layer 0 blocks 1-1 (tokens 4-7)"]


async def test_time_for_recovery_counts_anew_from_each_loss(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened(files, raw, HASTY) as it:
        await it.follow()
        raw.layers(0, 1)
        for layer in (2, 3):
            raw.layer(layer, {(V0, 2): spoiled(raw.toy, V0, layer, 2, damaged)})
            assert same(await it.cache.layer(layer), raw.toy)
            await longer_than_recovery(it, files)
        raw.end()
        raw.manifest()
        await it.all_layers()
        assert it.cache.report.rejected == {"digest": 2}


# Contradictions


async def test_a_manifest_that_contradicts_a_released_object_ends_the_use(
    files: PemFiles,
) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    other = RawPublication(toy_publication(seed=1))
    async with opened(files, raw) as it:
        await it.follow()
        raw.layers(0, 1)
        assert same(await it.cache.layer(1), raw.toy)
        waiting = asyncio.create_task(it.cache.layer(3))
        raw.manifest(other.toy.writer([2]).to_json_bytes())
        with pytest.raises(kvcs.PublicationError, match="contradicts itself") as caught:
            await waiting
        assert not isinstance(caught.value, kvcs.PublicationAborted)
        with pytest.raises(kvcs.PublicationError):
            await it.cache.layer(0)  # nothing of it may be used any more
        with pytest.raises(kvcs.PublicationError):
            await it.cache.complete()


async def test_an_object_that_is_not_the_listed_one_is_fetched_again(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest()
    another = toy_publication(seed=1).objects[K0, Location(2, 0)]
    async with opened(files, raw) as it:
        await it.follow()
        raw.layers(0, 1)
        raw.layer(2, {(K0, 0): another})
        raw.layers(3)
        raw.end()
        await it.all_layers()
        assert it.cache.report.rejected == {"listed": 1}


async def test_two_payloads_at_one_location_end_the_use(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    another = toy_publication(seed=1).objects[K0, Location(0, 0)]
    async with opened(files, raw) as it:
        hand = await raw.subscribed(K0)
        hand.stream(0, *hand.blocks(0, 0, 1, 2), (3, 3))
        await it.wire.until(lambda: it.cache.progress.objects_verified == 3)
        hand.stream(0, *hand.blocks(0, 0, 1, 2), (3, 3))  # the same again is none
        await it.wire.until(lambda: it.cache.report.duplicates == 3)
        hand.stream(0, (0, another), *hand.blocks(0, 1, 2), (3, 3))
        with pytest.raises(kvcs.PublicationError, match="contradicts itself"):
            await it.cache.layer(0)
        assert it.client.is_open  # the session lives


async def test_objects_that_no_manifest_confirms_are_incomplete_at_the_bound(
    files: PemFiles,
) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened(files, raw) as it:
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

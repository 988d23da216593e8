"""What a subscription lost, damaged or contradicted: fetched again, or told, within its time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import kvcs
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from tests.builders import QUICK, same, toy_publication
from tests.certificates import PemFiles
from tests.loopback.raw_publication import K0, V0, RawPublication, damaged, relabelled
from tests.loopback.retrieving import ALL, opened, opened_on_virtual_time, spoiled
from tests.virtual import virtual

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


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


@pytest.mark.parametrize("sign", ["End of Track", "PUBLISH_DONE"])
@virtual
async def test_either_sign_alone_tells_the_end_of_a_track(sign: str) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with opened_on_virtual_time(raw, QUICK) as it:
        await it.follow()
        for layer in ALL:
            for name in (K0, V0):
                raw.group(raw.stored[name], name, layer)
                if (name, layer) != (V0, 1):
                    raw.group(raw.live[name], name, layer)
        for track in raw.live.values():
            if sign == "PUBLISH_DONE":
                track.end()
            else:
                raw.end_of_track(track)
        # No manifest says so: that all has ended shows that the group will not come.
        await it.wire.until(lambda: it.fetched != [])
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

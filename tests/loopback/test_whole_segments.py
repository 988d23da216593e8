"""Whole segments of another publication: taken where nothing of ours was handed out, never mixed.

The two publications of these tests differ in every tensor, so that a mix would show.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import kvcs
from kvcs.fallback import HttpServer, HttpSource
from kvcs.kv import DataTrack
from kvcs.moqt.names import FullTrackName
from kvcs.quic.connection import Connection, PeerRequest
from tests.builders import BRIEF, QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.beside import Side, named, raw_of, session_with, whose
from tests.loopback.http_fixtures import save
from tests.loopback.kv_fixtures import joined, serving
from tests.loopback.raw_publication import K0, V0, RawPublication
from tests.loopback.retrieving import ALL

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

OURS, THEIRS = toy_publication(), toy_publication(seed=1)


@pytest.mark.parametrize("gone", [(K0, 0, 0), (V0, 2, 1), (V0, 3, 2)])
async def test_a_segment_comes_whole_from_the_other_publication(
    files: PemFiles, gone: tuple[DataTrack, int, int]
) -> None:
    ours, theirs = raw_of(OURS, 1, [gone]), raw_of(THEIRS, 2)
    side = Side(ours, theirs)
    async with session_with(side, files) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        async with subscriber.open(toy_prefix(), publication=named(ours), whole=True) as cache:
            got = [layer async for layer in cache]
            assert [layer.index for layer in got] == list(ALL)
            assert all(same(layer, THEIRS) for layer in got)
            report = cache.report
            assert report.publication == named(ours)
            assert report.segments_from == {0: named(theirs)}
            assert (report.tokens, report.layers, report.objects) == (12, 4, 24)
    assert set(side.data_of(theirs)) == {"k.raw.s0", "v.raw.s0"}


async def test_layers_are_held_back_until_all_are_there_and_only_if_that_is_asked_for(
    files: PemFiles,
) -> None:
    raw = RawPublication(OURS)
    raw.manifest(layers=0)
    async with raw.serve(files) as server, joined(server, files) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        async with (
            subscriber.open(toy_prefix(), whole=True) as whole,
            subscriber.open(toy_prefix()) as early,
        ):
            await raw.subscribed(K0, 2)
            await raw.subscribed(V0, 2)
            waiting = asyncio.create_task(whole.layer(0))
            raw.layers(0, 1, 2)
            for layer in (0, 1, 2):
                assert same(await early.layer(layer), OURS)
            raw.layers(3)
            assert same(await early.layer(3), OURS)
            assert not waiting.done()  # no manifest calls it complete yet
            raw.end()
            raw.manifest()
            assert same(await waiting, OURS)
            assert [same(layer, OURS) async for layer in whole] == [True] * 4


async def test_each_segment_is_of_one_publication(files: PemFiles) -> None:
    toys = [toy_publication((2, 1, 2), seed=seed) for seed in (0, 1, 2)]
    # Each publication has one segment that is whole, and no two the same one.
    v0, v1, v2 = (DataTrack.parse(f"v.raw.s{number}") for number in range(3))
    ours = raw_of(toys[0], 1, [(v1, 3, 0), (v2, 1, 1)])
    second = raw_of(toys[1], 2, [(v0, 0, 0), (v2, 3, 0)])
    third = raw_of(toys[2], 3, [(v0, 2, 1), (v1, 0, 0)])
    side = Side(ours, second, third)
    async with session_with(side, files) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        async with subscriber.open(toy_prefix(5), publication=named(ours), whole=True) as cache:
            got = [layer async for layer in cache]
            for layer in got:
                parts = (slice(0, 2), slice(2, 3), slice(3, 5))
                assert [whose(layer, toys, part) for part in parts] == [0, 1, 2]
            assert cache.report.segments_from == {1: named(second), 2: named(third)}
            assert cache.report.tokens == 20


@pytest.mark.parametrize("ours_says", [False, True])
@pytest.mark.parametrize("theirs_says", [False, True])
async def test_blocks_are_taken_where_both_say_deterministic_and_whole_segments_else(
    files: PemFiles, ours_says: bool, theirs_says: bool
) -> None:
    # A promise that is broken: blocks of the other one are refused by our list of digests.
    lies = toy_publication(seed=1)
    ours = raw_of(OURS, 1, [(V0, 2, 1)], deterministic=ours_says)
    theirs = raw_of(lies, 2, deterministic=theirs_says)
    async with session_with(Side(ours, theirs), files) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        async with subscriber.open(toy_prefix(), publication=named(ours), whole=True) as cache:
            got = [layer async for layer in cache]
            assert all(same(layer, lies) for layer in got)
            report = cache.report
            both = ours_says and theirs_says
            assert (report.rejected.get("listed", 0) > 0) == both
            assert report.segments_from == {0: named(theirs)}


async def test_what_one_relay_lacks_of_the_other_publication_comes_from_the_next(
    files: PemFiles,
) -> None:
    ours = raw_of(OURS, 1, [(V0, 2, 1)])
    here, there = raw_of(THEIRS, 2, [(K0, 1, 2)]), raw_of(THEIRS, 2, [(V0, 0, 0)])
    one, two = Side(ours, here), Side(there)
    async with session_with(one, files) as first, session_with(two, files) as second:
        subscriber = kvcs.Subscriber(first, second, settings=QUICK)
        async with subscriber.open(toy_prefix(), publication=named(ours), whole=True) as cache:
            got = [layer async for layer in cache]
            assert all(same(layer, THEIRS) for layer in got)
            assert cache.report.segments_from == {0: named(here)}


async def test_what_comes_of_ours_meanwhile_counts(files: PemFiles) -> None:
    ours = raw_of(OURS, 1, [(V0, 2, 1)])
    theirs = raw_of(THEIRS, 2, [(K0, 0, 0)])
    asked = asyncio.Event()

    class Watched(Side):
        def answer(self, connection: Connection, request: PeerRequest) -> bool:
            answered = super().answer(connection, request)
            if self.data_of(theirs):
                asked.set()
            return answered

    async with session_with(Watched(ours, theirs), files) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        async with subscriber.open(toy_prefix(), publication=named(ours), whole=True) as cache:
            complete = asyncio.create_task(cache.complete())
            await asked.wait()
            ours.stored[V0] = raw_of(OURS, 1).stored[V0]  # it is found again
            await complete
            assert [same(layer, OURS) async for layer in cache] == [True] * 4
            assert cache.report.segments_from == {}


async def test_over_http(tmp_path: Path, files: PemFiles) -> None:
    ours = raw_of(OURS, 1, [(V0, 2, 1)])
    theirs = await save(tmp_path, THEIRS)
    async with (
        session_with(Side(ours), files) as client,
        HttpServer(tmp_path, port=0, authority=None) as http,
    ):
        subscriber = kvcs.Subscriber(client, fallback=HttpSource(http.url), settings=QUICK)
        async with subscriber.open(toy_prefix(), publication=named(ours), whole=True) as cache:
            got = [layer async for layer in cache]
            assert all(same(layer, THEIRS) for layer in got)
            assert cache.report.segments_from == {0: theirs}
            assert cache.report.fetched_over_http == 24


async def test_recomputing_comes_after_it(files: PemFiles) -> None:
    ours, theirs = raw_of(OURS, 1, [(V0, 2, 1)]), raw_of(THEIRS, 2)

    async def recompute(missing: kvcs.MissingLayer) -> tuple[object, object]:
        raise AssertionError("it was there")

    async with session_with(Side(ours, theirs), files) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        async with subscriber.open(
            toy_prefix(), publication=named(ours), whole=True, recompute=recompute
        ) as cache:
            assert [same(layer, THEIRS) async for layer in cache] == [True] * 4


# Signed and sealed


@pytest.mark.parametrize("theirs_signed", [False, True])
async def test_a_signed_segment_is_replaced_by_a_signed_one_alone(
    files: PemFiles, theirs_signed: bool
) -> None:
    prefix = toy_prefix()
    signer = kvcs.SigningKey.generate(name="producer", scope_id=prefix.scope_id)
    ring = kvcs.ProtectionRing(scope_id=prefix.scope_id)
    ring.rotate()
    async with serving(files) as server, joined(server, files) as client:
        publisher = kvcs.Publisher(server)
        async with (
            publisher.publish(prefix, sign=signer, protect=ring) as ours,
            publisher.publish(
                prefix, sign=signer if theirs_signed else None, protect=ring
            ) as theirs,
        ):
            await put(await ours.segment(), OURS)
            await put(await theirs.segment(), THEIRS)
            # Its producer has lost a layer of it.
            server.origin._tracks[FullTrackName(ours.namespace, V0.name)].evict_group(2)
            subscriber = kvcs.Subscriber(
                client,
                settings=QUICK if theirs_signed else BRIEF,
                keys=kvcs.KeyRing([signer.public]),
                protection=ring,
            )
            uri = ours.uri(server.url)
            async with subscriber.open(prefix, publication=uri, whole=True) as cache:
                if theirs_signed:
                    assert [same(layer, THEIRS) async for layer in cache] == [True] * 4
                    assert cache.report.signed_by == signer.public.kid
                    return
                with pytest.raises(kvcs.CacheIncomplete):
                    await cache.complete()
                assert cache.report.segments_from == {}

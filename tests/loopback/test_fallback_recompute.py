"""What a retrieval does where nobody has what lacks: the caller's own engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcs
from kvcs.errors import CacheIncomplete, PublicationAborted
from kvcs.fallback import HttpSource
from kvcs.moqt.names import Location
from kvcs.subscriber.last_means import MissingLayer
from tests.builders import QUICK, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import Wire, joined
from tests.loopback.raw_publication import K0, V0, RawPublication, damaged
from tests.loopback.test_fallback import Engine, all_of, faulty, published, spoil

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def test_what_nobody_has_is_recomputed(files: PemFiles) -> None:
    toy, wire = toy_publication(), Wire()
    raw, engine = RawPublication(toy), Engine(toy)
    async with raw.serve(files) as server, joined(server, files, wire) as client:
        raw.manifest()
        for layer in range(4):
            gone = {(V0, 1): None} if layer == 2 else {}
            raw.layer(layer, live=gone, stored=gone)
        raw.end()
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        async with subscriber.open(toy_prefix(), recompute=engine) as cache:
            await all_of(cache, toy)
            assert engine.asked == [(2, 4, 7)]
            assert cache.report.recomputed == 1  # K of the block was there
            assert cache.usable_tokens == 12


async def test_an_aborted_publication_is_finished_by_the_caller(files: PemFiles) -> None:
    toy = toy_publication()
    raw, engine = RawPublication(toy), Engine(toy)
    async with raw.serve(files) as server, joined(server, files) as client:
        raw.manifest(layers=2)
        raw.layers(0, 1)
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        async with subscriber.open(toy_prefix(), recompute=engine) as cache:
            await cache.layer(1)
            raw.abort("out of memory")
            await all_of(cache, toy)
            assert engine.asked == [(2, 0, 11), (3, 0, 11)]
    async with raw.serve(files) as server, joined(server, files) as client:
        with pytest.raises(PublicationAborted):
            async with kvcs.Subscriber(client, settings=QUICK).open(toy_prefix()) as cache:
                await cache.complete()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((np.zeros((4, 2, 9)), np.zeros((4, 2, 8))), "recompute: k of layer 2, tokens 4-7"),
        (
            (
                np.zeros((4, 2, 8), dtype=toy_prefix().descriptor.numpy_dtype),
                np.zeros((4, 2, 8), dtype=np.float32),
            ),
            "recompute: v of layer 2, tokens 4-7",
        ),
        (ValueError("no room"), "recompute raised ValueError: no room"),
    ],
)
async def test_what_comes_back_wrong_is_told(files: PemFiles, answer: Any, why: str) -> None:
    toy = toy_publication()
    raw = RawPublication(toy)

    async def recompute(missing: MissingLayer) -> tuple[object, object]:
        if isinstance(answer, Exception):
            raise answer
        k, v = answer
        return k, v

    async with raw.serve(files) as server, joined(server, files) as client:
        raw.manifest()
        for layer in range(4):
            bad = {(V0, 1): damaged(toy.objects[V0, Location(2, 1)])} if layer == 2 else {}
            raw.layer(layer, live=bad, stored=bad)
        raw.end()
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        async with subscriber.open(toy_prefix(), recompute=recompute) as cache:
            with pytest.raises(CacheIncomplete, match=why) as caught:
                await cache.layer(2)
            assert caught.value.__cause__ is not None
            [missing] = caught.value.missing
            assert (missing.component, missing.layer, missing.first_block) == ("v", 2, 1)
            assert same(await cache.layer(3), toy)


async def test_http_comes_before_recomputing(tmp_path: Path, files: PemFiles) -> None:
    toy = toy_publication()
    raw, engine = await faulty(tmp_path, toy), Engine(toy)
    async with published(files, tmp_path, raw) as (client, http):
        raw.manifest()
        for layer in range(4):
            gone = {(K0, 0): None, (V0, 0): None} if layer == 1 else {}
            raw.layer(layer, live=gone, stored=gone)
        raw.end()
        spoil(tmp_path, "k.raw.s0/1", 100)
        subscriber = kvcs.Subscriber(client, fallback=HttpSource(http.url), settings=QUICK)
        async with subscriber.open(toy_prefix(), recompute=engine) as cache:
            await all_of(cache, toy)
            assert engine.asked == [(1, 0, 3)]  # V came over HTTP, K was damaged there, too
            assert (cache.report.fetched_over_http, cache.report.recomputed) == (1, 1)

"""Segments that no other publication may stand for: what was handed out, and what is not whole.

The two publications of these tests differ in every tensor, so that a mix would show.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

import kvcs
from kvcs.kv import DataTrack
from kvcs.moqt.names import Location
from tests.builders import BRIEF, same, toy_prefix, toy_publication
from tests.loopback.beside import Side, named, raw_of
from tests.loopback.raw_publication import K0, V0, damaged
from tests.loopback.retrieving import ALL, meeting
from tests.virtual import virtual

V1 = DataTrack.parse("v.raw.s1")
OURS, THEIRS = toy_publication(), toy_publication(seed=1)


@virtual
@pytest.mark.parametrize("handed_out", [0, 1])
async def test_what_was_handed_out_is_never_joined_by_another_publication(handed_out: int) -> None:
    ours, theirs = raw_of(OURS, 1, [(V0, 2, 1)]), raw_of(THEIRS, 2)
    side = Side(ours, theirs)
    async with meeting(cast(Any, side)) as (_, client):
        subscriber = kvcs.Subscriber(client, settings=BRIEF)
        async with subscriber.open(toy_prefix(), publication=named(ours)) as cache:
            assert same(await cache.layer(handed_out), OURS)
            with pytest.raises(kvcs.CacheIncomplete) as caught:
                await cache.layer(2)
            [missing] = caught.value.missing
            assert (missing.component, missing.layer, missing.first_block) == ("v", 2, 1)
            for layer in (0, 1, 3):
                assert same(await cache.layer(layer), OURS)
            assert cache.report.segments_from == {}
    assert side.data_of(theirs) == []  # it was not even asked for


@virtual
@pytest.mark.parametrize("why", ["incomplete", "lacks one, too", "damaged"])
async def test_a_publication_that_does_not_have_all_of_it_brings_nothing(why: str) -> None:
    ours = raw_of(OURS, 1, [(V0, 2, 1)])
    match why:
        case "incomplete":
            theirs = raw_of(THEIRS, 2, complete=False)
        case "lacks one, too":
            theirs = raw_of(THEIRS, 2, [(K0, 0, 0)])
        case _:
            theirs = raw_of(THEIRS, 2)
            bad = {(V0, 0): damaged(THEIRS.objects[V0, Location(3, 0)])}
            theirs.stored[V0] = theirs.track(b"v.raw.s0")
            for layer in ALL:
                theirs.group(theirs.stored[V0], V0, layer, bad if layer == 3 else None)
    async with meeting(cast(Any, Side(ours, theirs))) as (_, client):
        subscriber = kvcs.Subscriber(client, settings=replace(BRIEF, least_recovery=8.0))
        async with subscriber.open(toy_prefix(), publication=named(ours), whole=True) as cache:
            with pytest.raises(kvcs.CacheIncomplete) as caught:
                await cache.complete()
            [missing] = caught.value.missing
            assert (missing.component, missing.layer, missing.first_block) == ("v", 2, 1)
            # What was whole is ours, and usable.
            for layer in (0, 1, 3):
                assert same(await cache.layer(layer), OURS)
            assert cache.report.segments_from == {}


@virtual
async def test_a_segment_of_other_blocks_is_another_segment() -> None:
    toys = toy_publication((3, 2)), toy_publication((3, 1, 1), seed=1)
    ours, theirs = raw_of(toys[0], 1, [(V1, 2, 1)]), raw_of(toys[1], 2)
    assert ours.namespace[:-1] == theirs.namespace[:-1]
    async with meeting(cast(Any, Side(ours, theirs))) as (_, client):
        subscriber = kvcs.Subscriber(client, settings=BRIEF)
        async with subscriber.open(toy_prefix(5), publication=named(ours), whole=True) as cache:
            with pytest.raises(kvcs.CacheIncomplete) as caught:
                await cache.complete()
            assert caught.value.usable_tokens == 16  # the last block alone lacks
            assert cache.report.segments_from == {}

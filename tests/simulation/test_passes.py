"""Chunked prefill in chunks of any length: whole blocks in segments, no token lost or twice."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import numpy as np
import pytest

import kvcs
from tests.builders import same
from tests.simulation.finding import SETTINGS, Field, fill, play, prefix_of
from tests.unit.kv.toy import Toy, toy_publication

TOY = toy_publication((12,))
WHOLE = prefix_of(range(50))
"""Twelve blocks, and two tokens more."""
SEEDS = 12


def chunk(toy: Toy, layer: int, first: int, tokens: int) -> tuple[Any, Any]:
    """K and V of some tokens; those behind the toy's are noise that nobody may get."""
    pair = []
    for tensor in (toy.k[layer], toy.v[layer]):
        padded = np.concatenate([tensor, np.full_like(tensor[:4], 77)])
        pair.append(padded[first : first + tokens].copy())
    return pair[0], pair[1]


async def prefill(publication: kvcs.Publication, chunks: list[int], pause: float) -> kvcs.Passes:
    """All layers of each chunk, one chunk after the other."""
    passes = publication.passes()
    for tokens in chunks:
        first = passes.tokens
        one = await passes.next(tokens)
        assert one.tokens == tokens
        for layer in range(4):
            await asyncio.sleep(pause)
            k, v = chunk(TOY, layer, first, tokens)
            await one.put(layer, k, v)
            k[:], v[:] = 0, 0  # the engine goes on to use its arrays
    return passes


def cut(random: Random, total: int) -> list[int]:
    """Random lengths that add up to ``total``."""
    chunks: list[int] = []
    while (left := total - sum(chunks)) > 0:
        chunks.append(min(left, random.choice([1, 2, 3, 4, 5, 7, 8, 13, 20])))
    return chunks


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("as_far_as_it_goes", [False, True])
def test_chunks_of_any_length_are_followed_live(seed: int, as_far_as_it_goes: bool) -> None:
    random = Random(seed)
    first_blocks = random.choice([1, 2, 3, 5])
    chunks = cut(random, 50)

    async def scenario(field: Field) -> None:
        async with field.session("producer") as producer, field.session("consumer") as session:
            publishing = kvcs.Publisher(producer).publish(WHOLE, first_segment_blocks=first_blocks)
            async with publishing as publication:
                working = asyncio.create_task(prefill(publication, chunks, pause=0.05))
                await asyncio.sleep(random.random())
                opening = kvcs.Subscriber(session, settings=SETTINGS).open(
                    WHOLE, anchors=(first_blocks,), blocks=None if as_far_as_it_goes else 12
                )
                async with opening as cache:
                    assert all([same(layer, TOY, cache.blocks) async for layer in cache])
                    blocks = cache.blocks
                    entries = cache.manifest.segments
                passes = await working
                assert await passes.finish() == 2
                assert publication.complete
        sizes = expected(chunks, first_blocks)
        assert [entry.blocks for entry in entries] == sizes[: len(entries)]
        assert sum(sizes) == passes.blocks == 12
        if as_far_as_it_goes:
            # Where no block became whole for a while, what there was is what it took.
            assert blocks in [sum(sizes[: count + 1]) for count in range(len(sizes))]
        else:
            assert blocks == 12

    play(scenario, seed)


def expected(chunks: list[int], first_blocks: int) -> list[int]:
    """Blocks of each segment: what each chunk completes, segment 0 apart."""
    sizes: list[int] = []
    tokens = 0
    for each in chunks:
        tokens += each
        if not sizes and tokens // 4 >= first_blocks:
            sizes.append(first_blocks)
        if sizes and tokens // 4 > sum(sizes):
            sizes.append(tokens // 4 - sum(sizes))
    return sizes


def test_passes_say_what_is_wrong() -> None:
    async def scenario(field: Field) -> None:
        async with field.session("producer") as producer:
            publishing = kvcs.Publisher(producer).publish(WHOLE, first_segment_blocks=2)
            with pytest.raises(kvcs.UsageError, match="0 of 4 layers"):
                async with publishing as publication:
                    passes = publication.passes()
                    for wrong in (0, -1, 51):
                        with pytest.raises(kvcs.UsageError, match="50 of the prefix's are left"):
                            await passes.next(wrong)
                    one = await passes.next(7)
                    assert one.segments == ()
                    k, v = chunk(TOY, 0, 0, 7)
                    with pytest.raises(kvcs.UsageError, match="where layer 0 is due"):
                        await one.put(1, k, v)
                    with pytest.raises(kvcs.UsageError, match=r"expected shape \[7, 2, 8\]"):
                        await one.put(0, k[:6], v)
                    with pytest.raises(kvcs.UsageError, match="v of layer 0 is missing"):
                        await one.put(0, k)
                    await one.put(0, k, v)
                    with pytest.raises(kvcs.UsageError, match="1 of 4 layers"):
                        await passes.next(8)
                    for layer in range(1, 4):
                        await one.put(layer, *chunk(TOY, layer, 0, 7))
                    assert (passes.held, passes.blocks) == (7, 0)
                    two = await passes.next(6)
                    assert [segment.blocks for segment in two.segments] == [2, 1]
                    with pytest.raises(kvcs.UsageError, match="a segment was taken already"):
                        publication.passes()

    play(scenario)


def test_a_pass_that_found_no_room_is_put_again() -> None:
    """Half of a pass is published when the store is full; nothing of it is published twice."""

    async def scenario(field: Field) -> None:
        async with field.session("producer") as producer, field.session("consumer") as session:
            publisher = kvcs.Publisher(producer)
            async with publisher.publish(WHOLE, first_segment_blocks=2) as publication:
                one = await publication.passes().next(48)
                k, v = chunk(TOY, 0, 0, 48)
                second = one.segments[1]
                inner = second.put

                async def full(*_: Any, **__: Any) -> None:
                    raise kvcs.StoreFull("no room")

                second.put = full  # type: ignore[method-assign]
                with pytest.raises(kvcs.StoreFull):
                    await one.put(0, k, v)
                second.put = inner  # type: ignore[method-assign]
                for layer in range(4):
                    await one.put(layer, *chunk(TOY, layer, 0, 48))
                subscriber = kvcs.Subscriber(session, settings=SETTINGS)
                async with subscriber.open(WHOLE, anchors=(2,)) as cache:
                    assert all([same(layer, TOY) async for layer in cache])

    play(scenario)


def test_a_finished_publication_takes_more_tokens() -> None:
    async def scenario(field: Field) -> None:
        begin, longer = prefix_of(range(32)), prefix_of(range(48))
        async with field.session("producer") as producer, field.session("consumer") as session:
            async with kvcs.Publisher(producer).publish(begin) as publication:
                await fill(await publication.segment(), TOY)
                await publication.finish()
                subscriber = kvcs.Subscriber(session, settings=SETTINGS)
                async with subscriber.open(begin) as cache:
                    assert all([same(layer, TOY, 8) async for layer in cache])
                with pytest.raises(kvcs.UsageError, match="0 of the prefix's 8 blocks are left"):
                    await publication.segment()
                with pytest.raises(kvcs.UsageError, match="does not begin with the 8"):
                    await publication.segment(prefix=prefix_of(range(1, 49)))
                more = await publication.segment(prefix=longer)
                assert (more.first_block, more.blocks) == (8, 4)
                await fill(more, TOY, [0])
                async with subscriber.open(longer, anchors=(8,)) as cache:
                    await fill(more, TOY, [1, 2, 3])
                    assert all([same(layer, TOY) async for layer in cache])
                    assert cache.usable_tokens == 48

    play(scenario)

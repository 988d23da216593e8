"""From token ids to the longest usable prefix: anchors, an index, and what is not asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

import kvcs
from kvcs.subscriber.discovery import MAX_NAMED
from tests.builders import same
from tests.simulation.finding import SETTINGS, Field, asked_by, fill, play, prefix_of
from tests.unit.kv.toy import toy_publication

LONG = toy_publication((8,))
SHARED = prefix_of(range(16))
"""Four blocks that several prompts begin with."""
PROMPT = prefix_of([*range(16), *range(900, 916)])
"""Those four, and four of its own."""


class Directory:
    """An index that knows what a test has told it."""

    def __init__(self, *found: kvcs.Holding | str, error: Exception | None = None) -> None:
        self.found, self.error = found, error
        self.asked: list[tuple[bytes, ...]] = []

    async def find(self, prefix: kvcs.Prefix) -> Sequence[kvcs.Holding | str]:
        self.asked.append(prefix.block_keys)
        if self.error is not None:
            raise self.error
        return self.found


def test_a_shorter_anchor_gives_the_shared_blocks_at_once() -> None:
    async def scenario(field: Field) -> None:
        async with field.published(SHARED, LONG), field.session("consumer") as session:
            asked = asked_by(session)
            begun = asyncio.get_running_loop().time()
            async with kvcs.Subscriber(session, settings=SETTINGS).open(PROMPT) as cache:
                layers = [layer async for layer in cache]
                assert asyncio.get_running_loop().time() - begun < 1.0
            assert (cache.blocks, await cache.settled(), cache.usable_tokens) == (4, 16, 16)
            assert (cache.report.tokens, cache.report.prefix_tokens) == (16, 32)
            assert len(layers) == 4 and all(same(layer, LONG, 4) for layer in layers)
            assert asked == [PROMPT.namespace_prefix(n) for n in (8, 4, 2, 1)]

    play(scenario)


def test_anchors_of_the_caller_are_asked_for_one_by_one_and_no_further_than_needed() -> None:
    async def scenario(field: Field) -> None:
        settings = kvcs.SubscriberSettings(probes_at_once=1)
        async with field.published(prefix_of(range(12)), LONG):
            async with field.session("consumer") as session:
                asked = asked_by(session)
                opening = kvcs.Subscriber(session, settings=settings).open(
                    PROMPT, anchors=(2, 3, 4)
                )
                async with opening as cache:
                    assert all([same(layer, LONG, 3) async for layer in cache])
                assert asked == [PROMPT.namespace_prefix(n) for n in (8, 4, 3)]

    play(scenario)


def test_without_probing_no_shorter_prefix_leaves_the_consumer() -> None:
    async def scenario(field: Field) -> None:
        async with field.published(SHARED, LONG), field.session("consumer") as session:
            asked = asked_by(session)
            subscriber = kvcs.Subscriber(session, settings=SETTINGS)
            with pytest.raises(kvcs.PublicationNotFound) as caught:
                async with subscriber.open(PROMPT, wait=0, probe=0):
                    pass
            assert caught.value.absent
            assert asked == [PROMPT.namespace_prefix()]

    play(scenario)


def test_the_whole_prefix_is_taken_before_a_shorter_one() -> None:
    async def scenario(field: Field) -> None:
        whole = prefix_of(range(32))
        async with (
            field.published(SHARED, LONG, host="one"),
            field.published(whole, LONG, host="two"),
            field.session("consumer") as session,
        ):
            asked = asked_by(session)
            async with kvcs.Subscriber(session, settings=SETTINGS).open(whole) as cache:
                assert all([same(layer, LONG) async for layer in cache])
            assert asked == [whole.namespace_prefix()]

    play(scenario)


def test_passes_that_come_later_are_followed_under_the_first_anchor() -> None:
    async def scenario(field: Field) -> None:
        whole = prefix_of(range(32))
        async with field.session("producer") as producer, field.session("consumer") as session:
            publishing = kvcs.Publisher(producer).publish(whole, first_segment_blocks=4)
            async with publishing as publication:
                first = await publication.segment(4)
                await fill(first, LONG, [0])
                async with kvcs.Subscriber(session, settings=SETTINGS).open(whole) as cache:
                    assert cache.blocks == 8  # segment 0 is not complete: more may come
                    await fill(first, LONG, [1, 2, 3])
                    await fill(await publication.segment(4), LONG)
                    assert all([same(layer, LONG) async for layer in cache])
                    assert await cache.settled() == 32

    play(scenario)


def test_a_live_publication_that_stays_short_is_taken_when_it_is_complete() -> None:
    async def scenario(field: Field) -> None:
        async with field.session("producer") as producer, field.session("consumer") as session:
            async with kvcs.Publisher(producer).publish(SHARED) as publication:
                segment = await publication.segment()
                await fill(segment, LONG, [0])
                async with kvcs.Subscriber(session, settings=SETTINGS).open(PROMPT) as cache:
                    assert cache.blocks == 8
                    settling = asyncio.create_task(cache.settled())
                    await fill(segment, LONG, [1, 2, 3])
                    assert await settling == 16
                    assert all([same(layer, LONG, 4) async for layer in cache])

    play(scenario)


def test_an_explicit_number_of_blocks_is_not_lowered() -> None:
    async def scenario(field: Field) -> None:
        async with field.published(SHARED, LONG), field.session("consumer") as session:
            subscriber = kvcs.Subscriber(session, settings=SETTINGS)
            with pytest.raises(kvcs.PublicationNotFound, match="4 blocks of the 6") as caught:
                async with subscriber.open(PROMPT, blocks=6, wait=0, anchors=(4,)):
                    pass
            assert not caught.value.absent
            async with subscriber.open(PROMPT, blocks=2, wait=0) as cache:
                assert all([same(layer, LONG, 2) async for layer in cache])

    play(scenario)


def test_an_index_leads_to_a_longer_publication() -> None:
    async def scenario(field: Field) -> None:
        longer = prefix_of(range(32))
        async with field.published(longer, LONG) as made, field.session("consumer") as session:
            uri = made.uri("moqt://elsewhere")
            for further in ((), longer.block_keys[4:]):
                index = Directory(kvcs.Holding(uri, 4, further))
                subscriber = kvcs.Subscriber(session, settings=SETTINGS, index=index)
                for prefix in (SHARED, PROMPT):
                    asked = asked_by(session)
                    async with subscriber.open(prefix, probe=0) as cache:
                        assert all([same(layer, LONG, 4) async for layer in cache])
                    assert (cache.blocks, cache.report.believed) == (4, not further)
                    assert set(asked) <= {prefix.namespace_prefix()}
                assert index.asked == [SHARED.block_keys, PROMPT.block_keys]

    play(scenario)


def test_a_longer_publication_that_is_only_named_is_refused_by_field() -> None:
    async def scenario(field: Field) -> None:
        longer = prefix_of(range(32))
        async with field.published(longer, LONG) as made, field.session("consumer") as session:
            subscriber = kvcs.Subscriber(session, settings=SETTINGS)
            uri = made.uri("moqt://relay")
            with pytest.raises(kvcs.PublicationError, match=r"segment 0 has 8 blocks.*_sha256"):
                async with subscriber.open(SHARED, publication=uri):
                    pass
            # With the tokens it is confirmed, and gives the blocks that are asked for.
            async with subscriber.open(longer, publication=uri, blocks=4) as cache:
                assert all([same(layer, LONG, 4) async for layer in cache])

    play(scenario)


def test_an_index_that_fails_or_lies_is_no_harm() -> None:
    async def scenario(field: Field) -> None:
        other = prefix_of(range(500, 532))
        async with (
            field.published(other, toy_publication((8,), seed=9), host="other") as wrong,
            field.session("consumer") as session,
        ):
            lie = kvcs.Holding(wrong.uri("moqt://relay"), 4, other.block_keys[4:])
            for index in (Directory(error=OSError("down")), Directory(lie, "nonsense")):
                subscriber = kvcs.Subscriber(session, settings=SETTINGS, index=index)
                with pytest.raises(kvcs.PublicationNotFound) as caught:
                    async with subscriber.open(SHARED, wait=0):
                        pass
                assert not caught.value.absent
                async with (
                    field.published(SHARED, LONG),
                    subscriber.open(SHARED) as cache,
                ):
                    assert all([same(layer, LONG, 4) async for layer in cache])

    play(scenario)


@pytest.mark.parametrize("bad", ["nonsense", "moqt://relay#kvcs:00", 7, None])
def test_an_item_of_an_index_that_is_none_leaves_the_others(bad: Any) -> None:
    async def scenario(field: Field) -> None:
        theirs, ours = prefix_of(range(32)), prefix_of(range(12))
        async with field.published(theirs, LONG) as made, field.session("consumer") as session:
            good = kvcs.Holding(made.uri("moqt://relay"), 3, theirs.block_keys[3:])
            # However many there are: what cannot be used takes nobody's place.
            index = Directory(*[bad] * (MAX_NAMED + 1), good, bad)
            subscriber = kvcs.Subscriber(session, settings=SETTINGS, index=index)
            with capture_logs() as logs:
                async with subscriber.open(ours, wait=0) as cache:
                    assert all([same(layer, LONG, 3) async for layer in cache])
            [told] = [line for line in logs if line["event"] == "index_items_unusable"]
            assert told["items"] == MAX_NAMED + 2

    play(scenario)


def test_an_index_with_unusable_items_alone_is_unknown_not_absent() -> None:
    async def scenario(field: Field) -> None:
        async with field.session("consumer") as session:
            subscriber = kvcs.Subscriber(session, settings=SETTINGS, index=Directory("nonsense"))
            with pytest.raises(kvcs.PublicationNotFound, match="the index failed") as caught:
                async with subscriber.open(SHARED, wait=0):
                    pass
            assert not caught.value.absent

    play(scenario)


def test_what_an_index_raises_is_not_written_down() -> None:
    """The caller's code was given the prompt's tokens, and may name them."""
    secret = str(SHARED.token_ids)

    async def scenario(field: Field) -> None:
        async with field.session("consumer") as session:
            index = Directory(error=OSError(secret))
            subscriber = kvcs.Subscriber(session, settings=SETTINGS, index=index)
            with capture_logs() as logs, pytest.raises(kvcs.PublicationNotFound) as caught:
                async with subscriber.open(SHARED, wait=0):
                    pass
            [failed] = [line for line in logs if line["event"] == "index_failed"]
            assert failed["reason"] == "OSError"
            assert secret not in f"{logs} {caught.value}"

    play(scenario)


def test_readers_with_their_own_deadlines_share_one_retrieval() -> None:
    async def scenario(field: Field) -> None:
        whole = prefix_of(range(32))
        async with field.session("producer") as producer, field.session("consumer") as session:
            async with kvcs.Publisher(producer).publish(whole) as publication:
                segment = await publication.segment()
                await fill(segment, LONG, [0, 1])
                subscriber = kvcs.Subscriber(session, settings=SETTINGS)
                asked = asked_by(session)

                async def read(deadline: float) -> list[kvcs.Layer]:
                    async with subscriber.open(whole, deadline=deadline) as cache:
                        return [layer async for layer in cache]

                async with asyncio.TaskGroup() as tasks:
                    hasty = tasks.create_task(outcome(read(2.0)))
                    patient = [tasks.create_task(read(seconds)) for seconds in (30.0, 60.0)]
                    await asyncio.sleep(5.0)
                    failed = hasty.result()
                    assert isinstance(failed, kvcs.CacheIncomplete) and "2 s" in str(failed)
                    await fill(segment, LONG, [2, 3])
                for reader in patient:
                    assert all(same(layer, LONG) for layer in reader.result())
                assert len(patient[0].result()) == 4
                assert asked == [whole.namespace_prefix()]

    play(scenario)


async def outcome(body: object) -> object:
    """What a coroutine gives or raises."""
    try:
        return await body  # type: ignore[misc]
    except kvcs.KvcsError as exc:
        return exc

"""A producer's memory is its own: nobody's absence or sloth holds it (case 32)."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import kvcs
from tests.builders import same
from tests.simulation.finding import SETTINGS, Field, fill, play, prefix_of
from tests.unit.kv.toy import Toy, toy_publication

COUNT = 50
TOY = toy_publication((3,))
PREFIXES = [prefix_of(range(start, start + 12)) for start in range(0, 12 * COUNT, 12)]
RETENTION = 3.0


async def publish_all(publisher: kvcs.Publisher, toy: Toy, prefixes: list[kvcs.Prefix]) -> None:
    """One complete publication after the other, kept behind its context."""
    for prefix in prefixes:
        async with publisher.publish(prefix, retention=RETENTION, keep=True) as publication:
            await fill(await publication.segment(), toy)


async def listed(session: kvcs.Connection) -> set[bytes]:
    """Anchor Keys of all that is announced in the scope."""
    found = await kvcs.Subscriber(session, settings=SETTINGS).list(PREFIXES[0].scope_id)
    return {each.namespace.anchor_key for each in found}


def test_fifty_caches_that_nobody_wants_are_gone_after_their_retention() -> None:
    async def scenario(field: Field) -> None:
        async with field.session("producer") as producer, field.session("consumer") as session:
            publisher = kvcs.Publisher(producer)
            await publish_all(publisher, TOY, PREFIXES)
            assert len(publisher.publications) == COUNT
            assert publisher.held_octets > COUNT * 2 * TOY.k.nbytes
            assert await listed(session) == {each.anchor_key() for each in PREFIXES}
            await asyncio.sleep(RETENTION + 0.5)
            assert (publisher.publications, publisher.held_octets) == ((), 0)
            assert await listed(session) == set()

    play(scenario)


def test_the_oldest_complete_ones_make_room_and_are_withdrawn() -> None:
    async def scenario(field: Field) -> None:
        async with field.session("producer") as producer, field.session("consumer") as session:
            probe = kvcs.Publisher(producer)
            await publish_all(probe, TOY, PREFIXES[:1])
            one = probe.held_octets
            await probe.close()
            assert (probe.publications, probe.held_octets) == ((), 0)
            budget = 10 * one
            publisher = kvcs.Publisher(
                producer, settings=kvcs.PublisherSettings(store_octets=budget)
            )
            for number, prefix in enumerate(PREFIXES):
                await publish_all(publisher, TOY, [prefix])
                assert publisher.held_octets <= budget
                kept = [each.prefix.anchor_key() for each in publisher.publications]
                wanted = PREFIXES[max(0, number - 9) : number + 1]
                assert kept == [each.anchor_key() for each in wanted]
            assert await listed(session) == {each.anchor_key() for each in PREFIXES[-10:]}
            await publisher.close()

    play(scenario)


@pytest.mark.parametrize("budget", [None, 10])
def test_a_subscriber_that_stops_reading_holds_nothing(budget: int | None) -> None:
    async def scenario(field: Field) -> None:
        slow = field.network.host("slow")
        async with field.session("producer") as producer, field.session("slow") as session:
            probe = kvcs.Publisher(producer)
            await publish_all(probe, TOY, PREFIXES[:1])
            one = probe.held_octets
            await probe.close()
            settings = kvcs.PublisherSettings(
                store_octets=2**30 if budget is None else budget * one, drain=0.5
            )
            publisher = kvcs.Publisher(producer, settings=settings)
            subscriber = kvcs.Subscriber(session, settings=SETTINGS)

            async def read(prefix: kvcs.Prefix) -> None:
                with pytest.raises((kvcs.KvcsError, asyncio.CancelledError)):
                    async with subscriber.open(prefix, deadline=20.0) as cache:
                        await cache.complete()
                        raise asyncio.CancelledError  # it came before the reading stopped

            async with asyncio.TaskGroup() as tasks:
                readers = [tasks.create_task(read(prefix)) for prefix in PREFIXES]
                await asyncio.sleep(1.0)
                slow.stall(30.0)
                await publish_all(publisher, TOY, PREFIXES)
                assert publisher.held_octets <= settings.store_octets
                assert len(publisher.publications) == (budget or COUNT)
                await asyncio.sleep(RETENTION + 0.5)
                assert (publisher.publications, publisher.held_octets) == ((), 0)
                for reader in readers:
                    reader.cancel()

    play(scenario)


def test_the_engine_has_its_buffers_back_at_once() -> None:
    async def scenario(field: Field) -> None:
        async with field.session("producer") as producer, field.session("consumer") as session:
            publisher = kvcs.Publisher(producer)
            k, v = TOY.k.copy(), TOY.v.copy()
            async with publisher.publish(PREFIXES[0], keep=True) as publication:
                segment = await publication.segment()
                for layer in range(4):
                    await segment.put(layer, k[layer], v[layer])
                    k[layer], v[layer] = np.float32(0), np.float32(0)
            async with kvcs.Subscriber(session, settings=SETTINGS).open(PREFIXES[0]) as cache:
                assert all([same(layer, TOY) async for layer in cache])
            await publisher.close()

    play(scenario)


def test_more_tokens_give_a_publication_more_time() -> None:
    async def scenario(field: Field) -> None:
        async with field.session("producer") as producer:
            publisher = kvcs.Publisher(producer)
            async with publisher.publish(prefix_of(range(8)), retention=RETENTION) as publication:
                await fill(await publication.segment(), TOY)
                await asyncio.sleep(RETENTION - 1)
                more = await publication.segment(prefix=prefix_of(range(12)))
                await asyncio.sleep(RETENTION + 1)
                assert publication.is_open  # not complete: its time does not count
                await fill(more, TOY)
                await asyncio.sleep(RETENTION - 1)
                assert publication.is_open
                await asyncio.sleep(2)
                assert not publication.is_open
                with pytest.raises(kvcs.UsageError, match="has ended"):
                    await publication.segment()

    play(scenario)

"""A consumer that looks up, opens and goes before the first object leaves nothing anywhere."""

from __future__ import annotations

import asyncio

import pytest

import kvcs
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import open_connection
from kvcs.relay.settings import RelayLimits
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.test_lifetimes import exchange, tables
from tests.loopback.test_relay import relaying

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LIMITS = RelayLimits(upstream_linger=0.05)


def subscriptions(connection: Connection) -> int:
    """What the relay is subscribed to at the producer."""
    return tables(connection).get("deliveries._subscriptions", 0)


async def until_unsubscribed(producer: Connection) -> None:
    """The relay has ended every subscription to the producer."""
    async with asyncio.timeout(20):
        while subscriptions(producer):
            await exchange(producer)


@pytest.mark.parametrize("cycles", [20, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
async def test_discover_open_and_cancel(files: PemFiles, cycles: int) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with relaying(files, limits=LIMITS) as relay:
        producer = await open_connection(relay.url, ca=files.ca)
        consumer = await open_connection(relay.url, ca=files.ca)
        try:
            async with kvcs.Publisher(producer).publish(prefix) as publication:
                segment = await publication.segment()
                subscriber = kvcs.Subscriber(consumer, settings=QUICK)

                async def look_and_go() -> None:
                    async with subscriber.open(prefix) as cache:
                        assert cache.progress.objects_verified == 0

                await exchange(consumer)
                await exchange(producer)
                before = tables(consumer), tables(producer)
                tasks = asyncio.all_tasks()
                assert len(await subscriber.list(prefix)) == 1
                for _ in range(cycles):
                    await look_and_go()
                await until_unsubscribed(producer)
                async with asyncio.timeout(20):
                    while (tables(consumer), tables(producer)) != before:
                        await exchange(consumer)
                        await exchange(producer)
                assert asyncio.all_tasks() == tasks
                assert relay.stats.sessions == 2
                # Nothing is pinned: whoever stays gets all of it.
                async with subscriber.open(prefix) as cache:
                    await put(segment, toy)
                    assert all([same(layer, toy) async for layer in cache])
        finally:
            await consumer.close()
            await producer.close()

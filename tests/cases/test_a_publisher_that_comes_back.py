"""A killed publisher starts again with other noise in its tensors: nothing is mixed (case 16)."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import kvcs
from kvcs.testing.network import Conditions, Network, leftovers, run
from tests.builders import same
from tests.simulation.finding import URL, fill
from tests.unit.kv.toy import Toy, toy_prefix, toy_publication

FIRST = toy_publication()
AGAIN = toy_publication()
AGAIN.k = (AGAIN.k.astype(np.float32) + 1e-3).astype(AGAIN.k.dtype)
AGAIN.v = (AGAIN.v.astype(np.float32) + 1e-3).astype(AGAIN.v.dtype)
SETTINGS = kvcs.SubscriberSettings(least_recovery=2.0)


async def produce(toy: Toy, layers: int, ids: asyncio.Queue[bytes], done: asyncio.Event) -> None:
    """One life of the publisher."""
    async with kvcs.connect(URL, reconnect=None) as session:
        async with kvcs.Publisher(session).publish(toy_prefix()) as publication:
            await fill(await publication.segment(), toy, range(layers))
            ids.put_nowait(publication.publication_id)
            await done.wait()


async def whole(session: kvcs.Connection) -> tuple[list[kvcs.Layer], bytes]:
    """Open the prefix, again where what was found fails, and take all layers of one."""
    subscriber = kvcs.Subscriber(session, settings=SETTINGS)
    while True:
        try:
            async with subscriber.open(toy_prefix(), deadline=4.0) as cache:
                layers = [layer async for layer in cache]
            return layers, cache.report.publication.publication_id
        except (kvcs.CacheIncomplete, kvcs.PublicationError):
            continue


async def scenario(seed: int, dark: bool) -> None:
    network = Network(seed, conditions=Conditions(delay=0.02, jitter=0.01))
    relay, producer, consumer = map(network.host, ("relay", "producer", "consumer"))
    ids: asyncio.Queue[bytes] = asyncio.Queue()
    done = asyncio.Event()
    with relay:
        settings = kvcs.RelaySettings(cert="unused", key="unused", allow_anyone=True)
        async with kvcs.Relay(settings):
            with producer:
                first = asyncio.create_task(produce(FIRST, 2, ids, done))
            with consumer:
                async with kvcs.connect(URL, reconnect=None) as session:
                    old = await ids.get()
                    reading = asyncio.create_task(whole(session))
                    await asyncio.sleep(1.0)  # it holds layers 0 and 1 of the first life
                    if dark:
                        network.path(producer, relay).blackout(3600)
                    producer.sever()
                    first.cancel()
                    await asyncio.wait((first,))
                    with network.host("producer again"):
                        second = asyncio.create_task(produce(AGAIN, 4, ids, done))
                    new = await ids.get()
                    layers, taken = await reading
                    done.set()
                    await second
    assert old != new == taken
    assert [layer.index for layer in layers] == [0, 1, 2, 3]
    assert all(same(layer, AGAIN) for layer in layers)
    assert not any(same(layer, FIRST) for layer in layers)
    await asyncio.sleep(120)
    assert leftovers(network) == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_consumer_completes_from_the_new_publication_alone(seed: int, dark: bool) -> None:
    run(scenario(seed, dark))

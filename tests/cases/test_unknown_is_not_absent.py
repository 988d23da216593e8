"""A relay that answers late is not a relay that knows of nothing (case 18)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import kvcs
from kvcs.testing.network import Conditions, Network, leftovers, run
from tests.builders import same
from tests.simulation.finding import URL, fill
from tests.unit.kv.toy import toy_prefix, toy_publication

TIME_OUT = 2.0


async def scenario() -> None:
    toy, prefix = toy_publication(), toy_prefix()
    network = Network(7, conditions=Conditions(delay=0.01))
    relay, producer, consumer = map(network.host, ("relay", "producer", "consumer"))
    with relay:
        settings = kvcs.RelaySettings(cert="unused", key="unused", allow_anyone=True)
        async with kvcs.Relay(settings):
            with producer:
                making = kvcs.connect(URL, reconnect=None)
                maker = await making.__aenter__()
                publishing = kvcs.Publisher(maker).publish(prefix)
                await fill(await (await publishing.__aenter__()).segment(), toy)
            with consumer:
                async with kvcs.connect(URL, reconnect=None) as session:
                    subscriber = kvcs.Subscriber(session)
                    # The relay hears of the look-up, once, half as late again as that may take.
                    network.path(consumer, relay).there.change(delay=1.5 * TIME_OUT)
                    begun = asyncio.get_running_loop().time()
                    for options in ({}, {"wait": 0.0}):
                        with pytest.raises(kvcs.PublicationNotFound, match="unknown") as caught:
                            await retrieved(subscriber, deadline=TIME_OUT / 2, **options)
                        assert not caught.value.absent
                    assert asyncio.get_running_loop().time() - begun == pytest.approx(TIME_OUT)
                    network.path(consumer, relay).there.change(delay=0.01)
                    await asyncio.sleep(1.5 * TIME_OUT)
                    # Nothing was remembered: the next look-up finds it.
                    layers = await retrieved(subscriber, deadline=10.0, wait=0.0)
                    assert all(same(layer, toy) for layer in layers)
                    stranger = kvcs.Prefix(prefix.scope, prefix.descriptor, range(50, 62))
                    with pytest.raises(kvcs.PublicationNotFound) as absent:
                        async with subscriber.open(stranger, wait=0.0):
                            pass
                    assert absent.value.absent
            with producer:
                await publishing.__aexit__(None, None, None)
                await making.__aexit__(None, None, None)
    await asyncio.sleep(120)
    assert leftovers(network) == []


async def retrieved(subscriber: kvcs.Subscriber, **options: Any) -> list[kvcs.Layer]:
    """Every layer."""
    async with subscriber.open(toy_prefix(), **options) as cache:
        return [layer async for layer in cache]


def test_a_late_answer_is_unknown_and_the_next_look_up_finds_it() -> None:
    run(scenario())

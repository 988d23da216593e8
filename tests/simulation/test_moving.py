"""Producers and consumers whose relay stops, dies or sends them away, at any moment: by seeds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from random import Random

import pytest

import kvcs
from kvcs.testing.network import Conditions, Network, leftovers, run
from tests.builders import put, same, toy_prefix, toy_publication

PORT = 4433
DEADLINE = 60.0
"""Virtual seconds of each retrieval; far more than any of these faults takes."""

RECONNECT = kvcs.Reconnect(initial=30.0, deadline=30.0, max_pause=1.0, leave=5.0)
SETTINGS = kvcs.SubscriberSettings(least_recovery=20.0)
"""Loss on the way is another matter than sessions: there is time for it."""

BOTH = ("either relay dies", "both relays die")
"""Faults where everybody has a session with each of two relays."""

FAULTS = (
    "goaway",
    "goaway at once",
    "stop",
    "kill",
    "blackout",
    "producer lost",
    "consumer lost",
    *BOTH,
)
SEEDS = int(os.environ.get("KVCS_MOVES", "6"))
"""Runs of each fault; more are worth a try after a change."""


def relay(network: Network, name: str) -> kvcs.Relay:
    """A relay on a host of its own."""
    settings = kvcs.RelaySettings(
        cert="unused",
        key="unused",
        host=network.host(name).address,
        port=PORT,
        allow_anyone=True,
        goaway_timeout=3.0,
        quic=kvcs.QuicSettings(idle_timeout=4.0, ping_interval=1.0),
    )
    return kvcs.Relay(settings)


class Scene:
    """Two relays, one producer, and consumers that come one after the other."""

    def __init__(self, fault: str, seed: int) -> None:
        self.fault = fault
        self.random = Random(f"{fault} {seed}")
        self.seed = seed
        self.toy = toy_publication(layers=6)
        self.prefix = toy_prefix(descriptor=self.toy.descriptor)
        self.reports: list[kvcs.CacheReport] = []
        self.connected = asyncio.Semaphore(0)
        """Released by everybody whose session is there."""

    async def main(self) -> None:
        chance = self.random
        conditions = Conditions(
            delay=chance.choice((0.001, 0.02, 0.1)), loss=chance.choice((0.0, 0.0, 0.02))
        )
        self.network = network = Network(self.seed, conditions=conditions)
        async with AsyncExitStack() as stack:
            self.a = await self._start("a")
            self.b = await self._start("b")
            stack.push_async_callback(lambda: self.b.close(at_once=True))
            stack.push_async_callback(lambda: self.a.close(at_once=True))
            consumers = chance.randrange(1, 4)
            async with asyncio.TaskGroup() as group:
                producing = group.create_task(self._produce())
                consuming = [
                    group.create_task(self._consume(f"consumer{number}", chance.uniform(0, 3)))
                    for number in range(consumers)
                ]
                async with asyncio.timeout(30.0):
                    for _ in range(consumers + 1):
                        await self.connected.acquire()
                await asyncio.sleep(chance.uniform(0.0, 3.5))
                await self._strike()
                await asyncio.gather(*consuming)
                producing.cancel()
        await asyncio.sleep(15.0)
        assert leftovers(network) == []

    async def _start(self, name: str) -> kvcs.Relay:
        with self.network.host(name):
            started = relay(self.network, name)
            await started.__aenter__()
        return started

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[list[kvcs.Connection]]:
        """Sessions of a host with the relays that it knows, and those that follow them."""
        async with AsyncExitStack() as stack:
            names = "ab" if self.fault in BOTH else "a"
            yield [await stack.enter_async_context(self._session(name)) for name in names]

    def _session(self, name: str) -> AbstractAsyncContextManager[kvcs.Connection]:
        return kvcs.connect(
            f"moqt://{name}:{PORT}",
            quic=kvcs.QuicSettings(idle_timeout=4.0, ping_interval=1.0),
            reconnect=RECONNECT,
        )

    async def _produce(self) -> None:
        with self.network.host("producer"):
            async with self.connect() as sessions:
                self.connected.release()
                publishing = kvcs.Publisher(*sessions).publish(self.prefix)
                async with publishing as publication:
                    segment = await publication.segment()
                    for layer in range(6):
                        await asyncio.sleep(self.random.uniform(0.1, 0.8))
                        await put(segment, self.toy, [layer])
                    await asyncio.Event().wait()  # until everybody has what he wants

    async def _consume(self, name: str, after: float) -> None:
        with self.network.host(name):
            async with self.connect() as sessions:
                self.connected.release()
                await asyncio.sleep(after)
                self.random.shuffle(sessions)
                subscriber = kvcs.Subscriber(*sessions, settings=SETTINGS)
                async with subscriber.open(self.prefix, deadline=DEADLINE) as cache:
                    layers = [layer async for layer in cache]
                report = cache.report
        assert [layer.index for layer in layers] == list(range(6))
        assert all(same(layer, self.toy) for layer in layers)
        assert report.objects == 36
        self.reports.append(report)

    async def _strike(self) -> None:
        chance, fault = self.random, self.fault
        there = f"moqt://b:{PORT}"
        if fault.startswith("goaway"):
            self.a._server.goaway(there, timeout=chance.choice((0.0, chance.uniform(0.1, 3.0))))
            if fault == "goaway at once":
                await asyncio.sleep(chance.uniform(0.0, 1.0))
                await self.a.close(at_once=True)
        elif fault in BOTH:
            for name in chance.sample("ab", 1 if fault.startswith("either") else 2):
                await (self.a if name == "a" else self.b).close(at_once=True)
                await asyncio.sleep(chance.uniform(0.0, 4.0))
                setattr(self, name, await self._start(name))
                await asyncio.sleep(chance.uniform(0.0, 1.0))
        elif fault in ("stop", "kill"):
            await self.a.close(at_once=fault == "kill")
            await asyncio.sleep(chance.uniform(0.0, 4.0))
            self.a = await self._start("a")
        elif fault == "blackout":
            for name in ("producer", "consumer0", "consumer1"):
                if chance.random() < 0.6:
                    self.network.path(name, "a").blackout(chance.uniform(1.0, 10.0))
        else:
            host = "producer" if fault == "producer lost" else "consumer0"
            for session in list(self.network.host(host).sessions):
                if session.is_open:
                    await session.close_alone(0x1, "lost")


@pytest.mark.parametrize("fault", FAULTS)
def test_everybody_gets_everything_whatever_happens_to_the_sessions(fault: str) -> None:
    broken = {}
    for seed in range(SEEDS):
        scene = Scene(fault, seed)
        try:
            run(scene.main(), limit=300.0)
        except BaseException as exc:
            broken[seed] = repr(exc)
    assert broken == {}

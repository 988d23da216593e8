"""Many consumers that are there before their relay (case 35)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

import kvcs
from kvcs.moqt import events
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import open_connection
from kvcs.testing.network import Conditions, Network, leftovers, run
from tests.builders import put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.moving import restartable

CONSUMERS = 50
SAFETY = 60.0
SETTINGS = kvcs.SubscriberSettings(least_recovery=SAFETY, quiet=SAFETY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noting(kvcs.Reconnect):
    """Notes the pauses that chance has chosen."""

    pauses: list[float] = field(default_factory=list)
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once every consumer has been refused."""

    def pause(self, tries: int, chance: random.Random) -> float:
        """See `Reconnect.pause`."""
        # Not the short form of super(): the slots make another class of this one.
        chosen = kvcs.Reconnect.pause(self, tries, chance)
        self.pauses.append(chosen)
        if len(self.pauses) >= CONSUMERS:
            self.enough.set()
        return chosen


class Crowd:
    """Consumers of one publication, and its producer, who counts what the relay asks for."""

    def __init__(self, url: str, ca: PemFiles | None) -> None:
        self.url = url
        self.ca = None if ca is None else ca.ca
        self.policy = Noting(initial=SAFETY, deadline=SAFETY, max_pause=0.5)
        self.toy, self.prefix = toy_publication(), toy_prefix()
        self.asked: Counter[bytes] = Counter()
        self.reports: list[kvcs.CacheReport] = []

    async def consume(self) -> None:
        """One consumer: connects until there is a relay, and retrieves."""
        async with kvcs.connect(self.url, ca=self.ca, reconnect=self.policy) as session:
            subscriber = kvcs.Subscriber(session, settings=SETTINGS)
            async with subscriber.open(self.prefix, deadline=SAFETY) as cache:
                assert all([same(layer, self.toy) async for layer in cache])
            self.reports.append(cache.report)

    async def produce(self, consumers: list[asyncio.Task[None]]) -> None:
        """Publish layer by layer, until every consumer has all."""
        producer = await open_connection(self.url, ca=self.ca, observer=self._note)
        try:
            async with kvcs.Publisher(producer).publish(self.prefix) as publication:
                segment = await publication.segment()
                for layer in range(4):
                    await put(segment, self.toy, [layer])
                await asyncio.gather(*consumers)
        finally:
            await producer.close()

    def _note(self, _: Connection, event: events.Event) -> None:
        if isinstance(event, events.SubscribeReceived):
            self.asked[event.full_track_name.name] += 1

    def check(self) -> None:
        """All finished; the relay asked once for each track; nobody came in step with another."""
        assert len(self.reports) == CONSUMERS
        assert all(each.objects == 24 and each.duplicates == 0 for each in self.reports)
        # One upstream subscription for each track that there is; "manifest.cose" is not.
        del self.asked[b"manifest.cose"]
        assert self.asked == {b"manifest": 1, b"k.raw.s0": 1, b"v.raw.s0": 1}
        pauses = self.policy.pauses
        assert len(set(pauses)) == len(pauses) >= CONSUMERS


def test_all_finish_and_the_relay_asks_once_for_each_track() -> None:
    """The relay starts one second after them, on virtual time."""

    async def main() -> None:
        network = Network(seed=35, conditions=Conditions(delay=0.01))
        relay_host = network.host("relay")
        crowd = Crowd("moqt://relay:4433", None)
        tasks = []
        for number in range(CONSUMERS):
            with network.host(f"consumer{number}"):
                tasks.append(asyncio.create_task(crowd.consume()))
        await asyncio.sleep(1.0)
        assert crowd.policy.enough.is_set()
        with relay_host:
            settings = kvcs.RelaySettings(
                cert="unused", key="unused", host=relay_host.address, allow_anyone=True
            )
            relay = kvcs.Relay(settings)
            await relay.__aenter__()
        with network.host("producer"):
            await crowd.produce(tasks)
        crowd.check()
        await relay.close()
        await asyncio.sleep(60.0)
        assert leftovers(network) == []

    run(main())


@pytest.mark.slow
async def test_the_same_over_real_sockets(files: PemFiles, nothing_left_behind: None) -> None:
    async with restartable(files) as relay:
        await relay.kill()
        crowd = Crowd(relay.url, files)
        async with asyncio.timeout(SAFETY), asyncio.TaskGroup() as group:
            tasks = [group.create_task(crowd.consume()) for _ in range(CONSUMERS)]
            await crowd.policy.enough.wait()
            await relay.start()
            await crowd.produce(tasks)
        crowd.check()

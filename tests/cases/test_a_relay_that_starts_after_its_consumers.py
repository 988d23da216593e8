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
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.moving import restartable

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

CONSUMERS = 50
SAFETY = 60.0


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


async def test_all_finish_and_the_relay_asks_once_for_each_track(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    policy = Noting(initial=SAFETY, deadline=SAFETY, max_pause=0.5)
    asked: Counter[bytes] = Counter()

    def note(_: Connection, event: events.Event) -> None:
        if isinstance(event, events.SubscribeReceived):
            asked[event.full_track_name.name] += 1

    async with restartable(files) as relay:
        await relay.kill()

        async def consume() -> kvcs.CacheReport:
            async with kvcs.connect(relay.url, ca=files.ca, reconnect=policy) as session:
                subscriber = kvcs.Subscriber(session, settings=QUICK)
                async with subscriber.open(prefix, deadline=SAFETY) as cache:
                    assert all([same(layer, toy) async for layer in cache])
                return cache.report

        async with asyncio.timeout(SAFETY), asyncio.TaskGroup() as group:
            tasks = [group.create_task(consume()) for _ in range(CONSUMERS)]
            await policy.enough.wait()
            await relay.start()
            producer = await open_connection(relay.url, ca=files.ca, observer=note)
            try:
                async with kvcs.Publisher(producer).publish(prefix) as publication:
                    segment = await publication.segment()
                    for layer in range(4):
                        await put(segment, toy, [layer])
                    reports = [await task for task in tasks]
            finally:
                await producer.close()
    assert all(report.objects == 24 and report.duplicates == 0 for report in reports)
    # One upstream subscription for each track that there is; "manifest.cose" is not.
    del asked[b"manifest.cose"]
    assert asked == {b"manifest": 1, b"k.raw.s0": 1, b"v.raw.s0": 1}
    # No two consumers came back in the same instant.
    assert len(set(policy.pauses)) == len(policy.pauses) >= CONSUMERS

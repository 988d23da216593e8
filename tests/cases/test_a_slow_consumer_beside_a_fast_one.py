"""A consumer behind a slow link beside one behind a fast one, below two relays (case 33)."""

from __future__ import annotations

import asyncio

import numpy as np

import kvcs
from kvcs.kv import UNPINNED
from kvcs.testing.network import Conditions, Network, run
from tests.simulation.trees import PORT, RECONNECT

KIB = 1024
BUDGET = 64 * KIB
"""Octets that wait in the transport for one peer."""

CONTROL = 16 * KIB
"""What is not Objects and no budget holds up."""

LAYERS, BLOCKS = 16, 8
DESCRIPTOR = kvcs.Descriptor(
    model="slow",
    weights=UNPINNED,
    layers=LAYERS,
    kv_heads=4,
    head_dim=24,
    dtype="float16",
    block_tokens=16,
)
PREFIX = kvcs.Prefix(kvcs.Scope(bytes(32)), DESCRIPTOR, range(16 * BLOCKS))
"""768 KiB in 256 Objects."""

QUIC = kvcs.QuicSettings(send_buffer=BUDGET, send_buffer_limit=BUDGET)


class Scene:
    """A producer, two relays and consumers."""

    def __init__(self) -> None:
        self.network = Network(seed=33, conditions=Conditions(delay=0.005, rate=2 * 2**20))
        self.network.path("slow", "lower").change(rate=16 * KIB)
        rng = np.random.default_rng(33)
        shape = (16 * BLOCKS, 4, 24)
        self.layers = [
            [rng.standard_normal(shape).astype(np.float16) for _ in "kv"] for _ in range(LAYERS)
        ]
        self.published = asyncio.Event()

    async def relay(
        self, name: str, *upstreams: str, limits: kvcs.RelayLimits | None = None
    ) -> kvcs.Relay:
        host = self.network.host(name)
        with host:
            settings = kvcs.RelaySettings(
                cert="unused",
                key="unused",
                host=host.address,
                allow_anyone=True,
                upstreams=tuple(f"moqt://{one}:{PORT}" for one in upstreams),
                quic=QUIC,
                limits=limits or kvcs.RelayLimits(),
            )
            relay = kvcs.Relay(settings)
            await relay.__aenter__()
        return relay

    async def produce(self, over: asyncio.Event, pause: float = 0.0, at: str = "upper") -> None:
        with self.network.host("producer"):
            url = f"moqt://{at}:{PORT}"
            async with kvcs.connect(url, quic=QUIC, reconnect=RECONNECT) as session:
                async with kvcs.Publisher(session).publish(PREFIX) as publication:
                    segment = await publication.segment()
                    for number, (k, v) in enumerate(self.layers):
                        await segment.put(number, k, v)
                        await asyncio.sleep(pause)
                    segment.finish()
                    self.published.set()
                    await over.wait()

    async def consume(self, host: str) -> float:
        """Seconds that a retrieval takes; what comes is compared."""
        loop = asyncio.get_running_loop()
        with self.network.host(host):
            async with kvcs.connect(f"moqt://lower:{PORT}", reconnect=RECONNECT) as session:
                began = loop.time()
                subscriber = kvcs.Subscriber(session)
                async with subscriber.open(PREFIX, deadline=300.0) as cache:
                    seen = 0
                    async for layer in cache:
                        k, v = self.layers[layer.index]
                        assert layer.k.tobytes() == k.tobytes()
                        assert layer.v.tobytes() == v.tobytes()
                        seen += 1
                assert (seen, cache.report.duplicates) == (LAYERS, 0)
                return loop.time() - began


def test_the_fast_one_takes_as_long_as_alone_and_queues_stay_bounded() -> None:
    async def main() -> None:
        scene = Scene()
        upper = await scene.relay("upper")
        lower = await scene.relay("lower", "upper")
        over = asyncio.Event()
        producing = asyncio.create_task(scene.produce(over))
        await scene.published.wait()
        await scene.consume("warming")
        alone = await scene.consume("fast")
        slow = asyncio.create_task(scene.consume("slow"))
        await asyncio.sleep(1.0)
        queued = []
        for _ in range(2):
            beside = await scene.consume("fast")
            assert beside < 2 * alone
            queued += [peer.queued_octets for one in (lower, upper) for peer in one.status().peers]
        assert not slow.done()
        # A gauge for each peer, and none above its budget.
        assert 0 < max(queued) <= BUDGET + CONTROL
        assert await slow > 10 * alone
        over.set()
        await producing
        for relay in (lower, upper):
            await relay.close(at_once=True)

    run(main(), limit=2000.0)


def test_one_that_is_too_far_behind_is_told_and_completes_by_fetch() -> None:
    """Both follow what is published meanwhile, faster than the slow one's link carries it. What it
    was told it is too slow for takes it many times as long as recovery has by default."""

    async def main() -> None:
        scene = Scene()
        relay = await scene.relay("lower", limits=kvcs.RelayLimits(max_lag_seconds=3.0))
        over = asyncio.Event()
        producing = asyncio.create_task(scene.produce(over, pause=0.25, at="lower"))
        slow, fast = (asyncio.create_task(scene.consume(host)) for host in ("slow", "fast"))
        took = await fast
        assert took < 2 * 0.25 * LAYERS and not slow.done()
        fetches = relay.stats.fetches
        assert await slow > 5 * took
        assert relay.stats.too_far_behind > 0 and relay.stats.fetches > fetches
        over.set()
        await producing
        await relay.close(at_once=True)

    run(main(), limit=2000.0)

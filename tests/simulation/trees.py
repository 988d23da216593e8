"""Relays on a virtual network whose upstreams are relays."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import kvcs
from kvcs.moqt import events
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import open_connection
from kvcs.testing.network import Conditions, Network
from tests.builders import put, same, toy_prefix, toy_publication

PORT = 4433
DEADLINE = 60.0
RECONNECT = kvcs.Reconnect(initial=10.0, deadline=20.0, max_pause=0.5)
SETTINGS = kvcs.SubscriberSettings(least_recovery=DEADLINE)


@dataclass
class Tree:
    """Relays, a producer and consumers, each on a host of its own."""

    seed: int
    conditions: Conditions = field(default_factory=lambda: Conditions(delay=0.005))
    limits: kvcs.RelayLimits = field(default_factory=kvcs.RelayLimits)

    def __post_init__(self) -> None:
        self.network = Network(seed=self.seed, conditions=self.conditions)
        self.relays: dict[str, kvcs.Relay] = {}
        self.asked: Counter[tuple[str, bytes]] = Counter()
        """SUBSCRIBEs and FETCHes that the producer got, by kind and Track Name."""
        self._connected = 0
        self._connection = asyncio.Event()
        self.toy, self.prefix = toy_publication(), toy_prefix()

    def note_connected(self) -> None:
        """A producer or consumer has its sessions."""
        self._connected += 1
        self._connection.set()

    async def all_connected(self, number: int) -> None:
        """Wait until so many have."""
        while self._connected < number:
            self._connection.clear()
            await self._connection.wait()

    async def relay(self, name: str, *upstreams: str) -> kvcs.Relay:
        """Start a relay on the host of its name."""
        host = self.network.host(name)
        with host:
            settings = kvcs.RelaySettings(
                cert="unused",
                key="unused",
                host=host.address,
                allow_anyone=True,
                upstreams=tuple(f"moqt://{one}:{PORT}" for one in upstreams),
                reconnect=RECONNECT,
                limits=self.limits,
                goaway_timeout=0.5,
            )
            relay = self.relays[name] = kvcs.Relay(settings)
            await relay.__aenter__()
        return relay

    async def kill(self, name: str) -> None:
        """Stop a relay without a word to anybody."""
        with self.network.host(name):
            await self.relays[name].close(at_once=True)

    async def produce(self, name: str, until: asyncio.Event, pause: float = 0.0) -> None:
        """Publish at a relay, layer by layer, and stay until ``until``."""
        with self.network.host("producer"):
            url = f"moqt://{name}:{PORT}"
            session = await open_connection(url, observer=self._note)
            try:
                async with kvcs.Publisher(session).publish(self.prefix) as publication:
                    await self.put_all(publication, pause)
                    await until.wait()
            finally:
                await session.close()

    async def put_all(self, publication: kvcs.Publication, pause: float) -> None:
        """Publish every layer, one after the other."""
        segment = await publication.segment()
        for layer in range(self.toy.descriptor.layers):
            await put(segment, self.toy, [layer])
            await asyncio.sleep(pause)
        segment.finish()

    async def consume(self, host: str, names: Sequence[str]) -> kvcs.CacheReport:
        """Retrieve over relays; every layer is compared with what was published."""
        with self.network.host(host):
            async with kvcs.connect(f"moqt://{names[0]}:{PORT}", reconnect=RECONNECT) as first:
                if len(names) == 1:
                    return await self._open(first)
                url = f"moqt://{names[1]}:{PORT}"
                async with kvcs.connect(url, reconnect=RECONNECT) as second:
                    return await self._open(first, second)

    async def _open(self, *sessions: Connection) -> kvcs.CacheReport:
        self.note_connected()
        subscriber = kvcs.Subscriber(*sessions, settings=SETTINGS)
        async with subscriber.open(self.prefix, deadline=DEADLINE) as cache:
            layers = [layer async for layer in cache]
            for layer in layers:
                if not same(layer, self.toy):
                    raise AssertionError(f"layer {layer.index} is wrong")
            if [layer.index for layer in layers] != list(range(self.toy.descriptor.layers)):
                raise AssertionError("layers are missing of a cache that was called complete")
            return cache.report

    def _note(self, _: Connection, event: events.Event) -> None:
        if isinstance(event, events.SubscribeReceived | events.FetchReceived):
            self.asked[type(event).__name__, event.full_track_name.name] += 1

    async def close(self) -> None:
        """Stop what runs yet, the farthest from the producer first."""
        for name, relay in reversed(self.relays.items()):
            with self.network.host(name):
                await relay.close(at_once=True)

"""A relay, producers and a consumer on the virtual network, for tests of finding publications."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import kvcs
from kvcs.kv import Scope
from kvcs.moqt.names import TrackNamespace
from kvcs.testing.network import Conditions, Network, leftovers, run
from tests.unit.kv.toy import Toy, toy_descriptor

SCOPE = Scope(bytes(range(32)))
URL = "moqt://relay:4433"
SETTINGS = kvcs.SubscriberSettings(least_recovery=2.0)


def prefix_of(tokens: Sequence[int]) -> kvcs.Prefix:
    """A prefix of the toy's descriptor."""
    return kvcs.Prefix(SCOPE, toy_descriptor(), list(tokens))


class Field:
    """The network of one test, and its relay."""

    def __init__(self, network: Network, relay: kvcs.Relay) -> None:
        self.network = network
        self.relay = relay

    @asynccontextmanager
    async def session(self, host: str) -> AsyncIterator[kvcs.Connection]:
        """A session of a host with the relay."""
        with self.network.host(host):
            async with kvcs.connect(URL, reconnect=None) as session:
                yield session

    @asynccontextmanager
    async def published(
        self,
        prefix: kvcs.Prefix,
        toy: Toy,
        passes: Sequence[int] = (),
        host: str = "producer",
        **options: Any,
    ) -> AsyncIterator[kvcs.Publication]:
        """A publication with all that ``passes`` says, in segments of so many blocks; by default
        one segment. It is served until the context is left."""
        sizes = list(passes) or [prefix.blocks]
        async with (
            self.session(host) as session,
            kvcs.Publisher(session).publish(
                prefix, first_segment_blocks=sizes[0], **options
            ) as made,
        ):
            for blocks in sizes:
                await fill(await made.segment(blocks), toy)
            yield made


async def fill(segment: kvcs.Segment, toy: Toy, layers: Sequence[int] | None = None) -> None:
    """Put layers of a segment; all by default."""
    size = toy.descriptor.block_tokens
    first, last = segment.first_block * size, (segment.first_block + segment.blocks) * size
    for layer in range(toy.descriptor.layers) if layers is None else layers:
        await segment.put(layer, toy.k[layer][first:last].copy(), toy.v[layer][first:last].copy())


def asked_by(session: kvcs.Connection) -> list[TrackNamespace]:
    """Prefixes that a session asks for from now on."""
    asked: list[TrackNamespace] = []
    requester: Any = session.core.requester
    inner = requester.subscribe_namespace

    def noting(prefix: TrackNamespace, *more: Any, **named: Any) -> int:
        asked.append(prefix)
        request_id: int = inner(prefix, *more, **named)
        return request_id

    requester.subscribe_namespace = noting
    return asked


def play(scenario: Callable[[Field], Awaitable[None]], seed: int = 1) -> None:
    """Run a scenario beside a relay; nothing may be left behind."""

    async def main() -> None:
        network = Network(seed, conditions=Conditions(delay=0.01))
        settings = kvcs.RelaySettings(cert="unused", key="unused", allow_anyone=True)
        with network.host("relay"):
            async with kvcs.Relay(settings) as relay:
                await scenario(Field(network, relay))
        await asyncio.sleep(60)
        assert leftovers(network) == []

    run(main())

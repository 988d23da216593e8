"""A cache that is retrieved from a raw publication, over real QUIC or on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import kvcs
from kvcs.moqt import events
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import ParameterType
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import RELAY_PORT, Server, open_connection
from kvcs.testing.network import Network, leftovers
from tests.builders import QUICK, Toy, same, toy_prefix
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import SESSION, Wire, accepting, joined
from tests.loopback.raw_publication import K0, V0, RawPublication

ALL = range(4)
"""Layers of the toy."""

SETTLED = 60.0
"""Virtual seconds after which nothing may be left of a session."""


@dataclass
class Opened:
    """A cache that is being retrieved from a raw publication."""

    raw: RawPublication
    cache: kvcs.Cache
    wire: Wire
    server: Server
    client: Connection

    @property
    def fetched(self) -> list[tuple[str, LocationFilter]]:
        """What was asked for again."""
        return [
            (name.name.decode(), parameters.get(ParameterType.LOCATION_FILTER))
            for kind, name, parameters in self.wire.asked
            if kind == "fetch"
        ]

    async def all_layers(self) -> None:
        """Every layer comes, with the producer's bits."""
        got = [layer async for layer in self.cache]
        assert [layer.index for layer in got] == list(ALL)
        assert all(same(layer, self.raw.toy) for layer in got)

    async def cut(self, name: Any, layer: int, whole: int, part: int, code: int = 1) -> None:
        """Bring a part of a layer, and reset its stream once that is here."""
        stream = self.raw.begin(name, layer, whole, part)
        last = Location(layer, whole if part else whole - 1)
        await self.wire.until(lambda: last in self.wire.objects(str(name)))
        stream.reset(code)

    async def follow(self) -> None:
        """Wait until the data tracks are subscribed to."""
        await self.raw.subscribed(K0)
        await self.raw.subscribed(V0)
        await self.wire.until(lambda: len(self.wire.of(events.RequestAccepted)) >= 4)


@asynccontextmanager
async def opened(
    files: PemFiles, raw: RawPublication, settings: kvcs.SubscriberSettings = QUICK
) -> AsyncIterator[Opened]:
    """Open the cache of ``raw`` over a session of its own."""
    wire = Wire()
    prefix = toy_prefix(sum(raw.toy.blocks), descriptor=raw.toy.descriptor)
    async with raw.serve(files) as server, joined(server, files, wire) as client:
        async with kvcs.Subscriber(client, settings=settings).open(prefix) as cache:
            yield Opened(raw, cache, wire, server, client)


@asynccontextmanager
async def meeting(
    raw: RawPublication | None = None, wire: Wire | None = None
) -> AsyncIterator[tuple[Server, Connection]]:
    """A server and a session with it, on a virtual network; nothing may be left.

    Args:
        raw: what the server has; None for what a `Publisher` brings.
        wire: sees what comes to the client.
    """
    network = Network(seed=61)
    server = Server(SESSION, observer=None if raw is None else accepting(raw.answer))
    relay = network.host("relay")
    with relay:
        await server.start(relay.address, RELAY_PORT, cert="unused", key="unused")
    observer = None if wire is None else wire.observe
    with network.host("consumer"):
        client = await open_connection(f"moqt://relay:{RELAY_PORT}", observer=observer)
    if wire is not None:
        wire.attach(client)
    try:
        yield server, client
    finally:
        await client.close()
        await server.close()
    await asyncio.sleep(SETTLED)
    assert leftovers(network) == []


@asynccontextmanager
async def opened_on_virtual_time(
    raw: RawPublication, settings: kvcs.SubscriberSettings
) -> AsyncIterator[Opened]:
    """The same as `opened`, where no bound passes because of the machine."""
    wire = Wire()
    prefix = toy_prefix(sum(raw.toy.blocks), descriptor=raw.toy.descriptor)
    async with meeting(raw, wire) as (server, client):
        async with kvcs.Subscriber(client, settings=settings).open(prefix) as cache:
            yield Opened(raw, cache, wire, server, client)


def spoiled(toy: Toy, name: Any, layer: int, block: int, change: Callable[[bytes], bytes]) -> bytes:
    """An Object of the toy, spoiled."""
    return change(toy.objects[name, Location(layer, block)])

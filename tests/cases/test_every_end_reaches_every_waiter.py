"""Whatever ends a retrieval, whoever waits for something of it is told, all in the same instant.

Two requests of one process read one retrieval here, and each of them waits in several ways.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import pytest

import kvcs
from kvcs.moqt import events
from kvcs.moqt.errors import SessionCode
from kvcs.moqt.names import Location
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import Server
from tests.builders import BRIEF, same, toy_prefix, toy_publication
from tests.loopback.kv_fixtures import Wire
from tests.loopback.raw_publication import K0, V0, RawPublication
from tests.loopback.retrieving import meeting
from tests.virtual import virtual

TOY = toy_publication()


@dataclass
class Scene:
    """A publication of which layers 0 and 1 are there, and the session with its server."""

    raw: RawPublication
    server: Server
    client: Connection
    wire: Wire


async def abort(scene: Scene) -> None:
    """The producer gives the publication up."""
    scene.raw.abort("out of memory")


async def lose(scene: Scene) -> None:
    """The session ends without a word."""
    await scene.server.close(SessionCode.INTERNAL_ERROR, "a fault")


async def leave(scene: Scene) -> None:
    """This side closes its session."""
    await scene.client.close()


async def send_away(scene: Scene) -> None:
    """GOAWAY, and nothing follows the session: it ends when its time is up."""
    scene.server.goaway(timeout=0.2)


async def end_early(scene: Scene) -> None:
    """Streams of layer 2 are reset, and the tracks end: what lacks is nowhere."""
    for name in (K0, V0):
        stream = scene.raw.begin(name, 2, 1)
        await scene.wire.until(lambda name=name: Location(2, 0) in scene.wire.objects(str(name)))
        stream.reset(1)
    scene.raw.end()


async def contradict(scene: Scene) -> None:
    """The manifest says another thing than before."""
    other = toy_publication(seed=1)
    scene.raw.manifest(other.writer([2]).to_json_bytes())


Fault = Callable[[Scene], Awaitable[None]]


@virtual
@pytest.mark.parametrize(
    ("fault", "error", "within"),
    [
        (abort, kvcs.PublicationAborted, 0.5),
        (lose, kvcs.CacheIncomplete, 0.5),
        (leave, kvcs.CacheIncomplete, 0.5),
        (send_away, kvcs.CacheIncomplete, 1.0),
        (end_early, kvcs.CacheIncomplete, 3.0),  # recovery has 1.5 s
        (contradict, kvcs.PublicationError, 0.5),
    ],
)
async def test_it_is_told_to_all_at_once(
    fault: Fault, error: type[kvcs.KvcsError], within: float
) -> None:
    loop, wire = asyncio.get_running_loop(), Wire()
    raw = RawPublication(TOY)
    raw.manifest(layers=2)
    raw.layers(0, 1)
    async with meeting(raw, wire) as (server, client), AsyncExitStack() as stack:
        subscriber = kvcs.Subscriber(client, settings=BRIEF)
        readers = [await stack.enter_async_context(subscriber.open(toy_prefix())) for _ in range(2)]
        for reader in readers:
            assert same(await reader.layer(1), TOY)
        await raw.subscribed(K0)
        await raw.subscribed(V0)

        async def iterate(reader: kvcs.Cache) -> None:
            async for _ in reader:
                pass

        told: dict[asyncio.Task[object], float] = {}
        waits = [
            wait
            for reader in readers
            for wait in (reader.layer(2), reader.layer(3), reader.complete(), iterate(reader))
        ]
        tasks: list[asyncio.Task[object]] = [asyncio.create_task(wait) for wait in waits]
        for task in tasks:
            task.add_done_callback(lambda task: told.setdefault(task, loop.time()))
        began = loop.time()
        await fault(Scene(raw, server, client, wire))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in results] == [error] * len(tasks)
        assert len({str(each) for each in results}) == 1  # the same to all
        assert max(told.values()) - min(told.values()) < 0.001
        assert max(told.values()) - began < within  # the deadline is 50 s
        for reader in readers:  # and to whoever asks later
            with pytest.raises(error):
                await reader.complete()


@virtual
async def test_a_namespace_that_is_withdrawn_is_not_waited_for() -> None:
    raw = RawPublication(TOY)  # announced, and its manifest never comes
    wire = Wire()
    loop = asyncio.get_running_loop()
    async with meeting(raw, wire) as (_, client):
        settings = replace(BRIEF, share=False)
        subscriber = kvcs.Subscriber(client, settings=settings)

        async def read() -> None:
            async with subscriber.open(toy_prefix(), wait=0.0):
                raise AssertionError("there is nothing to open")

        tasks = [asyncio.create_task(read()) for _ in range(3)]
        await wire.until(lambda: len(wire.of(events.RequestAccepted)) >= 4)
        await asyncio.sleep(3.0)
        assert not any(task.done() for task in tasks)
        began = loop.time()
        [asked] = raw.asks(events.SubscribeNamespaceReceived)
        responder = raw.connections[0].core.responder
        responder.namespace_done(asked.request_id, raw.namespace[4:])
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, kvcs.PublicationNotFound) for each in results)
        assert loop.time() - began < 1.0  # the deadline is 50 s

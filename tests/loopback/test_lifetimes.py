"""What opening, leaving, cancelling and closing leave behind: nothing."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections.abc import Sized
from typing import Any

import pytest
from structlog.testing import capture_logs

import kvcs
from kvcs.moqt.names import FullTrackName
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import Server
from kvcs.testing.residue import residue
from tests.builders import QUICK, Toy, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import Wire, joined, serving
from tests.loopback.raw_publication import K0, V0, RawPublication

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

CYCLES = 100
WARM_UP = 20


def tables(connection: Connection) -> dict[str, int]:
    """Everything a session remembers that is not empty, by name."""
    sizes = residue(connection.core)
    for name in ("_handlers", "_replies", "_holders", "_on_goaway"):
        table: Sized = getattr(connection, name)
        sizes[name] = len(table)
    sizes["cancellations"] = len(connection._answers._cancellations)
    sizes["watches"] = len(connection.namespaces._shared)
    for attached in connection.origin._connections.values():
        sizes["asked for"] = len(attached.subscriptions)
    sizes["announcing"] = len(connection.origin._ending)
    return {name: size for name, size in sizes.items() if size}


async def exchange(client: Connection) -> None:
    """One request and its answer."""
    name = FullTrackName((b"no", b"such"), b"track")
    with pytest.raises(kvcs.RequestError):
        await client.reply(client.core.requester.track_status(name))


async def back_to(
    before: tuple[dict[str, int], dict[str, int]], client: Connection, peer: Connection
) -> None:
    """Both sides come to remember as much as ``before``, once what was cancelled has crossed.

    Streams that came for a subscription which was cancelled before its answer are held for a while.
    """
    try:
        async with asyncio.timeout(20):
            while (tables(client), tables(peer)) != before:
                await exchange(client)
    except TimeoutError:
        assert (tables(client), tables(peer)) == before


def server_side(server: Server) -> Connection:
    """The server's end of its one session."""
    (connection,) = server.connections
    return connection


async def turns(count: int) -> None:
    """Let the loop turn ``count`` times."""
    loop = asyncio.get_running_loop()
    for _ in range(count):
        future = loop.create_future()
        loop.call_soon(future.set_result, None)
        await future


# Open and cancel


@pytest.mark.slow
async def test_a_hundred_retrievals_cancelled_at_any_moment_leave_nothing(
    files: PemFiles,
) -> None:
    chance = random.Random(7)
    toy, prefix, wire = toy_publication(), toy_prefix(), Wire()
    async with serving(files) as server, joined(server, files, wire) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            segment = await publication.segment()
            await put(segment, toy, range(2))
            peer = server_side(server)
            await exchange(client)
            before = tables(client), tables(peer)
            tasks = asyncio.all_tasks()
            ended_in: dict[str, int] = {}
            blocks = 0

            async def cycle(stage: list[str], **options: Any) -> None:
                stage[0] = "opening"
                subscriber = kvcs.Subscriber(client, settings=QUICK)
                async with subscriber.open(prefix, **options) as cache:
                    stage[0] = "reading"
                    await cache.layer(1)
                    stage[0] = "waiting"
                    wire.look()
                    await cache.layer(3)

            async def cancelled_somewhere(number: int) -> None:
                stage = ["starting"]
                options: dict[str, Any] = chance.choice(({}, {"layers": (1, 3), "blocks": 2}))
                task = asyncio.create_task(cycle(stage, **options))
                events = 0 if chance.random() < 0.1 else chance.randrange(60)
                await wire.until(lambda: len(wire.events) >= events or stage[0] == "waiting")
                await turns(chance.randrange(5))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                ended_in[stage[0]] = ended_in.get(stage[0], 0) + 1
                wire.clear()

            for number in range(CYCLES):
                await cancelled_somewhere(number)
                if number == WARM_UP:
                    await back_to(before, client, peer)
                    gc.collect()
                    blocks = sys.getallocatedblocks()
            await back_to(before, client, peer)
            gc.collect()
            grown = sys.getallocatedblocks() - blocks
            assert len(ended_in) == 4, ended_in  # every stage was met
            assert asyncio.all_tasks() == tasks
            assert grown < (CYCLES - WARM_UP) * 50, grown  # one retrieval takes hundreds
            # And the session is as good as new.
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                await put(segment, toy, range(2, 4))
                assert all([same(layer, toy) async for layer in cache])


async def test_a_hundred_publications_leave_nothing(files: PemFiles) -> None:
    chance = random.Random(3)
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        peer = server_side(server)
        publisher = kvcs.Publisher(server)

        async def cycle() -> None:
            layers = chance.randrange(5)
            try:
                async with publisher.publish(prefix) as publication:
                    await put(await publication.segment(), toy, range(layers))
            except kvcs.UsageError:
                assert layers < 4
            else:
                assert layers == 4

        before = tables(client), tables(peer)
        for _ in range(CYCLES):
            await cycle()
        await back_to(before, client, peer)
        assert publisher.held_octets == 0 and publisher.publications == ()
        assert await kvcs.Subscriber(client, settings=QUICK).list(prefix) == []


async def test_sessions_that_come_and_go_leave_nothing_on_the_server(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            await put(await publication.segment(), toy)
            for number in range(10):
                async with joined(server, files) as client:
                    retrieval = kvcs.Subscriber(client, settings=QUICK).open(prefix)
                    cache = await retrieval.__aenter__()
                    if number % 2:
                        await cache.layer(0)
                    peer = server_side(server)
                await retrieval.__aexit__(None, None, None)  # after the session
                gone = asyncio.Event()
                peer.on_closed(gone.set)
                await gone.wait()
                assert not server.connections and not server.origin.connections
                assert tables(peer) == {}


# Closing twice, leaving in every way


async def opened(client: Connection, prefix: kvcs.Prefix) -> tuple[Any, kvcs.Cache]:
    """A retrieval that has begun."""
    retrieval = kvcs.Subscriber(client, settings=QUICK).open(prefix)
    return retrieval, await retrieval.__aenter__()


async def test_closing_twice_is_closing_once(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            await put(await publication.segment(), toy)
            with capture_logs() as logs:
                retrieval, cache = await opened(client, prefix)
                assert all([same(layer, toy) async for layer in cache])
                cache.close()
                cache.close()
                await retrieval.__aexit__(None, None, None)
            ended = [entry for entry in logs if entry["event"] == "retrieval_ended"]
            assert [entry["outcome"] for entry in ended] == ["complete"]
            assert same(await cache.layer(2), toy)  # what is there stays
            await cache.complete()
        await client.close()
        await client.close()
        await server.close()


async def test_a_closed_cache_answers_at_once(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        with pytest.raises(kvcs.UsageError):
            async with kvcs.Publisher(server).publish(prefix) as publication:
                await put(await publication.segment(), toy, range(1))
                retrieval, cache = await opened(client, prefix)
                assert same(await cache.layer(0), toy)
                waiting = asyncio.create_task(cache.layer(1))
                await turns(2)
                await retrieval.__aexit__(None, None, None)
                with pytest.raises(kvcs.CacheIncomplete, match="the cache was closed"):
                    await waiting
                with pytest.raises(kvcs.CacheIncomplete, match="the cache was closed"):
                    await cache.layer(1)
                with pytest.raises(kvcs.CacheIncomplete, match="the cache was closed"):
                    await cache.complete()
                assert same(await cache.layer(0), toy)


async def test_leaving_by_an_exception_leaves_nothing(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            await put(await publication.segment(), toy)
            peer = server_side(server)
            await exchange(client)
            before = tables(client), tables(peer)
            with pytest.raises(ZeroDivisionError):
                async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                    async for layer in cache:
                        layer.index // 0
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                async for _ in cache:
                    break  # half-way
            await back_to(before, client, peer)


async def test_cancelling_in_the_tick_of_the_last_object_is_clean(files: PemFiles) -> None:
    """Whoever waited gets its layer or the cancellation; nobody gets neither."""
    toy = toy_publication()
    for delay in range(4):
        raw = RawPublication(toy)
        raw.manifest(layers=0)
        async with raw.serve(files) as server, joined(server, files) as client:
            with capture_logs() as logs:
                retrieval, cache = await opened(client, toy_prefix())
                await raw.subscribed(K0)
                await raw.subscribed(V0)
                waiting = [asyncio.create_task(cache.layer(3)) for _ in range(3)]
                done = asyncio.create_task(cache.complete())
                raw.layers(0, 1, 2)
                await cache.layer(2)
                inner = cache._retrieval
                was, seen = inner.verified, asyncio.get_running_loop().create_future()

                def verified(was: Any = was, seen: Any = seen, cache: Any = cache) -> None:
                    was()
                    if cache.progress.layers_ready == 4 and not seen.done():
                        seen.set_result(None)

                inner.verified = verified  # type: ignore[method-assign]
                raw.layers(3)
                await seen
                await turns(delay)
                waiting[0].cancel()
                done.cancel()
                results = await asyncio.gather(*waiting, done, return_exceptions=True)
                await retrieval.__aexit__(None, None, None)
            assert isinstance(results[0], asyncio.CancelledError | kvcs.Layer)
            assert all(isinstance(result, kvcs.Layer) for result in results[1:3])
            assert isinstance(results[3], asyncio.CancelledError)
            assert sum(entry["event"] == "retrieval_ended" for entry in logs) == 1


async def test_opening_can_be_cancelled_and_bounded_from_outside(files: PemFiles) -> None:
    async with serving(files) as server, joined(server, files) as client:
        peer = server_side(server)
        await exchange(client)
        before = tables(client), tables(peer)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await opened(client, toy_prefix())
        await back_to(before, client, peer)


async def test_what_was_verified_outlives_everything(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()

    async def read(toy: Toy) -> list[kvcs.Layer]:
        async with serving(files) as server, joined(server, files) as client:
            async with kvcs.Publisher(server).publish(prefix) as publication:
                await put(await publication.segment(), toy)
                async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                    return [layer async for layer in cache]

    layers = await read(toy)
    gc.collect()
    assert len(layers) == 4 and all(same(layer, toy) for layer in layers)

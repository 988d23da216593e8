"""Relays that are silent, and producers that are gone for good: neither eats the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

import kvcs
from kvcs.moqt import events
from kvcs.quic.connection import Connection, PeerRequest
from kvcs.quic.endpoint import RELAY_PORT, Server, open_connection
from kvcs.testing.network import Network, leftovers
from tests.builders import BRIEF, put, same, toy_prefix, toy_publication
from tests.loopback.beside import raw_of
from tests.loopback.kv_fixtures import SESSION, accepting
from tests.loopback.moving import Held
from tests.loopback.raw_publication import V0, RawPublication
from tests.loopback.retrieving import ALL, SETTLED
from tests.virtual import virtual

TOY = toy_publication()
SETTINGS = replace(BRIEF, quiet=0.5, least_recovery=4.0)
"""Half a second is long enough for a relay to answer."""


class Silent(Held):
    """A publication whose server does not answer some requests."""

    silent: tuple[type[PeerRequest], ...] = ()

    def answer(self, connection: Connection, request: PeerRequest) -> bool:
        if isinstance(request, self.silent):
            self.requests.append(request)
            return True
        return super().answer(connection, request)


def silent(*kinds: type[PeerRequest], gone: tuple[int, int] | None = None) -> Silent:
    """A whole publication, or one that lacks a block, whose server is silent to some requests."""
    raw = Silent(TOY)
    raw.silent = kinds
    raw.manifest()
    for layer in ALL:
        lacks = {} if gone is None or gone[0] != layer else {(V0, gone[1]): None}
        raw.layer(layer, lacks, lacks)
    raw.end()
    return raw


@asynccontextmanager
async def sessions_with(*raws: RawPublication) -> AsyncIterator[list[Connection]]:
    """A session with a server of each publication."""
    network = Network(seed=7)
    async with AsyncExitStack() as stack:
        clients = []
        for number, raw in enumerate(raws):
            server = Server(SESSION, observer=accepting(raw.answer))
            relay = network.host(f"relay{number}")
            with relay:
                await server.start(relay.address, RELAY_PORT, cert="unused", key="unused")
            stack.push_async_callback(server.close)
            with network.host("consumer"):
                client = await open_connection(f"moqt://relay{number}:{RELAY_PORT}")
            stack.push_async_callback(client.close)
            clients.append(client)
        yield clients
    await asyncio.sleep(SETTLED)
    assert leftovers(network) == []


def clock() -> Callable[[], float]:
    """Virtual seconds since now."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    return lambda: loop.time() - began


@virtual
@pytest.mark.parametrize("slow", [1, 2, 3])
async def test_a_block_comes_from_the_relay_that_answers(slow: int) -> None:
    raws = [silent(events.FetchReceived, gone=(2, 1)) for _ in range(slow)]
    async with sessions_with(*raws, raw_of(TOY, 0)) as clients:
        subscriber = kvcs.Subscriber(*clients, settings=SETTINGS)
        seconds = clock()
        async with subscriber.open(toy_prefix(), publication=named(raws[0])) as cache:
            got = [layer async for layer in cache]
            assert [same(layer, TOY) for layer in got] == [True] * 4
            assert seconds() < SETTINGS.recovery(12)
    assert all(raw.asks(events.FetchReceived) for raw in raws)


@virtual
async def test_where_all_are_slow_each_gets_more_time_in_the_next_round() -> None:
    class Slow(Silent):
        """Answers no FETCH within its first share of the time."""

        async def later(self, connection: Connection, request: PeerRequest) -> None:
            await asyncio.sleep(3.0)
            asked = [each.message for each in connection.core.requests.all() if not each.ours]
            if any(getattr(each, "request_id", None) == request.request_id for each in asked):
                RawPublication.answer(self, connection, request)

        def answer(self, connection: Connection, request: PeerRequest) -> bool:
            if isinstance(request, events.FetchReceived):
                tasks.append(asyncio.create_task(self.later(connection, request)))
                return True
            return super().answer(connection, request)

    tasks: list[asyncio.Task[None]] = []
    raws = []
    for _ in range(2):
        raw = Slow(TOY)
        raw.manifest()
        for layer in ALL:
            raw.layer(layer, {(V0, 1): None} if layer == 2 else {})
        raw.end()
        raws.append(raw)
    async with sessions_with(*raws) as clients:
        # Of 8 s each has 2 s at first, a quarter, and is not ready; then it has 4 s.
        subscriber = kvcs.Subscriber(*clients, settings=replace(SETTINGS, least_recovery=8.0))
        async with subscriber.open(toy_prefix(), publication=named(raws[0])) as cache:
            assert [same(layer, TOY) async for layer in cache] == [True] * 4
        await asyncio.gather(*tasks)
    assert len(tasks) > 2


@virtual
async def test_a_named_publication_is_asked_for_at_the_next_relay() -> None:
    mute = silent(events.SubscribeReceived)
    async with sessions_with(mute, mute, raw_of(TOY, 0)) as clients:
        seconds = clock()
        async with kvcs.Subscriber(*clients, settings=SETTINGS).open(
            toy_prefix(), publication=named(mute)
        ) as cache:
            assert seconds() < 2.0  # of a deadline of 50
            assert [same(layer, TOY) async for layer in cache] == [True] * 4
        manifest = await kvcs.Subscriber(*clients, settings=SETTINGS).manifest(named(mute))
        assert manifest.complete


@virtual
async def test_a_named_publication_that_nobody_shows_is_told_at_the_deadline() -> None:
    mute = silent(events.SubscribeReceived)
    async with sessions_with(mute, mute) as clients:
        seconds = clock()
        with pytest.raises(kvcs.PublicationNotFound, match="never came"):
            async with kvcs.Subscriber(*clients, settings=SETTINGS).open(
                toy_prefix(), publication=named(mute), deadline=3.0
            ):
                pass
        assert 2.9 < seconds() < 3.1


@virtual
async def test_a_retrieval_moves_past_a_relay_that_does_not_answer() -> None:
    first = Held(TOY)
    first.manifest(layers=0)
    first.layer(0)
    mute, third = silent(events.SubscribeReceived), raw_of(TOY, 0)
    third.manifest()  # a later version than the first one's
    async with sessions_with(first, mute, third) as clients:
        async with kvcs.Subscriber(*clients, settings=SETTINGS).open(
            toy_prefix(), publication=named(first)
        ) as cache:
            assert same(await cache.layer(0), TOY)
            seconds = clock()
            await clients[0].close()
            assert [same(layer, TOY) async for layer in cache] == [True] * 4
            assert seconds() < 2.0  # it would be 10 s where nobody else was there
            assert cache.connection is clients[2]
    assert mute.asks(events.SubscribeReceived)


# Nobody who comes back


@virtual
@pytest.mark.parametrize("patience", [None, 3.0])
async def test_a_session_that_does_not_come_back_is_waited_for_no_longer_than_one_says(
    patience: float | None,
) -> None:
    raw = RawPublication(TOY)
    raw.manifest(layers=1)
    raw.layer(0)
    network = Network(seed=9)
    server = Server(SESSION, observer=accepting(raw.answer))
    relay = network.host("relay")
    with relay:
        await server.start(relay.address, RELAY_PORT, cert="unused", key="unused")
    async with AsyncExitStack() as stack:
        with network.host("consumer"):
            session = await stack.enter_async_context(
                kvcs.connect(f"moqt://relay:{RELAY_PORT}", reconnect=kvcs.Reconnect(deadline=600))
            )
        settings = replace(SETTINGS, patience=patience)
        async with kvcs.Subscriber(session, settings=settings).open(
            toy_prefix(), deadline=20.0
        ) as cache:
            assert same(await cache.layer(0), TOY)
            tasks = [asyncio.create_task(cache.layer(layer)) for layer in (1, 2, 3)]
            seconds = clock()
            await server.close()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(each, kvcs.CacheIncomplete) for each in results)
            if patience is None:
                assert "the deadline of 20 s passed" in str(results[0]) and seconds() > 19.0
            else:
                assert "nobody served it again within 3 s" in str(results[0])
                assert 3.0 <= seconds() < 3.5
            assert same(await cache.layer(0), TOY)  # what was whole stays
    await asyncio.sleep(SETTLED)
    assert leftovers(network) == []


@virtual
@pytest.mark.parametrize("patience", [None, 3.0])
async def test_a_producer_behind_a_relay_that_is_gone_for_good(patience: float | None) -> None:
    network = Network(seed=11)
    settings = kvcs.RelaySettings(
        cert="unused",
        key="unused",
        host=network.host("relay").address,
        port=RELAY_PORT,
        allow_anyone=True,
        quic=kvcs.QuicSettings(idle_timeout=4.0, ping_interval=1.0),
    )
    relay = kvcs.Relay(settings)
    async with AsyncExitStack() as stack:
        with network.host("relay"):
            await relay.__aenter__()
        stack.push_async_callback(lambda: relay.close(at_once=True))
        url = f"moqt://relay:{RELAY_PORT}"
        with network.host("producer"):
            producer = await open_connection(url)
        publishing = kvcs.Publisher(producer).publish(toy_prefix())
        publication = await publishing.__aenter__()
        await put(await publication.segment(), TOY, range(2))
        with network.host("consumer"):
            session = await stack.enter_async_context(kvcs.connect(url))
        subscriber = kvcs.Subscriber(session, settings=replace(SETTINGS, patience=patience))
        async with subscriber.open(toy_prefix(), deadline=20.0) as cache:
            assert same(await cache.layer(1), TOY)
            seconds = clock()
            await producer.close()  # and the publication was not told to end before
            with pytest.raises(kvcs.CacheIncomplete) as caught:
                await cache.layer(2)
            if patience is None:
                assert "the deadline of 20 s passed" in str(caught.value)
            else:
                assert "its publisher may be gone; nobody served it again" in str(caught.value)
                assert seconds() < 5.0
            assert session.is_open
        with pytest.raises(kvcs.KvcsError):
            await publishing.__aexit__(None, None, None)
    await asyncio.sleep(SETTLED)
    assert leftovers(network) == []


def named(raw: RawPublication) -> kvcs.PublicationNamespace:
    """How a publication is called."""
    return kvcs.PublicationNamespace.parse(raw.namespace)

"""Sessions that are lost or sent away, and what goes on over the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

import kvcs
from kvcs.moqt import events
from kvcs.moqt.errors import SessionCode
from kvcs.moqt.properties import SetupOption
from kvcs.quic.connection import PeerRequest
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import HOST, SESSION, serving
from tests.loopback.moving import GOAWAY, SAFETY, SOON, restartable, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def retrieve(url: str, files: PemFiles, prefix: kvcs.Prefix) -> list[kvcs.Layer]:
    """A consumer's whole work, on a session of its own."""
    async with kvcs.connect(url, ca=files.ca, reconnect=SOON) as session:
        async with kvcs.Subscriber(session, settings=QUICK).open(prefix, deadline=SAFETY) as cache:
            return [layer async for layer in cache]


async def test_a_producer_survives_a_relay_that_is_killed_and_started_again(
    files: PemFiles,
) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with restartable(files) as relay:
        async with kvcs.connect(relay.url, ca=files.ca, reconnect=SOON) as session:
            async with kvcs.Publisher(session).publish(prefix) as publication:
                identity = publication.publication_id
                segment = await publication.segment()
                await put(segment, toy, range(2))
                await relay.kill()
                await until(session, lambda: not session.newest.is_usable)
                await put(segment, toy, [2])  # while there is no session at all
                await relay.start()
                assert session.link is not None
                await until(session, lambda: session.newest.is_usable)
                assert session.newest is not session and session.lasts
                async with asyncio.TaskGroup() as group:
                    consumer = group.create_task(retrieve(relay.url, files, prefix))
                    await put(segment, toy, [3])
                layers = consumer.result()
                assert publication.publication_id == identity
                assert session.link.sessions == 2
    assert [layer.index for layer in layers] == list(range(4))
    assert all(same(layer, toy) for layer in layers)


async def test_consumers_at_a_relay_go_on_where_the_producer_lost_its_session(
    files: PemFiles,
) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with restartable(files) as relay:
        async with (
            kvcs.connect(relay.url, ca=files.ca, reconnect=SOON) as producer,
            kvcs.connect(relay.url, ca=files.ca, reconnect=SOON) as consumer,
            kvcs.Publisher(producer).publish(prefix) as publication,
        ):
            segment = await publication.segment()
            subscriber = kvcs.Subscriber(consumer, settings=QUICK)
            async with subscriber.open(prefix, deadline=SAFETY) as cache:
                for layer in range(4):
                    await put(segment, toy, [layer])
                    assert same(await cache.layer(layer), toy)
                    if layer in (0, 2):
                        lost = producer.newest
                        await lost.close_alone(SessionCode.INTERNAL_ERROR, "it broke")
                        await until(producer, lambda: producer.newest.is_usable)
                        assert producer.newest is not lost
                await cache.complete()
                report = cache.report
                assert (report.objects, report.duplicates) == (24, 0)
                assert report.moves <= 2  # it has asked the relay anew, once for each loss
            assert consumer.newest is consumer


async def test_a_producer_lets_a_relay_stop_at_once_and_comes_back(files: PemFiles) -> None:
    """GOAWAY is obeyed: the relay need not wait until its time is over."""
    toy, prefix = toy_publication(), toy_prefix()
    loop = asyncio.get_running_loop()
    async with restartable(files) as relay:
        async with kvcs.connect(relay.url, ca=files.ca, reconnect=SOON) as session:
            async with kvcs.Publisher(session).publish(prefix) as publication:
                await put(await publication.segment(), toy)
                began = loop.time()
                await relay.stop()
                assert loop.time() - began < SAFETY < GOAWAY
                await relay.start()
                layers = await retrieve(relay.url, files, prefix)
    assert all(same(layer, toy) for layer in layers)


async def test_a_relay_that_never_comes_back_ends_the_publication_at_the_deadline(
    files: PemFiles,
) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    policy = kvcs.Reconnect(deadline=0.2, first_pause=0.01, max_pause=0.05)
    async with restartable(files) as relay:
        async with kvcs.connect(relay.url, ca=files.ca, reconnect=policy) as session:
            with pytest.raises(kvcs.ConnectionClosed, match=r"no session followed within 0\.2 s"):
                async with kvcs.Publisher(session).publish(prefix) as publication:
                    segment = await publication.segment()
                    await put(segment, toy, [0])
                    await relay.kill()
                    await until(session, lambda: not session.lasts)
                    await put(segment, toy, [1])
            assert session.link is not None
            with pytest.raises(kvcs.ConnectionClosed):
                await session.link.session()


async def test_without_reconnect_the_session_is_all_there_is(files: PemFiles) -> None:
    async with restartable(files) as relay:
        async with kvcs.connect(relay.url, ca=files.ca, reconnect=None) as session:
            closed = asyncio.Event()
            session.on_closed(closed.set)
            await relay.kill()
            async with asyncio.timeout(SAFETY):
                await closed.wait()
            assert session.link is None
            assert not session.lasts and session.newest is session


async def test_closing_a_session_ends_its_link_too(files: PemFiles) -> None:
    async with serving(files) as server:
        async with kvcs.connect(server.url, ca=files.ca, reconnect=SOON) as session:
            link = session.link
            assert link is not None
            await session.close_alone()
            newest = await link.session()
            assert newest is not session and link.sessions == 2
            beside = await link.elsewhere(f"{server.url}/beside")
            await beside.close()
            assert newest.is_usable and session.lasts
            beside = await link.elsewhere(f"{server.url}/beside")
            await session.close(SessionCode.INTERNAL_ERROR, "it is enough")
            assert not (newest.is_open or beside.is_open or session.lasts)
            error = newest.close_error()
            assert (error.code, error.reason) == (SessionCode.INTERNAL_ERROR, "it is enough")
            with pytest.raises(kvcs.ConnectionClosed, match="it is enough"):
                await link.session()
        assert link.sessions == 2


async def test_the_first_session_is_tried_for_until_somebody_listens(files: PemFiles) -> None:
    async with restartable(files) as relay:
        await relay.kill()
        connecting = kvcs.connect(relay.url, ca=files.ca, reconnect=SOON)
        entering = asyncio.create_task(connecting.__aenter__())
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.shield(entering)
        assert not entering.done()
        await relay.start()
        async with asyncio.timeout(SAFETY):
            session = await entering
        assert session.is_open
        await connecting.__aexit__(None, None, None)


async def test_the_first_session_fails_in_time_where_nobody_listens(files: PemFiles) -> None:
    async with restartable(files) as relay:
        await relay.kill()
        for initial in (0.0, 0.1):
            policy = kvcs.Reconnect(initial=initial, first_pause=0.01)
            with pytest.raises(kvcs.ConnectionFailed):
                async with kvcs.connect(relay.url, ca=files.ca, reconnect=policy):
                    pass


async def test_a_bad_certificate_is_not_tried_again(files: PemFiles) -> None:
    async with restartable(files) as relay:
        with pytest.raises(kvcs.CertificateError):
            async with kvcs.connect(relay.url, reconnect=SOON):
                pass


# GOAWAY


@asynccontextmanager
async def two_servers(files: PemFiles) -> AsyncIterator[tuple[kvcs.Server, kvcs.Server]]:
    """Two servers of this process."""
    async with (
        kvcs.serve(HOST, 0, cert=files.cert, key=files.key, session=SESSION) as first,
        kvcs.serve(HOST, 0, cert=files.cert, key=files.key, session=SESSION) as second,
    ):
        yield first, second


async def test_goaway_with_a_uri_moves_the_session_there(files: PemFiles) -> None:
    async with two_servers(files) as (first, second):
        async with kvcs.connect(first.url, ca=files.ca, reconnect=SOON) as session:
            first.goaway(second.url + "/a?b", timeout=10.0)
            await until(session, lambda: session.newest is not session)
            assert session.newest.peer == second.url + "/a?b"
            (peer,) = second.connections
            await peer.established()
            options = peer.core.peer_options
            assert options is not None
            assert options.get(SetupOption.PATH) == b"/a?b"
            assert options.get(SetupOption.AUTHORITY) == f"{HOST}:{second.port}".encode()
            closed = asyncio.Event()
            session.on_closed(closed.set)
            async with asyncio.timeout(SAFETY):
                await closed.wait()
            assert session.close_error().code == SessionCode.NO_ERROR
            assert not session.close_error().by_peer  # we left, it did not have to throw us out
            assert session.lasts and session.newest.is_usable


async def test_a_publication_is_announced_at_the_new_place_before_it_is_withdrawn_at_the_old(
    files: PemFiles,
) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()

    def place(name: str) -> Callable[[kvcs.Connection, events.Event], None]:
        def answer(connection: kvcs.Connection, request: PeerRequest) -> bool:
            connection.core.responder.accept(request.request_id)
            told.put_nowait(f"announced at the {name}")
            return True

        def observe(connection: kvcs.Connection, event: events.Event) -> None:
            if isinstance(event, events.SessionEstablished):
                connection.answer_with(answer)
            elif isinstance(event, events.RequestCancelled):
                told.put_nowait(f"withdrawn at the {name}")
            elif isinstance(event, events.SessionClosed):
                told.put_nowait(f"closed at the {name}")

        return observe

    async with (
        serving(files, observer=place("old")) as old,
        serving(files, observer=place("new")) as new,
        kvcs.connect(old.url, ca=files.ca, reconnect=SOON) as session,
        kvcs.Publisher(session).publish(toy_prefix()) as publication,
    ):
        old.goaway(new.url)
        async with asyncio.timeout(SAFETY):
            seen = [await told.get() for _ in range(4)]
        await put(await publication.segment(), toy_publication())
    assert seen == [
        "announced at the old",
        "announced at the new",
        "withdrawn at the old",
        "closed at the old",
    ]


@pytest.mark.parametrize("uri", ["moqt://[", "moqt://user@host", "https://h/"])
async def test_goaway_with_a_uri_that_is_none_goes_home(files: PemFiles, uri: str) -> None:
    async with two_servers(files) as (first, _):
        async with kvcs.connect(first.url, ca=files.ca, reconnect=SOON) as session:
            (peer,) = first.connections
            with pytest.raises(kvcs.UsageError):
                peer.goaway(uri)
            peer.core.goaway(uri, now=peer.now)  # what ours would not send
            await until(session, lambda: session.newest is not session)
            assert session.newest.peer == first.url


async def test_relays_that_send_each_other_every_client_are_not_followed_for_ever(
    files: PemFiles,
) -> None:
    policy = kvcs.Reconnect(first_pause=0.001, max_pause=0.002, max_hops=3, linger=0.0)
    async with two_servers(files) as (first, second):
        async with kvcs.connect(first.url, ca=files.ca, reconnect=policy) as session:
            seen = [session]
            for _ in range(5):
                here, there = (first, second) if seen[-1].peer == first.url else (second, first)
                await send_away(here, there.url)
                await until(session, lambda: session.newest is not seen[-1])
                seen.append(session.newest)
    peers = [each.peer for each in seen]
    a, b = first.url, second.url
    assert peers[:4] == [a, b, a, b]  # three hops
    assert set(peers[4:]) == {a}  # then it stays with its own


async def send_away(server: kvcs.Server, uri: str) -> None:
    """GOAWAY on the session that the server has not sent away yet."""
    (peer,) = (each for each in server.connections if not each.core.draining)
    await peer.established()
    peer.goaway(uri)


async def test_goaway_before_the_next_server_listens_keeps_the_old_session_while_it_is_used(
    files: PemFiles,
) -> None:
    async with restartable(files) as relay:
        await relay.kill()
        async with kvcs.serve(HOST, 0, cert=files.cert, key=files.key) as server:
            async with kvcs.connect(server.url, ca=files.ca, reconnect=SOON) as session:
                holder = object()
                session.hold(holder)
                (peer,) = server.connections
                peer.goaway(relay.url)
                await until(session, lambda: session.goaway_received is not None)
                assert session.is_open and not session.is_usable and session.lasts
                await relay.start()
                await until(session, lambda: session.newest.is_usable)
                assert session.is_open  # somebody still needs it
                session.release(holder)
                closed = asyncio.Event()
                session.on_closed(closed.set)
                async with asyncio.timeout(SAFETY):
                    await closed.wait()

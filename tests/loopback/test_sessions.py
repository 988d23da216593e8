"""The asyncio shell of a session: contexts, replies, faults of our own, namespace watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import kvcs
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode, SessionCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName
from kvcs.moqt.parameters import Parameters
from kvcs.quic import namespaces
from kvcs.quic.connection import Connection, PeerRequest
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import HOST, SESSION, accepting, joined, serving

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

NAME = FullTrackName((b"some",), b"track")
LIVE = Parameters.of(location_filter=LocationFilter.next_object())


async def test_two_machines_without_a_relay(files: PemFiles) -> None:
    """What a user types, on both sides."""
    toy, prefix = toy_publication(), toy_prefix()
    async with kvcs.serve(HOST, 0, cert=files.cert, key=files.key, session=SESSION) as server:
        assert (server.host, server.url) == (HOST, f"moqt://{HOST}:{server.port}")
        async with (
            kvcs.connect(server.url, ca=files.ca) as session,
            kvcs.Publisher(server).publish(prefix) as publication,
            kvcs.Subscriber(session).open(prefix) as cache,
        ):
            await put(await publication.segment(), toy)
            assert all([same(layer, toy) async for layer in cache])
            assert session.peer == f"{server.url}" and len(server.connections) == 1
        assert not session.is_open


async def test_the_end_of_a_publication_reaches_a_peer_before_the_server_closes(
    files: PemFiles,
) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with kvcs.serve(HOST, 0, cert=files.cert, key=files.key, session=SESSION) as server:
        async with joined(server, files) as client:
            async with kvcs.Publisher(server).publish(prefix) as publication:
                retrieval = kvcs.Subscriber(client, settings=QUICK).open(prefix)
                cache = await retrieval.__aenter__()
                # Its requests for K and V may still be on their way when the publication ends.
                await put(await publication.segment(), toy)
            # Left at once; nothing of it is lost.
            assert all([same(layer, toy) async for layer in cache])
            await retrieval.__aexit__(None, None, None)


async def test_a_server_that_is_not_started_has_no_address() -> None:
    server = kvcs.Server()
    with pytest.raises(kvcs.UsageError, match="not started"):
        _ = server.url
    await server.close()


async def test_a_fault_of_a_handler_closes_the_session_and_tells_no_details(
    files: PemFiles,
) -> None:
    def broken(event: events.Event) -> None:
        raise RuntimeError("secret of ours")

    def accept(connection: Connection, request: PeerRequest) -> bool:
        connection.core.responder.accept(request.request_id)
        return True

    async with serving(files, observer=accepting(accept)) as server:
        async with joined(server, files) as client:
            (peer,) = server.connections
            closed = asyncio.Event()
            peer.on_closed(closed.set)
            request_id = client.core.requester.publish_namespace((b"some",))
            client.handle(request_id, broken)
            await closed.wait()
            error = peer.close_error()
            assert (error.code, error.by_peer) == (SessionCode.INTERNAL_ERROR, True)
            assert "secret" not in error.reason
            with pytest.raises(kvcs.ConnectionClosed):
                client.check_open()


async def test_a_request_that_the_peer_takes_back_is_an_error(files: PemFiles) -> None:
    def take_back(connection: Connection, request: PeerRequest) -> bool:
        connection.core.responder.revoke(request.request_id)
        return True

    async with serving(files, observer=accepting(take_back)) as server:
        async with joined(server, files) as client:
            with pytest.raises(kvcs.RequestError, match="without an answer"):
                await client.reply(client.core.requester.subscribe(NAME, LIVE))
            watch = client.namespaces.watch((b"some",))
            await watch.answered.wait()
            assert isinstance(watch.error, kvcs.RequestError)
            client.namespaces.release(watch)


async def test_nobody_waits_for_the_reply_to_a_request_that_was_cancelled(files: PemFiles) -> None:
    heard, both = list[int](), asyncio.Event()

    def hear(connection: Connection, request: PeerRequest) -> bool:
        heard.append(request.request_id)
        if len(heard) == 2:
            both.set()
        return True

    async with serving(files, observer=accepting(hear)) as server:
        async with joined(server, files) as client:
            request_id = client.core.requester.subscribe(NAME, LIVE)
            waiting = asyncio.create_task(client.reply(request_id))
            announcing = asyncio.create_task(client.origin.add_namespace((b"some",)))
            await both.wait()
            assert not waiting.done() and not announcing.done()
            client.cancel(request_id)
            client.origin.remove_namespace((b"some",))
            async with asyncio.timeout(20):
                for task in (waiting, announcing):
                    with pytest.raises(kvcs.RequestError, match="was cancelled"):
                        await task


async def test_nobody_waits_for_a_reply_beyond_the_session(files: PemFiles) -> None:
    async with serving(files, observer=accepting(lambda *_: True)) as server:
        async with joined(server, files) as client:
            waiting = asyncio.create_task(client.reply(client.core.requester.subscribe(NAME, LIVE)))
            cancelled = asyncio.create_task(
                client.reply(client.core.requester.subscribe(NAME, LIVE))
            )
            await client.drain()
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await server.close(SessionCode.GOAWAY_TIMEOUT, "time is up")
            with pytest.raises(kvcs.ConnectionClosed, match="time is up") as caught:
                await waiting
            assert (caught.value.code, caught.value.by_peer) == (SessionCode.GOAWAY_TIMEOUT, True)
            with pytest.raises(kvcs.ConnectionClosed):
                await client.reply(99)


def overlapping(times: int, heard: list[int]) -> Callable[..., bool]:
    """A peer to which our narrower subscription has not ended yet, so often."""

    def answer(connection: Connection, request: PeerRequest) -> bool:
        if not isinstance(request, events.SubscribeNamespaceReceived):
            return False
        heard.append(request.request_id)
        if len(heard) <= times:
            error = kvcs.RequestError("overlaps", RequestCode.PREFIX_OVERLAP)
            connection.core.responder.refuse(request.request_id, error)
            return True
        return False

    return answer


@pytest.mark.parametrize("times", [1, namespaces.OVERLAP_TRIES, namespaces.OVERLAP_TRIES + 1])
async def test_an_overlap_that_passes_is_tried_again(
    files: PemFiles, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr(namespaces, "OVERLAP_PAUSE", 0.001)
    heard: list[int] = []
    async with serving(files, observer=accepting(overlapping(times, heard))) as server:
        async with joined(server, files) as client:
            watch = client.namespaces.watch((b"kvcs-1",))
            await watch.answered.wait()
            if times <= namespaces.OVERLAP_TRIES:
                assert watch.error is None and len(heard) == times + 1
            else:
                assert isinstance(watch.error, kvcs.RequestError)
                assert watch.error.code == RequestCode.PREFIX_OVERLAP
            client.namespaces.release(watch)
            client.namespaces.release(watch)  # twice is once


async def test_a_watch_fails_when_the_session_ends_between_two_tries(files: PemFiles) -> None:
    heard: list[int] = []
    async with serving(files, observer=accepting(overlapping(99, heard))) as server:
        async with joined(server, files) as client:
            watch = client.namespaces.watch((b"kvcs-1",))
            async with asyncio.timeout(20):
                while not heard:
                    await client.drain()
            await client.close()
            await watch.answered.wait()
            assert watch.error is not None
            late = client.namespaces.watch((b"kvcs-1",))
            assert isinstance(late.error, kvcs.ConnectionClosed)

"""Servers that know nothing of a connection any more, and tell its client so."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

import kvcs
from kvcs.quic.aioquic_backend import QuicSettings
from tests.builders import put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.command import Process
from tests.loopback.kv_fixtures import HOST
from tests.loopback.moving import SOON, relay_settings, until
from tests.loopback.recorder import Recorder, Server, connect, end, serve
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

WAITING = QuicSettings(idle_timeout=600.0, ping_interval=0.1)
"""A client that would wait for ten minutes for a server that says nothing."""


async def vanish(server: Server) -> None:
    """What is left of a server whose process was killed: nothing was said to anybody."""
    listener = server.listener
    for entry in tuple(listener._entries.values()):
        entry.transport.abandon()
    assert listener._udp is not None
    listener._udp.close()
    await listener._udp.wait_closed()


@asynccontextmanager
async def raw(port: int) -> AsyncIterator[socket.socket]:
    """A socket that reaches a server."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((HOST, port))
        sock.setblocking(False)
        yield sock


async def hear(sock: socket.socket) -> bytes:
    """The next datagram."""
    async with asyncio.timeout(20.0):
        return await asyncio.get_running_loop().sock_recv(sock, 65_535)


def quic(side: Recorder) -> Any:
    """The library's connection of one side."""
    return side.transport._quic


def packet(connection_id: bytes, size: int = 60) -> bytes:
    """A packet that cannot be read by whoever it is for."""
    return (b"\x41" + connection_id).ljust(size, b"x")


async def test_a_client_learns_at_once_that_its_server_was_started_again(files: PemFiles) -> None:
    first = await serve(files, port=free_port())
    client = await connect(first, WAITING)
    await first.receiver()
    await vanish(first)
    second = await serve(files, port=first.port)
    code, reason, by_peer = await client.until_closed(20.0)
    assert (code, by_peer) == (None, True) and "stateless reset" in reason
    assert second.listener.resets_sent >= 1 and second.listener.resets_left_out == 0
    assert second.listener.connections == 0 and second.receivers == []
    again = await connect(second)
    assert again.ends == []
    await end(second, again)


async def test_they_can_be_turned_off(files: PemFiles) -> None:
    server = await serve(files, QuicSettings(stateless_resets=0))
    async with raw(server.port) as sock:
        sock.send(packet(os.urandom(8)))
        client = await connect(server)  # its first flight came later
        with pytest.raises(BlockingIOError):
            sock.recv(65_535)
    assert (server.listener.resets_sent, server.listener.resets_left_out) == (0, 1)
    await end(server, client)


async def test_a_token_that_is_not_the_connections_does_nothing(files: PemFiles) -> None:
    """Such as that of another server, though it has the same certificate."""
    server = await serve(files)
    stranger = await serve(files)
    client = await connect(server)
    await server.receiver()
    known = quic(client)._peer_cid
    async with raw(stranger.port) as sock:
        sock.send(packet(known.cid))
        answer = await hear(sock)
    assert stranger.listener.resets_sent == 1
    assert answer[-16:] != known.stateless_reset_token
    now = asyncio.get_running_loop().time()
    source = (HOST, server.port)
    client.transport.datagrams_received([answer], source, now)
    client.transport.batch_ended(now)
    assert client.ends == []
    client.transport.send(2, b"alive", True)
    client.transport.flush()
    accepted = await server.receiver()
    await accepted.until(lambda: 2 in accepted.finished)
    await end(server, client)
    await end(stranger)


async def test_no_token_of_a_connection_that_lives_is_told(files: PemFiles) -> None:
    server = await serve(files)
    client = await connect(server)
    accepted = await server.receiver()
    client.transport.send(2, b"x", True)
    client.transport.flush()
    await accepted.until(lambda: 2 in accepted.finished)
    alive = [each for each in quic(accepted)._host_cids if each.was_sent]
    assert quic(client)._peer_cid.cid in [each.cid for each in alive]
    async with raw(server.port) as sock:
        for each in alive:
            sock.send(packet(each.cid))
        gone = b"unknown!"
        sock.send(packet(gone, 21))  # too short to be answered by less
        sock.send(b"\xc1" + packet(gone)[1:])  # of a handshake
        sock.send(packet(gone, 30))
        answer = await hear(sock)
    assert len(answer) == 29 and answer[0] & 0xC0 == 0x40
    assert answer[-16:] not in [each.stateless_reset_token for each in alive]
    assert server.listener.resets_sent == 1, "all came before, and are not answered"
    assert client.ends == []
    await end(server, client)


async def test_a_relay_counts_them(files: PemFiles) -> None:
    async with kvcs.Relay(relay_settings(files)) as relay:
        async with raw(relay.port) as sock:
            sock.send(packet(os.urandom(8)))
            await hear(sock)
        assert (relay.stats.resets_sent, relay.stats.resets_left_out) == (1, 0)


@contextmanager
def relaying(files: PemFiles, port: int) -> Any:
    """A relay as a process of its own."""
    words = ("--bind", f"{HOST}:{port}", "--cert", files.cert, "--key", files.key)
    with Process("relay", *words, "--allow-anyone", "--lines") as process:
        yield process


@pytest.mark.slow
async def test_a_relay_that_is_killed_and_started_again_is_gone_on_with(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    port = free_port()
    url = f"moqt://{HOST}:{port}"
    with relaying(files, port) as first:
        await asyncio.to_thread(first.event, "listening")
        async with (
            kvcs.connect(url, ca=files.ca, reconnect=SOON, quic=WAITING) as producer,
            kvcs.connect(url, ca=files.ca, reconnect=SOON, quic=WAITING) as consumer,
            kvcs.Publisher(producer).publish(prefix) as publication,
            kvcs.Subscriber(consumer).open(prefix, deadline=120.0) as cache,
        ):
            segment = await publication.segment()
            await put(segment, toy, range(2))
            assert same(await cache.layer(1), toy)
            first.send(signal.SIGKILL)
            await asyncio.to_thread(first.end)
            with relaying(files, port) as second:
                await asyncio.to_thread(second.event, "listening")
                for session in (producer, consumer):
                    await until(
                        session,
                        lambda session=session: (  # type: ignore[misc]
                            session.newest is not session and session.newest.is_usable
                        ),
                    )
                await put(segment, toy, [2, 3])
                assert [same(layer, toy) async for layer in cache] == [True] * 4

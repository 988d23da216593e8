"""Who gets state at a listener: address validation by Retry, and what spoofed flights cost."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from structlog.testing import capture_logs

from kvcs.errors import ConnectionFailed
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.aioquic_backend.certificates import client_configuration
from kvcs.quic.aioquic_backend.private.connection import Connection
from tests.certificates import PemFiles
from tests.loopback.recorder import HOST, Server, connect, end, serve

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

INITIAL, RETRY = 0x00, 0x30
"""Type bits of a long header in version 1 (RFC 9000 §17.2)."""

INVALID_TOKEN = 0xB


class RawClient:
    """A client that sends its flights from whatever socket it is told."""

    def __init__(self, files: PemFiles) -> None:
        settings = QuicSettings()
        self.quic = Connection(
            configuration=client_configuration(
                settings, server_name="localhost", ca=files.ca, verify=True
            ),
            settings=settings,
        )
        self.quic.connect((HOST, 1), now=0.0)

    def flight(self) -> bytes:
        """What it wants to send now."""
        return self.quic.datagrams_to_send(now=0.0)[0][0]

    async def exchange(self, sock: socket.socket) -> bytes:
        """Send a flight and take the answer."""
        sock.send(self.flight())
        async with asyncio.timeout(20.0):
            answer = await asyncio.get_running_loop().sock_recv(sock, 65_535)
        self.quic.receive_datagram(answer, (HOST, 1), now=0.0)
        return answer


@contextmanager
def strangers(server: Server, count: int) -> Iterator[list[socket.socket]]:
    """So many sockets that reach a server."""
    made = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
    try:
        for sock in made:
            sock.connect((HOST, server.port))
            sock.setblocking(False)
        yield made
    finally:
        for sock in made:
            sock.close()


@contextmanager
def elsewhere(server: Server) -> Iterator[socket.socket]:
    """A socket of another network that reaches a server."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.7.1", 0))
        sock.connect((HOST, server.port))
        sock.setblocking(False)
        yield sock


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_client_that_must_prove_its_address_connects(files: PemFiles, host: str) -> None:
    server = await serve(files, QuicSettings(retry_handshakes=0), host=host)
    with capture_logs() as logs:
        clients = [await connect(server, host=host) for _ in range(2)]
    assert "addresses_validated" in [entry["event"] for entry in logs]
    for index, client in enumerate(clients):
        client.transport.send(2, b"content", True)
        client.transport.flush()
        accepted = await server.receiver(index)
        await accepted.until(lambda: 2 in accepted.finished)  # noqa: B023
        assert accepted.data[2] == b"content"
    await end(server, *clients)


async def test_spoofed_flights_take_a_bounded_part_and_honest_clients_connect(
    files: PemFiles,
) -> None:
    settings = QuicSettings(retry_handshakes=3, max_handshakes=4, connect_timeout=20.0)
    server = await serve(files, settings)
    with strangers(server, 10) as socks:
        answers = [await RawClient(files).exchange(sock) for sock in socks]
        assert [answer[0] & 0x30 for answer in answers] == [INITIAL] * 3 + [RETRY] * 7
        assert server.listener.connections == 3
        honest = await connect(server)
        assert server.listener.connections == 4
        assert all(len(answer) < 200 for answer in answers[3:]), "no amplification"
    await end(server, honest)


async def test_a_token_is_good_for_its_own_address_only(files: PemFiles) -> None:
    server = await serve(files, QuicSettings(retry_handshakes=0))
    with strangers(server, 2) as (owner, thief):
        client = RawClient(files)
        assert (await client.exchange(owner))[0] & 0x30 == RETRY
        await client.exchange(thief)
        ending = client.quic.close_event
        assert ending is not None and ending.error_code == INVALID_TOKEN
        assert server.listener.connections == 0
        again = RawClient(files)
        await again.exchange(owner)
        assert (await again.exchange(owner))[0] & 0x30 == INITIAL
        assert server.listener.connections == 1
    await end(server)


async def test_a_token_of_nobody_is_refused(files: PemFiles) -> None:
    server = await serve(files)
    client = RawClient(files)
    client.quic._peer_token = b"made up"
    client.quic._retry_count = 1
    with strangers(server, 1) as [sock]:
        client.quic._connect(now=0.0)
        await client.exchange(sock)
    assert client.quic.close_event is not None
    assert client.quic.close_event.error_code == INVALID_TOKEN
    assert server.listener.connections == 0
    await end(server)


async def test_validated_addresses_are_bounded_too(files: PemFiles) -> None:
    server = await serve(files, QuicSettings(retry_handshakes=0, max_handshakes=2))
    with strangers(server, 2) as socks:
        for sock in socks:
            client = RawClient(files)
            await client.exchange(sock)
            await client.exchange(sock)
        assert server.listener.connections == 2
        with pytest.raises(ConnectionFailed, match="takes no more connections"):
            await connect(server)
    await end(server)


@pytest.mark.skipif(sys.platform != "linux", reason="one address of the loopback alone")
async def test_one_host_does_not_keep_the_others_out(files: PemFiles) -> None:
    """It holds every half-open handshake there may be, with addresses that it has proved."""
    settings = QuicSettings(retry_handshakes=0, max_handshakes=4, connect_timeout=20.0)
    server = await serve(files, settings)
    with strangers(server, 4) as socks:
        for sock in socks:
            client = RawClient(files)
            await client.exchange(sock)
            await client.exchange(sock)
        assert server.listener.connections == 4
        with pytest.raises(ConnectionFailed, match="takes no more connections"):
            await connect(server)
        with elsewhere(server) as sock:
            client = RawClient(files)
            assert (await client.exchange(sock))[0] & 0x30 == RETRY
            assert server.listener.connections == 4, "nobody goes for an address that is not proved"
            assert (await client.exchange(sock))[0] & 0x30 == INITIAL
        assert server.listener.connections == 4
    await end(server)

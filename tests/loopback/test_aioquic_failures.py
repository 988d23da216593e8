"""Connections that do not come to be, and ends: prompt, typed, in words, with nothing left."""

from __future__ import annotations

import asyncio
import datetime
import socket
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvcs.errors import CertificateError, ConnectionFailed, FileError, UsageError
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.aioquic_backend.certificates import client_configuration
from kvcs.quic.aioquic_backend.private.connection import Connection
from tests.certificates import Certified, PemFiles, make_certificate, write_pem
from tests.loopback.recorder import HOST, Server, connect, end, serve
from tests.ports import closed_port

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

QUICK = QuicSettings(close_timeout=0.3)


def text_of(error: pytest.ExceptionInfo[ConnectionFailed], server_port: int) -> str:
    """The message, which is one line and says with whom."""
    text = str(error.value)
    assert "\n" not in text
    assert str(server_port) in text
    return text


# Certificates


async def test_a_certificate_of_an_unknown_authority_is_refused(
    files: PemFiles, tmp_path: Path
) -> None:
    server = await serve(files)
    stranger = write_pem(tmp_path)
    for ca in (stranger.ca, stranger.ca.read_bytes(), None):
        with pytest.raises(CertificateError) as caught:
            await connect(server, ca=ca)
        assert "pass as ca" in text_of(caught, server.port)
    assert not server.receivers
    await end(server)


async def test_a_certificate_for_another_name_is_refused(files: PemFiles) -> None:
    server = await serve(files)
    with pytest.raises(CertificateError) as caught:
        await connect(server, server_name="relay.example")
    assert "relay.example" in text_of(caught, server.port)
    assert "by a name that it carries" in str(caught.value)
    client = await connect(server, server_name="localhost")
    await end(server, client)


async def test_a_certificate_with_many_names_is_refused_in_words(
    authority: Certified, tmp_path: Path
) -> None:
    names = tuple(f"a-rather-long-host-name-{index}.example" for index in range(100))
    server = await serve(write_pem(tmp_path, authority, make_certificate(authority, names)))
    with pytest.raises(CertificateError) as caught:
        await connect(server)
    text_of(caught, server.port)
    await end(server)


async def test_an_expired_certificate_is_refused(authority: Certified, tmp_path: Path) -> None:
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=5)
    certificate = make_certificate(authority, not_after=past)
    server = await serve(write_pem(tmp_path, authority, certificate))
    with pytest.raises(CertificateError) as caught:
        await connect(server)
    assert "renew it" in text_of(caught, server.port)
    await end(server)


async def test_verification_off_is_logged(files: PemFiles, tmp_path: Path) -> None:
    server = await serve(files)
    with capture_logs() as logs:
        client = await connect(server, ca=None, verify=False, server_name="any.example")
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [entry["event"] for entry in warnings] == ["certificate_not_verified"]
    await end(server, client)


async def test_unusable_files_are_named_before_anything_is_sent(
    files: PemFiles, tmp_path: Path
) -> None:
    server = await serve(files)
    missing = tmp_path / "missing.pem"
    with pytest.raises(FileError, match=r"missing\.pem"):
        await connect(server, ca=missing)
    with pytest.raises(FileError, match=r"missing\.pem"):
        await serve(PemFiles(files.ca, missing, files.key))
    await end(server)


# Nobody there, or not willing


async def test_a_closed_port_is_noticed_at_once(files: PemFiles) -> None:
    server = await serve(files)
    begun = time.monotonic()
    with closed_port() as port, pytest.raises(ConnectionFailed) as caught:
        await connect(server, QuicSettings(connect_timeout=50.0), port=port)
    assert "nothing listens" in text_of(caught, port)
    assert time.monotonic() - begun < 20.0
    await end(server)


async def test_silence_is_bounded_by_the_timeout(files: PemFiles) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind((HOST, 0))
        server = await serve(files)
        begun = time.monotonic()
        with pytest.raises(ConnectionFailed) as caught:
            await connect(server, QuicSettings(connect_timeout=0.5), port=silent.getsockname()[1])
        assert 0.4 < time.monotonic() - begun < 20.0
        assert "no answer" in text_of(caught, silent.getsockname()[1])
        await end(server)


async def test_an_unknown_name_is_said(files: PemFiles) -> None:
    server = await serve(files)
    with pytest.raises(ConnectionFailed, match="cannot look up"):
        await connect(server, host="no-such-host.invalid")
    with pytest.raises(UsageError, match="port must lie"):
        await connect(server, port=70_000)
    await end(server)


async def test_a_peer_of_another_protocol_is_said(files: PemFiles) -> None:
    server = await serve(files, QuicSettings(alpn=("other",)))
    with pytest.raises(ConnectionFailed) as caught:
        await connect(server)
    assert "does not speak moqt-22" in text_of(caught, server.port)
    assert not isinstance(caught.value, CertificateError)
    await end(server)


async def test_a_full_server_refuses_at_once(files: PemFiles) -> None:
    server = await serve(files, QuicSettings(max_connections=1))
    client = await connect(server)
    with pytest.raises(ConnectionFailed) as caught:
        await connect(server)
    assert "takes no more connections" in text_of(caught, server.port)
    await end(server, client)


async def test_half_open_connections_are_bounded_and_time_out(files: PemFiles) -> None:
    # As long as honest handshakes may take on a busy machine, too.
    server = await serve(
        files, QuicSettings(max_handshakes=1, connect_timeout=2.0, close_timeout=0.3)
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.connect((HOST, server.port))
        stranger.setblocking(False)
        stranger.send(first_flight(files))
        loop = asyncio.get_running_loop()
        assert await loop.sock_recv(stranger, 65_535)
        assert server.listener.connections == 1
        with pytest.raises(ConnectionFailed, match="takes no more"):
            await connect(server)
        while server.listener.connections:
            assert await loop.sock_recv(stranger, 65_535), "its first flight, again, then a close"
    assert not server.receivers
    clients = [await connect(server), await connect(server)]
    await end(server, *clients)


async def test_garbage_leaves_no_state(files: PemFiles) -> None:
    server = await serve(files)
    flight = first_flight(files)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.connect((HOST, server.port))
        stranger.setblocking(False)
        spoiled = flight[:40] + bytes(len(flight) - 40)
        for data in (b"", b"\x40", b"\xc0", bytes(1200), flight[:1000], spoiled):
            stranger.send(data)
        unknown = flight[:1] + b"\x0a\x0a\x0a\x0a" + flight[5:]  # a version of nobody
        for data in (unknown[:7] + bytes(2), unknown[:1199], unknown):
            stranger.send(data)
        answer = await asyncio.get_running_loop().sock_recv(stranger, 65_535)
        assert answer[1:5] == bytes(4), "version negotiation"
        with pytest.raises(BlockingIOError):
            stranger.recv(65_535)  # to the whole first flight alone
        assert server.listener.connections == 0
    client = await connect(server)
    await end(server, client)


async def test_what_cannot_be_answered_leaves_no_state(files: PemFiles) -> None:
    server = await serve(files)
    now = asyncio.get_running_loop().time()
    server.listener.datagrams_received([first_flight(files)], (HOST, 0), now)
    assert server.listener.connections == 0
    server.listener.datagrams_received([first_flight(files)], (HOST, 9), now)
    assert server.listener.connections == 1
    # Of those that are read together each makes its own.
    several = [first_flight(files), b"", b"\x40" * 50, first_flight(files)]
    server.listener.datagrams_received(several, (HOST, 9), now)
    assert server.listener.connections == 3
    await server.listener.close()


def first_flight(files: PemFiles) -> bytes:
    """The first datagram of a client that then says nothing more."""
    settings = QuicSettings()
    quic = Connection(
        configuration=client_configuration(
            settings, server_name="localhost", ca=files.ca, verify=True
        ),
        settings=settings,
    )
    quic.connect((HOST, 1), now=0.0)
    return quic.datagrams_to_send(now=0.0)[0][0]


# Ports and sockets


async def test_a_port_in_use_is_said_and_given_back_by_close(files: PemFiles) -> None:
    server = await serve(files)
    with pytest.raises(ConnectionFailed) as caught:
        await serve(files, port=server.port)
    assert "cannot listen" in text_of(caught, server.port)
    client = await connect(server)
    await end(server, client)
    again = await serve(files, port=server.port)
    assert again.port == server.port
    await end(again)


async def test_an_address_of_another_machine_cannot_be_bound(files: PemFiles) -> None:
    with pytest.raises(ConnectionFailed, match=r"cannot listen on 192\.0\.2\.1:0"):
        await serve(files, host="192.0.2.1")


async def test_a_cancelled_connect_leaves_nothing(files: PemFiles) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind((HOST, 0))
        silent.setblocking(False)
        server = await serve(files)
        task = asyncio.create_task(connect(server, port=silent.getsockname()[1]))
        client = await sender(silent)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await end(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(client)  # the client's port is free again


async def sender(sock: socket.socket) -> tuple[str, int]:
    """Wait for a datagram; who sent it. (uvloop has no `sock_recvfrom`.)"""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        async with asyncio.timeout(20.0):
            await readable.wait()
    finally:
        loop.remove_reader(sock)
    address: tuple[str, int] = sock.recvfrom(65_535)[1]
    return address


# Ends


async def test_the_server_may_close(files: PemFiles) -> None:
    server = await serve(files)
    client = await connect(server)
    accepted = await server.receiver()
    accepted.transport.close(0x10, "migrate")
    assert await client.until_closed() == (0x10, "migrate", True)
    assert await accepted.until_closed() == (0x10, "migrate", False)
    await client.transport.wait_closed()
    await server.listener.close()


async def test_closing_the_listener_closes_its_connections(files: PemFiles) -> None:
    server = await serve(files)
    client = await connect(server)
    await server.receiver()
    await server.listener.close(0x10, "down for a while")
    assert await client.until_closed() == (0x10, "down for a while", True)
    await server.listener.close()
    assert len(server.receivers[0].ends) == 1


async def test_close_ends_though_the_peer_is_gone(files: PemFiles) -> None:
    server = await serve(files)
    client = await connect(server, QUICK)
    vanish(server)
    client.transport.close(0, "anybody?")
    async with asyncio.timeout(20.0):
        await client.transport.wait_closed()
    assert client.ends == [(0, "anybody?", False)]
    await server.listener.close()


async def test_a_listener_closes_though_its_clients_are_gone(files: PemFiles) -> None:
    server = await serve(files, QUICK)
    client = await connect(server)
    (await server.receiver()).transport.send(3, b"unheard", True)
    client.transport._wire.close()  # type: ignore[attr-defined]
    async with asyncio.timeout(20.0):
        await server.listener.close()
    assert server.listener.connections == 0
    client.transport.close(0, "")
    await client.transport.wait_closed()


def vanish(server: Server) -> None:
    """Take the server's socket away without a word."""
    assert server.listener._udp is not None
    server.listener._udp.close()

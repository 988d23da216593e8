"""The aioquic backend over real sockets: transfer, credit, races, datagrams, keep-alive."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
from typing import Any

import pytest

from kvcs.quic.aioquic_backend import AioquicTransport, QuicSettings
from kvcs.quic.aioquic_backend.paths import largest_to_take
from kvcs.quic.aioquic_backend.private import outgoing
from tests.certificates import PemFiles
from tests.loopback.recorder import Recorder, connect, end, feed, serve
from tests.loopback.shim import Shim

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

MIB = 1024 * 1024


async def finished(receiver: Recorder, stream_id: int) -> None:
    """Wait for the end of a stream."""
    await receiver.until(lambda: stream_id in receiver.finished)


def local_address(transport: AioquicTransport) -> Any:
    """Where a client's socket is bound."""
    sock: socket.socket = transport._wire._sock  # type: ignore[attr-defined]
    return sock.getsockname()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
async def test_a_handshake_completes_on_loopback_only(files: PemFiles, host: str) -> None:
    server = await serve(files, host=host)
    client = await connect(server, host=host)
    accepted = await server.receiver()
    assert client.calls == accepted.calls == [("connected",)]
    assert client.transport.negotiated is not None
    assert client.transport.negotiated.alpn == "moqt-22"
    assert local_address(client.transport)[0] in ("127.0.0.1", "::1")
    assert server.listener.host in ("127.0.0.1", "::1")
    await end(server, client)
    assert client.ends == [(0, "", False)]
    assert accepted.ends == [(0, "", True)]


async def test_a_name_falls_back_to_the_address_that_listens(files: PemFiles) -> None:
    server = await serve(files, host="127.0.0.1")
    client = await connect(server, host="localhost")
    assert local_address(client.transport)[0] == "127.0.0.1"
    await end(server, client)


async def test_a_local_address_can_be_named(files: PemFiles) -> None:
    server = await serve(files)
    client = await connect(server, local_host="127.0.0.2")
    assert local_address(client.transport)[0] == "127.0.0.2"
    await end(server, client)


@pytest.mark.parametrize("step", [0, 2], ids=["bidirectional", "unidirectional"])
async def test_512_streams_are_open_at_once(files: PemFiles, step: int) -> None:
    server = await serve(files)
    client = await connect(server)
    transport = client.transport
    credit = transport.uni_streams if step else transport.bidi_streams
    assert credit() == 512
    for index in range(512):
        transport.send(step + 4 * index, index.to_bytes(2, "big"), False)
    assert credit() == 0
    transport.flush()
    accepted = await server.receiver()
    await accepted.until(lambda: len(accepted.data) == 512)
    for index in range(512):
        transport.send(step + 4 * index, b"!", True)
    transport.flush()
    await accepted.until(lambda: len(accepted.finished) == 512)
    expected = {step + 4 * index: index.to_bytes(2, "big") + b"!" for index in range(512)}
    assert accepted.data == expected
    if step:
        await client.until(lambda: credit() > 0)
    await end(server, client)


async def test_32_mib_arrive_unchanged(files: PemFiles) -> None:
    content = random.Random(1).randbytes(32 * MIB)
    server = await serve(files)
    client = await connect(server)
    accepted = await server.receiver()
    digest = hashlib.sha256()
    accepted.on_data = lambda stream_id, data: digest.update(data)
    feed(client, 2, memoryview(content))
    await accepted.until(lambda: 2 in accepted.finished, 50.0)
    assert accepted.octets == len(content)
    assert digest.digest() == hashlib.sha256(content).digest()
    largest = largest_to_take(client.transport.stats().receive_buffer)
    assert client.transport.datagram_size == largest, "loopback carries large datagrams"
    await end(server, client)


async def test_8_mib_arrive_under_one_key_after_the_other(
    files: PemFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "KEY_PACKETS", 300)
    content = random.Random(2).randbytes(8 * MIB)
    window = 512 * 1024  # what is not acknowledged is less than half of all packets
    small = QuicSettings(datagram_size=1200, receive_window=window, stream_receive_window=window)
    server = await serve(files, small)
    client = await connect(server, small)
    accepted = await server.receiver()
    digest = hashlib.sha256()
    begun: set[int] = set()

    def on_data(stream_id: int, data: bytes) -> None:
        if stream_id == 6:
            digest.update(data)
            begun.add(client.transport._quic._key_begun)

    accepted.on_data = on_data
    client.transport.send(2, b"control", False)
    feed(client, 6, memoryview(content))
    await accepted.until(lambda: 6 in accepted.finished, 50.0)
    assert digest.digest() == hashlib.sha256(content).digest()
    assert len(begun) > 3, "keys were updated several times"
    await end(server, client)


async def test_a_slow_peer_bounds_what_the_library_holds(files: PemFiles) -> None:
    window, budget, total = 256 * 1024, 128 * 1024, 2 * MIB
    server = await serve(
        files, QuicSettings(receive_window=window, stream_receive_window=2 * window)
    )
    client = await connect(server, QuicSettings(send_buffer=budget))
    accepted = await server.receiver()
    held, most = 0, 0

    def read_slowly(stream_id: int, data: bytes) -> None:
        nonlocal held, most
        most = max(most, client.transport.unacknowledged())
        held += len(data)
        accepted.transport.withhold(len(data))

    accepted.on_data = read_slowly
    feed(client, 2, memoryview(bytes(total)))
    while accepted.octets < total:
        reached = min(accepted.octets + window, total)
        await accepted.until(lambda: accepted.octets >= reached)  # noqa: B023
        assert accepted.octets <= reached, "no more than a window beyond what was read"
        accepted.transport.release(held)
        held = 0
    assert most <= budget
    await client.until(lambda: client.transport.unacknowledged() == 0)
    await end(server, client)


@pytest.mark.parametrize("seed", [1, 2])
async def test_cancelling_as_streams_end_raises_nowhere(files: PemFiles, seed: int) -> None:
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    server = await serve(files)
    client = await connect(server)
    accepted = await server.receiver()
    streams = [2 + 4 * index for index in range(200)]
    pending = 3 * len(streams)
    done = asyncio.Event()

    def one(side: AioquicTransport, action: str, stream_id: int) -> None:
        nonlocal pending
        if action == "send":
            side.send(stream_id, b"", True)
        elif action == "reset":
            side.reset(stream_id, 8)
        else:
            side.stop_sending(stream_id, 7)
        side.flush()
        pending -= 1
        if not pending:
            done.set()

    for stream_id in streams:
        client.transport.send(stream_id, bytes(rng.randrange(1, 3000)), False)
        finish = rng.uniform(0.0, 0.1)
        loop.call_later(finish, one, client.transport, "send", stream_id)
        stop = finish + rng.uniform(-0.005, 0.005)
        loop.call_later(max(0.0, stop), one, accepted.transport, "stop_sending", stream_id)
        loop.call_later(finish + rng.uniform(0.0, 0.005), one, client.transport, "reset", stream_id)
    client.transport.flush()
    await done.wait()
    await client.until(lambda: client.transport.unacknowledged() == 0)
    last = 2 + 4 * len(streams)
    client.transport.send(last, b"alive", True)
    client.transport.flush()
    await accepted.until(lambda: last in accepted.finished)
    assert not client.ends and not accepted.ends
    await end(server, client)


async def test_datagrams_go_both_ways(files: PemFiles) -> None:
    server = await serve(files)
    client = await connect(server)
    accepted = await server.receiver()
    assert client.transport.datagram_octets() >= 1000
    client.transport.send_datagram(b"ping" * 100)
    client.transport.flush()
    await accepted.until(lambda: ("datagram", b"ping" * 100) in accepted.calls)
    accepted.transport.send_datagram(b"pong")
    accepted.transport.flush()
    await client.until(lambda: ("datagram", b"pong") in client.calls)
    client.transport.send_datagram(bytes(70_000))
    client.transport.flush()
    await end(server, client)
    assert [call[0] for call in accepted.calls] == ["connected", "datagram", "closed"]


@pytest.mark.slow
async def test_pings_outlast_the_idle_timeout(files: PemFiles) -> None:
    kept = QuicSettings(idle_timeout=2.0, ping_interval=0.15)
    left = QuicSettings(idle_timeout=2.0, ping_interval=None)
    server = await serve(files, left)
    silent, keeping = await connect(server, left), await connect(server, kept)
    code, reason, by_peer = await silent.until_closed(20.0)
    assert (code, by_peer) == (None, False)
    assert reason.startswith("idle timeout")
    with pytest.raises(TimeoutError):
        await keeping.until_closed(2.5)
    keeping.transport.send(2, b"still here", True)
    keeping.transport.flush()
    accepted = await server.receiver(1)
    await accepted.until(lambda: 2 in accepted.finished)
    await end(server, keeping)


async def test_many_clients_share_one_socket(files: PemFiles) -> None:
    server = await serve(files)
    clients = await asyncio.gather(*(connect(server) for _ in range(8)))
    for index, client in enumerate(clients):
        client.transport.send(2, bytes([index]) * 50_000, True)
        client.transport.flush()
    for index in range(8):
        await finished(await server.receiver(index), 2)
    got = sorted(bytes(receiver.data[2]) for receiver in server.receivers)
    assert got == [bytes([index]) * 50_000 for index in range(8)]
    assert server.listener.connections == 8
    await end(server, *clients)
    assert server.listener.connections == 0


async def test_a_client_may_change_its_connection_id(files: PemFiles) -> None:
    server = await serve(files)
    client = await connect(server)
    accepted = await server.receiver()
    used = set()
    for index in range(12):
        client.transport._quic.change_connection_id()
        used.add(client.transport._quic._peer_cid.cid)
        client.transport.send(2 + 4 * index, b"by another ID", True)
        client.transport.flush()
        await finished(accepted, 2 + 4 * index)
    assert len(used) == 12
    await end(server, client)


async def test_a_path_may_shrink_in_mid_flow(files: PemFiles) -> None:
    carries = 65_535
    server = await serve(files)
    shim = await Shim.start(server.port, lost=lambda data: len(data) > carries)
    client = await connect(server, port=shim.port)
    accepted = await server.receiver()
    largest = largest_to_take(client.transport.stats().receive_buffer)
    await client.until(lambda: client.transport.datagram_size == largest)
    content = random.Random(3).randbytes(8 * MIB)  # far more than may be on its way
    feed(client, 2, memoryview(content))
    await accepted.until(lambda: accepted.octets > MIB)
    carries = 1500
    await accepted.until(lambda: 2 in accepted.finished, 40.0)
    assert accepted.data[2] == content
    await client.until(lambda: client.transport.datagram_size == 1452, 40.0)
    await end(server, client)
    shim.close()


async def test_a_client_may_change_its_address(files: PemFiles) -> None:
    server = await serve(files)
    shim = await Shim.start(server.port)
    client = await connect(server, port=shim.port)
    accepted = await server.receiver()
    content = random.Random(2).randbytes(4 * MIB)
    feed(client, 2, memoryview(content))
    await accepted.until(lambda: accepted.octets > MIB)
    await shim.move()
    await accepted.until(lambda: 2 in accepted.finished)
    assert accepted.data[2] == content
    await end(server, client)
    shim.close()

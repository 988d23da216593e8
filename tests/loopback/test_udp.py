"""The UDP socket: batches, full sockets, refusals, buffers, and loops that cannot watch one."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvcs.errors import UsageError
from kvcs.quic.aioquic_backend import segments, udp
from kvcs.quic.aioquic_backend.ports import Address, Datagrams, Train
from kvcs.quic.aioquic_backend.udp import (
    BATCH,
    BATCH_OCTETS,
    MAX_QUEUED,
    PlainUdp,
    Udp,
    UdpSocket,
    bound_socket,
    open_udp,
    resolve,
    set_buffers,
    socket_buffers,
)
from tests.certificates import PemFiles
from tests.loopback.recorder import HOST, connect, end, feed, serve
from tests.ports import closed_port

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Endpoint:
    """Records what a socket reports."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = [[]]
        self.handed: list[tuple[Any, list[bytes]]] = []
        self.refusals = 0
        self.unblocks = 0
        self.changed = asyncio.Event()

    def datagrams_received(self, datagrams: list[bytes], address: Any, now: float) -> None:
        assert now > 0.0
        assert datagrams
        self.batches[-1] += datagrams
        self.handed.append((address, datagrams))

    def batch_ended(self, now: float) -> None:
        self.batches.append([])
        self.changed.set()

    def unblocked(self) -> None:
        self.unblocks += 1
        self.changed.set()

    def refused(self) -> None:
        self.refusals += 1
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20.0):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    @property
    def received(self) -> list[bytes]:
        return [data for batch in self.batches for data in batch]


class Unwatching(asyncio.SelectorEventLoop):
    """A loop whose users cannot watch sockets, as Windows' default loop is."""

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        raise NotImplementedError


async def test_what_waits_is_read_in_bounded_batches() -> None:
    endpoint = Endpoint()
    receiver = bound_socket(socket.AF_INET, (HOST, 0), None)
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * 1024 * 1024)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect(receiver.getsockname())
        for index in range(BATCH + 44):  # fewer than the smallest buffer takes
            sender.send(index.to_bytes(2, "big"))
    opened = await open_udp(receiver, endpoint)
    assert isinstance(opened, UdpSocket)
    await endpoint.until(lambda: len(endpoint.received) == BATCH + 44)
    assert endpoint.received == [index.to_bytes(2, "big") for index in range(BATCH + 44)]
    assert [len(batch) for batch in endpoint.batches[:2]] == [BATCH, 44]
    opened.close()
    opened.close()


async def test_a_batch_of_large_datagrams_is_bounded_in_octets() -> None:
    endpoint = Endpoint()
    receiver = bound_socket(socket.AF_INET, (HOST, 0), None)
    size, sent = BATCH_OCTETS // 16, 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect(receiver.getsockname())
        # No more than a kernel with small buffers keeps.
        set_buffers(receiver, 4 * 1024 * 1024)
        while (sent + 1) * 2 * size < socket_buffers(receiver)[0] and sent < 40:
            sender.send(sent.to_bytes(1, "big") * size)
            sent += 1
    opened = await open_udp(receiver, endpoint)
    await endpoint.until(lambda: len(endpoint.received) == sent)
    assert [data[0] for data in endpoint.received] == list(range(sent))
    assert max(map(len, endpoint.batches)) <= 16
    if sent == 40:
        assert [len(batch) for batch in endpoint.batches[:3]] == [16, 16, 8]
    opened.close()


class Scripted(socket.socket):
    """A socket in which datagrams wait that nobody has to send."""

    waiting: list[tuple[bytes, Any]]

    def recvfrom(self, *_: Any) -> tuple[bytes, Any]:
        if not self.waiting:
            raise BlockingIOError
        return self.waiting.pop(0)


async def handed_over(waiting: list[tuple[bytes, Any]]) -> list[tuple[Any, list[bytes]]]:
    """How an endpoint gets what waits, in one wake-up."""
    endpoint = Endpoint()
    sock = Scripted(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setblocking(False)
    sock.bind((HOST, 0))
    sock.waiting = list(waiting)
    opened = await open_udp(sock, endpoint)
    assert isinstance(opened, UdpSocket)
    opened._readable()
    opened.close()
    assert [data for _, group in endpoint.handed for data in group] == [d for d, _ in waiting]
    return endpoint.handed


async def test_what_waits_is_handed_over_by_where_it_comes_from() -> None:
    one, two = (HOST, 1), (HOST, 2)
    sources = [one, one, two, two, two, one]
    waiting = [(bytes((index,)) * 2000, source) for index, source in enumerate(sources)]
    handed = await handed_over(waiting)
    assert [(source, len(group)) for source, group in handed] == [(one, 2), (two, 3), (one, 1)]


async def test_no_more_is_handed_over_at_once_than_near_caches_hold() -> None:
    source = (HOST, 1)
    handed = await handed_over([(bytes(16_000), source)] * 9)
    assert [len(group) for _, group in handed] == [6, 3]
    handed = await handed_over([(bytes(64_000), source)] * 7)
    assert [len(group) for _, group in handed] == [3, 3, 1]


async def test_a_full_socket_keeps_order_and_reports_when_there_is_room() -> None:
    # Loopback never fills a sender's buffer; a pair of datagram sockets of the system does.
    sender, receiver = full_pair()
    endpoint = Endpoint()
    opened = await open_udp(sender, endpoint)
    datagrams = [index.to_bytes(2, "big") * 600 for index in range(300)]
    opened.send([(data, sender.getpeername()) for data in datagrams[:200]])
    assert blocked(opened)
    opened.send([(data, sender.getpeername()) for data in datagrams[200:]])
    assert endpoint.unblocks == 0
    received: list[bytes] = []
    loop = asyncio.get_running_loop()
    while len(received) < len(datagrams):
        async with asyncio.timeout(20.0):
            received.append(await loop.sock_recv(receiver, 65_535))
    await endpoint.until(lambda: endpoint.unblocks == 1)
    assert received == datagrams
    assert not blocked(opened)
    opened.close()
    receiver.close()


async def test_what_waits_for_a_full_socket_is_bounded() -> None:
    sender, receiver = full_pair()
    opened = await open_udp(sender, Endpoint())
    assert isinstance(opened, UdpSocket)
    for _ in range(5):
        opened.send([(bytes(1200), sender.getpeername())] * (MAX_QUEUED // 2))
    assert len(opened._queue) == MAX_QUEUED
    opened.close()
    receiver.close()


def full_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected datagram sockets that hold little."""
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for sock in (sender, receiver):
        sock.setblocking(False)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return sender, receiver


def blocked(opened: Udp) -> bool:
    """Whether datagrams wait (read anew each time)."""
    return opened.blocked


async def test_a_refusal_is_reported() -> None:
    endpoint = Endpoint()
    with closed_port() as port:
        target = (HOST, port)
        opened = await open_udp(bound_socket(socket.AF_INET, (HOST, 0), target), endpoint)
        for _ in range(3):
            opened.send([(b"anybody?", target)])
        await endpoint.until(lambda: endpoint.refusals > 0)
        opened.close()
        opened.send([(b"too late", target)])


async def test_a_datagram_that_the_network_refuses_is_lost_quietly() -> None:
    receiver = bound_socket(socket.AF_INET, (HOST, 0), None)
    sender = bound_socket(socket.AF_INET, (HOST, 0), None)
    opened = await open_udp(sender, Endpoint())
    target = receiver.getsockname()
    opened.send([(bytes(70_000), target), (b"small", target)])
    async with asyncio.timeout(20.0):
        assert await asyncio.get_running_loop().sock_recv(receiver, 65_535) == b"small"
    opened.close()
    receiver.close()


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux segments UDP")


def burst() -> list[bytes]:
    """Datagrams of several sizes, most of them alike; they fit the smallest default buffer."""
    rng = random.Random(3)
    lengths = [1452, *[1200] * 60, 17, *[1200] * 5, 4000, *[1452] * 15, 1]
    return [rng.randbytes(length) for length in lengths]


def some_in_trains(address: Address) -> Datagrams:
    """The same, as a connection gives them: most of those that are alike in trains, one alone."""
    each: Datagrams = [(data, address) for data in burst()]
    for start, stop in ((80, 83), (57, 58), (1, 55)):
        octets = memoryview(b"".join(burst()[start:stop]))
        each[start:stop] = [(Train(octets, len(octets) // (stop - start)), address)]
    return each


def none_in_trains(address: Address) -> Datagrams:
    """The same, each for itself."""
    return [(data, address) for data in burst()]


PACKED = pytest.mark.parametrize("packed", [none_in_trains, some_in_trains])


@LINUX
@PACKED
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("connected", [False, True])
async def test_segmented_datagrams_arrive_as_they_were(
    joined: bool, connected: bool, packed: Callable[[Address], Datagrams]
) -> None:
    endpoint = Endpoint()
    target = bound_socket(socket.AF_INET, (HOST, 0), None)
    set_buffers(target, 1024 * 1024)
    address = target.getsockname()
    receiver = await open_udp(target, endpoint, joined=joined)
    sender = await open_udp(
        bound_socket(socket.AF_INET, (HOST, 0), address if connected else None), Endpoint()
    )
    assert isinstance(sender, UdpSocket) and sender._segments
    sender.send(packed(address))
    await endpoint.until(lambda: len(endpoint.received) == len(burst()))
    assert endpoint.received == burst()
    assert max(map(len, endpoint.batches)) < BATCH + segments.MAX_SEGMENTS
    sender.close()
    receiver.close()


@LINUX
@PACKED
@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL, errno.EMSGSIZE])
async def test_a_kernel_that_refuses_to_segment_gets_them_one_by_one(
    code: int, packed: Callable[[Address], Datagrams], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    def refuse(*_: Any) -> None:
        nonlocal asked
        asked += 1
        raise OSError(code, "no")

    monkeypatch.setattr(segments, "send", refuse)
    endpoint = Endpoint()
    target = bound_socket(socket.AF_INET, (HOST, 0), None)
    set_buffers(target, 1024 * 1024)
    address = target.getsockname()
    receiver = await open_udp(target, endpoint)
    sender = await open_udp(bound_socket(socket.AF_INET, (HOST, 0), address), Endpoint())
    for times in (1, 2):
        sender.send(packed(address))
        await endpoint.until(lambda: len(endpoint.received) == times * len(burst()))  # noqa: B023
    assert endpoint.received == 2 * burst()
    assert asked == (2 if code == errno.EMSGSIZE else 1), "asked again only where it may help"
    sender.close()
    receiver.close()


@LINUX
@PACKED
async def test_a_full_socket_keeps_the_order_of_what_was_segmented(
    packed: Callable[[Address], Datagrams], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise BlockingIOError

    endpoint = Endpoint()
    target = bound_socket(socket.AF_INET, (HOST, 0), None)
    set_buffers(target, 1024 * 1024)
    address = target.getsockname()
    receiver = await open_udp(target, endpoint)
    opened = await open_udp(bound_socket(socket.AF_INET, (HOST, 0), address), Endpoint())
    monkeypatch.setattr(segments, "send", full)
    opened.send(packed(address))
    await endpoint.until(lambda: len(endpoint.received) == len(burst()))
    assert endpoint.received == burst()
    opened.close()
    receiver.close()


def test_sockets_of_other_kinds_are_not_segmented() -> None:
    sender, receiver = full_pair()
    assert not segments.can_segment(sender)
    assert not segments.join_received(receiver)
    sender.close()
    receiver.close()


def test_small_socket_buffers_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udp, "_buffers_reported", set())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, capture_logs() as logs:
        for _ in range(2):
            set_buffers(sock, 2**30)
    [warning] = [entry for entry in logs if entry["log_level"] == "warning"]
    assert warning["event"] == "socket_buffers_small"
    assert warning["asked"] == 2**30
    assert warning["receive"] < 2**30 and warning["send"] < 2**30
    assert warning["advice"] == (f"sysctl -w net.core.rmem_max={2**30} net.core.wmem_max={2**30}")


def test_sufficient_socket_buffers_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udp, "_buffers_reported", set())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, capture_logs() as logs:
        set_buffers(sock, 8192)
        assert socket_buffers(sock) == (8192, 8192)
    assert logs == []


async def test_addresses_are_resolved_without_repeats() -> None:
    assert await resolve("127.0.0.1", 4433, 4) == [(socket.AF_INET, ("127.0.0.1", 4433))]
    assert await resolve("::1", 4433, 4) == [(socket.AF_INET6, ("::1", 4433, 0, 0))]
    found = await resolve("localhost", 4433, 4)
    assert found
    assert len(set(found)) == len(found)
    assert len(await resolve("localhost", 4433, 1)) == 1
    with pytest.raises(UsageError):
        await resolve("127.0.0.1", -1, 1)


def test_a_loop_that_cannot_watch_sockets_still_carries_connections(files: PemFiles) -> None:
    content = random.Random(1).randbytes(2 * 1024 * 1024)
    kinds: list[type[Udp]] = []

    async def transfer() -> None:
        server = await serve(files)
        client = await connect(server)
        kinds.append(type(server.listener._udp))  # type: ignore[arg-type]
        kinds.append(type(client.transport._wire))  # type: ignore[arg-type]
        accepted = await server.receiver()
        feed(client, 2, memoryview(content))
        await accepted.until(lambda: 2 in accepted.finished)
        assert accepted.data[2] == content
        await end(server, client)
        again = await serve(files, port=server.port)
        await end(again)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=Unwatching) as runner:
        runner.run(transfer())
    assert kinds == [PlainUdp, PlainUdp]


def test_such_a_loop_notices_a_closed_port(files: PemFiles) -> None:
    async def refused() -> str:
        server = await serve(files)
        await server.listener.close()
        with pytest.raises(Exception) as caught:
            await connect(server)
        return str(caught.value)

    with asyncio.Runner(loop_factory=Unwatching) as runner:
        assert "nothing listens" in runner.run(refused())

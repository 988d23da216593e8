"""One UDP socket in an event loop: many datagrams per wake-up, nothing lost to a full buffer."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from itertools import chain, islice
from typing import Any, Final, Protocol

from kvcs.errors import UsageError
from kvcs.observe import get_logger
from kvcs.quic.aioquic_backend import segments
from kvcs.quic.aioquic_backend.ports import Address, Datagrams, Train
from kvcs.quic.aioquic_backend.segments import one_by_one

log = get_logger("kvcs.quic")

BATCH: Final = 256
"""Datagrams read per wake-up; then events are delivered and one transmission follows.

What surrounds a batch, an acknowledgement above all, takes as long as opening a dozen datagrams of
ordinary size. These take a few milliseconds, as do `BATCH_OCTETS` of larger ones.
"""

BATCH_OCTETS: Final = 512 * 1024
"""Octets after which a wake-up reads no more: a sender that has a window of a few megabytes out
hears of what arrived while there is more on the way, and neither side waits for the other. Half as
much takes a twentieth more processor time on both sides: an acknowledgement costs more than a
datagram."""

GATHERED_OCTETS: Final = 96 * 1024
"""Octets of datagrams that are handed over together: they fit the processor's nearest caches, and
are as many of ordinary size as a sender of ours sends in one go."""

GATHERED_DATAGRAMS: Final = 3
"""So many are handed over together however large they are: what surrounds a hand-over costs more
than memory that is a little farther away."""

LARGEST_UDP: Final = 65_535
"""Room for any datagram that a peer may send."""

MAX_QUEUED: Final = 4096
"""Datagrams that wait for a full socket; connections build no more meanwhile."""

_PMTU_PROBE: Final = 3
"""IP_PMTUDISC_PROBE of Linux: never fragment, and do not let a cached path MTU refuse a probe."""


make_socket: ContextVar[Callable[[int, int], socket.socket]] = ContextVar(
    "kvcs_make_socket", default=socket.socket
)
"""Makes a socket of a family and kind: the operating system's, or one of a virtual network."""

REFUSALS: Final = (ConnectionRefusedError, ConnectionResetError)
"""How an ICMP "port unreachable" shows on a connected socket; the second on Windows."""


class Endpoint(Protocol):
    """Who uses a socket."""

    def datagrams_received(self, datagrams: list[bytes], address: Address, now: float) -> None:
        """Datagrams arrived from one address, at least one, in this order."""

    def batch_ended(self, now: float) -> None:
        """All datagrams of a wake-up were handed over."""

    def unblocked(self) -> None:
        """The socket takes datagrams again."""

    def refused(self) -> None:
        """The network says that nobody listens at the address this socket is connected to."""


def bound_socket(family: int, local: Address | None, remote: Address | None) -> socket.socket:
    """Make a non-blocking UDP socket, bound to `local` and connected to `remote` where given.

    Raises:
        OSError: an address is not available, in use, or has no route.
    """
    sock = make_socket.get()(family, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        if family == socket.AF_INET6 and local is not None and local[0] == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        _forbid_fragments(sock)
        if local is not None:
            sock.bind(local)
        if remote is not None:
            sock.connect(remote)
    except BaseException:
        sock.close()
        raise
    return sock


def _forbid_fragments(sock: socket.socket) -> None:
    """QUIC packets must not be fragmented by IP (RFC 9000 §14)."""
    if sys.platform != "linux":
        return
    if sock.family == socket.AF_INET6:
        ipv6_mtu_discover = 23
        sock.setsockopt(socket.IPPROTO_IPV6, ipv6_mtu_discover, _PMTU_PROBE)
    ip_mtu_discover = 10  # an IPv6 socket may carry IPv4, too
    sock.setsockopt(socket.IPPROTO_IP, ip_mtu_discover, _PMTU_PROBE)


_buffers_reported: set[tuple[int, int]] = set()


def set_buffers(sock: socket.socket, octets: int) -> None:
    """Ask for socket buffers; logs in one line, once per process, what the kernel does not give.

    A receive buffer smaller than a burst is where datagrams get lost between fast machines.
    """
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        try:
            sock.setsockopt(socket.SOL_SOCKET, option, octets)
        except OSError as exc:
            log.debug("socket_buffer_refused", option=option, error=str(exc))
    got = receive, send = socket_buffers(sock)
    if min(got) < octets and got not in _buffers_reported:
        _buffers_reported.add(got)
        limits = {"net.core.rmem_max": receive, "net.core.wmem_max": send}
        log.warning(
            "socket_buffers_small",
            asked=octets,
            receive=receive,
            send=send,
            advice="sysctl -w "
            + " ".join(f"{name}={octets}" for name, size in limits.items() if size < octets),
        )


def socket_buffers(sock: socket.socket) -> tuple[int, int]:
    """Octets that a socket buffers while receiving, and while sending."""
    counted_twice = 2 if sys.platform == "linux" else 1  # the kernel counts its own overhead in
    receive, send = (
        sock.getsockopt(socket.SOL_SOCKET, option) // counted_twice
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF)
    )
    return receive, send


class UdpSocket:
    """A UDP socket whose readiness the loop watches: batches of datagrams, no task.

    It owns the socket. Use `open_udp`, which knows loops that cannot watch a socket.
    """

    def __init__(self, sock: socket.socket, endpoint: Endpoint, *, joined: bool = False) -> None:
        """Watch `sock`; see `open_udp` for `joined`."""
        self._sock = sock
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[bytes, Address]] = deque()
        self._closed = False
        self._peer: Address | None = peer_of(sock)
        self.socket_buffers = socket_buffers(sock)
        self._segments = segments.can_segment(sock)
        self._joined = joined and segments.join_received(sock)
        self._watch()

    @property
    def blocked(self) -> bool:
        """Whether datagrams wait for room in the socket."""
        return bool(self._queue)

    def send(self, datagrams: Datagrams) -> None:
        """Send in order; waits inside for a full socket; what the network refuses is lost."""
        if self._closed or not datagrams:
            return
        if self._queue:
            self._keep(one_by_one(datagrams))
            return
        sent = 0
        for run in segments.runs(datagrams) if self._segments else ():
            if not self._send_run(run):
                break
            sent += len(run)
        rest = one_by_one(datagrams[sent:])
        for data, address in rest:
            if not self._send_one(data, address):
                self._keep(chain([(data, address)], rest))
                self._wait_for_room()
                return

    def close(self) -> None:
        """Stop watching and close the socket; idempotent."""
        if not self._closed:
            self._closed = True
            self._queue.clear()
            self._release()

    async def wait_closed(self) -> None:
        """Wait until the port is free, which it is at once."""

    # What depends on the loop.

    def _watch(self) -> None:
        self._loop.add_reader(self._sock, self._readable)

    def _send_one(self, data: bytes, address: Address) -> bool:
        """False where the socket is full."""
        try:
            if address == self._peer:
                self._sock.send(data)
            else:
                self._sock.sendto(data, address)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as exc:
            self._lost(exc)
        return True

    def _keep(self, datagrams: Iterable[tuple[bytes, Address]]) -> None:
        """Let them wait, as many as there is room for."""
        self._queue.extend(islice(datagrams, MAX_QUEUED - len(self._queue)))

    def _send_run(self, run: Datagrams) -> bool:
        """False where the rest is to be tried one by one."""
        data, address = run[0]
        if len(run) == 1 and not isinstance(data, Train):
            return self._send_one(data, address)
        try:
            segments.send(self._sock, run, None if address == self._peer else address)
        except OSError as exc:
            if exc.errno in segments.REFUSED:
                self._segments = False
                log.debug("segmentation_refused", error=str(exc))
            return False
        return True

    def _wait_for_room(self) -> None:
        self._loop.add_writer(self._sock, self._writable)

    def _release(self) -> None:
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()

    # Private

    def _readable(self) -> None:
        now = self._loop.time()
        refused = False
        count = octets = gathered_octets = 0
        gathered: list[bytes] = []
        source: Address = None
        while count < BATCH and octets < BATCH_OCTETS:
            try:
                if self._joined:
                    datagrams, address = segments.receive(self._sock, LARGEST_UDP)
                else:
                    data, address = self._sock.recvfrom(LARGEST_UDP)
                    datagrams = [data]
            except (BlockingIOError, InterruptedError):
                break
            except OSError as exc:
                # An ICMP error about something sent; what was received still waits behind it.
                refused = refused or isinstance(exc, REFUSALS)
                count += 1
                continue
            if gathered and address != source:
                self._endpoint.datagrams_received(gathered, source, now)
                if self._closed:
                    return
                gathered, gathered_octets = [], 0
            source = address
            gathered += datagrams
            size = sum(map(len, datagrams))
            count += len(datagrams)
            octets += size
            gathered_octets += size
            # One like it is too much.
            full = gathered_octets + len(datagrams[0]) > GATHERED_OCTETS
            if full and len(gathered) >= GATHERED_DATAGRAMS:
                self._endpoint.datagrams_received(gathered, source, now)
                if self._closed:
                    return
                gathered, gathered_octets = [], 0
        if gathered:
            self._endpoint.datagrams_received(gathered, source, now)
        if refused and not self._closed:
            self._endpoint.refused()
        if not self._closed:
            self._endpoint.batch_ended(now)

    def _writable(self) -> None:
        while self._queue:
            data, address = self._queue[0]
            if not self._send_one(data, address):
                return
            self._queue.popleft()
        self._loop.remove_writer(self._sock)
        self._endpoint.unblocked()

    def _lost(self, exc: OSError) -> None:
        if exc.errno != errno.EMSGSIZE:  # a probe of the datagram size finds its answer so
            log.debug("datagram_lost", error=str(exc))
        if isinstance(exc, REFUSALS):
            # Not at once: the caller is in the middle of sending.
            self._loop.call_soon(self._report_refusal)

    def _report_refusal(self) -> None:
        if not self._closed:
            self._endpoint.refused()


class _PlainProtocol(asyncio.DatagramProtocol):
    """Collects what the loop hands over one by one into one batch per iteration."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._pending: asyncio.Handle | None = None
        self.paused = False
        self.closed = False
        self.gone = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        if self.closed:
            return
        self._endpoint.datagrams_received([data], addr, self._loop.time())
        if self._pending is None:
            self._pending = self._loop.call_soon(self._end_batch)

    def error_received(self, exc: Exception) -> None:
        if isinstance(exc, REFUSALS) and not self.closed:
            self._endpoint.refused()

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if not self.closed:
            self._endpoint.unblocked()

    def _end_batch(self) -> None:
        self._pending = None
        if not self.closed:
            self._endpoint.batch_ended(self._loop.time())


class PlainUdp:
    """The same over asyncio's datagram transport, for loops that cannot watch a socket."""

    def __init__(self, transport: asyncio.DatagramTransport, protocol: _PlainProtocol) -> None:
        self._transport = transport
        self._protocol = protocol
        self._peer: Address | None = transport.get_extra_info("peername")
        self.socket_buffers = socket_buffers(transport.get_extra_info("socket"))

    @property
    def blocked(self) -> bool:
        """Whether datagrams wait for room in the socket."""
        return self._protocol.paused

    def send(self, datagrams: Datagrams) -> None:
        """Send in order; what the network refuses is lost."""
        if not self._protocol.closed:
            for data, address in one_by_one(datagrams):
                self._transport.sendto(data, None if self._peer else address)

    def close(self) -> None:
        """Close the socket; idempotent."""
        if not self._protocol.closed:
            self._protocol.closed = True
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the port is free: the loop closes the socket a little later."""
        await self._protocol.gone.wait()


Udp = UdpSocket | PlainUdp


async def open_udp(sock: socket.socket, endpoint: Endpoint, *, joined: bool = False) -> Udp:
    """Watch `sock` on the running loop; its ownership passes, also where this is cancelled.

    Args:
        sock: bound, and connected or not.
        endpoint: who is told.
        joined: have the kernel join what arrives, which pays for datagrams of ordinary size.
    """
    try:
        return UdpSocket(sock, endpoint, joined=joined)
    except NotImplementedError:
        loop = asyncio.get_running_loop()
        try:
            transport, protocol = await loop.create_datagram_endpoint(
                lambda: _PlainProtocol(endpoint), sock=sock
            )
        except BaseException:
            sock.close()
            raise
        return PlainUdp(transport, protocol)


def peer_of(sock: socket.socket) -> Address | None:
    """The address a socket is connected to, in the form that receiving gives; None if none."""
    try:
        return sock.getpeername()
    except OSError:
        return None


async def resolve(host: str, port: int, limit: int) -> list[tuple[int, Address]]:
    """Look up the UDP addresses of a host: (family, address), at most `limit`, without repeats.

    Addresses are taken as they are, without the loop's threads.

    Raises:
        OSError: the name is unknown.
        UsageError: the port is none.
    """
    if not 0 <= port <= 65_535:
        raise UsageError(f"port must lie between 0 and 65535, not {port}")
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    found: dict[tuple[int, Address], None] = dict.fromkeys(
        (family, address)
        for family, _, _, _, address in infos
        if family in (socket.AF_INET, socket.AF_INET6)
    )
    return list(found)[:limit]

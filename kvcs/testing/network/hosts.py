"""Hosts of a virtual network, and their UDP ports."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvcs.quic.connection import Connection
    from kvcs.testing.network.network import Network

Address = tuple[str, int]
"""IP address literal and UDP port."""

RECEIVE_BUFFER: Final = 4 * 2**20
"""Octets that wait at one port until its process reads them; what comes on top is lost."""

FIRST_PORT: Final = 40_000
"""Where the ports begin that are taken for outgoing connections."""


class Port:
    """One UDP port: where packets leave and come in.

    Args:
        host: whose it is.
        number: its number on the host.
        readable: called when packets wait for `read`, until all are read.
        refused: called when the network says that nobody listens where a packet went.
    """

    def __init__(
        self,
        host: Host,
        number: int,
        readable: Callable[[], object],
        refused: Callable[[], object] = lambda: None,
    ) -> None:
        self.host = host
        self.number = number
        self.public: Address = (host.address, number)
        """Where peers see it: another address after `Host.move`."""
        self.severed = False
        self.closed = False
        self._readable = readable
        self._refused = refused
        self._coming: deque[tuple[Any, int, Address]] = deque()
        self._waiting: deque[tuple[Any, Address]] = deque()
        self._octets = 0
        self._told: asyncio.Handle | None = None
        self.loop = asyncio.get_running_loop()

    def send(self, packet: Any, size: int, to: Address) -> None:
        """Send one packet of ``size`` octets."""
        if not self.closed and not self.severed:
            self.host.network.carry(self, packet, size, to)

    def read(self) -> tuple[Any, Address] | None:
        """The next packet that came in, and where it is from."""
        return self._waiting.popleft() if self._waiting else None

    def close(self) -> None:
        """Give the port back; what waits is dropped. Idempotent."""
        if not self.closed:
            self.closed = True
            self.host.release(self)
            self._coming.clear()
            self._waiting.clear()
            if self._told is not None:
                self._told.cancel()

    # What the network calls

    def receive(self, packet: Any, size: int, source: Address) -> str:
        """Take one packet that arrived; returns what became of it."""
        if self.severed:
            return "severed"
        if self._octets + size > self.host.receive_buffer:
            return "not read in time"
        at = self.host.read_at(size)
        self._octets += size
        self._coming.append((packet, size, source))
        if at <= self.loop.time():
            self._come()
        else:
            self.loop.call_at(at, self._come)
        return "received"

    def refuse(self) -> None:
        """Nobody listens where a packet of ours went."""
        if not self.closed and not self.severed:
            self._refused()

    def _come(self) -> None:
        """The process gets round to reading the next packet."""
        if self.closed or not self._coming:
            return
        packet, size, source = self._coming.popleft()
        self._octets -= size
        self._waiting.append((packet, source))
        if self._told is None:
            self._told = self.loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._told = None
        while self._waiting and not self.closed:
            before = len(self._waiting)
            self._readable()
            if len(self._waiting) >= before:
                break  # whoever reads now does not want to


class Host:
    """A machine of the network; `Network.host` makes it.

    ``with host:`` everything that the code inside opens belongs to the host, and so do the tasks
    that it starts.

    Attributes:
        network: the network.
        name: by which it is found: ``moqt://name:port``.
        address: its IP address.
        receive_buffer: octets that wait at a port of its own before more are lost.
        read_rate: octets a second at which its process reads; None is without a limit.
    """

    def __init__(self, network: Network, name: str, address: str) -> None:
        self.network = network
        self.name = name
        self.address = address
        self.receive_buffer = RECEIVE_BUFFER
        self.read_rate: float | None = None
        self.ports: dict[int, Port] = {}
        """Ports that are open, by number."""
        self.sessions: list[Connection] = []
        """Every session that was ever opened here, whichever side began it, in order."""
        self._busy_until = 0.0
        self._next_port = FIRST_PORT
        self._entered: list[Any] = []

    def __enter__(self) -> Host:
        """Work on this host from here."""
        self._entered.append(self.network.enter(self))
        return self

    def __exit__(self, *exc: object) -> None:
        """Work on it no longer."""
        self._entered.pop()()

    # What a test does to it

    def stall(self, seconds: float) -> None:
        """Its process reads nothing for a while, as one that is busy computing."""
        self._busy_until = max(self._busy_until, asyncio.get_running_loop().time() + seconds)

    def move(self) -> None:
        """Its packets come from another address from now on, as behind a NAT that rebinds.

        Packets on their way to the old address are lost. Only for hosts that connect: nobody can
        follow a server that moves.
        """
        for port in self.ports.values():
            self.network.rebind(port)

    def sever(self) -> None:
        """Cut off every port that is open, for good and without a word.

        Connections over them end by silence; new ones may be made.
        """
        for port in self.ports.values():
            port.severed = True

    # What ports are opened and closed with

    def open(
        self,
        number: int,
        readable: Callable[[], object],
        refused: Callable[[], object] = lambda: None,
    ) -> Port:
        """Open a UDP port; 0 takes a free one.

        Raises:
            OSError: the port is taken.
        """
        if number == 0:
            while self._next_port in self.ports:
                self._next_port += 1
            number = self._next_port
            self._next_port += 1
        if number in self.ports:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        port = self.ports[number] = Port(self, number, readable, refused)
        self.network.bind(port)
        return port

    def release(self, port: Port) -> None:
        """A port was closed."""
        if self.ports.get(port.number) is port:
            del self.ports[port.number]
        self.network.unbind(port)

    def read_at(self, size: int) -> float:
        """When the process reads a packet that arrives now."""
        now = asyncio.get_running_loop().time()
        at = max(now, self._busy_until)
        if self.read_rate is not None:
            self._busy_until = at + size / self.read_rate
        return at

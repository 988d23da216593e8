"""UDP sockets of a virtual host: what `socket.socket` is to the aioquic backend."""

from __future__ import annotations

import errno
import socket
from typing import Any

from kvcs.testing.network.hosts import Address, Host, Port
from kvcs.testing.network.loop import VirtualLoop


class VirtualSocket(socket.socket):
    """A datagram socket in a virtual network; it has no descriptor of the operating system.

    Args:
        host: whose it is.
        family: taken for IPv4, whatever it is.
        kind: taken for datagrams.
    """

    def __init__(self, host: Host, family: int, kind: int) -> None:
        # Not that of socket.socket, which would ask the operating system for one.
        self.virtual_host = host
        self._port: Port | None = None
        self._remote: Address | None = None
        self._errors: list[OSError] = []
        self._buffers = {
            socket.SO_RCVBUF: 2 * host.receive_buffer,
            socket.SO_SNDBUF: 2 * host.receive_buffer,
        }

    def __repr__(self) -> str:
        return f"<VirtualSocket of {self.virtual_host.name}>"

    @property
    def family(self) -> int:  # type: ignore[override]
        """IPv4."""
        return socket.AF_INET

    def setblocking(self, flag: bool) -> None:
        """It never blocks."""

    def setsockopt(self, level: int, option: int, value: Any, length: int | None = None) -> None:
        """Nothing is set: buffers are those of the host.

        Raises:
            OSError: UDP has no options here: no segmentation offload.
        """
        if level == socket.IPPROTO_UDP:
            raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    def getsockopt(self, level: int, option: int, length: int = 0) -> int:  # type: ignore[override]
        """The host's buffers, counted twice as Linux does.

        Raises:
            OSError: as `setsockopt`.
        """
        if level == socket.IPPROTO_UDP:
            raise OSError(errno.ENOPROTOOPT, "Protocol not available")
        return self._buffers.get(option, 0)

    def bind(self, address: Any) -> None:
        """Open a port; the address is always the host's own.

        Raises:
            OSError: it is taken.
        """
        self._open(address[1])

    def connect(self, address: Any) -> None:
        """Talk to one peer."""
        self._open(0)
        self._remote = (address[0], address[1])

    def getsockname(self) -> Address:
        """The host's address and the port."""
        return (self.virtual_host.address, self._open(0).number)

    def getpeername(self) -> Address:
        """The one peer.

        Raises:
            OSError: there is none.
        """
        if self._remote is None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return self._remote

    def send(self, data: Any, flags: int = 0) -> int:
        """Send to the one peer."""
        return self.sendto(data, self.getpeername())

    def sendto(self, data: Any, *arguments: Any) -> int:
        """Send a datagram."""
        octets = bytes(data)
        to = arguments[-1]
        self._open(0).send(octets, len(octets), (to[0], to[1]))
        return len(octets)

    def recvfrom(self, size: int, flags: int = 0) -> tuple[bytes, Any]:
        """The next datagram that came.

        Raises:
            BlockingIOError: there is none.
            ConnectionRefusedError: the network says that nobody listens at the peer's address.
        """
        if self._errors:
            raise self._errors.pop()
        port = self._open(0)
        while (item := port.read()) is not None:
            data, source = item
            if self._remote is None or source == self._remote:
                return data, source
        raise BlockingIOError

    def fileno(self) -> int:
        """None: -1."""
        return -1

    def close(self) -> None:
        """Give the port back."""
        if self._port is not None:
            self._port.close()

    # What the host's port calls

    def _open(self, number: int) -> Port:
        if self._port is None:
            self._port = self.virtual_host.open(number, self._readable, self._refused)
        return self._port

    def _readable(self) -> None:
        if self._port is not None and isinstance(self._port.loop, VirtualLoop):
            self._port.loop.readable(self)

    def _refused(self) -> None:
        if self._remote is not None:
            self._errors.append(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))
            self._readable()

"""A path between a client and a server that a test can bend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.loopback.recorder import HOST

Lost = Callable[[bytes], bool]


def never(data: bytes) -> bool:
    """No datagram is lost."""
    return False


class Shim(asyncio.DatagramProtocol):
    """Carries datagrams between one client and a server; can change its own port, and lose some.

    Args:
        server_port: where the server listens.
        lost: asked for each datagram, in both directions.
    """

    def __init__(self, server_port: int, lost: Lost = never) -> None:
        self._lost = lost
        self._server = (HOST, server_port)
        self._client: Any = None
        self._front: asyncio.DatagramTransport
        self._back: asyncio.DatagramTransport | None = None

    @classmethod
    async def start(cls, server_port: int, lost: Lost = never) -> Shim:
        """Open both sockets."""
        shim = cls(server_port, lost)
        loop = asyncio.get_running_loop()
        shim._front, _ = await loop.create_datagram_endpoint(lambda: shim, local_addr=(HOST, 0))
        await shim.move()
        return shim

    @property
    def port(self) -> int:
        """Where the client connects."""
        return int(self._front.get_extra_info("sockname")[1])

    async def move(self) -> None:
        """Reach the server from another port from now on."""
        loop = asyncio.get_running_loop()
        fresh, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=(HOST, 0))
        if self._back is not None:
            self._back.close()
        self._back = fresh

    def close(self) -> None:
        """Close both sockets."""
        self._front.close()
        if self._back is not None:
            self._back.close()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Pass one on."""
        if self._lost(data):
            return
        if addr == self._server:
            self._front.sendto(data, self._client)
        elif self._back is not None:
            self._client = addr
            self._back.sendto(data, self._server)

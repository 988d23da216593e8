"""A model of QUIC: what sessions see of it, on packets of a virtual network, without TLS."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from kvcs.errors import ConnectionFailed, UsageError
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.aioquic_backend.ending import no_answer, nobody_listens
from kvcs.quic.backend import Listener, Path
from kvcs.quic.transport import ReceiverFactory, Transport
from kvcs.testing.network.frames import Close, Hello, Packet
from kvcs.testing.network.hosts import Address, Host
from kvcs.testing.network.transport import ModelTransport

if TYPE_CHECKING:
    from kvcs.testing.network.network import Network


class ModelBackend:
    """Opens and accepts connections of the model on one host.

    Certificates, authorities and ``verify`` are not looked at.
    """

    def __init__(self, network: Network, host: Host) -> None:
        self._network = network
        self._host = host

    async def connect(
        self,
        host: str,
        port: int,
        *,
        receiver_factory: ReceiverFactory,
        ca: Path | bytes | None,
        verify: bool,
        cert: Path | None = None,
        key: Path | None = None,
        settings: QuicSettings,
    ) -> Transport:
        """Shake hands with a listener of the network.

        Raises:
            ConnectionFailed: there is no such host, nobody listens, or no answer came in time.
        """
        target = f"{host}:{port}"
        address = self._network.lookup(host)
        if address is None:
            raise ConnectionFailed(f"cannot look up {host}: no such host; check the name")
        attempt = _Attempt(self._host, (address, port), target, receiver_factory, settings)
        return await attempt.connect()

    async def listen(
        self,
        host: str,
        port: int,
        *,
        receiver_factory: ReceiverFactory,
        cert: Path,
        key: Path,
        client_ca: Path | bytes | None = None,
        settings: QuicSettings,
    ) -> Listener:
        """Listen on this host, whatever address is named.

        Raises:
            ConnectionFailed: the port is taken.
            UsageError: clients are to show certificates; this network has none.
        """
        if client_ca is not None:
            raise UsageError("a virtual network has no client certificates: leave client_ca out")
        try:
            return ModelListener(self._host, port, receiver_factory, settings)
        except OSError as exc:
            raise ConnectionFailed(
                f"cannot listen on {self._host.name}:{port}: {exc.strerror}; choose a free port"
            ) from exc


_connection_ids = itertools.count()
"""Unique in the process; no trace shows them."""


class _Attempt:
    """A client's one connection."""

    def __init__(
        self,
        host: Host,
        address: Address,
        target: str,
        receiver_factory: ReceiverFactory,
        settings: QuicSettings,
    ) -> None:
        self._target = target
        self._settings = settings
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._port = host.open(0, self._readable, self._refused)
        self._transport = ModelTransport(
            next(_connection_ids),
            port=self._port,
            address=address,
            is_client=True,
            settings=settings,
            receiver_factory=receiver_factory,
            peer=target,
            on_open=self._opened,
            on_over=self._over,
        )

    async def connect(self) -> ModelTransport:
        """Shake hands in the time that the settings give."""
        transport, seconds = self._transport, self._settings.connect_timeout
        try:
            async with asyncio.timeout(seconds):
                transport.start()
                await self._done
        except TimeoutError as exc:
            transport.close(0, "no answer in time")
            raise no_answer(self._target, seconds) from exc
        except BaseException:
            transport.close(0, "given up")
            raise
        return transport

    def _readable(self) -> None:
        while (item := self._port.read()) is not None:
            self._transport.receive(*item)
        self._transport.batch_ended()

    def _refused(self) -> None:
        if not self._done.done():
            self._done.set_exception(nobody_listens(self._target))

    def _opened(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def _over(self, reason: str) -> None:
        if not self._done.done():
            self._done.set_exception(
                ConnectionFailed(f"cannot connect to {self._target}: {reason}")
            )
            self._done.exception()  # where nobody waits any more
        self._port.close()


class ModelListener:
    """A server's port and its connections."""

    def __init__(
        self, host: Host, port: int, receiver_factory: ReceiverFactory, settings: QuicSettings
    ) -> None:
        self._receiver_factory = receiver_factory
        self._settings = settings
        self._connections: dict[int, ModelTransport] = {}
        self._handshakes: dict[int, None] = {}
        self._closing = False
        self._empty = asyncio.Event()
        self._port = host.open(port, self._readable)
        self.host = host.name
        """Name of its host."""
        self.port = self._port.number
        """UDP port."""

    @property
    def clients_refused(self) -> int:
        """None ever: there are no certificates here."""
        return 0

    @property
    def resets_sent(self) -> int:
        """None ever: connections are not told apart by IDs here."""
        return 0

    @property
    def resets_left_out(self) -> int:
        """None ever."""
        return 0

    async def close(self, code: int = 0, reason: str = "the server shuts down") -> None:
        """Refuse new connections, close all, and give the port back; idempotent."""
        self._closing = True
        for transport in list(self._connections.values()):
            transport.close(code, reason)
        try:
            while self._connections:
                self._empty.clear()
                await self._empty.wait()
        finally:
            self._port.close()

    def _readable(self) -> None:
        touched: dict[ModelTransport, None] = {}
        while (item := self._port.read()) is not None:
            packet, source = item
            transport = self._route(packet, source)
            if transport is not None:
                transport.receive(packet, source)
                touched[transport] = None
        for transport in touched:
            transport.batch_ended()

    def _route(self, packet: Packet, source: Address) -> ModelTransport | None:
        transport = self._connections.get(packet.connection_id)
        if transport is not None or not packet.from_client:
            return transport
        if not any(isinstance(frame, Hello) and frame.step == 0 for frame in packet.frames):
            return None
        settings = self._settings
        if (
            self._closing
            or len(self._connections) >= settings.max_connections
            or len(self._handshakes) >= settings.max_handshakes
        ):
            reason = "shutting down" if self._closing else "too many connections"
            refusal = Packet(packet.connection_id, False, 0, (), close=Close(None, reason))
            self._port.send(refusal, refusal.size, source)
            return None
        transport = ModelTransport(
            packet.connection_id,
            port=self._port,
            address=source,
            is_client=False,
            settings=settings,
            receiver_factory=self._receiver_factory,
            peer=f"{source[0]}:{source[1]}",
            on_open=lambda: self._handshakes.pop(packet.connection_id, None),
            on_over=lambda _: self._forget(packet.connection_id),
        )
        self._connections[packet.connection_id] = transport
        self._handshakes[packet.connection_id] = None
        transport.give_up_after(settings.connect_timeout)
        return transport

    def _forget(self, connection_id: int) -> None:
        self._handshakes.pop(connection_id, None)
        self._connections.pop(connection_id, None)
        if not self._connections:
            self._empty.set()

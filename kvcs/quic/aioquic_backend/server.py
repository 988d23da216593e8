"""Listening: many connections on one socket, told apart by connection ID."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Final, cast

# The library gives it here and does not say so, as strict typing asks.
from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicHeader,
    QuicPacketType,
    encode_quic_version_negotiation,
    pull_quic_header,
)

from kvcs.errors import ConnectionFailed
from kvcs.observe import get_logger
from kvcs.quic.aioquic_backend.certificates import Path, ServerKey, server_configuration
from kvcs.quic.aioquic_backend.clients import ClientVerifier
from kvcs.quic.aioquic_backend.ending import Ending
from kvcs.quic.aioquic_backend.handshakes import Handshakes
from kvcs.quic.aioquic_backend.paths import datagram_sizes, largest_to_take, small_datagrams
from kvcs.quic.aioquic_backend.ports import Address, Driven
from kvcs.quic.aioquic_backend.private.connection import Connection
from kvcs.quic.aioquic_backend.resets import StatelessResets, reset_secret
from kvcs.quic.aioquic_backend.retry import AddressValidation, refusal
from kvcs.quic.aioquic_backend.settings import SMALLEST_DATAGRAM, QuicSettings
from kvcs.quic.aioquic_backend.transport import AioquicTransport
from kvcs.quic.aioquic_backend.udp import Udp, bound_socket, open_udp, resolve, set_buffers
from kvcs.quic.transport import ReceiverFactory

log = get_logger("kvcs.quic")

LONG_HEADER: Final = 0x80
"""Bit of the first octet of a packet that still shakes hands (RFC 9000 §17.2)."""

CLOSE_MARGIN: Final = 1.0
"""Seconds that a listener waits beyond `close_timeout` before it drops what is still open."""


async def listen_quic(
    host: str,
    port: int,
    *,
    receiver_factory: ReceiverFactory,
    cert: Path,
    key: Path,
    client_ca: Path | bytes | None = None,
    settings: QuicSettings | None = None,
) -> AioquicListener:
    """Listen for QUIC connections.

    Args:
        host: local name or address to bind, IPv6 without brackets; "::" takes IPv4, too. Of a
            name with several addresses, the first.
        port: UDP port; 0 takes a free one.
        receiver_factory: makes the receiver of each connection once its handshake is complete.
        cert: PEM file with the certificate chain, the server's own first.
        key: PEM file with the private key.
        client_ca: authorities, a PEM file or its octets: clients need a certificate of one of
            them. None asks for none.
        settings: named numbers; the defaults where None.

    Raises:
        ConnectionFailed: the address cannot be bound.
        FileError: certificate, key or `client_ca` cannot be used.
        UsageError: the port cannot be.
    """
    settings = settings or QuicSettings()
    configuration = server_configuration(settings, cert=cert, key=key)
    clients = None if client_ca is None else ClientVerifier(client_ca)
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        addresses = await resolve(host, port, 1)
        if not addresses:
            raise ConnectionFailed(f"cannot listen on {target}: the name has no IP address")
        family, address = addresses[0]
        sock = bound_socket(family, address, None)
    except (OSError, UnicodeError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise ConnectionFailed(
            f"cannot listen on {target}: {reason}; choose an address of this machine and a free "
            "port"
        ) from exc
    set_buffers(sock, settings.socket_buffer)
    listener = AioquicListener(
        sock.getsockname(),
        configuration,
        settings=settings,
        receiver_factory=receiver_factory,
        clients=clients,
    )
    joined = small_datagrams(address, settings.datagram_size)
    listener.attach(await open_udp(sock, listener, joined=joined))
    return listener


@dataclass(slots=True)
class _Entry:
    """One connection of a listener."""

    transport: AioquicTransport
    connection_ids: set[bytes] = field(default_factory=set)


class AioquicListener:
    """A server's socket and its connections.

    Attributes:
        host: address it is bound to.
        port: UDP port it is bound to.
    """

    def __init__(
        self,
        address: Address,
        configuration: QuicConfiguration,
        *,
        settings: QuicSettings,
        receiver_factory: ReceiverFactory,
        clients: ClientVerifier | None = None,
    ) -> None:
        """Make a listener for `address`; `listen_quic` does it."""
        self.host: Final = str(address[0])
        self.port: Final = int(address[1])
        self._configuration = configuration
        self._settings = settings
        self._receiver_factory = receiver_factory
        self.clients: Final = clients
        """Decides about clients' certificates; None where none are asked for."""
        self._udp: Udp | None = None
        self._routes: dict[bytes, _Entry] = {}
        self._entries: dict[Driven, _Entry] = {}
        self._handshakes = Handshakes()
        self._touched: dict[Driven, None] = {}
        self._unknown: list[tuple[bytes, Address]] = []
        self._resets = StatelessResets(
            reset_secret(cast(ServerKey, configuration.private_key), address),
            settings.stateless_resets,
        )
        self._refused = self._retries = 0
        self._validation = AddressValidation()
        self._closing = False
        self._empty = asyncio.Event()
        self._log = log.bind(host=self.host, port=self.port)

    def attach(self, udp: Udp) -> None:
        """Take the watched socket; its ownership passes."""
        self._udp = udp

    @property
    def connections(self) -> int:
        """Connections that are not over, those in their handshake included."""
        return len(self._entries)

    @property
    def clients_refused(self) -> int:
        """Clients whose certificate did not count, or that had none."""
        return 0 if self.clients is None else self.clients.refusals

    @property
    def resets_sent(self) -> int:
        """Packets of connections that are not known here, and were answered so."""
        return self._resets.sent

    @property
    def resets_left_out(self) -> int:
        """Such packets that got no answer, since there were too many."""
        return self._resets.left_out

    async def close(self, code: int = 0, reason: str = "the server shuts down") -> None:
        """Refuse new connections, close all, and give the port back; idempotent.

        Ends within `close_timeout` and a second whatever the peers do; where it is cancelled, the
        socket is closed at once.
        """
        self._closing = True
        for entry in tuple(self._entries.values()):
            entry.transport.close(code, reason)
        try:
            if self._entries:
                async with asyncio.timeout(self._settings.close_timeout + CLOSE_MARGIN):
                    await self._empty.wait()
        except TimeoutError:
            self._log.error("connections_left", connections=len(self._entries))
        finally:
            if self._udp is not None:
                self._udp.close()
                await self._udp.wait_closed()

    # Endpoint

    def datagrams_received(self, datagrams: list[bytes], address: Address, now: float) -> None:
        """Hand datagrams to their connections, or make one for a first flight."""
        if self._udp is None:
            return  # not attached yet; a client repeats its first flight
        if address[1] == 0:
            # Nobody can be answered there, and the kernel's refusal would look like one of
            # segmentation, which would end for everybody.
            return
        while datagrams:
            taken, data = 1, datagrams[0]
            entry = self._route(data, address)
            if entry is not None:
                taken = entry.transport.datagrams_received(datagrams, address, now)
                if data[0] & LONG_HEADER and entry.transport.heard_nothing:
                    # Not a readable first flight: whoever sent it gets no state for it.
                    entry.transport.abandon()
                    self._forget(entry.transport)
                else:
                    self._touched[entry.transport] = None
            datagrams = datagrams[taken:]

    def batch_ended(self, now: float) -> None:
        """Let each connection that received deliver and transmit, once."""
        touched, self._touched = self._touched, {}
        for transport in touched:
            transport.batch_ended(now)
        unknown, self._unknown = self._unknown, []
        for data, address in unknown:
            self._reset(data, address, now)

    def unblocked(self) -> None:
        """The socket takes datagrams again."""
        for transport in tuple(self._entries):
            transport.wire_unblocked()

    def refused(self) -> None:
        """A client is gone; the socket is not connected, so this cannot be told to be whose."""

    # Owner

    def connection_id_issued(self, connection: Driven, connection_id: bytes) -> None:
        """Route one more connection ID."""
        entry = self._entries.get(connection)
        if entry is not None:
            entry.connection_ids.add(connection_id)
            self._routes[connection_id] = entry

    def connection_id_retired(self, connection: Driven, connection_id: bytes) -> None:
        """Route it no longer."""
        entry = self._entries.get(connection)
        if entry is not None and connection_id in entry.connection_ids:
            entry.connection_ids.remove(connection_id)
            del self._routes[connection_id]

    def handshake_completed(self, connection: Driven) -> None:
        """The connection is no longer one of those that may come from anywhere."""
        self._handshakes.discard(connection)

    def finished(self, connection: Driven, ending: Ending) -> None:
        """The connection is over."""
        self._forget(connection)

    # Private

    def _forget(self, connection: Driven) -> None:
        self._handshakes.discard(connection)
        self._touched.pop(connection, None)
        entry = self._entries.pop(connection, None)
        if entry is not None:
            for connection_id in entry.connection_ids:
                del self._routes[connection_id]
        if not self._entries:
            self._empty.set()

    def _route(self, data: bytes, address: Address) -> _Entry | None:
        length = self._configuration.connection_id_length
        if not data or not data[0] & LONG_HEADER:
            entry = self._routes.get(data[1 : 1 + length])
            if entry is None:
                # A connection may have told its peer of an ID that is routed when the batch ends.
                self._unknown.append((data, address))
            return entry
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=length)
        except ValueError:
            return None
        if header.version not in self._configuration.supported_versions:
            # Less than a first flight is no try to connect: an answer may be larger (§5.2.2).
            large = len(data) >= SMALLEST_DATAGRAM
            if large and header.packet_type is not QuicPacketType.VERSION_NEGOTIATION:
                self._send(
                    encode_quic_version_negotiation(
                        source_cid=header.destination_cid,
                        destination_cid=header.source_cid,
                        supported_versions=self._configuration.supported_versions,
                    ),
                    address,
                )
            return None
        entry = self._routes.get(header.destination_cid)
        if entry is not None:
            return entry
        if header.packet_type is not QuicPacketType.INITIAL or len(data) < SMALLEST_DATAGRAM:
            return None
        original = self._admit(header, address)
        return None if original is None else self._accept(header, address, original)

    def _reset(self, data: bytes, address: Address, now: float) -> None:
        """Tell whoever sent a packet that its connection is not known here."""
        connection_id = data[1 : 1 + self._configuration.connection_id_length]
        if connection_id in self._routes:
            return  # it is alive: a token would end it
        answer = self._resets.answer(data, connection_id, now)
        if answer is not None:
            self._send(answer, address)

    def _admit(self, header: QuicHeader, address: Address) -> bytes | None:
        """The connection ID that a new client chose at first; None where it gets no state now."""
        settings = self._settings
        full = len(self._handshakes) >= settings.max_handshakes
        if self._closing:
            self._refuse(header, address, "shutting down")
        elif len(self._entries) >= settings.max_connections:
            self._refuse(header, address, "too many connections")
        elif full and self._handshakes.displaced(address) is None:
            self._refuse(header, address, "too many handshakes")
        elif header.token:
            # We give tokens in a Retry alone, and who had one takes no other.
            now = asyncio.get_running_loop().time()
            original = self._validation.original_connection_id(header, address, now)
            if original is None:
                self._send(refusal(header, QuicErrorCode.INVALID_TOKEN, "not my token"), address)
            elif full:
                self._displace(address)
            return original
        elif full or len(self._handshakes) >= settings.retry_handshakes:
            now = asyncio.get_running_loop().time()
            self._retries += 1
            if self._retries & (self._retries - 1) == 0:
                self._log.info("addresses_validated", count=self._retries)
            self._send(self._validation.retry(header, address, now), address)
        else:
            return header.destination_cid
        return None

    def _displace(self, address: Address) -> None:
        """Give a handshake up for one from ``address``, which has proved that it is there."""
        connection = self._handshakes.displaced(address)
        entry = None if connection is None else self._entries.get(connection)
        if entry is not None:
            entry.transport.abandon()
            self._forget(entry.transport)

    def _accept(self, header: QuicHeader, address: Address, original: bytes) -> _Entry:
        """Make a connection for a client's first flight."""
        assert self._udp is not None
        settings = self._settings
        host, port = str(address[0]), address[1]
        quic = Connection(
            configuration=self._configuration,
            settings=settings,
            original_destination_connection_id=original,
            retry_source_connection_id=header.destination_cid if header.token else None,
            clients=self.clients,
            reset_token=self._resets.token,
            takes=largest_to_take(self._udp.socket_buffers[0]),
        )
        transport = AioquicTransport(
            quic,
            wire=self._udp,
            clock=asyncio.get_running_loop(),
            owner=self,
            receiver_factory=self._receiver_factory,
            settings=settings,
            peer=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            datagram_sizes=partial(datagram_sizes, pinned=settings.datagram_size),
        )
        entry = self._entries[transport] = _Entry(transport)
        self._handshakes.add(transport, address)
        self._empty.clear()
        for connection_id in (header.destination_cid, quic.host_cid):
            self.connection_id_issued(transport, connection_id)
        transport.give_up_after(settings.connect_timeout)
        return entry

    def _refuse(self, header: QuicHeader, address: Address, reason: str) -> None:
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:  # a flood must not fill the log
            self._log.warning("connections_refused", count=self._refused)
        self._send(refusal(header, QuicErrorCode.CONNECTION_REFUSED, reason), address)

    def _send(self, datagram: bytes, address: Address) -> None:
        if self._udp is not None:
            self._udp.send([(datagram, address)])

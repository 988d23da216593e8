"""Connecting to a server: one socket, one connection, bounded by one time-out."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Final

from aioquic.quic.configuration import QuicConfiguration

from kvcs.errors import ConnectionFailed, UsageError
from kvcs.observe import get_logger
from kvcs.quic.aioquic_backend.certificates import Path, client_configuration
from kvcs.quic.aioquic_backend.ending import Ending, explain, no_answer, nobody_listens
from kvcs.quic.aioquic_backend.paths import (
    datagram_sizes,
    is_loopback,
    largest_to_take,
    small_datagrams,
)
from kvcs.quic.aioquic_backend.ports import Address, Driven
from kvcs.quic.aioquic_backend.private.connection import Connection
from kvcs.quic.aioquic_backend.settings import QuicSettings
from kvcs.quic.aioquic_backend.transport import AioquicTransport
from kvcs.quic.aioquic_backend.udp import (
    Udp,
    bound_socket,
    open_udp,
    peer_of,
    resolve,
    set_buffers,
)
from kvcs.quic.transport import ReceiverFactory

log = get_logger("kvcs.quic")

MAX_ADDRESSES: Final = 4
"""Addresses of one name that are tried, one after the other."""


async def connect_quic(
    host: str,
    port: int,
    *,
    receiver_factory: ReceiverFactory,
    server_name: str | None = None,
    ca: Path | bytes | None = None,
    verify: bool = True,
    cert: Path | None = None,
    key: Path | None = None,
    local_host: str | None = None,
    settings: QuicSettings | None = None,
) -> AioquicTransport:
    """Connect to a QUIC server and complete the handshake.

    A name is looked up, and its addresses are tried in turn. The socket is bound to one local
    address: the loopback address for a loopback peer, else the one the route has.

    Cancelling closes what was begun; nothing is left behind.

    Args:
        host: name or address literal, IPv6 without brackets.
        port: UDP port.
        receiver_factory: makes the receiver once the handshake is complete, before this returns.
        server_name: name or address that the certificate must carry; `host` where None.
        ca: trusted authorities, a PEM file or PEM octets; certifi's store where None.
        verify: False accepts any certificate, and logs a warning.
        cert: PEM file with the certificate chain to show to a server that asks for one.
        key: PEM file with the key to it.
        local_host: local address to bind.
        settings: named numbers; the defaults where None.

    Returns:
        The connected transport. Closing it closes its socket.

    Raises:
        CertificateError: the peer's certificate does not verify.
        ConnectionFailed: no connection came to be within `connect_timeout`.
        FileError: `ca`, `cert` or `key` cannot be used.
        UsageError: port or `local_host` cannot be, or `cert` comes without `key`.
    """
    settings = settings or QuicSettings()
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    configuration = client_configuration(
        settings, server_name=server_name or host, ca=ca, verify=verify, cert=cert, key=key
    )
    if not verify:
        log.warning("certificate_not_verified", peer=target)
    loop = asyncio.get_running_loop()
    until = loop.time() + settings.connect_timeout
    try:
        async with asyncio.timeout_at(until):
            addresses = await resolve(host, port, MAX_ADDRESSES)
    except TimeoutError as exc:
        raise ConnectionFailed(
            f"cannot look up {host} within {settings.connect_timeout:g} s; check the name server"
        ) from exc
    except (OSError, UnicodeError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise ConnectionFailed(f"cannot look up {host}: {why}; check the name") from exc
    error = ConnectionFailed(f"{host} has no IP address; check the name")
    for index, (family, address) in enumerate(addresses):
        # Each address gets an equal part of what is left, so that a silent one cannot use it up.
        seconds = (until - loop.time()) / (len(addresses) - index)
        attempt = _Attempt(target, settings, receiver_factory)
        try:
            local = await _local_address(family, address, local_host)
            return await attempt.connect(configuration, family, address, local, seconds)
        except ConnectionFailed as exc:
            if type(exc) is not ConnectionFailed:
                raise  # another address would show the same certificate
            error = exc
    raise error


async def _local_address(family: int, remote: Address, local_host: str | None) -> Address | None:
    """Where to bind: as told; the loopback address for a loopback peer; else as the route says."""
    if local_host is not None:
        try:
            found = await resolve(local_host, 0, MAX_ADDRESSES)
        except OSError as exc:
            raise UsageError(f"cannot look up local_host {local_host}: {exc}") from exc
        for candidate, address in found:
            if candidate == family:
                return address
        raise ConnectionFailed(
            f"local_host {local_host} is of another address family than {remote[0]}"
        )
    if is_loopback(remote):
        return ("127.0.0.1", 0) if family == socket.AF_INET else ("::1", 0)
    return None


class _Attempt:
    """One handshake with one address; owns the socket until the connection is over."""

    def __init__(
        self, target: str, settings: QuicSettings, receiver_factory: ReceiverFactory
    ) -> None:
        self._target = target
        self._settings = settings
        self._receiver_factory = receiver_factory
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._udp: Udp | None = None
        self._transport: AioquicTransport | None = None

    async def connect(
        self,
        configuration: QuicConfiguration,
        family: int,
        address: Address,
        local: Address | None,
        seconds: float,
    ) -> AioquicTransport:
        """Shake hands within `seconds`."""
        try:
            sock = bound_socket(family, local, address)
        except OSError as exc:
            raise ConnectionFailed(
                f"cannot connect to {self._target} ({address[0]}): {exc.strerror or exc}; check "
                "the address and the network"
            ) from exc
        set_buffers(sock, self._settings.socket_buffer)
        remote = peer_of(sock)
        joined = small_datagrams(address, self._settings.datagram_size)
        self._udp = await open_udp(sock, self, joined=joined)
        settings = self._settings
        self._transport = transport = AioquicTransport(
            Connection(
                configuration=configuration,
                settings=settings,
                takes=largest_to_take(self._udp.socket_buffers[0]),
            ),
            wire=self._udp,
            clock=asyncio.get_running_loop(),
            owner=self,
            receiver_factory=self._receiver_factory,
            settings=settings,
            peer=self._target,
            datagram_sizes=partial(datagram_sizes, pinned=settings.datagram_size),
        )
        try:
            async with asyncio.timeout(seconds):
                transport.connect(remote)
                await self._done
        except TimeoutError as exc:
            transport.end(0, "no answer in time")
            raise no_answer(self._target, settings.connect_timeout) from exc
        except BaseException:
            transport.end(0, "given up")
            raise
        return transport

    # Endpoint

    def datagrams_received(self, datagrams: list[bytes], address: Address, now: float) -> None:
        """Datagrams arrived."""
        transport = self._transport
        while transport is not None and datagrams:
            datagrams = datagrams[transport.datagrams_received(datagrams, address, now) :]

    def batch_ended(self, now: float) -> None:
        """All datagrams of a wake-up were handed over."""
        if self._transport is not None:
            self._transport.batch_ended(now)

    def unblocked(self) -> None:
        """The socket takes datagrams again."""
        if self._transport is not None:
            self._transport.wire_unblocked()

    def refused(self) -> None:
        """Nobody listens. Later on a peer may come back, or the word may be false: not then."""
        if not self._done.done():
            self._done.set_exception(nobody_listens(self._target))

    # Owner

    def connection_id_issued(self, connection: Driven, connection_id: bytes) -> None:
        """A client's socket has one connection: nothing to route."""

    def connection_id_retired(self, connection: Driven, connection_id: bytes) -> None:
        """As above."""

    def handshake_completed(self, connection: Driven) -> None:
        """The connection can be used."""
        if not self._done.done():
            self._done.set_result(None)

    def finished(self, connection: Driven, ending: Ending) -> None:
        """The connection is over, or never came to be."""
        if not self._done.done():
            self._done.set_exception(explain(ending, self._target, self._settings.alpn))
        if self._udp is not None:
            self._udp.close()

"""Opening sessions: `connect` to a relay or publisher, `listen` and `serve` for others to come."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from kvcs.access.guard import Guard, check_audience, remembering
from kvcs.contexts import entered_by
from kvcs.errors import ConnectionClosed, ConnectionFailed, UsageError
from kvcs.moqt.errors import SessionCode
from kvcs.moqt.events import Event
from kvcs.moqt.settings import ALPN, Role, SessionSettings
from kvcs.moqt.uri import MoqtUri, parse_uri
from kvcs.observe import get_logger
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.aioquic_backend.ending import OUR_CERTIFICATE_REFUSED, certificate_refused
from kvcs.quic.backend import Listener, current_backend
from kvcs.quic.connection import Connection
from kvcs.quic.link import Link
from kvcs.quic.origin import Origin
from kvcs.quic.reconnect import DEFAULT_RECONNECT, INITIAL_SECONDS, Reconnect
from kvcs.quic.tenure import RelayTrust, check_relay_trust
from kvcs.quic.tokens import TokenKeeper, TokenSource
from kvcs.quic.transport import Transport, TransportReceiver

_log = get_logger("kvcs.quic")

Path = str | os.PathLike[str]
Observer = Callable[[Connection, Event], None]

RELAY_PORT = 4433
"""Port on which our relay listens by default."""

DRAIN_SECONDS = 5.0
"""Longest wait for acknowledgements when a session is closed in good order."""


def implementation() -> str:
    """MOQT_IMPLEMENTATION: name and version only (§9.1)."""
    try:
        return f"kvcs {version('kvcs')}"
    except PackageNotFoundError:  # run from a tree that is not installed
        return "kvcs"


async def open_connection(
    url: str | MoqtUri,
    *,
    ca: Path | bytes | None = None,
    token: TokenSource | None = None,
    verify: bool = True,
    client_cert: Path | None = None,
    client_key: Path | None = None,
    session: SessionSettings | None = None,
    quic: QuicSettings | None = None,
    observer: Observer | None = None,
    link: Link | None = None,
    origin: Origin | None = None,
    relays: RelayTrust = "trusted",
) -> Connection:
    """Open a session and wait for the peer's SETUP; the caller closes it. See `connect`."""
    uri = parse_uri(url) if isinstance(url, str) else url
    settings = replace(
        session or SessionSettings(),
        path=uri.path,
        authority=uri.authority,
        implementation=implementation(),
    )
    quic = replace(quic or QuicSettings(), alpn=(ALPN,))
    keeper = None
    if token is not None:
        keeper = TokenKeeper(token)
        settings = replace(settings, tokens=(await keeper.start(quic.connect_timeout),))
    made: list[Connection] = []

    def receiver(transport: Transport) -> TransportReceiver:
        made.append(
            Connection(
                transport,
                Role.CLIENT,
                settings,
                peer=str(uri),
                observer=observer,
                origin=origin,
                link=link,
            )
        )
        return made[-1]

    try:
        await current_backend.get().connect(
            uri.host,
            uri.port,
            receiver_factory=receiver,
            ca=ca,
            verify=verify,
            cert=client_cert,
            key=client_key,
            settings=quic,
        )
    except BaseException:
        if keeper is not None:
            keeper.stop()
        raise
    connection = made[-1]
    connection.relays = relays
    if keeper is not None:
        keeper.attach(connection)
        connection.on_closed(keeper.stop)
    connection.origin.attach(connection)
    try:
        async with asyncio.timeout(quic.connect_timeout):
            await connection.established()
    except TimeoutError as exc:
        await connection.close_alone(SessionCode.CONTROL_MESSAGE_TIMEOUT, "no SETUP in time")
        raise ConnectionFailed(
            f"{uri} sent no SETUP within {quic.connect_timeout:g} s; check that it speaks {ALPN}"
        ) from exc
    except ConnectionClosed as exc:
        await connection.close_alone()
        # A client's handshake is complete before the server has looked at its certificate.
        if exc.code is None and exc.reason.startswith(OUR_CERTIFICATE_REFUSED):
            raise certificate_refused(str(uri), exc.reason) from exc
        raise
    except BaseException:
        await connection.close_alone()
        raise
    return connection


@entered_by("async with kvcs.connect(...) as session:")
async def connect(
    url: str | MoqtUri,
    *,
    ca: Path | bytes | None = None,
    token: TokenSource | None = None,
    verify: bool = True,
    client_cert: Path | None = None,
    client_key: Path | None = None,
    session: SessionSettings | None = None,
    quic: QuicSettings | None = None,
    datagram_size: int | None = None,
    reconnect: Reconnect | None = DEFAULT_RECONNECT,
    relays: RelayTrust = "trusted",
) -> AsyncIterator[Connection]:
    """Open a session with a relay or publisher; leaving the context closes it.

    A session that is lost, or that the peer sends away, is followed by another one, and what
    Publisher and Subscriber do goes on there; `Connection.link` tells of it.

    Args:
        url: ``moqt://host:port/path``; port 443 where none is named.
        ca: trusted authorities, a PEM file or its octets; certifi's where None.
        token: authorization: octets, or base64url text; or a function, which may be a coroutine
            function, that gives a fresh one whenever it is called. It goes with SETUP, for the
            whole session. A function is called again before the token expires, and the new one goes
            into every later request, and into a REQUEST_UPDATE of each that is under way.
        verify: False accepts any certificate: for tests on one machine only.
        client_cert: PEM file with the certificate chain to show where the peer asks for one.
        client_key: PEM file with the key to it.
        session: limits and options of the session.
        quic: settings of the transport.
        datagram_size: octets of UDP payload to send, in place of what the path is found to carry.
        reconnect: how it comes back; None opens one session and no other.
        relays: whether the relays that are reached may read caches, and are believed. With
            "untrusted", nothing is published that is not protected (``publish(protect=...)``), and
            nothing else is read (``Subscriber(protection=...)``).

    Yields:
        The `Connection`, once the peer's SETUP is there.

    Raises:
        UsageError: the URL, the token or a setting cannot be used.
        CertificateError: the peer's certificate does not verify, or the peer refuses ours.
        ConnectionFailed: nobody answered in time.
        ConnectionClosed: the peer closed before its SETUP.
        FileError: a file of certificates or of a key cannot be used.
    """
    check_relay_trust(relays)
    _log.info("relays", trust=relays, peer=str(url))
    open_session = partial(
        open_connection,
        ca=ca,
        token=token,
        verify=verify,
        client_cert=client_cert,
        client_key=client_key,
        session=session,
        quic=_pinned(quic, datagram_size),
        relays=relays,
    )
    if reconnect is None:
        connection = await open_session(url)
        try:
            yield connection
            await _drain(connection)
        finally:
            await connection.close()
        return
    if not isinstance(reconnect, Reconnect):
        raise UsageError(
            "reconnect takes kvcs.Reconnect(...), or None for one session and no other, not"
            f" {reconnect!r:.100}"
        )
    initial = reconnect.initial
    if initial is None:
        initial = min(INITIAL_SECONDS, (quic or QuicSettings()).connect_timeout)
    link = Link(open_session, parse_uri(url) if isinstance(url, str) else url, reconnect)
    try:
        yield await link.start(initial)
        await _drain(link.current)
    finally:
        await link.close()


def _pinned(quic: QuicSettings | None, datagram_size: int | None) -> QuicSettings | None:
    """Settings with a datagram size put in, where one is given."""
    if datagram_size is None:
        return quic
    return replace(quic or QuicSettings(), datagram_size=datagram_size)


async def _drain(connection: Connection) -> None:
    """Let the peer acknowledge what was sent, for a bounded time."""
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            await connection.drain()
    except TimeoutError:
        _log.warning("closed_with_octets_unacknowledged", peer=connection.peer)


class Server:
    """A listening endpoint; what `serve` gives. Publisher works on it as on a session.

    Args:
        session: settings of every session.
        observer: told every event of every session; a relay's way to see them all.
        offer: whether what `origin` publishes is offered on every session.
        relays: whether the relays that come may read what is published; see `connect`.
        guard: decides about every request by tokens; whoever comes is served where None.
    """

    def __init__(
        self,
        session: SessionSettings | None = None,
        *,
        observer: Observer | None = None,
        offer: bool = True,
        relays: RelayTrust = "trusted",
        guard: Guard | None = None,
    ) -> None:
        self.origin = Origin()
        """What is published here."""
        self.guard = guard
        """Decides about every request by tokens; whoever comes is served where None."""
        self.relays: RelayTrust = relays
        """Whether the relays that come may read what is published."""
        settings = session or SessionSettings()
        if guard is not None:
            settings = remembering(settings)
        self._settings = replace(settings, implementation=implementation())
        self._observer = observer
        self._offer = offer
        self._keeper: TokenKeeper | None = None
        self._listener: Listener | None = None
        self._connections: dict[Connection, None] = {}
        self._going_away = False

    async def start(
        self,
        host: str,
        port: int,
        *,
        cert: Path,
        key: Path,
        client_ca: Path | bytes | None = None,
        quic: QuicSettings | None = None,
        token: TokenSource | None = None,
    ) -> None:
        """Listen on an address; see `serve`, and `listen_quic` for what it raises."""
        quic = replace(quic or QuicSettings(), alpn=(ALPN,))
        if token is not None:
            self._keeper = TokenKeeper(token)
            await self._keeper.start(quic.connect_timeout)
        try:
            self._listener = await current_backend.get().listen(
                host,
                port,
                receiver_factory=self._accept,
                cert=cert,
                key=key,
                client_ca=client_ca,
                settings=quic,
            )
        except BaseException:
            if self._keeper is not None:
                self._keeper.stop()
            raise
        if self.guard is not None:
            self.guard.start()

    @property
    def host(self) -> str:
        """Address that this listens on."""
        return self._started().host

    @property
    def port(self) -> int:
        """UDP port that this listens on."""
        return self._started().port

    @property
    def url(self) -> str:
        """Where clients on this network connect."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"moqt://{host}:{self.port}"

    @property
    def connections(self) -> tuple[Connection, ...]:
        """Sessions that are open."""
        return tuple(self._connections)

    @property
    def clients_refused(self) -> int:
        """Who was refused since the certificate shown did not count, or none was shown."""
        return 0 if self._listener is None else self._listener.clients_refused

    @property
    def resets_sent(self) -> int:
        """Packets of connections that are not known here, answered by a stateless reset."""
        return 0 if self._listener is None else self._listener.resets_sent

    @property
    def resets_left_out(self) -> int:
        """Such packets that got no answer, since more came than `stateless_resets` allows."""
        return 0 if self._listener is None else self._listener.resets_left_out

    async def drain(self) -> None:
        """Wait until every peer has acknowledged what was sent to it."""
        for connection in self.connections:
            await connection.drain()

    def goaway(self, new_session_uri: str = "", *, timeout: float = 0.0) -> None:
        """Take no new sessions, and send those that are open away (§9.2).

        Args:
            new_session_uri: a `moqt` URI where they go instead; empty for the one they have.
            timeout: seconds they have; then they are closed. 0 names no deadline.

        Raises:
            UsageError: the URI is no `moqt` URI.
        """
        self._going_away = True
        for connection in self.connections:
            connection.goaway(new_session_uri, timeout=timeout)

    def reload_issuers(self) -> None:
        """Read the issuers again; what keys that are gone have allowed ends.

        Raises:
            FileError: the file cannot be read, or is no ring of issuers; then it is as it was.
        """
        if self.guard is not None:
            self.guard.reload()

    async def close(self, code: int = SessionCode.NO_ERROR, reason: str = "") -> None:
        """Close every session and give the port back; always ends soon."""
        if self._keeper is not None:
            self._keeper.stop()
        if self.guard is not None:
            self.guard.stop()
        if self._listener is not None:
            await self._listener.close(code, reason)
        await self.origin.close()

    def _started(self) -> Listener:
        if self._listener is None:
            raise UsageError("the server is not started")
        return self._listener

    def _accept(self, transport: Transport) -> TransportReceiver:
        settings, keeper = self._settings, self._keeper
        if keeper is not None:
            settings = replace(settings, tokens=(keeper.current,))
        connection = Connection(transport, Role.SERVER, settings, observer=self._observer)
        connection.relays = self.relays
        if keeper is not None:
            keeper.attach(connection)
        if self._going_away:
            connection.core.close(SessionCode.NO_ERROR, "going away")
            return connection
        self._connections[connection] = None
        connection.on_closed(lambda: self._connections.pop(connection, None))
        if self._offer and self.guard is None:
            self.origin.attach(connection)
        elif self.guard is not None:
            connection.guard_with(self.guard, partial(self._admit, connection))
        return connection

    def _admit(self, connection: Connection) -> None:
        """The guard has let a session in."""
        if self._offer:
            self.origin.attach(connection)


@entered_by("async with kvcs.serve(...) as server:")
async def serve(
    host: str,
    port: int = RELAY_PORT,
    *,
    cert: Path,
    key: Path,
    client_ca: Path | bytes | None = None,
    issuers: Path | None = None,
    audience: Sequence[str] = (),
    session: SessionSettings | None = None,
    quic: QuicSettings | None = None,
    token: TokenSource | None = None,
    datagram_size: int | None = None,
    relays: RelayTrust = "trusted",
) -> AsyncIterator[Server]:
    """Listen for subscribers: a Publisher for two machines without a relay.

    Args:
        host: address to bind.
        port: UDP port; 0 takes a free one.
        cert: PEM file with the certificate chain.
        key: PEM file with the private key.
        client_ca: authorities, a PEM file or its octets: who connects needs a certificate of one of
            them, for client authentication. The file is read again when it has changed. None asks
            for no certificates.
        issuers: COSE_KeySet of the issuers whose tokens count, as for a relay: every request of a
            peer needs a token that allows it. The file is read again when it has changed. None
            serves whoever comes.
        audience: names by which tokens call this endpoint; ``host`` by default.
        session: limits and options of every session.
        quic: settings of the transport.
        token: authorization that is shown to every peer; as for `connect`.
        datagram_size: octets of UDP payload to send, in place of what each path carries.
        relays: whether the relays that come may read caches; as for `connect`.

    Yields:
        The `Server`, listening.

    Raises:
        ConnectionFailed: the address cannot be bound.
        FileError: certificate, key, `client_ca` or `issuers` cannot be used.
        UsageError: ``audience`` without ``issuers``, or none where ``host`` names no endpoint.
    """
    check_relay_trust(relays)
    check_audience(issuers, audience, host)
    guard = None if issuers is None else Guard(issuers, audience or (host,))
    _log.info("relays", trust=relays, listening=f"{host}:{port}")
    server = Server(session, relays=relays, guard=guard)
    pinned = _pinned(quic, datagram_size)
    await server.start(
        host, port, cert=cert, key=key, client_ca=client_ca, quic=pinned, token=token
    )
    try:
        yield server
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                await server.drain()
        except TimeoutError:
            _log.warning("closed_with_octets_unacknowledged", peer=server.url)
    finally:
        await server.close()

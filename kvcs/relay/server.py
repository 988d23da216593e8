"""The listening relay: `RelayCore` on QUIC, with asyncio (MOQT §7)."""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import TracebackType

from kvcs.access.guard import ISSUERS_INTERVAL, check_audience, remembering, token_policy
from kvcs.access.policy import Policy
from kvcs.contexts import OnlyAsyncWith
from kvcs.errors import FileError, UsageError
from kvcs.keyfiles import RingFile
from kvcs.moqt import events
from kvcs.moqt.settings import SessionSettings
from kvcs.moqt.uri import MoqtUri, parse_uri
from kvcs.observe import get_logger
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import RELAY_PORT, Server, open_connection
from kvcs.quic.link import Link, Opener
from kvcs.quic.origin import Origin
from kvcs.quic.reconnect import DEFAULT_RECONNECT, Reconnect
from kvcs.quic.tokens import TokenSource
from kvcs.quic.transport import TransportStats
from kvcs.relay.core import RelayCore
from kvcs.relay.disk import Disk
from kvcs.relay.settings import GIB, REQUEST_STREAMS, RelayLimits
from kvcs.relay.stats import MAX_SCOPES_SHOWN, Fact, PeerStats, RelayStats, RelayStatus
from kvcs.relay.uplinks import NoOrigin, Uplink, upstream_quic
from kvcs.relay.upstreams import RELAY_ID_OCTETS, RELAY_OPTION
from kvcs.trust import KeyUse
from kvcs.trust.tokens import CLOCK_SKEW, MAX_LIFETIME

_log = get_logger("kvcs.relay")

Path = str | os.PathLike[str]

MAX_SESSIONS = 1024
"""Sessions of one relay, unless its settings say otherwise."""

MAX_UPSTREAMS = 16
"""Upstreams of one relay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """What a relay listens on, and what it holds.

    Raises:
        UsageError: a value cannot be used.
    """

    cert: Path
    """PEM file with the certificate chain."""

    key: Path
    """PEM file with the private key."""

    host: str = "127.0.0.1"
    """Address to bind; ``0.0.0.0`` or ``::`` for every one."""

    port: int = RELAY_PORT
    """UDP port; 0 takes a free one."""

    allow_anyone: bool = False
    """Serve anyone who can reach the port. A relay without authorization starts only with it."""

    issuers: Path | None = None
    """COSE_KeySet of the issuers whose tokens count, each key with the scope that it speaks for.
    The file is looked at from time to time, and read again when it has changed."""

    audience: tuple[str, ...] = ()
    """Names of this relay: a token has to be for one of them. By default `host`."""

    issuers_interval: float = ISSUERS_INTERVAL
    """Seconds between looks at `issuers`."""

    max_token_lifetime: float = MAX_LIFETIME
    """Longest time from a token's issue to its expiry, seconds."""

    token_skew: float = CLOCK_SKEW
    """Seconds by which an issuer's clock may differ from this one's."""

    client_ca: Path | bytes | None = None
    """Authorities, a PEM file or its octets: who connects needs a client certificate of one."""

    upstreams: tuple[str, ...] = ()
    """`moqt` URIs of relays or publishers that are asked for what nobody announced here, in this
    order."""

    ca: Path | bytes | None = None
    """Authorities to trust for upstreams, a PEM file or its octets; certifi's where None."""

    client_cert: Path | None = None
    """PEM file with the certificate chain to show to an upstream that asks for one."""

    client_key: Path | None = None
    """PEM file with the key to it."""

    token: TokenSource | None = field(default=None, repr=False)
    """This relay's own token for its upstreams; as for `kvcs.connect`. Those of its peers never go
    there."""

    verify: bool = True
    """False accepts any certificate of an upstream: for tests on one machine only."""

    reconnect: Reconnect = DEFAULT_RECONNECT
    """Pauses between tries to reach an upstream; it is never given up."""

    limits: RelayLimits = field(default_factory=RelayLimits)
    """Cache size, limits and waits of the core."""

    cache_dir: Path | None = None
    """Folder for Groups that the cache has no room for; they survive a restart. No other relay may
    use it. Without one they are fetched again."""

    cache_disk_octets: int = 16 * GIB
    """Most octets of the files there."""

    max_sessions: int = MAX_SESSIONS
    """Sessions at a time; the next ones are refused."""

    goaway_timeout: float = 5.0
    """Seconds that sessions have to go away when the relay stops."""

    goaway_uri: str = ""
    """`moqt` URI of another relay that they are sent to then; empty: they come back to this one."""

    session: SessionSettings = field(default_factory=SessionSettings)
    """Limits of every session."""

    quic: QuicSettings = field(default_factory=partial(QuicSettings, bidi_streams=REQUEST_STREAMS))
    """Settings of the transport; `max_sessions` replaces its max_connections."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port must lie between 0 and 65535, not {self.port}")
        if self.allow_anyone and self.issuers is not None:
            raise UsageError("a relay serves anyone, or whom its issuers let in: not both")
        check_audience(self.issuers, self.audience, self.host)
        if (self.client_cert is None) != (self.client_key is None):
            raise UsageError("client_cert and client_key belong together: pass both, or neither")
        if not self.issuers_interval > 0:
            raise UsageError(f"issuers_interval must be above 0 s, not {self.issuers_interval}")
        if self.cache_disk_octets < 1:
            raise UsageError(f"cache_disk_octets must be above 0, not {self.cache_disk_octets}")
        if self.max_sessions < 1:
            raise UsageError(f"max_sessions must be at least 1, not {self.max_sessions}")
        if not self.goaway_timeout >= 0:
            raise UsageError(f"goaway_timeout must not be negative, not {self.goaway_timeout}")
        for uri in (*self.upstreams, *filter(None, (self.goaway_uri,))):
            parse_uri(uri)
        if len(self.upstreams) > MAX_UPSTREAMS:
            raise UsageError(f"at most {MAX_UPSTREAMS} upstreams, not {len(self.upstreams)}")


class Relay(OnlyAsyncWith, usage="async with kvcs.Relay(settings) as relay:"):
    """A relay that listens while its context is entered.

    ::

        settings = RelaySettings(cert="relay.pem", key="relay.key", allow_anyone=True)
        async with Relay(settings) as relay:
            await relay.closed()

    It runs until `close` is called or the context is left. Both send GOAWAY to every session, wait
    until they are gone or `goaway_timeout` has passed, and close what is left. Cancelling that wait
    closes at once; so does an error that leaves the context.

    Args:
        settings: see `RelaySettings`.

    Raises:
        UsageError: nothing says who may use it.
        FileError: the issuers cannot be read.
    """

    def __init__(self, settings: RelaySettings) -> None:
        if not settings.allow_anyone and settings.issuers is None:
            raise UsageError(
                "the relay has no authorization: name the issuers whose tokens count (issuers,"
                " --issuers), or pass allow_anyone (--allow-anyone) to serve whoever can reach its"
                " port"
            )
        self.settings = settings
        self._issuers = None
        policy, session = Policy(), settings.session
        if settings.issuers is not None:
            self._issuers = RingFile(settings.issuers, KeyUse.TOKEN)
            policy = token_policy(
                self._issuers.ring,
                settings.audience or (settings.host,),
                skew=settings.token_skew,
                max_lifetime=settings.max_token_lifetime,
            )
            session = remembering(session)
        self._watch: asyncio.TimerHandle | None = None
        relay_id = secrets.token_bytes(RELAY_ID_OCTETS)
        session = replace(
            session, further_options=(*session.further_options, (RELAY_OPTION, relay_id))
        )
        self._core = RelayCore(settings.limits, self._woken, policy, relay_id)
        self._disk: Disk | None = None
        if settings.cache_dir is not None:
            self._disk = Disk(settings.cache_dir, settings.cache_disk_octets, self._core.stats)
            self._core.cache.shelf = self._disk
        self._uplinks = [
            Uplink(uri, self._opener(rank, session), settings.reconnect)
            for rank, uri in enumerate(settings.upstreams)
        ]
        self._server = Server(session, observer=self._observe, offer=False)
        self._keys: dict[Connection, int] = {}
        self._downstream: set[Connection] = set()
        """Sessions that others have opened."""
        self._next_key = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due: float | None = None
        self._listening = self._closing = False
        self._empty = asyncio.Event()
        self._closed = asyncio.Event()

    async def __aenter__(self) -> Relay:
        """Listen.

        Raises:
            ConnectionFailed: the address cannot be bound.
            FileError: certificate, key or the cache's folder cannot be used.
        """
        settings = self.settings
        self._loop = asyncio.get_running_loop()
        self._empty.set()
        if self._disk is not None:
            try:
                await self._disk.open()
                self._core.shelf_opened(self._loop.time())
            except BaseException:
                await self._disk.close()
                raise
        try:
            await self._server.start(
                settings.host,
                settings.port,
                cert=settings.cert,
                key=settings.key,
                client_ca=settings.client_ca,
                quic=_bounded(settings),
            )
        except BaseException:
            if self._disk is not None:
                await self._disk.close()
            raise
        self._listening = True
        for uplink in self._uplinks:
            uplink.start()
        self._watch_issuers()
        _log.info("relay_listening", address=self.address, cache=settings.limits.cache_octets)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; see `close`."""
        await self.close(at_once=kind is not None and issubclass(kind, Exception))

    async def close(self, *, at_once: bool = False) -> None:
        """Say goodbye, wait for a bounded time, close every session and give the port back.

        Args:
            at_once: without saying goodbye.
        """
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        try:
            if not at_once:
                await self._say_goodbye()
        finally:
            try:
                await self._end()
            finally:
                self._closed.set()  # also where that was cancelled: nobody waits for ever

    async def _end(self) -> None:
        """Close every session, and keep what is cached."""
        await asyncio.gather(*(uplink.close() for uplink in self._uplinks))
        await self._server.close()
        for handle in (self._timer, self._watch):
            if handle is not None:
                handle.cancel()
        self._log_reports()
        if self._disk is not None:
            self._disk.draining()
            self._core.cache.shelve()
            await self._disk.close()
        _log.info("relay_stopped", sessions=self.stats.sessions_total)

    @property
    def host(self) -> str:
        """Address that the relay listens on."""
        return self._server.host

    @property
    def port(self) -> int:
        """UDP port that the relay listens on."""
        return self._server.port

    @property
    def address(self) -> str:
        """Address and port, as people write them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Where clients connect."""
        return self._server.url

    @property
    def is_ready(self) -> bool:
        """Whether it listens, and has not begun to close."""
        return self._listening and not self._closing

    @property
    def stats(self) -> RelayStats:
        """Counters since the start, and gauges of now."""
        stats = self._core.snapshot()
        stats.clients_refused = self._server.clients_refused
        stats.resets_sent = self._server.resets_sent
        stats.resets_left_out = self._server.resets_left_out
        stats.queued_octets = sum(each.transport.unacknowledged() for each in self._keys)
        return stats

    def status(self) -> RelayStatus:
        """The relay as it is now, with each session."""
        now = 0.0 if self._loop is None else self._loop.time()
        peers = [
            PeerStats(
                session=key,
                peer=connection.peer,
                seconds=round(now - peer.opened_at, 3),
                requests=peer.requests,
                serving=peer.serving,
                queued_octets=connection.transport.unacknowledged(),
                lag_octets=peer.lag_octets,
                rtt=connection.stats().rtt,
            )
            for connection, key in self._keys.items()
            if (peer := self._core.peer(key)) is not None
        ]
        scopes = self._core.scopes.status(MAX_SCOPES_SHOWN)
        upstreams = tuple(each.stats(rank) for rank, each in enumerate(self._uplinks))
        return RelayStatus(self.is_ready, self.stats, tuple(peers), scopes, upstreams)

    @property
    def transports(self) -> list[tuple[str, TransportStats]]:
        """Peer and figures of the path of each session that is open, oldest first."""
        return [(connection.peer, connection.stats()) for connection in self._keys]

    async def closed(self) -> None:
        """Wait until the relay has stopped; cancelling leaves it as it is."""
        await self._closed.wait()

    def reload_issuers(self) -> None:
        """Read the issuers again; what keys that are gone have allowed ends.

        Raises:
            FileError: the file cannot be read, or is no ring of issuers; then it is as it was.
        """
        if self._issuers is None or self._loop is None:
            return
        self._issuers.reload()
        _log.info("issuers_read", keys=len(self._issuers.ring))
        self._core.issuers_changed(self._loop.time())
        self._log_reports()
        self._arm()

    # Inner workings

    def _watch_issuers(self) -> None:
        """Look whether the issuers have changed, and again after a while."""
        if self._issuers is None or self._loop is None or self._closing:
            return
        if self._issuers.changed():
            try:
                self.reload_issuers()
            except FileError as exc:
                _log.error("issuers_not_read", reason=str(exc))
        self._watch = self._loop.call_later(self.settings.issuers_interval, self._watch_issuers)

    async def _say_goodbye(self) -> None:
        timeout = self.settings.goaway_timeout
        self._server.goaway(self.settings.goaway_uri, timeout=timeout)
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        except TimeoutError:
            _log.info("relay_closes_sessions", sessions=len(self._downstream))

    def _opener(self, rank: int, session: SessionSettings) -> Opener:
        """Opens sessions with the ``rank``-th upstream."""
        settings = self.settings

        async def open_session(uri: MoqtUri, *, link: Link, origin: Origin | None) -> Connection:
            return await open_connection(
                uri,
                ca=settings.ca,
                token=settings.token,
                verify=settings.verify,
                client_cert=settings.client_cert,
                client_key=settings.client_key,
                session=session,
                quic=upstream_quic(settings.quic),
                observer=partial(self._observe, upstream=rank),
                link=link,
                origin=NoOrigin(),
            )

        return open_session

    def _observe(
        self, connection: Connection, event: events.Event, upstream: int | None = None
    ) -> None:
        """Every event of every session, in the loop's thread."""
        now = connection.now
        key = self._keys.get(connection)
        if key is None:
            if not isinstance(event, events.SessionEstablished):
                return  # it ended before its SETUP, or was refused
            key = self._take_in(connection, now, upstream)
        self._core.event(key, event, now)
        if isinstance(event, events.SessionClosed):
            del self._keys[connection]
            self._downstream.discard(connection)
            if not self._downstream:
                self._empty.set()
        self._log_reports()
        self._arm()

    def _take_in(self, connection: Connection, now: float, upstream: int | None) -> int:
        key = self._next_key
        self._next_key += 1
        self._keys[connection] = key
        if upstream is None:
            self._downstream.add(connection)
            self._empty.clear()
        else:
            self._uplinks[upstream].opened(connection)
        # The core answers every request of the peer; nobody else is asked.
        connection.answer_with(lambda _connection, _event: True)
        connection.answer_updates_with(lambda _event: None)
        waiting = connection.transport.unacknowledged

        def facts() -> dict[str, Fact]:
            octets = asdict(connection.stats())
            taken = {each: octets[each] for each in ("octets_sent", "octets_received")}
            return {"peer": connection.peer, "upstream": upstream, **taken}

        self._core.session_opened(key, connection.core, now, upstream, waiting, facts)
        return key

    def _woken(self) -> None:
        self._log_reports()
        self._arm()

    def _arm(self) -> None:
        loop = self._loop
        due = self._core.next_timer()
        if loop is None or (due == self._timer_due and self._timer is not None):
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_due = due
        if due is not None and not self._closed.is_set():
            self._timer = loop.call_at(due, self._timer_fired)

    def _timer_fired(self) -> None:
        assert self._loop is not None  # timers are set while it runs
        self._timer = self._timer_due = None
        self._core.receive_timer(self._loop.time())
        self._log_reports()
        self._arm()

    def _log_reports(self) -> None:
        while (report := self._core.next_report()) is not None:
            _log.info(report.event, **report.facts)


def _bounded(settings: RelaySettings) -> QuicSettings:
    """The transport's settings with the relay's bounds on sessions and on what waits for one."""
    backlog = min(settings.quic.control_backlog, settings.limits.max_copied_octets)
    return replace(settings.quic, max_connections=settings.max_sessions, control_backlog=backlog)

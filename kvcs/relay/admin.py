"""What an operator sees of a relay over HTTP: metrics, health, readiness, status.

It answers in threads of its own, and asks the relay's loop for what it shows: a relay whose loop
hangs is told to be unhealthy, which a server in that loop could not do. There is no TLS and no
authorization, so it listens on the loopback address unless told otherwise. Nothing that it shows
comes from a namespace, a key or a payload.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import asdict, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, SHUT_RDWR, socket
from typing import Any

from kvcs.errors import ConnectionFailed, UsageError
from kvcs.observe import get_logger, metrics
from kvcs.relay.stats import UPSTREAM_STATES, RelayStats, RelayStatus, UpstreamStats

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        InfoMetricFamily,
        Metric,
    )
except ImportError as exc:  # the extra is not installed
    raise UsageError(
        "metrics over HTTP need prometheus-client: pip install '.[metrics]' in the folder of"
        " kvcs's source"
    ) from exc

_log = get_logger("kvcs.relay")

MAX_CONNECTIONS = 16
"""HTTP connections at a time; the next ones are closed at once."""

CONNECTION_SECONDS = 10.0
"""Longest that a connection may last, silent or not: a request and its answer."""

ANSWER_SECONDS = 5.0
"""Longest that the relay's loop is waited for before it is called unhealthy."""

GAUGES = {
    "sessions": ("kvcs_sessions", "Sessions that are open."),
    "namespaces": ("kvcs_namespaces", "Namespaces that are announced now."),
    "tracks": ("kvcs_cache_items", "Tracks in the cache or in use."),
    "groups": ("kvcs_cache_groups", "Groups in the cache."),
    "cache_octets": ("kvcs_cache_bytes", "Octets in the cache, bookkeeping included."),
    "disk_groups": ("kvcs_disk_groups", "Groups in files."),
    "disk_octets": ("kvcs_disk_bytes", "Octets of these files."),
    "scopes": ("kvcs_scopes", "Scopes that something is open of, and some that were."),
    "queued_octets": ("kvcs_send_queue_bytes", "Octets given to QUIC, not acknowledged yet."),
}
"""Members of `RelayStats` that go up and down, their metrics and what these say."""

COUNTERS = {
    "sessions_total": ("kvcs_sessions_opened", "Sessions since the start."),
    "hits": ("kvcs_relay_hits", "Fills and fetches whose whole range was known."),
    "misses": ("kvcs_relay_misses", "Fills and fetches that needed something from upstream."),
    "octets_in": ("kvcs_relay_bytes_received", "Payload octets that arrived."),
    "octets_out": ("kvcs_relay_bytes_sent", "Payload octets of Objects that were sent whole."),
    "objects_in": ("kvcs_relay_objects_received", "Objects that arrived whole."),
    "objects_out": ("kvcs_relay_objects_sent", "Objects that were sent whole."),
}
"""Members that only grow and whose metrics have names of their own; the others are
``kvcs_relay_`` and the member's name."""

UPSTREAM_COUNTERS = {
    "sessions": "Sessions with an upstream since the start.",
    "requests": "Requests made of an upstream.",
    "retries": "Tries to reach an upstream that failed.",
}
"""Members of `UpstreamStats` that only grow."""


class Admin:
    """HTTP beside a relay while its context is entered: enter it before the relay's own.

    ``/metrics`` is for Prometheus, ``/healthz`` says whether the loop answers, ``/readyz`` whether
    the relay listens and stays, ``/status`` is JSON.

    Args:
        status: what the relay is now; called in the loop. `Relay.status`.
        version: of the program, for ``kvcs_build_info``.
        host: address to bind.
        port: TCP port; 0 takes a free one.
    """

    def __init__(
        self,
        status: Callable[[], RelayStatus],
        version: str,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._status, self._version = status, version
        self._address = (host, port)
        self._registry = CollectorRegistry()
        self._registry.register(metrics)
        self._registry.register(_RelayMetrics(self))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> Admin:
        """Listen.

        Raises:
            ConnectionFailed: the address cannot be bound.
        """
        self._loop = asyncio.get_running_loop()
        host, port = self._address
        try:
            self._server = _Server(self, host, port)
        except OSError as exc:
            raise ConnectionFailed(f"{host}:{port}: {exc.strerror or exc}") from exc
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="kvcs-admin", daemon=True
        )
        self._thread.start()
        _log.info("admin_listening", url=self.url)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop; answers that are on their way get what they wait for, or 503."""
        server, thread = self._server, self._thread
        if server is not None and thread is not None:
            # Off the loop: an answer on its way waits for the loop.
            await asyncio.to_thread(server.shutdown)
            await asyncio.to_thread(thread.join)
            await asyncio.to_thread(server.server_close)
        self._server = self._thread = None

    @property
    def url(self) -> str:
        """Where it listens; empty while it does not."""
        if self._server is None:
            return ""
        host, port = self._server.server_address[:2]
        name = str(host)
        return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"

    # What the threads call

    def status(self) -> RelayStatus:
        """What the relay is now, asked of its loop.

        Raises:
            TimeoutError: the loop does not answer.
        """
        loop, answer = self._loop, Future[RelayStatus]()

        def ask() -> None:
            try:
                answer.set_result(self._status())
            except BaseException as exc:
                answer.set_exception(exc)

        if loop is None or loop.is_closed():
            raise TimeoutError("the relay has stopped")
        loop.call_soon_threadsafe(ask)
        try:
            return answer.result(ANSWER_SECONDS)
        except FutureTimeoutError:
            raise TimeoutError(f"the relay did not answer in {ANSWER_SECONDS:g} s") from None

    def families(self) -> Iterator[Metric]:
        """The relay's metrics of now."""
        yield from families(self.status(), self._version)

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status code, media type and body for a path."""
        text = "text/plain; charset=utf-8"
        try:
            if path == "/metrics":
                return 200, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry)
            if path == "/healthz":
                self.status()
                return 200, text, b"ok\n"
            if path == "/readyz":
                ready = self.status().ready
                return (200, text, b"ready\n") if ready else (503, text, b"not ready\n")
            if path == "/status":
                document = json.dumps(asdict(self.status())).encode()
                return 200, "application/json", document + b"\n"
        except TimeoutError as exc:
            return 503, text, f"{exc}\n".encode()
        return 404, text, b"/metrics /healthz /readyz /status\n"


def families(status: RelayStatus, version: str) -> Iterator[Metric]:
    """A relay's figures as metrics of prometheus-client."""
    yield InfoMetricFamily("kvcs_build", "What runs.", value={"version": version})
    yield GaugeMetricFamily("kvcs_ready", "1 where the relay listens and stays.", int(status.ready))
    # One time series for each peer would be without bound: /status has them one by one.
    deepest = max((peer.queued_octets for peer in status.peers), default=0)
    yield GaugeMetricFamily("kvcs_send_queue_peer_max_bytes", "Of the peer with most.", deepest)
    lag = max((peer.lag_octets for peer in status.peers), default=0)
    yield GaugeMetricFamily("kvcs_lag_peer_max_bytes", "Owed to the peer with most.", lag)
    # Nor are scopes labels: the largest one tells how far the limits are.
    for share in ("subscriptions", "fetches", "namespaces", "queued_octets"):
        most = max((getattr(scope, share) for scope in status.scopes), default=0)
        name = f"kvcs_scope_max_{share.replace('octets', 'bytes')}"
        yield GaugeMetricFamily(
            name, f"Of {share.replace('_', ' ')}, those of the scope with most.", most
        )
    waiting = sum(peer.serving for peer in status.peers)
    yield GaugeMetricFamily("kvcs_subscribers", "Downstream requests that are open.", waiting)
    yield from _upstreams(status.upstreams)
    for member in fields(RelayStats):
        value = getattr(status.stats, member.name)
        if member.name in GAUGES:
            name, text = GAUGES[member.name]
            yield GaugeMetricFamily(name, text, value)
        else:
            plain = (f"kvcs_relay_{member.name}", f"{member.name} since the relay started.")
            name, text = COUNTERS.get(member.name, plain)
            yield CounterMetricFamily(name, text, value)


def _upstreams(upstreams: Sequence[UpstreamStats]) -> Iterator[Metric]:
    """Upstreams are labels: they are configured, and at most 16."""
    labels = ("upstream", "preference")
    text = "1 for the state in which an upstream is."
    state = GaugeMetricFamily("kvcs_upstream_state", text, labels=(*labels, "state"))
    counted = {
        member: CounterMetricFamily(f"kvcs_upstream_{member}", text, labels=labels)
        for member, text in UPSTREAM_COUNTERS.items()
    }
    for each in upstreams:
        values = (each.upstream, str(each.preference))
        for name in UPSTREAM_STATES:
            state.add_metric((*values, name), int(each.state == name))
        for member, family in counted.items():
            family.add_metric(values, getattr(each, member))
    yield from (state, *counted.values())


class _RelayMetrics:
    """The relay's part of the registry."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    def collect(self) -> Iterator[Metric]:
        return self._admin.families()

    def describe(self) -> Iterator[Metric]:
        """Names without values: registering asks for them before the loop can answer."""
        return families(RelayStatus(False, RelayStats(), ()), "")


class _Server(ThreadingHTTPServer):
    """A bounded number of threads."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, admin: Admin, host: str, port: int) -> None:
        if ":" in host:
            self.address_family = AF_INET6
        self.admin = admin
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # A time for each octet would let a few connections that dribble keep all others out.
        end = threading.Timer(CONNECTION_SECONDS, _shut, (request,))
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._free.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        _log.debug("admin_request_failed", exc_info=True)


def _shut(connection: socket) -> None:
    """End a connection, whatever its thread waits for."""
    with suppress(OSError):
        connection.shutdown(SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: _Server
    timeout = CONNECTION_SECONDS
    server_version = "kvcs"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer."""
        code, media_type, body = self.server.admin.answer(self.path.partition("?")[0])
        self.send_response(code)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: probes come every few seconds."""

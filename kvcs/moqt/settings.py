"""What one endpoint says in SETUP, and what it holds of its peer at most (MOQT §6.3, §9.1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvcs.moqt.limits import EarlyLimits, SharedBudgets
from kvcs.moqt.tokens import ResolvedToken

DRAFT = 22
"""The draft of MOQT that we speak."""

ALPN = f"moqt-{DRAFT}"
"""TLS ALPN of the draft (§6.2)."""


class Role(Enum):
    """Which side opened the connection."""

    CLIENT = "client"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What one endpoint says in SETUP, and what it holds of a peer at most."""

    path: str = ""
    """PATH: path-abempty of the `moqt` URI, with `?query`; client only."""

    authority: str = ""
    """AUTHORITY: host[:port] of the `moqt` URI; client only. Without it PATH is not sent either."""

    implementation: str = "kvcs"
    """MOQT_IMPLEMENTATION."""

    tokens: tuple[bytes | ResolvedToken, ...] = field(default=(), repr=False)
    """AUTHORIZATION_TOKENs for the whole session, used once each; octets alone are of type 0."""

    further_options: tuple[tuple[int, int | bytes], ...] = ()
    """Setup Options that the draft does not know, type and value; peers ignore them (§9.1)."""

    max_filter_ranges: int = 16
    """MAX_FILTER_RANGES we accept per subscription or fetch."""

    max_request_updates: int = 16
    """MAX_REQUEST_UPDATES we accept without answer on one request stream."""

    max_auth_token_cache_size: int = 0
    """MAX_AUTH_TOKEN_CACHE_SIZE: octets of token aliases we keep for the peer."""

    max_peer_requests: int = 4096
    """Requests of the peer that may be open at a time; more are refused with EXCESSIVE_LOAD."""

    max_request_octets: int = 32 * 2**20
    """Octets that the messages of these requests take in memory; more are refused with
    EXCESSIVE_LOAD."""

    max_requests_per_second: float = 1000.0
    """Steady rate of the peer's requests and updates; more are refused with EXCESSIVE_LOAD. An
    update of range filters or timeouts counts once more for every eight streams under way."""

    request_burst: int = 8192
    """Requests and updates that may come at once, before the rate counts."""

    max_matches_per_second: float = 8192.0
    """Steady rate of what the peer's requests for prefixes match; while it is exceeded, more of
    these requests are refused with EXCESSIVE_LOAD."""

    matches_burst: int = 65536
    """What they may match at once, before the rate counts."""

    request_wait: float = 10.0
    """Seconds for a request stream's first message to become whole; else it is reset."""

    max_tokens: int = 16
    """AUTHORIZATION_TOKENs in one message of the peer; more are refused with EXCESSIVE_LOAD."""

    max_concurrent_fetches: int = 16
    """FETCHes of the peer that may run at a time; more are refused with EXCESSIVE_LOAD."""

    max_fills: int = 16
    """Fills of one subscription of the peer that may run at a time; an update that asks for more
    fails with EXCESSIVE_LOAD."""

    setup_wait: float = 10.0
    """Seconds that a server waits for the client's SETUP, before CONTROL_MESSAGE_TIMEOUT."""

    max_namespaces: int = 65536
    """Namespaces remembered of one SUBSCRIBE_NAMESPACE of ours; with more it is cancelled."""

    max_namespace_octets: int = 16 * 2**20
    """Octets that these take in memory; with more it is cancelled."""

    done_delay: float = 0.3
    """Seconds between SUBSCRIBE_OK or the last stream and PUBLISH_DONE: some peers lose what
    follows a PUBLISH_DONE in the same flight."""

    stream_wait: float = 2.0
    """Seconds without data of any stream for which a subscriber waits for streams that PUBLISH_DONE
    has overtaken: on a slow link they queue behind others."""

    stream_wait_limit: float = 30.0
    """Longest such wait, from PUBLISH_DONE, while data of other streams goes on coming."""

    early: EarlyLimits = field(default_factory=EarlyLimits)
    """What is held of data streams whose request is not known yet."""

    shared: SharedBudgets = field(default_factory=SharedBudgets, compare=False, repr=False)
    """What all sessions with these settings hold together: those of one server."""

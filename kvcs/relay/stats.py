"""What a relay counts, and what it tells its log (no payload, key or token is in either)."""

from __future__ import annotations

from dataclasses import dataclass, field

Fact = str | int | float | bool | None

MAX_SCOPES_SHOWN = 64
"""Scopes in a `RelayStatus`."""


@dataclass(slots=True)
class RelayStats:
    """Counters since the relay started, and gauges of now."""

    sessions: int = 0
    """Sessions that are open."""

    sessions_total: int = 0
    """Sessions since the start."""

    sessions_refused: int = 0
    """Sessions closed because a token of their SETUP did not count."""

    clients_refused: int = 0
    """Clients refused because their certificate did not count, or they had none."""

    resets_sent: int = 0
    """Packets of connections that the relay does not know, answered by a stateless reset."""

    resets_left_out: int = 0
    """Such packets that got no answer, since there were too many in a second."""

    unauthorized: int = 0
    """Requests refused because nothing allowed them."""

    permits_ended: int = 0
    """Requests ended because what allowed them has expired, or was revoked."""

    namespaces: int = 0
    """Different namespaces that are announced now."""

    tracks: int = 0
    """Tracks in the cache or in use."""

    groups: int = 0
    """Groups in the cache."""

    queued_octets: int = 0
    """Octets that wait below the cache for peers: given to QUIC, not acknowledged yet."""

    cache_octets: int = 0
    """Octets in the cache, bookkeeping included."""

    groups_evicted: int = 0
    """Groups dropped to make room."""

    objects_expired: int = 0
    """Objects that left because of MAX_CACHE_DURATION."""

    disk_groups: int = 0
    """Groups in files."""

    disk_octets: int = 0
    """Octets of these files."""

    disk_written: int = 0
    """Groups written to files."""

    disk_hits: int = 0
    """Groups read from files, whose digests were right."""

    disk_bad: int = 0
    """Files that were not what was written: dropped, each counted as a miss too."""

    disk_skipped: int = 0
    """Groups not written, since too much waited, the disk had failed, or they were there."""

    disk_errors: int = 0
    """Times that the disk failed, or was full."""

    subscribes: int = 0
    """Downstream SUBSCRIBEs that were accepted."""

    fetches: int = 0
    """Downstream FETCHes that were accepted."""

    hits: int = 0
    """Fills and fetches whose whole range was known when they began."""

    misses: int = 0
    """Fills and fetches that needed something from upstream."""

    upstream_subscriptions: int = 0
    """SUBSCRIBEs sent upstream."""

    upstream_fills: int = 0
    """Those of them that carried a fill."""

    upstream_publishes: int = 0
    """PUBLISHes that were accepted."""

    published: int = 0
    """PUBLISHes sent downstream, for SUBSCRIBE_TRACKS."""

    upstream_fetches: int = 0
    """FETCHes sent upstream."""

    failovers: int = 0
    """Tracks that lost their upstream and went on from another one, subscriptions and all."""

    failovers_failed: int = 0
    """Those that ended, since no other upstream had what was missing."""

    objects_in: int = 0
    """Objects whose payload arrived whole."""

    octets_in: int = 0
    """Payload octets that arrived."""

    objects_out: int = 0
    """Objects that were sent whole."""

    octets_out: int = 0
    """Their payload octets."""

    malformed: int = 0
    """Tracks ended because they broke MOQT §12.1."""

    too_large: int = 0
    """Objects not carried because of their size, or because the cache had no room."""

    scopes: int = 0
    """Scopes that something is open of, and some of those that were."""

    scope_refused_subscriptions: int = 0
    """Requests refused because their scope had as many subscriptions as it may."""

    scope_refused_fetches: int = 0
    """The same, of FETCHes."""

    scope_refused_namespaces: int = 0
    """The same, of namespaces announced and Tracks published."""

    scope_refused_rate: int = 0
    """Requests refused because too many of their scope came in a short time."""

    scope_refused_queued: int = 0
    """Requests refused because too much waited for readers of their scope."""

    upstream_share_refused: int = 0
    """Requests refused because their session had caused as many upstream as it may."""

    largest_not_there: int = 0
    """Publishers dropped since they had not what they named as the Largest Object of a Track."""

    too_far_behind: int = 0
    """Downstream subscriptions ended because they did not keep up."""

    pressure_resets: int = 0
    """Streams reset because too much waited, or was kept for their readers: those of the lowest
    priority."""


@dataclass(frozen=True, slots=True)
class Report:
    """One line for the log."""

    event: str
    """Short constant name."""

    facts: dict[str, Fact] = field(default_factory=dict)
    """Key-value facts."""


@dataclass(frozen=True, slots=True)
class PeerStats:
    """One session, for whoever watches the relay; times are seconds, sizes octets."""

    session: int
    """Its number: the log names sessions by it."""

    peer: str
    """Address and port."""

    seconds: float
    """Since it opened."""

    requests: int
    """Requests that it has made."""

    serving: int
    """Its requests that are served or wait now."""

    queued_octets: int
    """Octets that wait for it below the cache."""

    rtt: float | None
    """Smoothed round trip; None before the first."""

    lag_octets: int = 0
    """Octets of the cache that its subscriptions are owed, about a second ago."""


UPSTREAM_STATES = ("open", "leaving", "opening")
"""There is a session; it has said that it will close it; there is none, and one is tried for."""


@dataclass(frozen=True, slots=True)
class UpstreamStats:
    """One upstream of a relay."""

    preference: int
    """How many others are asked before it."""

    upstream: str
    """Host and port, as configured."""

    state: str
    """One of `UPSTREAM_STATES`."""

    sessions: int
    """Sessions with it since the start, one after the other."""

    requests: int
    """Requests that this relay has made of it, over all of them; updates count."""

    retries: int
    """Tries to open a session that failed."""


@dataclass(frozen=True, slots=True)
class ScopeStats:
    """One scope, without its name."""

    scope: int
    """Its number: the log names scopes by it when they reach a limit."""

    subscriptions: int
    """Subscriptions that are open, to Tracks and to prefixes."""

    fetches: int
    """FETCHes that are open."""

    namespaces: int
    """Namespaces announced and Tracks published."""

    queued_octets: int
    """Octets that wait for its readers below the cache, about a second ago."""

    refused: int
    """Requests refused at a limit of the scope."""


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """A relay as it is now."""

    ready: bool
    """Whether it listens, and is not on its way out."""

    stats: RelayStats
    """Counters and gauges."""

    peers: tuple[PeerStats, ...]
    """Sessions that are open, oldest first."""

    scopes: tuple[ScopeStats, ...] = ()
    """Scopes of which most is open, at most `MAX_SCOPES_SHOWN`."""

    upstreams: tuple[UpstreamStats, ...] = ()
    """Those that are configured, the best one first."""

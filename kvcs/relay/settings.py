"""What a relay holds, waits for and allows, each number with its name."""

from __future__ import annotations

from dataclasses import dataclass

from kvcs.errors import UsageError

MIB = 2**20
GIB = 2**30

REQUEST_STREAMS = 4096
"""Request streams that one peer of a relay may have open, unless its settings say otherwise: as
many as a session takes requests. A relay below asks for all of its sessions on one connection, so
what one of them may cause is to be a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Limits and waits of the relay's core. Sizes are octets, times seconds.

    Raises:
        UsageError: a number is below what a relay needs to work.
    """

    cache_octets: int = 4 * GIB
    """Octets of all Objects in the cache, bookkeeping included."""

    max_object_octets: int = 128 * MIB
    """Largest payload of one Object that is carried; a relay does not know a manifest."""

    max_tracks: int = 65536
    """Tracks in the cache or in use; past it unused ones leave, then requests are refused."""

    max_namespaces_per_session: int = 4096
    """Namespaces that one session may have announced at a time."""

    max_published_per_session: int = 4096
    """Tracks that one session may PUBLISH at a time."""

    max_namespace_matches: int = 65536
    """Namespaces that one SUBSCRIBE_NAMESPACE, or Tracks that one SUBSCRIBE_TRACKS, may match when
    it is made."""

    max_waiting_per_track: int = 1024
    """Requests that wait for one Track's upstream answer or publisher."""

    max_upstream_fetches: int = 8
    """FETCHes of ours that run at a time on one session; the next ones wait their turn."""

    max_rendezvous: float = 60.0
    """Longest that a SUBSCRIBE is held for a publisher, whatever RENDEZVOUS_TIMEOUT asks."""

    upstream_linger: float = 5.0
    """How long an upstream subscription without downstream ones is kept."""

    upstream_wait: float = 10.0
    """How long the answer to an upstream SUBSCRIBE, or progress of a FETCH, is waited for."""

    upstream_try: float = 2.0
    """How long the answer of one upstream is waited for before the next one is asked as well."""

    namespace_wait: float = 2.0
    """Longest that a SUBSCRIBE_NAMESPACE waits for what upstreams say, before it is accepted."""

    fetch_wait: float = 10.0
    """How long one reader waits for what the cache lacks where it names no FILL_TIMEOUT."""

    max_fill_wait: float = 60.0
    """Longest that one reader waits, whatever its FILL_TIMEOUT asks."""

    fill_wait: float = 1.0
    """How long a fill stream may stay out behind SUBSCRIBE_OK before a FETCH replaces it."""

    scope_subscriptions: int = 65536
    """Subscriptions of one scope that may be open, to Tracks and to prefixes; more are refused with
    EXCESSIVE_LOAD, as all that is beyond a limit of a scope."""

    scope_fetches: int = 1024
    """FETCHes of one scope that may be open."""

    scope_namespaces: int = 65536
    """Namespaces that may be announced in one scope, and Tracks published, together."""

    scope_requests_per_second: float = 8000.0
    """Steady rate of one scope's requests."""

    scope_request_burst: int = 65536
    """Requests of one scope that may come at once, before the rate counts."""

    scope_queued_octets: int = 2 * GIB
    """Octets that may wait below the cache for the readers of one scope. Beyond it their streams of
    the lowest priority are reset with EXCESSIVE_LOAD, and more readers are refused."""

    max_queued_octets: int = 4 * GIB
    """The same for all sessions together. What waits keeps Objects in memory that have left the
    cache."""

    max_copied_octets: int = 8 * MIB
    """Octets of replies and announcements that may wait for one peer beside Objects, which are not
    copied; then its session is closed with CONTROL_MESSAGE_TIMEOUT."""

    max_lag_octets: int = 2 * GIB
    """Octets of the cache that one subscription may be owed; then it ends with TOO_FAR_BEHIND. Its
    fills go on."""

    max_lag_seconds: float = 30.0
    """How far a subscription without a fill under way may be behind what is published; then it ends
    with TOO_FAR_BEHIND."""

    pinned_seconds: float = 5.0
    """How long a reader that takes nothing keeps in the cache what was got for it, where others
    need the room; then its stream is reset with EXCESSIVE_LOAD, that of the lowest priority
    first."""

    max_caused_per_session: int = 1024
    """Tracks that are subscribed to elsewhere because one session asked first; more of its requests
    are refused with EXCESSIVE_LOAD, but for Tracks that are here."""

    max_caused_fetches_per_session: int = 4
    """Those of `max_upstream_fetches` that one downstream session may take; its others wait."""

    max_prefixes_per_session: int = 1024
    """SUBSCRIBE_NAMESPACEs and SUBSCRIBE_TRACKS of one session that may be open."""

    def __post_init__(self) -> None:
        for name in (
            "cache_octets",
            "max_object_octets",
            "max_tracks",
            "max_upstream_fetches",
            "scope_subscriptions",
            "scope_fetches",
            "scope_namespaces",
            "scope_requests_per_second",
            "scope_request_burst",
            "scope_queued_octets",
            "max_queued_octets",
            "max_copied_octets",
            "max_lag_octets",
            "max_caused_per_session",
            "max_caused_fetches_per_session",
            "max_prefixes_per_session",
        ):
            if not getattr(self, name) >= 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in (
            "upstream_linger",
            "upstream_wait",
            "upstream_try",
            "namespace_wait",
            "fetch_wait",
            "max_fill_wait",
            "fill_wait",
            "max_lag_seconds",
            "pinned_seconds",
        ):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} must not be negative, not {getattr(self, name)}")

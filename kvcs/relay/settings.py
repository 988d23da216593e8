"""What a relay holds, waits for and allows, each number with its name."""

from __future__ import annotations

from dataclasses import dataclass

from kvcs.errors import UsageError

MIB = 2**20
GIB = 2**30


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

    def __post_init__(self) -> None:
        for name in ("cache_octets", "max_object_octets", "max_tracks", "max_upstream_fetches"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in (
            "upstream_linger",
            "upstream_wait",
            "upstream_try",
            "namespace_wait",
            "fetch_wait",
            "max_fill_wait",
            "fill_wait",
        ):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} must not be negative, not {getattr(self, name)}")

"""What a peer can make us hold or do: the limits by name, how often each was reached, and budgets.

The sizes are in `kvcs.moqt.settings` (what a user may want to change) and beside the code that
holds what they bound. Here are their names, so that a counter and a log line say which one it was.
Log lines that a peer can cause are bounded in `kvcs.observe.logs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Limit(StrEnum):
    """Limits on what a peer can grow; the text says what happens at each."""

    SETUP_SECONDS = "setup_seconds"
    """No SETUP in time: the session closes, CONTROL_MESSAGE_TIMEOUT."""

    HELD_OCTETS = "held_octets"
    """Request streams that wait for SETUP: the session closes."""

    OPEN_REQUESTS = "open_requests"
    """Requests of the peer: more are refused, EXCESSIVE_LOAD."""

    REQUEST_OCTETS = "request_octets"
    """What the open requests of the peer weigh: more are refused, EXCESSIVE_LOAD."""

    REQUEST_RATE = "request_rate"
    """Requests and updates in a time: more are refused, EXCESSIVE_LOAD."""

    PREFIX_MATCHES = "prefix_matches"
    """What requests for prefixes match in a time: more of them are refused, EXCESSIVE_LOAD."""

    REQUEST_UPDATES = "request_updates"
    """Updates without answer: the session closes, TOO_MANY_REQUEST_UPDATES."""

    CONCURRENT_FETCHES = "concurrent_fetches"
    """FETCHes that run: more are refused, EXCESSIVE_LOAD."""

    CONCURRENT_FILLS = "concurrent_fills"
    """Fills of a subscription: an update that asks for more fails, EXCESSIVE_LOAD."""

    FILTER_RANGES = "filter_ranges"
    """Ranges of a request's filters: it is refused, INVALID_FILTER."""

    TOKENS = "tokens"
    """Tokens of one message: it is refused, EXCESSIVE_LOAD."""

    TOKEN_CACHE = "token_cache"
    """Octets of token aliases: the session closes, AUTH_TOKEN_CACHE_OVERFLOW."""

    HALF_OPEN_STREAMS = "half_open_streams"
    """Request streams without a whole first message: the oldest is reset and stopped."""

    HALF_OPEN_SECONDS = "half_open_seconds"
    """A request stream whose first message is not whole in time: it is reset and stopped."""

    PARTIAL_OCTETS = "partial_octets"
    """Octets of messages that are not whole: the session closes, CONTROL_MESSAGE_TIMEOUT."""

    UNENDED_STREAMS = "unended_streams"
    """Streams that the peer was told to end, and keeps open: the session closes,
    CONTROL_MESSAGE_TIMEOUT or DATA_STREAM_TIMEOUT."""

    NAMESPACES = "namespaces"
    """Namespaces announced to one SUBSCRIBE_NAMESPACE of ours: it is cancelled."""

    EARLY_STREAMS = "early_streams"
    """Data streams of no known request: the oldest is stopped."""

    EARLY_OCTETS = "early_octets"
    """What came on them: the oldest is stopped."""

    EARLY_SECONDS = "early_seconds"
    """How long they are held: the stream is stopped."""

    EARLY_TOTAL = "early_total"
    """Octets of early streams of all sessions together: this session's oldest is stopped."""

    RULES_TOTAL = "rules_total"
    """What is remembered to hold Objects against each other, in all sessions together: the oldest
    of the Track is forgotten."""

    OBJECT_PROPERTIES = "object_properties"
    """Octets of one Object's Properties: the session closes."""

    STREAM_COUNT = "stream_count"
    """More streams of a subscription than its PUBLISH_DONE counts: tolerated."""


class LimitCounters(Mapping[Limit, int]):
    """How often each limit was reached; a limit that never was is 0.

    Args:
        on_reached: called with the limit each time, for a log line.
    """

    def __init__(self, on_reached: Callable[[Limit], None] | None = None) -> None:
        self.on_reached = on_reached
        self._counts: Counter[Limit] = Counter()

    def reached(self, limit: Limit) -> None:
        """Count one."""
        self._counts[limit] += 1
        if self.on_reached is not None:
            self.on_reached(limit)

    def __getitem__(self, limit: Limit) -> int:
        return self._counts[limit]

    def __iter__(self) -> Iterator[Limit]:
        return iter(Limit)

    def __len__(self) -> int:
        return len(Limit)

    def __repr__(self) -> str:
        shown = ", ".join(f"{limit}={count}" for limit, count in self.items() if count)
        return f"LimitCounters({shown})"


@dataclass(frozen=True, slots=True)
class EarlyLimits:
    """What is held of streams whose header is not whole, or whose Track Alias is not bound yet."""

    streams: int = 512
    """How many; the oldest is stopped."""

    octets: int = 64 * 2**20
    """What came on them; the oldest is stopped."""

    seconds: float = 2.0
    """How long each waits."""


@dataclass(slots=True)
class Budget:
    """An amount that several holders share; it may be overdrawn, and each holder has to look."""

    limit: int
    """Most that should be used."""

    used: int = 0
    """What is used now."""

    @property
    def overdrawn(self) -> bool:
        """Whether more is used than should be."""
        return self.used > self.limit


@dataclass(slots=True)
class SharedBudgets:
    """Budgets of all sessions that were made from one `SessionSettings`: those of one server."""

    early_octets: Budget = field(default_factory=lambda: Budget(256 * 2**20))
    """Octets of data streams whose request is not known yet."""

    rules: Budget = field(default_factory=lambda: Budget(2**20))
    """Entries of `kvcs.moqt.incoming.rules`: Groups, Subgroups, runs of Objects, of 100 octets."""


class Rate:
    """How many of something may happen: a steady rate, and a burst on top.

    Args:
        per_second: the steady rate.
        burst: how many may come at once.
    """

    __slots__ = ("_at", "_burst", "_left", "_per_second")

    def __init__(self, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self._burst = self._left = burst
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Take one, at ``now`` in seconds; False where none is left."""
        if self.spent(now):
            return False
        self._left -= 1
        return True

    def spent(self, now: float) -> bool:
        """Whether none is left at ``now``."""
        if now > self._at:
            self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
            self._at = now
        return self._left < 1

    def owe(self, now: float, count: int = 1) -> None:
        """Take some, also where none is left: they are worked off before there are any again."""
        self.spent(now)
        self._left -= count

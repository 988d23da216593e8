"""When and how a lost session comes back: named numbers, and nothing else."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvcs.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconnect:
    """How `kvcs.connect` comes back when its session is lost or sent away. Times are seconds.

    Raises:
        UsageError: a value cannot be used.
    """

    initial: float | None = None
    """How long the first session is tried for again where nobody listens yet; 0 fails at once. By
    default 2 s, and no longer than the transport's `connect_timeout`. A certificate that does not
    verify always fails at once."""

    deadline: float | None = 60.0
    """Within this time after a loss there must be a session again, else it is given up; None tries
    for ever."""

    first_pause: float = 0.1
    """Pause before the second try; each further one doubles. Before the first try it is the most
    that chance adds, so that many clients of one relay do not come back in the same instant."""

    max_pause: float = 5.0
    """Longest pause between tries."""

    jitter: float = 0.5
    """The part of each pause that chance may take off, 0 to 1."""

    settled: float = 10.0
    """A session that lasted this long counts as good: tries and hops are counted anew after it."""

    max_hops: int = 4
    """Moves to a URI that a GOAWAY or a redirect names, before one that lasts; further ones are not
    followed."""

    max_elsewhere: int = 4
    """Sessions beside the main one, opened because a redirect named another relay."""

    leave: float = 30.0
    """Longest that a session which was sent away stays open for what still comes over it; a GOAWAY
    that names a shorter time counts."""

    linger: float = 1.0
    """How much of that it waits for the peer to leave the Tracks that it follows there."""

    def __post_init__(self) -> None:
        for name in ("initial", "settled", "leave", "linger"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise UsageError(f"{name} must not be negative, not {value}")
        for name in ("first_pause", "max_pause"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be more than 0 s, not {getattr(self, name)}")
        if self.deadline is not None and not self.deadline > 0:
            raise UsageError(f"deadline must be more than 0 s or None, not {self.deadline}")
        if not 0 <= self.jitter <= 1:
            raise UsageError(f"jitter must lie between 0 and 1, not {self.jitter}")
        for name in ("max_hops", "max_elsewhere"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must not be negative, not {getattr(self, name)}")

    def pause(self, tries: int, chance: random.Random) -> float:
        """Seconds to wait before the next try.

        Args:
            tries: how many there were.
            chance: where randomness comes from.
        """
        if tries == 0:
            return self.first_pause * self.jitter * chance.random()
        longest = min(self.max_pause, self.first_pause * 2.0 ** min(tries - 1, 32))
        return longest * (1 - self.jitter * chance.random())


INITIAL_SECONDS = 2.0
"""How long the first session is tried for unless something else is said."""

DEFAULT_RECONNECT = Reconnect()
"""What `kvcs.connect` does unless it is told otherwise."""


class Moves:
    """How often in a row a peer has sent one request away: a few times it is made anew at once.

    Args:
        policy: `max_hops` are free, those behind them have its pauses.
    """

    def __init__(self, policy: Reconnect = DEFAULT_RECONNECT) -> None:
        self._policy = policy
        self._count = 0
        self._last = 0.0

    def pause(self, now: float, chance: random.Random) -> float:
        """Count a move at ``now``; seconds to wait before the request is made anew.

        Args:
            now: the caller's clock, seconds.
            chance: where randomness comes from.
        """
        if now - self._last >= self._policy.settled:
            self._count = 0
        self._last = now
        self._count += 1
        late = self._count - self._policy.max_hops
        return self._policy.pause(late, chance) if late > 0 else 0.0


def retry_seconds(retry_after_ms: int, chance: random.Random) -> float:
    """A Retry Interval as seconds to wait: never shorter, up to half as long again (§9.4).

    Many were refused in the same instant, and must not come back in the same one.
    """
    return retry_after_ms / 1000 * (1 + 0.5 * chance.random())

"""How many octets may wait in the library: a floor that grows with rate times delay."""

from __future__ import annotations

from typing import Final

INTERVAL: Final = 0.1
"""Seconds over which a rate is measured, at least."""

DECAY: Final = 0.9
"""What is left of the best rate after an interval that was slower (an idle sender forgets)."""


class SendBudget:
    """Bounds what is unsent and unacknowledged, so that order can still be chosen late.

    The bound is twice the measured rate times the smallest round trip, within fixed limits. The
    smallest one, because the round trip of a full queue would let the bound feed itself. The
    library's congestion window is no measure: it keeps growing while the sender is the bottleneck.
    """

    def __init__(self, floor: int, ceiling: int) -> None:
        """Args: octets, `floor` <= `ceiling`."""
        self._floor = floor
        self._ceiling = ceiling
        self._rate = 0.0
        self._since: float | None = None
        self._octets = 0
        self.limit = floor
        """Octets that may be in the library now."""
        self.highest = floor
        """The largest `limit` so far: what was handed over under it may still be there."""

    def acknowledged(self, octets: int, now: float, smallest_rtt: float) -> None:
        """Count acknowledged octets at `now` (seconds); `smallest_rtt` may be infinite."""
        if self._since is None:
            self._since = now
        self._octets += octets
        elapsed = now - self._since
        if smallest_rtt == float("inf") or elapsed < max(INTERVAL, 2 * smallest_rtt):
            return
        self._rate = max(self._octets / elapsed, self._rate * DECAY)
        self._since, self._octets = now, 0
        wanted = int(2 * self._rate * smallest_rtt)
        self.limit = min(max(self._floor, wanted), self._ceiling)
        self.highest = max(self.highest, self.limit)

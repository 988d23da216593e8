"""Which datagram size to try next on a path: pure logic, driven by the transport."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvcs.quic.aioquic_backend.settings import SMALLEST_DATAGRAM

TRIES: Final = 3
"""Probes of one size that may be lost before a smaller one is tried."""

RAISE_INTERVAL: Final = 600.0
"""Seconds after which sizes that did not pass are tried again (RFC 8899's PMTU_RAISE_TIMER)."""

MAX_FALLS: Final = 3
"""Times that a size may be found to pass probes and swallow data; then it is left alone."""


class DatagramSizeProber:
    """Finds the largest datagram that a path carries, from the largest size downwards.

    The handshake runs at 1200 octets; a larger size is used only after a probe of it was
    acknowledged, so a wrong setting costs a few probes and never the connection. A path that
    stops carrying the size in use (`fell`) is searched anew, from 1200.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        """Args: UDP payloads in octets that may be tried, in any order."""
        self._sizes = sorted({size for size in sizes if size > SMALLEST_DATAGRAM}, reverse=True)
        self._wanted = list(self._sizes)
        self._probing: int | None = None
        self._lost = 0
        self._falls: dict[int, int] = {}
        self._again_at: float | None = None
        self.size = SMALLEST_DATAGRAM
        """The largest size that is known to pass."""

    def next_probe(self, now: float) -> int | None:
        """The size to probe now, in octets; None while a probe is out, and when all is known."""
        if self._probing is not None:
            return None
        if not self._wanted:
            if self._again_at is None or now < self._again_at:
                return None
            self._search()
        self._probing = self._wanted[0]
        return self._probing

    def probe_ended(self, arrived: bool, now: float) -> int | None:
        """Take the outcome of the outstanding probe; returns the size to use from now on if new."""
        size, self._probing = self._probing, None
        if size is None or not self._wanted or size != self._wanted[0]:
            return None
        if arrived:
            self.size = size
            self._wanted.clear()
        else:
            self._lost += 1
            if self._lost < TRIES:
                return None
            self._lost = 0
            del self._wanted[0]
        if not self._wanted and self._sizes and self.size < self._sizes[0]:
            self._again_at = now + RAISE_INTERVAL
        return size if arrived else None

    def fell(self) -> None:
        """Datagrams of the size in use no longer arrive: go back to 1200 and search again."""
        falls = self._falls[self.size] = self._falls.get(self.size, 0) + 1
        if falls >= MAX_FALLS and self.size in self._sizes:
            self._sizes.remove(self.size)
        self.size = SMALLEST_DATAGRAM
        self._search()

    def _search(self) -> None:
        self._wanted = [size for size in self._sizes if size > self.size]
        self._lost = 0
        self._again_at = None

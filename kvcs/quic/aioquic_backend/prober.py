"""Which datagram size to try next on a path: pure logic, driven by the transport."""

from __future__ import annotations

from typing import Final

from kvcs.quic.aioquic_backend.settings import SMALLEST_DATAGRAM

COMMON_SIZES: Final = (8952, 1452)
"""UDP payloads of jumbo frames and of plain Ethernet, below 48 octets of IPv6 and UDP headers."""

TRIES: Final = 3
"""Probes of one size that may be lost before a smaller one is tried."""


class DatagramSizeProber:
    """Finds the largest datagram that a path carries, from the wanted size downwards.

    The handshake runs at 1200 octets; a larger size is used only after a probe of it was
    acknowledged, so a wrong setting costs a few probes and never the connection.
    """

    def __init__(self, wanted: int) -> None:
        sizes = (wanted, *(size for size in COMMON_SIZES if size < wanted))
        self._sizes = [size for size in sizes if size > SMALLEST_DATAGRAM]
        self._lost = 0
        self._outstanding = False

    def next_probe(self) -> int | None:
        """The size to probe now, in octets; None while a probe is out, and when all is known."""
        if self._outstanding or not self._sizes:
            return None
        self._outstanding = True
        return self._sizes[0]

    def probe_ended(self, arrived: bool) -> int | None:
        """Take the outcome of the outstanding probe; returns the size to use from now on if new."""
        self._outstanding = False
        if not self._sizes:
            return None
        if arrived:
            size = self._sizes[0]
            self._sizes.clear()
            return size
        self._lost += 1
        if self._lost == TRIES:
            self._lost = 0
            del self._sizes[0]
        return None

"""Reaches into pacing and packet building: bursts with a floor, probes of a datagram size."""

from __future__ import annotations

from math import ceil
from typing import Final

from aioquic.quic.packet_builder import QuicPacketBuilder, QuicSentPacket
from aioquic.quic.recovery import QuicPacketPacer

BURST_PACKETS: Final = 64
"""Fewest packets that one wake-up may send.

The library lets 16 packets or a quarter of the window go at once. Timers of an event loop have a
grain of about a millisecond, so with a short delay that is a few packets per wake-up, and a
connection without loss crawls.
"""

BURST_OCTETS: Final = 1024 * 1024
"""Larger packets are as many fewer, so that a burst leaves room in the peer's receive buffer."""

LATE_SECONDS: Final = 0.001
"""A wake-up that comes late may send what the rate gives in this time, where that is more."""

LATE_PACKETS: Final = 128
"""But no more than these: a peer that asks for a large receive buffer, as ours do, gets room for
some 180 of ordinary size where its kernel keeps the default of what may be asked for."""

AWAITED_PACKETS: Final = 16
"""Packets that a wake-up by the pacer is to send, where waiting for them takes not too long."""

AWAITED_OCTETS: Final = 64 * 1024
"""Small packets are waited for up to so many octets: one call of the kernel's takes as much."""

AWAITED_SECONDS: Final = 0.002
"""Longest time for which packets are waited for."""


class BurstPacer(QuicPacketPacer):
    """Paces like the library's, but a bucket never holds less than a burst."""

    @property
    def burst(self) -> int:
        """Fewest packets that one wake-up may send."""
        return min(BURST_PACKETS, BURST_OCTETS // self._max_datagram_size)

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        """Set the rate in octets of `congestion_window` per `smoothed_rtt` seconds."""
        bucket_time = self.bucket_time
        super().update_rate(congestion_window, smoothed_rtt)
        assert self.packet_time is not None
        packets = min(LATE_PACKETS, BURST_OCTETS // self._max_datagram_size)
        late = min(LATE_SECONDS, packets * self.packet_time)
        self.bucket_max = max(self.bucket_max, self.burst * self.packet_time, late)
        self.bucket_time = min(bucket_time, self.bucket_max)

    # The library says `float`, and gives None as we do.
    def next_send_time(self, now: float) -> float | None:  # type: ignore[override]
        """When something may leave again; None where it may now.

        The library says when one packet may. A wake-up costs as much as many packets, so we wait
        for those, but no longer than `AWAITED_SECONDS` where one alone comes sooner.
        """
        at = super().next_send_time(now)
        if at is None or self.packet_time is None:
            return None
        packets = max(AWAITED_PACKETS, AWAITED_OCTETS // self._max_datagram_size)
        awaited = min(packets * self.packet_time, AWAITED_SECONDS)
        return now + max(self.packet_time, awaited)

    def packets(self, now: float) -> int:
        """Packets that may leave at `now`: as many as asking before each one would let go."""
        if self.packet_time is None:
            return self.burst
        self.update_bucket(now=now)
        return max(0, ceil(self.bucket_time / self.packet_time))

    def sent(self, packets: int, now: float) -> None:
        """Count packets that left at `now`."""
        if self.packet_time is not None:
            self.update_bucket(now=now)
            self.bucket_time = max(0.0, self.bucket_time - packets * self.packet_time)


class ProbeBuilder(QuicPacketBuilder):
    """Builds packets that are acknowledged but not counted by congestion control."""

    def flush(self) -> tuple[list[bytes], list[QuicSentPacket]]:
        """Return the datagrams and their packets."""
        datagrams, packets = super().flush()
        for packet in packets:
            packet.in_flight = False
        return datagrams, packets

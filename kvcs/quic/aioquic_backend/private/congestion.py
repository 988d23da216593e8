"""Reaches into congestion control: losses are counted, and a path that swallows is noticed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol

from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.tls import Epoch

from kvcs.quic.aioquic_backend.settings import SMALLEST_DATAGRAM

BLACK_HOLE_LOSSES: Final = 3
"""Times in a row that large packets are called lost, none arriving between, until the path is
suspected to swallow them. One burst that a full buffer drops is one or two times."""

INITIAL_DATAGRAMS: Final = 10
"""Datagrams of the initial window (RFC 9002 §7.2)."""

INITIAL_OCTETS: Final = 14_720
"""Most octets of the initial window, unless two datagrams are more (RFC 9002 §7.2)."""

LARGEST_ON_A_WIRE: Final = 10_000
"""Larger datagrams pass in one piece within a machine only, but for rare networks: jumbo frames of
Ethernet end below, those of an MTU of 9216 among them. IP over InfiniBand may carry larger ones.
"""

MAX_REMEMBERED: Final = 64
"""Numbers of large packets called lost that a late acknowledgement may still name."""


class PathWatcher(Protocol):
    """Who is told what the losses say of the datagram size in use."""

    def large_packets_suspected(self) -> None:
        """Large packets are lost: send small ones, until one tells."""

    def large_packets_cleared(self) -> None:
        """A large packet did arrive: the peer was silent, or the network was full."""

    def large_packets_condemned(self) -> None:
        """Small packets arrive and large ones do not."""


class WatchingReno(RenoCongestionControl):
    """New Reno as the library has it, which also counts losses and notices black holes.

    A black hole is a path that no longer carries datagrams of the size in use, without a word
    (RFC 8899 §4.3): small packets get through, large ones do not. Losses alone do not show it, for
    a peer that is busy for half a second looks the same; so after some of them a small packet is
    sent, and what is acknowledged then decides.
    """

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self.packets_lost = 0
        """Packets called lost since the start, those repeated at a probe time-out included."""
        self.watcher: PathWatcher | None = None
        self.suspects = False
        """Whether a small packet is to tell."""
        self._large_losses = 0
        self._large_lost: deque[int] = deque(maxlen=MAX_REMEMBERED)
        self._newest_lost = -1

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        """One packet arrived."""
        if packet.sent_bytes > SMALLEST_DATAGRAM:
            if self._large_losses:
                self._clear()
        elif self.suspects and packet.packet_number > self._newest_lost:
            self.suspects = False
            self._large_losses = 0
            self._large_lost.clear()
            if self.watcher is not None:
                self.watcher.large_packets_condemned()
        super().on_packet_acked(now=now, packet=packet)

    def on_packets_acked(self, packets: list[QuicSentPacket], now: float) -> None:
        """Several packets arrived: what `on_packet_acked` does for each, in one step.

        Args:
            packets: in the order in which they were sent, at least one.
            now: when they were acknowledged.
        """
        if self.suspects or self._large_losses:
            for packet in packets:
                self.on_packet_acked(now=now, packet=packet)
            return
        since = self._congestion_recovery_start_time
        grown = sum([packet.sent_bytes for packet in packets])
        self.bytes_in_flight -= grown
        if (packets[0].sent_time or 0.0) <= since:
            late = [packet for packet in packets if (packet.sent_time or 0.0) > since]
            grown = sum([packet.sent_bytes for packet in late])
        slow_start = grown
        if self.ssthresh is not None:
            slow_start = min(grown, max(0, self.ssthresh - self.congestion_window))
        self.congestion_window += slow_start
        self._congestion_stash += grown - slow_start
        count = self._congestion_stash // self.congestion_window
        self._congestion_stash -= count * self.congestion_window
        self.congestion_window += count * self._max_datagram_size

    def count_in(self, size: int) -> None:
        """Count in datagrams of up to `size` octets from now on.

        A window that nothing has narrowed yet is at least the initial one of that size: RFC 9002
        §7.2 has it computed anew when the size changes, and a window of less than two datagrams
        would make a round trip of each. Within a machine it is ten datagrams, however large: no
        link is shared there, and the only queue is the receive buffer of the peer, who declares
        a size that it has room for that often.
        """
        self._max_datagram_size = size
        if self.ssthresh is None:
            self.congestion_window = max(self.congestion_window, initial_window(size))

    def acknowledged(self, numbers: RangeSet) -> None:
        """The peer names these packets, among them some that were called lost, perhaps."""
        if any(number in numbers for number in self._large_lost):
            self._clear()

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        """Packets were overtaken by others that arrived: congestion."""
        lost = list(packets)
        super().on_packets_lost(now=now, packets=lost)
        self._count(lost)

    def on_packets_expired(self, *, packets: Iterable[QuicSentPacket]) -> None:
        """Packets are repeated because nothing was heard, or their keys are gone."""
        expired = list(packets)
        super().on_packets_expired(packets=expired)
        # Where keys are discarded, nothing was lost: those packets belong to the handshake.
        self._count([packet for packet in expired if packet.epoch is Epoch.ONE_RTT])

    def _clear(self) -> None:
        self._large_losses = 0
        self._large_lost.clear()
        if self.suspects:
            self.suspects = False
            if self.watcher is not None:
                self.watcher.large_packets_cleared()

    def _count(self, lost: list[QuicSentPacket]) -> None:
        self.packets_lost += len(lost)
        large = [p.packet_number for p in lost if p.sent_bytes > SMALLEST_DATAGRAM]
        if not large:
            return
        self._large_losses += 1
        self._large_lost.extend(large)
        self._newest_lost = max(self._newest_lost, *large)
        if self._large_losses >= BLACK_HOLE_LOSSES and not self.suspects:
            self.suspects = True
            if self.watcher is not None:
                self.watcher.large_packets_suspected()


def initial_window(size: int) -> int:
    """Octets that may be on the way before anything is known of a path (RFC 9002 §7.2).

    Args:
        size: largest datagram, in octets.
    """
    octets = INITIAL_DATAGRAMS * size
    return octets if size > LARGEST_ON_A_WIRE else min(octets, max(INITIAL_OCTETS, 2 * size))

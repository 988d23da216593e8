"""Reaches into congestion control: losses are counted, and a path that swallows is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.tls import Epoch

from kvcs.quic.aioquic_backend.settings import SMALLEST_DATAGRAM

BLACK_HOLE_LOSSES: Final = 3
"""Times in a row that large packets are called lost, none arriving between, until the path is
held to swallow them. One burst that a full buffer drops is one or two times."""


class WatchingReno(RenoCongestionControl):
    """New Reno as the library has it, which also counts losses and notices black holes.

    A black hole is a path that no longer carries datagrams of the size in use, without a word
    (RFC 8899 §4.3): small packets get through, large ones do not.
    """

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self.packets_lost = 0
        """Packets called lost since the start, those repeated at a probe time-out included."""
        self.on_black_hole: Callable[[], None] | None = None
        """Called when the path is held to swallow large packets."""
        self._large_losses = 0

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:
        """One packet arrived."""
        if packet.sent_bytes > SMALLEST_DATAGRAM:
            self._large_losses = 0
        super().on_packet_acked(now=now, packet=packet)

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

    def _count(self, lost: list[QuicSentPacket]) -> None:
        self.packets_lost += len(lost)
        if any(packet.sent_bytes > SMALLEST_DATAGRAM for packet in lost):
            self._large_losses += 1
            if self._large_losses >= BLACK_HOLE_LOSSES and self.on_black_hole is not None:
                self._large_losses = 0
                self.on_black_hole()

"""Reaches into acknowledgements: runs of packets of one stream are accounted for together.

The library tells each packet's stream, and congestion control, packet by packet. An ACK frame names
sixty packets at once, most of them with the consecutive octets of a few streams.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Final, cast

from aioquic.quic.packet_builder import QuicDeliveryState, QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketSpace

from kvcs.quic.aioquic_backend.private.congestion import WatchingReno
from kvcs.quic.aioquic_backend.private.flights import StreamPacket

FEWEST: Final = 3
"""Packets of a range from which on it pays to account for them together."""


def acknowledge_runs(
    numbers: RangeSet, space: QuicPacketSpace, congestion: WatchingReno, now: float
) -> None:
    """Account for packets of Objects that an ACK frame names, but for the last of each range.

    The library does the rest with that one: it measures the round trip where a packet that asked
    for an acknowledgement has one, and looks what was lost.

    Args:
        numbers: what the peer says that it has, as the frame has it.
        space: of 1-RTT packets.
        congestion: is told of all of them at once.
        now: when the frame came.
    """
    sent = cast(dict[int, Any], space.sent_packets)
    in_flight = list(sent)  # in order
    acknowledged: list[StreamPacket] = []
    for part in numbers:
        start, stop = bisect_left(in_flight, part.start), bisect_left(in_flight, part.stop)
        if stop - start >= FEWEST:
            named = [n for n in in_flight[start:stop] if type(sent[n]) is StreamPacket]
            acknowledged += [sent.pop(number) for number in named[:-1]]
    if acknowledged:
        space.ack_eliciting_in_flight -= len(acknowledged)
        congestion.on_packets_acked(cast(list[QuicSentPacket], acknowledged), now)
        _tell_streams(acknowledged)


def _tell_streams(packets: list[StreamPacket]) -> None:
    """Tell each stream what of it arrived, consecutive octets in one go."""
    sender, start, _, fin = packets[0].frames[0]
    stop = start
    for packet in packets:
        for whose, begin, end, last in packet.frames:
            if whose is not sender or begin != stop:
                sender.on_data_delivery(QuicDeliveryState.ACKED, start, stop, fin)
                sender, start = whose, begin
            stop, fin = end, last
    sender.on_data_delivery(QuicDeliveryState.ACKED, start, stop, fin)

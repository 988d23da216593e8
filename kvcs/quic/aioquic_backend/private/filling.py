"""Reaches into streams: packets are filled with pieces of streams in the fewest steps."""

from __future__ import annotations

from typing import Any, Final, cast

from aioquic.buffer import encode_uint_var
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicDeliveryHandler, QuicSentPacket
from aioquic.quic.stream import QuicStream, QuicStreamSender
from aioquic.tls import Epoch

from kvcs.quic.aioquic_backend.private.flights import (
    FIN,
    LENGTH,
    OFFSET,
    STREAM,
    TAG_OCTETS,
    Flight,
    SentFrame,
    StreamPacket,
)
from kvcs.quic.aioquic_backend.private.queue import stream_key
from kvcs.quic.aioquic_backend.private.sending import Octets
from kvcs.quic.aioquic_backend.segments import LARGEST_SEGMENT
from kvcs.quic.aioquic_backend.settings import SMALLEST_DATAGRAM

TURN_OCTETS: Final = 120 * 1024
"""Octets of one stream after which the next one has its turn; whole packets, at least one.

What a transmission brings of one stream the receiver takes in one step. With half as much nearly
each step met the end of a turn, and with datagrams of ordinary size both sides took a tenth more
processor time. It is reached with two of the largest datagrams: three of them are no better.
"""

SHORT_HEADER_OCTETS: Final = 3
"""First octet and packet number of a short header, beside the connection ID."""

LENGTH_OCTETS: Final = 4
"""Of the length of a frame that others follow: two would do up to 16,383."""

SMALLEST_PIECE: Final = 64
"""Octets of a stream that are worth a frame of their own at the end of a packet."""

FEW: Final = 0x4000_0000
"""Offsets below this are written in four octets, others in eight (RFC 9000 §16)."""

FOUR_OCTETS, EIGHT_OCTETS = 0x8000_0000, 0xC000_0000_0000_0000
"""Bits that say how long an integer is; frames may use more octets than they need."""

FILLING, FILLING_FIN = bytes((STREAM | OFFSET,)), bytes((STREAM | OFFSET | FIN,))
MEASURED, MEASURED_FIN = bytes((FILLING[0] | LENGTH,)), bytes((FILLING_FIN[0] | LENGTH,))
"""Types of frames that end their packet, and of those that others may follow."""

Acknowledgement = tuple[bytes, tuple[QuicDeliveryHandler, tuple[Any, ...]]]
"""An ACK frame, and whom to tell what became of it."""


class Filling:
    """One transmission being filled with STREAM frames."""

    def __init__(self, flight: Flight, now: float, packets: int, octets: int, size: int) -> None:
        """Begin to fill.

        Args:
            flight: takes the packets.
            now: when they are sent.
            packets: how many with STREAM frames may leave, by pacing.
            octets: how many octets of those may leave, by congestion control.
            size: largest datagram.
        """
        self._flight = flight
        self._now = now
        self._packets_left = packets
        self._octets_left = octets
        self._overhead = SHORT_HEADER_OCTETS + len(flight.peer_cid) + TAG_OCTETS
        self._size = size
        self._payload: list[Octets] = []
        self._frames: list[SentFrame] = []
        self._left = 0
        """Octets that still fit the packet that is being filled; 0 where none is."""
        self.acknowledgement: Acknowledgement | None = None
        """Goes into the first packet."""
        self.sent: dict[int, StreamPacket | QuicSentPacket] = {}
        """What was sealed, by packet number."""
        self.octets = 0
        """Octets of all datagrams."""
        self.data_packets = 0
        """Packets with STREAM frames."""
        self.data_octets = 0
        """Octets of their datagrams."""

    def open(self) -> bool:
        """Whether another frame may be written: a packet is begun where there is none."""
        if self._left:
            return True
        size = min(self._size, self._octets_left)
        # A rest of the window that is smaller than any packet waits for the next acknowledgement,
        # so that a full window does not end in crumbs.
        if self._packets_left <= 0 or size < SMALLEST_DATAGRAM:
            return False
        self._left = size - self._overhead
        if self.acknowledgement is not None:
            self._left -= len(self.acknowledgement[0])
        return True

    def close(self) -> None:
        """Seal the packet that is being filled."""
        self._left = 0
        if not self._frames:
            return
        flight = self._flight
        number = flight.next_number
        if self.acknowledgement is not None:
            self._seal_acknowledgement()
        else:
            size = flight.seal(self._payload)
            self.sent[number] = StreamPacket(number, self._now, size, self._frames)
            self.octets += size
        size = self.sent[number].sent_bytes
        self.data_packets += 1
        self.data_octets += size
        self._octets_left -= size
        self._packets_left -= 1
        self._payload, self._frames = [], []

    def finish(self) -> None:
        """Seal what is left."""
        self.close()
        if self.acknowledgement is not None:
            self._seal_acknowledgement()

    def _seal_acknowledgement(self) -> None:
        """Seal a packet that begins with the ACK frame."""
        frame, told = cast(Acknowledgement, self.acknowledgement)
        self.acknowledgement = None
        number = self._flight.next_number
        size = self._flight.seal([frame, *self._payload])
        data = StreamPacket(number, self._now, size, self._frames)
        has_data = bool(self._frames)
        self.sent[number] = QuicSentPacket(
            epoch=Epoch.ONE_RTT,
            in_flight=has_data,
            is_ack_eliciting=has_data,
            is_crypto_packet=False,
            packet_number=number,
            packet_type=QuicPacketType.ONE_RTT,
            sent_time=self._now,
            sent_bytes=size,
            delivery_handlers=[told, *data.delivery_handlers],
        )
        self.octets += size

    def turn(self, stream: QuicStream, limit: int) -> bool:
        """Write what one stream may send in one turn.

        Args:
            stream: one of ours that was written to.
            limit: offset that flow control lets it reach.

        Returns:
            Whether anything was written.
        """
        sender = stream.sender
        if len(sender._pending):
            first = sender._pending[0]
            start, stop = first.start, min(first.stop, limit)
            if start >= stop:
                return False
        elif sender._pending_eof:
            start = stop = cast(int, sender._buffer_fin)
        else:
            return False
        stream_id, end = encode_uint_var(stream_key(stream)), sender._buffer_fin
        buffer: Any = sender._buffer
        at, fin, going = self._fill_whole(sender, stream_id, start, stop), False, True
        if at > start:
            going = at < stop and at - start < TURN_OCTETS
        while going and (self._left or self.open()):
            if at < FEW:
                head = stream_id + (at | FOUR_OCTETS).to_bytes(4, "big")
            else:
                head = stream_id + (at | EIGHT_OCTETS).to_bytes(8, "big")
            room, size = self._left - 1 - len(head), stop - at
            if size >= room - LENGTH_OCTETS:
                # It fills the packet, so it needs no length.
                if room < SMALLEST_PIECE and self._frames:
                    self.close()
                    continue
                if size > room:
                    size = room
                reached = at + size
                fin = reached == end
                self._payload.append((FILLING_FIN if fin else FILLING) + head)
                self._payload += buffer.cut(at, reached)
                self._frames.append((sender, at, reached, fin))
                self.close()
            else:
                reached = at + size
                fin = reached == end
                head += (size | FOUR_OCTETS).to_bytes(LENGTH_OCTETS, "big")
                self._payload.append((MEASURED_FIN if fin else MEASURED) + head)
                if size:
                    self._payload += buffer.cut(at, reached)
                self._frames.append((sender, at, reached, fin))
                self._left -= 1 + len(head) + size
            at = reached
            going = at < stop and at - start < TURN_OCTETS
        if at > start:
            sender._pending.subtract(start, at)
            sender.highest_offset = max(sender.highest_offset, at)
        if fin:
            sender._pending_eof = False
        return at > start or fin

    def _fill_whole(self, sender: QuicStreamSender, stream_id: bytes, start: int, stop: int) -> int:
        """Fill packets with nothing but one frame of one stream, as most are, in few steps each.

        Args:
            sender: of the stream.
            stream_id: as a frame has it.
            start: offset of the first octet.
            stop: where what may be sent ends.

        Returns:
            The offset behind the last octet that was written.
        """
        size, flight = self._size, self._flight
        wide = stop >= FEW
        room = size - self._overhead - 1 - len(stream_id) - (8 if wide else 4)
        # One with the FIN is filled as others are.
        available = stop - start - (stop == sender._buffer_fin)
        count = min(
            self._packets_left,
            self._octets_left // size,
            available // room,
            -(-TURN_OCTETS // room),
        )
        if count <= 0 or self._frames or self.acknowledgement is not None:
            return start
        self._left = 0  # of a packet that was begun, where nothing is in it yet
        now, sent, first = self._now, self.sent, flight.next_number
        stop = start + count * room
        bits, octets = (EIGHT_OCTETS, 8) if wide else (FOUR_OCTETS, 4)
        buffer: Any = sender._buffer
        filling = FILLING + stream_id
        starts = range(start, stop, room)
        heads = [filling + (at | bits).to_bytes(octets, "big") for at in starts]
        if size <= LARGEST_SEGMENT:
            pieces = buffer.slices(start, room, count)
            flight.seal_all([head + piece for head, piece in zip(heads, pieces, strict=True)], size)
        else:
            for head, pieces in zip(heads, buffer.cuts(start, room, count), strict=True):
                flight.seal([head, *pieces])
        for number, at in enumerate(starts, first):
            sent[number] = StreamPacket(number, now, size, [(sender, at, at + room, False)])
        taken = count * size
        self.octets += taken
        self.data_octets += taken
        self.data_packets += count
        self._octets_left -= taken
        self._packets_left -= count
        return stop

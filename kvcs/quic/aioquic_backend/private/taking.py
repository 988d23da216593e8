"""Reaches into receiving: takes what opened packets hold, into streams and for acknowledgements.

Nearly all hold the next piece of one stream, and some the next pieces of two or an ACK frame before
them. Those are read here; every other frame is left to the library.
"""

from __future__ import annotations

from typing import Any, Final

from aioquic.quic.connection import END_STATES, QuicConnectionError, QuicReceiveContext
from aioquic.quic.events import StreamDataReceived
from aioquic.quic.recovery import MAX_ACK_RANGES, QuicPacketSpace
from aioquic.tls import Epoch

from kvcs.quic.aioquic_backend.private.flights import FIN, LENGTH, OFFSET, STREAM
from kvcs.quic.aioquic_backend.private.frames import INTEGER_MASKS, STREAM_MASK, frames_of
from kvcs.quic.aioquic_backend.private.receiving import ReceivingConnection

LONGEST_HEAD: Final = 1 + 3 * 8
"""Octets of a STREAM frame before its data, at most; a shorter payload is left to the library."""

FEW_OCTETS: Final = 1000
"""Octets of a payload that the library may copy: most so short are an ACK frame alone, which would
be looked through for nothing, a quarter of a millisecond where it names many ranges."""

Piece = tuple[int, bytes]
"""A stream's ID, and its next octets."""


class TakingConnection(ReceivingConnection):
    """A connection that takes ordinary frames itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._idle_now = -1.0
        """When the idle time-out was put off last."""

    def _next_piece(self, payload: bytes) -> Piece | None:
        """The one frame of a packet, where it holds the next octets of a stream that goes on."""
        size = len(payload)
        if size < LONGEST_HEAD or payload[0] & (STREAM_MASK | FIN) != STREAM:
            return None
        kind = payload[0]
        octets = 1 << (payload[1] >> 6)
        at = 1 + octets
        stream_id = int.from_bytes(payload[1:at], "big") & INTEGER_MASKS[octets]
        offset = 0
        if kind & OFFSET:
            octets = 1 << (payload[at] >> 6)
            offset = int.from_bytes(payload[at : at + octets], "big") & INTEGER_MASKS[octets]
            at += octets
        if kind & LENGTH:
            octets = 1 << (payload[at] >> 6)
            length = int.from_bytes(payload[at : at + octets], "big") & INTEGER_MASKS[octets]
            at += octets
            if at + length != size:
                return None
        stream = self._streams.get(stream_id)
        if stream is None or at >= size:
            return None
        receiver, limit = stream.receiver, self._local_max_data
        stop = offset + size - at
        new = stop - receiver.highest_offset
        if (
            offset != receiver._buffer_start
            or receiver._buffer
            or receiver._final_size is not None
            or receiver.is_finished
            or stop > stream.max_stream_data_local
            or new != size - at
            or limit.used + new > limit.value
        ):
            return None
        receiver._buffer_start = receiver.highest_offset = stop
        limit.used += new
        return stream_id, payload[at:]

    def _read_pieces(self, payload: bytes, space: QuicPacketSpace, number: int, now: float) -> bool:
        """Read a packet of pieces that are each what follows in its stream, as events.

        Returns:
            Whether it was one; else nothing of it has been read.
        """
        frames = frames_of(payload) if len(payload) > FEW_OCTETS else None
        if frames is None:
            return False
        limit, new = self._local_max_data, 0
        receivers = []
        for stream_id, offset, start, stop in frames.pieces:
            stream = self._streams.get(stream_id)
            new += stop - start
            reached = offset + stop - start
            if stream is None or reached > stream.max_stream_data_local:
                return False
            receiver = stream.receiver
            if (
                offset != receiver._buffer_start
                or offset != receiver.highest_offset
                or receiver._buffer
                or receiver._final_size is not None
                or receiver.is_finished
            ):
                return False
            receivers.append((receiver, reached))
        if limit.used + new > limit.value:
            return False
        begun = frames.acknowledgement
        if not begun:
            self._received(space, number, True, now)
        elif not self._read_frames(payload[:begun], space, number, now, has_pieces=True):
            return True
        limit.used += new
        for receiver, reached in receivers:
            receiver._buffer_start = receiver.highest_offset = reached
        for stream_id, _, start, stop in frames.pieces:
            octets = payload[start:stop]
            self._events.append(
                StreamDataReceived(data=octets, end_stream=False, stream_id=stream_id)
            )
        return True

    def _read_frames(
        self,
        payload: bytes,
        space: QuicPacketSpace,
        number: int,
        now: float,
        *,
        has_pieces: bool = False,
    ) -> bool:
        """Have the library read the frames of a packet; False where they end the connection.

        Args:
            payload: the frames.
            space: of 1-RTT packets.
            number: the packet's.
            now: when it came.
            has_pieces: whether pieces of streams follow in it.
        """
        context = QuicReceiveContext(
            epoch=Epoch.ONE_RTT,
            host_cid=self.host_cid,
            network_path=self._network_paths[0],
            quic_logger_frames=None,
            time=now,
            version=None,
        )
        is_ack_eliciting = False
        try:
            is_ack_eliciting, _ = self._payload_received(context, payload)
        except QuicConnectionError as exc:
            self._logger.warning(exc)
            self.close(exc.error_code, exc.frame_type, exc.reason_phrase)
        if self._state in END_STATES or self._close_pending:
            return False
        self._received(space, number, is_ack_eliciting or has_pieces, now)
        return True

    def _received(
        self, space: QuicPacketSpace, number: int, is_ack_eliciting: bool, now: float
    ) -> None:
        """Note that a packet came: for acknowledgements, duplicates and the idle time-out."""
        if now != self._idle_now:
            # What one wake-up reads all has the same time.
            self._idle_now = now
            self._close_at = now + self._idle_timeout()
        self._ack_eliciting_sent_since_receipt = False
        if number > space.largest_received_packet:
            space.largest_received_packet = number
            space.largest_received_time = now
        # Its list itself: the set looks through all of it, where most packets extend the last one.
        ranges: list[range] = space.ack_queue._RangeSet__ranges  # type: ignore[attr-defined]
        if ranges and ranges[-1].stop == number:
            ranges[-1] = range(ranges[-1].start, number + 1)
        else:
            space.ack_queue.add(number)
            if len(ranges) > MAX_ACK_RANGES:
                space.ack_queue.shift()
        space.received_packets.add(number)
        if is_ack_eliciting and space.ack_at is None:
            space.ack_at = now + self._ack_delay

    def _received_run(self, space: QuicPacketSpace, begun: int, number: int, now: float) -> None:
        """Note packets that bring what follows in a stream, as `_received` notes each.

        Args:
            space: of 1-RTT packets.
            begun: packet number of the one before them, the largest until then, which is noted.
            number: of the last of them.
            now: when they came, and it.
        """
        space.expected_packet_number = max(space.expected_packet_number, number + 1)
        self._spin_highest_pn = max(self._spin_highest_pn, number)
        space.largest_received_packet = number
        space.largest_received_time = now
        ranges: list[range] = space.ack_queue._RangeSet__ranges  # type: ignore[attr-defined]
        ranges[-1] = range(ranges[-1].start, number + 1)
        window = space.received_packets
        window._received.update(range(begun + 1, number + 1))
        window._lower = max(window._lower, number + 1 - window._size)
        if len(window._received) > 2 * window._size:
            window._received = {known for known in window._received if known >= window._lower}

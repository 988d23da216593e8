"""Reaches into sending: octets of Objects leave in packets of their own, built the short way.

The library's loop asks, for each packet, what might be due of twenty kinds of frames. Here it is
asked once for each transmission; then the streams of Objects fill packets of their own.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final, cast

from aioquic.buffer import encode_uint_var
from aioquic.quic.connection import NetworkAddress, QuicConnectionState
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.stream import QuicStream
from aioquic.tls import Epoch

from kvcs.quic.aioquic_backend.private.congestion import WatchingReno
from kvcs.quic.aioquic_backend.private.flights import Flight, SentFrame, StreamPacket
from kvcs.quic.aioquic_backend.private.incoming import IncomingConnection
from kvcs.quic.aioquic_backend.private.packets import BurstPacer
from kvcs.quic.aioquic_backend.private.queue import (
    WatchedSender,
    carries_objects,
    is_idle,
    stream_key,
)
from kvcs.quic.aioquic_backend.private.sending import Octets
from kvcs.quic.aioquic_backend.settings import SMALLEST_DATAGRAM

TURN_OCTETS: Final = 16 * 1024
"""Octets of one stream after which the next one has its turn; whole packets, at least one."""

SHORT_HEADER_OCTETS: Final = 3
"""First octet and packet number of a short header, beside the connection ID."""

TAG_OCTETS: Final = 16
"""What each of TLS 1.3's ciphers adds to a packet."""

STREAM: Final = 0x08
"""Type of a STREAM frame, and the bits that say what it has (RFC 9000 §19.8)."""
OFFSET, LENGTH, FIN = 0x04, 0x02, 0x01

LENGTH_OCTETS: Final = 2
LITTLE: Final = 4096
"""Fewer octets of Objects than this share packets with the other frames that are due."""

MANY: Final = 16
"""Waiting streams that are not little."""

MAX_UNKNOWN: Final = 30_000
"""Packets beyond the largest that was acknowledged."""

SMALLEST_PIECE: Final = 64
"""Octets of a stream that are worth a frame of their own at the end of a packet."""

FEW: Final = 0x4000_0000
"""Offsets below this are written in four octets, others in eight (RFC 9000 §16)."""

TWO_OCTETS, FOUR_OCTETS, EIGHT_OCTETS = 0x4000, 0x8000_0000, 0xC000_0000_0000_0000
"""Bits that say how long an integer is; frames may use more octets than they need."""


class Filling:
    """One transmission being filled with STREAM frames."""

    def __init__(self, flight: Flight, now: float, packets: int, octets: int, size: int) -> None:
        """Begin to fill.

        Args:
            flight: takes the packets.
            now: when they are sent.
            packets: how many may leave, by pacing.
            octets: how many may leave, by congestion control.
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
        self.sent: dict[int, StreamPacket] = {}
        """What was sealed, by packet number."""
        self.octets = 0
        """Octets of all datagrams."""

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
        return True

    def close(self) -> None:
        """Seal the packet that is being filled."""
        if not self._frames:
            self._left = 0
            return
        number = self._flight.next_number
        size = self._flight.seal(self._payload)
        self.sent[number] = StreamPacket(number, self._now, size, self._frames)
        self.octets += size
        self._octets_left -= size
        self._packets_left -= 1
        self._payload, self._frames, self._left = [], [], 0

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
        stream_id = encode_uint_var(stream_key(stream))
        at, fin, going = start, False, True
        while going and self.open():
            head = stream_id + _offset(at)
            room, size = self._left - 1 - len(head), stop - at
            if room < min(size, SMALLEST_PIECE) + LENGTH_OCTETS:
                self.close()
                continue
            kind = STREAM | OFFSET
            fills = size >= room - LENGTH_OCTETS  # then it needs no length, being the last frame
            if fills:
                size = min(size, room)
            else:
                kind |= LENGTH
                head += (size | TWO_OCTETS).to_bytes(LENGTH_OCTETS, "big")
            fin = at + size == sender._buffer_fin
            self._payload.append(bytes((kind | fin,)) + head)
            if size:
                self._payload += sender._buffer.cut(at, at + size)  # type: ignore[attr-defined]
            self._frames.append((sender, at, at + size, fin))
            at += size
            going = at < stop and at - start < TURN_OCTETS
            self._left -= 1 + len(head) + size
            if fills:
                self.close()
        if at > start:
            sender._pending.subtract(start, at)
            sender.highest_offset = max(sender.highest_offset, at)
        if fin:
            sender._pending_eof = False
        return at > start or fin


def _offset(offset: int) -> bytes:
    """An offset in as many octets for all packets but those far out."""
    if offset < FEW:
        return (offset | FOUR_OCTETS).to_bytes(4, "big")
    return (offset | EIGHT_OCTETS).to_bytes(8, "big")


class OutgoingConnection(IncomingConnection):
    """A connection whose streams of Objects fill packets of their own."""

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, NetworkAddress]]:
        """Build what may leave at `now`: frames of all kinds first, then those of Objects."""
        if not self._objects_go_apart():
            return super().datagrams_to_send(now)
        objects: list[QuicStream] = []
        others: list[QuicStream] = []
        for stream in self._active:
            (objects if _is_plain(stream) else others).append(stream)
        datagrams: list[tuple[bytes, NetworkAddress]] = []
        if others or self._frames_are_due(now):
            # Those that wait come up as others are through.
            soon = [*objects, *islice(self._waiting.values(), MANY)]
            if len(self._waiting) < MANY and _octets(soon) < LITTLE:
                return super().datagrams_to_send(now)
            self._active = others
            try:
                datagrams = super().datagrams_to_send(now)
            finally:
                self._active = objects + self._active
        else:
            self._pacing_at = None
        if self._active:
            datagrams += self._fill(now)
        return datagrams

    def _objects_go_apart(self) -> bool:
        """Whether nothing but data is to be thought of: no handshake, no new path, no new keys."""
        return (
            self._handshake_confirmed
            and self._state is QuicConnectionState.CONNECTED
            and not self._close_pending
            and not self._probe_pending
            and self._quic_logger is None
            and self._network_paths[0].is_validated
            and not self._cryptos[Epoch.ONE_RTT]._update_key_requested
        )

    def _frames_are_due(self, now: float) -> bool:
        """Whether any frame but those of Objects may be due."""
        space = self._spaces[Epoch.ONE_RTT]
        if (
            (space.ack_at is not None and space.ack_at <= now)
            or self._known.due
            or self.data_limit_is_due()
            or self._datagrams_pending
            or self._ping_pending
            or self._handshake_done_pending
            or self._retire_connection_ids
            or self._streams_blocked_pending
            or self._network_paths[0].remote_challenges
            or len(self._network_paths) > 1
            or self._remote_preferred_address is not None
            or not self._crypto_streams[Epoch.ONE_RTT].sender.buffer_is_empty
        ):
            return True
        if self._local_max_data.value != self._local_max_data.sent:
            return True
        for limit in (self._local_max_streams_bidi, self._local_max_streams_uni):
            # The library announces those when the peer has fewer left than it would get.
            if limit.sent - limit.used < limit.value - limit.sent:
                return True
        return any(not connection_id.was_sent for connection_id in self._host_cids)

    def _fill(self, now: float) -> list[tuple[bytes, NetworkAddress]]:
        """Fill packets from the streams of Objects in turn, until something says stop."""
        pacer = cast(BurstPacer, self._loss._pacer)
        congestion = cast(WatchingReno, self._loss._cc)
        if (packets := pacer.packets(now)) == 0:
            self._pacing_at = pacer.next_send_time(now)
            return []
        # Packet numbers are sent in two octets, which tell apart half of what they count.
        unknown = self._packet_number - self._spaces[Epoch.ONE_RTT].largest_acked_packet
        packets = min(packets, MAX_UNKNOWN - unknown)
        keys = self._cryptos[Epoch.ONE_RTT]
        flight = Flight(keys, self._peer_cid.cid, self._spin_bit, self._packet_number)
        window = congestion.congestion_window - congestion.bytes_in_flight
        filling = Filling(flight, now, packets, window, self._max_datagram_size)
        self._take_turns(filling)
        filling.close()
        if not filling.sent:
            return []
        pacer.sent(len(filling.sent), now)
        if self._active:
            self._pacing_at = pacer.next_send_time(now)
        self._packet_number = flight.next_number
        self._register(filling, now)
        path = self._network_paths[0]
        path.bytes_sent += filling.octets
        return [(data, path.addr) for data in flight.datagrams()]

    def _take_turns(self, filling: Filling) -> None:
        turns = deque(stream for stream in self._active if _is_plain(stream))
        left = [stream for stream in self._active if not _is_plain(stream)]
        while turns and filling.open():
            stream = turns.popleft()
            sender = stream.sender
            sent_before = sender.highest_offset
            limit = min(
                sent_before + self._remote_max_data - self._remote_max_data_used,
                stream.max_stream_data_remote,
            )
            wrote = filling.turn(stream, limit)
            self._remote_max_data_used += sender.highest_offset - sent_before
            if is_idle(stream):
                sender.buffer_is_empty = True
                left.append(stream)  # it is parked, or what it waits for is looked at
                if self._waiting and stream_key(stream) in self._served:
                    del self._served[stream_key(stream)]
                    self._active = []
                    self._serve()
                    turns.extend(self._active)
            elif wrote:
                turns.append(stream)
            elif filling.open():
                left.append(stream)  # flow control holds it back
            else:
                turns.appendleft(stream)  # nothing more may leave: it is the next to begin
        self._streams_queue = [*turns, *left]

    def _register(self, filling: Filling, now: float) -> None:
        """Note what was sent: for loss recovery, congestion control and the idle time-out."""
        space = self._spaces[Epoch.ONE_RTT]
        space.sent_packets.update(cast(dict[int, QuicSentPacket], filling.sent))
        space.ack_eliciting_in_flight += len(filling.sent)
        self._loss._time_of_last_sent_ack_eliciting_packet = now
        self._loss._cc.bytes_in_flight += filling.octets
        if not self._ack_eliciting_sent_since_receipt:
            self._close_at = now + self._idle_timeout()
            self._ack_eliciting_sent_since_receipt = True


def _octets(streams: list[QuicStream]) -> int:
    """Octets that wait to be sent, or to be sent again."""
    return sum(part.stop - part.start for stream in streams for part in stream.sender._pending)


def _is_plain(stream: QuicStream) -> bool:
    """Whether nothing of a stream is to be sent but octets of Objects, and perhaps its FIN."""
    sender = stream.sender
    return (
        type(sender) is WatchedSender
        and carries_objects(stream)
        and sender._reset_error_code is None
        and not sender.is_finished
    )

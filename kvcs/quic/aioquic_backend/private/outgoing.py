"""Reaches into sending: octets of Objects leave in packets of their own, built the short way.

The library's loop asks, for each packet, what might be due of twenty kinds of frames. Here it is
asked once for each transmission; then the streams of Objects fill packets of their own.
"""

from __future__ import annotations

from typing import Final, cast

# The library gives it here and does not say so, as strict typing asks.
from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.quic.connection import QuicConnectionState
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import QuicFrameType, push_ack_frame
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.stream import QuicStream
from aioquic.tls import Epoch

from kvcs.quic.aioquic_backend.ports import Datagrams
from kvcs.quic.aioquic_backend.private.congestion import WatchingReno
from kvcs.quic.aioquic_backend.private.filling import TURN_OCTETS, Acknowledgement, Filling
from kvcs.quic.aioquic_backend.private.flights import Flight
from kvcs.quic.aioquic_backend.private.incoming import IncomingConnection
from kvcs.quic.aioquic_backend.private.packets import BurstPacer
from kvcs.quic.aioquic_backend.private.queue import (
    SERVED,
    RankedStream,
    is_idle,
    is_plain,
    stream_key,
)
from kvcs.quic.aioquic_backend.settings import SMALLEST_DATAGRAM

LITTLE: Final = 4096
"""Fewer octets of Objects than this share packets with the other frames that are due."""

MANY: Final = 16
"""Waiting streams that are not little."""

MAX_UNKNOWN: Final = 30_000
"""Packets beyond the largest that was acknowledged."""

KEY_PACKETS: Final = 1 << 22
"""Packets under one key, after which both sides take the next; AES-GCM may seal twice as many
(RFC 9001 §6.6)."""

ACK_OCTETS: Final = 1000
"""Octets of an ACK frame, at most; older ranges are left out."""

ACKS_WITHOUT_ANSWER: Final = 8
"""One in so many packets asks for an answer to our acknowledgements, as the library has it."""


class OutgoingConnection(IncomingConnection):
    """A connection whose streams of Objects fill packets of their own."""

    _sending_key: object = None
    """What packets are sealed with, and the number of the first one that was."""
    _key_begun = 0
    _size_of_objects = SMALLEST_DATAGRAM
    """Largest datagram of streams of Objects, which we fill; the library fills all others."""

    # The library gives each datagram for itself; only our driver calls this, which takes trains.
    def datagrams_to_send(self, now: float) -> Datagrams:  # type: ignore[override]
        """Build what may leave at `now`: frames of all kinds first, then those of Objects."""
        if self._handshake_confirmed:
            # Before a way is taken: the library alone updates keys, with the next packet it seals.
            self._count_under(self._cryptos[Epoch.ONE_RTT])
        self._put_plain_in_order()
        if not self._objects_go_apart():
            return self._filled_by_library(now)
        datagrams: Datagrams = []
        if self._active or self._frames_are_due(now):
            if len(self._waiting) < MANY and self._waiting_octets() < LITTLE:
                return self._filled_by_library(now)
            datagrams = list(super().datagrams_to_send(now))
        else:
            self._pacing_at = None
        ack_at = self._spaces[Epoch.ONE_RTT].ack_at
        if self._waiting or (ack_at is not None and ack_at <= now):
            datagrams += self._fill(now)
        return datagrams

    def _put_plain_in_order(self) -> None:
        """Streams of Objects that the library was to look at wait in their places again.

        Those of which nothing is to be sent it need not look at: each frame of the peer that the
        library has read brings its stream here.
        """
        if not self._active:
            return
        others: list[QuicStream] = []
        for stream in self._active:
            if is_idle(stream):
                self._parked.add(stream_key(stream))
            elif is_plain(stream):
                self._put_in_order(stream)
            else:
                others.append(stream)
        self._active = others

    def _filled_by_library(self, now: float) -> Datagrams:
        """Have the library build packets of all frames, those of Objects among them."""
        self._library_serves = True
        try:
            self._serve(SERVED)
            return list(super().datagrams_to_send(now))
        finally:
            self._library_serves = False
            self._passed.clear()

    def _waiting_octets(self) -> int:
        """Octets of Objects that wait to be sent, or to be sent again."""
        streams = [ranked.stream for ranked in self._waiting.values()]
        return sum(part.stop - part.start for stream in streams for part in stream.sender._pending)

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
        """Whether any frames may be due but acknowledgements and those of Objects."""
        space = self._spaces[Epoch.ONE_RTT]
        if (
            self._known.due
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
        if (
            self._packet_number % ACKS_WITHOUT_ANSWER == 0
            and len(space.ack_queue) > 1
            and space.ack_at is not None
            and space.ack_at <= now
        ):
            return True
        for limit in (self._local_max_streams_bidi, self._local_max_streams_uni):
            # The library announces those when the peer has fewer left than it would get.
            if limit.sent - limit.used < limit.value - limit.sent:
                return True
        return any(not connection_id.was_sent for connection_id in self._host_cids)

    def _fill(self, now: float) -> Datagrams:
        """Fill packets from the streams of Objects in turn, until something says stop."""
        pacer = cast(BurstPacer, self._loss._pacer)
        congestion = cast(WatchingReno, self._loss._cc)
        # Packet numbers are sent in two octets, which tell apart half of what they count.
        unknown = self._packet_number - self._spaces[Epoch.ONE_RTT].largest_acked_packet
        packets = min(pacer.packets(now), MAX_UNKNOWN - unknown)
        window = congestion.congestion_window - congestion.bytes_in_flight
        keys = self._cryptos[Epoch.ONE_RTT]
        flight = Flight(keys, self._peer_cid.cid, self._spin_bit, self._packet_number)
        filling = Filling(flight, now, packets, window, self._size_of_objects)
        filling.acknowledgement = self._acknowledgement(now)
        blocked = self._take_turns(filling) if packets > 0 else []
        filling.finish()
        if filling.data_packets:
            pacer.sent(filling.data_packets, now)
        if self._waiting:
            self._pacing_at = pacer.next_send_time(now)
        for ranked in blocked:
            self._put_back(ranked, first=False)
        if not filling.sent:
            return []
        self._packet_number = flight.next_number
        self._register(filling, now)
        path = self._network_paths[0]
        path.bytes_sent += filling.octets
        return [(data, path.addr) for data in flight.datagrams()]

    def _count_under(self, keys: CryptoPair) -> None:
        """Ask for the next keys once these have sealed enough.

        Not before the peer acknowledged a packet under these (RFC 9001 §6.1).
        """
        if keys.send.aead is not self._sending_key:
            self._sending_key, self._key_begun = keys.send.aead, self._packet_number
        elif (
            self._packet_number - self._key_begun >= KEY_PACKETS
            and self._spaces[Epoch.ONE_RTT].largest_acked_packet >= self._key_begun
        ):
            self.request_key_update()

    def _acknowledgement(self, now: float) -> Acknowledgement | None:
        """The ACK frame that is due."""
        space = self._spaces[Epoch.ONE_RTT]
        if space.ack_at is None or space.ack_at > now:
            return None
        delay = int((now - cast(float, space.largest_received_time)) * 1_000_000)
        frame = Buffer(capacity=ACK_OCTETS)
        frame.push_uint_var(QuicFrameType.ACK)
        push_ack_frame(
            frame, space.ack_queue, delay >> self._local_ack_delay_exponent, ACK_OCTETS - 1
        )
        space.ack_at = None
        return frame.data, (self._on_ack_delivery, (space, space.largest_received_packet))

    def _take_turns(self, filling: Filling) -> list[RankedStream]:
        """Fill packets from the streams in order; returns those that flow control holds back.

        The one that stands first goes on while it has octets; equals have turns, which a full
        window interrupts and does not end.
        """
        blocked: list[RankedStream] = []
        alone: RankedStream | None = None
        while filling.open():
            ranked = self._next_in_order() if alone is None else alone
            if ranked is None:
                break
            alone = None
            stream = ranked.stream
            sender = stream.sender
            begun, sent_before = sender.next_offset, sender.highest_offset
            limit = min(
                sent_before + self._remote_max_data - self._remote_max_data_used,
                stream.max_stream_data_remote,
            )
            wrote = filling.turn(stream, ranked.alike(limit))
            self._remote_max_data_used += sender.highest_offset - sent_before
            ranked.used += sender.next_offset - begun
            if is_idle(stream):
                sender.buffer_is_empty = True
                ranked.used = 0
                self._parked.add(stream_key(stream))
            elif wrote and not self._waiting and filling.open():
                alone = ranked
            elif wrote or not filling.open():
                self._put_back(ranked, first=ranked.used < TURN_OCTETS)
            else:
                blocked.append(ranked)
        return blocked

    def _register(self, filling: Filling, now: float) -> None:
        """Note what was sent: for loss recovery, congestion control and the idle time-out."""
        space = self._spaces[Epoch.ONE_RTT]
        space.sent_packets.update(cast(dict[int, QuicSentPacket], filling.sent))
        if not filling.data_packets:
            return
        space.ack_eliciting_in_flight += filling.data_packets
        self._loss._time_of_last_sent_ack_eliciting_packet = now
        self._loss._cc.bytes_in_flight += filling.data_octets
        if not self._ack_eliciting_sent_since_receipt:
            self._close_at = now + self._idle_timeout()
            self._ack_eliciting_sent_since_receipt = True

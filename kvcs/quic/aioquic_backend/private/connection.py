"""The library's connection as the transport drives it: send accounting, the path, the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hmac import compare_digest
from typing import Any, Final, cast

# The library gives it here and does not say so, as strict typing asks.
from aioquic.buffer import Buffer, encode_uint_var, size_uint_var  # type: ignore[attr-defined]
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import (
    END_STATES,
    NetworkAddress,
    QuicConnectionError,
    QuicConnectionState,
    QuicReceiveContext,
)
from aioquic.quic.events import ConnectionTerminated
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicFrameType,
    QuicPacketType,
    pull_quic_transport_parameters,
)
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStreamSender
from aioquic.tls import Epoch

from kvcs.errors import UsageError
from kvcs.quic.aioquic_backend.private.acknowledging import acknowledge_runs
from kvcs.quic.aioquic_backend.private.authentication import Clients, require_certificate
from kvcs.quic.aioquic_backend.private.congestion import PathWatcher, WatchingReno
from kvcs.quic.aioquic_backend.private.filling import SHORT_HEADER_OCTETS
from kvcs.quic.aioquic_backend.private.flights import TAG_OCTETS
from kvcs.quic.aioquic_backend.private.incoming import FIXED_BIT, LONG_HEADER
from kvcs.quic.aioquic_backend.private.outgoing import OutgoingConnection
from kvcs.quic.aioquic_backend.private.packets import BurstPacer, ProbeBuilder
from kvcs.quic.aioquic_backend.private.sending import Octets, SendBuffer
from kvcs.quic.aioquic_backend.settings import (
    LARGEST_DATAGRAM,
    LARGEST_UNDECLARED,
    QuicSettings,
)

MAX_REASON_OCTETS: Final = 512
"""A longer reason might not fit a CONNECTION_CLOSE, and the library raises while it builds it."""

NEVER_SENT: Final = "a packet is acknowledged that was never sent"

STATELESS_RESET: Final = "the peer knows nothing of this connection any more (stateless reset)"
SHORTEST_RESET, TOKEN_OCTETS = 21, 16
"""Octets of a stateless reset, at least, and of the token that ends it (RFC 9000 §10.3)."""

MAX_UDP_PAYLOAD_SIZE: Final = 0x03
"""ID of the transport parameter (RFC 9000 §18.2)."""

MAX_PENDING_DATAGRAMS: Final = 256
"""DATAGRAM frames that may wait in the library, whose own queue has no limit."""


class Connection(OutgoingConnection):
    """One QUIC connection with send accounting and bounded receive credit."""

    def __init__(
        self,
        *,
        configuration: QuicConfiguration,
        settings: QuicSettings,
        original_destination_connection_id: bytes | None = None,
        retry_source_connection_id: bytes | None = None,
        clients: Clients | None = None,
        reset_token: Callable[[bytes], bytes] | None = None,
        takes: int | None = None,
    ) -> None:
        """Make a connection.

        Args:
            configuration: of the library.
            settings: named numbers.
            original_destination_connection_id: of a client's first flight, on servers.
            retry_source_connection_id: on servers that sent a Retry.
            clients: whose certificates a server accepts.
            reset_token: the stateless reset token of a connection ID, on servers.
            takes: largest UDP payload in octets to declare; None declares nothing.
        """
        self._clients = clients
        self._takes = takes
        self._reset_token = reset_token
        super().__init__(
            configuration=configuration,
            settings=settings,
            original_destination_connection_id=original_destination_connection_id,
            retry_source_connection_id=retry_source_connection_id,
        )
        self._name_reset_tokens()
        self._senders: dict[int, QuicStreamSender] = {}
        self._held = 0
        self._fins = 0
        self._data_credit = 0
        self.peer_closed = False
        self.largest_taken = LARGEST_UNDECLARED
        """Largest UDP payload that the peer takes, as far as it says, and that we can build."""
        self._loss._pacer = BurstPacer(max_datagram_size=configuration.max_datagram_size)
        self._loss._cc = self._congestion = WatchingReno(
            max_datagram_size=configuration.max_datagram_size
        )

    # What we may send.

    @property
    def held(self) -> int:
        """Stream octets in the library, unsent or unacknowledged, as of the last `measure`."""
        return self._held

    @property
    def held_streams(self) -> int:
        """Streams that hold such octets or a FIN."""
        return len(self._senders)

    @property
    def fins(self) -> int:
        """FINs written and not acknowledged, on streams that hold no octets any more."""
        return self._fins

    @property
    def data_credit(self) -> int:
        """Octets that the peer's connection window lets us add to what is held."""
        return self._data_credit

    def measure(self) -> int:
        """Account for what was acknowledged; returns how many octets since the last call.

        Costs one step for each stream that still holds octets, not for each stream ever opened.
        """
        held = unsent = dropped = fins = 0
        for stream_id, sender in tuple(self._senders.items()):
            size = sender._buffer_stop - sender._buffer_start
            if sender._reset_error_code is not None:
                # Nothing of it is sent again, yet the library keeps it until the reset is heard.
                sender._buffer = bytearray()
                dropped += size
                del self._senders[stream_id]
            elif not size:
                if sender._buffer_fin is None or sender.is_finished:
                    del self._senders[stream_id]
                else:
                    fins += 1
            else:
                held += size
                unsent += sender._buffer_stop - sender.highest_offset
        acknowledged = self._held - held - dropped
        self._held, self._fins = held, fins
        self._data_credit = self._remote_max_data - self._remote_max_data_used - unsent
        return acknowledged

    def stream_credit(self, stream_id: int) -> int:
        """Octets that the peer lets one stream take beyond what it holds; 0 when it has ended."""
        stream = self._streams.get(stream_id)
        unidirectional = bool(stream_id & 2)
        if stream is None:
            if not self._is_ours(stream_id) or stream_id < self._next_stream_id(unidirectional):
                return 0
            if stream_id // 4 >= self._remote_streams(unidirectional):
                return 0
            if unidirectional:
                return self._remote_max_stream_data_uni
            return self._remote_max_stream_data_bidi_remote
        sender = stream.sender
        if (
            stream.is_blocked
            or sender.is_finished
            or sender._buffer_fin is not None
            or sender._reset_error_code is not None
        ):
            return 0
        return max(0, stream.max_stream_data_remote - sender._buffer_stop)

    def streams_credit(self, unidirectional: bool) -> int:
        """Streams that the peer lets us open now."""
        opened = self._next_stream_id(unidirectional) // 4
        return max(0, self._remote_streams(unidirectional) - opened)

    def write(self, stream_id: int, parts: Iterable[Octets], fin: bool) -> None:
        """Queue octets on a stream; quiet where the stream was reset or is over.

        They are not copied, and must not change until they are acknowledged.

        Raises:
            UsageError: the stream is not ours to write, its ID is out of order, or it had a FIN.
        """
        stream = self._streams.get(stream_id)
        if stream is None:
            if not self._may_open(stream_id):
                return
        elif stream.sender._reset_error_code is not None:
            # The peer's STOP_SENDING is answered by the library before we hear of it.
            return
        elif stream.sender._buffer_fin is not None:
            raise UsageError(f"stream {stream_id} has had its FIN: nothing can follow")
        sender = self._get_or_create_stream_for_send(stream_id).sender
        buffer: Any = sender._buffer
        if not isinstance(buffer, SendBuffer):
            buffer = sender._buffer = cast(Any, SendBuffer())  # nothing was written before
        size = buffer.extend(parts)
        if size:
            # What the library's `write` does but for the octets themselves.
            stop = sender._buffer_stop + size
            sender.buffer_is_empty = False
            sender._pending.add(sender._buffer_stop, stop)
            sender._buffer_stop = stop
        if fin:
            sender.write(b"", end_stream=True)
        if size or fin:
            self._senders[stream_id] = sender
            self._held += size
            self._fins += fin and not size
            self._data_credit -= size

    def abort_sending(self, stream_id: int, code: int) -> None:
        """Reset our direction; quiet when it has ended.

        Raises:
            UsageError: the stream is not ours to reset, or its ID is out of order.
        """
        if stream_id in self._streams:
            if not self._stream_can_send(stream_id):
                raise UsageError(f"stream {stream_id} belongs to the peer: it cannot be reset")
        elif not self._may_open(stream_id):
            return
        self.reset_stream(stream_id, code)
        self._touch(stream_id)  # it need not wait for its turn

    def largest_datagram(self) -> int:
        """Octets that one DATAGRAM frame can carry now; 0 where the peer takes none.

        A larger one would never fit a packet and would block all behind it.
        """
        packet = SHORT_HEADER_OCTETS + len(self._peer_cid.cid) + TAG_OCTETS
        frame = min(self._max_datagram_size - packet, self._remote_max_datagram_frame_size or 0)
        return max(0, frame - 1 - size_uint_var(max(0, frame)))

    def offer_datagram(self, data: bytes) -> bool:
        """Queue a DATAGRAM frame; False where it is too large or too many wait."""
        if len(data) > self.largest_datagram():
            return False
        if len(self._datagrams_pending) >= MAX_PENDING_DATAGRAMS:
            return False
        self.send_datagram_frame(data)
        return True

    # Connection IDs.

    def _name_reset_tokens(self) -> None:
        """Give our connection IDs tokens that follow from them, before the peer is told of either.

        The library's are random: only who has the connection could tell that it is gone.
        """
        if self._reset_token is not None:
            for each in self._host_cids:
                each.stateless_reset_token = self._reset_token(each.cid)

    def _replenish_connection_ids(self) -> None:
        super()._replenish_connection_ids()
        self._name_reset_tokens()

    # The end of the connection.

    @property
    def close_event(self) -> ConnectionTerminated | None:
        """Why the connection ends, known before the closing period is over."""
        return self._close_event

    @property
    def close_is_pending(self) -> bool:
        """Whether the next transmission is the CONNECTION_CLOSE."""
        return self._close_pending

    @property
    def has_ended(self) -> bool:
        """Whether nothing is received any more."""
        return self._state in END_STATES

    @property
    def heard_nothing(self) -> bool:
        """Whether no packet could be read yet."""
        return self._state is QuicConnectionState.FIRSTFLIGHT

    def close_application(self, code: int, reason: str) -> None:
        """Close with an application code."""
        super().close(code, None, _fitting(reason))

    def close(
        self, error_code: int = 0, frame_type: int | None = None, reason_phrase: str = ""
    ) -> None:
        """Close with a transport error, as the library does when the peer breaks a rule."""
        if frame_type is None:
            # For a frame whose type it cannot read it passes none, which means an application code.
            frame_type = QuicFrameType.PADDING
        super().close(error_code, frame_type, _fitting(reason_phrase))

    def _handle_connection_close_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        # The event does not tell who closed.
        open_until_now = self._close_event is None
        super()._handle_connection_close_frame(context, frame_type, buf)
        self.peer_closed = self.peer_closed or open_until_now

    def _leave(self, data: bytes, addr: NetworkAddress, now: float) -> None:
        if not self._is_stateless_reset(data, addr):
            super()._leave(data, addr, now)
            return
        # The library issues tokens and never looks whether one comes back.
        self._close_event = ConnectionTerminated(
            QuicErrorCode.INTERNAL_ERROR, QuicFrameType.PADDING, STATELESS_RESET
        )
        self.peer_closed = True
        self._close_begin(is_initiator=False, now=now)

    def _is_stateless_reset(self, data: bytes, addr: NetworkAddress) -> bool:
        """Whether the peer says that it has forgotten this connection (RFC 9000 §10.3.1)."""
        return (
            len(data) >= SHORTEST_RESET
            and data[0] & (LONG_HEADER | FIXED_BIT) == FIXED_BIT
            and self._state is QuicConnectionState.CONNECTED
            and self._network_paths[0].addr == addr
            and compare_digest(data[-TOKEN_OCTETS:], self._peer_cid.stateless_reset_token or b"")
        )

    # Facts of the path.

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        if self._clients is not None:
            require_certificate(self.tls, self._clients)

    def _serialize_transport_parameters(self) -> bytes:
        parameters = super()._serialize_transport_parameters()
        if self._takes is None:
            return parameters
        taken = encode_uint_var(self._takes)  # the library never declares this one
        return parameters + bytes((MAX_UDP_PAYLOAD_SIZE, len(taken))) + taken

    def _parse_transport_parameters(self, data: bytes, from_session_ticket: bool = False) -> None:
        super()._parse_transport_parameters(data, from_session_ticket)
        # The library checks this one and forgets it (RFC 9000 §18.2).
        taken = pull_quic_transport_parameters(Buffer(data=data)).max_udp_payload_size
        if taken is not None:
            self.largest_taken = min(taken, LARGEST_DATAGRAM)

    @property
    def handshake_confirmed(self) -> bool:
        """Whether both peers are known to be done with the handshake."""
        return self._handshake_confirmed

    @property
    def effective_idle_timeout(self) -> float:
        """Seconds after which silence ends the connection: the smaller of both peers'."""
        return self._idle_timeout()

    @property
    def smallest_rtt(self) -> float:
        """Smallest round trip measured, in seconds; infinite before the first."""
        return self._loss._rtt_min

    @property
    def smoothed_rtt(self) -> float | None:
        """Round trip in seconds; None before the first was measured."""
        return self._loss._rtt_smoothed if self._loss._rtt_initialized else None

    @property
    def datagram_size(self) -> int:
        """Largest UDP payload that is sent now."""
        return self._size_of_objects

    @property
    def path_is_validated(self) -> bool:
        """Whether the peer is known to be at the address that we send to."""
        return self._network_paths[0].is_validated

    @property
    def congestion_window(self) -> int:
        """Octets that may be on the way at once."""
        return self._loss.congestion_window

    @property
    def octets_in_flight(self) -> int:
        """Octets on the way, which the peer has not acknowledged."""
        return self._loss.bytes_in_flight

    @property
    def packets_lost(self) -> int:
        """Packets called lost since the start."""
        return self._congestion.packets_lost

    def restart_timeouts(self) -> None:
        """Wait no longer than at first for an answer: the peer was heard from elsewhere.

        Probes to its old address doubled the time-out each time.
        """
        self._loss._pto_count = 0

    def watch_path(self, watcher: PathWatcher) -> None:
        """Tell `watcher` when datagrams of the size in use seem to arrive no longer."""
        self._congestion.watcher = watcher
        on_ack_received = self._loss.on_ack_received

        def received(
            *, ack_rangeset: RangeSet, space: QuicPacketSpace, now: float, **facts: Any
        ) -> None:
            if ack_rangeset.bounds().stop > self._packet_number:
                # The library takes it, and calls all lost that is on the way (RFC 9000 §13.1).
                raise QuicConnectionError(
                    QuicErrorCode.PROTOCOL_VIOLATION, QuicFrameType.ACK, NEVER_SENT
                )
            if self._congestion.suspects:
                # The library forgets packets that it called lost.
                self._congestion.acknowledged(ack_rangeset)
            acknowledge_runs(ack_rangeset, space, self._congestion, now)
            on_ack_received(ack_rangeset=ack_rangeset, space=space, now=now, **facts)

        # A method of this one object: the library makes its recovery itself.
        self._loss.on_ack_received = received  # type: ignore[method-assign]

    def set_datagram_size(self, size: int) -> None:
        """Send datagrams of up to `size` octets from now on.

        Those that the library fills stay smaller where it could not write their frames. Pacing and
        congestion control count in them. DATAGRAM frames that no longer fit are dropped: they
        would block all behind them.
        """
        self._size_of_objects = size
        self._max_datagram_size = min(size, LARGEST_UNDECLARED)
        self._loss._pacer._max_datagram_size = size
        self._congestion.count_in(size)
        if self._loss._rtt_initialized:
            self._loss._pacer.update_rate(self.congestion_window, self._loss._rtt_smoothed)
        largest = self.largest_datagram()
        waiting = [data for data in self._datagrams_pending if len(data) <= largest]
        if len(waiting) < len(self._datagrams_pending):
            self._datagrams_pending.clear()
            self._datagrams_pending.extend(waiting)

    def probe(self, size: int, now: float, done: Callable[[bool], None]) -> list[tuple[bytes, Any]]:
        """Build a datagram of exactly `size` octets, to learn whether the path carries it.

        Its loss is no congestion signal (RFC 8899 §3). `done` hears whether it arrived.
        """

        def delivered(delivery: QuicDeliveryState) -> None:
            done(delivery == QuicDeliveryState.ACKED)

        builder = ProbeBuilder(
            host_cid=self.host_cid,
            is_client=self._is_client,
            max_datagram_size=size,
            packet_number=self._packet_number,
            peer_cid=self._peer_cid.cid,
            spin_bit=self._spin_bit,
            version=cast(int, self._version),
        )
        builder.start_packet(QuicPacketType.ONE_RTT, self._cryptos[Epoch.ONE_RTT])
        frames = builder.start_frame(QuicFrameType.PING, handler=delivered)
        frames.push_bytes(bytes(builder.remaining_buffer_space))  # zeros are PADDING frames
        # Otherwise the probe time-out would count from an older packet and call the probe lost.
        self._loss._time_of_last_sent_ack_eliciting_packet = now
        return self._flush_builder(builder, self._network_paths[0], self._peer_cid.cid, now)

    # Which streams are ours.

    def _is_ours(self, stream_id: int) -> bool:
        return (stream_id & 1 == 0) == self._is_client

    def _next_stream_id(self, unidirectional: bool) -> int:
        return self.get_next_available_stream_id(is_unidirectional=unidirectional)

    def _remote_streams(self, unidirectional: bool) -> int:
        return self._remote_max_streams_uni if unidirectional else self._remote_max_streams_bidi

    def _may_open(self, stream_id: int) -> bool:
        """Whether an unknown stream is the next of ours; False where it is over."""
        if not self._stream_can_send(stream_id):
            raise UsageError(f"stream {stream_id} belongs to the peer: nothing can be sent on it")
        if self._stream_is_discarded(stream_id):
            return False
        if not self._is_ours(stream_id):
            raise UsageError(f"stream {stream_id} has not been opened by the peer")
        expected = self._next_stream_id(bool(stream_id & 2))
        if stream_id != expected:
            raise UsageError(f"stream {stream_id} is out of order: {expected} is the next to open")
        return True


def _fitting(reason: str) -> str:
    """Cut a reason to what a CONNECTION_CLOSE can carry."""
    return reason.encode()[:MAX_REASON_OCTETS].decode(errors="ignore")

"""Reaches on the receiving side: credit that follows consumption.

The library widens its windows as octets arrive, read or not, and doubles them without a bound.
Here the peer may send one window beyond what reached the application, and no more.
"""

from __future__ import annotations

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream

from kvcs.errors import UsageError
from kvcs.quic.aioquic_backend.private.queue import QueueingConnection, stream_key
from kvcs.quic.aioquic_backend.settings import QuicSettings

ANNOUNCED_PART = 4
"""Credit is announced when it grew by this part of the window, not with every packet."""


class Streams(dict[int, QuicStream]):
    """The streams of a connection, whose `values()` are only those with a limit to announce.

    The library asks `values()` for one thing, to look for a MAX_STREAM_DATA due, with each packet
    it builds. So a stream that is idle costs a packet nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.due: dict[int, QuicStream] = {}

    # A list, where the base has a view: the library only iterates.
    def values(self) -> list[QuicStream]:  # type: ignore[override]
        """The streams whose limit is to be announced."""
        return list(self.due.values())


class ReceivingConnection(QueueingConnection):
    """A connection whose peer is bounded by what the application consumed."""

    def __init__(
        self,
        *,
        configuration: QuicConfiguration,
        settings: QuicSettings,
        original_destination_connection_id: bytes | None = None,
        retry_source_connection_id: bytes | None = None,
    ) -> None:
        super().__init__(
            configuration=configuration,
            original_destination_connection_id=original_destination_connection_id,
            retry_source_connection_id=retry_source_connection_id,
        )
        self._streams = self._known = Streams()
        self._receive_window = settings.receive_window
        self._stream_receive_window = settings.stream_receive_window
        self._consumed = 0
        self._withheld = 0
        # 128 streams each way are fixed in the source. `value` goes into the transport parameters
        # when the handshake starts; `sent` is what the peer knows.
        for limit, count in (
            (self._local_max_streams_uni, settings.uni_streams),
            (self._local_max_streams_bidi, settings.bidi_streams),
        ):
            limit.value = limit.sent = count

    def consume(self, stream_id: int, octets: int) -> None:
        """Count octets that reached the application."""
        self._consumed += octets
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.receiver.is_finished:
            limit = stream.receiver.starting_offset() + self._stream_receive_window
            step = self._stream_receive_window // ANNOUNCED_PART
            if limit - stream.max_stream_data_local >= step:
                self._known.due[stream_id] = stream

    def consume_reset(self, stream_id: int) -> None:
        """Count the octets of a stream that its reset keeps from ever being delivered."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            receiver = stream.receiver
            self._consumed += receiver.highest_offset - receiver.starting_offset()

    def withhold(self, octets: int) -> None:
        """Keep this much connection credit back; a negative number gives it out again.

        Raises:
            UsageError: more is given back than is withheld.
        """
        if self._withheld + octets < 0:
            raise UsageError(f"cannot release {-octets} octets: {self._withheld} are withheld")
        self._withheld += octets

    def data_limit_is_due(self) -> bool:
        """Whether MAX_DATA is to be announced."""
        step = self._receive_window // ANNOUNCED_PART
        return self._data_limit() - self._local_max_data.value >= step

    def abort_receiving(self, stream_id: int, code: int) -> None:
        """Ask the peer to stop; quiet when its direction has ended or was stopped already.

        Raises:
            UsageError: the stream has no receiving side.
        """
        if not self._stream_can_receive(stream_id):
            raise UsageError(f"stream {stream_id} carries nothing to us: it cannot be stopped")
        stream = self._streams.get(stream_id)
        # The library raises for a stream it has dropped, and would send for one that has ended.
        if stream is None or stream.receiver.is_finished:
            return
        if stream.receiver._stop_error_code is None:
            self._touch(stream_id)
            self.stop_stream(stream_id, code)

    def _data_limit(self) -> int:
        return self._consumed - self._withheld + self._receive_window

    def _write_connection_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        limit = self._local_max_data
        if self.data_limit_is_due():
            limit.value = self._data_limit()
        # The library doubles MAX_DATA by what arrived: to it, nothing did.
        used, limit.used = limit.used, 0
        try:
            super()._write_connection_limits(builder, space)
        finally:
            limit.used = used

    def _write_stream_limits(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream
    ) -> None:
        receiver = stream.receiver
        if stream.max_stream_data_local and not receiver.is_finished:
            limit = receiver.starting_offset() + self._stream_receive_window
            stream.max_stream_data_local = max(stream.max_stream_data_local, limit)
            highest, receiver.highest_offset = receiver.highest_offset, 0  # as above
            try:
                super()._write_stream_limits(builder, space, stream)
            finally:
                receiver.highest_offset = highest
        self._known.due.pop(stream_key(stream), None)

    def _on_max_stream_data_delivery(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        super()._on_max_stream_data_delivery(delivery, stream)
        if delivery != QuicDeliveryState.ACKED and stream.stream_id in self._streams:
            self._known.due[stream_key(stream)] = stream

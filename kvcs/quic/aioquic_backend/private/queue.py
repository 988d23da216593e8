"""Reaches into the queue of streams: packets are filled from a few, and idle ones cost nothing.

The library walks its queue of streams for each packet it builds, and fills packets from all of them
in turn: 250 streams with octets make a packet eight times dearer than one, and end together. Here
streams of Objects are served a few at a time in the order in which they were written to, and
streams with nothing to do are left out until a frame or a call touches them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream, QuicStreamSender

SERVED: Final = 4
"""Streams of Objects that packets are filled from at a time."""


class WatchedSender(QuicStreamSender):
    """A stream's sending part that tells when it is to be looked at again."""

    def __init__(self, stream_id: int, heard: Callable[[int], None]) -> None:
        super().__init__(stream_id=stream_id, writable=True)
        self._heard = heard

    def on_data_delivery(
        self, delivery: QuicDeliveryState, start: int, stop: int, fin: bool
    ) -> None:
        """What was sent arrived or was lost."""
        super().on_data_delivery(delivery, start, stop, fin)
        if self.is_finished or delivery is not QuicDeliveryState.ACKED:
            self._heard(cast(int, self._stream_id))


class QueueingConnection(QuicConnection):
    """A connection that serves few streams at a time."""

    def __init__(self, **options: Any) -> None:
        self._active: list[QuicStream] = []
        """What the library walks: streams that are served, and those to answer or clean up."""
        self._parked: set[int] = set()
        """Streams that have nothing to do until something touches them."""
        self._waiting: dict[int, QuicStream] = {}
        """Streams of Objects that come up when others are through, in order."""
        self._served: dict[int, QuicStream] = {}
        """Streams of Objects that packets are filled from now; they are among the active ones."""
        super().__init__(**options)

    # The library reads the queue, appends each new stream to it, and sets it anew for each packet:
    # without those that were sent from, which it then appends.

    @property
    def _streams_queue(self) -> list[QuicStream]:
        return self._active

    @_streams_queue.setter
    def _streams_queue(self, streams: list[QuicStream]) -> None:
        self._active = active = []
        for stream in streams:
            if is_idle(stream):
                self._parked.add(stream_key(stream))
            else:
                active.append(stream)
        if self._served:
            for stream_id, stream in list(self._served.items()):
                if is_idle(stream) or stream.is_finished:
                    del self._served[stream_id]
        self._serve()

    def _serve(self) -> None:
        """Have the next streams served where there is room."""
        while self._waiting and len(self._served) < SERVED:
            stream_id = next(iter(self._waiting))
            stream = self._served[stream_id] = self._waiting.pop(stream_id)
            self._active.append(stream)

    def _write_stream_frame(
        self,
        builder: QuicPacketBuilder,
        space: QuicPacketSpace,
        stream: QuicStream,
        max_offset: int,
    ) -> int:
        used = super()._write_stream_frame(builder, space, stream, max_offset)
        if self._waiting and stream.stream_id in self._served and is_idle(stream):
            # The library is walking the queue: the next stream gets what is left of the packet.
            del self._served[stream.stream_id]
            self._serve()
        return used

    def _touch(self, stream_id: int) -> None:
        """Have the library look at a stream that was left out."""
        if stream_id in self._parked:
            self._parked.remove(stream_id)
            self._active.append(self._streams[stream_id])
        elif stream_id in self._waiting:
            self._active.append(self._waiting.pop(stream_id))

    def _get_or_create_stream(self, frame_type: int, stream_id: int) -> QuicStream:
        stream = super()._get_or_create_stream(frame_type, stream_id)
        if stream_id in self._parked or stream_id in self._waiting:
            self._touch(stream_id)
        return stream

    def _get_or_create_stream_for_send(self, stream_id: int) -> QuicStream:
        is_new = stream_id not in self._streams
        stream = super()._get_or_create_stream_for_send(stream_id)
        if type(stream.sender) is QuicStreamSender and not stream.sender.is_finished:
            stream.sender = self._watched(stream)
        if is_new and carries_objects(stream):
            self._active.pop()  # where the library has put it
        elif stream_id in self._parked:
            self._parked.remove(stream_id)
            if not carries_objects(stream):
                self._active.append(stream)
                return stream
        else:
            return stream
        if len(self._served) < SERVED:
            self._served[stream_id] = stream
            self._active.append(stream)
        else:
            self._waiting[stream_id] = stream
        return stream

    def _watched(self, stream: QuicStream) -> QuicStreamSender:
        """A sending part in place of one that nothing was written to yet."""
        plain = stream.sender
        if (
            plain._buffer_stop
            or plain._buffer_fin is not None
            or plain._reset_error_code is not None
        ):
            return plain
        return WatchedSender(stream_key(stream), self._touch)


def stream_key(stream: QuicStream) -> int:
    """The ID of a stream that is in a connection's table (None is for the handshake's own)."""
    return cast(int, stream.stream_id)


def carries_objects(stream: QuicStream) -> bool:
    """Whether a stream of ours is unidirectional, not the first, and within the peer's credit."""
    return stream_key(stream) & 2 != 0 and stream_key(stream) >= 4 and not stream.is_blocked


def is_idle(stream: QuicStream) -> bool:
    """Whether there is nothing to send and nothing to clean up, until something touches it."""
    sender, receiver = stream.sender, stream.receiver
    if receiver._stop_error_code is not None:
        return False
    if sender.is_finished:
        return not receiver.is_finished
    if sender._reset_error_code is not None:
        return False
    if type(sender) is QuicStreamSender:
        return sender.buffer_is_empty and sender._buffer_stop == 0 and sender._buffer_fin is None
    return len(sender._pending) == 0 and not sender._pending_eof

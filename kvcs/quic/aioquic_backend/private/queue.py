"""Reaches into the queue of streams: Objects leave in order, and idle streams cost nothing.

The library walks its queue of streams for each packet it builds, and fills packets from all of them
in turn: 250 streams with octets make a packet eight times dearer than one, and end together. Here
streams of Objects wait in the order of the session's scheduler, and streams with nothing to do are
left out until a frame or a call touches them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final, cast

from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream, QuicStreamSender

from kvcs.moqt.actions import Rank, SendKey
from kvcs.moqt.names import GroupOrder
from kvcs.moqt.sending.scheduler import Scheduler, send_key

SERVED: Final = 2
"""Streams of Objects that the library fills packets from at a time: K and V of one layer."""

MAX_PLACES: Final = 64
"""Places that the octets of one stream may stand in: where a peer makes us hold more, octets stand
with those before them."""

UNRANKED: Final = Rank(
    (),
    send_key(
        subscriber_priority=128,
        publisher_priority=128,
        group_id=0,
        group_order=GroupOrder.ASCENDING,
        is_fill=False,
        position=0,
    ),
)
"""Where streams stand of which nothing was said: beside each other."""


_offset = itemgetter(0)


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

    def reset(self, error_code: int) -> None:
        """We reset it, or the peer has stopped it."""
        super().reset(error_code)
        self._heard(cast(int, self._stream_id))


class RankedStream:
    """A stream of Objects as the order has it; a `Sendable`."""

    __slots__ = ("_places", "family", "queued", "request_id", "stream", "used")

    def __init__(self, stream: QuicStream, rank: Rank) -> None:
        self.stream = stream
        self.family, key, self.request_id = rank
        self._places = [(0, key)]
        """First offset of octets that stand alike, and where: each place behind the last one, for
        what is in the way of more urgent octets stands where those do."""
        self.queued = 0
        self.used = 0
        """Octets of its turn that were sent."""

    def key(self) -> SendKey:
        """Where the octets stand that it sends next."""
        return self._places[self._behind() - 1][1]

    def alike(self, limit: int) -> int:
        """Offset up to ``limit`` that octets reach which stand where the next ones do."""
        behind = self._behind()
        return limit if behind == len(self._places) else min(limit, self._places[behind][0])

    @property
    def has_places(self) -> bool:
        """Whether its octets do not all stand alike."""
        return len(self._places) > 1

    def _behind(self) -> int:
        """Index of the place behind that of the octets which it sends next."""
        places, sender = self._places, self.stream.sender
        if len(places) == 1:
            return 1
        at = sender._pending[0].start if len(sender._pending) else sender._buffer_stop
        return bisect_right(places, at, key=_offset)

    def stand(self, key: SendKey) -> None:
        """Let octets that are written from now on stand in a place."""
        places, at = self._places, self.stream.sender._buffer_stop
        while places and places[-1][1] >= key:
            at = places.pop()[0]
        gone = bisect_right(places, self.stream.sender._buffer_start, key=_offset) - 1
        if gone > 0:
            del places[:gone]  # all of that has arrived
        if len(places) < MAX_PLACES:
            places.append((at, key))

    def prioritize(self, subscriber_priority: int) -> None:
        """Let all of its octets stand by another Subscriber Priority."""
        self._places = [
            (at, key._replace(subscriber_priority=subscriber_priority)) for at, key in self._places
        ]


class QueueingConnection(QuicConnection):
    """A connection whose streams of Objects are served in order."""

    def __init__(self, **options: Any) -> None:
        self._active: list[QuicStream] = []
        """What the library walks: streams to answer or clean up, and those it is to serve now."""
        self._parked: set[int] = set()
        """Streams that have nothing to do until something touches them."""
        self._ranked: dict[int, RankedStream] = {}
        """Streams of Objects that are not over."""
        self._waiting: dict[int, RankedStream] = {}
        """Those that have octets to send and are not among the active ones."""
        self._order = Scheduler()
        """The same, in order."""
        self._told: tuple[int, Rank] | None = None
        """Where a stream will stand that is not open yet."""
        self._library_serves = False
        """Whether the library fills packets from streams of Objects now."""
        self._passed: set[int] = set()
        """Those of them that have let the next one in."""
        super().__init__(**options)

    def rank(self, stream_id: int, rank: Rank) -> None:
        """Let what follows on a stream of Objects stand in this place, or all from when it opens.

        Family and request of a stream are those of its first octets.
        """
        ranked = self._ranked.get(stream_id)
        if ranked is None:
            self._told = (stream_id, rank)
        else:
            before = ranked.key()
            ranked.stand(rank.key)
            if ranked.key() != before:
                self._order.requeue(ranked)

    def prioritize(self, request_id: int, subscriber_priority: int) -> None:
        """Let the streams of a request stand by another Subscriber Priority from now on."""
        for ranked in self._ranked.values():
            if ranked.request_id == request_id:
                ranked.prioritize(subscriber_priority)
                self._order.requeue(ranked)

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

    def _serve(self, streams: int) -> None:
        """Have the library fill packets from the next streams, too."""
        for _ in range(streams):
            following = self._next_in_order()
            if following is None:
                return
            self._active.append(following.stream)

    def _write_stream_frame(
        self,
        builder: QuicPacketBuilder,
        space: QuicPacketSpace,
        stream: QuicStream,
        max_offset: int,
    ) -> int:
        used = super()._write_stream_frame(builder, space, stream, max_offset)
        if not self._library_serves or not is_plain(stream):
            return used
        # The library is walking the queue: where a stream has no more, or flow control holds it
        # back, the next one gets what is left of the packet.
        stream_id = stream_key(stream)
        stopped = is_idle(stream) or stream.sender.next_offset >= max_offset
        if stopped and stream_id not in self._passed:
            self._passed.add(stream_id)
            self._serve(1)
        return used

    # The order

    def _put_in_order(self, stream: QuicStream) -> None:
        """Let a stream of Objects that has octets wait in its place."""
        stream_id = stream_key(stream)
        ranked = self._ranked.get(stream_id)
        if ranked is None:
            told, self._told = self._told, None
            rank = told[1] if told is not None and told[0] == stream_id else UNRANKED
            ranked = self._ranked[stream_id] = RankedStream(stream, rank)
        self._waiting[stream_id] = ranked
        self._order.ready(ranked)

    def _next_in_order(self) -> RankedStream | None:
        """Take the stream whose octets go first."""
        ranked = cast(RankedStream | None, self._order.pick())
        if ranked is not None:
            del self._waiting[stream_key(ranked.stream)]
        return ranked

    def _put_back(self, ranked: RankedStream, *, first: bool) -> None:
        """Let a stream that was taken wait again: where ``first``, its turn is not over."""
        self._waiting[stream_key(ranked.stream)] = ranked
        if first:
            self._order.put_back(ranked)
        else:
            ranked.used = 0
            self._order.ready(ranked)

    def _touch(self, stream_id: int) -> None:
        """Have the library look at a stream that was left out, or that is no longer to wait."""
        stream = self._streams.get(stream_id)
        if stream_id in self._parked:
            self._parked.remove(stream_id)
            self._active.append(self._streams[stream_id])
        elif (ranked := self._waiting.get(stream_id)) is not None:
            if not is_plain(ranked.stream):
                del self._waiting[stream_id]
                self._order.remove(ranked)
                self._active.append(ranked.stream)
            elif ranked.has_places:
                self._order.requeue(ranked)  # what was lost may stand before what was next
        if stream is None or not is_plain(stream):
            self._ranked.pop(stream_id, None)

    def _get_or_create_stream(self, frame_type: int, stream_id: int) -> QuicStream:
        stream = super()._get_or_create_stream(frame_type, stream_id)
        if stream_id in self._parked:
            self._touch(stream_id)
        return stream

    def _get_or_create_stream_for_send(self, stream_id: int) -> QuicStream:
        is_new = stream_id not in self._streams
        stream = super()._get_or_create_stream_for_send(stream_id)
        if type(stream.sender) is QuicStreamSender and not stream.sender.is_finished:
            stream.sender = self._watched(stream)
        if is_new and is_plain(stream):
            self._active.pop()  # where the library has put it
        elif stream_id in self._parked:
            self._parked.remove(stream_id)
            if not is_plain(stream):
                self._active.append(stream)
                return stream
        else:
            return stream
        self._put_in_order(stream)
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


def is_plain(stream: QuicStream) -> bool:
    """Whether nothing of a stream is to be sent but octets of Objects, and perhaps its FIN."""
    sender = stream.sender
    return (
        type(sender) is WatchedSender
        and carries_objects(stream)
        and sender._reset_error_code is None
        and not sender.is_finished
    )


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

"""Streams of one connection of the model: a `Transport` without a library below it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvcs.errors import UsageError
from kvcs.moqt.actions import Rank
from kvcs.moqt.errors import SessionCode
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.transport import Buffer, ReceiverFactory, TransportReceiver, TransportStats
from kvcs.testing.network.connection import ROOM, ModelConnection, Phase
from kvcs.testing.network.frames import (
    FRAME_OVERHEAD,
    PACKET_OCTETS,
    Datagram,
    Frame,
    Hello,
    MaxData,
    MaxStreamData,
    MaxStreams,
    Reset,
    Stop,
    StreamData,
)
from kvcs.testing.network.hosts import Address, Port
from kvcs.testing.network.streams import ReceiveStream, SendStream

ANNOUNCED_PART: Final = 4
"""Credit is announced when it grew by this part of the window."""

MAX_DATAGRAMS: Final = 256
"""DATAGRAM frames that may wait."""


class ModelTransport(ModelConnection):
    """One connection as its session sees it.

    Args:
        connection_id: names it at both ends.
        port: where its packets leave.
        address: of the peer; follows a client that moves.
        is_client: whether this end connects.
        settings: limits and times; TLS's part and the sizes of datagrams are not looked at.
        receiver_factory: makes the receiver once the handshake is complete.
        peer: whom it is with, for people.
        on_open: told when the handshake is complete.
        on_over: told the reason when nothing will happen any more.
    """

    def __init__(
        self,
        connection_id: int,
        *,
        port: Port,
        address: Address,
        is_client: bool,
        settings: QuicSettings,
        receiver_factory: ReceiverFactory,
        peer: str,
        on_open: Callable[[], object],
        on_over: Callable[[str], object],
    ) -> None:
        super().__init__(
            connection_id,
            port=port,
            address=address,
            is_client=is_client,
            settings=settings,
            on_over=on_over,
        )
        self._factory = receiver_factory
        self._peer = peer
        self._on_open = on_open
        self._datagrams: deque[Datagram] = deque()
        # What we send
        self._sending: dict[int, SendStream] = {}
        self._ready: dict[int, None] = {}
        """Streams that may have something to send, in turns."""
        self._next = {True: 2 if is_client else 3, False: 0 if is_client else 1}
        self._max_streams = {True: 0, False: 0}
        self._peer_window = 0
        self._max_data = 0
        self._written = 0
        """Octets of all streams, less what resets dropped unsent."""
        self._sent = 0
        self._held = 0
        # What we receive
        self._receiving: dict[int, ReceiveStream] = {}
        self._consumed = 0
        self._announced = settings.receive_window
        self._granted = {True: settings.uni_streams, False: settings.bidi_streams}
        self._seen = {True: 0, False: 0}
        """Streams of the peer that were opened, by kind."""

    # Credit

    @property
    def peer(self) -> str:
        """Whom the connection is with."""
        return self._peer

    def octets(self) -> int:
        """See `Transport`."""
        if self._phase is not Phase.OPEN:
            return 0
        room = self._settings.send_buffer - self._held
        return max(0, min(room, self._max_data - self._written))

    def stream_octets(self, stream_id: int) -> int:
        """See `Transport`."""
        if self._phase is not Phase.OPEN:
            return 0
        stream = self._sending.get(stream_id)
        if stream is not None:
            return 0 if stream.fin or stream.reset else max(0, stream.limit - stream.offset)
        unidirectional = bool(stream_id & 2)
        if not self._is_ours(stream_id) or stream_id < self._next[unidirectional]:
            return 0
        allowed = stream_id // 4 < self._max_streams[unidirectional]
        return self._peer_window if allowed else 0

    def uni_streams(self) -> int:
        """See `Transport`."""
        return self._streams_left(True)

    def bidi_streams(self) -> int:
        """See `Transport`."""
        return self._streams_left(False)

    def unacknowledged(self) -> int:
        """See `Transport`."""
        fins = sum(1 for each in self._sending.values() if each.fin and not each.reset)
        return self._held + fins

    def stats(self) -> TransportStats:
        """See `Transport`."""
        recovery = self._recovery
        return TransportStats(
            datagram_size=PACKET_OCTETS,
            rtt=recovery.rtt,
            smallest_rtt=recovery.smallest_rtt,
            congestion_window=recovery.window,
            octets_in_flight=recovery.octets,
            octets_sent=self._octets_sent,
            octets_received=self._octets_received,
            packets_lost=recovery.lost_packets,
            receive_buffer=self._port.host.receive_buffer,
            send_buffer=self._port.host.receive_buffer,
        )

    # Sending

    def send(self, stream_id: int, data: Buffer, fin: bool) -> None:
        """See `Transport`.

        Raises:
            UsageError: the stream is not ours to write, its ID is not the next, or it had a FIN.
        """
        if self._phase is not Phase.OPEN:
            return
        stream = self._sender(stream_id)
        if stream is None or stream.reset:
            return
        if stream.fin:
            raise UsageError(f"stream {stream_id} has had its FIN: nothing can follow")
        octets = bytes(data)
        stream.write(octets, fin)
        self._written += len(octets)
        self._held += len(octets)
        self._ready[stream_id] = None
        if self._held > self._settings.send_buffer + self._settings.control_backlog:
            self.close(SessionCode.CONTROL_MESSAGE_TIMEOUT, "control messages are not taken")

    def send_all(self, stream_id: int, parts: Sequence[Buffer], fin: bool) -> None:
        """See `Transport`."""
        self.send(stream_id, b"".join(parts), fin)

    def rank(self, stream_id: int, rank: Rank) -> None:
        """See `Transport`; here streams leave in the order in which they were written to."""

    def prioritize(self, request_id: int, subscriber_priority: int) -> None:
        """See `Transport`; see `rank`."""

    def reset(self, stream_id: int, code: int) -> None:
        """See `Transport`."""
        if self._phase is Phase.OPEN:
            stream = self._sender(stream_id)
            if stream is not None:
                self._reset(stream, code)

    def stop_sending(self, stream_id: int, code: int) -> None:
        """See `Transport`."""
        stream = self._receiving.get(stream_id)
        if self._phase is Phase.OPEN and stream is not None and not stream.stopped:
            stream.stopped = True
            self._control.append(Stop(stream_id, code))

    def send_datagram(self, data: bytes) -> None:
        """See `Transport`."""
        fits = len(data) <= ROOM - FRAME_OVERHEAD and len(self._datagrams) < MAX_DATAGRAMS
        if self._phase is Phase.OPEN and fits:
            self._datagrams.append(Datagram(bytes(data)))

    # Frames that leave

    def _next_data(self, room: int) -> Frame | None:
        if self._datagrams and room >= FRAME_OVERHEAD + len(self._datagrams[0].data):
            return self._datagrams.popleft()
        left = min(room - FRAME_OVERHEAD, self._max_data - self._sent)
        for stream_id in list(self._ready):
            del self._ready[stream_id]
            stream = self._sending.get(stream_id)
            if stream is None or not stream.wants_to_send:
                continue
            if left <= 0 and stream.unsent:
                self._ready[stream_id] = None
                if room <= FRAME_OVERHEAD:
                    return None
                continue
            frame = stream.take(max(0, left))
            self._sent += len(frame.data)
            self._ready[stream_id] = None  # at the end: others have their turn first
            return frame
        return None

    def _is_wanted(self, frame: Frame) -> bool:
        """Whether a lost frame goes again."""
        if isinstance(frame, StreamData):
            stream = self._sending.get(frame.stream_id)
            return stream is not None and not stream.reset
        if isinstance(frame, MaxData):
            return frame.limit == self._announced
        if isinstance(frame, MaxStreams):
            return frame.limit == self._granted[frame.unidirectional]
        if isinstance(frame, MaxStreamData):
            receiving = self._receiving.get(frame.stream_id)
            return receiving is not None and receiving.announced == frame.limit
        return not isinstance(frame, Datagram)

    def _arrived(self, frame: Frame) -> None:
        if isinstance(frame, StreamData):
            stream = self._sending.get(frame.stream_id)
            if stream is not None and not stream.reset:
                stream.arrived(frame)
                self._held -= len(frame.data)
                if stream.done:
                    self._sending_over(frame.stream_id)
        elif isinstance(frame, Reset):
            self._sending_over(frame.stream_id)

    def _sending_over(self, stream_id: int) -> None:
        self._sending.pop(stream_id, None)
        self._ready.pop(stream_id, None)
        self._forget_if_over(stream_id)

    # Frames that arrive

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, Hello):
            self._take_hello(frame)
        elif self._phase is not Phase.OPEN or self._receiver is None:
            return
        elif isinstance(frame, StreamData):
            self._take_data(frame, self._receiver)
        elif isinstance(frame, MaxData):
            self._max_data = max(self._max_data, frame.limit)
        elif isinstance(frame, MaxStreamData):
            stream = self._sending.get(frame.stream_id)
            if stream is not None and frame.limit > stream.limit:
                stream.limit = frame.limit
                self._ready[stream.stream_id] = None
        elif isinstance(frame, MaxStreams):
            allowed = max(self._max_streams[frame.unidirectional], frame.limit)
            self._max_streams[frame.unidirectional] = allowed
        elif isinstance(frame, Reset):
            receiving = self._receiver_of(frame.stream_id)
            if receiving is not None and not receiving.ended:
                self._consume(receiving.reset(frame.final_size))
                self._forget_if_over(frame.stream_id)
                self._receiver.stream_reset(frame.stream_id, frame.code)
        elif isinstance(frame, Stop):
            self._receiver_of(frame.stream_id)
            sending = self._sending.get(frame.stream_id)
            if sending is not None and not sending.reset:
                self._reset(sending, frame.code)
                self._receiver.stop_sending(frame.stream_id, frame.code)
        elif isinstance(frame, Datagram):
            self._receiver.datagram(frame.data)

    def _take_hello(self, hello: Hello) -> None:
        if self._phase is not Phase.HANDSHAKE:
            return
        self._max_data = hello.data
        self._peer_window = hello.stream_data
        self._max_streams = {True: hello.uni_streams, False: hello.bidi_streams}
        if hello.step == 0:
            self._control.append(self._hello(1))
            return
        if hello.step == 1:
            self._control.append(self._hello(2))
        self._phase = Phase.OPEN
        if self._deadline is not None:
            self._deadline.cancel()
        self._receiver = self._factory(self)
        self._receiver.connected()
        self._on_open()

    def _take_data(self, frame: StreamData, receiver: TransportReceiver) -> None:
        stream = self._receiver_of(frame.stream_id)
        if stream is None:
            return
        for turn in stream.receive(frame):
            receiver.stream_data(turn.stream_id, turn.data, turn.fin)
            self._consume(len(turn.data))
            if self._phase is not Phase.OPEN:
                return
        if stream.ended:
            self._forget_if_over(stream.stream_id)
            return
        window = self._settings.stream_receive_window
        if stream.next + window - stream.announced >= max(1, window // ANNOUNCED_PART):
            stream.announced = stream.next + window
            self._control.append(MaxStreamData(stream.stream_id, stream.announced))

    def _receiver_of(self, stream_id: int) -> ReceiveStream | None:
        """The peer's direction of a stream, opened by its first frame; None where it is over."""
        unidirectional = bool(stream_id & 2)
        while not self._is_ours(stream_id) and self._seen[unidirectional] <= stream_id // 4:
            # A later stream opens the earlier ones of its kind, too (RFC 9000 §3.2).
            opened = self._seen[unidirectional] * 4 + (stream_id & 3)
            if self._seen[unidirectional] >= self._granted[unidirectional]:
                raise AssertionError(f"stream {stream_id} is beyond the credit that was given")
            self._seen[unidirectional] += 1
            window = self._settings.stream_receive_window
            self._receiving[opened] = ReceiveStream(opened, window)
            if not unidirectional:
                self._sending[opened] = SendStream(opened, self._peer_window)
        return self._receiving.get(stream_id)

    def _consume(self, octets: int) -> None:
        self._consumed += octets
        window = self._settings.receive_window
        if self._consumed + window - self._announced >= max(1, window // ANNOUNCED_PART):
            self._announced = self._consumed + window
            self._control.append(MaxData(self._announced))

    def _forget_if_over(self, stream_id: int) -> None:
        """Forget a stream both of whose directions have ended; the peer may open another."""
        receiving = self._receiving.get(stream_id)
        unidirectional = bool(stream_id & 2)
        if receiving is None or not receiving.ended:
            return
        if unidirectional or stream_id not in self._sending:
            del self._receiving[stream_id]
            if not self._is_ours(stream_id):
                self._granted[unidirectional] += 1
                self._control.append(MaxStreams(unidirectional, self._granted[unidirectional]))

    # Streams that we send on

    def _is_ours(self, stream_id: int) -> bool:
        return (stream_id & 1 == 0) == self._is_client

    def _streams_left(self, unidirectional: bool) -> int:
        if self._phase is not Phase.OPEN:
            return 0
        return max(0, self._max_streams[unidirectional] - self._next[unidirectional] // 4)

    def _sender(self, stream_id: int) -> SendStream | None:
        """Our direction of a stream; the next one of ours is opened. None where it is over."""
        stream = self._sending.get(stream_id)
        if stream is not None:
            return stream
        unidirectional = bool(stream_id & 2)
        if not self._is_ours(stream_id):
            if unidirectional or stream_id // 4 >= self._seen[False]:
                raise UsageError(f"stream {stream_id} is the peer's: nothing can be sent on it")
            return None
        expected = self._next[unidirectional]
        if stream_id < expected:
            return None
        if stream_id > expected:
            raise UsageError(f"stream {stream_id} is out of order: {expected} is the next to open")
        self._next[unidirectional] += 4
        stream = self._sending[stream_id] = SendStream(stream_id, self._peer_window)
        if not unidirectional:
            window = self._settings.stream_receive_window
            self._receiving[stream_id] = ReceiveStream(stream_id, window)
        return stream

    def _reset(self, stream: SendStream, code: int) -> None:
        if stream.reset:
            return
        dropped = stream.drop()
        self._written -= dropped
        self._held -= dropped + stream.flying
        self._ready.pop(stream.stream_id, None)
        self._control.append(Reset(stream.stream_id, code, stream.sent))

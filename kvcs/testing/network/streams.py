"""Streams of the model: what waits to be sent, and what came out of order."""

from __future__ import annotations

from collections import deque

from kvcs.testing.network.frames import StreamData


class SendStream:
    """Our direction of a stream."""

    __slots__ = (
        "_parts",
        "fin",
        "fin_sent",
        "flying",
        "frames",
        "limit",
        "offset",
        "reset",
        "sent",
        "stream_id",
    )

    def __init__(self, stream_id: int, limit: int) -> None:
        self.stream_id = stream_id
        self.limit = limit
        """Octets that the peer lets it carry."""
        self.offset = 0
        """Octets written so far."""
        self.sent = 0
        """Octets put into packets so far."""
        self.flying = 0
        """Octets in packets that are not acknowledged."""
        self.frames = 0
        """Frames in packets that are not acknowledged."""
        self.fin = False
        self.fin_sent = False
        self.reset = False
        self._parts: deque[memoryview] = deque()

    @property
    def unsent(self) -> int:
        """Octets that wait."""
        return self.offset - self.sent

    @property
    def done(self) -> bool:
        """Whether all of it arrived."""
        return self.fin_sent and not self.frames

    @property
    def wants_to_send(self) -> bool:
        """Whether the peer's credit lets it send something."""
        if self.reset:
            return False
        return self.sent < min(self.offset, self.limit) or (
            self.fin and not self.fin_sent and not self.unsent
        )

    def write(self, data: bytes, fin: bool) -> None:
        """Take octets, which are the stream's own."""
        if data:
            self._parts.append(memoryview(data))
        self.offset += len(data)
        self.fin = self.fin or fin

    def drop(self) -> int:
        """Reset it: what waits is given up; returns how many octets."""
        dropped = self.unsent
        self._parts.clear()
        self.offset = self.sent
        self.reset = True
        return dropped

    def arrived(self, frame: StreamData) -> None:
        """A frame was acknowledged."""
        self.frames -= 1
        self.flying -= len(frame.data)

    def take(self, octets: int) -> StreamData:
        """The next frame, of at most so many octets of data."""
        octets = min(octets, self.limit - self.sent, self.unsent)
        parts: list[memoryview] = []
        left = octets
        while left:
            part = self._parts.popleft()
            if len(part) > left:
                self._parts.appendleft(part[left:])
                part = part[:left]
            parts.append(part)
            left -= len(part)
        offset = self.sent
        self.sent += octets
        self.fin_sent = self.fin and not self.unsent
        self.frames += 1
        self.flying += octets
        return StreamData(self.stream_id, offset, b"".join(parts), self.fin_sent)


class ReceiveStream:
    """The peer's direction of a stream."""

    __slots__ = ("_waiting", "announced", "ended", "next", "stopped", "stream_id")

    def __init__(self, stream_id: int, window: int) -> None:
        self.stream_id = stream_id
        self.next = 0
        """Octets delivered so far."""
        self.ended = False
        self.stopped = False
        self.announced = window
        """Octets that the peer may send."""
        self._waiting: dict[int, StreamData] = {}

    def receive(self, frame: StreamData) -> list[StreamData]:
        """Take a frame; returns those whose turn has come."""
        if frame.offset >= self.next and not self.ended:
            self._waiting.setdefault(frame.offset, frame)
        turn: list[StreamData] = []
        while (frame_now := self._waiting.pop(self.next, None)) is not None and not self.ended:
            self.next += len(frame_now.data)
            self.ended = frame_now.fin
            turn.append(frame_now)
        return turn

    def reset(self, final_size: int) -> int:
        """The peer gives it up; returns the octets that are never delivered."""
        self.ended = True
        self._waiting.clear()
        return final_size - self.next

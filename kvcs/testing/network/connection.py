"""Packets of one connection of the model: handshake, acknowledgements, timers, the end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final

from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.transport import TransportReceiver
from kvcs.testing.network.frames import (
    PACKET_OCTETS,
    PACKET_OVERHEAD,
    Close,
    Datagram,
    Frame,
    Hello,
    Packet,
    Ping,
    frame_size,
)
from kvcs.testing.network.hosts import Address, Port
from kvcs.testing.network.recovery import Arrivals, Recovery

SHORTEST_LINGER: Final = 0.02
"""Seconds between CONNECTION_CLOSE and the end, at least."""

ROOM: Final = PACKET_OCTETS - PACKET_OVERHEAD
"""Octets of frames that a packet takes."""

PINGS_PER_TIMEOUT: Final = 3
"""PINGs come at least this often in an idle time-out."""


class Phase(Enum):
    """Where a connection is in its life."""

    HANDSHAKE = 0
    OPEN = 1
    CLOSING = 2
    OVER = 3


class ModelConnection:
    """One connection from its first packet to its end; a subclass knows streams.

    Args:
        connection_id: names it at both ends.
        port: where its packets leave.
        address: of the peer; follows a client that moves.
        is_client: whether this end connects.
        settings: limits and times; TLS's part and the sizes of datagrams are not looked at.
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
        on_over: Callable[[str], object],
    ) -> None:
        self._id = connection_id
        self._port = port
        self._address = address
        self._is_client = is_client
        self._settings = settings
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._phase = Phase.HANDSHAKE
        self._receiver: TransportReceiver | None = None
        self._in_batch = False
        self._ending: tuple[int | None, str, bool] = (None, "", False)
        self._farewell: Close | None = None
        self._heard_after_close = 0
        self._heard_at = self._pinged_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._number = 0
        self._arrivals = Arrivals()
        self._largest_seen = -1
        self._ack_due = False
        self._recovery = Recovery()
        self._control: deque[Frame] = deque()
        """Frames that go before any data."""
        self._again: deque[Frame] = deque()
        """Frames that were lost."""
        self._octets_sent = self._octets_received = 0

    # What the owner calls

    def start(self) -> None:
        """Send a client's first flight."""
        self._control.append(self._hello(0))
        self._transmit()

    def give_up_after(self, seconds: float) -> None:
        """End it unless the handshake is complete by then."""
        self._deadline = self._loop.call_later(seconds, self._handshake_timed_out)

    def receive(self, packet: Packet, source: Address) -> None:
        """Take one packet and deliver what it brings; `batch_ended` follows."""
        if self._phase is Phase.CLOSING:
            self._repeat_farewell()
        if self._phase in (Phase.CLOSING, Phase.OVER):
            return
        hello = any(isinstance(frame, Hello) for frame in packet.frames)
        if self._phase is Phase.HANDSHAKE and not hello and packet.frames and not packet.close:
            return  # it overtook the handshake: it cannot be read yet
        self._heard_at = self._loop.time()
        self._octets_received += packet.size
        if packet.number > self._largest_seen:
            self._largest_seen, self._address = packet.number, source
        if packet.close is not None:
            self._ending = (packet.close.code, packet.close.reason, True)
            self._phase = Phase.CLOSING
            return
        if packet.frames:
            self._ack_due = True
            if not self._arrivals.add(packet.number):
                return
        self._in_batch = True
        try:
            for frame in self._recovery.acknowledged(packet.acknowledged, self._heard_at):
                self._arrived(frame)
            for frame in packet.frames:
                self._take(frame)
        except Exception as exc:
            self._fail(exc)

    def batch_ended(self) -> None:
        """All packets of a wake-up are delivered: let the receiver send, then transmit."""
        self._in_batch = True
        try:
            if self._receiver is not None and self._phase is Phase.OPEN:
                self._receiver.batch_received()
        except Exception as exc:
            self._fail(exc)
        finally:
            self._in_batch = False
        if self._phase is Phase.CLOSING:
            if self._ending[2]:
                self._finish()
        elif self._phase is not Phase.OVER:
            self._lose(self._recovery.lost(self._loop.time()))
            self._transmit()

    def close(self, code: int, reason: str) -> None:
        """Close with an application code; what is queued gets one chance to leave."""
        if self._phase in (Phase.CLOSING, Phase.OVER):
            return
        self._transmit()
        was_open = self._phase is Phase.OPEN
        self._ending = (code, reason, False)
        self._farewell = Close(code, reason)
        self._phase = Phase.CLOSING
        self._cancel_timers()
        self._send_farewell()
        rtt, longest = self._recovery.rtt, self._settings.close_timeout
        wait = longest if rtt is None else min(longest, max(2 * rtt, SHORTEST_LINGER))
        self._deadline = self._loop.call_later(wait if was_open else 0.0, self._finish)

    def flush(self) -> None:
        """Send what may leave; within a batch, at its end."""
        if not self._in_batch:
            self._transmit()

    # What the subclass fills in

    def _take(self, frame: Frame) -> None:
        raise AssertionError("a subclass takes frames")

    def _arrived(self, frame: Frame) -> None:
        raise AssertionError("a subclass is told what arrived")

    def _is_wanted(self, frame: Frame) -> bool:
        raise AssertionError("a subclass says what goes again")

    def _next_data(self, room: int) -> Frame | None:
        raise AssertionError("a subclass has data to send")

    def _hello(self, step: int) -> Hello:
        settings = self._settings
        return Hello(
            step,
            settings.receive_window,
            settings.stream_receive_window,
            settings.uni_streams,
            settings.bidi_streams,
        )

    # Sending

    def _transmit(self) -> None:
        """Send what congestion control and credit let go, and arrange the next timer."""
        if self._phase in (Phase.CLOSING, Phase.OVER):
            return
        while frames := self._next_frames():
            self._send_packet(tuple(frames))
        if self._ack_due:
            self._send_packet(())
        self._arm()

    def _next_frames(self) -> list[Frame]:
        frames: list[Frame] = []
        room = ROOM
        free = self._recovery.octets + PACKET_OCTETS <= self._recovery.window
        while True:
            frame: Frame | None = None
            for queue in (self._control, self._again):
                if queue and (free or queue is self._control):
                    if frame_size(queue[0]) > room:
                        return frames
                    frame = queue.popleft()
                    break
            if frame is None and free:
                frame = self._next_data(room)
            if frame is None:
                return frames
            frames.append(frame)
            room -= frame_size(frame)

    def _send_packet(self, frames: tuple[Frame, ...]) -> None:
        packet = Packet(self._id, self._is_client, self._number, frames, self._arrivals.ranges())
        self._number += 1
        self._ack_due = False
        size = packet.size
        if frames:
            self._recovery.sent(packet.number, self._loop.time(), size, frames)
        self._octets_sent += size
        self._port.send(packet, size, self._address)

    def _lose(self, frames: list[Frame]) -> None:
        for frame in frames:
            if not isinstance(frame, Datagram | Ping) and self._is_wanted(frame):
                self._again.append(frame)

    # Timers

    def _arm(self) -> None:
        at = self._next_timer()
        if self._timer is not None:
            if self._timer.when() <= at:
                return  # it comes too early, and arranges itself anew
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._timer_fired)

    def _next_timer(self) -> float:
        at = self._heard_at + self._settings.idle_timeout
        if self._phase is Phase.OPEN and (interval := self._ping_interval()) is not None:
            at = min(at, max(self._heard_at, self._pinged_at) + interval)
        recovery = self._recovery.next_timer()
        return at if recovery is None else min(at, recovery[0])

    def _ping_interval(self) -> float | None:
        if self._settings.ping_interval is None:
            return None
        return min(self._settings.ping_interval, self._settings.idle_timeout / PINGS_PER_TIMEOUT)

    def _timer_fired(self) -> None:
        self._timer = None
        now = self._loop.time()
        if now >= self._heard_at + self._settings.idle_timeout:
            seconds = self._settings.idle_timeout
            reason = f"idle timeout: nothing was received for {seconds:g} s"
            self._ending = (None, reason, False)
            self._finish()
            return
        interval = self._ping_interval()
        if (
            self._phase is Phase.OPEN
            and interval is not None
            and now >= max(self._heard_at, self._pinged_at) + interval
        ):
            self._pinged_at = now
            self._control.append(Ping())
        due = self._recovery.next_timer()
        if due is not None and due[0] <= now:
            lost = self._recovery.probe(now) if due[1] else self._recovery.lost(now)
            if due[1]:  # a probe goes whatever the window says
                wanted = [frame for frame in lost if self._is_wanted(frame)]
                self._control.extend(wanted or [Ping()])
            else:
                self._lose(lost)
        self._transmit()

    def _handshake_timed_out(self) -> None:
        if self._phase is Phase.HANDSHAKE:
            self.close(0, "the handshake took too long")

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._deadline):
            if timer is not None:
                timer.cancel()
        self._timer = self._deadline = None

    # The end

    def _send_farewell(self) -> None:
        packet = Packet(self._id, self._is_client, self._number, (), close=self._farewell)
        self._number += 1
        self._port.send(packet, packet.size, self._address)

    def _repeat_farewell(self) -> None:
        """Answer a peer that did not hear our CONNECTION_CLOSE, more and more rarely."""
        self._heard_after_close += 1
        if self._farewell and self._heard_after_close & (self._heard_after_close - 1) == 0:
            self._send_farewell()

    def _fail(self, exc: Exception) -> None:
        """A fault of the receiver: tell the loop, the peer nothing of it, and close."""
        self._loop.call_exception_handler({"message": "receiver failed", "exception": exc})
        self.close(0x1, "internal error")

    def _finish(self) -> None:
        if self._phase is Phase.OVER:
            return
        self._phase = Phase.OVER
        self._cancel_timers()
        code, reason, by_peer = self._ending
        try:
            if self._receiver is not None:
                self._receiver.closed(code, reason, by_peer)
        except Exception as exc:
            self._loop.call_exception_handler({"message": "receiver failed", "exception": exc})
        finally:
            self._on_over(reason)

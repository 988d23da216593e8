"""Drives one connection of the library: datagrams and time in, events and datagrams out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final

from aioquic.quic import events

from kvcs.observe import get_logger
from kvcs.quic.aioquic_backend.budget import SendBudget
from kvcs.quic.aioquic_backend.ending import Ending, ending_of
from kvcs.quic.aioquic_backend.ports import Address, Clock, Datagrams, Owner, Sizes, Timer, Wire
from kvcs.quic.aioquic_backend.private.connection import Connection
from kvcs.quic.aioquic_backend.private.flights import reuse
from kvcs.quic.aioquic_backend.prober import DatagramSizeProber
from kvcs.quic.aioquic_backend.settings import SMALLEST_DATAGRAM, QuicSettings
from kvcs.quic.transport import TransportReceiver

log = get_logger("kvcs.quic")

INTERNAL_ERROR: Final = 0x1
"""MOQT's session code for a fault of ours (§14)."""

TIMER_MARGIN: Final = 1e-6
"""Seconds added to a timer's own time: at the very instant, rounding can leave it pending."""

PINGS_PER_TIMEOUT: Final = 3
"""Where the peer's idle time-out is shorter than ours, PINGs come at least this often in it."""


SHORTEST_LINGER: Final = 0.02
"""Seconds between CONNECTION_CLOSE and the end, at least: a busy peer is slower than its path."""


class Phase(Enum):
    """Where a connection is in its life."""

    HANDSHAKE = 0
    OPEN = 1
    CLOSING = 2
    OVER = 3


@dataclass(frozen=True, slots=True)
class Negotiated:
    """What both sides agreed in the handshake."""

    alpn: str
    """The application protocol."""

    datagrams: bool
    """Whether the peer accepts DATAGRAM frames."""

    idle_timeout: float
    """Seconds of silence that end the connection."""


class ConnectionDriver:
    """One connection from its first datagram to its end: no socket and no task of its own.

    A subclass makes the receiver in `_make_receiver` once the handshake is complete: `connected`
    is the receiver's first call and `closed` its last, each once. A connection whose handshake
    fails has no receiver; its owner is told.
    """

    def __init__(
        self,
        quic: Connection,
        *,
        wire: Wire,
        clock: Clock,
        owner: Owner,
        settings: QuicSettings,
        peer: str,
        datagram_sizes: Sizes,
    ) -> None:
        """Wrap a connection whose handshake has not begun.

        Args:
            quic: the library's connection.
            wire: takes its datagrams.
            clock: gives time.
            owner: hears of connection IDs and of the end.
            settings: named numbers.
            peer: whom this connection is with, for logs and messages.
            datagram_sizes: gives the UDP payloads, in octets, to try on the way to an address.
        """
        self._quic = quic
        self._wire = wire
        self._clock = clock
        self._owner = owner
        self._settings = settings
        self._receiver: TransportReceiver | None = None
        self._phase = Phase.HANDSHAKE
        self._ending: Ending | None = None
        self._farewell: Datagrams = []
        self._heard_after_close = 0
        self._in_batch = False
        self._budget = SendBudget(settings.send_buffer, settings.send_buffer_limit)
        self._datagram_sizes = datagram_sizes
        self._prober = DatagramSizeProber(())
        self._path: Address | None = None
        self._octets_sent = self._octets_received = 0
        self._suspected = False
        quic.watch_path(self)
        self._heard_at = clock.time()
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self._ping_timer: Timer | None = None
        self._deadline: Timer | None = None
        self._closed = asyncio.Event()
        self.peer: Final = peer
        self.negotiated: Negotiated | None = None
        """What was agreed; None before the handshake is complete."""
        self._log = log.bind(
            connection=quic.original_destination_connection_id.hex()[:8], peer=peer
        )

    # What the owner calls.

    @property
    def is_over(self) -> bool:
        """Whether nothing will happen any more."""
        return self._phase is Phase.OVER

    @property
    def in_handshake(self) -> bool:
        """Whether the handshake still goes on."""
        return self._phase is Phase.HANDSHAKE

    @property
    def heard_nothing(self) -> bool:
        """Whether no packet of the peer could be read yet."""
        return self._quic.heard_nothing

    def connect(self, address: Address) -> None:
        """Send a client's first flight to `address`."""
        self._quic.connect(address, now=self._clock.time())
        self._transmit()

    def give_up_after(self, seconds: float) -> None:
        """End the connection unless its handshake is complete by then."""
        self._set_deadline(self._clock.time() + seconds, self._handshake_timed_out)

    def datagrams_received(self, datagrams: list[bytes], address: Address, now: float) -> int:
        """Take datagrams in order and deliver their events; `batch_ended` follows.

        Octets of one stream that lie in datagrams behind each other are delivered together. What
        goes on otherwise is not gathered: octets are still in the processor's cache, and the
        memory of more would be fetched from the system and given back each time. Behind a packet
        that breaks a rule nothing is read any more.

        Returns:
            How many were taken, at least one: the rest may be for another connection.
        """
        if self._phase is Phase.CLOSING:
            self._repeat_farewell()
            return 1
        quic = self._quic
        if self._phase is Phase.OVER or quic.close_is_pending:
            return 1
        self._heard_at = now
        self._in_batch = True
        batch = quic.batch(datagrams, address, now)
        while batch.at < batch.count and not self._is_ending() and not quic.close_is_pending:
            piece = None
            try:
                piece = quic.take(batch)
            except Exception:
                self._fail("datagram_failed")
            try:
                if piece is None:
                    self._deliver()
                elif self._phase is Phase.OPEN and self._receiver is not None:
                    stream_id, octets = piece
                    self._receiver.stream_data(stream_id, octets, False)
                    quic.consume(stream_id, len(octets))
            except Exception:
                self._fail("receiver_failed")
        self._octets_received += sum(map(len, datagrams[: batch.at]))
        return batch.at

    def batch_ended(self, now: float) -> None:
        """All datagrams of a wake-up are delivered: let the receiver send, then transmit once."""
        self._in_batch = True
        try:
            if not self._is_ending():
                self._measure(now)
            if self._receiver is not None and self._phase is Phase.OPEN:
                self._receiver.batch_received()
        except Exception:
            self._fail("receiver_failed")
        finally:
            self._in_batch = False
        if self._is_ending():
            return
        if self._quic.peer_closed:
            # The library reports it three probe time-outs later; nothing can come any more.
            self._finish()
        else:
            self._transmit()

    def wire_unblocked(self) -> None:
        """The wire takes datagrams again."""
        self._transmit()

    def end(self, code: int, reason: str) -> None:
        """Close with an application code, after one chance for what is queued to leave."""
        if not self._is_ending():
            if not self._quic.close_is_pending:
                self._transmit()
            self._quic.close_application(code, reason)
            self._transmit()

    def abandon(self) -> None:
        """Forget a connection that never heard a peer: nothing is sent, nobody is told."""
        self._phase = Phase.OVER
        self._cancel_timers()
        self._closed.set()

    # For the subclass.

    def _make_receiver(self) -> TransportReceiver:
        raise AssertionError("a subclass makes the receiver")

    def _measure(self, now: float) -> None:
        self._budget.acknowledged(self._quic.measure(), now, self._quic.smallest_rtt)

    def _transmit(self) -> None:
        """Build what may leave now, send it, and arrange the library's next timer."""
        if self._is_ending():
            return
        now = self._clock.time()
        leaving = self._quic.close_is_pending
        try:
            if leaving or not self._wire.blocked:
                datagrams: Datagrams = [] if leaving else self._probe(now)
                datagrams += self._quic.datagrams_to_send(now)
                self._octets_sent += sum([len(data) for data, _ in datagrams])
                self._wire.send(datagrams)
                if leaving:
                    self._farewell = datagrams
                elif not self._wire.blocked:
                    reuse(datagrams)
            if not self._in_batch:
                self._deliver()  # building packets issues connection IDs
        except Exception:
            self._fail("transmit_failed")
            return
        if leaving:
            self._linger()
        elif not self._wire.blocked:  # else `wire_unblocked` comes back to this
            self._arm()

    # Events

    def _is_ending(self) -> bool:
        return self._phase is Phase.CLOSING or self._phase is Phase.OVER

    def _deliver(self) -> None:
        """Hand the library's events to the receiver, in order."""
        next_event = self._quic.next_event
        while (event := next_event()) is not None:
            if type(event) is events.StreamDataReceived:
                if self._phase is Phase.OPEN and self._receiver is not None:
                    self._receiver.stream_data(event.stream_id, event.data, event.end_stream)
                    self._quic.consume(event.stream_id, len(event.data))
            elif isinstance(event, events.ConnectionIdIssued):
                self._owner.connection_id_issued(self, event.connection_id)
            elif isinstance(event, events.ConnectionIdRetired):
                self._owner.connection_id_retired(self, event.connection_id)
            elif isinstance(event, events.HandshakeCompleted):
                self._handshake_completed(event)
            elif isinstance(event, events.ConnectionTerminated):
                self._finish()
            elif self._phase is Phase.OPEN and self._receiver is not None:
                self._deliver_rare(event, self._receiver)

    def _deliver_rare(self, event: events.QuicEvent, receiver: TransportReceiver) -> None:
        if isinstance(event, events.StreamReset):
            self._quic.consume_reset(event.stream_id)
            receiver.stream_reset(event.stream_id, event.error_code)
        elif isinstance(event, events.StopSendingReceived):
            receiver.stop_sending(event.stream_id, event.error_code)
        elif isinstance(event, events.DatagramFrameReceived):
            receiver.datagram(event.data)

    def _handshake_completed(self, event: events.HandshakeCompleted) -> None:
        if self._phase is not Phase.HANDSHAKE:
            return
        self._phase = Phase.OPEN
        if self._deadline is not None:
            self._deadline.cancel()
        self.negotiated = Negotiated(
            alpn=event.alpn_protocol or "",
            datagrams=self._quic.largest_datagram() > 0,
            idle_timeout=self._quic.effective_idle_timeout,
        )
        if not self.negotiated.datagrams:
            self._log.warning("peer_without_datagrams")
        self._measure(self._clock.time())
        self._schedule_ping()
        self._receiver = self._make_receiver()
        self._receiver.connected()
        self._owner.handshake_completed(self)

    # The size of datagrams

    def _probe(self, now: float) -> Datagrams:
        quic = self._quic
        if self._phase is not Phase.OPEN or not quic.handshake_confirmed or quic.has_ended:
            return []
        address = quic.get_peer_address()
        if address != self._path:
            self._path_changed(address)
        if not quic.path_is_validated or (size := self._prober.next_probe(now)) is None:
            return []
        return list(quic.probe(size, now, partial(self._probe_ended, self._prober)))

    def _path_changed(self, address: Address) -> None:
        """Search the new path, unless only the port is new: that is the same path, translated."""
        before, self._path = self._path, address
        if before is not None:
            self._quic.restart_timeouts()
        if before is None or before[0] != address[0]:
            most = self._quic.largest_taken
            sizes = self._datagram_sizes(address)
            self._prober = DatagramSizeProber(min(size, most) for size in sizes)
            self._quic.set_datagram_size(SMALLEST_DATAGRAM)
            self._suspected = False

    def _probe_ended(self, prober: DatagramSizeProber, arrived: bool) -> None:
        if prober is not self._prober:
            return  # the path has changed since
        size = prober.probe_ended(arrived, self._clock.time())
        if size is not None:
            self._suspected = False
            self._quic.set_datagram_size(size)
            self._log.info("datagram_size", octets=size)

    def large_packets_suspected(self) -> None:
        """Large packets are lost: send small ones, until one tells."""
        if self._prober.size > SMALLEST_DATAGRAM:
            self._suspected = True
            self._quic.set_datagram_size(SMALLEST_DATAGRAM)

    def large_packets_cleared(self) -> None:
        """A large packet did arrive: the peer was silent, or the network was full."""
        if self._suspected:
            self._suspected = False
            self._quic.set_datagram_size(self._prober.size)

    def large_packets_condemned(self) -> None:
        """Small packets arrive and large ones do not: search the path anew."""
        if self._suspected:
            self._suspected = False
            self._log.warning("datagram_size_no_longer_passes", octets=self._prober.size)
            self._prober.fell()

    # Timers

    def _arm(self) -> None:
        """Arrange the library's next timer; one that comes too early arranges itself anew."""
        at = None if self._phase is Phase.OVER else self._quic.get_timer()
        if at is None:
            return
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._clock.call_at(at, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        at = self._quic.get_timer()
        if self._is_ending() or at is None:
            return
        now = self._clock.time()
        if at > now and at > self._timer_at:
            self._arm()
            return
        try:
            self._quic.handle_timer(max(now, at + TIMER_MARGIN))
            self._deliver()
        except Exception:
            self._fail("timer_failed")
        self._transmit()

    def _schedule_ping(self) -> None:
        if self._settings.ping_interval is None:
            return
        timeout = self._quic.effective_idle_timeout
        interval = min(self._settings.ping_interval, timeout / PINGS_PER_TIMEOUT)
        now = self._clock.time()
        at = max(self._heard_at + interval, now + interval / PINGS_PER_TIMEOUT)
        self._ping_timer = self._clock.call_at(at, partial(self._ping_due, interval))

    def _ping_due(self, interval: float) -> None:
        if self._clock.time() - self._heard_at >= interval:
            self._quic.send_ping(0)
            self._transmit()
        if self._phase is Phase.OPEN:
            self._schedule_ping()

    def _set_deadline(self, at: float, callback: Callable[[], object]) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._clock.call_at(at, callback)

    def _handshake_timed_out(self) -> None:
        if self._phase is Phase.HANDSHAKE:
            self.end(0, "the handshake took too long")

    def _cancel_timers(self) -> None:
        for timer in (self._timer, self._ping_timer, self._deadline):
            if timer is not None:
                timer.cancel()
        self._timer = self._ping_timer = self._deadline = None

    # The end

    def _repeat_farewell(self) -> None:
        """Answer a peer that did not hear our CONNECTION_CLOSE, more and more rarely."""
        self._heard_after_close += 1
        if self._heard_after_close & (self._heard_after_close - 1) == 0:
            self._wire.send(self._farewell)

    def _linger(self) -> None:
        """Our CONNECTION_CLOSE is on the wire: wait a little in case it must be repeated."""
        self._ending = self._read_ending()
        if self._phase is Phase.HANDSHAKE:
            self._finish()
            return
        self._phase = Phase.CLOSING
        now = self._clock.time()
        rtt = self._quic.smoothed_rtt
        # RFC 9000 §10.2 has three probe time-outs, so as not to answer late packets by stateless
        # resets. A peer that goes on is heard within a round trip; one that heard the close passes
        # over what comes late, and one that never did learns by a reset that it is over.
        wait = self._settings.close_timeout if rtt is None else max(2 * rtt, SHORTEST_LINGER)
        self._cancel_timers()
        self._set_deadline(now + min(wait, self._settings.close_timeout), self._finish)

    def _fail(self, event: str) -> None:
        """A fault of ours or of the library: log it, tell the peer nothing of it, and close."""
        self._log.exception(event)
        if self._is_ending():
            return
        self._ending = Ending(code=INTERNAL_ERROR, reason="internal error", by_peer=False)
        self._phase = Phase.CLOSING
        self._cancel_timers()
        try:
            self._quic.close_application(INTERNAL_ERROR, "internal error")
            self._farewell = self._quic.datagrams_to_send(self._clock.time())
            self._wire.send(self._farewell)
        except Exception:
            self._log.exception("close_failed")
        # Not here and now: we may be inside a call of the receiver's.
        self._set_deadline(self._clock.time(), self._finish)

    def _finish(self) -> None:
        if self._phase is Phase.OVER:
            return
        self._phase = Phase.OVER
        self._cancel_timers()
        ending = self._ending or self._read_ending()
        code = None if ending.code is None else int(ending.code)
        self._log.info("connection_closed", code=code, reason=ending.reason, by_peer=ending.by_peer)
        try:
            if self._receiver is not None:
                self._receiver.closed(ending.code, ending.reason, ending.by_peer)
        except Exception:
            self._log.exception("receiver_failed")
        finally:
            self._owner.finished(self, ending)
            self._closed.set()

    def _read_ending(self) -> Ending:
        event = self._quic.close_event
        assert event is not None  # the library sets it before it leaves the open state
        return ending_of(
            event,
            by_peer=self._quic.peer_closed,
            idle_timeout=self._quic.effective_idle_timeout,
        )

"""One QUIC connection as `kvcs.quic.transport.Transport`."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from kvcs.moqt.actions import Rank
from kvcs.quic.aioquic_backend.driver import ConnectionDriver, Phase
from kvcs.quic.aioquic_backend.ports import Clock, Owner, Sizes, Wire
from kvcs.quic.aioquic_backend.private.connection import Connection
from kvcs.quic.aioquic_backend.settings import QuicSettings
from kvcs.quic.transport import Buffer, ReceiverFactory, TransportReceiver, TransportStats

COPY_OCTETS: Final = 64 * 1024
"""Octets are copied in pieces of this size: the memory of larger ones would be fetched from the
system, and cleared by it, each time."""

STREAM_OCTETS: Final = 2048
"""Octets that each stream of ours counts beside its own while any of those wait or are not
acknowledged: what it weighs. A peer that gives credit for many must not have tiny ones pile up."""

CONTROL_MESSAGE_TIMEOUT: Final = 0x11
"""MOQT's session code for a peer that is too slow with control messages (§14)."""


class AioquicTransport(ConnectionDriver):
    """Implements `kvcs.quic.transport.Transport` over the library's connection.

    Every method may be called from within a call of the receiver's. What is sent there leaves
    when the events of the batch are delivered, in one transmission.
    """

    def __init__(
        self,
        quic: Connection,
        *,
        wire: Wire,
        clock: Clock,
        owner: Owner,
        receiver_factory: ReceiverFactory,
        settings: QuicSettings,
        peer: str,
        datagram_sizes: Sizes,
    ) -> None:
        """Wrap a connection; `receiver_factory` is called once, when its handshake is complete."""
        super().__init__(
            quic,
            wire=wire,
            clock=clock,
            owner=owner,
            settings=settings,
            peer=peer,
            datagram_sizes=datagram_sizes,
        )
        self._receiver_factory = receiver_factory

    def _make_receiver(self) -> TransportReceiver:
        return self._receiver_factory(self)

    # What may be sent.

    def octets(self) -> int:
        """Octets of Object data that may be handed over now.

        Bounded by what is unsent and unacknowledged, streams included, and by the peer's connection
        window.
        """
        if self._phase is not Phase.OPEN:
            return 0
        quic = self._quic
        room = self._budget.limit - quic.held - quic.held_streams * STREAM_OCTETS
        return max(0, min(room, quic.data_credit))

    def stream_octets(self, stream_id: int) -> int:
        """Octets that the peer lets one stream of ours take, beyond what it holds already.

        0 for a stream that has ended, or that the peer's stream credit does not let us open.
        """
        return self._quic.stream_credit(stream_id) if self._phase is Phase.OPEN else 0

    def uni_streams(self) -> int:
        """Unidirectional streams that may be opened now."""
        return self._quic.streams_credit(True) if self._phase is Phase.OPEN else 0

    def bidi_streams(self) -> int:
        """Bidirectional streams that may be opened now."""
        return self._quic.streams_credit(False) if self._phase is Phase.OPEN else 0

    def datagram_octets(self) -> int:
        """Largest datagram that `send_datagram` sends now; 0 where the peer takes none."""
        return self._quic.largest_datagram() if self._phase is Phase.OPEN else 0

    def unacknowledged(self) -> int:
        """Stream octets handed over that the peer has not acknowledged; `close` loses them.

        A FIN that follows acknowledged octets counts as one. It changes before `batch_received`.
        """
        return self._quic.held + self._quic.fins

    # Sending

    def send(self, stream_id: int, data: Buffer, fin: bool) -> None:
        """Queue octets on a stream, copying them; a first call opens it.

        Quiet where the stream was reset by either side, and once the connection ends. A stream
        opened beyond the peer's stream credit waits in the library, so ask for credit first.

        Object octets wait for `octets`, control messages for nothing: where a peer makes us send
        those and takes none, the connection is closed.

        Raises:
            UsageError: the stream is not ours to write, its ID is not the next, or it had a FIN.
        """
        if len(data) <= COPY_OCTETS:
            self.send_all(stream_id, (bytes(data),), fin)
            return
        view = memoryview(data).cast("B")
        starts = range(0, len(view), COPY_OCTETS)
        self.send_all(stream_id, [bytes(view[at : at + COPY_OCTETS]) for at in starts], fin)

    def send_all(self, stream_id: int, parts: Sequence[Buffer], fin: bool) -> None:
        """Queue octets that lie in several places; see `send`.

        They are not copied: they must stay as they are until the peer has acknowledged them.
        """
        if self._phase is Phase.OPEN:
            self._quic.write(stream_id, parts, fin)
            if self._quic.held > self._budget.highest + self._settings.control_backlog:
                self.end(CONTROL_MESSAGE_TIMEOUT, "control messages are not taken")

    def rank(self, stream_id: int, rank: Rank) -> None:
        """Let what follows on a stream of ours leave in that place among others.

        A stream of Objects goes while it has octets that may leave, before all that stand behind
        it; equals take turns. Octets that are to be sent again count like new ones, and octets that
        are in the way of more urgent ones like those. Control and request streams go before all of
        them whatever is said here. For a stream that is not open yet it holds where the next octets
        sent are its first ones.
        """
        if self._phase is Phase.OPEN:
            self._quic.rank(stream_id, rank)

    def prioritize(self, request_id: int, subscriber_priority: int) -> None:
        """Let what waits of a request, as the ranks named it, stand by that Subscriber Priority."""
        if self._phase is Phase.OPEN:
            self._quic.prioritize(request_id, subscriber_priority)

    def reset(self, stream_id: int, code: int) -> None:
        """End our sending direction early; quiet when it has ended already.

        Raises:
            UsageError: the stream is not ours to reset, or its ID is not the next one.
        """
        if self._phase is Phase.OPEN:
            self._quic.abort_sending(stream_id, code)
            self._measure(self._clock.time())

    def stop_sending(self, stream_id: int, code: int) -> None:
        """Ask the peer to end its direction; quiet when it has ended or was stopped already.

        Octets that are on their way may still be delivered.

        Raises:
            UsageError: the stream has no receiving side.
        """
        if self._phase is Phase.OPEN:
            self._quic.abort_receiving(stream_id, code)

    def send_datagram(self, data: bytes) -> None:
        """Send one unreliable datagram; one too large, or one too many that wait, is dropped."""
        if self._phase is Phase.OPEN and not self._quic.offer_datagram(data):
            self._log.debug("datagram_dropped", octets=len(data))

    def flush(self) -> None:
        """Put what is queued on the wire; within a batch of events, at its end."""
        if not self._in_batch:
            self._transmit()

    # Receive credit

    def withhold(self, octets: int) -> None:
        """Keep connection credit back for octets that were delivered but wait in a buffer above.

        Whoever withholds nearly the whole receive window stops the peer's control stream, too:
        bound what waits by time.
        """
        self._quic.withhold(octets)

    def release(self, octets: int) -> None:
        """Give withheld credit out again.

        Raises:
            UsageError: more is released than is withheld.
        """
        self._quic.withhold(-octets)
        if self._quic.data_limit_is_due():
            self.flush()

    # The end, and facts

    def close(self, code: int, reason: str) -> None:
        """Close the connection with an application code.

        What is queued gets one chance to leave; what the peer has not acknowledged may be lost.
        `closed` follows within `close_timeout`, and nothing else.
        """
        self.end(code, reason)

    async def wait_closed(self) -> None:
        """Wait until the connection is over; cancelling leaves it as it is."""
        await self._closed.wait()

    def stats(self) -> TransportStats:
        """Figures of the path, now."""
        quic, (receive_buffer, send_buffer) = self._quic, self._wire.socket_buffers
        smallest = quic.smallest_rtt
        return TransportStats(
            datagram_size=quic.datagram_size,
            rtt=quic.smoothed_rtt,
            smallest_rtt=None if smallest == inf else smallest,
            congestion_window=quic.congestion_window,
            octets_in_flight=quic.octets_in_flight,
            octets_sent=self._octets_sent,
            octets_received=self._octets_received,
            packets_lost=quic.packets_lost,
            receive_buffer=receive_buffer,
            send_buffer=send_buffer,
        )

    @property
    def smoothed_rtt(self) -> float | None:
        """Round trip in seconds; None before the first was measured."""
        return self._quic.smoothed_rtt

    @property
    def datagram_size(self) -> int:
        """Largest UDP payload that is sent now, in octets."""
        return self._quic.datagram_size

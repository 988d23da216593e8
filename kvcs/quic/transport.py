"""What kvcs needs of a QUIC library, as Protocols; a backend room implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcs.moqt.actions import Rank

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class TransportStats:
    """What one connection measures of its path; octets are UDP payload, times seconds."""

    datagram_size: int
    """Largest UDP payload that is sent now, in octets: what the path was found to carry."""

    rtt: float | None
    """Smoothed round trip; None before the first was measured."""

    smallest_rtt: float | None
    """Smallest round trip so far."""

    congestion_window: int
    """Octets that may be on the way at once."""

    octets_in_flight: int
    """Octets on the way, which the peer has not acknowledged."""

    octets_sent: int
    """Octets of all datagrams sent."""

    octets_received: int
    """Octets of all datagrams received."""

    packets_lost: int
    """Packets called lost, those repeated because nothing was heard included."""

    receive_buffer: int
    """Octets of the socket's receive buffer, which the kernel may have made smaller than asked."""

    send_buffer: int
    """Octets of its send buffer."""


class Transport(Protocol):
    """One QUIC connection, as its session sees it.

    The four credit methods are what `kvcs.moqt.actions.SendCredit` asks for: the session core
    reads them to choose what goes next, and never gives the library more.
    """

    @property
    def peer(self) -> str:
        """Whom the connection is with, for logs and messages."""

    def octets(self) -> int:
        """Octets of Object data that may go now; what waits in the library is bounded."""

    def stream_octets(self, stream_id: int) -> int:
        """Octets that the peer's flow control lets this stream send, beyond what it holds."""

    def uni_streams(self) -> int:
        """Unidirectional streams that may be opened now within the peer's stream credit."""

    def bidi_streams(self) -> int:
        """Bidirectional streams that may be opened now within the peer's stream credit."""

    def send(self, stream_id: int, data: Buffer, fin: bool) -> None:
        """Queue octets on a stream, which a first call opens; the octets are copied."""

    def send_all(self, stream_id: int, parts: Sequence[Buffer], fin: bool) -> None:
        """Queue octets that lie in several places, as one `send` of all of them would.

        They are not copied: they must not change until the peer has acknowledged them.
        """

    def rank(self, stream_id: int, rank: Rank) -> None:
        """Let what follows on a stream leave in that place among other streams' octets.

        For a stream that is not open yet it holds where the next octets sent are its first ones.
        """

    def prioritize(self, request_id: int, subscriber_priority: int) -> None:
        """Let what waits of a request, as the ranks named it, stand by that Subscriber Priority."""

    def reset(self, stream_id: int, code: int) -> None:
        """End our sending direction early; quiet when it has ended already."""

    def stop_sending(self, stream_id: int, code: int) -> None:
        """Ask the peer to end its sending direction; quiet when it has ended already."""

    def unacknowledged(self) -> int:
        """Stream octets handed over that the peer has not acknowledged; `close` loses them."""

    def stats(self) -> TransportStats:
        """Figures of the path, now."""

    def send_datagram(self, data: bytes) -> None:
        """Send one unreliable datagram; too large ones are dropped."""

    def flush(self) -> None:
        """Put what is queued on the wire."""

    def close(self, code: int, reason: str) -> None:
        """Close the connection with an application code."""


class TransportReceiver(Protocol):
    """What a backend calls, in the loop's thread, as things happen on one connection."""

    def connected(self) -> None:
        """The handshake is complete and ALPN agreed."""

    def stream_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        """Octets of a stream, in order; `data` may be empty when `fin` is set."""

    def stream_reset(self, stream_id: int, code: int) -> None:
        """The peer ended its sending direction early."""

    def stop_sending(self, stream_id: int, code: int) -> None:
        """The peer no longer reads this stream; the library has reset our direction."""

    def datagram(self, data: bytes) -> None:
        """One unreliable datagram."""

    def batch_received(self) -> None:
        """All events of one wake-up were delivered, or send credit may have grown: pump now."""

    def closed(self, code: int | None, reason: str, by_peer: bool) -> None:
        """The connection is over; nothing follows. `code` is the application code, if any."""


ReceiverFactory = Callable[[Transport], TransportReceiver]

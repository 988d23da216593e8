"""The named numbers of one QUIC endpoint, with their defaults and reasons."""

from __future__ import annotations

from dataclasses import dataclass

from kvcs.errors import UsageError

__all__ = ["QuicSettings"]

KIB = 1024
MIB = 1024 * KIB

SMALLEST_DATAGRAM = 1200
"""What every QUIC path must carry (RFC 9000 §14)."""

LARGEST_DATAGRAM = 64_000
"""About the most that a route over the loopback interface carries in one piece. To a peer that does
not declare a `max_udp_payload_size`, `LARGEST_UNDECLARED` is."""

LARGEST_UNDECLARED = 16_000
"""Sent to peers that do not say what they take: few have a receive buffer for many larger ones. The
library too goes no further, which writes a STREAM frame's length in two octets."""

HELD_DATAGRAMS = 12
"""Our receive buffer, by the size of datagrams that we declare to take. The kernel counts its own
overhead in, so one fewer of some sizes has room there: 11 of 4166 octets in 50,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuicSettings:
    """What one endpoint offers, grants and waits for.

    Sizes are octets, times seconds.

    Raises:
        UsageError: a value is outside what the protocol or the library can carry.
    """

    alpn: tuple[str, ...] = ("moqt-22",)
    """Application protocols, in order of preference (MOQT "Native QUIC")."""

    idle_timeout: float = 30.0
    """The connection ends after this much silence; the smaller of both peers' values counts."""

    ping_interval: float | None = 10.0
    """A PING goes out when nothing was received for this long; None sends none."""

    connect_timeout: float = 10.0
    """Bound of one handshake, name look-up and further addresses included."""

    close_timeout: float = 1.0
    """Longest wait between `close` and `closed`, while a lost CONNECTION_CLOSE may be repeated."""

    datagram_size: int | None = None
    """UDP payload to send, once the handshake is over and a probe of it arrived: 1200 to 64,000.
    None finds the largest that the path carries and the peer takes; 1200 sends no more than what
    every path takes."""

    max_datagram_frame_size: int = 65_535
    """Largest DATAGRAM frame that we accept; MOQT wants DATAGRAM negotiated, so never 0."""

    uni_streams: int = 512
    """Unidirectional streams that the peer may have open at once."""

    bidi_streams: int = 512
    """Bidirectional streams that the peer may have open at once."""

    send_buffer: int = 2 * MIB
    """Object octets left in the library, unsent and unacknowledged, on a path of small delay."""

    send_buffer_limit: int = 64 * MIB
    """What `send_buffer` may grow to where the measured rate times the delay asks for it."""

    control_backlog: int = 16 * MIB
    """Octets that replies and announcements may pile up to beside Objects, when a peer does not
    take them; then the connection is closed with CONTROL_MESSAGE_TIMEOUT."""

    receive_window: int = 16 * MIB
    """Octets of one connection that the peer may send ahead of what was consumed."""

    stream_receive_window: int = 4 * MIB
    """The same for one stream."""

    socket_buffer: int = 4 * MIB
    """SO_RCVBUF and SO_SNDBUF to ask for; the kernel may give less (net.core.rmem_max)."""

    max_connections: int = 1024
    """Connections of one listener; the next is refused."""

    max_handshakes: int = 256
    """Connections of one listener whose handshake is not complete. The next is refused, unless
    others from its network have fewer of them than those of another one, which then loses its
    oldest."""

    retry_handshakes: int = 32
    """From this many incomplete handshakes on, a client must first prove its address by a Retry:
    flights from false addresses never fill `max_handshakes`. It costs a round trip. 0: always."""

    stateless_resets: int = 500
    """Stateless resets that one listener sends in a second, at most: one answers a packet of a
    connection that it does not know, such as those of before it was started again. 0 sends none."""

    def __post_init__(self) -> None:
        if not self.alpn or not all(self.alpn):
            raise UsageError("alpn must name at least one protocol")
        size = self.datagram_size
        if size is not None and not SMALLEST_DATAGRAM <= size <= LARGEST_DATAGRAM:
            raise UsageError(
                f"datagram_size must lie between {SMALLEST_DATAGRAM} and {LARGEST_DATAGRAM} octets,"
                f" not {size}: no path carries larger ones in one piece"
            )
        for name in ("idle_timeout", "connect_timeout", "close_timeout"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be more than 0 s, not {getattr(self, name)}")
        if self.ping_interval is not None and not 0 < self.ping_interval < self.idle_timeout:
            raise UsageError(
                f"ping_interval must lie between 0 s and idle_timeout ({self.idle_timeout} s),"
                f" not {self.ping_interval}; None sends no PING"
            )
        if not 0 < self.max_datagram_frame_size <= 65_535:
            raise UsageError(
                "max_datagram_frame_size must lie between 1 and 65535 octets,"
                f" not {self.max_datagram_frame_size}: MOQT wants DATAGRAM negotiated"
            )
        for name in (
            "uni_streams",
            "bidi_streams",
            "send_buffer",
            "control_backlog",
            "receive_window",
            "stream_receive_window",
            "socket_buffer",
            "max_connections",
            "max_handshakes",
        ):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("retry_handshakes", "stateless_resets"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must not be negative, not {getattr(self, name)}")
        if self.send_buffer_limit < self.send_buffer:
            raise UsageError(
                f"send_buffer_limit ({self.send_buffer_limit}) must not be below"
                f" send_buffer ({self.send_buffer})"
            )

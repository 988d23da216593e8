"""What packets of the model carry: QUIC's frames, as far as sessions can tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PACKET_OCTETS: Final = 1200
"""Largest packet, UDP payload: what every QUIC path carries."""

PACKET_OVERHEAD: Final = 30
"""Octets of a packet beside its frames: header and tag."""

FRAME_OVERHEAD: Final = 12
"""Octets of a frame beside its data, as a fair guess."""


@dataclass(frozen=True, slots=True)
class StreamData:
    """Octets of a stream."""

    stream_id: int
    offset: int
    data: bytes
    fin: bool


@dataclass(frozen=True, slots=True)
class Reset:
    """RESET_STREAM."""

    stream_id: int
    code: int
    final_size: int


@dataclass(frozen=True, slots=True)
class Stop:
    """STOP_SENDING."""

    stream_id: int
    code: int


@dataclass(frozen=True, slots=True)
class MaxData:
    """Octets that the peer may send on all streams."""

    limit: int


@dataclass(frozen=True, slots=True)
class MaxStreamData:
    """Octets that the peer may send on one stream."""

    stream_id: int
    limit: int


@dataclass(frozen=True, slots=True)
class MaxStreams:
    """Streams that the peer may open."""

    unidirectional: bool
    limit: int


@dataclass(frozen=True, slots=True)
class Datagram:
    """DATAGRAM: lost for good when its packet is."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """The handshake: 0 the client's first flight, 1 the server's, 2 the client's last.

    It carries what TLS carries beside keys: the limits of who sends it.
    """

    step: int
    data: int
    stream_data: int
    uni_streams: int
    bidi_streams: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for an acknowledgement."""


Frame = StreamData | Reset | Stop | MaxData | MaxStreamData | MaxStreams | Datagram | Hello | Ping
"""What is acknowledged, and sent again when it was lost (but DATAGRAM and PING)."""


@dataclass(frozen=True, slots=True)
class Close:
    """CONNECTION_CLOSE. ``code`` is the application's, None where QUIC itself refuses."""

    code: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet."""

    connection_id: int
    """Names the connection at both ends, whatever the addresses."""

    from_client: bool
    number: int
    frames: tuple[Frame, ...]
    acknowledged: tuple[tuple[int, int], ...] = ()
    """Ranges of packet numbers that arrived, both ends inclusive, latest first."""

    close: Close | None = None

    @property
    def size(self) -> int:
        """UDP payload, octets."""
        return PACKET_OVERHEAD + 4 * len(self.acknowledged) + sum(map(frame_size, self.frames))


def frame_size(frame: Frame) -> int:
    """Octets of a frame."""
    if isinstance(frame, StreamData | Datagram):
        return FRAME_OVERHEAD + len(frame.data)
    return PACKET_OCTETS - PACKET_OVERHEAD if isinstance(frame, Hello) else FRAME_OVERHEAD

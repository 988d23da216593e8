"""Reads the frames of packets that hold several pieces of streams, perhaps behind an ACK frame.

A sender fills what one stream leaves of a packet from the next one, and acknowledges with the first
packet of a transmission. The library copies such a packet into a buffer, and each piece out of it
and again.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from aioquic.quic.packet import QuicFrameType

from kvcs.quic.aioquic_backend.private.flights import FIN, LENGTH, OFFSET, STREAM

STREAM_MASK: Final = 0xF8
"""Bits of a frame's type that say whether it is a STREAM frame (RFC 9000 §19.8)."""

INTEGER_MASKS: Final = {1: 0x3F, 2: 0x3FFF, 4: 0x3FFF_FFFF, 8: 0x3FFF_FFFF_FFFF_FFFF}
"""What an integer's value is, by its octets (RFC 9000 §16)."""


class StreamFrame(NamedTuple):
    """A STREAM frame without FIN."""

    stream_id: int

    offset: int
    """Of its first octet in the stream."""

    start: int
    """Where its octets begin in the packet."""

    stop: int
    """Where they end."""


class Frames(NamedTuple):
    """What a packet holds."""

    acknowledgement: int
    """Octets of the ACK frame that it begins with; 0 where there is none."""

    pieces: list[StreamFrame]
    """The frames behind it, all of which have data and each of which is of another stream."""


def frames_of(payload: bytes) -> Frames | None:
    """Read what a packet holds, where that is as `Frames` says; else None.

    Args:
        payload: of a 1-RTT packet, not empty.
    """
    try:
        begin = _acknowledgement(payload) if payload[0] == QuicFrameType.ACK else 0
        pieces = _pieces(payload, begin)
    except IndexError:
        return None
    if not pieces or len({piece.stream_id for piece in pieces}) < len(pieces):
        return None
    return Frames(begin, pieces)


def _acknowledgement(payload: bytes) -> int:
    """Octets of an ACK frame that a packet begins with (RFC 9000 §19.3)."""
    at = 1
    for _ in range(2):  # the largest number, the delay
        at = _integer(payload, at)[1]
    ranges, at = _integer(payload, at)
    for _ in range(1 + 2 * ranges):
        at = _integer(payload, at)[1]
    return at


def _pieces(payload: bytes, at: int) -> list[StreamFrame]:
    """STREAM frames without FIN, up to the end; none where anything else is there."""
    pieces: list[StreamFrame] = []
    size = len(payload)
    while at < size:
        kind = payload[at]
        if kind & (STREAM_MASK | FIN) != STREAM:
            return []
        stream_id, at = _integer(payload, at + 1)
        offset = 0
        if kind & OFFSET:
            offset, at = _integer(payload, at)
        stop = size
        if kind & LENGTH:
            length, at = _integer(payload, at)
            stop = at + length
        if not at < stop <= size:
            return []
        pieces.append(StreamFrame(stream_id, offset, at, stop))
        at = stop
    return pieces


def _integer(payload: bytes, at: int) -> tuple[int, int]:
    """A variable-length integer and where it ends, which is beyond the end where it is cut off.

    Raises:
        IndexError: it begins there.
    """
    octets = 1 << (payload[at] >> 6)
    stop = at + octets
    return int.from_bytes(payload[at:stop], "big") & INTEGER_MASKS[octets], stop

"""What a session core asks its shell to do, and what it asks about credit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class SendCredit(Protocol):
    """How much may be handed to the transport now."""

    def octets(self) -> int:
        """Octets of Object data, over all streams."""

    def stream_octets(self, stream_id: int) -> int:
        """Octets that the peer's flow control lets one stream send."""

    def uni_streams(self) -> int:
        """Unidirectional streams that may be opened."""

    def bidi_streams(self) -> int:
        """Bidirectional streams that may be opened."""


@dataclass(frozen=True, slots=True)
class Send:
    """Queue octets on a stream; the first for an ID opens it."""

    stream_id: int
    data: tuple[Buffer, ...]
    fin: bool = False


@dataclass(frozen=True, slots=True)
class ResetStream:
    """End our sending direction early."""

    stream_id: int
    code: int


@dataclass(frozen=True, slots=True)
class StopSending:
    """Ask the peer to end its sending direction."""

    stream_id: int
    code: int


@dataclass(frozen=True, slots=True)
class SendDatagram:
    """Send one datagram."""

    data: bytes


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Close the connection with a session code; nothing follows."""

    code: int
    reason: str


Action = Send | ResetStream | StopSending | SendDatagram | CloseSession

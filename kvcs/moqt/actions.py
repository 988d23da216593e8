"""What a session core asks its shell to do, and what it asks about credit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvcs.moqt.names import TrackNamespace

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


class SendKey(NamedTuple):
    """Place of a request's next Object in the order; smaller goes first (MOQT §5.1)."""

    subscriber_priority: int
    publisher_priority: int
    order_differs: bool
    """Whether a fill's Group Order differs from its subscription's: such a fill goes last."""
    group_rank: int
    is_live: bool
    is_stream: bool
    """False for a datagram, which goes before the Subgroups of its Group."""
    position: int
    """Subgroup ID, or Object ID of a datagram."""


class Rank(NamedTuple):
    """Where octets of a stream stand among those of others that wait below the session.

    The lower Subscriber Priority goes first, then the lower Publisher Priority. Families of equal
    priorities take turns; within one the lower key goes first, and equals take turns.
    """

    family: TrackNamespace
    key: SendKey
    request_id: int | None = None
    """Request whose updates change the Subscriber Priority, of what waits, too; None for none."""


@dataclass(frozen=True, slots=True)
class Send:
    """Queue octets on a stream; the first for an ID opens it."""

    stream_id: int
    data: tuple[Buffer, ...]
    fin: bool = False
    rank: Rank | None = field(default=None, compare=False)
    """Where these octets stand, and those that follow; None where that has not changed."""


@dataclass(frozen=True, slots=True)
class Prioritize:
    """Let what was sent for a request, and still waits, stand by another Subscriber Priority."""

    request_id: int
    subscriber_priority: int


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


Action = Send | Prioritize | ResetStream | StopSending | SendDatagram | CloseSession

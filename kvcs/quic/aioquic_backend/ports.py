"""What a connection needs around it: a wire, a clock and an owner.

A socket and an event loop are one way to give them; a simulated network is another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from kvcs.quic.aioquic_backend.ending import Ending

Address = Any
"""What the socket module calls an address: a tuple whose form depends on the family."""


Sizes = Callable[[Address], Iterable[int]]
"""Gives the UDP payloads, in octets, that are worth trying on the way to an address."""


class Train:
    """Datagrams of one size behind each other in one piece of memory: what one call sends.

    In a list of datagrams it stands for all that are in it.
    """

    __slots__ = ("octets", "size")

    def __init__(self, octets: memoryview, size: int) -> None:
        """Say where they lie.

        Args:
            octets: all of them.
            size: octets of each.
        """
        self.octets = octets
        self.size = size

    def __len__(self) -> int:
        """Octets of all of them."""
        return len(self.octets)

    def __iter__(self) -> Iterator[memoryview]:
        """Each of them, in order."""
        octets, size = self.octets, self.size
        return (octets[at : at + size] for at in range(0, len(octets), size))


Datagrams = list[tuple[bytes | Train, Address]]
"""Datagrams to send, in order, each with where it goes."""


class Wire(Protocol):
    """Where a connection's datagrams go."""

    @property
    def blocked(self) -> bool:
        """Whether what was sent still waits for the socket; nothing more is built meanwhile."""

    @property
    def socket_buffers(self) -> tuple[int, int]:
        """Octets that the socket buffers while receiving, and while sending."""

    def send(self, datagrams: Datagrams) -> None:
        """Send datagrams, in order; what the network refuses is lost.

        Where it is not `blocked` afterwards it has no use for them any more: their memory may be
        that of the next ones.
        """


class Timer(Protocol):
    """A call that was arranged for later."""

    def cancel(self) -> None:
        """Forget the call."""


class Clock(Protocol):
    """Monotonic time and calls at a time, in seconds; an asyncio event loop is one."""

    def time(self) -> float:
        """Now."""

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer:
        """Arrange a call."""


class Driven(Protocol):
    """What an owner sees of a connection."""

    def datagrams_received(self, datagrams: list[bytes], address: Address, now: float) -> int:
        """Take datagrams and deliver their events; `batch_ended` follows.

        Returns how many were taken, at least one: the rest may be for another connection.
        """

    def batch_ended(self, now: float) -> None:
        """All datagrams of a wake-up are delivered: let the receiver send, then transmit once."""

    def wire_unblocked(self) -> None:
        """The wire takes datagrams again."""


class Owner(Protocol):
    """Who holds the socket: a client of one connection, or a listener."""

    def connection_id_issued(self, connection: Driven, connection_id: bytes) -> None:
        """The peer may address the connection by this, too."""

    def connection_id_retired(self, connection: Driven, connection_id: bytes) -> None:
        """The peer no longer addresses the connection by this."""

    def handshake_completed(self, connection: Driven) -> None:
        """The connection can be used; its receiver has been told."""

    def finished(self, connection: Driven, ending: Ending) -> None:
        """The connection is over; its receiver, if it had one, has been told."""

"""Reaches into packet protection: small packets sealed behind each other, where they leave from.

What a step for each packet costs is what sending costs at sizes that real networks carry. Here the
cipher writes into memory that one call of the kernel's sends, and headers are written by columns:
an octet of all of them at once.
"""

from __future__ import annotations

from itertools import islice
from struct import Struct
from typing import Final

from aioquic.quic.packet_builder import PACKET_NUMBER_SEND_SIZE

from kvcs.quic.aioquic_backend.ports import Train
from kvcs.quic.aioquic_backend.segments import most_of_a_call

SAMPLE_OCTETS: Final = 16
"""What header protection is computed from (RFC 9001 §5.4.2)."""

SAMPLE_START: Final = 4 - PACKET_NUMBER_SEND_SIZE
"""Where the sample begins in the sealed payload: as if the packet number had four octets."""

NUMBER_MASK: Final = 0xFFFF
SHORT_HEADER_BITS: Final = 0x1F
"""Bits of a short header's first octet that are protected (RFC 9001 §5.4.1)."""

MAX_SPARE_TRAINS: Final = 16
"""Trains that a process keeps to be used again: what a few transmissions take."""


class PacketTrain(Train):
    """A train of packets with short headers, all to one connection ID; empty to begin with."""

    __slots__ = ("_memory", "_peer_cid", "_samples", "_slots", "count")

    def __init__(self, peer_cid: bytes, size: int) -> None:
        """Get memory for as many datagrams as one call sends.

        Args:
            peer_cid: connection ID that they are sent to.
            size: octets of each.
        """
        octets = most_of_a_call(size) * size
        memory = memoryview(bytearray(octets))
        super().__init__(memory, size)
        self._memory = memory
        self._peer_cid = b""
        start = 1 + len(peer_cid) + PACKET_NUMBER_SEND_SIZE
        self._slots = [memory[at + start : at + size] for at in range(0, octets, size)]
        self._samples = [slot[SAMPLE_START : SAMPLE_START + SAMPLE_OCTETS] for slot in self._slots]
        self.count = 0
        """Datagrams in it."""
        self.begin(peer_cid)

    def takes(self, peer_cid: bytes, size: int) -> bool:
        """Whether it has places for such packets."""
        return self.size == size and len(self._peer_cid) == len(peer_cid)

    def begin(self, peer_cid: bytes) -> None:
        """Empty it for packets to a connection ID of the length that it was made for."""
        self.count = 0
        if peer_cid != self._peer_cid:
            self._peer_cid = peer_cid
            for at, octet in enumerate(peer_cid, 1):
                self._memory[at :: self.size] = bytes((octet,)) * len(self._slots)

    @property
    def room(self) -> int:
        """Datagrams that still fit."""
        return len(self._slots) - self.count

    def slots(self, count: int) -> list[memoryview]:
        """Add so many datagrams: where their sealed payloads are to be written."""
        begun, self.count = self.count, self.count + count
        return self._slots[begun : self.count]

    def samples(self) -> list[memoryview]:
        """What the masks of the headers are computed from."""
        return self._samples[: self.count]

    def leave(self, first: int, number: int, masks: bytes) -> None:
        """Write the headers.

        Args:
            first: octet of all of them.
            number: of the first packet.
            masks: of the headers, `SAMPLE_OCTETS` apart.
        """
        memory, size, count = self._memory, self.size, self.count
        stop = count * size
        memory[0:stop:size] = bytes(
            [first ^ (m & SHORT_HEADER_BITS) for m in masks[::SAMPLE_OCTETS]]
        )
        numbers = [n & NUMBER_MASK for n in range(number, number + count)]
        plain = Struct(f">{count}H").pack(*numbers)
        for at in range(PACKET_NUMBER_SEND_SIZE):
            octets = int.from_bytes(plain[at::PACKET_NUMBER_SEND_SIZE], "big")
            octets ^= int.from_bytes(masks[1 + at :: SAMPLE_OCTETS], "big")
            column = 1 + len(self._peer_cid) + at
            memory[column:stop:size] = octets.to_bytes(count, "big")
        self.octets = memory[:stop]


_spare: Final[list[PacketTrain]] = []
"""Trains that were sent: their memory need not be fetched from the system again."""


def empty_train(peer_cid: bytes, size: int) -> PacketTrain:
    """A train for packets to a connection ID, `size` octets each."""
    while _spare:
        try:
            train = _spare.pop()
        except IndexError:  # another thread has an event loop of its own
            break
        if train.takes(peer_cid, size):
            train.begin(peer_cid)
            return train
    return PacketTrain(peer_cid, size)


def reuse_trains(trains: list[PacketTrain]) -> None:
    """Take back trains that nobody looks at any more."""
    _spare.extend(islice(trains, max(0, MAX_SPARE_TRAINS - len(_spare))))

"""Reaches into packet protection: packets of STREAM frames, sealed many at a time.

The library builds every packet in a buffer frame by frame and seals it alone, which costs ten times
what the cipher does. Most packets of a transfer hold a piece of one stream and nothing else. Here
those are joined from where their octets lie, and the headers of a flight are protected together.
Small ones go in trains: see `trains`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final, cast

from aioquic._crypto import HeaderProtection
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import PACKET_FIXED_BIT, QuicPacketType
from aioquic.quic.packet_builder import PACKET_NUMBER_SEND_SIZE, QuicDeliveryHandler
from aioquic.quic.stream import QuicStreamSender
from aioquic.tls import Epoch

from kvcs.quic.aioquic_backend.ports import Datagrams, Train
from kvcs.quic.aioquic_backend.private.sending import Octets
from kvcs.quic.aioquic_backend.private.trains import (
    NUMBER_MASK,
    SAMPLE_OCTETS,
    SAMPLE_START,
    SHORT_HEADER_BITS,
    PacketTrain,
    empty_train,
    reuse_trains,
)

STREAM, OFFSET, LENGTH, FIN = 0x08, 0x04, 0x02, 0x01
"""Type of a STREAM frame, and the bits that say what it has (RFC 9000 §19.8)."""

TAG_OCTETS: Final = 16
"""What each of TLS 1.3's ciphers adds to a packet."""

LARGE_OCTETS: Final = 4096
"""Datagrams above this are sealed where they are sent from, if the cipher can: memory for a second
copy of them costs more than the cipher."""

SPARE_OCTETS: Final = 2 * 1024 * 1024
"""Memory of datagrams that a process keeps to be used again: what a few transmissions take."""

NONCE_OCTETS: Final = 12

_spare: Final[list[bytearray]] = []
"""Memory of large datagrams that were sent.

Given back to the allocator it would go on to the system, transmission by transmission, which clears
it page by page for the next: dearer than the cipher.
"""

SentFrame = tuple[QuicStreamSender, int, int, bool]
"""A STREAM frame on its way: whose it is, where it begins and ends, and whether it has the FIN."""


class StreamPacket:
    """A packet of STREAM frames alone, as loss recovery keeps it.

    It stands in for the library's record, whose fields it has: those that are alike for all such
    packets belong to the class.
    """

    __slots__ = ("frames", "packet_number", "sent_bytes", "sent_time")

    epoch: Final = Epoch.ONE_RTT
    in_flight: Final = True
    is_ack_eliciting: Final = True
    is_crypto_packet: Final = False
    packet_type: Final = QuicPacketType.ONE_RTT

    def __init__(
        self, packet_number: int, sent_time: float, sent_bytes: int, frames: list[SentFrame]
    ) -> None:
        self.packet_number = packet_number
        self.sent_time = sent_time
        self.sent_bytes = sent_bytes
        self.frames = frames

    @property
    def delivery_handlers(self) -> list[tuple[QuicDeliveryHandler, tuple[int, int, bool]]]:
        """Whom the library tells that the packet arrived or was lost."""
        return [
            (sender.on_data_delivery, (start, stop, fin))
            for sender, start, stop, fin in self.frames
        ]


class Flight:
    """Packets with short headers that are sealed under the same keys and leave together."""

    def __init__(
        self, keys: CryptoPair, peer_cid: bytes, spin_bit: bool, packet_number: int
    ) -> None:
        """Begin a flight.

        Args:
            keys: of 1-RTT packets, with no key update pending.
            peer_cid: connection ID that they are sent to.
            spin_bit: as the connection has it.
            packet_number: of the first packet.
        """
        aead, protection = keys.send.aead, keys.send.hp
        assert aead is not None and protection is not None  # whoever sends has looked
        self._encrypt = aead._aead.encrypt
        self._encrypt_into = getattr(aead._aead, "encrypt_into", None)
        self._iv = aead._iv
        self._protection = protection
        self._first = (
            PACKET_FIXED_BIT
            | (spin_bit << 5)
            | (keys.key_phase << 2)
            | (PACKET_NUMBER_SEND_SIZE - 1)
        )
        self.peer_cid: Final = peer_cid
        self._plain_head = bytes((self._first,)) + peer_cid
        self._added = len(self._plain_head) + PACKET_NUMBER_SEND_SIZE + TAG_OCTETS
        self._begun = packet_number
        self._sealed: list[bytes | bytearray | PacketTrain] = []
        """Sealed payloads, large ones behind room for their headers, and those of trains."""
        self.next_number = packet_number
        """Packet number of the next packet."""

    def seal(self, payload: list[Octets]) -> int:
        """Seal one packet, whose frames lie in pieces; returns the octets of its datagram."""
        number = self.next_number
        self.next_number = number + 1
        nonce = (self._iv ^ number).to_bytes(NONCE_OCTETS, "big")
        head = self._plain_head + (number & NUMBER_MASK).to_bytes(PACKET_NUMBER_SEND_SIZE, "big")
        plain = b"".join(payload)
        size = self._added + len(plain)
        if size > LARGE_OCTETS and self._encrypt_into is not None:
            datagram = _memory(size)
            self._encrypt_into(nonce, plain, head, memoryview(datagram)[len(head) :])
            self._sealed.append(datagram)
            return size
        sealed = self._encrypt(nonce, plain, head)
        self._sealed.append(sealed)
        return size

    def seal_all(self, plain: list[bytes], size: int) -> None:
        """Seal small packets whose datagrams all have one size, with the fewest steps for each.

        Args:
            plain: payloads of the packets.
            size: octets of each datagram.
        """
        iv, number, plain_head = self._iv, self.next_number, self._plain_head
        self.next_number = stop = number + len(plain)
        nonces = [(iv ^ n).to_bytes(NONCE_OCTETS, "big") for n in range(number, stop)]
        heads = [
            plain_head + (n & NUMBER_MASK).to_bytes(PACKET_NUMBER_SEND_SIZE, "big")
            for n in range(number, stop)
        ]
        slots: list[memoryview] = []
        while (lack := len(plain) - len(slots)) > 0:
            train = self._sealed[-1] if self._sealed else None
            if type(train) is not PacketTrain or train.size != size or not train.room:
                train = empty_train(self.peer_cid, size)
                self._sealed.append(train)
            slots += train.slots(min(lack, train.room))
        into: Callable[..., object] = self._encrypt_into or self._copy_into
        for _ in map(into, nonces, plain, heads, slots):
            pass

    def _copy_into(self, nonce: bytes, plain: bytes, head: bytes, where: memoryview) -> None:
        """What ciphers do that can seal into memory of the caller's."""
        where[:] = self._encrypt(nonce, plain, head)

    def datagrams(self) -> list[bytes | Train]:
        """Protect the headers.

        Returns:
            The datagrams in order of their packets; large ones are bytearrays, which nobody else
            has, and those of `seal_all` stand in trains.
        """
        first, peer_cid, number = self._first, self.peer_cid, self._begun
        form = Struct(f">B{len(peer_cid)}sH")
        masks = self._masks(form.size)
        datagrams: list[bytes | Train] = []
        at = 0
        for sealed in self._sealed:
            if type(sealed) is PacketTrain:
                stop = at + sealed.count * SAMPLE_OCTETS
                sealed.leave(first, number, masks[at:stop])
                datagrams.append(sealed)
                at, number = stop, number + sealed.count
                continue
            masked = first ^ (masks[at] & SHORT_HEADER_BITS)
            counted = (number & NUMBER_MASK) ^ (masks[at + 1] << 8 | masks[at + 2])
            if type(sealed) is bytearray:
                form.pack_into(sealed, 0, masked, peer_cid, counted)
                datagrams.append(cast(bytes, sealed))
            else:
                datagrams.append(form.pack(masked, peer_cid, counted) + cast(bytes, sealed))
            at += SAMPLE_OCTETS
            number += 1
        return datagrams

    def _masks(self, head_octets: int) -> bytes:
        """Masks of the headers in order, `SAMPLE_OCTETS` apart."""
        stop = SAMPLE_START + SAMPLE_OCTETS
        samples: list[bytes | bytearray | memoryview] = []
        for sealed in self._sealed:
            if type(sealed) is bytes:
                samples.append(sealed[SAMPLE_START:stop])
            elif type(sealed) is bytearray:
                samples.append(sealed[head_octets + SAMPLE_START : head_octets + stop])
            else:
                samples += cast(PacketTrain, sealed).samples()
        return header_masks(self._protection, samples)


def header_masks(
    protection: HeaderProtection, samples: Sequence[bytes | bytearray | memoryview]
) -> bytes:
    """Masks of headers in order, `SAMPLE_OCTETS` apart.

    Args:
        protection: with which key.
        samples: of the packets (RFC 9001 §5.4.2).
    """
    if protection._is_chacha20:
        mask = protection._mask
        return b"".join([mask(bytes(s)).ljust(SAMPLE_OCTETS, b"\0") for s in samples])
    # AES encrypts block by block, so all samples go through in one call.
    return protection._encryptor.update(b"".join(samples))


def reuse(datagrams: Datagrams) -> None:
    """Take back the memory of datagrams that nobody looks at any more."""
    sent = [cast(object, data) for data, _ in datagrams]
    reuse_trains([data for data in sent if isinstance(data, PacketTrain)])
    large = [data for data in sent if isinstance(data, bytearray)]
    if large:
        most = SPARE_OCTETS // max(map(len, large))
        _spare.extend(large[: max(0, most - len(_spare))])


def _memory(size: int) -> bytearray:
    """Memory for a datagram; what is in it is not specified."""
    while _spare:
        try:
            spare = _spare.pop()
        except IndexError:  # another thread has an event loop of its own
            break
        if len(spare) == size:
            return spare
    return bytearray(size)

"""Reaches into receiving: packets of an established connection are opened and read the short way.

The library looks at each datagram as if it were the first of a handshake. Here those of an
established connection are opened: one path, one connection ID, the keys in use. Whatever is not so
is left to the library.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Final

from aioquic.quic.connection import NetworkAddress, QuicConnectionState
from aioquic.quic.crypto import CryptoContext
from aioquic.quic.events import StreamDataReceived
from aioquic.quic.packet import decode_packet_number
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.tls import Epoch
from cryptography.exceptions import InvalidTag

from kvcs.quic.aioquic_backend.private.flights import NONCE_OCTETS, OFFSET, header_masks
from kvcs.quic.aioquic_backend.private.frames import INTEGER_MASKS
from kvcs.quic.aioquic_backend.private.taking import Piece, TakingConnection
from kvcs.quic.aioquic_backend.private.trains import SAMPLE_OCTETS, SHORT_HEADER_BITS

LONGEST_NUMBER: Final = 4
"""Octets of a packet number, at most; the sample of header protection begins behind them."""

LONG_HEADER, FIXED_BIT, SPIN_BIT, RESERVED_BITS, PHASE_SHIFT = 0x80, 0x40, 0x20, 0x18, 2
NUMBER_BITS: Final = 0x03
"""A short header's first octet (RFC 9000 §17.3.1)."""

SMALL_OCTETS: Final = 4096
"""Packets up to this are cut out of their datagrams: the cipher is slower to take a view than a
copy of them costs."""

LAST_KEYS_TIMEOUTS: Final = 3
"""Probe time-outs for which packets under the keys before those in use are read."""

Opened = tuple[int, int, bytes]
"""A packet's first octet without its protection, its number, and its payload."""


class Reading:
    """Keys that packets are opened with, until the library changes them."""

    __slots__ = ("aead", "context", "decrypt", "iv", "phase", "protection", "shortest", "space")

    def __init__(self, context: CryptoContext, space: QuicPacketSpace, cid_octets: int) -> None:
        assert context.aead is not None and context.hp is not None  # whoever reads has looked
        self.aead = context.aead
        self.decrypt: Callable[[bytes, Any, bytes], bytes] = context.aead._aead.decrypt
        self.iv = context.aead._iv
        self.protection = context.hp
        self.phase = context.key_phase
        self.context = context
        self.space = space
        self.shortest: Final = 1 + cid_octets + LONGEST_NUMBER + SAMPLE_OCTETS
        """Octets of a datagram that has a sample; none is shorter."""


class LastKeys:
    """The keys before those in use: packets overtaken by an update are opened with them.

    The library forgets them at once, and a whole round trip of packets with them where the update
    is ours (RFC 9001 §6.1 and §6.5).
    """

    __slots__ = ("begun", "reading", "until")

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.begun: float = inf
        """Lowest packet number seen under the keys in use: only those below are older."""
        self.until: float = inf
        """When they are forgotten: some time after the first packet under the keys in use."""


class Batch:
    """Datagrams of one wake-up that came from one address, on their way through a connection."""

    __slots__ = ("addr", "at", "cid", "count", "datagrams", "masks", "now", "opened")

    def __init__(self, datagrams: list[bytes], addr: NetworkAddress, now: float) -> None:
        self.datagrams = datagrams
        self.addr = addr
        self.now = now
        self.at = 0
        """The next one."""
        self.count = 1
        """How many belong together: the rest is another batch."""
        self.cid = b""
        """Connection ID of all of them."""
        self.masks = b""
        """Masks of their headers, `SAMPLE_OCTETS` apart; empty where they are for the library."""
        self.opened: Opened | None = None
        """The next one, where it has been opened already."""


class IncomingConnection(TakingConnection):
    """A connection that reads ordinary packets the short way."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._reading: Reading | None = None
        self._last_keys: LastKeys | None = None

    def batch(self, datagrams: list[bytes], addr: NetworkAddress, now: float) -> Batch:
        """Begin to take datagrams: the first, and those that follow it and can be read like it.

        Args:
            datagrams: as they came, at least one.
            addr: where all of them come from.
            now: when.
        """
        batch = Batch(datagrams, addr, now)
        reading = self._reading
        if reading is None or self._network_paths[0].addr != addr:
            return batch
        cid, shortest = self.host_cid, reading.shortest
        begin, end = 1 + len(cid), shortest - SAMPLE_OCTETS
        samples = []
        for data in datagrams:
            if len(data) < shortest or data[0] & LONG_HEADER or data[1:begin] != cid:
                break
            samples.append(data[end:shortest])
        if samples:
            batch.cid = cid
            batch.count = len(samples)
            # A key update leaves the keys of headers as they are (RFC 9001 §6).
            batch.masks = header_masks(reading.protection, samples)
        return batch

    def take(self, batch: Batch) -> Piece | None:
        """Take the next datagram of a batch, and those that go on where it ends.

        Returns:
            The octets that came, where they are the next of a stream and no event waits; else
            None, and what came is among the events.
        """
        at = batch.at
        batch.at = at + 1
        opened, batch.opened = batch.opened, None
        reading, now = self._reading, batch.now
        if reading is not None and reading.context.aead is not reading.aead:
            reading = self._renew()  # we have updated the keys
        if (
            reading is None
            or not batch.masks
            or (path := self._network_paths[0]).addr != batch.addr
            or not path.is_validated
            or self._state is not QuicConnectionState.CONNECTED
            or self.host_cid != batch.cid
        ):
            self._leave(batch.datagrams[at], batch.addr, now)
            return None
        if opened is None:
            opened = self._open(batch, at, reading)
            if opened is None:
                return None
        first, number, payload = opened
        space = reading.space
        if number in space.received_packets:
            return None
        if number >= space.expected_packet_number:
            space.expected_packet_number = number + 1
        if number > self._spin_highest_pn:
            self._spin_bit = bool(first & SPIN_BIT) != self._is_client
            self._spin_highest_pn = number
        piece = self._next_piece(payload)
        if piece is None:
            if not self._read_pieces(payload, space, number, now):
                self._read_frames(payload, space, number, now)
            return None
        self._received(space, number, True, now)
        if (
            batch.at < batch.count
            and number == space.largest_received_packet
            and self._last_keys is None
        ):
            piece = self._go_on(batch, reading, opened, piece)
        if self._events:
            self._events.append(
                StreamDataReceived(data=piece[1], end_stream=False, stream_id=piece[0])
            )
            return None
        return piece

    def _open(self, batch: Batch, at: int, reading: Reading) -> Opened | None:
        """Open one packet of a batch; None where it was left to the library, or is not to be read.

        Args:
            batch: the batch.
            at: which of its datagrams.
            reading: the keys in use.
        """
        data, now, cid = batch.datagrams[at], batch.now, batch.cid
        mask = batch.masks[at * SAMPLE_OCTETS : (at + 1) * SAMPLE_OCTETS]
        first = data[0] ^ (mask[0] & SHORT_HEADER_BITS)
        if first & RESERVED_BITS or not first & FIXED_BIT:
            self._leave(data, batch.addr, now)
            return None
        octets = (first & NUMBER_BITS) + 1
        begin = 1 + len(cid)
        end = begin + octets
        space = reading.space
        truncated = int.from_bytes(data[begin:end], "big") ^ int.from_bytes(
            mask[1 : 1 + octets], "big"
        )
        number = decode_packet_number(truncated, octets * 8, space.expected_packet_number)
        last = self._last_keys
        if last is not None and now > last.until:
            self._last_keys = last = None
        if (first >> PHASE_SHIFT) & 1 != reading.phase:
            if last is None or number >= last.begun:
                self._leave(data, batch.addr, now)
                return None
            reading = last.reading
        try:
            payload = reading.decrypt(
                (reading.iv ^ number).to_bytes(NONCE_OCTETS, "big"),
                memoryview(data)[end:],
                b"%c%b%b" % (first, cid, truncated.to_bytes(octets, "big")),
            )
        except InvalidTag:
            if last is not None and reading is last.reading:
                self._leave(data, batch.addr, now)  # under the next keys, perhaps
            return None  # not from the peer, or damaged: it is as if it had never come
        if last is not None and reading is not last.reading and number < last.begun:
            self._first_under_new_keys(last, number, now)
        return first, number, payload

    def _go_on(self, batch: Batch, reading: Reading, opened: Opened, piece: Piece) -> Piece:
        """Take the packets behind one of a stream that hold nothing but what follows on it.

        Each of them has the next packet number and the next octets, and its header is alike but
        for that: what is noted of a packet is noted once for all of them. The first one that is
        not so is left as it is, opened perhaps.

        Args:
            batch: the datagrams behind it.
            reading: the keys in use, under which it came.
            opened: the packet, whose number is the largest so far.
            piece: what it brought.

        Returns:
            What all of them brought.
        """
        first, number, payload = opened
        size = len(payload)
        small = size <= SMALL_OCTETS
        head_octets = size - len(piece[1])
        if not payload[0] & OFFSET:
            return piece
        # A head is the same again but for its offset, which has as many octets.
        begin = 1 + (1 << (payload[1] >> 6))
        offset_octets = 1 << (payload[begin] >> 6)
        kind, rest = payload[:begin], payload[begin + offset_octets : head_octets]
        bits = (payload[begin] >> 6) << (8 * offset_octets - 2)
        largest = INTEGER_MASKS[offset_octets]
        stream, limit = self._streams[piece[0]], self._local_max_data
        receiver = stream.receiver
        start = offset = receiver._buffer_start
        room = min(stream.max_stream_data_local - start, limit.value - limit.used)
        decrypt, iv, cid = reading.decrypt, reading.iv, batch.cid
        number_octets = (first & NUMBER_BITS) + 1
        number_at = 1 + len(cid)
        number_end = number_at + number_octets
        number_mask = (1 << 8 * number_octets) - 1
        plain_head = bytes((first,)) + cid
        datagrams, masks = batch.datagrams, batch.masks
        pieces, begun, from_bytes = [piece[1]], number, int.from_bytes
        for at in range(batch.at, batch.count):
            data, mask = datagrams[at], at * SAMPLE_OCTETS
            following = number + 1
            shown = following & number_mask
            if (
                data[0] ^ (masks[mask] & SHORT_HEADER_BITS) != first
                or from_bytes(data[number_at:number_end], "big")
                ^ from_bytes(masks[mask + 1 : mask + 1 + number_octets], "big")
                != shown
            ):
                break
            try:
                payload = decrypt(
                    (iv ^ following).to_bytes(NONCE_OCTETS, "big"),
                    data[number_end:] if small else memoryview(data)[number_end:],
                    plain_head + shown.to_bytes(number_octets, "big"),
                )
            except InvalidTag:
                break
            length = len(payload) - head_octets
            if (
                length <= 0
                or length > room
                or offset > largest
                or (rest and len(payload) != size)
                or not payload.startswith(
                    kind + (offset | bits).to_bytes(offset_octets, "big") + rest
                )
            ):
                batch.opened = first, following, payload
                break
            pieces.append(payload[head_octets:])
            number = following
            offset += length
            room -= length
        taken = number - begun
        if not taken:
            return piece
        batch.at += taken
        receiver._buffer_start = receiver.highest_offset = offset
        limit.used += offset - start
        self._received_run(reading.space, begun, number, batch.now)
        return piece[0], b"".join(pieces)

    def _leave(self, data: bytes, addr: NetworkAddress, now: float) -> None:
        """Have the library read a datagram, and see whether the next may be read here."""
        before = self._last_keys
        self.receive_datagram(data, addr, now)
        if self._is_client and data and not data[0] & LONG_HEADER:
            # The library notes only on servers that the peer goes on to another connection ID.
            cid = data[1 : 1 + len(self.host_cid)]
            if any(cid == known.cid for known in self._host_cids):
                self.host_cid = cid
        self._renew()
        last = self._last_keys
        if last is not None and last is not before:
            # The peer has updated the keys: nothing with a larger number came before.
            self._first_under_new_keys(last, last.reading.space.largest_received_packet, now)

    def _renew(self) -> Reading | None:
        """See whether the next packet may be read here, and with which keys."""
        before, self._reading = self._reading, None
        if self._handshake_confirmed and self._quic_logger is None:
            context = self._cryptos[Epoch.ONE_RTT].recv
            # A server gives up the keys of early data with the first packet that it reads.
            early = self._cryptos[Epoch.ZERO_RTT].recv
            if context.is_valid() and (self._is_client or not early.is_valid()):
                space = self._spaces[Epoch.ONE_RTT]
                self._reading = Reading(context, space, len(self.host_cid))
                if before is not None and before.aead is not context.aead:
                    self._last_keys = LastKeys(before)
        return self._reading

    def _first_under_new_keys(self, last: LastKeys, number: int, now: float) -> None:
        """Note the lowest packet number under the keys in use."""
        if last.begun == inf:
            last.until = now + LAST_KEYS_TIMEOUTS * self._loss.get_probe_timeout()
        last.begun = number

"""Datagrams that are read together bring what each of them would have brought alone.

Two servers with the same keys get the same datagrams: one reads them one by one, the other one in
batches. What is random is seeded.
"""

from __future__ import annotations

import random
from itertools import groupby
from typing import Any, Final

import pytest
from aioquic.quic.crypto import CIPHER_SUITES, CryptoPair
from aioquic.quic.packet import QuicProtocolVersion
from aioquic.tls import CipherSuite, Epoch

from kvcs.quic.aioquic_backend.private.flights import Flight
from kvcs.quic.aioquic_backend.private.incoming import Batch
from tests.unit.quic.packets import FIRST, flight_of, give, piece, ready
from tests.unit.quic.pair import CLIENT, Pair, Side, hand_over

CID: Final = b"12345678"
PING: Final = b"\x01"
STREAMS: Final = 5


def measured(stream_id: int, offset: int, data: bytes, fin: bool = False) -> bytes:
    """A STREAM frame that others may follow."""
    head = bytes((0x0E | fin,)) + (stream_id | 0x4000).to_bytes(2, "big")
    head += (offset | 0x8000_0000).to_bytes(4, "big")
    return head + (len(data) | 0x4000).to_bytes(2, "big") + data


def short(stream_id: int, offset: int, data: bytes) -> bytes:
    """A STREAM frame whose offset has two octets."""
    head = b"\x0c" + (stream_id | 0x4000).to_bytes(2, "big")
    return head + (offset | 0x4000).to_bytes(2, "big") + data


class Peer:
    """A client that sends anything, in packets that two servers can open."""

    def __init__(self, suite: CipherSuite, rng: random.Random) -> None:
        self.rng = rng
        self.secret = rng.randbytes(48 if suite is CipherSuite.AES_256_GCM_SHA384 else 32)
        self.suite = suite
        self.keys = CryptoPair()
        for context in (self.keys.send, self.keys.recv):
            self.give_keys(context)
        self.number = 10_000
        self.spin = False
        self.offsets = {FIRST + 4 * index: 0 for index in range(STREAMS)}
        self.opened = max(self.offsets)
        self.datagrams: list[bytes] = []
        self.lost: list[bytes] = []

    def give_keys(self, context: Any) -> None:
        """Have a context open what this one seals."""
        version = QuicProtocolVersion.VERSION_1
        context.setup(cipher_suite=self.suite, secret=self.secret, version=version)

    def packet(self, payload: bytes) -> None:
        """Send one packet; some do not arrive as they are, and are sent again later."""
        rng = self.rng
        flight = Flight(self.keys, CID, self.spin, self.number)
        self.number += 1
        flight.seal([payload])
        datagram = bytearray(flight.datagrams()[0])
        chance = rng.random()
        if chance < 0.02:
            datagram[rng.randrange(len(datagram))] ^= 1 << rng.randrange(8)
        if chance > 0.01:
            self.datagrams.append(bytes(datagram))
        if chance < 0.02:
            self.lost.append(payload)
        elif self.lost and chance < 0.5:
            self.packet(self.lost.pop(0))

    def next_stream(self) -> int:
        """A stream that is not open yet."""
        self.opened += 4
        return self.opened

    def run(self) -> None:
        """Send what follows on a stream, as a transfer does."""
        rng = self.rng
        stream_id = rng.choice(list(self.offsets))
        size = rng.choice([30, 300, 1150])
        frame = rng.choice([piece, piece, measured, short])
        for _ in range(rng.randrange(1, 20)):
            if rng.random() < 0.05:
                size = rng.randrange(1, 1150)
            offset = self.offsets[stream_id]
            if frame is short and offset >= 0x4000:
                frame = piece
            self.packet(frame(stream_id, offset, rng.randbytes(size)))
            self.offsets[stream_id] += size

    def rare(self) -> None:
        """Send something else."""
        rng = self.rng
        stream_id = rng.choice(list(self.offsets))
        offset = self.offsets[stream_id]
        other = rng.choice(list(self.offsets))
        match rng.randrange(11):
            case 0:
                self.packet(piece(stream_id, offset, rng.randbytes(rng.randrange(90)), fin=True))
                self.offsets.pop(stream_id)
                self.offsets[self.next_stream()] = 0
            case 1:
                data = rng.randbytes(50)
                self.packet(measured(stream_id, offset, data) + PING)
                self.offsets[stream_id] += 50
            case 2 if stream_id != other:
                data = rng.randbytes(50)
                whole = measured(stream_id, offset, data)
                self.packet(whole + piece(other, self.offsets[other], data))
                self.offsets[stream_id] += 50
                self.offsets[other] += 50
            case 3:  # a gap, which is filled later
                data = rng.randbytes(200)
                self.packet(piece(stream_id, offset + 100, data[100:]))
                self.packet(piece(stream_id, offset, data[:100]))
                self.offsets[stream_id] += 200
            case 4:
                self.packet(PING + bytes(rng.randrange(3, 60)))
            case 5:
                self.packet(b"\x30" + rng.randbytes(40))
            case 6:
                self.number += rng.randrange(1, 40)
            case 7:
                self.spin = not self.spin
            case 8 if rng.random() < 0.3:
                self.keys._update_key("local_update")
            case 9:
                final = (offset | 0x8000_0000).to_bytes(4, "big")
                reset = b"\x04" + (stream_id | 0x4000).to_bytes(2, "big") + b"\x07"
                self.packet(reset + final + bytes(20))
                self.offsets.pop(stream_id)
                self.offsets[self.next_stream()] = 0
            case _:
                self.packet(piece(stream_id, max(0, offset - 20), bytes(20)))

    def script(self, steps: int) -> list[bytes]:
        """Datagrams as a bad network delivers them."""
        for step in range(steps):
            self.run()
            if step > 2 and self.rng.random() < 0.6:
                self.rare()
        for stream_id, offset in self.offsets.items():
            self.packet(piece(stream_id, offset, b"the end", fin=True))
        while self.lost:
            self.packet(self.lost.pop(0))
        rng, arriving = self.rng, []
        for index, datagram in enumerate(self.datagrams):
            later = rng.randrange(1, 6) if rng.random() < 0.03 else 0
            arriving.append((index + later, datagram))
            if rng.random() < 0.02:
                arriving.append((index + rng.randrange(30), datagram))
            if rng.random() < 0.01:
                arriving.append((index, rng.randbytes(rng.randrange(60))))
        arriving.sort(key=lambda each: each[0])
        return [datagram for _, datagram in arriving]


class Reader:
    """A server that notes what it is told, in order."""

    def __init__(self, peer: Peer, *, at_once: bool) -> None:
        pair = Pair()
        self.at_once = at_once
        self.side: Side = pair.server
        self.clock = pair.clock
        self.log: list[tuple[Any, ...]] = []
        quic = self.side.quic
        self.side.drop = lambda data: True  # its true client knows nothing of all this
        pair.client.drop = lambda data: True
        quic.host_cid = quic._host_cids[0].cid = CID
        peer.give_keys(quic._cryptos[Epoch.ONE_RTT].recv)
        quic._reading = None  # these are no update of keys
        quic._renew()
        assert quic._reading is not None
        receiver = self.side.receiver
        receiver.on_data = lambda stream_id, data: self.log.append(("data", stream_id, data))
        receiver.calls = self.log
        self.sent = len(self.side.sent)
        self.handed = 0
        """How often octets were handed over."""
        self.gone_on = 0
        """How many packets were read behind another one."""
        go_on = quic._go_on

        def going_on(batch: Batch, *facts: Any) -> Any:
            at = batch.at
            piece = go_on(batch, *facts)
            self.gone_on += batch.at - at
            return piece

        quic._go_on = going_on  # type: ignore[method-assign]

    def read(self, datagrams: list[bytes]) -> None:
        """One wake-up."""
        transport, now = self.side.transport, self.clock.time()
        for group in [datagrams] if self.at_once else [[datagram] for datagram in datagrams]:
            hand_over(transport, group, CLIENT, now)
        transport.batch_ended(now)

    def told(self) -> list[tuple[Any, ...]]:
        """What the receiver was told, octets of one stream behind each other as one."""
        self.handed = sum(call[0] == "data" for call in self.log)
        calls: list[tuple[Any, ...]] = []
        for key, group in groupby(self.log, lambda call: call[:2] if call[0] == "data" else None):
            if key is None:
                calls += group
            else:
                calls.append((*key, b"".join([call[2] for call in group])))
        return calls

    def state(self) -> dict[str, Any]:
        """What is known of packets and streams."""
        quic = self.side.quic
        space = quic._spaces[Epoch.ONE_RTT]
        last, reading, recv = quic._last_keys, quic._reading, quic._cryptos[Epoch.ONE_RTT].recv
        close = quic.close_event
        return {
            "acknowledgement": (list(space.ack_queue), space.ack_at),
            "largest": (space.largest_received_packet, space.largest_received_time),
            "expected": space.expected_packet_number,
            "duplicates": [
                number in space.received_packets for number in range(9_900, peer_limit(space))
            ],
            "spin": (quic._spin_bit, quic._spin_highest_pn),
            "credit": (quic._local_max_data.used, quic._consumed, sorted(quic._known.due)),
            "streams": {
                stream_id: (
                    stream.receiver._buffer_start,
                    stream.receiver.highest_offset,
                    bytes(stream.receiver._buffer),
                    stream.receiver._final_size,
                    stream.receiver.is_finished,
                    stream.max_stream_data_local,
                )
                for stream_id, stream in quic._streams.items()
            },
            "keys": (recv.key_phase, recv.secret, last and (last.begun, last.until)),
            "short": reading is not None,
            "idle": (quic._close_at, quic._ack_eliciting_sent_since_receipt),
            "close": close and (close.error_code, close.frame_type, close.reason_phrase),
            "octets": self.side.transport.stats().octets_received,
            "sent": [len(data) for data in self.side.sent[self.sent :]],
            "finished": self.side.receiver.finished,
        }


def peer_limit(space: Any) -> int:
    """A packet number beyond all that were received."""
    limit: int = space.expected_packet_number + 50
    return limit


def both(suite: CipherSuite, rng: random.Random, last: bytes | None) -> tuple[Reader, Reader]:
    """Have two servers read the same, and compare them after each wake-up."""
    peer = Peer(suite, rng)
    alone, together = Reader(peer, at_once=False), Reader(peer, at_once=True)
    began = alone.clock.time()
    for reader in (alone, together):
        reader.clock.run_until(lambda reader=reader: reader.clock.time() >= began)
    assert alone.clock.time() == together.clock.time()
    datagrams = peer.script(14)
    if last is not None:
        peer.datagrams.clear()
        peer.packet(last)
        datagrams[-5:-5] = peer.datagrams
    while datagrams:
        count = rng.choice([1, 2, 10, 50])
        wake_up, datagrams = datagrams[:count], datagrams[count:]
        for reader in (alone, together):
            reader.read(wake_up)
        assert together.told() == alone.told()
        assert together.state() == alone.state()
        if rng.random() < 0.4:
            seconds = rng.choice([0.002, 0.5])
            for reader in (alone, together):
                reader.clock.run_for(seconds)
    return alone, together


@pytest.mark.parametrize("suite", CIPHER_SUITES, ids=lambda suite: suite.name)
@pytest.mark.parametrize("seed", range(8))
def test_a_batch_brings_what_its_datagrams_would(suite: CipherSuite, seed: int) -> None:
    alone, together = both(suite, random.Random(f"{suite.name} {seed}"), None)
    assert alone.gone_on == 0 and together.gone_on > 5
    assert together.handed < alone.handed
    assert together.side.quic.close_event is None
    assert len(together.side.receiver.finished) >= STREAMS


CLOSES: Final = {
    "application": b"\x1d\x07\x02by" + bytes(30),
    "beyond the window": piece(FIRST + 400, 0x3FFF_0000, b"x" * 60),
    "no frame": b"\x3f" + bytes(30),
    "not its stream": piece(3, 0, b"x" * 60),
    "more streams than it may open": piece(FIRST + 4 * 600, 0, b"x" * 60),
    "what only servers send": b"\x1e" + bytes(30),
    "a wrong end": measured(FIRST, 1, b"x", fin=True) + bytes(30),
}


@pytest.mark.parametrize("why", CLOSES)
@pytest.mark.parametrize("seed", range(3))
def test_a_connection_that_ends_in_the_middle_of_a_batch_has_ended(why: str, seed: int) -> None:
    suite = CipherSuite.AES_128_GCM_SHA256
    alone, together = both(suite, random.Random(f"{why} {seed}"), CLOSES[why])
    for reader in (alone, together):
        assert reader.side.quic.close_event is not None
        assert reader.side.quic.peer_closed == (why == "application")


def pieces(pair: Pair, count: int, size: int = 100) -> list[bytes]:
    """Datagrams with what follows on the one stream that is open."""
    return [
        flight_of(pair, piece(FIRST, 65 + size * index, bytes((index,)) * size))
        for index in range(count)
    ]


def handed(pair: Pair) -> list[int]:
    """Octets of each piece that the server's receiver gets from now on."""
    sizes: list[int] = []
    pair.server.receiver.on_data = lambda stream_id, data: sizes.append(len(data))
    return sizes


def test_what_follows_on_a_stream_is_handed_over_once() -> None:
    pair = ready()
    sizes = handed(pair)
    consumed = pair.server.quic._consumed
    give(pair, *pieces(pair, 40))
    assert sizes == [4000]
    assert pair.server.quic._consumed == consumed + 4000
    assert pair.server.receiver.data[FIRST][65:165] == bytes(100)


def test_pieces_of_two_streams_are_told_apart() -> None:
    pair = ready()
    give(pair, flight_of(pair, piece(FIRST + 4, 0, b"y" * 50)))
    sizes = handed(pair)
    one = pieces(pair, 3)
    two = [flight_of(pair, piece(FIRST + 4, 50 + 60 * i, b"y" * 60)) for i in range(2)]
    more = [flight_of(pair, piece(FIRST, 365 + 70 * i, b"z" * 70)) for i in range(2)]
    give(pair, *one, *two, *more)
    assert sizes == [300, 120, 140]


@pytest.mark.parametrize("credit", ["stream", "connection"])
def test_a_batch_reaches_the_end_of_the_credit_and_no_further(credit: str) -> None:
    pair = ready()
    quic, sizes = pair.server.quic, handed(pair)
    if credit == "stream":
        quic._streams[FIRST].max_stream_data_local = 65 + 400
    else:
        quic._local_max_data.value = quic._local_max_data.used + 400
    give(pair, *pieces(pair, 4))
    assert sizes == [400] and quic.close_event is None
    pair = ready()
    quic, sizes = pair.server.quic, handed(pair)
    if credit == "stream":
        quic._streams[FIRST].max_stream_data_local = 65 + 399
    else:
        quic._local_max_data.value = quic._local_max_data.used + 399
    give(pair, *pieces(pair, 4))
    assert sizes == [300] and quic.close_event is not None


@pytest.mark.parametrize("why", CLOSES)
def test_nothing_is_read_behind_what_ends_a_connection(why: str) -> None:
    pair = ready()
    sizes = handed(pair)
    before, behind = pieces(pair, 5), piece(FIRST, 565, b"x" * 100)
    last = flight_of(pair, CLOSES[why])
    give(pair, *before, last, *(flight_of(pair, behind) for _ in range(3)))
    assert sizes == [500]
    pair.clock.run_until(lambda: pair.server.ending is not None)
    assert pair.server.ending is not None
    assert pair.server.ending.by_peer == (why == "application")


def test_a_peer_that_changes_its_connection_id_in_a_batch_loses_nothing() -> None:
    pair = ready()
    sizes = handed(pair)
    peer = pair.client.quic
    first, second = peer._peer_cid, peer._peer_cid_available[0]
    batch = []
    for index, cid in enumerate([first] * 5 + [second] * 8 + [first] * 2):
        peer._peer_cid = cid
        batch.append(flight_of(pair, piece(FIRST, 65 + 100 * index, bytes((index,)) * 100)))
    give(pair, *batch)
    assert sizes[0] == 500 and sum(sizes) == 1500
    arrived = pair.server.receiver.data[FIRST][65:]
    assert arrived == b"".join(bytes((index,)) * 100 for index in range(15))
    peer._peer_cid = second
    give(pair, flight_of(pair, piece(FIRST, 1565, b"x" * 100)))
    give(pair, *(flight_of(pair, piece(FIRST, 1665 + 100 * i, b"y" * 100)) for i in range(9)))
    assert sizes[-1] == 900, "the new one is read the short way"


def test_a_peer_that_moves_in_a_wake_up_loses_nothing() -> None:
    pair = ready()
    sizes = handed(pair)
    datagrams, now = pieces(pair, 30), pair.clock.time()
    for start, stop, port in ((0, 10, 1), (10, 20, 9), (20, 25, 1), (25, 30, 9)):
        hand_over(pair.server.transport, datagrams[start:stop], ("client", port), now)
    pair.server.transport.batch_ended(now)
    assert sizes[0] == 1000 and sum(sizes) == 3000
    arrived = pair.server.receiver.data[FIRST][65:]
    assert arrived == b"".join(bytes((index,)) * 100 for index in range(30))
    assert pair.server.quic.get_peer_address() == ("client", 9)


def test_a_receiver_that_closes_gets_nothing_more_of_the_batch() -> None:
    pair = ready()
    give(pair, flight_of(pair, piece(FIRST + 4, 0, b"y" * 50)))
    sizes: list[int] = []

    def close(stream_id: int, data: bytes) -> None:
        sizes.append(len(data))
        pair.server.transport.close(7, "enough")

    pair.server.receiver.on_data = close
    one = pieces(pair, 3)
    two = [flight_of(pair, piece(FIRST + 4, 50 + 60 * i, b"y" * 60)) for i in range(3)]
    now = pair.clock.time()
    taken = pair.server.transport.datagrams_received([*one, *two], CLIENT, now)
    assert sizes == [300] and taken == 3


def test_a_receiver_that_fails_ends_the_batch() -> None:
    pair = ready()
    give(pair, flight_of(pair, piece(FIRST + 4, 0, b"y" * 50)))

    def fail(stream_id: int, data: bytes) -> None:
        raise RuntimeError("on purpose")

    pair.server.receiver.on_data = fail
    both = [*pieces(pair, 2), flight_of(pair, piece(FIRST + 4, 50, b"y" * 60))]
    assert pair.server.transport.datagrams_received(both, CLIENT, pair.clock.time()) == 2
    pair.clock.run_until(lambda: pair.server.ending is not None)
    assert pair.server.ending is not None and pair.server.ending.code == 0x1


def test_datagrams_of_another_connection_are_left() -> None:
    pair = ready()
    ours = pieces(pair, 3)
    theirs = bytes((ours[0][0],)) + b"another!" + bytes(100)
    sizes = handed(pair)
    now = pair.clock.time()
    take = pair.server.transport.datagrams_received
    assert take([*ours[:2], theirs, ours[2]], CLIENT, now) == 2
    assert take([theirs, ours[2]], CLIENT, now) == 1
    assert take([ours[2]], CLIENT, now) == 1
    assert sizes == [200, 100]

"""Packets that are built and read the short way: the library's own way reads and builds the same.

Two real connections on a virtual clock; what is random is seeded.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import random
from collections.abc import Callable
from typing import Any, cast

import pytest
from aioquic._crypto import AEAD, HeaderProtection
from aioquic.quic.congestion.reno import RenoCongestionControl
from aioquic.quic.connection import QuicConnection
from aioquic.quic.crypto import CIPHER_SUITES, CryptoPair
from aioquic.quic.packet import QuicProtocolVersion
from aioquic.quic.packet_builder import QuicPacketBuilder, QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketNumberWindow, QuicPacketRecovery
from aioquic.quic.stream import QuicStreamReceiver, QuicStreamSender
from aioquic.tls import CipherSuite, Epoch

from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.aioquic_backend.ports import Train
from kvcs.quic.aioquic_backend.private import flights, trains
from kvcs.quic.aioquic_backend.private.congestion import WatchingReno
from kvcs.quic.aioquic_backend.private.connection import Connection
from kvcs.quic.aioquic_backend.private.flights import Flight, StreamPacket
from kvcs.quic.aioquic_backend.private.outgoing import MAX_UNKNOWN
from kvcs.quic.aioquic_backend.private.packets import BurstPacer
from kvcs.quic.aioquic_backend.private.trains import PacketTrain
from kvcs.quic.aioquic_backend.segments import most_of_a_call, one_by_one
from tests.unit.quic.packets import FIRST
from tests.unit.quic.pair import SERVER, Pair, Side

# What a release changes here is to be read again: the short way does the same in other words.
RESTATED: dict[Callable[..., Any], str] = {
    QuicConnection.datagrams_to_send: "f4eb22c8add260fe",
    QuicConnection.receive_datagram: "3c7f29826050cbfe",
    QuicConnection._handle_stream_frame: "8c79348a854e307d",
    QuicConnection._write_application: "c37bf64378f72b2f",
    QuicConnection._write_stream_frame: "9bc0be962394a322",
    QuicConnection._write_connection_limits: "02c42c5455ae1a31",
    QuicConnection._flush_builder: "ac4bd66d7c3892df",
    QuicPacketBuilder._end_packet: "585948d0382505b3",
    QuicPacketNumberWindow: "3dd3a30b91254283",
    QuicPacketRecovery.on_ack_received: "1a7c693479084333",
    QuicPacketRecovery.on_packet_sent: "a83baa6e05702f89",
    QuicStreamReceiver.handle_frame: "c54bce9f11e6f2de",
    QuicStreamSender.get_frame: "c9d68a424b94b52b",
    QuicStreamSender.on_data_delivery: "675e1c2812ea3744",
    RenoCongestionControl.on_packet_acked: "91f90091e236e854",
    AEAD: "f9a6d18394533a45",
    HeaderProtection: "3c96518aef24acee",
    RangeSet.add: "409fdd202a29b2cd",
}


@pytest.mark.parametrize("restated", RESTATED, ids=lambda each: each.__qualname__)
def test_what_the_short_way_restates_is_as_it_was_read(restated: Callable[..., Any]) -> None:
    source = inspect.getsource(restated).encode()
    assert hashlib.sha256(source).hexdigest()[:16] == RESTATED[restated]


def keys(suite: CipherSuite) -> tuple[CryptoPair, CryptoPair]:
    """Two ends with the same keys, one way."""
    secret = os.urandom(48 if suite is CipherSuite.AES_256_GCM_SHA384 else 32)
    ends = CryptoPair(), CryptoPair()
    version = QuicProtocolVersion.VERSION_1
    ends[0].send.setup(cipher_suite=suite, secret=secret, version=version)
    ends[1].recv.setup(cipher_suite=suite, secret=secret, version=version)
    return ends


@pytest.mark.parametrize("suite", CIPHER_SUITES)
@pytest.mark.parametrize("spin_bit", [False, True])
@pytest.mark.parametrize("into", [False, True], ids=["copied", "in place"])
def test_the_library_opens_what_a_flight_seals(
    suite: CipherSuite, spin_bit: bool, into: bool
) -> None:
    ours, theirs = keys(suite)
    flight = Flight(ours, b"12345678", spin_bit, 0xFFFE)
    if not into:
        flight._encrypt_into = None  # as releases of cryptography are that cannot
    payloads = [[b"\x01\x00"], [b"ab", memoryview(b"cd" * 600)], [b"\x00" * 16_000]]
    sizes = [flight.seal(list(payload)) for payload in payloads]
    datagrams = [bytes(datagram) for datagram in flight.datagrams()]
    assert sizes == [len(datagram) for datagram in datagrams]
    for index, datagram in enumerate(datagrams):
        header, payload, number = theirs.decrypt_packet(datagram, 9, 0xFFFE + index)
        assert payload == b"".join(payloads[index])
        assert number == 0xFFFE + index, "the packet number goes on beyond what two octets hold"
        assert header[1:9] == b"12345678"
        assert header[0] == 0x41 | spin_bit << 5


@pytest.mark.parametrize("suite", CIPHER_SUITES)
@pytest.mark.parametrize("into", [False, True], ids=["copied", "in place"])
def test_the_library_opens_what_goes_in_trains(suite: CipherSuite, into: bool) -> None:
    ours, theirs = keys(suite)
    number = 0xFFF0
    for peer_cid in (b"12345678", b"abcdefgh", b"1234"):  # memory is used again for another one
        flight = Flight(ours, peer_cid, True, number)
        if not into:
            flight._encrypt_into = None
        added = 3 + len(peer_cid) + 16
        payloads = [os.urandom(1200 - added) for _ in range(130)]
        payloads[20], payloads[100:103] = b"small", [os.urandom(900 - added) for _ in range(3)]
        flight.seal_all(payloads[:20], 1200)
        flight.seal([payloads[20]])
        flight.seal_all(payloads[21:30], 1200)
        flight.seal_all(payloads[30:100], 1200)
        flight.seal_all(payloads[100:103], 900)
        flight.seal_all(payloads[103:], 1200)
        sealed = [(datagram, SERVER) for datagram in flight.datagrams()]
        most = most_of_a_call(1200)
        counts = [len(list(d)) if isinstance(d, Train) else 1 for d, _ in sealed]
        assert counts == [20, 1, most, 79 - most, 3, 27]
        for index, (datagram, _) in enumerate(one_by_one(sealed)):
            header, payload, read = theirs.decrypt_packet(
                bytes(datagram), 1 + len(peer_cid), number + index
            )
            assert payload == payloads[index]
            assert read == number + index
            assert header[0] == 0x61 and header[1:-2] == peer_cid
        flights.reuse(sealed)
        number += len(payloads)
        assert flight.next_number == number


def test_trains_are_used_again_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    spare: list[PacketTrain] = []
    monkeypatch.setattr(trains, "_spare", spare)
    first = trains.empty_train(b"12345678", 1200)
    trains.reuse_trains([first])
    assert trains.empty_train(b"abcdefgh", 1200) is first
    trains.reuse_trains([first])
    assert trains.empty_train(b"1234", 1200) is not first
    assert not spare, "what fits no more is given back"
    for _ in range(3):
        trains.reuse_trains([PacketTrain(b"12345678", 1200) for _ in range(10)])
    assert len(spare) == trains.MAX_SPARE_TRAINS


def test_memory_of_large_datagrams_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spare: list[bytearray] = []
    monkeypatch.setattr(flights, "_spare", spare)
    ours, theirs = keys(CipherSuite.AES_128_GCM_SHA256)

    def sent(number: int, sizes: list[int]) -> list[tuple[bytes, Any]]:
        flight = Flight(ours, b"12345678", False, number)
        for size in sizes:
            flight.seal([bytes((number,)) * size])
        return [(cast(bytes, datagram), SERVER) for datagram in flight.datagrams()]

    first = sent(1, [8000, 8000, 100])
    flights.reuse(first)
    assert len(spare) == 2, "small ones are no bytearrays"
    again = sent(4, [8000, 9000])
    assert again[0][0] is first[1][0]
    assert again[1][0] is not first[0][0], "it has another size"
    assert not spare
    for index, (datagram, _) in enumerate(again):
        _, payload, _ = theirs.decrypt_packet(bytes(datagram), 9, 4 + index)
        assert payload == b"\x04" * (8000, 9000)[index]
    for _ in range(3):
        flights.reuse([(bytearray(64 * 1024), SERVER)] * 20)
    assert sum(map(len, spare)) == flights.SPARE_OCTETS


@pytest.mark.parametrize("blocked", [False, True])
def test_memory_is_taken_back_once_the_wire_has_no_use_for_it(
    blocked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare: list[bytearray] = []
    monkeypatch.setattr(flights, "_spare", spare)
    settings = QuicSettings(datagram_size=8952)
    pair = Pair(client=settings, server=settings, datagram_size=8952)
    pair.clock.run_for(1.0)
    assert pair.client.transport.datagram_size == 8952
    spare.clear()
    given: list[list[tuple[bytes, Any]]] = []

    def send(datagrams: list[tuple[bytes, Any]]) -> None:
        given.append(datagrams)
        pair.client.blocked = blocked

    monkeypatch.setattr(pair.client, "send", send)
    pair.client.transport.send(FIRST - 4, b"", False)
    pair.client.transport.send(FIRST, bytes(30_000), False)
    pair.client.transport.flush()
    large = [data for datagrams in given for data, _ in datagrams if isinstance(data, bytearray)]
    assert 8952 in map(len, large)
    assert [id(data) for data in spare] == ([] if blocked else [id(data) for data in large])


def test_an_empty_flight_has_no_datagrams() -> None:
    assert Flight(keys(CipherSuite.AES_128_GCM_SHA256)[0], b"12345678", False, 7).datagrams() == []


def test_recovery_finds_in_a_packet_what_the_library_has() -> None:
    pair = Pair()
    pair.client.transport.send(FIRST - 4, b"", False)
    pair.client.transport.send(FIRST, bytes(5000), True)
    stream = pair.client.quic._streams.get(FIRST)
    assert stream is not None
    pair.client.transport.flush()
    sent = pair.client.quic._spaces[Epoch.ONE_RTT].sent_packets
    packets = [packet for packet in sent.values() if type(packet) is StreamPacket]
    assert packets, "the short way was gone"
    for packet in packets:
        for field in QuicSentPacket.__dataclass_fields__:
            if field != "quic_logger_frames":  # there is no logger
                assert hasattr(packet, field)
        assert all(handler.__self__ is stream.sender for handler, _ in packet.delivery_handlers)
    assert packets[-1].delivery_handlers[-1][1][1:] == (5000, True)


# Transfers, with and without the short way at either end.


def the_long_way(pair: Pair, *, sender: bool, receiver: bool) -> None:
    """Have the client build, and the server read, as the library does."""
    if sender:
        pair.client.quic._objects_go_apart = lambda: False  # type: ignore[method-assign]
    if receiver:
        pair.server.quic._reading = None
        pair.server.quic._renew = lambda: None  # type: ignore[method-assign]


def checked(side: Side) -> None:
    """Look, after each transmission, whether what is counted is what is there."""
    quic = side.quic
    build = quic.datagrams_to_send

    def building(now: float) -> list[tuple[bytes, Any]]:
        datagrams = build(now)
        space, loss = quic._spaces[Epoch.ONE_RTT], quic._loss
        in_flight = [packet for packet in space.sent_packets.values() if packet.in_flight]
        eliciting = [packet for packet in space.sent_packets.values() if packet.is_ack_eliciting]
        assert loss.bytes_in_flight == sum(packet.sent_bytes for packet in in_flight)
        assert space.ack_eliciting_in_flight == len(eliciting)
        assert list(space.sent_packets) == sorted(space.sent_packets)
        assert quic._remote_max_data_used <= quic._remote_max_data
        for stream in quic._known.copy().items():
            assert stream[1].sender.highest_offset <= max(stream[1].max_stream_data_remote, 0)
        return datagrams

    quic.datagrams_to_send = building  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [1200, 1452, 16_000])
@pytest.mark.parametrize(("sender", "receiver"), [(0, 0), (1, 0), (0, 1)])
def test_all_arrives_in_each_combination(size: int, seed: int, sender: int, receiver: int) -> None:
    rng = random.Random(seed)
    pair = Pair(datagram_size=size)
    the_long_way(pair, sender=bool(sender), receiver=bool(receiver))
    checked(pair.client)
    for side in (pair.client, pair.server):
        side.drop = lambda data: rng.random() < 0.03
    client, arrived = pair.client.transport, pair.server.receiver
    contents = {FIRST + 4 * index: rng.randbytes(rng.randrange(60_000)) for index in range(12)}
    client.send(2, b"control", False)
    for stream_id, content in contents.items():
        client.send_all(stream_id, [content[:100], content[100:]], True)
    client.flush()
    pair.clock.run_until(lambda: arrived.finished == set(contents))
    assert {key: bytes(arrived.data[key]) for key in contents} == contents
    pair.clock.run_until(lambda: pair.client.transport.unacknowledged() == 0)
    pair.clock.run_for(1.0)
    assert set(pair.client.quic._streams) == {2}


def test_packets_are_full_and_cost_what_the_library_would_send() -> None:
    pair = Pair()
    client = pair.client.transport
    before = len(pair.client.sent)
    client.send(2, b"control", False)
    client.send(FIRST, bytes(300_000), True)
    client.flush()
    pair.clock.run_until(lambda: FIRST in pair.server.receiver.finished)
    large = [len(data) for data in pair.client.sent[before:] if len(data) > 100]
    assert len(large) <= 300_000 // 1150 + 2
    assert sum(size == 1200 for size in large) >= len(large) - 12


def test_offsets_beyond_four_octets_arrive() -> None:
    pair = Pair()
    client, server = pair.client, pair.server
    client.transport.send(2, b"control", False)
    client.transport.send(FIRST, b"x", False)
    client.transport.flush()
    pair.clock.run_until(lambda: FIRST in server.receiver.data)
    pair.clock.run_for(0.1)
    # As if a gigabyte had gone over the stream: both ends agree on it.
    far = 2**30 - 3000
    sender = client.quic._streams[FIRST].sender
    sender._buffer_start = sender._buffer_stop = sender.highest_offset = far
    buffer: Any = sender._buffer
    buffer._base = buffer._stop = far
    receiver = server.quic._streams[FIRST].receiver
    receiver._buffer_start = receiver.highest_offset = far
    for quic, name in (
        (client.quic, "max_stream_data_remote"),
        (server.quic, "max_stream_data_local"),
    ):
        setattr(quic._streams[FIRST], name, 2**31)
    sent = os.urandom(9000)
    client.transport.send(FIRST, sent, True)
    client.transport.flush()
    pair.clock.run_until(lambda: FIRST in server.receiver.finished)
    assert server.receiver.data[FIRST] == b"x" + sent


def test_no_more_packets_are_on_the_way_than_their_numbers_tell_apart() -> None:
    pair = Pair()
    quic = pair.client.quic
    pair.client.transport.send(2, b"control", False)
    pair.client.transport.send(FIRST, bytes(50_000), False)
    space = quic._spaces[Epoch.ONE_RTT]
    quic._packet_number = space.largest_acked_packet + MAX_UNKNOWN - 5
    quic._congestion.congestion_window = 10**9
    sent = list(one_by_one(quic.datagrams_to_send(pair.clock.time())))
    # One with the control stream in it, and those of the Objects that still may leave.
    assert 5 <= len(sent) <= 7
    assert quic._packet_number - space.largest_acked_packet <= MAX_UNKNOWN + 1


@pytest.mark.parametrize("by", ["client", "server"])
def test_keys_are_updated_in_the_middle_of_a_transfer(by: str) -> None:
    pair = Pair()
    updater: Connection = getattr(pair, by).quic
    content = os.urandom(200_000)
    pair.client.transport.send(2, b"control", False)
    pair.client.transport.send(FIRST, content, True)
    pair.client.transport.flush()
    arrived = pair.server.receiver
    pair.clock.run_until(lambda: len(arrived.data.get(FIRST, b"")) > 50_000)
    before = updater._cryptos[Epoch.ONE_RTT].recv.key_phase
    updater.request_key_update()
    pair.clock.run_until(lambda: FIRST in arrived.finished)
    assert arrived.data[FIRST] == content
    pair.clock.run_for(0.1)
    for side in (pair.client, pair.server):
        assert side.quic._cryptos[Epoch.ONE_RTT].recv.key_phase != before


# Pacing


@pytest.mark.parametrize(
    ("size", "packet_seconds", "wait"),
    [
        (1200, 0.00001, 0.00054),
        (1200, 0.001, 0.002),
        (1200, 0.01, 0.01),
        (16_000, 0.00001, 0.00016),
        (16_000, 0.001, 0.002),
    ],
)
def test_packets_are_gathered_where_that_takes_no_time(
    size: int, packet_seconds: float, wait: float
) -> None:
    pacer = BurstPacer(max_datagram_size=size)
    pacer.update_rate(int(size / packet_seconds), 1.0)
    pacer.update_bucket(now=1.0)
    pacer.sent(pacer.packets(1.0), 1.0)
    assert pacer.packets(1.0) == 0
    at = pacer.next_send_time(1.0)
    assert at == pytest.approx(1.0 + wait, rel=0.01)
    assert at is not None
    assert pacer.packets(at) == pytest.approx(max(1, wait / packet_seconds), abs=1)
    assert pacer.next_send_time(at) is None


@pytest.mark.parametrize(
    ("packet_seconds", "most"), [(0.000002, 128), (0.00001, 100), (0.001, 64), (0.01, 64)]
)
def test_a_late_wake_up_sends_what_the_rate_gives(packet_seconds: float, most: int) -> None:
    pacer = BurstPacer(max_datagram_size=1200)
    pacer.update_rate(int(1200 / packet_seconds), 1.0)
    pacer.update_bucket(now=1.0)
    pacer.sent(pacer.packets(1.0), 1.0)
    assert pacer.packets(1.0) == 0
    assert pacer.packets(10.0) == pytest.approx(most, abs=1)


# Congestion control is told of many packets at once.


@pytest.mark.parametrize("ssthresh", [None, 30_000, 5_000])
@pytest.mark.parametrize("recovery_start", [0.0, 1.5])
def test_many_acknowledged_packets_count_as_each_of_them(
    ssthresh: int | None, recovery_start: float
) -> None:
    one, all_at_once = WatchingReno(max_datagram_size=1200), WatchingReno(max_datagram_size=1200)
    packets: list[Any] = [StreamPacket(number, 1.0 + number / 40, 1200, []) for number in range(40)]
    for congestion in (one, all_at_once):
        congestion.ssthresh = ssthresh
        congestion._congestion_recovery_start_time = recovery_start
        congestion.bytes_in_flight = 40 * 1200
    for packet in packets:
        one.on_packet_acked(now=3.0, packet=packet)
    all_at_once.on_packets_acked(packets, 3.0)
    assert all_at_once.bytes_in_flight == one.bytes_in_flight == 0
    assert abs(all_at_once.congestion_window - one.congestion_window) <= 1200

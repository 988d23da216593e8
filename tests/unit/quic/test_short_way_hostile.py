"""The short way of packets: what arrives damaged, twice, or against the rules (RFC 9000)."""

from __future__ import annotations

import random

import pytest
from aioquic.quic.packet import QuicErrorCode
from aioquic.tls import Epoch

from kvcs.quic.aioquic_backend.private.flights import Flight
from tests.unit.quic.packets import FIRST, flight_of, give, piece, ready
from tests.unit.quic.pair import SERVER, Pair


def test_a_packet_that_comes_twice_is_read_once() -> None:
    pair = ready()
    datagram = flight_of(pair, piece(FIRST, 65, b"again" * 10))
    give(pair, datagram, datagram)
    give(pair, datagram)
    assert pair.server.receiver.data[FIRST][65:] == b"again" * 10


@pytest.mark.parametrize("at", [0, 3, 9, 10, 12, 30, -1])
def test_a_damaged_packet_is_as_if_it_had_never_come(at: int) -> None:
    pair = ready()
    datagram = flight_of(pair, piece(FIRST, 65, b"third" * 10))
    damaged = bytearray(datagram)
    damaged[at] ^= 0x44
    give(pair, bytes(damaged))
    assert len(pair.server.receiver.data[FIRST]) == 65
    give(pair, datagram)
    assert pair.server.receiver.data[FIRST][65:] == b"third" * 10


@pytest.mark.parametrize("size", [0, 1, 5, 9, 12, 20, 27])
def test_a_datagram_that_is_too_short_is_dropped(size: int) -> None:
    pair = ready()
    datagram = flight_of(pair, piece(FIRST, 65, b"third" * 10))
    give(pair, datagram[:size])
    give(pair, datagram)
    assert pair.server.receiver.data[FIRST][65:] == b"third" * 10


def test_a_packet_from_elsewhere_moves_the_path_as_it_does_in_the_library() -> None:
    pair = ready()
    now = pair.clock.time()
    datagram = flight_of(pair, piece(FIRST, 65, b"third" * 10))
    pair.server.transport.datagrams_received([datagram], ("elsewhere", 9), now)
    assert pair.server.receiver.data[FIRST][65:] == b"third" * 10
    assert pair.server.quic.get_peer_address() == ("elsewhere", 9)
    assert not pair.server.quic.path_is_validated
    datagram = flight_of(pair, piece(FIRST, 115, b"fourth" * 10))
    pair.server.transport.datagrams_received([datagram], ("elsewhere", 9), now)
    assert pair.server.receiver.data[FIRST][115:] == b"fourth" * 10


def test_a_client_reads_nothing_from_elsewhere() -> None:
    pair = Pair()
    quic = pair.server.quic
    quic_flight = Flight(
        quic._cryptos[Epoch.ONE_RTT], quic._peer_cid.cid, False, quic._packet_number
    )
    quic_flight.seal([piece(3, 0, b"x" * 50)])
    (datagram,) = quic_flight.datagrams()
    pair.client.transport.datagrams_received([datagram], ("elsewhere", 9), pair.clock.time())
    assert 3 not in pair.client.receiver.data
    pair.client.transport.datagrams_received([datagram], SERVER, pair.clock.time())
    assert pair.client.receiver.data[3] == b"x" * 50


def test_pieces_out_of_order_are_put_in_order() -> None:
    pair = ready()
    parts = [(65 + 50 * index, bytes([index]) * 50) for index in range(6)]
    for offset, data in (parts[2], parts[1], parts[4], parts[0], parts[1], parts[5], parts[3]):
        give(pair, flight_of(pair, piece(FIRST, offset, data)))
    assert pair.server.receiver.data[FIRST][65:] == b"".join(data for _, data in parts)


def test_several_frames_in_a_packet_are_all_read() -> None:
    pair = ready()
    with_length = (
        bytes((0x0E, 0x80)) + FIRST.to_bytes(3, "big") + (65 | 0x80000000).to_bytes(4, "big")
    )
    payload = (
        with_length + (50 | 0x4000).to_bytes(2, "big") + b"a" * 50 + piece(FIRST + 4, 0, b"b" * 50)
    )
    give(pair, flight_of(pair, payload))
    assert pair.server.receiver.data[FIRST][65:] == b"a" * 50
    assert pair.server.receiver.data[FIRST + 4] == b"b" * 50


def closed_with(pair: Pair) -> int:
    """Code that the server closed with."""
    event = pair.server.quic.close_event
    assert event is not None
    return event.error_code


WINDOW = 4 * 1024 * 1024
"""Receive window of one stream, by default."""


@pytest.mark.parametrize(
    ("payload", "first", "code"),
    [
        pytest.param(piece(FIRST, WINDOW, b"x" * 66), 0, QuicErrorCode.FLOW_CONTROL_ERROR),
        pytest.param(piece(3, 0, b"x" * 66), 0, QuicErrorCode.STREAM_STATE_ERROR),
        pytest.param(piece(2 + 4 * 600, 0, b"x" * 66), 0, QuicErrorCode.STREAM_LIMIT_ERROR),
        pytest.param(piece(FIRST, 65, b"x" * 66), 0x08, QuicErrorCode.PROTOCOL_VIOLATION),
        pytest.param(b"\x3f" + bytes(60), 0, QuicErrorCode.FRAME_ENCODING_ERROR),
        pytest.param(b"\x0a\x06\x4f\xff" + b"x" * 40, 0, QuicErrorCode.FRAME_ENCODING_ERROR),
        pytest.param(b"\x0f\xff" + b"\xff" * 40, 0, QuicErrorCode.FRAME_ENCODING_ERROR),
    ],
    ids=["window", "direction", "streams", "reserved", "unknown", "truncated", "integer"],
)
def test_what_breaks_a_rule_ends_the_connection(payload: bytes, first: int, code: int) -> None:
    pair = ready()
    give(pair, flight_of(pair, payload, first))
    assert closed_with(pair) == code


def test_octets_beyond_the_end_of_a_stream_end_the_connection() -> None:
    pair = ready()
    give(pair, flight_of(pair, piece(FIRST, 200, b"x" * 20, fin=True)))
    give(pair, flight_of(pair, piece(FIRST, 65, b"x" * 200)))
    assert closed_with(pair) == QuicErrorCode.FINAL_SIZE_ERROR


def test_the_connection_window_holds_for_the_short_way() -> None:
    pair = ready()
    limit = pair.server.quic._local_max_data
    limit.used = limit.value - 30
    give(pair, flight_of(pair, piece(FIRST, 65, b"x" * 31)))
    assert closed_with(pair) == QuicErrorCode.FLOW_CONTROL_ERROR


def test_an_acknowledgement_takes_a_packet_of_its_own_only_where_nothing_else_leaves() -> None:
    pair = ready()
    server, client = pair.server, pair.client
    client.transport.send(2, b"control", False)  # there is something to acknowledge
    client.transport.flush()
    pair.clock.run_until(lambda: 2 in server.receiver.data)
    space = server.quic._spaces[Epoch.ONE_RTT]
    assert space.ack_at is not None
    now = space.ack_at + 1e-6
    (alone,) = server.quic.datagrams_to_send(now)
    assert len(alone[0]) < 60
    assert space.ack_at is None
    packet = space.sent_packets[max(space.sent_packets)]
    assert (packet.in_flight, packet.is_ack_eliciting) == (False, False)
    client.transport.send(2, b"more", False)
    client.transport.flush()
    pair.clock.run_until(lambda: server.receiver.data[2] == b"controlmore")
    server.transport.send(3, b"control", False)
    server.transport.flush()
    server.transport.send(7, bytes(500), True)
    assert space.ack_at is not None
    (both,) = server.quic.datagrams_to_send(space.ack_at + 1e-6)
    assert len(both[0]) > 500
    assert space.ack_at is None
    packet = space.sent_packets[max(space.sent_packets)]
    assert (packet.in_flight, packet.is_ack_eliciting) == (True, True)
    client.transport.datagrams_received([both[0]], SERVER, pair.clock.time())
    assert client.receiver.data[7] == bytes(500)
    client.transport.batch_ended(pair.clock.time())
    pair.clock.run_for(0.1)
    assert server.transport.unacknowledged() == 0


def test_losses_of_acknowledgements_leave_nothing_behind() -> None:
    pair = Pair()
    rng = random.Random(5)
    pair.server.drop = lambda data: rng.random() < 0.4
    client = pair.client.transport
    client.send(2, b"control", False)
    for index in range(4):
        client.send(FIRST + 4 * index, bytes(100_000), True)
    client.flush()
    pair.clock.run_until(lambda: len(pair.server.receiver.finished) == 4)
    pair.server.drop = lambda data: False
    pair.clock.run_until(lambda: client.unacknowledged() == 0)
    pair.clock.run_for(1.0)
    assert pair.client.quic.octets_in_flight == pair.server.quic.octets_in_flight == 0

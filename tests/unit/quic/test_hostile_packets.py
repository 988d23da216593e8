"""Packets of a peer that has the keys and breaks the rules, or whose packets come in disorder."""

from __future__ import annotations

import random
from typing import Any

import pytest
from aioquic.buffer import encode_uint_var
from aioquic.quic.packet import QuicErrorCode
from aioquic.tls import Epoch

from kvcs.quic.aioquic_backend.private.flights import Flight
from tests.unit.quic.packets import FIRST, flight_of, give, piece, ready
from tests.unit.quic.pair import SERVER, Pair, Side


def ack(largest: int, first_range: int = 0) -> bytes:
    """An ACK frame of one range, padded beyond what the short way reads."""
    numbers = (2, largest, 0, 0, first_range)
    return b"".join(map(encode_uint_var, numbers)) + bytes(40)


@pytest.mark.parametrize("beyond", [0, 1, 2**40])
@pytest.mark.parametrize("first_range", [0, 1])
def test_an_acknowledgement_of_what_was_never_sent_ends_the_connection(
    beyond: int, first_range: int
) -> None:
    pair = ready()
    quic = pair.server.quic
    acked = quic._spaces[Epoch.ONE_RTT].largest_acked_packet
    give(pair, flight_of(pair, ack(quic._packet_number + beyond, first_range)))
    event = quic.close_event
    assert event is not None
    assert event.error_code == QuicErrorCode.PROTOCOL_VIOLATION
    assert quic._spaces[Epoch.ONE_RTT].largest_acked_packet == acked


def test_the_last_packet_that_was_sent_may_be_acknowledged_with_all_before() -> None:
    pair = ready()
    quic = pair.server.quic
    last = quic._packet_number - 1
    give(pair, flight_of(pair, ack(last, last)))
    assert quic.close_event is None
    assert quic._spaces[Epoch.ONE_RTT].largest_acked_packet == last


def test_no_frame_however_it_is_cut_raises_into_the_loop() -> None:
    """Each has a code of its own, or is what a peer may send."""
    rng = random.Random(7)
    pair = ready()
    quic = pair.server.quic
    space = quic._spaces[Epoch.ONE_RTT]
    codes: set[int] = set()
    for number in range(3000):
        kind = rng.choice([*range(0x00, 0x1F), 0x30, 0x31, 0x3F])
        frame = bytes((kind,)) + rng.randbytes(rng.randrange(40))
        if rng.random() < 0.3:  # a well-formed one, cut or with its first octets changed
            whole = bytearray(piece(FIRST, 65, bytes(60)))
            for _ in range(rng.randrange(3)):
                whole[rng.randrange(10)] = rng.randrange(256)
            frame = bytes(whole[: rng.randrange(1, len(whole))])
        read = quic._next_piece(frame) is not None or quic._read_pieces(frame, space, 9, 1000.0)
        if not read and not quic._read_frames(frame, space, 9, 1000.0):
            assert quic._close_event is not None
            codes.add(quic._close_event.error_code)
            quic._close_event, quic._close_pending = None, False
            quic._set_state(type(quic._state).CONNECTED)
        quic._events.clear()
        assert quic._local_max_data.used <= quic._local_max_data.value, number
    assert codes >= {
        QuicErrorCode.FRAME_ENCODING_ERROR,
        QuicErrorCode.PROTOCOL_VIOLATION,
        QuicErrorCode.STREAM_STATE_ERROR,
        QuicErrorCode.FLOW_CONTROL_ERROR,
    }


@pytest.mark.parametrize("size", [0, 1, 2, 20, 21])
def test_datagrams_that_are_too_short_are_nothing(size: int) -> None:
    pair = ready()
    datagram = flight_of(pair, piece(FIRST, 65, b"x" * 50))
    give(pair, datagram[:size])
    assert pair.server.quic.close_event is None
    give(pair, datagram)
    assert pair.server.receiver.data[FIRST][65:] == b"x" * 50


def test_a_client_that_moves_in_the_middle_of_a_transfer_goes_on_the_short_way() -> None:
    pair = Pair()
    client, server = pair.client, pair.server
    server.transport.send(3, b"control", False)
    server.transport.send(7, bytes(400_000), True)
    client.transport.send(2, b"control", False)
    client.transport.send(FIRST, bytes(400_000), True)
    for side in (client, server):
        side.transport.flush()
    pair.clock.run_until(lambda: server.receiver.octets > 100_000)
    client.address = ("client", 9)  # as a NAT does that gave the old port to somebody else
    pair.clock.run_until(
        lambda: FIRST in server.receiver.finished and 7 in client.receiver.finished
    )
    assert server.receiver.data[FIRST] == client.receiver.data[7] == bytes(400_000)
    pair.clock.run_until(lambda: server.quic.path_is_validated)
    assert server.quic.get_peer_address() == ("client", 9)
    pair.clock.run_for(0.5)
    for side in (client, server):
        assert side.quic._objects_go_apart()
        assert side.quic._reading is not None


def counted(side: Side) -> list[bytes]:
    """What a side leaves to the library from now on."""
    left: list[bytes] = []
    leave = side.quic._leave

    def leaving(data: bytes, addr: Any, now: float) -> None:
        left.append(data)
        leave(data, addr, now)

    side.quic._leave = leaving  # type: ignore[method-assign]
    return left


@pytest.mark.parametrize("by", ["client", "server"])
def test_a_peer_that_goes_on_to_another_connection_id_is_read_the_short_way(by: str) -> None:
    pair = Pair()
    sender: Side = getattr(pair, by)
    control = 2 if by == "client" else 3
    sender.transport.send(control, b"control", False)
    sender.transport.flush()
    pair.clock.run_until(lambda: control in sender.peer.receiver.data)
    reader = sender.peer.quic
    retired = reader.host_cid
    last = Flight(sender.quic._cryptos[Epoch.ONE_RTT], retired, False, sender.quic._packet_number)
    sender.quic._packet_number += 1
    last.seal([piece(control + 8, 0, b"x" * 50)])
    sender.quic.change_connection_id()
    left = counted(sender.peer)
    sender.transport.send(control + 4, bytes(100_000), True)
    sender.transport.flush()
    pair.clock.run_until(lambda: control + 4 in sender.peer.receiver.finished)
    assert len(left) <= 2
    pair.clock.run_for(0.5)
    assert reader.host_cid != retired
    assert retired not in [known.cid for known in reader._host_cids]
    # What is sent to an ID that the peer has retired is nothing.
    (datagram,) = last.datagrams()
    sender.peer.transport.datagrams_received([datagram], sender.address, pair.clock.time())
    assert control + 8 not in sender.peer.receiver.data


@pytest.mark.parametrize("tail", [0, 1, 3])
def test_a_lost_end_of_a_stream_is_sent_again_alone_and_with_octets(tail: int) -> None:
    pair = Pair()
    client, server = pair.client, pair.server
    client.transport.send(2, b"control", False)
    client.transport.send(FIRST, bytes(9000), False)
    client.transport.flush()
    pair.clock.run_until(lambda: len(server.receiver.data.get(FIRST, b"")) == 9000)
    pair.clock.run_for(0.5)
    used = client.quic._remote_max_data_used
    lost: list[bytes] = []

    def drop(data: bytes) -> bool:
        lost.append(data)
        return len(lost) <= 3

    client.drop = drop
    client.transport.send(FIRST, b"t" * tail, True)
    client.transport.flush()
    pair.clock.run_until(lambda: FIRST in server.receiver.finished)
    assert len(lost) > 3
    assert server.receiver.data[FIRST] == bytes(9000) + b"t" * tail
    assert client.quic._remote_max_data_used == used + tail, "sent again is not counted again"
    assert server.quic._local_max_data.used == used + tail
    pair.clock.run_until(lambda: client.transport.unacknowledged() == 0)
    pair.clock.run_for(0.5)
    assert set(client.quic._streams) == {2}
    assert client.quic.octets_in_flight == 0


@pytest.mark.parametrize("by", ["reset", "stop"])
def test_credit_agrees_where_a_stream_is_given_up_with_losses(by: str) -> None:
    """The final size is what was sent, once, whatever of it was lost and sent again."""
    rng = random.Random(3)
    pair = Pair()
    client, server = pair.client, pair.server
    client.drop = lambda data: rng.random() < 0.1
    client.transport.send(2, b"control", False)
    for index in range(3):
        client.transport.send(FIRST + 4 * index, bytes(150_000), True)
    client.transport.flush()
    pair.clock.run_until(lambda: len(server.receiver.data.get(FIRST, b"")) > 20_000)
    if by == "reset":
        client.transport.reset(FIRST, 5)
    else:
        server.transport.stop_sending(FIRST, 5)
        server.transport.flush()
    client.transport.flush()
    pair.clock.run_until(lambda: ("stream_reset", FIRST, 5) in server.receiver.calls)
    pair.clock.run_until(lambda: server.receiver.finished >= {FIRST + 4, FIRST + 8})
    client.drop = lambda data: False
    pair.clock.run_until(lambda: client.transport.unacknowledged() == 0)
    pair.clock.run_for(1.0)
    used = client.quic._remote_max_data_used
    assert server.quic._local_max_data.used == used == server.quic._consumed
    assert 300_000 < used < 450_007
    assert client.quic.octets_in_flight == 0
    assert set(client.quic._streams) == set(server.quic._streams) == {2}


@pytest.mark.parametrize("size", [21, 43, 1200])
def test_a_stateless_reset_ends_a_client(size: int) -> None:
    pair = Pair()
    client = pair.client
    token = pair.server.quic._host_cids[0].stateless_reset_token
    now = pair.clock.time()
    client.transport.datagrams_received([b"\x40" + bytes(size - 17) + token], SERVER, now)
    client.transport.batch_ended(now)
    ending = client.ending
    assert ending is not None
    assert (ending.code, ending.by_peer, ending.idle) == (None, True, False)
    assert "stateless reset" in ending.reason
    assert client.receiver.calls[-1] == ("closed", None, ending.reason, True)


@pytest.mark.parametrize("what", ["token", "address", "short", "long header"])
def test_what_only_looks_like_a_stateless_reset_is_nothing(what: str) -> None:
    pair = Pair()
    client = pair.client
    token = bytearray(pair.server.quic._host_cids[0].stateless_reset_token)
    if what == "token":
        token[3] ^= 1
    first = 0xC0 if what == "long header" else 0x40
    datagram = bytes((first,)) + bytes(3 if what == "short" else 30) + token
    now = pair.clock.time()
    source = ("elsewhere", 9) if what == "address" else SERVER
    client.transport.datagrams_received([datagram], source, now)
    client.transport.batch_ended(now)
    assert client.ending is None
    pair.server.transport.send(3, b"alive", False)
    pair.server.transport.flush()
    pair.clock.run_until(lambda: client.receiver.data.get(3) == b"alive")

"""The transport over a network in memory: order of events, credit, races, and every kind of end."""

from __future__ import annotations

import array
import random
from collections.abc import Callable
from functools import partial

import pytest

from kvcs.errors import UsageError
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.aioquic_backend.transport import STREAM_OCTETS
from tests.unit.quic.pair import DELAY, PLAIN, Pair, Recorder


def ends(receiver: Recorder) -> list[tuple[object, ...]]:
    """The `closed` calls that a receiver got."""
    return [call for call in receiver.calls if call[0] == "closed"]


def lossy(seed: int, rate: float) -> Callable[[bytes], bool]:
    """Drop datagrams at random, the same ones in each run."""
    rng = random.Random(seed)
    return lambda data: rng.random() < rate


# Order of events


def test_connected_comes_first_and_closed_last() -> None:
    pair = Pair()
    pair.client.transport.send(2, b"data", True)
    pair.client.transport.close(0x10, "going away")
    pair.clock.run_for(5.0)
    assert pair.client.receiver.calls == [
        ("connected",),
        ("closed", 0x10, "going away", False),
    ]
    assert pair.server.receiver.calls == [
        ("connected",),
        ("closed", 0x10, "going away", True),
    ]
    assert pair.server.receiver.data == {2: b"data"}, "what was queued left before the close"
    assert pair.client.transport.is_over and pair.server.transport.is_over


def test_both_sides_agree_on_what_was_negotiated() -> None:
    pair = Pair(client=QuicSettings(idle_timeout=20.0), server=PLAIN)
    for side in (pair.client, pair.server):
        negotiated = side.transport.negotiated
        assert negotiated is not None
        assert negotiated.alpn == "moqt-22"
        assert negotiated.datagrams
        assert negotiated.idle_timeout == 20.0


def test_a_batch_is_answered_by_one_transmission() -> None:
    pair = Pair()
    server = pair.server.transport
    answered: set[int] = set()

    def answer(stream_id: int, data: bytes) -> None:
        if stream_id not in answered:
            server.send(3 + 4 * len(answered), b"answer", True)
            server.flush()
            answered.add(stream_id)

    pair.server.receiver.on_data = answer
    for index in range(8):
        pair.client.transport.send(2 + 4 * index, b"x" * 1000, True)
    pair.client.transport.flush()
    before = len(pair.server.sent)
    pair.clock.run_until(lambda: len(answered) == 8)
    pair.clock.run_for(DELAY / 10)
    assert len(pair.server.sent) - before == 1, "eight answers in one packet"
    pair.clock.run_until(lambda: len(pair.client.receiver.finished) == 8)


def test_nothing_is_delivered_after_close() -> None:
    pair = Pair()
    server = pair.server
    server.receiver.on_data = lambda stream_id, data: server.transport.close(0, "enough")
    pair.client.transport.send(2, b"first", True)
    pair.client.transport.send(6, b"second", True)
    pair.client.transport.flush()
    pair.clock.run_for(5.0)
    assert server.receiver.data == {2: b"first"}
    assert ends(server.receiver) == [("closed", 0, "enough", False)]


def test_the_owner_hears_of_connection_ids() -> None:
    pair = Pair()
    assert len(pair.server.connection_ids) == 8, "as many as the library lets a peer use"
    first = set(pair.server.connection_ids)
    for _ in range(2):
        pair.client.quic.change_connection_id()
        pair.client.transport.flush()
        pair.clock.run_for(0.1)
    now = set(pair.server.connection_ids)
    assert (len(now), len(first - now), len(now - first)) == (8, 2, 2)


# Sending


def test_a_view_of_any_format_is_sent_octet_by_octet() -> None:
    pair = Pair()
    numbers = array.array("d", [1.0, 2.0, 3.0])
    pair.client.transport.send(2, memoryview(numbers), True)
    pair.client.transport.flush()
    pair.clock.run_until(lambda: 2 in pair.server.receiver.finished)
    assert pair.server.receiver.data[2] == numbers.tobytes()


def test_octets_are_copied_by_send() -> None:
    pair = Pair()
    buffer = bytearray(b"before")
    pair.client.transport.send(2, buffer, True)
    buffer[:] = b"after!"
    pair.client.transport.flush()
    pair.clock.run_until(lambda: 2 in pair.server.receiver.finished)
    assert pair.server.receiver.data[2] == b"before"


@pytest.mark.parametrize(
    ("stream_id", "text"),
    [
        (6, "2 is the next"),
        (4, "0 is the next"),
        (3, "belongs to the peer"),
        (1, "not been opened"),
    ],
)
def test_streams_are_opened_in_order(stream_id: int, text: str) -> None:
    transport = Pair().client.transport
    with pytest.raises(UsageError, match=text):
        transport.send(stream_id, b"x", False)
    with pytest.raises(UsageError, match=text):
        transport.reset(stream_id, 0)
    assert transport.unacknowledged() == 0


def test_nothing_follows_a_fin() -> None:
    transport = Pair().client.transport
    transport.send(2, b"x", True)
    with pytest.raises(UsageError, match="has had its FIN"):
        transport.send(2, b"y", False)


def test_a_stream_that_is_only_received_cannot_be_reset_nor_one_sent_be_stopped() -> None:
    pair = Pair()
    pair.client.transport.send(2, b"x", False)
    pair.client.transport.flush()
    pair.clock.run_for(0.1)
    with pytest.raises(UsageError, match="cannot be reset"):
        pair.server.transport.reset(2, 0)
    with pytest.raises(UsageError, match="cannot be stopped"):
        pair.client.transport.stop_sending(2, 0)


def test_the_budget_bounds_what_waits_in_the_library() -> None:
    budget = 100_000
    pair = Pair(client=QuicSettings(datagram_size=1200, send_buffer=budget))
    client = pair.client.transport
    pair.client.drop = lambda data: True
    handed = 0
    while (room := client.octets()) > 0:
        client.send(2, bytes(min(room, 4000)), False)
        client.flush()
        handed += min(room, 4000)
    assert handed == client.unacknowledged() == budget - STREAM_OCTETS
    pair.clock.run_for(2.0)
    assert client.octets() == 0
    assert len(pair.client.quic._streams[2].sender._buffer) == handed
    pair.client.drop = lambda data: False
    pair.clock.run_until(lambda: client.octets() == budget)
    assert client.unacknowledged() == 0


@pytest.mark.parametrize("octets", [0, 1])
def test_tiny_streams_of_a_peer_with_much_credit_are_bounded(octets: int) -> None:
    budget, many = 100_000, QuicSettings(datagram_size=1200, uni_streams=10_000)
    pair = Pair(client=QuicSettings(datagram_size=1200, send_buffer=budget), server=many)
    client = pair.client.transport
    pair.client.drop = lambda data: True
    stream_id = 2
    while client.octets() > 0:
        client.send(stream_id, bytes(octets), True)
        client.flush()
        stream_id += 4
    assert stream_id // 4 <= budget // STREAM_OCTETS + 1 < client.uni_streams()
    pair.client.drop = lambda data: False
    pair.clock.run_until(lambda: client.octets() == budget)
    assert len(pair.server.receiver.finished) == stream_id // 4


def test_a_fin_alone_counts_until_it_is_acknowledged() -> None:
    pair = Pair()
    client = pair.client.transport
    client.send(2, b"x", False)
    client.flush()
    pair.clock.run_until(lambda: client.unacknowledged() == 0)
    client.send(2, b"", True)
    client.flush()
    assert client.unacknowledged() == 1
    pair.clock.run_until(lambda: client.unacknowledged() == 0)
    assert pair.server.receiver.finished == {2}


def test_nothing_is_built_while_the_wire_is_blocked() -> None:
    pair = Pair()
    pair.client.blocked = True
    before = len(pair.client.sent)
    pair.client.transport.send(2, b"x", True)
    pair.client.transport.flush()
    pair.clock.run_for(0.2)
    assert len(pair.client.sent) == before
    pair.client.blocked = False
    pair.client.transport.wire_unblocked()
    pair.clock.run_until(lambda: 2 in pair.server.receiver.finished)


def test_a_blocked_wire_costs_no_wake_ups() -> None:
    pair = Pair()
    pair.client.blocked = True
    pair.server.transport.send(3, b"to be acknowledged", False)
    pair.server.transport.flush()
    pair.clock.run_until(lambda: 3 in pair.client.receiver.data)
    before = pair.clock.ran
    pair.clock.run_for(0.5)
    assert pair.clock.ran - before < 50, "an acknowledgement that is due does not spin"


def test_a_transfer_survives_loss() -> None:
    pair = Pair()
    pair.client.drop, pair.server.drop = lossy(1, 0.05), lossy(2, 0.05)
    content = random.Random(3).randbytes(300_000)
    sent = 0

    def pump() -> None:
        nonlocal sent
        client = pair.client.transport
        while sent < len(content) and (room := client.octets()) > 0:
            piece = content[sent : sent + room]
            sent += len(piece)
            client.send(2, piece, sent == len(content))
        client.flush()

    pair.client.receiver.on_batch = pump
    pump()
    pair.clock.run_until(lambda: 2 in pair.server.receiver.finished, 120.0)
    assert pair.server.receiver.data[2] == content


def test_every_late_fin_arrives_in_spite_of_loss() -> None:
    pair = Pair()
    pair.client.drop, pair.server.drop = lossy(4, 0.05), lossy(5, 0.05)
    client, streams = pair.client.transport, [2 + 4 * index for index in range(200)]
    for stream_id in streams:
        client.send(stream_id, b"x", False)
    client.flush()
    pair.clock.run_until(lambda: client.unacknowledged() == 0)
    for stream_id in streams:
        client.send(stream_id, b"", True)
        client.flush()
    pair.clock.run_until(lambda: len(pair.server.receiver.finished) == len(streams))
    pair.clock.run_until(lambda: client.unacknowledged() == 0)


# Races at the end of a stream


def test_writing_to_a_stopped_stream_is_quiet_before_and_after_its_end() -> None:
    pair = Pair()
    client, server = pair.client.transport, pair.server.transport
    client.send(2, b"x" * 20_000, False)
    client.flush()
    pair.clock.run_for(DELAY * 1.5)
    server.stop_sending(2, 9)
    server.flush()
    pair.clock.run_until(lambda: ("stop_sending", 2, 9) in pair.client.receiver.calls)
    assert client.stream_octets(2) == 0
    for _ in range(3):
        client.send(2, b"more", False)
        client.reset(2, 1)
        client.flush()
        pair.clock.run_for(0.2)
    assert 2 not in pair.client.quic._streams
    assert client.unacknowledged() == 0
    assert [c for c in pair.server.receiver.calls if c[0] == "stream_reset"] == [
        ("stream_reset", 2, 9)
    ], "the library answered with the peer's code; our reset came too late"
    assert pair.client.ending is None and pair.server.ending is None


def test_a_reset_after_everything_was_acknowledged_is_quiet() -> None:
    pair = Pair()
    client = pair.client.transport
    client.send(2, b"x" * 1000, True)
    client.flush()
    pair.clock.run_for(0.2)
    client.reset(2, 5)
    client.flush()
    pair.clock.run_for(0.2)
    assert pair.server.receiver.finished == {2}
    assert ("stream_reset", 2, 5) not in pair.server.receiver.calls
    assert pair.client.ending is None and pair.server.ending is None


def test_a_stop_after_the_end_is_quiet() -> None:
    pair = Pair()
    pair.client.transport.send(2, b"x", True)
    pair.client.transport.flush()
    pair.clock.run_until(lambda: 2 in pair.server.receiver.finished)
    pair.server.transport.stop_sending(2, 5)
    pair.server.transport.flush()
    pair.clock.run_for(0.2)
    pair.server.transport.stop_sending(2, 5)
    pair.server.transport.stop_sending(6, 5)
    pair.clock.run_for(0.2)
    assert pair.client.receiver.calls == [("connected",)]


def test_a_lost_stop_is_repeated() -> None:
    pair = Pair()
    pair.client.transport.send(2, b"x", False)
    pair.client.transport.flush()
    pair.clock.run_for(0.1)
    pair.server.drop = lambda data: True
    pair.server.transport.stop_sending(2, 9)
    pair.server.transport.flush()
    pair.server.drop = lambda data: False
    pair.clock.run_until(lambda: ("stop_sending", 2, 9) in pair.client.receiver.calls)


@pytest.mark.parametrize("seed", range(5))
def test_stops_and_resets_at_any_instant_leave_the_connection_alive(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair()
    pair.client.drop, pair.server.drop = lossy(seed, 0.02), lossy(seed + 100, 0.02)
    client, server = pair.client.transport, pair.server.transport
    streams = [2 + 4 * index for index in range(60)]

    def later(action: Callable[[], None]) -> None:
        pair.clock.call_at(pair.clock.time() + rng.uniform(0, 0.1), action)

    def stop(stream_id: int) -> None:
        server.stop_sending(stream_id, 7)
        server.flush()

    def reset(stream_id: int) -> None:
        client.reset(stream_id, 8)
        client.flush()

    for stream_id in streams:
        client.send(stream_id, b"x" * rng.randrange(1, 4000), rng.random() < 0.7)
        later(partial(stop, stream_id))
        later(partial(reset, stream_id))
    client.flush()
    pair.clock.run_for(3.0)
    assert pair.client.ending is None and pair.server.ending is None
    assert client.unacknowledged() == 0
    client.send(2 + 4 * len(streams), b"alive", True)
    client.flush()
    pair.clock.run_until(lambda: 2 + 4 * len(streams) in pair.server.receiver.finished)

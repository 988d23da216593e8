"""Which streams packets are filled from: few at a time, in order, nobody forgotten."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from kvcs.quic.aioquic_backend.private.queue import SERVED
from tests.unit.quic.packets import FIRST, flight_of, give, piece, ready
from tests.unit.quic.pair import Pair


def fill(pair: Pair, streams: int, octets: int) -> list[int]:
    """Have the client write whole streams at once."""
    client = pair.client.transport
    client.send(2, b"control", False)
    written = [FIRST + 4 * index for index in range(streams)]
    for stream_id in written:
        client.send(stream_id, bytes(octets), True)
    return written


@pytest.mark.parametrize(("streams", "octets"), [(40, 20_000), (200, 2000), (400, 100)])
def test_few_streams_are_under_way_and_end_in_order(streams: int, octets: int) -> None:
    pair = Pair()
    arrived = pair.server.receiver
    begun: list[int] = []
    most = 0

    def note(stream_id: int, data: bytes) -> None:
        nonlocal most
        if stream_id not in begun:
            begun.append(stream_id)
        most = max(most, len(set(begun) - arrived.finished - {2}))

    arrived.on_data = note
    written = fill(pair, streams, octets)
    pair.client.transport.flush()
    pair.clock.run_until(lambda: len(arrived.finished) == streams)
    assert begun == [2, *written]
    assert most <= 2 * SERVED
    assert all(len(arrived.data[stream_id]) == octets for stream_id in written)


def test_a_packet_is_filled_from_as_many_streams_as_fit() -> None:
    pair = Pair(datagram_size=16_000)
    before = len(pair.client.sent)
    fill(pair, 100, 100)
    pair.client.transport.flush()
    pair.clock.run_until(lambda: len(pair.server.receiver.finished) == 100)
    large = [len(data) for data in pair.client.sent[before:] if len(data) > 1000]
    assert len(large) == 1


def test_requests_and_control_wait_for_no_objects() -> None:
    pair = Pair()
    client, arrived = pair.client.transport, pair.server.receiver
    fill(pair, 100, 20_000)
    client.send(0, b"request", True)
    client.send(2, b"more", False)
    client.flush()
    pair.clock.run_until(lambda: 0 in arrived.finished and arrived.data[2] == b"controlmore")
    assert arrived.octets < 20 * 1200, "in the first flight"


def test_a_reset_waits_for_no_objects() -> None:
    pair = Pair()
    client, arrived = pair.client.transport, pair.server.receiver
    written = fill(pair, 100, 20_000)
    client.reset(written[-1], 5)
    client.flush()
    pair.clock.run_until(lambda: ("stream_reset", written[-1], 5) in arrived.calls)
    assert arrived.octets < 20 * 1200


def test_a_stop_by_the_peer_waits_for_no_objects() -> None:
    pair = Pair()
    client, server, arrived = pair.client.transport, pair.server.transport, pair.server.receiver
    written = fill(pair, 1, 100)
    client.flush()
    pair.clock.run_for(0.1)
    late = FIRST + 4
    client.send(late, b"x", False)
    client.flush()
    pair.clock.run_for(0.1)
    for index in range(2, 100):
        client.send(FIRST + 4 * index, bytes(20_000), True)
    client.send(late, bytes(20_000), True)
    server.stop_sending(late, 7)
    server.flush()
    pair.clock.run_until(lambda: ("stream_reset", late, 7) in arrived.calls)
    assert arrived.octets < 40 * 1200
    assert written[0] in arrived.finished


@pytest.mark.parametrize("seed", range(4))
def test_every_stream_arrives_whatever_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair()
    for side in (pair.client, pair.server):
        side.drop = lambda data: rng.random() < 0.05
    client, arrived = pair.client.transport, pair.server.receiver
    contents = {FIRST + 4 * index: rng.randbytes(rng.randrange(1, 9000)) for index in range(120)}
    client.send(2, b"control", False)
    for stream_id in contents:
        client.send(stream_id, b"", False)
    pieces = [(stream_id, index) for stream_id in contents for index in range(3)]
    for stream_id, index in pieces:
        third = -(-len(contents[stream_id]) // 3)
        client.send(stream_id, contents[stream_id][index * third : (index + 1) * third], index == 2)
        if rng.random() < 0.05:
            client.flush()
            pair.clock.run_for(rng.uniform(0.0, 0.05))
    client.flush()
    pair.clock.run_until(lambda: arrived.finished == set(contents))
    assert {key: arrived.data[key] for key in contents} == contents
    pair.clock.run_until(lambda: client.unacknowledged() == 0)
    pair.clock.run_for(0.5)
    quic = pair.client.quic
    assert not quic._waiting and not quic._ranked
    assert Counter(quic._parked) + Counter(s.stream_id for s in quic._streams_queue) == Counter([2])


def test_a_stream_that_the_library_has_read_of_is_left_out_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = ready()
    quic = pair.server.quic
    built: list[float] = []

    def build(now: float) -> list[Any]:
        built.append(now)
        return []

    monkeypatch.setattr(quic, "_filled_by_library", build)
    give(pair, flight_of(pair, piece(FIRST, 100, b"behind a gap")))
    assert quic._streams[FIRST].receiver.highest_offset == 112, "it was read"
    assert not built and not quic._streams_queue and FIRST in quic._parked

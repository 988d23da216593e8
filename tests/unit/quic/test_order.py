"""In which order octets of Objects leave that wait below the session (MOQT §5.1)."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest

from kvcs.moqt.actions import Rank
from kvcs.moqt.names import GroupOrder
from kvcs.moqt.sending.scheduler import send_key
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.aioquic_backend.private.filling import TURN_OCTETS
from kvcs.quic.aioquic_backend.private.queue import MAX_PLACES
from tests.unit.quic.pair import Pair

FIRST = 6
"""The first stream of Objects of a client: 2 is for control."""

BIG = 4 * TURN_OCTETS


def rank(
    group: int = 0,
    *,
    subscriber: int = 128,
    publisher: int = 0,
    family: bytes = b"a",
    fill: bool = False,
    request: int | None = None,
) -> Rank:
    key = send_key(
        subscriber_priority=subscriber,
        publisher_priority=publisher,
        group_id=group,
        group_order=GroupOrder.ASCENDING,
        is_fill=fill,
        position=0,
    )
    return Rank((family,), key, request)


class Wire:
    """What a client puts on the wire of its streams of Objects, repetitions included."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.frames: list[tuple[int, int, int]] = []
        """Stream, first offset and offset behind the last, in order."""
        quic: Any = pair.client.quic
        register = quic._register

        def noting(filling: Any, now: float) -> None:
            for number in sorted(filling.sent):
                for sender, start, stop, _ in getattr(filling.sent[number], "frames", ()):
                    self.frames.append((sender._stream_id, start, stop))
            register(filling, now)

        quic._register = noting

    @property
    def streams(self) -> list[int]:
        """The stream of each frame, runs of one stream taken together."""
        found: list[int] = []
        for stream_id, _, _ in self.frames:
            if not found or found[-1] != stream_id:
                found.append(stream_id)
        return found


def open_streams(pair: Pair, *ranks: Rank, octets: int = BIG) -> list[int]:
    """Have the client write streams at once, each of its rank; nothing is flushed."""
    client = pair.client.transport
    client.send(2, b"control", False)
    opened = []
    for index, each in enumerate(ranks):
        stream_id = FIRST + 4 * index
        client.rank(stream_id, each)
        client.send(stream_id, bytes(octets), True)
        opened.append(stream_id)
    return opened


def run(pair: Pair, streams: list[int]) -> None:
    """Send all of it."""
    pair.client.transport.flush()
    pair.clock.run_until(lambda: set(streams) <= pair.server.receiver.finished)
    assert not pair.client.quic._waiting


@pytest.mark.parametrize("size", [1200, 16_000])
def test_a_layer_leaves_before_the_next_and_k_with_v(size: int) -> None:
    pair = Pair(datagram_size=size)
    wire = Wire(pair)
    layers = [layer for layer in range(5) for _ in "kv"]
    streams = open_streams(pair, *(rank(layer, publisher=layer) for layer in layers))
    of = dict(zip(streams, layers, strict=True))
    run(pair, streams)
    sent = [of[stream_id] for stream_id, _, _ in wire.frames]
    assert sent == sorted(sent)
    for layer in range(5):
        k, v = streams[2 * layer : 2 * layer + 2]
        turns = [stream_id for stream_id in wire.streams if stream_id in (k, v)]
        assert turns[:6] == [k, v, k, v, k, v]


def test_what_was_written_first_does_not_matter() -> None:
    pair = Pair()
    wire = Wire(pair)
    ranks = [rank(9 - index) for index in range(10)]
    streams = open_streams(pair, *ranks)
    run(pair, streams)
    assert wire.streams == streams[::-1]


def test_what_comes_later_and_stands_before_goes_first() -> None:
    pair = Pair()
    wire = Wire(pair)
    streams = open_streams(pair, rank(5))
    pair.client.transport.flush()
    pair.clock.run_until(lambda: pair.server.receiver.octets > TURN_OCTETS)
    urgent = FIRST + 4
    pair.client.transport.rank(urgent, rank(7, subscriber=1))
    pair.client.transport.send(urgent, bytes(BIG), True)
    run(pair, [*streams, urgent])
    assert wire.streams == [streams[0], urgent, streams[0]]


def test_a_priority_that_changes_holds_for_what_waits() -> None:
    """Also of streams that have had their FIN."""
    pair = Pair()
    wire = Wire(pair)
    streams = open_streams(pair, rank(1, request=0), rank(2, request=2), rank(3, request=4))
    pair.client.transport.flush()
    pair.clock.run_until(lambda: pair.server.receiver.octets > 2000)
    pair.client.transport.prioritize(4, 0)
    pair.client.transport.prioritize(0, 200)
    pair.client.transport.prioritize(6, 0)  # nothing of it waits
    run(pair, streams)
    assert wire.streams == [streams[0], streams[2], streams[1], streams[0]]


def go_on(pair: Pair, stream_id: int, *ranks: Rank, octets: int = BIG) -> None:
    """Have the client write more to a stream, each part of its rank, and end it."""
    for index, each in enumerate(ranks):
        pair.client.transport.rank(stream_id, each)
        pair.client.transport.send(stream_id, bytes(octets), index == len(ranks) - 1)


def begin(pair: Pair, stream_id: int, first: Rank, octets: int = BIG) -> int:
    """Have the client open a stream that goes on."""
    pair.client.transport.rank(stream_id, first)
    pair.client.transport.send(stream_id, bytes(octets), False)
    return stream_id


def test_a_stream_of_many_groups_stands_where_its_next_octets_do() -> None:
    """A fill of three layers was handed over whole, and so were two layers of another family."""
    pair = Pair()
    wire = Wire(pair)
    pair.client.transport.send(2, b"control", False)
    fill = begin(pair, FIRST, rank(0, publisher=0, fill=True))
    go_on(pair, fill, *(rank(layer, publisher=layer, fill=True) for layer in (1, 2)))
    other = begin(pair, FIRST + 4, rank(1, publisher=1, family=b"b"))
    go_on(pair, other, rank(5, publisher=5, family=b"b"))
    run(pair, [fill, other])
    layers = {fill: (0, 1, 2), other: (1, 5)}
    sent = [(layers[stream_id][start // BIG], stream_id) for stream_id, start, _ in wire.frames]
    assert [layer for layer, _ in sent] == sorted(layer for layer, _ in sent)
    assert len(wire.streams) >= 6, "equals take turns"


def test_what_is_in_the_way_of_urgent_octets_goes_with_them() -> None:
    pair = Pair()
    wire = Wire(pair)
    pair.client.transport.send(2, b"control", False)
    mixed = begin(pair, FIRST, rank(9))
    middle = begin(pair, FIRST + 4, rank(5))
    go_on(pair, middle, rank(5))
    go_on(pair, mixed, rank(1), rank(7))
    run(pair, [mixed, middle])
    assert wire.streams == [mixed, middle, mixed]
    first = next(index for index, frame in enumerate(wire.frames) if frame[0] == middle)
    before = sum(stop - start for _, start, stop in wire.frames[:first])
    assert before == 2 * BIG


def test_what_is_lost_stands_where_it_stood_though_its_stream_waits_further_behind() -> None:
    pair = Pair()
    wire = Wire(pair)
    pair.client.transport.send(2, b"control", False)
    fill = begin(pair, FIRST, rank(1), octets=5000)
    go_on(pair, fill, rank(9))
    other = begin(pair, FIRST + 4, rank(5))
    go_on(pair, other, rank(5))
    large = count()
    pair.client.drop = lambda data: len(data) > 1000 and next(large) == 0
    run(pair, [fill, other])
    assert wire.streams == [fill, other, fill, other, fill]
    again = wire.frames[[stream_id for stream_id, _, _ in wire.frames].index(other) :]
    assert next(start for stream_id, start, _ in again if stream_id == fill) < 5000


def test_places_of_a_stream_are_bounded_and_forgotten() -> None:
    pair = Pair()
    client, quic = pair.client.transport, pair.client.quic
    client.send(2, b"control", False)
    stream_id = begin(pair, FIRST, rank(0), octets=1)
    for group in range(3 * MAX_PLACES):
        client.rank(stream_id, rank(group))
        client.send(stream_id, bytes(10), False)
    places = quic._ranked[stream_id]._places
    assert len(places) == MAX_PLACES and places == sorted(places)
    client.flush()
    pair.clock.run_until(lambda: client.unacknowledged() == 0)
    client.rank(stream_id, rank(1000))
    client.send(stream_id, bytes(10), True)
    assert len(places) == 2 and quic._ranked[stream_id].key() == rank(1000).key
    run(pair, [stream_id])


def test_families_of_equal_priority_take_turns() -> None:
    """The Groups of one say nothing of those of another."""
    pair = Pair()
    wire = Wire(pair)
    streams = open_streams(pair, rank(0), rank(9, family=b"b"))
    run(pair, streams)
    assert wire.streams[:6] == streams * 3


def test_a_fill_goes_before_live_within_a_group_only() -> None:
    pair = Pair()
    wire = Wire(pair)
    live, fill, later = rank(4), rank(4, fill=True), rank(5, fill=True)
    streams = open_streams(pair, later, live, fill)
    run(pair, streams)
    assert wire.streams == streams[::-1]


def test_of_two_subscribers_the_lower_number_goes_first_whatever_the_group() -> None:
    pair = Pair()
    wire = Wire(pair)
    ranks = [rank(layer, subscriber=priority) for layer in range(3) for priority in (9, 3)]
    streams = open_streams(pair, *ranks)
    run(pair, streams)
    assert wire.streams == [*streams[1::2], *streams[::2]]


def test_a_stream_without_window_lets_others_pass() -> None:
    small = QuicSettings(datagram_size=1200, stream_receive_window=20_000)
    pair = Pair(server=small, datagram_size=16_000)
    arrived = pair.server.receiver
    streams = open_streams(pair, rank(0), rank(1), octets=20_000)
    pair.client.transport.send(streams[1] + 4, bytes(100_000), True)  # beyond its window
    pair.client.transport.rank(streams[1] + 4, rank(0, subscriber=0))
    pair.client.transport.flush()
    pair.clock.run_until(lambda: set(streams) <= arrived.finished)
    assert len(arrived.data[streams[1] + 4]) == 20_000
    pair.clock.run_until(lambda: streams[1] + 4 in arrived.finished)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_lost_of_a_layer_goes_again_before_what_is_new_of_the_next(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair()
    wire = Wire(pair)
    streams = open_streams(pair, rank(0), rank(1), rank(2))
    quic: Any = pair.client.quic
    pair.client.drop = lambda data: rng.random() < 0.05
    fill, repeated = quic._fill, 0

    def filled(now: float) -> Any:
        """Whatever waits of a layer leaves before new octets of the next, whenever it was lost."""
        nonlocal repeated
        waiting = {
            stream_id: sum(
                part.stop - part.start for part in quic._streams[stream_id].sender._pending
            )
            for stream_id in quic._waiting
        }
        begun = len(wire.frames)
        datagrams = fill(now)
        for stream_id, start, stop in wire.frames[begun:]:
            before = [left for other, left in waiting.items() if other < stream_id]
            assert not sum(before), "an earlier layer still waited"
            waiting[stream_id] -= stop - start
            repeated += any(
                (stream_id, first) == (other, start) for other, first, _ in wire.frames[:begun]
            )
        return datagrams

    quic._fill = filled
    run(pair, streams)
    assert repeated, "something was lost"
    assert all(bytes(pair.server.receiver.data[each]) == bytes(BIG) for each in streams)


def test_no_equal_starves_where_the_window_is_smaller_than_a_turn() -> None:
    pair = Pair()
    wire = Wire(pair)
    streams = open_streams(pair, rank(), rank(), rank(), octets=BIG)
    congestion = pair.client.quic._congestion

    def narrow() -> None:
        congestion.congestion_window = 12_000
        assert congestion.congestion_window < TURN_OCTETS

    pair.client.receiver.on_batch = narrow
    narrow()
    run(pair, streams)
    assert wire.streams[:6] == streams * 2


@pytest.mark.parametrize("octets", [3000, BIG])
def test_the_library_too_serves_them_in_order(octets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something else is to be thought of than data, it builds every packet."""
    pair = Pair()
    arrived = pair.server.receiver
    monkeypatch.setattr(type(pair.client.quic), "_objects_go_apart", lambda self: False)
    layers = [layer for layer in range(5) for _ in "kv"]
    streams = open_streams(pair, *(rank(layer) for layer in layers), octets=octets)
    of = dict(zip(streams, layers, strict=True))
    began: list[int] = []
    most = 0

    def note(stream_id: int, data: bytes) -> None:
        nonlocal most
        if stream_id in of:
            if stream_id not in began:
                began.append(stream_id)
            most = max(most, len(set(began) - arrived.finished))

    arrived.on_data = note
    run(pair, streams)
    assert [of[stream_id] for stream_id in began] == layers
    assert most <= 4, "two of one layer end, two of the next begin"


def test_where_the_library_serves_a_stream_without_window_lets_others_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = QuicSettings(datagram_size=1200, stream_receive_window=20_000)
    pair = Pair(server=small, datagram_size=16_000)
    monkeypatch.setattr(type(pair.client.quic), "_objects_go_apart", lambda self: False)
    arrived = pair.server.receiver
    urgent = [rank(subscriber=0)] * 3
    streams = open_streams(pair, *urgent, octets=50_000)  # beyond their windows
    last = streams[-1] + 4
    pair.client.transport.rank(last, rank(9))
    pair.client.transport.send(last, bytes(10_000), True)
    held: dict[int, int] = {}
    arrived.on_data = lambda stream_id, data: held.update(
        {last: min(len(arrived.data.get(each, b"")) for each in streams)}
        if stream_id == last and last not in held
        else {}
    )
    run(pair, [*streams, last])
    assert held[last] <= 20_000, "it came before the others had more window"


def test_a_stream_that_ends_or_is_reset_leaves_nothing_behind() -> None:
    pair = Pair()
    client, quic = pair.client.transport, pair.client.quic
    streams = open_streams(pair, *(rank(layer) for layer in range(6)))
    client.reset(streams[0], 1)
    client.flush()
    pair.clock.run_until(lambda: streams[1] in pair.server.receiver.data)
    pair.server.transport.stop_sending(streams[1], 2)
    pair.server.transport.flush()
    client.reset(FIRST + 4 * 6, 3)  # never written to
    client.rank(FIRST + 4 * 9, rank())  # never opened
    client.rank(streams[0], rank(1))
    arrived = pair.server.receiver
    pair.clock.run_until(lambda: set(streams[2:]) <= arrived.finished)
    pair.clock.run_until(lambda: client.unacknowledged() == 0)
    pair.clock.run_for(1.0)
    assert ("stream_reset", streams[0], 1) in arrived.calls
    assert ("stream_reset", streams[1], 2) in arrived.calls
    assert not quic._ranked and not quic._waiting and not len(quic._order)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_every_octet_arrives_and_nothing_is_left(
    seed: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes, ranks, resets and stops in any order, on a way that loses in both directions."""
    rng = random.Random(seed)
    small = QuicSettings(datagram_size=1200, stream_receive_window=15_000, receive_window=60_000)
    pair = Pair(server=small, datagram_size=rng.choice((1200, 8952)))
    if not apart:
        monkeypatch.setattr(type(pair.client.quic), "_objects_go_apart", lambda self: False)
    for side in (pair.client, pair.server):
        side.drop = lambda data: rng.random() < 0.03
    client, server, quic = pair.client.transport, pair.server.transport, pair.client.quic
    arrived = pair.server.receiver
    client.send(2, b"control", False)
    written: dict[int, bytearray] = {}
    ended: set[int] = set()
    given_up: set[int] = set()
    for _ in range(150):
        step = rng.random()
        going = [stream_id for stream_id in written if stream_id not in ended | given_up]
        if (step < 0.3 and len(written) < 40) or not going:
            stream_id = FIRST + 4 * len(written)
            written[stream_id] = bytearray()
        else:
            stream_id = rng.choice(going)
        if step < 0.6 or stream_id not in going:
            if rng.random() < 0.7:
                priority, family = rng.randrange(3), rng.choice((b"a", b"b"))
                client.rank(stream_id, rank(rng.randrange(4), subscriber=priority, family=family))
            octets = rng.randbytes(rng.choice((0, 1, 500, 30_000)))
            fin = rng.random() < 0.3
            client.send(stream_id, octets, fin)
            written[stream_id] += octets
            if fin:
                ended.add(stream_id)
        elif step < 0.7:
            client.rank(stream_id, rank(rng.randrange(4), subscriber=rng.randrange(3)))
        elif step < 0.74:
            client.reset(stream_id, 1)
            given_up.add(stream_id)
        elif step < 0.78 and stream_id in arrived.data:
            server.stop_sending(stream_id, 2)
            server.flush()
            given_up.add(stream_id)
        else:
            client.flush()
            pair.clock.run_for(rng.uniform(0.0, 0.02))
    for stream_id in written:
        if stream_id not in ended | given_up:
            client.send(stream_id, b"", True)
    client.flush()
    whole = set(written) - given_up
    pair.clock.run_until(lambda: whole <= arrived.finished)
    pair.clock.run_until(lambda: client.unacknowledged() == 0 and not quic._ranked)
    assert all(arrived.data[stream_id] == written[stream_id] for stream_id in whole)
    assert not quic._waiting and not len(quic._order)

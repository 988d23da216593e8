"""Datagrams beyond what the library builds itself: who is sent them, and what lies in them."""

from __future__ import annotations

import random

import pytest

# The library gives it here and does not say so, as strict typing asks.
from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.quic.packet import pull_quic_transport_parameters

from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.aioquic_backend.paths import largest_to_take
from kvcs.quic.aioquic_backend.private.packets import BURST_OCTETS, BURST_PACKETS, BurstPacer
from kvcs.quic.aioquic_backend.settings import (
    HELD_DATAGRAMS,
    LARGEST_DATAGRAM,
    LARGEST_UNDECLARED,
)
from tests.unit.quic.pair import Pair

LIBRARY_FRAME = 16_383
"""Octets of a STREAM frame whose length two octets can say."""


def large_pair(takes: int | None = LARGEST_DATAGRAM) -> Pair:
    """A pair whose path carries the largest datagrams."""
    pair = Pair(datagram_size=LARGEST_DATAGRAM, takes=takes)
    pair.clock.run_for(1.0)
    return pair


@pytest.mark.parametrize(
    ("takes", "used"),
    [
        (None, LARGEST_UNDECLARED),
        (1200, 1200),
        (16_383, 16_383),
        (20_000, 20_000),
        (LARGEST_DATAGRAM, LARGEST_DATAGRAM),
        (65_527, LARGEST_DATAGRAM),
    ],
)
def test_a_peer_gets_as_much_as_it_declares(takes: int | None, used: int) -> None:
    pair = large_pair(takes)
    content = random.Random(1).randbytes(1_000_000)
    for side, peer, stream in ((pair.client, pair.server, 2), (pair.server, pair.client, 3)):
        assert side.transport.datagram_size == used
        side.transport.send(stream, content, True)
        side.transport.flush()
        pair.clock.run_until(lambda peer=peer, stream=stream: stream in peer.receiver.finished)
        assert peer.receiver.data[stream] == content
        assert max(map(len, side.sent)) == used


def test_pieces_of_several_streams_share_a_datagram() -> None:
    pair = large_pair()
    rng = random.Random(2)
    sizes = [LIBRARY_FRAME - 1, LIBRARY_FRAME, LIBRARY_FRAME + 1, 30_000, 1, 63_000, 0, 64_001]
    contents = {2 + 4 * index: rng.randbytes(size) for index, size in enumerate(sizes)}
    pair.client.sent.clear()
    for stream_id, content in contents.items():
        pair.client.transport.send(stream_id, content, True)
    pair.client.transport.flush()
    pair.clock.run_until(lambda: contents.keys() <= pair.server.receiver.finished)
    assert all(pair.server.receiver.data.get(s, b"") == c for s, c in contents.items())
    large = [data for data in pair.client.sent if len(data) > 2 * LIBRARY_FRAME]
    assert len(large) >= 3, "else no frame among others was longer than two octets can say"
    assert pair.client.ending is pair.server.ending is None


def test_the_library_fills_none_that_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = large_pair()
    for side in (pair.client, pair.server):
        side.sent.clear()
        monkeypatch.setattr(side.quic, "_objects_go_apart", lambda: False)
    content = random.Random(3).randbytes(300_000)
    pair.client.transport.send(2, content, True)
    pair.client.transport.flush()
    pair.clock.run_until(lambda: 2 in pair.server.receiver.finished)
    assert pair.server.receiver.data[2] == content
    assert max(map(len, pair.client.sent)) == LARGEST_UNDECLARED


def test_losses_of_large_datagrams_are_made_good() -> None:
    pair = large_pair()
    rng = random.Random(4)
    for side in (pair.client, pair.server):
        side.drop = lambda data: rng.random() < 0.1
    content = rng.randbytes(4_000_000)
    sent = 0

    def pump() -> None:
        nonlocal sent
        while sent < len(content) and (room := pair.client.transport.octets()) > 0:
            part = content[sent : sent + min(room, 100_000)]
            sent += len(part)
            pair.client.transport.send(2, part, sent == len(content))
        pair.client.transport.flush()

    pair.client.receiver.on_batch = pump
    pump()
    pair.clock.run_until(lambda: 2 in pair.server.receiver.finished, 120.0)
    assert pair.server.receiver.data[2] == content
    assert pair.client.quic.packets_lost > 0


@pytest.mark.parametrize(
    ("buffer", "octets"),
    [
        (4096, 1200),
        (208 * 1024, 208 * 1024 // HELD_DATAGRAMS),
        (4 * 1024 * 1024, LARGEST_DATAGRAM),
    ],
)
def test_a_receive_buffer_says_what_is_taken(buffer: int, octets: int) -> None:
    assert largest_to_take(buffer) == octets


@pytest.mark.parametrize("size", [1200, 16_000, LARGEST_DATAGRAM])
def test_a_burst_is_bounded_in_octets(size: int) -> None:
    pacer = BurstPacer(max_datagram_size=size)
    assert pacer.packets(0.0) * size <= BURST_OCTETS
    pacer.update_rate(10_000_000, 0.001)
    assert pacer.packet_time is not None
    assert pacer.bucket_max >= min(BURST_PACKETS, BURST_OCTETS // size) * pacer.packet_time
    # However fast it is and however late: but for the packet that a rest of the time lets go.
    pacer.packets(0.0)
    assert (pacer.packets(1.0) - 1) * size <= BURST_OCTETS


def test_a_larger_pin_than_the_peer_takes_is_not_used() -> None:
    settings = QuicSettings(datagram_size=LARGEST_DATAGRAM)
    pair = Pair(client=settings, server=settings, datagram_size=LARGEST_DATAGRAM, takes=9000)
    pair.clock.run_for(1.0)
    assert pair.client.transport.datagram_size == pair.server.transport.datagram_size == 9000


@pytest.mark.parametrize("takes", [None, 1200, 64_000])
def test_the_size_is_declared_once(takes: int | None) -> None:
    quic = Pair(takes=takes, connect=False).client.quic
    quic.connect(("server", 1), now=0.0)
    octets = quic._serialize_transport_parameters()
    assert pull_quic_transport_parameters(Buffer(data=octets)).max_udp_payload_size == takes
    ids = []
    buffer = Buffer(data=octets)
    while not buffer.eof():
        ids.append(buffer.pull_uint_var())
        buffer.pull_bytes(buffer.pull_uint_var())
    assert len(ids) == len(set(ids)), "a parameter must not come twice (RFC 9000 section 7.4)"

"""A peer that touches many streams far out, and sessions of very many short streams."""

from __future__ import annotations

import gc
import sys
import tracemalloc

import pytest
from aioquic.quic.packet import QuicFrameType, QuicPacketType
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.tls import Epoch

from kvcs.quic.aioquic_backend import QuicSettings
from tests.unit.quic.pair import Pair, Side

KIB, MIB = 1024, 1024 * 1024

ROOM = 2 * MIB
"""Octets beside the windows: connection state, and the test's own."""


def touch(side: Side, stream_id: int, offset: int) -> None:
    """Send one octet of a stream at an offset, with nothing before it."""
    quic = side.quic
    now = side.clock.time()
    builder = QuicPacketBuilder(
        host_cid=quic.host_cid,
        peer_cid=quic._peer_cid.cid,
        version=quic._version,  # type: ignore[arg-type]
        is_client=quic._is_client,
        max_datagram_size=1200,
        packet_number=quic._packet_number,
    )
    builder.start_packet(QuicPacketType.ONE_RTT, quic._cryptos[Epoch.ONE_RTT])
    frame = builder.start_frame(QuicFrameType.STREAM_BASE | 4 | 2, capacity=20)
    frame.push_uint_var(stream_id)
    frame.push_uint_var(offset)
    frame.push_uint_var(1)
    frame.push_bytes(b"x")
    side.send(quic._flush_builder(builder, quic._network_paths[0], quic._peer_cid.cid, now))


def grown(pair: Pair, streams: int, offset: int) -> int:
    """Most octets that memory grew by while a client touched so many streams."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for index in range(streams):
            touch(pair.client, 4 * index, offset)
            pair.clock.run_for(0.001)
        pair.clock.run_for(0.5)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return most - before


def test_sparse_streams_take_no_more_than_the_window() -> None:
    window = 4 * MIB
    pair = Pair(server=QuicSettings(receive_window=window, stream_receive_window=2 * MIB))
    assert grown(pair, 3, MIB) < 3 * MIB + ROOM
    quic = pair.server.quic
    assert quic._local_max_data.value == window, "what is not read gives no credit"
    assert {key: quic._streams[key].max_stream_data_local for key in quic._streams} == {
        0: 2 * MIB,
        4: 2 * MIB,
        8: 2 * MIB,
    }
    assert pair.server.ending is None


@pytest.mark.parametrize("streams", [100, pytest.param(512, marks=pytest.mark.slow)])
def test_sparse_streams_past_the_window_end_the_connection(streams: int) -> None:
    pair = Pair(server=QuicSettings(receive_window=4 * MIB, stream_receive_window=2 * MIB))
    assert grown(pair, streams, MIB) < 4 * MIB + ROOM
    assert pair.server.ending is not None
    assert pair.server.ending.reason.startswith("QUIC error FLOW_CONTROL_ERROR")
    assert len(pair.server.quic._streams) <= 4


def test_more_streams_than_were_granted_end_the_connection() -> None:
    pair = Pair(server=QuicSettings(bidi_streams=8))
    touch(pair.client, 4 * 8, 0)
    pair.clock.run_for(1.0)
    assert pair.server.ending is not None
    assert pair.server.ending.reason.startswith("QUIC error STREAM_LIMIT_ERROR")


@pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
def test_short_streams_leave_nothing_behind(count: int) -> None:
    pair = Pair()
    client, opened, ended = pair.client.transport, 0, 0

    def pump() -> None:
        nonlocal opened
        while opened < count and client.uni_streams() and client.octets():
            client.send(2 + 4 * opened, b"short", True)
            opened += 1
        client.flush()

    def arrived(stream_id: int, data: bytes, fin: bool) -> None:
        nonlocal ended
        ended += fin
        pair.client.sent.clear()
        pair.server.sent.clear()

    def blocks_when(reached: int) -> int:
        """Blocks of memory in use once so many streams have ended."""
        pair.clock.run_until(lambda: ended >= reached, 600.0)
        gc.collect()
        return sys.getallocatedblocks()

    pair.client.receiver.on_batch = pump
    pair.server.receiver.stream_data = arrived  # type: ignore[method-assign]
    pump()
    before, after = blocks_when(count // 3), blocks_when(count)
    assert ended == count
    assert after - before < 1000 + count // 100, "less than a block for each stream"
    pair.clock.run_for(0.5)
    for side in (pair.client, pair.server):
        quic = side.quic
        assert not quic._streams and not quic._streams_queue and not quic._senders
        assert not quic._parked and not quic._known.due
        assert side.ending is None

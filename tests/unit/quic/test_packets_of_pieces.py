"""Packets of several pieces, behind an ACK frame perhaps: read here, they are as the library reads.

Two servers get packets with the same frames, and one of them leaves all of these to the library.
What is random is seeded.
"""

from __future__ import annotations

import random
from typing import Any, Final

import pytest
from aioquic.buffer import encode_uint_var
from aioquic.quic.packet import QuicErrorCode
from aioquic.tls import Epoch

from kvcs.quic.aioquic_backend.private.frames import Frames, StreamFrame, frames_of
from tests.unit.quic.packets import FIRST, flight_of, give, piece, ready
from tests.unit.quic.pair import Pair

STREAMS: Final = tuple(FIRST + 4 * index for index in range(4))


def measured(stream_id: int, offset: int, data: bytes, fin: bool = False) -> bytes:
    """A STREAM frame that others may follow."""
    numbers = (stream_id, offset, len(data))
    return bytes((0x0E | fin,)) + b"".join(map(encode_uint_var, numbers)) + data


def ack(largest: int, *ranges: int) -> bytes:
    """An ACK frame: the first range and, in turn, gaps and ranges below it."""
    first, *others = ranges
    numbers = (2, largest, 0, len(others) // 2, first, *others)
    return b"".join(map(encode_uint_var, numbers))


@pytest.mark.parametrize("ranges", [(3,), (3, 0, 0), (0, 70, 20_000, 1, 2)])
def test_an_ack_frame_ends_where_pieces_begin(ranges: tuple[int, ...]) -> None:
    frame = ack(30_000, *ranges)
    frames = frames_of(frame + measured(FIRST, 7, b"abc") + piece(FIRST + 4, 70_000, b"xy"))
    assert frames is not None and frames.acknowledgement == len(frame)
    assert [(each.stream_id, each.offset) for each in frames.pieces] == [
        (FIRST, 7),
        (FIRST + 4, 70_000),
    ]


def test_a_frame_without_an_offset_begins_a_stream() -> None:
    assert frames_of(b"\x08\x06abc") == Frames(0, [StreamFrame(6, 0, 2, 5)])
    assert frames_of(b"\x0a\x06\x02ab\x08\x0ac") == Frames(
        0, [StreamFrame(6, 0, 3, 5), StreamFrame(10, 0, 7, 8)]
    )


OTHERS: Final = {
    "an ACK frame alone": ack(9, 3),
    "with marks of congestion": b"\x03" + ack(9, 3)[1:] + bytes(3) + piece(FIRST, 0, b"x"),
    "a FIN": measured(FIRST, 0, b"x") + piece(FIRST + 4, 0, b"x", fin=True),
    "no data": measured(FIRST, 0, b"x") + measured(FIRST + 4, 0, b""),
    "one stream twice": measured(FIRST, 0, b"x") + piece(FIRST, 1, b"x"),
    "padding behind it": measured(FIRST, 0, b"x") + b"\0",
    "a PING before it": b"\x01" + measured(FIRST, 0, b"x"),
    "an ACK frame behind it": measured(FIRST, 0, b"x") + ack(9, 3),
    "a length beyond the end": measured(FIRST, 0, b"xyz")[:-1],
    "more ranges than there are": ack(9, 3)[:3] + b"\xff" * 8 + piece(FIRST, 0, b"x"),
}


@pytest.mark.parametrize("why", OTHERS)
def test_whatever_else_a_packet_holds_is_for_the_library(why: str) -> None:
    assert frames_of(OTHERS[why]) is None


def test_a_packet_that_is_cut_anywhere_is_never_more_than_it_holds() -> None:
    whole = ack(70_000, 3, 1, 2) + measured(FIRST, 70_000, b"abc") + piece(FIRST + 4, 1, b"xyz")
    for stop in range(1, len(whole)):
        frames = frames_of(whole[:stop])
        assert frames is None or frames.pieces[-1].stop == stop


def state(pair: Pair) -> dict[str, Any]:
    """What a server knows of what came."""
    quic = pair.server.quic
    space, close = quic._spaces[Epoch.ONE_RTT], quic.close_event
    return {
        "data": {key: bytes(data) for key, data in pair.server.receiver.data.items()},
        "finished": set(pair.server.receiver.finished),
        "came": (list(space.ack_queue), space.ack_at, space.largest_received_packet),
        "credit": (quic._local_max_data.used, quic._consumed, sorted(quic._known.due)),
        "acknowledged": (space.largest_acked_packet, sorted(space.sent_packets)),
        "streams": {
            stream_id: (
                stream.receiver._buffer_start,
                stream.receiver.highest_offset,
                bytes(stream.receiver._buffer),
                stream.receiver._final_size,
                stream.receiver.is_finished,
            )
            for stream_id, stream in quic._streams.items()
        },
        "idle": (quic._close_at, quic._ack_eliciting_sent_since_receipt),
        "close": close and (close.error_code, close.frame_type, close.reason_phrase),
    }


def frames(rng: random.Random, offsets: dict[int, int], acked: int) -> bytes:
    """Some frames: most of them what comes next, and some that the library has to look at."""
    payload = ack(acked, rng.randrange(acked + 1)) if rng.random() < 0.4 else b""
    chosen = rng.sample(STREAMS, k=rng.randrange(1, 4))
    if rng.random() < 0.1:
        chosen.append(chosen[0])
    for place, stream_id in enumerate(chosen):
        offset, data = offsets[stream_id], rng.randbytes(rng.choice((20, 1100, 2000)))
        if rng.random() < 0.05:
            offset = max(0, offset + rng.choice([-40, -1, 60]))
        elif rng.random() < 0.95:
            offsets[stream_id] += len(data)  # else it comes once more
        fin = rng.random() < 0.002
        if place + 1 == len(chosen) and rng.random() < 0.7:
            payload += piece(stream_id, offset, data, fin)
        else:
            payload += measured(stream_id, offset, data, fin)
    return payload + rng.choice([b"", b"", b"", b"\0\0", b"\x01"])


@pytest.mark.parametrize("seed", range(6))
def test_packets_of_pieces_bring_what_the_library_would_read(seed: int) -> None:
    rng = random.Random(seed)
    short, long = ready(), ready()
    read: list[bool] = []
    take = short.server.quic._read_pieces

    def counting(*facts: Any) -> bool:
        read.append(take(*facts))
        return read[-1]

    short.server.quic._read_pieces = counting  # type: ignore[method-assign]
    long.server.quic._read_pieces = lambda *_: False  # type: ignore[method-assign]
    offsets = dict.fromkeys(STREAMS, 0)
    offsets[FIRST] = 65
    for _ in range(100):
        payload = frames(rng, offsets, short.server.quic._packet_number - 1)
        for pair in (short, long):
            give(pair, flight_of(pair, payload))
        assert state(short) == state(long)
        if rng.random() < 0.2:
            for pair in (short, long):
                pair.clock.run_for(0.03)
    assert short.server.quic.close_event is None
    assert sum(read) > 5 and not all(read)


def ends(pair: Pair, payload: bytes) -> int:
    """Code that a server closes with when it gets these frames."""
    give(pair, flight_of(pair, payload))
    event = pair.server.quic.close_event
    assert event is not None
    return event.error_code


def test_an_acknowledgement_that_ends_the_connection_brings_no_piece() -> None:
    pair = ready()
    never = pair.server.quic._packet_number
    payload = ack(never, 0) + piece(FIRST, 65, b"x" * 1060)
    assert ends(pair, payload) == QuicErrorCode.PROTOCOL_VIOLATION
    assert len(pair.server.receiver.data[FIRST]) == 65


def test_pieces_share_the_credit_of_their_connection() -> None:
    pair = ready()
    quic = pair.server.quic
    give(pair, flight_of(pair, piece(FIRST + 4, 0, b"x" * 60)))
    payload = measured(FIRST, 65, b"a" * 600) + piece(FIRST + 4, 60, b"b" * 600)
    quic._local_max_data.used = quic._local_max_data.value - 1199
    assert ends(pair, payload) == QuicErrorCode.FLOW_CONTROL_ERROR


def test_each_piece_is_held_to_the_credit_of_its_stream() -> None:
    pair = ready()
    give(pair, flight_of(pair, piece(FIRST + 4, 0, b"x" * 60)))
    pair.server.quic._streams[FIRST + 4].max_stream_data_local = 119
    payload = measured(FIRST, 65, b"a" * 60) + piece(FIRST + 4, 60, b"b" * 60)
    assert ends(pair, payload) == QuicErrorCode.FLOW_CONTROL_ERROR

"""The ledger: what it takes, where it lands, and what it drops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvcs.errors import ObjectError, UsageError
from kvcs.kv import (
    Component,
    Outcome,
)
from kvcs.moqt.names import Location
from tests.unit.kv.toy import (
    AT,
    DATA_OCTETS,
    K0,
    PAYLOAD_OCTETS,
    TOY,
    V0,
    deliver,
    fill,
    started,
    toy_publication,
)


def test_every_object_lands_in_its_place() -> None:
    ledger = TOY.ledger()
    assert not ledger.whole
    fill(ledger)
    assert ledger.whole
    assert ledger.take_ready() == [0, 1, 2, 3]
    assert ledger.take_ready() == []
    for layer, tensors in enumerate(ledger.ready_layers()):
        assert tensors.index == layer
        assert tensors.k.dtype == TOY.descriptor.numpy_dtype
        assert tensors.k.shape == tensors.v.shape == (12, 2, 8)
        assert np.array_equal(tensors.k, TOY.k[layer])
        assert np.array_equal(tensors.v, TOY.v[layer])
    assert ledger.missing() == ()
    assert ledger.usable_tokens() == 12
    counters = ledger.counters
    assert (counters.verified, counters.duplicates, counters.excess) == (24, 0, 0)
    assert counters.verified_octets == 24 * DATA_OCTETS
    assert counters.octets == 24 * PAYLOAD_OCTETS
    assert not counters.rejected


@pytest.mark.parametrize("piece", [1, 2, 67, 68, 69, 195, 196])
def test_octets_come_in_pieces_of_any_size(piece: int) -> None:
    ledger = TOY.ledger()
    assert deliver(ledger, K0, AT, TOY.objects[K0, AT], piece) is Outcome.VERIFIED


def test_a_caller_may_reuse_its_buffer_at_once() -> None:
    ledger, payload = TOY.ledger(blocks=1, layers=(1, 1)), TOY.objects
    buffer = bytearray(7)
    for track in (K0, V0):
        slot = started(ledger, payload[track, Location(1, 0)], track, Location(1, 0))
        for start in range(0, PAYLOAD_OCTETS, 7):
            buffer[:] = payload[track, Location(1, 0)][start : start + 7]
            slot.write(memoryview(buffer))
        assert slot.finish() is Outcome.VERIFIED
    assert np.array_equal(ledger.layer(1).k, TOY.k[1, :4])


def test_joint_tensors_land_in_both_places() -> None:
    toy = toy_publication(components=[Component.KV], v_head_dim=6)
    ledger = toy.ledger()
    fill(ledger, toy)
    assert np.array_equal(ledger.layer(2).k, toy.k[2])
    assert np.array_equal(ledger.layer(2).v, toy.v[2])
    assert ledger.layer(2).v.shape == (12, 2, 6)


def test_segments_follow_each_other_in_the_tensors() -> None:
    toy = toy_publication((2, 1, 3))
    ledger = toy.ledger()
    fill(ledger, toy, lambda key: key[0].segment == 1)
    assert ledger.usable_tokens() == 0
    fill(ledger, toy, lambda key: key[0].segment != 1)
    assert ledger.covered == 6
    assert np.array_equal(ledger.layer(3).k, toy.k[3])
    assert [str(track) for track in ledger.tracks] == [
        f"{component}.raw.s{segment}" for segment in range(3) for component in "kv"
    ]


def test_a_selection_of_layers_and_blocks_drops_the_rest_unread() -> None:
    toy = toy_publication((2, 3))
    ledger = toy.ledger(blocks=3, layers=(1, 2))
    fill(ledger, toy)
    assert ledger.take_ready() == [1, 2]
    assert ledger.whole
    assert np.array_equal(ledger.layer(2).v, toy.v[2, :12])
    assert ledger.counters.verified == 2 * 3 * 2
    assert ledger.counters.excess == 2 * 4 * 5 - 2 * 3 * 2
    with pytest.raises(UsageError, match="layer 0 was not selected"):
        ledger.layer(0)


def test_tensors_are_allocated_only_for_objects_whose_header_is_right() -> None:
    ledger = TOY.ledger()
    payload = TOY.objects[K0, AT]
    started(ledger, payload).write(payload[:67])
    bad = started(ledger, payload)
    bad.write(b"X" + payload[1:])
    with pytest.raises(ObjectError):
        bad.finish()
    assert ledger._tensors == {}
    started(ledger, payload).write(payload[:68])
    assert list(ledger._tensors) == [1]


def test_results_are_read_only() -> None:
    ledger = TOY.ledger()
    fill(ledger)
    for tensor in (ledger.layer(0).k, ledger.layer(0).v):
        with pytest.raises(ValueError, match="read-only"):
            tensor[0, 0, 0] = 1


@pytest.mark.parametrize(
    ("check", "damage"),
    [
        ("magic", lambda p: b"X" + p[1:]),
        ("version", lambda p: p[:4] + b"\2" + p[5:]),
        ("component", lambda p: p[:5] + b"\2" + p[6:]),
        ("layer", lambda p: p[:11] + b"\0" + p[12:]),
        ("block", lambda p: p[:15] + b"\0" + p[16:]),
        ("token_start", lambda p: p[:23] + b"\0" + p[24:]),
        ("token_count", lambda p: p[:27] + b"\3" + p[28:]),
        ("codec", lambda p: p[:29] + b"\2" + p[30:]),
        ("length", lambda p: p[:35] + b"\0" + p[36:]),
        ("digest", lambda p: p[:36] + bytes(32) + p[68:]),
        ("digest", lambda p: p[:-1] + bytes([p[-1] ^ 1])),
    ],
)
def test_a_damaged_object_is_dropped_counted_and_owed_again(
    check: str, damage: Callable[[bytes], bytes]
) -> None:
    ledger = TOY.ledger()
    payload = TOY.objects[K0, AT]
    with pytest.raises(ObjectError) as caught:
        deliver(ledger, K0, AT, damage(payload))
    assert caught.value.check == check
    assert ledger.counters.rejected == {check: 1}
    assert ledger.counters.verified == 0
    assert deliver(ledger, K0, AT, payload) is Outcome.VERIFIED


def test_flags_and_reserved_are_ignored() -> None:
    payload = bytearray(TOY.objects[K0, AT])
    payload[6:8] = payload[30:32] = b"\xff\xff"
    assert deliver(TOY.ledger(), K0, AT, bytes(payload)) is Outcome.VERIFIED


@pytest.mark.parametrize(
    ("location", "length", "check"),
    [
        (Location(4, 0), PAYLOAD_OCTETS, "layer"),
        (Location(4, 0), 0, "layer"),
        (Location(2**62, 0), PAYLOAD_OCTETS, "layer"),
        (Location(0, 3), PAYLOAD_OCTETS, "block"),
        (Location(0, 2**62), PAYLOAD_OCTETS, "block"),
        (Location(0, 0), 0, "length"),
        (Location(0, 0), 67, "length"),
        (Location(0, 0), PAYLOAD_OCTETS - 1, "length"),
        (Location(0, 0), PAYLOAD_OCTETS + 1, "length"),
        (Location(0, 0), 2**62, "length"),
    ],
)
def test_what_cannot_exist_is_dropped_before_its_first_octet(
    location: Location, length: int, check: str
) -> None:
    ledger = TOY.ledger()
    with pytest.raises(ObjectError) as caught:
        ledger.begin(K0, location, length)
    assert caught.value.check == check
    assert ledger.counters.rejected == {check: 1}


def test_too_few_and_too_many_octets() -> None:
    ledger, payload = TOY.ledger(), TOY.objects[K0, AT]
    for octets in (b"", payload[:10], payload[:68], payload[:-1], payload + b"x"):
        slot = started(ledger, payload)
        slot.write(octets)
        with pytest.raises(ObjectError) as caught:
            slot.finish()
        assert caught.value.check == "length"
    assert ledger.counters.rejected == {"length": 5}
    assert deliver(ledger, K0, AT, payload) is Outcome.VERIFIED


def test_a_slot_ends_once() -> None:
    ledger, payload = TOY.ledger(), TOY.objects[K0, AT]
    slot = started(ledger, payload)
    slot.write(payload)
    slot.finish()
    with pytest.raises(UsageError, match="has ended"):
        slot.finish()
    slot.abandon()
    slot.write(payload)
    assert ledger.counters.abandoned == 0
    other = started(ledger, payload)
    other.abandon()
    other.abandon()
    assert ledger.counters.abandoned == 1
    with pytest.raises(UsageError, match="has ended"):
        other.finish()


def test_an_object_whose_stream_was_reset_is_owed_again() -> None:
    ledger, payload = TOY.ledger(), TOY.objects[K0, AT]
    slot = started(ledger, payload)
    slot.write(payload[:100])
    slot.abandon()
    assert deliver(ledger, K0, AT, payload) is Outcome.VERIFIED
    assert ledger.counters.octets == 100 + PAYLOAD_OCTETS

"""The ledger: what it takes, what it drops, and what it says."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcs.errors import MissingBlocks, ObjectError, PublicationError, UsageError
from kvcs.kv import (
    HEADER_OCTETS,
    RAW,
    BlockLayout,
    Component,
    DataTrack,
    Ledger,
    Manifest,
    Outcome,
    PayloadHeader,
    Slot,
    register,
)
from kvcs.kv import codecs as codecs_room
from kvcs.moqt.names import Location
from tests.unit.kv.toy import (
    DATA_OCTETS,
    K0,
    PAYLOAD_OCTETS,
    V0,
    Toy,
    deliver,
    toy_descriptor,
    toy_publication,
)

TOY = toy_publication()
KV0 = DataTrack.parse("kv.raw.s0")
AT = Location(1, 2)


def fill(ledger: Ledger, toy: Toy = TOY, where: Callable[[Any], bool] = lambda key: True) -> None:
    """Deliver a toy's objects, those that ``where`` picks."""
    for key, payload in toy.objects.items():
        if where(key):
            deliver(ledger, *key, payload)


def started(ledger: Ledger, payload: bytes, track: DataTrack = K0, at: Location = AT) -> Slot:
    slot = ledger.begin(track, at, len(payload))
    assert slot is not None
    return slot


def same_place_other_bytes(payload: bytes) -> bytes:
    """Another Object for the same Location that passes every check of its own."""
    data = bytes(255 - octet for octet in payload[HEADER_OCTETS:])
    header = PayloadHeader.unpack(payload)
    digest = hashlib.sha256(data).digest()
    return dataclasses.replace(header, data_digest=digest).pack() + data


# --- receiving ---


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


# --- what is wrong with one object ---


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


# --- copies ---


def test_a_second_copy_is_counted_and_disturbs_nothing() -> None:
    ledger = TOY.ledger()
    fill(ledger)
    payload = TOY.objects[K0, AT]
    assert deliver(ledger, K0, AT, payload) is Outcome.DUPLICATE
    assert ledger.counters.duplicates == 1
    torn = started(ledger, payload)
    torn.write(payload[:68] + bytes(60))
    torn.abandon()
    damaged = started(ledger, payload)
    damaged.write(payload[:68] + bytes(DATA_OCTETS))
    with pytest.raises(ObjectError):
        damaged.finish()
    assert np.array_equal(ledger.layer(1).k, TOY.k[1])
    assert ledger.counters.verified == 24
    assert ledger.take_ready() == [0, 1, 2, 3]


def test_other_bytes_at_a_verified_place_end_the_publication() -> None:
    ledger = TOY.ledger()
    fill(ledger)
    with pytest.raises(PublicationError, match=r"k\.raw\.s0 1/2: a second copy has another digest"):
        deliver(ledger, K0, AT, same_place_other_bytes(TOY.objects[K0, AT]))
    assert not ledger.is_ready(1)
    assert ledger.take_ready() == [0, 2, 3]
    assert ledger.usable_tokens(1) == 0
    with pytest.raises(UsageError):
        ledger.layer(1)
    assert np.array_equal(ledger.layer(2).k, TOY.k[2])


def two_copies(ledger: Ledger) -> tuple[Slot, Slot, bytes]:
    """A first and a second copy of one Object, both half in."""
    payload = TOY.objects[K0, AT]
    first, second = started(ledger, payload), started(ledger, payload)
    first.write(payload[:100])
    second.write(payload[:130])
    return first, second, payload


def taken_right(ledger: Ledger) -> bool:
    fill(ledger, where=lambda key: key != (K0, AT))
    return np.array_equal(ledger.layer(1).k, TOY.k[1])


def test_fill_and_live_copy_at_once_first_wins() -> None:
    ledger = TOY.ledger()
    first, second, payload = two_copies(ledger)
    first.write(payload[100:])
    assert first.finish() is Outcome.VERIFIED
    second.write(payload[130:])
    assert second.finish() is Outcome.DUPLICATE
    assert taken_right(ledger)


def test_fill_and_live_copy_at_once_second_wins() -> None:
    ledger = TOY.ledger()
    first, second, payload = two_copies(ledger)
    second.write(payload[130:])
    assert second.finish() is Outcome.VERIFIED
    first.write(payload[100:])
    assert first.finish() is Outcome.DUPLICATE
    assert taken_right(ledger)


def test_a_late_first_copy_cannot_spoil_what_the_second_brought() -> None:
    ledger = TOY.ledger()
    first, second, payload = two_copies(ledger)
    second.write(payload[130:])
    second.finish()
    first.write(bytes(PAYLOAD_OCTETS - 100))
    with pytest.raises(ObjectError) as caught:
        first.finish()
    assert caught.value.check == "digest"
    assert taken_right(ledger)


@pytest.mark.parametrize("end", ["reset", "damage"])
def test_the_second_copy_still_wins_when_the_first_fails(end: str) -> None:
    ledger = TOY.ledger()
    first, second, payload = two_copies(ledger)
    if end == "reset":
        first.abandon()
    else:
        first.write(bytes(PAYLOAD_OCTETS - 100))
        with pytest.raises(ObjectError):
            first.finish()
    second.write(payload[130:])
    assert second.finish() is Outcome.VERIFIED
    assert taken_right(ledger)


def test_the_first_copy_still_wins_when_the_second_fails() -> None:
    ledger = TOY.ledger()
    first, second, payload = two_copies(ledger)
    second.write(bytes(PAYLOAD_OCTETS - 130))
    with pytest.raises(ObjectError):
        second.finish()
    first.write(payload[100:])
    assert first.finish() is Outcome.VERIFIED
    assert taken_right(ledger)


def test_two_different_copies_at_once_are_a_contradiction() -> None:
    ledger = TOY.ledger()
    payload = TOY.objects[K0, AT]
    other = same_place_other_bytes(payload)
    first, second = started(ledger, payload), started(ledger, other)
    first.write(payload[:100])
    second.write(other)
    assert second.finish() is Outcome.VERIFIED
    first.write(payload[100:])
    with pytest.raises(PublicationError):
        first.finish()
    assert not ledger.is_ready(1)


def test_copies_aside_are_bounded() -> None:
    ledger = TOY.ledger(max_aside_octets=2 * DATA_OCTETS)
    payload = TOY.objects[K0, AT]
    slots = [started(ledger, payload) for _ in range(4)]
    for slot in slots:
        slot.write(payload)
    assert slots[3].finish() is Outcome.DUPLICATE
    assert slots[2].finish() is Outcome.VERIFIED
    for slot in slots[:2]:
        assert slot.finish() is Outcome.DUPLICATE
    assert ledger._aside == {} and ledger._holders == {}
    assert taken_right(ledger)


# --- manifests ---


@pytest.mark.parametrize("order", ["first", "last", "between"])
def test_lists_may_come_before_or_after_objects(order: str) -> None:
    ledger = TOY.ledger()
    versions = [TOY.writer((layers,)).manifest() for layers in range(5)]
    if order == "first":
        for version in versions:
            ledger.apply_manifest(version)
    for layer in range(4):
        fill(ledger, where=lambda key, layer=layer: key[1].group == layer)  # type: ignore[misc]
        if order == "between":
            ledger.apply_manifest(versions[layer + 1])
    if order == "last":
        ledger.apply_manifest(versions[4])
    assert ledger.manifest == versions[4]
    assert ledger.whole and ledger.complete


def test_complete_needs_the_manifests_word() -> None:
    ledger = TOY.ledger()
    fill(ledger)
    assert ledger.whole and not ledger.complete
    ledger.apply_manifest(TOY.writer((3,)).manifest())
    assert not ledger.complete
    ledger.apply_manifest(TOY.writer().manifest())
    assert ledger.complete


def listed_otherwise(toy: Toy = TOY, layer: int = 1) -> Manifest:
    """A manifest with another digest for block 2 of one layer of K."""
    return (
        dataclasses.replace(toy, digests={**toy.digests, (K0, Location(layer, 2)): bytes(32)})
        .writer()
        .manifest()
    )


def test_an_object_that_is_not_the_listed_one_is_dropped() -> None:
    ledger = TOY.ledger()
    ledger.apply_manifest(TOY.writer().manifest())
    other = same_place_other_bytes(TOY.objects[K0, AT])
    with pytest.raises(ObjectError) as caught:
        deliver(ledger, K0, AT, other)
    assert caught.value.check == "listed"
    assert deliver(ledger, K0, AT, TOY.objects[K0, AT]) is Outcome.VERIFIED


def test_a_list_that_contradicts_a_released_object_ends_the_publication() -> None:
    ledger = TOY.ledger()
    fill(ledger)
    with pytest.raises(PublicationError, match=r"k\.raw\.s0 1/2: the manifest lists another"):
        ledger.apply_manifest(listed_otherwise())
    assert ledger.manifest is None
    assert not ledger.is_ready(1)


def test_signed_mode_releases_only_what_is_listed() -> None:
    ledger = TOY.ledger(signed=True)
    ledger.apply_manifest(TOY.writer((1,)).manifest())
    for key, payload in TOY.objects.items():
        listed = key[1].group < 1
        expected = Outcome.VERIFIED if listed else Outcome.WAITING
        assert deliver(ledger, *key, payload) is expected
    assert ledger.take_ready() == [0]
    assert ledger.counters.verified == 6
    assert ledger.usable_tokens(1) == 0
    assert len(ledger.missing()) == 6
    assert deliver(ledger, K0, AT, TOY.objects[K0, AT]) is Outcome.DUPLICATE
    ledger.apply_manifest(TOY.writer((3,)).manifest())
    assert ledger.take_ready() == [1, 2]
    ledger.apply_manifest(TOY.writer().manifest())
    assert ledger.take_ready() == [3]
    assert ledger.counters.verified == 24
    assert ledger.complete


def test_signed_mode_drops_a_waiting_object_that_the_list_denies() -> None:
    ledger = TOY.ledger(signed=True)
    other = same_place_other_bytes(TOY.objects[K0, AT])
    assert deliver(ledger, K0, AT, other) is Outcome.WAITING
    ledger.apply_manifest(TOY.writer().manifest())
    assert ledger.counters.rejected == {"listed": 1}
    assert deliver(ledger, K0, AT, TOY.objects[K0, AT]) is Outcome.VERIFIED
    assert taken_right(ledger)


def test_signed_mode_without_lists_releases_nothing() -> None:
    ledger = TOY.ledger(signed=True)
    fill(ledger)
    assert ledger.take_ready() == [] and not ledger.whole
    assert ledger.usable_tokens() == 0


def test_versions_are_held_to_each_other_and_to_the_selection() -> None:
    ledger = TOY.ledger()
    ledger.apply_manifest(TOY.writer((2,)).manifest())
    with pytest.raises(PublicationError, match="went back"):
        ledger.apply_manifest(TOY.writer((1,)).manifest())
    with pytest.raises(PublicationError, match="block_tokens: ours 4, theirs 8"):
        TOY.ledger().apply_manifest(Manifest({}, 4, 8))
    with pytest.raises(PublicationError, match="layers: ours 4, theirs 5"):
        TOY.ledger().apply_manifest(Manifest({}, 5, 4))
    with pytest.raises(PublicationError, match="segment 0 has 2 blocks, expected 3"):
        TOY.ledger().apply_manifest(toy_publication((2,)).writer().manifest())
    joint = toy_publication(components=[Component.KV]).writer().manifest()
    with pytest.raises(PublicationError, match=r"segment 0 has no track k\.raw\.s0"):
        TOY.ledger().apply_manifest(joint)
    late = Ledger(TOY.descriptor, blocks=3)
    late.apply_manifest(joint)
    with pytest.raises(PublicationError, match=r"no track k\.raw\.s0"):
        late.add_segment([K0, V0], 3)
    late.add_segment([KV0], 3)


def test_lists_of_segments_not_yet_selected_count_later() -> None:
    toy = toy_publication((2, 1))
    ledger = Ledger(toy.descriptor, blocks=3, signed=True)
    ledger.apply_manifest(toy.writer().manifest())
    for tracks, blocks in zip(toy.segments, toy.blocks, strict=True):
        ledger.add_segment(tracks, blocks)
    fill(ledger, toy)
    assert ledger.complete


# --- ends ---


def test_the_end_of_a_group_after_its_last_block_says_nothing_new() -> None:
    ledger = TOY.ledger()
    for layer in range(4):
        ledger.end_of_group(K0, Location(layer, 3))
    ledger.end_of_group(K0, Location(4, 0))
    fill(ledger)
    assert ledger.whole


# --- what the consumer may ask ---


def test_missing_names_runs_of_blocks_and_their_tokens() -> None:
    toy = toy_publication((5, 2), layers=2)
    ledger = toy.ledger()
    lacking = {(K0, Location(1, block)) for block in (0, 2, 3)}
    lacking.add((DataTrack.parse("v.raw.s1"), Location(0, 1)))
    fill(ledger, toy, lambda key: key not in lacking)
    assert ledger.missing() == (
        MissingBlocks(0, "k", 1, 0, 0, 0, 3),
        MissingBlocks(0, "k", 1, 2, 3, 8, 15),
        MissingBlocks(1, "v", 0, 1, 1, 24, 27),
    )
    assert ledger.usable_tokens(0) == 24
    assert ledger.usable_tokens(1) == 0
    assert ledger.usable_tokens() == 0
    assert ledger.usable_tokens(7) == 0


def test_missing_names_what_no_segment_covers_yet() -> None:
    ledger = Ledger(toy_descriptor(layers=1), blocks=5)
    assert ledger.missing() == (
        MissingBlocks(0, "k", 0, 0, 4, 0, 19),
        MissingBlocks(0, "v", 0, 0, 4, 0, 19),
    )
    ledger.add_segment([KV0], 2)
    assert ledger.missing() == (
        MissingBlocks(0, "kv", 0, 0, 1, 0, 7),
        MissingBlocks(1, "kv", 0, 0, 2, 8, 19),
    )


def test_a_layer_is_not_ready_while_a_segment_is_unknown() -> None:
    toy = toy_publication((2, 1))
    ledger = Ledger(toy.descriptor, blocks=3)
    ledger.add_segment(toy.segments[0], 2)
    fill(ledger, toy, lambda key: key[0].segment == 0)
    assert ledger.take_ready() == [] and not ledger.is_ready(0)
    assert ledger.usable_tokens() == 8
    assert np.array_equal(ledger.layer(0, 8).k, toy.k[0, :8])
    ledger.add_segment(toy.segments[1], 1)
    fill(ledger, toy, lambda key: key[0].segment == 1)
    assert ledger.whole


def test_leading_tokens_of_a_partial_layer_can_be_used() -> None:
    ledger = TOY.ledger()
    fill(ledger, where=lambda key: key[1] != AT)
    assert ledger.usable_tokens(1) == 8
    assert np.array_equal(ledger.layer(1, 8).v, TOY.v[1, :8])
    assert ledger.layer(1, 0).k.shape == (0, 2, 8)
    for tokens in (9, 12, None, -1):
        with pytest.raises(UsageError, match="8 tokens are verified"):
            ledger.layer(1, tokens)


def test_readiness_is_announced_in_the_order_in_which_it_came() -> None:
    ledger = TOY.ledger()
    for layer in (2, 0, 3, 1):
        fill(ledger, where=lambda key, layer=layer: key[1].group == layer)  # type: ignore[misc]
    assert ledger.take_ready() == [2, 0, 3, 1]
    assert [tensors.index for tensors in ledger.ready_layers()] == [0, 1, 2, 3]


# --- selecting ---


@pytest.mark.parametrize(
    "options",
    [
        {"blocks": 0},
        {"blocks": -1},
        {"blocks": 2**32 + 1},
        {"blocks": 1, "layers": (0, 4)},
        {"blocks": 1, "layers": (2, 1)},
        {"blocks": 1, "layers": (-1, 1)},
    ],
)
def test_an_empty_or_impossible_selection(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Ledger(toy_descriptor(), **options)


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["k.raw.s0"],
        ["k.raw.s0", "k.raw.s0"],
        ["k.raw.s0", "kv.raw.s0"],
        ["k.raw.s0", "v.raw.s0", "kv.raw.s0"],
        ["k.raw.s0", "v.other.s0"],
        ["k.other.s0", "v.other.s0"],
        ["k.raw.s1", "v.raw.s1"],
        ["k.raw.s0", "v.raw.s1"],
    ],
)
def test_tracks_that_do_not_carry_a_segment(names: list[str]) -> None:
    ledger = Ledger(toy_descriptor(), blocks=3)
    with pytest.raises(UsageError):
        ledger.add_segment([DataTrack.parse(name) for name in names], 3)
    ledger.add_segment([V0, K0], 3)
    assert ledger.tracks == (K0, V0)
    with pytest.raises(UsageError, match="begins at block 3"):
        ledger.add_segment([DataTrack.parse(f"{c}.raw.s1") for c in "kv"], 3)
    with pytest.raises(UsageError, match=r"kv\.raw\.s0 was not selected"):
        ledger.begin(KV0, AT, PAYLOAD_OCTETS)
    with pytest.raises(UsageError, match="was not selected"):
        ledger.end_of_group(DataTrack.parse("k.raw.s7"), AT)


def test_objects_above_the_limit_are_refused_in_selecting() -> None:
    ledger = Ledger(toy_descriptor(), blocks=3, max_data_octets=DATA_OCTETS - 1)
    with pytest.raises(UsageError, match="above the limit 127"):
        ledger.add_segment([K0, V0], 3)
    with pytest.raises(UsageError, match="latent attention"):
        Ledger(toy_descriptor(v_head_dim=0), blocks=3).add_segment([K0, V0], 3)


# --- a codec that decodes ---


class Flip:
    """Inverts every bit, marks the end, and can be told to fail."""

    name, number, lossless, in_place = "flip", 0xFF02, True, False
    mode = ""

    def data_octets(self, layout: BlockLayout) -> int | None:
        return None

    def encode(self, sections: Any, layout: BlockLayout) -> list[bytes]:
        joined = b"".join(RAW.encode(sections, layout))
        return [bytes(255 - octet for octet in joined), b"end"]

    def decode(self, data: memoryview, layout: BlockLayout) -> list[bytes]:
        if self.mode == "raise":
            raise ZeroDivisionError("codec bug")
        plain = bytes(255 - octet for octet in data[:-3])
        if self.mode == "short":
            plain = plain[:-1]
        if self.mode == "sections":
            return [plain[:1], plain[1:]]
        return [bytes(part) for part in RAW.decode(memoryview(plain), layout)]


@pytest.fixture
def flip(monkeypatch: pytest.MonkeyPatch) -> Flip:
    monkeypatch.setattr(codecs_room, "_BY_NAME", dict(codecs_room._BY_NAME))
    monkeypatch.setattr(codecs_room, "_BY_NUMBER", dict(codecs_room._BY_NUMBER))
    codec = Flip()
    register(codec)
    return codec


@pytest.mark.usefixtures("flip")
def test_a_coded_publication_gives_the_same_tensors() -> None:
    toy = toy_publication(codec="flip")
    ledger = toy.ledger(signed=True)
    fill(ledger, toy)
    ledger.apply_manifest(toy.writer().manifest())
    assert ledger.complete
    assert np.array_equal(ledger.layer(3).v, toy.v[3])
    joint = toy_publication(codec="flip", components=[Component.KV])
    ledger = joint.ledger()
    fill(ledger, joint)
    assert np.array_equal(ledger.layer(0).k, joint.k[0])


@pytest.mark.parametrize("mode", ["raise", "short", "sections"])
def test_what_does_not_decode_is_a_missing_object(mode: str, flip: Flip) -> None:
    toy = toy_publication(codec="flip")
    ledger = toy.ledger()
    track = toy.segments[0][0]
    flip.mode = mode
    with pytest.raises(ObjectError) as caught:
        deliver(ledger, track, AT, toy.objects[track, AT])
    assert caught.value.check == "codec"
    assert ledger.counters.rejected == {"codec": 1}
    assert ledger.counters.verified == 0
    flip.mode = ""
    assert deliver(ledger, track, AT, toy.objects[track, AT]) is Outcome.VERIFIED


@pytest.mark.usefixtures("flip")
def test_coded_data_is_bounded() -> None:
    toy = toy_publication(codec="flip")
    ledger = toy.ledger(max_data_octets=DATA_OCTETS + 3)
    fill(ledger, toy)
    assert ledger.whole
    with pytest.raises(ObjectError) as caught:
        ledger.begin(toy.segments[0][0], AT, HEADER_OCTETS + DATA_OCTETS + 4)
    assert caught.value.check == "length"


@pytest.mark.usefixtures("flip")
def test_two_coded_copies_at_once() -> None:
    toy = toy_publication(codec="flip")
    ledger, track = toy.ledger(), toy.segments[0][0]
    payload = toy.objects[track, AT]
    first, second = (started(ledger, payload, track) for _ in range(2))
    first.write(payload[:90])
    second.write(payload)
    assert second.finish() is Outcome.VERIFIED
    first.write(payload[90:])
    assert first.finish() is Outcome.DUPLICATE
    assert ledger._aside == {} and ledger._holders == {}

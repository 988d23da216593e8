"""What a manifest's lists do to Objects, and what the end of a Group says."""

from __future__ import annotations

import dataclasses

import pytest

from kvcs.errors import ObjectError, PublicationError
from kvcs.kv import (
    Component,
    DataTrack,
    Ledger,
    Manifest,
    Outcome,
)
from kvcs.moqt.names import Location
from tests.unit.kv.toy import (
    AT,
    DATA_OCTETS,
    K0,
    TOY,
    V0,
    Toy,
    deliver,
    fill,
    same_place_other_bytes,
    taken_right,
    toy_publication,
)

KV0 = DataTrack.parse("kv.raw.s0")


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


@pytest.mark.parametrize("signed", [False, True])
def test_only_what_has_its_place_is_here(signed: bool) -> None:
    ledger = TOY.ledger(signed=signed)
    payload = TOY.objects[K0, AT]
    other = same_place_other_bytes(payload)
    damaged = payload[:-1] + bytes((payload[-1] ^ 1,))
    assert ledger.octets_here == 0
    with pytest.raises(ObjectError):
        deliver(ledger, K0, AT, damaged)
    assert ledger.octets_here == 0
    deliver(ledger, K0, AT, other if signed else payload)
    for _ in range(3):
        deliver(ledger, K0, AT, other if signed else payload)
    assert ledger.octets_here == DATA_OCTETS, "copies count for nothing"
    ledger.apply_manifest(TOY.writer().manifest())
    assert ledger.octets_here == (0 if signed else DATA_OCTETS)
    fill(ledger)
    assert ledger.octets_here == len(TOY.objects) * DATA_OCTETS


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


def test_the_end_of_a_group_after_its_last_block_says_nothing_new() -> None:
    ledger = TOY.ledger()
    for layer in range(4):
        ledger.end_of_group(K0, Location(layer, 3))
    ledger.end_of_group(K0, Location(4, 0))
    fill(ledger)
    assert ledger.whole

"""A whole segment of another publication takes the place of ours, and ours leaves no trace."""

from __future__ import annotations

import pytest

from kvcs.errors import PublicationError, UsageError
from kvcs.kv import Ledger
from kvcs.kv.slots import Outcome
from kvcs.moqt.names import Location
from tests.unit.kv.toy import K0, V0, Toy, deliver, fill, started, toy_publication

OURS, THEIRS = toy_publication((2, 1)), toy_publication((2, 1), seed=1)
GONE = (V0, Location(2, 1))


def ledgers() -> tuple[Ledger, Ledger]:
    """Ours, which lacks one Object of segment 0, and theirs, which is whole."""
    ours, theirs = OURS.ledger(), THEIRS.ledger()
    fill(ours, OURS, lambda key: key != GONE)
    fill(theirs, THEIRS)
    return ours, theirs


def whose(ledger: Ledger, layer: int) -> list[str]:
    """Of whom each segment of a layer is."""
    tensors = ledger.layer(layer)
    size, found, first = OURS.descriptor.block_tokens, [], 0
    for blocks in OURS.blocks:
        part = slice(first * size, (first + blocks) * size)
        first += blocks
        for name, toy in (("ours", OURS), ("theirs", THEIRS)):
            pairs = ((tensors.k, toy.k[layer]), (tensors.v, toy.v[layer]))
            if all(got[part].tobytes() == meant[part].tobytes() for got, meant in pairs):
                found.append(name)
    return found


def test_all_layers_of_the_segment_are_theirs_and_the_others_stay() -> None:
    ours, theirs = ledgers()
    assert not ours.has_segment(0) and ours.has_segment(1) and theirs.has_segment(0)
    assert not ours.whole
    ours.apply_manifest(OURS.writer().manifest())
    ours.take_ready()
    ours.take_segment(0, theirs)
    assert ours.take_ready() == [2]
    assert [whose(ours, layer) for layer in range(4)] == [["theirs", "ours"]] * 4
    assert ours.whole and ours.complete
    assert ours.counters.verified == 24 and ours.counters.supplied == 0
    assert ours.replaced == {0: (K0, V0)} and ours.sources == ours.tracks


def test_our_manifest_need_not_call_it_complete_any_more() -> None:
    ours, theirs = ledgers()
    ours.apply_manifest(OURS.writer(complete=False).manifest())
    ours.take_segment(0, theirs)
    assert ours.whole and not ours.complete
    ours.take_segment(1, theirs)
    assert ours.complete


def test_what_still_comes_of_ours_is_a_copy_and_changes_nothing() -> None:
    ours, theirs = ledgers()
    payload = OURS.objects[GONE]
    slot = started(ours, payload, *GONE)
    slot.write(memoryview(payload)[:100])  # it is on its way, into the very place
    ours.take_segment(0, theirs)
    slot.write(memoryview(payload)[100:])
    assert slot.finish() is Outcome.DUPLICATE
    deliver(ours, *GONE, payload)
    assert [whose(ours, layer) for layer in range(4)] == [["theirs", "ours"]] * 4
    # Nor is what our manifest lists a contradiction to what is theirs.
    ours.apply_manifest(OURS.writer().manifest())
    assert ours.complete
    # Of the other segment it still is.
    other = toy_publication((2, 1), seed=2)
    with pytest.raises(PublicationError, match="contradicts itself"):
        ours = OURS.ledger()
        fill(ours, OURS)
        ours.take_segment(0, theirs)
        ours.apply_manifest(other.writer().manifest())


def test_what_waited_for_our_list_is_theirs_now() -> None:
    ours = OURS.ledger(signed=True)
    fill(ours, OURS)
    assert not ours.has_segment(0)
    _, theirs = ledgers()
    ours.take_segment(0, theirs)
    assert ours.has_segment(0) and not ours.has_segment(1)
    ours.apply_manifest(OURS.writer().manifest())
    assert [whose(ours, layer) for layer in range(4)] == [["theirs", "ours"]] * 4


@pytest.mark.parametrize(
    "other",
    [
        toy_publication((2, 1), seed=1),  # of which one Object lacks
        toy_publication((1, 2), seed=1),
        toy_publication((2, 1), seed=1, model="another"),
    ],
)
def test_a_part_of_it_or_another_one_is_refused(other: Toy) -> None:
    ours, _ = ledgers()
    theirs = other.ledger()
    fill(theirs, other, lambda key: key != GONE)
    with pytest.raises(UsageError, match="does not have all of segment 0"):
        ours.take_segment(0, theirs)
    layers = OURS.ledger(layers=(0, 2))
    whole = THEIRS.ledger()
    fill(whole, THEIRS)
    with pytest.raises(UsageError):
        layers.take_segment(0, whole)
    assert ours.replaced == {} and not ours.has_segment(0)


def test_what_waits_for_a_list_is_released_by_the_one_of_another_publication() -> None:
    ours = OURS.ledger(signed=True)
    ours.apply_manifest(OURS.writer([1, 0], complete=False).manifest())
    fill(ours, OURS, lambda key: key != GONE)
    assert ours.take_ready() == []
    digests = [segment.object_digests for segment in OURS.writer().manifest().segments]
    assert not ours.confirm(0, digests[0])  # an Object lacks
    deliver(ours, *GONE, OURS.objects[GONE])
    assert not ours.confirm(0, THEIRS.writer().manifest().segments[0].object_digests)
    before = ours.counters.verified
    assert ours.confirm(0, digests[0])
    waited = [at for (track, at) in OURS.objects if track.segment == 0 and at.group >= 1]
    assert ours.counters.verified == before + len(waited)
    assert ours.has_segment(0) and not ours.has_segment(1)
    assert ours.confirm(1, digests[1]) and ours.complete
    assert ours.take_ready() == list(ours.layers)


def test_what_another_manifest_lists_of_the_very_same_objects_completes_ours() -> None:
    ours = OURS.ledger()
    fill(ours, OURS, lambda key: key != GONE)
    unfinished, listed = OURS.writer(complete=False).manifest(), OURS.writer().manifest()
    ours.apply_manifest(unfinished)
    digests = [segment.object_digests for segment in listed.segments]
    assert not ours.confirm(0, digests[0])  # an Object lacks
    deliver(ours, *GONE, OURS.objects[GONE])
    assert ours.whole and not ours.complete
    for wrong in ({}, THEIRS.writer().manifest().segments[0].object_digests, digests[1]):
        assert not ours.confirm(0, wrong)
    fewer = {track: layers[:-1] for track, layers in digests[0].items()}
    assert not ours.confirm(0, fewer)
    assert not ours.complete and ours.replaced == {}
    assert ours.confirm(0, digests[0]) and ours.confirm(1, digests[1])
    assert ours.complete and ours.sources == ours.tracks

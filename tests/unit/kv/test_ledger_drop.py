"""Layers that are let go once they were used."""

from __future__ import annotations

import weakref
from collections.abc import Collection

import numpy as np
import pytest

from kvcs.errors import UsageError
from kvcs.kv import Ledger, Outcome
from kvcs.moqt.names import Location
from tests.unit.kv.toy import K0, TOY, deliver


def give(ledger: Ledger, layers: Collection[int]) -> list[Outcome | None]:
    """Give the ledger every Object of some layers."""
    return [
        deliver(ledger, *key, octets)
        for key, octets in TOY.objects.items()
        if key[1].group in layers
    ]


def test_a_layer_that_was_dropped_is_verified_and_gone() -> None:
    ledger = TOY.ledger()
    give(ledger, range(4))
    ledger.apply_manifest(TOY.writer().manifest())
    gone = weakref.ref(ledger._tensors[2][0])
    assert not ledger.has_dropped
    ledger.drop(2)
    ledger.drop(2)
    assert gone() is None and ledger.has_dropped
    assert ledger.is_ready(2) and ledger.whole and ledger.complete and ledger.missing() == ()
    assert ledger.usable_tokens() == ledger.usable_tokens(2) == 12
    assert [layer.index for layer in ledger.ready_layers()] == [0, 1, 3]
    with pytest.raises(UsageError, match="layer 2 was dropped"):
        ledger.layer(2)


def test_tensors_that_were_handed_out_live_on() -> None:
    ledger = TOY.ledger()
    give(ledger, range(4))
    layer = ledger.layer(1)
    ledger.drop(1)
    assert np.array_equal(layer.k.view(np.uint16), TOY.k[1].view(np.uint16))
    assert np.array_equal(layer.v.view(np.uint16), TOY.v[1].view(np.uint16))


def test_copies_of_what_was_dropped_bring_nothing_back() -> None:
    ledger = TOY.ledger()
    early = ledger.begin(K0, Location(1, 0), len(TOY.objects[K0, Location(1, 0)]))
    assert early is not None
    early.write(TOY.objects[K0, Location(1, 0)][:100])
    give(ledger, range(4))
    ledger.drop(1)
    assert give(ledger, (1,)) == [Outcome.DUPLICATE] * 6
    early.write(TOY.objects[K0, Location(1, 0)][100:])
    assert early.finish() is Outcome.DUPLICATE
    assert 1 not in ledger._tensors and ledger.filling == 0


@pytest.mark.parametrize("layer", [0, 3, 4])
def test_only_a_whole_layer_of_the_selection_can_be_dropped(layer: int) -> None:
    ledger = TOY.ledger(layers=(0, 2))
    give(ledger, (1, 2))
    deliver(ledger, K0, Location(0, 0), TOY.objects[K0, Location(0, 0)])
    with pytest.raises(UsageError, match=f"layer {layer} is not whole"):
        ledger.drop(layer)


def test_what_is_held_counts_from_the_first_object_of_a_layer_until_it_is_dropped() -> None:
    ledger = TOY.ledger()
    k, v = TOY.k[0].nbytes, TOY.v[0].nbytes
    assert ledger.held_octets == ledger.octets_here == 0
    deliver(ledger, K0, Location(0, 0), TOY.objects[K0, Location(0, 0)])
    assert ledger.held_octets == k and ledger.octets_here == k // 3
    give(ledger, (0, 1))
    assert ledger.held_octets == ledger.octets_here == 2 * (k + v)
    ledger.drop(0)
    ledger.drop(0)
    assert ledger.held_octets == k + v and ledger.octets_here == 2 * (k + v)
    give(ledger, (0,))  # copies
    assert ledger.held_octets == k + v


def test_a_block_that_waits_for_its_list_is_held() -> None:
    ledger = TOY.ledger(signed=True)
    deliver(ledger, K0, Location(0, 0), TOY.objects[K0, Location(0, 0)])
    assert ledger.counters.verified_octets == 0
    assert ledger.octets_here == TOY.k[0].nbytes // 3 and ledger.held_octets == TOY.k[0].nbytes


def test_a_segment_of_another_publication_is_held_too() -> None:
    ledger, other = TOY.ledger(), TOY.ledger()
    give(other, range(4))
    ledger.take_segment(0, other)
    assert ledger.held_octets == other.held_octets == TOY.k.nbytes + TOY.v.nbytes
    for layer in range(4):
        ledger.drop(layer)
    assert ledger.held_octets == 0

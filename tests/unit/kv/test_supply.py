"""Blocks that the consumer recomputes itself: they count, and contradict nothing."""

from __future__ import annotations

import numpy as np
import pytest

from kvcs.errors import UsageError
from kvcs.kv import Component, DataTrack, Ledger, byte_view, parse_manifest
from kvcs.kv.strict_json import Octets
from kvcs.moqt.names import Location
from tests.unit.kv.toy import K0, PAYLOAD_OCTETS, V0, Toy, toy_publication

TOY = toy_publication()


def sections(toy: Toy, layer: int, block: int, noise: float = 0.0) -> dict[Component, Octets]:
    part = slice(block * 4, block * 4 + 4)
    k, v = (
        np.ascontiguousarray((array[layer][part].astype(np.float32) + noise).astype(array.dtype))
        for array in (toy.k, toy.v)
    )
    return {Component.K: byte_view(k), Component.V: byte_view(v)}


def receive(ledger: Ledger, track: DataTrack, layer: int, block: int) -> None:
    slot = ledger.begin(track, Location(layer, block), PAYLOAD_OCTETS)
    assert slot is not None
    slot.write(TOY.objects[track, Location(layer, block)])
    slot.finish()


def filled(*gaps: tuple[DataTrack, int, int]) -> Ledger:
    """A ledger that has everything but some Objects."""
    ledger = TOY.ledger()
    for track, (layer, block) in TOY.objects:
        if (track, layer, block) not in gaps:
            receive(ledger, track, layer, block)
    return ledger


def test_what_lacked_is_there_and_counted_apart() -> None:
    ledger = filled((V0, 2, 1))
    before = ledger.counters.verified
    assert ledger.supply(2, 1, sections(TOY, 2, 1))
    assert ledger.whole
    assert (ledger.counters.verified, ledger.counters.supplied) == (before, 1)
    layer = ledger.layer(2)
    assert layer.v.tobytes() == TOY.v[2].tobytes()


def test_what_is_verified_stays() -> None:
    ledger = filled((V0, 2, 1))
    ledger.supply(2, 1, sections(TOY, 2, 1, noise=1.0))
    assert ledger.layer(2).k.tobytes() == TOY.k[2].tobytes()
    assert ledger.layer(2).v.tobytes() != TOY.v[2].tobytes()
    assert not ledger.supply(2, 1, sections(TOY, 2, 1))


def test_other_bits_than_the_producers_are_no_contradiction() -> None:
    ledger = filled((K0, 1, 0), (V0, 1, 0))
    ledger.supply(1, 0, sections(TOY, 1, 0, noise=1.0))
    kept = ledger.layer(1).k.tobytes()
    receive(ledger, K0, 1, 0)  # it comes late
    ledger.apply_manifest(parse_manifest(TOY.writer().to_json_bytes()))
    assert ledger.counters.duplicates == 1
    assert ledger.complete
    assert ledger.layer(1).k.tobytes() == kept


def test_a_copy_on_its_way_no_longer_writes_there() -> None:
    ledger = filled((K0, 1, 0))
    slot = ledger.begin(K0, Location(1, 0), PAYLOAD_OCTETS)
    assert slot is not None
    payload = TOY.objects[K0, Location(1, 0)]
    slot.write(payload[:100])
    ledger.supply(1, 0, sections(TOY, 1, 0, noise=1.0))
    kept = ledger.layer(1).k.tobytes()
    slot.write(payload[100:])
    slot.finish()
    assert ledger.layer(1).k.tobytes() == kept


@pytest.mark.parametrize(("layer", "block"), [(4, 0), (0, 3), (0, -1)])
def test_only_what_is_selected_is_taken(layer: int, block: int) -> None:
    with pytest.raises(UsageError, match="no segment"):
        TOY.ledger().supply(layer, block, sections(TOY, 0, 0))


def test_sections_of_another_length_are_refused() -> None:
    wrong = {Component.K: bytes(127), Component.V: bytes(128)}
    ledger = TOY.ledger()
    with pytest.raises(UsageError, match="length"):
        ledger.supply(0, 0, wrong)
    assert ledger.usable_tokens(0) == 0

"""What a consumer selects, and what it may ask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcs.errors import MissingBlocks, UsageError
from kvcs.kv import (
    DataTrack,
    Ledger,
)
from kvcs.moqt.names import Location
from tests.unit.kv.toy import (
    AT,
    DATA_OCTETS,
    K0,
    PAYLOAD_OCTETS,
    TOY,
    V0,
    fill,
    toy_descriptor,
    toy_publication,
)

KV0 = DataTrack.parse("kv.raw.s0")


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
    assert list(ledger.lacking(K0, range(9))) == [
        (Location(1, 0), Location(1, 0)),
        (Location(1, 2), Location(1, 3)),
    ]
    assert list(ledger.lacking(K0, range(1))) == []
    with pytest.raises(UsageError, match="not selected"):
        list(Ledger(toy.descriptor, blocks=7).lacking(K0, range(1)))
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


def test_single_blocks_are_given_once_they_are_verified_in_every_track() -> None:
    toy = toy_publication((2, 1))
    ledger = toy.ledger()
    lacks = {(V0, Location(1, 0))}
    fill(ledger, toy, lambda key: key not in lacks)
    for layer, block in ((0, 0), (0, 2), (1, 1), (1, 2)):
        got = ledger.block(layer, block)
        part = slice(4 * block, 4 * block + 4)
        assert got.k.tobytes() == toy.k[layer][part].tobytes()
        assert got.v.tobytes() == toy.v[layer][part].tobytes()
        with pytest.raises(ValueError, match="read-only"):
            got.k[0] = 0
    with pytest.raises(UsageError, match="block 0 of layer 1 is not verified"):
        ledger.block(1, 0)
    for layer, block in ((9, 0), (0, 3), (0, -1)):
        with pytest.raises(UsageError, match="was not selected"):
            ledger.block(layer, block)

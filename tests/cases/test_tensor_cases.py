"""Right bytes, wrong interpretation; and groups that only look complete."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvcs.errors import ObjectError, PublicationError, UsageError
from kvcs.kv import (
    HEADER_OCTETS,
    Component,
    DataTrack,
    Ledger,
    PayloadHeader,
    build_payload,
    convert,
)
from kvcs.moqt.names import Location
from tests.unit.kv.toy import K0, deliver, toy_descriptor, toy_prefix, toy_publication


def test_a_cache_of_another_dtype_is_refused_at_the_manifest() -> None:
    published = toy_publication()
    ours = toy_prefix(descriptor=toy_descriptor(dtype="float8_e4m3fn"))
    with pytest.raises(PublicationError) as caught:
        published.writer().manifest().check_identity(ours)
    assert str(caught.value).endswith("dtype: ours float8_e4m3fn, theirs bfloat16")


def test_float16_is_never_reread_from_bfloat16_bits() -> None:
    ones = np.ones((4, 2, 8), toy_descriptor().numpy_dtype)
    with pytest.raises(UsageError, match="bfloat16 does not convert to float16 without loss"):
        convert(ones, "float16")
    with pytest.raises(UsageError, match="bits=True"):
        convert(ones, "uint16")
    assert np.all(convert(ones, "uint16", bits=True) == 0x3F80)
    values = convert(ones, "float32")
    assert values.dtype == np.float32 and np.all(values == 1.0)


def test_latent_attention_is_one_joint_track_of_exact_size() -> None:
    descriptor = toy_descriptor(kv_heads=1, head_dim=576, v_head_dim=0, block_tokens=16)
    tensor = np.arange(16 * 576).reshape(16, 1, 576).astype(descriptor.numpy_dtype)
    nothing = np.empty((16, 1, 0), descriptor.numpy_dtype)
    track = DataTrack.parse("kv.raw.s0")
    payload = build_payload(
        track, Location(0, 0), [tensor, nothing], first_block=0, descriptor=descriptor
    )
    assert payload.header.data_length == 18_432
    ledger = Ledger(descriptor, blocks=1, layers=(0, 0))
    ledger.add_segment([track], 1)
    deliver(ledger, track, Location(0, 0), b"".join(payload.parts()), piece=1_200)
    layer = ledger.layer(0)
    assert np.array_equal(layer.k, tensor)
    assert layer.v.shape == (16, 1, 0)


@pytest.mark.parametrize("component", [Component.K, Component.V])
def test_latent_attention_never_has_an_empty_v_track(component: Component) -> None:
    descriptor = toy_descriptor(kv_heads=1, head_dim=576, v_head_dim=0)
    section = np.zeros((4, 1, 576), descriptor.numpy_dtype)
    with pytest.raises(UsageError, match="MLA"):
        build_payload(
            DataTrack(component, "raw", 0),
            Location(0, 0),
            [section],
            first_block=0,
            descriptor=descriptor,
        )


def test_a_block_of_three_of_four_tokens_is_neither_sent_nor_taken() -> None:
    descriptor = toy_descriptor()
    partial = np.zeros((3, 2, 8), descriptor.numpy_dtype)
    with pytest.raises(UsageError, match=r"k of layer 0: expected shape \[4, 2, 8\], got \[3,"):
        build_payload(K0, Location(0, 0), [partial], first_block=0, descriptor=descriptor)
    toy = toy_publication()
    payload = toy.objects[K0, Location(0, 0)]
    header = dataclasses.replace(PayloadHeader.unpack(payload), token_count=3)
    with pytest.raises(ObjectError) as caught:
        deliver(toy.ledger(), K0, Location(0, 0), header.pack() + payload[HEADER_OCTETS:])
    assert caught.value.check == "token_count"
    with pytest.raises(ObjectError) as caught:
        deliver(toy.ledger(), K0, Location(0, 0), payload[:-32])
    assert caught.value.check == "length"


@pytest.mark.parametrize("early", [0, 1, 2])
def test_a_group_that_ends_below_its_listed_blocks_is_a_contradiction(early: int) -> None:
    toy = toy_publication()
    ledger = toy.ledger()
    ledger.apply_manifest(toy.writer().manifest())
    for (track, location), payload in toy.objects.items():
        if track != K0 or location.group != 1 or location.object < early:
            deliver(ledger, track, location, payload)
    with pytest.raises(PublicationError, match=f"layer 1 ends at block {early}, .* has 3 blocks"):
        ledger.end_of_group(K0, Location(1, early))
    assert ledger.take_ready() == [0, 2, 3]
    # Even if the rest comes after all, that layer stays out.
    for block in range(early, 3):
        deliver(ledger, K0, Location(1, block), toy.objects[K0, Location(1, block)])
    assert not ledger.is_ready(1)
    assert ledger.usable_tokens() == 0


def test_a_layer_without_its_middle_object_is_not_usable() -> None:
    toy = toy_publication()
    ledger = toy.ledger()
    for (track, location), payload in toy.objects.items():
        if (track, location) != (K0, Location(1, 1)):
            deliver(ledger, track, location, payload)
    ledger.end_of_group(K0, Location(1, 3))
    assert ledger.take_ready() == [0, 2, 3]
    assert ledger.usable_tokens() == 4
    assert [str(run) for run in ledger.missing()] == ["k layer 1 blocks 1-1 (tokens 4-7)"]


def test_an_object_after_the_end_of_its_group_is_dropped() -> None:
    toy = toy_publication()
    ledger = toy.ledger()
    ledger.end_of_group(K0, Location(1, 3))
    payload = toy.objects[K0, Location(1, 2)]
    with pytest.raises(ObjectError) as caught:
        ledger.begin(K0, Location(1, 3), len(payload))
    assert caught.value.check == "block"
    assert not ledger.is_ready(1)

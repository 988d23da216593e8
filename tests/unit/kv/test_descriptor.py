"""The Compatibility Descriptor: strict members, one canonical form."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvcs.errors import UsageError
from kvcs.kv import DTYPES, UNPINNED, BlockShape, Component, Descriptor, numpy_dtype
from tests.unit.kv.toy import toy_descriptor


def test_canonical_form_has_every_member_in_order() -> None:
    assert toy_descriptor().canonical() == (
        b'{"block_tokens":4,"dtype":"bfloat16","extra":{},"head_dim":8,"kv_heads":2,"layers":4,'
        b'"model":"toy","v_head_dim":8,"weights":null}'
    )
    descriptor = toy_descriptor(weights="sha256:ab", v_head_dim=4, extra={"rope": "x", "b": 2})
    assert descriptor.canonical() == (
        b'{"block_tokens":4,"dtype":"bfloat16","extra":{"b":2,"rope":"x"},"head_dim":8,'
        b'"kv_heads":2,"layers":4,"model":"toy","v_head_dim":4,"weights":"sha256:ab"}'
    )


def test_parsing_gives_the_same_descriptor() -> None:
    descriptor = toy_descriptor(weights="sha256:ab", extra={"ü": "€", "n": -(2**53) + 1})
    assert Descriptor.parse(descriptor.canonical()) == descriptor
    assert Descriptor.from_json(json.loads(descriptor.canonical())) == descriptor
    spaced = json.dumps(dict(reversed(list(descriptor.to_json().items()))), indent=2)
    assert Descriptor.parse(spaced.encode()).canonical() == descriptor.canonical()


def test_v_head_dim_and_extra_may_be_left_out() -> None:
    members = toy_descriptor().to_json()
    del members["v_head_dim"], members["extra"]
    assert Descriptor.from_json(members) == toy_descriptor()


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("layers", 16.0),
        ("layers", True),
        ("layers", "4"),
        ("layers", 0),
        ("layers", 65_536),
        ("layers", -1),
        ("layers", None),
        ("kv_heads", 0),
        ("kv_heads", 65_536),
        ("head_dim", 0),
        ("head_dim", 65_536),
        ("head_dim", np.float32(8)),
        ("v_head_dim", -1),
        ("v_head_dim", 65_536),
        ("block_tokens", 0),
        ("block_tokens", 65_537),
        ("dtype", "bf16"),
        ("dtype", "float64"),
        ("dtype", None),
        ("dtype", ["float16"]),
        ("model", ""),
        ("model", "x" * 1_025),
        ("model", "\ud800"),
        ("model", 7),
        ("weights", ""),
        ("weights", 7),
        ("extra", {"rope": 1.5}),
        ("extra", {"rope": True}),
        ("extra", {"rope": None}),
        ("extra", {"rope": {"type": "yarn"}}),
        ("extra", {"rope": ["yarn"]}),
        ("extra", {"rope": 2**53}),
        ("extra", {"": 1}),
        ("extra", {7: 1}),
        ("extra", ["rope"]),
        ("extra", {str(number): number for number in range(65)}),
    ],
)
def test_a_wrong_member_is_refused_by_name(member: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"descriptor {member}"):
        toy_descriptor(**{member: value})


def test_weights_are_never_left_out_silently() -> None:
    members = {name: value for name, value in toy_descriptor().to_json().items()}
    del members["weights"]
    with pytest.raises(UsageError, match=r"weights: missing.*kvcs\.UNPINNED"):
        Descriptor.from_json(members)
    with pytest.raises(UsageError, match=r"weights: missing"):
        toy_descriptor(weights=None)
    assert Descriptor.from_json(toy_descriptor().to_json()).weights is UNPINNED
    assert repr(UNPINNED) == "UNPINNED"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b'{"layers":4,"layers":4}', "appears twice"),
        (b'{"layers":4.0}', "floats are not allowed"),
        (b'{"layers":NaN}', "floats are not allowed"),
        (b"[]", "expected an object, got array"),
        (b"null", "expected an object, got null"),
        (b"{", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b" " * 300_000, "limit"),
        (b'{"rope":4}', "unknown member 'rope'"),
        (b'{"weights":null}', "descriptor model: missing"),
    ],
)
def test_a_text_that_is_no_descriptor(text: bytes, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Descriptor.parse(text)


@pytest.mark.parametrize("member", ["model", "weights", "layers", "dtype", "extra", "v_head_dim"])
def test_a_message_never_repeats_a_peers_whole_value(member: str) -> None:
    for value in (["x" * 100] * 10_000, 10**4_000, "x" * 100_000):
        with pytest.raises(UsageError) as caught:
            Descriptor.from_json({**toy_descriptor().to_json(), member: value})
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("member", ["v_head_dim", "extra"])
def test_null_stands_only_for_unpinned_weights(member: str) -> None:
    with pytest.raises(UsageError, match=f"{member}: expected a value, got null"):
        Descriptor.from_json({**toy_descriptor().to_json(), member: None})


def test_differences_name_each_member() -> None:
    ours = toy_descriptor(weights="sha256:aa", extra={"rope": "x", "same": 1})
    theirs = toy_descriptor(dtype="float16", layers=5, extra={"same": 1, "scale": ""})
    assert ours.differences(ours) == []
    assert ours.differences(theirs) == [
        "weights: ours sha256:aa, theirs UNPINNED",
        "layers: ours 4, theirs 5",
        "dtype: ours bfloat16, theirs float16",
        "extra.rope: ours x, theirs absent",
        "extra.scale: ours absent, theirs ''",
    ]


def test_a_descriptor_is_a_value() -> None:
    extra = {"rope": "x"}
    descriptor = toy_descriptor(extra=extra)
    extra["rope"] = "y"
    assert descriptor.extra == {"rope": "x"}
    with pytest.raises(TypeError):
        descriptor.extra["rope"] = "y"  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        descriptor.layers = 5  # type: ignore[misc]
    assert {descriptor: 1}[toy_descriptor(extra={"rope": "x"})] == 1
    assert copy.deepcopy(descriptor) == descriptor
    assert dataclasses.replace(descriptor, layers=5) == toy_descriptor(
        layers=5, extra={"rope": "x"}
    )


def test_numpy_integers_are_integers() -> None:
    assert toy_descriptor(layers=np.int64(4)).canonical() == toy_descriptor().canonical()


def test_layouts_of_the_three_components() -> None:
    descriptor = toy_descriptor(v_head_dim=6)
    k, v = BlockShape(4, 2, 8), BlockShape(4, 2, 6)
    assert descriptor.layout(Component.K).shapes == (k,)
    assert descriptor.layout(Component.V).shapes == (v,)
    joint = descriptor.layout(Component.KV)
    assert joint.shapes == (k, v)
    assert joint.section_octets == (128, 96)
    assert joint.octets == 224
    assert descriptor.components == (Component.K, Component.V)


def test_latent_attention_has_one_joint_tensor() -> None:
    descriptor = toy_descriptor(kv_heads=1, head_dim=576, v_head_dim=0, block_tokens=16)
    assert descriptor.latent
    assert descriptor.components == (Component.KV,)
    assert descriptor.layout(Component.KV).section_octets == (16 * 576 * 2, 0)
    for component in (Component.K, Component.V):
        with pytest.raises(UsageError, match="latent attention"):
            descriptor.layout(component)


def test_dtypes_have_their_widths() -> None:
    widths = {name: dtype.itemsize for name, dtype in DTYPES.items()}
    assert widths == {
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
        "uint8": 1,
    }
    assert numpy_dtype("bfloat16") == np.dtype(ml_dtypes.bfloat16)
    assert toy_descriptor().numpy_dtype == np.dtype(ml_dtypes.bfloat16)
    with pytest.raises(UsageError, match="dtype must be one of"):
        numpy_dtype("float64")

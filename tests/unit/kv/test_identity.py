"""Scope, scheme "kvcs v1" and Prefix, held to an independent derivation."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from kvcs.errors import UsageError
from kvcs.kv import KVCS_SCHEME, Descriptor, KvcsScheme, Prefix, Scope, identity
from kvcs.kv.strict_json import Json
from tests.unit.kv.toy import SCOPE, toy_descriptor, toy_prefix


def block_key(previous: bytes, tokens: Sequence[int]) -> bytes:
    """One Block Key, written out from the scheme's description."""
    compat_id = hashlib.sha256(toy_descriptor().canonical()).digest()
    message = b"kvcs block v1" + compat_id + previous + struct.pack(f">{len(tokens)}I", *tokens)
    return hmac.new(SCOPE.key, message, hashlib.sha256).digest()


def test_derivation_step_by_step() -> None:
    tokens = [0, 1, 2**32 - 1, 7, 4, 5, 6, 7, 8]
    prefix = Prefix(SCOPE, toy_descriptor(), tokens)
    first = block_key(bytes(32), tokens[:4])
    second = block_key(first, tokens[4:8])
    assert prefix.block_keys == (first, second)
    assert prefix.compat_id == hashlib.sha256(toy_descriptor().canonical()).digest()
    scope_id = hmac.new(SCOPE.key, b"kvcs scope v1", hashlib.sha256).digest()[:16]
    assert prefix.scope_id == scope_id
    assert prefix.blocks == 2
    assert prefix.tokens_left_over == 1


def test_extra_identity_takes_the_place_of_the_first_previous_key() -> None:
    strings = ["image:ü", "adapter:a"]
    canonical = json.dumps(strings, ensure_ascii=False, separators=(",", ":")).encode()
    prefix = toy_prefix(extra_identity=strings)
    first = block_key(hashlib.sha256(canonical).digest(), range(4))
    assert prefix.block_keys[:2] == (first, block_key(first, range(4, 8)))


def test_values_do_not_move() -> None:
    """A change here renames every cache that exists: that is a new scheme with a new name."""
    assert KVCS_SCHEME.name == "kvcs v1"
    prefix = toy_prefix()
    assert prefix.scope_id.hex() == "50e14a60aab6a24ad78e6ac4e6a1a71a"
    assert prefix.compat_id.hex() == (
        "389d29ab7894a4e1036ff3a95ca549a14a1ebec200956b8756168720b5594a24"
    )
    assert prefix.anchor_key().hex() == (
        "da433d503d6b373840f4a80c86e66fde7c071709ca39bb2e839fd8a81607bc29"
    )
    assert toy_prefix(extra_identity=["a"]).anchor_key().hex() == (
        "f42478d5316a11f5436793fb50fb186624a1d89e66353333f50c9b05ecb5ff05"
    )


def test_a_shorter_anchor_is_an_earlier_key_of_the_chain() -> None:
    long, short = toy_prefix(5), toy_prefix(3)
    assert long.block_keys[:3] == short.block_keys
    assert long.anchor_key(3) == short.anchor_key()
    assert long.anchor_key() == long.block_keys[4]
    assert long.namespace_prefix(3) == short.namespace_prefix()
    for blocks in (0, 6, -1):
        with pytest.raises(UsageError, match=r"blocks: expected 1\.\.5"):
            long.anchor_key(blocks)


def test_namespaces_have_four_and_five_fields() -> None:
    prefix = toy_prefix()
    four = prefix.namespace_prefix()
    assert four == (b"kvcs-1", prefix.scope_id, prefix.compat_id, prefix.block_keys[-1])
    assert prefix.namespace(bytes(16)) == (*four, bytes(16))
    assert prefix.namespace(bytes(16), 2)[3] == prefix.block_keys[1]
    with pytest.raises(UsageError, match="Publication ID: expected 16 octets, got 15"):
        prefix.namespace(bytes(15))


def test_block_keys_digest_is_of_the_raw_keys() -> None:
    prefix = toy_prefix()
    assert (
        prefix.block_keys_digest(1, 2) == hashlib.sha256(b"".join(prefix.block_keys[1:])).digest()
    )
    for first, blocks in ((0, 4), (2, 2), (-1, 1), (0, 0)):
        with pytest.raises(UsageError):
            prefix.block_keys_digest(first, blocks)


class Tensor:
    """Looks like a tensor: only ``tolist``."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def tolist(self) -> Any:
        return self.values


class Sparse:
    """A tensor whose ``tolist`` fails in its own library."""

    def tolist(self) -> Any:
        raise RuntimeError("no storage")


def test_token_ids_in_every_form_name_the_same_blocks() -> None:
    tokens = list(range(12))
    forms: list[object] = [
        tokens,
        tuple(tokens),
        range(12),
        iter(tokens),
        np.arange(12, dtype=np.int64),
        np.arange(12, dtype=np.uint8),
        np.arange(12, dtype=">i4"),
        np.arange(24)[::2] // 2,
        [np.int32(token) for token in tokens],
        Tensor(tokens),
    ]
    keys = {Prefix(SCOPE, toy_descriptor(), form).block_keys for form in forms}
    assert len(keys) == 1


@pytest.mark.parametrize(
    "tokens",
    [
        [0, 1, 2, -1],
        [0, 1, 2, 2**32],
        np.array([0, 1, 2, 2**32]),
        np.array([0, 1, 2, -1]),
        [0, 1, 2, 3.0],
        [0, 1, 2, True],
        [0, 1, 2, None],
        ["a", "b", "c", "d"],
        "abcd",
        b"abcd",
        {0: 1, 1: 2, 2: 3, 3: 4},
        7,
        None,
        np.arange(4.0),
        np.array([True] * 4),
        np.arange(8).reshape(2, 4),
        [[0, 1, 2, 3]],
        Tensor([[0, 1, 2, 3]]),
        Tensor([0.0, 1.0, 2.0, 3.0]),
        Tensor(7),
        Sparse(),
    ],
)
def test_what_are_no_token_ids(tokens: object) -> None:
    with pytest.raises(UsageError, match="token ids"):
        Prefix(SCOPE, toy_descriptor(), tokens)


def test_prefixes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "MAX_PREFIX_TOKENS", 8)
    assert toy_prefix(2).blocks == 2
    with pytest.raises(UsageError, match="12 tokens, limit 8"):
        toy_prefix(3)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_less_than_a_block_has_no_name(tokens: list[int]) -> None:
    with pytest.raises(UsageError, match="shorter than one block of 4") as caught:
        Prefix(SCOPE, toy_descriptor(), tokens)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "extra", ["image", b"image", 7, [7], [""], ["x" * 1_025], ["\ud800"], ["x"] * 4_097]
)
def test_what_is_no_extra_identity(extra: Any) -> None:
    with pytest.raises(UsageError, match="extra identity"):
        toy_prefix(extra_identity=extra)


def test_nothing_secret_is_shown() -> None:
    prefix = Prefix(SCOPE, toy_descriptor(), [4_242_424] * 4)
    shown = repr(SCOPE) + repr(prefix) + str(prefix)
    assert SCOPE.key.hex() not in shown
    assert repr(SCOPE.key) not in shown
    assert "4242424" not in shown


def test_scope_keys() -> None:
    assert Scope.from_hex(f" {SCOPE.key.hex()}\n") == SCOPE
    assert Scope(bytearray(SCOPE.key)) == SCOPE  # type: ignore[arg-type]
    assert isinstance(Scope(bytearray(SCOPE.key)).key, bytes)  # type: ignore[arg-type]
    for key in (b"", bytes(31), bytes(33), "x" * 32, None):
        with pytest.raises(UsageError, match="scope key: expected 32 octets"):
            Scope(key)  # type: ignore[arg-type]
    for text in ("", "ab", "zz" * 32, "ab" * 31 + " a"):
        with pytest.raises(UsageError, match="64 hex characters") as caught:
            Scope.from_hex(text)
        assert not text or text not in str(caught.value)


def test_token_ids_are_kept_read_only() -> None:
    source = np.arange(13, dtype=np.uint32)
    prefix = Prefix(SCOPE, toy_descriptor(), source)
    source[0] = 99
    assert prefix.token_ids.tolist() == list(range(13))
    with pytest.raises(ValueError, match="read-only"):
        prefix.token_ids[0] = 99


class OtherScheme(KvcsScheme):
    """Values from elsewhere, such as KVSP's own."""

    name = "other"

    def compat(self, descriptor: Descriptor) -> Mapping[str, Json]:
        return {"geometry": [descriptor.layers, descriptor.block_tokens]}

    def compat_id(self, compat: Mapping[str, Json]) -> bytes:
        return hashlib.sha256(json.dumps(dict(compat)).encode()).digest()


def test_a_callers_scheme_takes_the_place_of_ours() -> None:
    prefix = toy_prefix(scheme=OtherScheme())
    assert prefix.compat == {"geometry": [4, 4]}
    assert prefix.compat_id == hashlib.sha256(b'{"geometry": [4, 4]}').digest()
    assert prefix.block_keys != toy_prefix().block_keys


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("compat_id", bytes(31)),
        ("scope_id", bytes(32)),
        ("block_keys", [bytes(32)] * 2),
        ("block_keys", [bytes(16)] * 3),
        ("block_keys", ["x" * 32] * 3),
    ],
)
def test_a_scheme_with_values_of_other_lengths_is_refused(
    method: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = OtherScheme()
    monkeypatch.setattr(scheme, method, lambda *arguments: value)
    with pytest.raises(UsageError, match="scheme 'other'"):
        toy_prefix(scheme=scheme)

"""Two different things must never get one name, nor one thing two names."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvcs.kv
from kvcs.errors import UsageError
from kvcs.kv import Descriptor, Prefix
from tests.unit.kv.toy import SCOPE, toy_descriptor, toy_prefix

ROOM = Path(kvcs.kv.__file__).parent

KEYS_PROGRAM = """
import json, sys
from kvcs.kv import UNPINNED, Descriptor, Prefix, Scope
descriptor = Descriptor(model="toy", weights=UNPINNED, layers=4, kv_heads=2, head_dim=8,
                        dtype="bfloat16", block_tokens=4, extra={"rope": "x", "alpha": 1})
scope = Scope(bytes(range(32)))
ways = [{"extra_identity": None}, {"extra_identity": []}, {}]
print(json.dumps([[key.hex() for key in Prefix(scope, descriptor, range(12), **way).block_keys]
                  for way in ways]))
"""


def test_three_processes_with_three_hash_seeds_compute_the_same_keys() -> None:
    results = []
    for seed in (None, "0", "123"):
        environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"
        }
        environment["PYTHONPATH"] = str(ROOM.parents[1])
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        done = subprocess.run(
            [sys.executable, "-c", KEYS_PROGRAM],
            env=environment,
            capture_output=True,
            check=True,
            timeout=200,
        )
        results += [tuple(keys) for keys in json.loads(done.stdout)]
    assert len(results) == 9
    assert len(set(results)) == 1
    assert len(set(results[0])) == 3


def test_the_room_never_calls_hash() -> None:
    for path in sorted(ROOM.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "hash", f"{path.name}:{node.lineno}"


def test_two_images_behind_the_same_placeholder_tokens_have_two_names() -> None:
    first, second = "ab" * 14 + "aaaa0001", "ab" * 14 + "bbbb0001"
    assert first[-4:] == second[-4:]
    keys = {
        toy_prefix(extra_identity=identity, multimodal=bool(identity)).anchor_key()
        for identity in (
            None,
            [first],
            [second],
            [first, second],
            [second, first],
            [first + second],
        )
    }
    assert len(keys) == 6


def test_adapters_have_names_of_their_own_and_so_do_their_weights() -> None:
    keys = {
        toy_prefix(extra_identity=identity).anchor_key()
        for identity in (
            None,
            ["adapter:a", "weights:1"],
            ["adapter:b", "weights:1"],
            ["adapter:a", "weights:2"],
        )
    }
    assert len(keys) == 4


@pytest.mark.parametrize("claim", ["multimodal", "adapted"])
@pytest.mark.parametrize("identity", [None, [], ()])
def test_a_multimodal_or_adapted_request_without_identity_is_refused(
    claim: str, identity: list[str] | None
) -> None:
    with pytest.raises(UsageError, match=f"a {claim} request needs extra_identity"):
        toy_prefix(extra_identity=identity, **{claim: True})


def test_other_weights_rope_or_quantisation_give_another_identity() -> None:
    base = {"weights": "sha256:aa", "extra": {"rope": "none", "quantisation": "none"}}
    variants = [
        base,
        {**base, "weights": "sha256:ab"},
        {**base, "extra": {**base["extra"], "rope": "yarn:4"}},  # type: ignore[dict-item]
        {**base, "extra": {**base["extra"], "quantisation": "awq"}},  # type: ignore[dict-item]
    ]
    identities = {toy_prefix(descriptor=toy_descriptor(**each)).compat_id for each in variants}
    assert len(identities) == 4


def test_member_order_is_no_second_identity_and_a_float_is_refused() -> None:
    text = toy_descriptor(block_tokens=16, extra={"a": 1, "b": 2}).canonical()
    turned = json.dumps(dict(reversed(json.loads(text).items()))).encode()
    assert turned != text
    first, second = (
        Prefix(SCOPE, Descriptor.parse(each), range(16)).compat_id for each in (text, turned)
    )
    assert first == second
    with pytest.raises(UsageError, match=r"16\.0 is not an integer"):
        Descriptor.parse(text.replace(b'"block_tokens":16', b'"block_tokens":16.0'))
    with pytest.raises(UsageError, match=r"block_tokens: expected an integer, got 16\.0"):
        Descriptor.from_json({**json.loads(text), "block_tokens": 16.0})


def test_a_descriptor_without_weights_fingerprint_needs_an_explicit_word() -> None:
    with pytest.raises(UsageError, match=r"weights=kvcs\.UNPINNED"):
        Descriptor(model="toy", layers=4, kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=4)
    assert "UNPINNED" in repr(toy_descriptor())


def test_a_block_that_is_not_full_never_gets_a_name() -> None:
    prefix = Prefix(SCOPE, toy_descriptor(), range(10))
    assert prefix.blocks == len(prefix.block_keys) == 2
    assert prefix.tokens_left_over == 2
    assert prefix.block_keys == Prefix(SCOPE, toy_descriptor(), range(8)).block_keys
    with pytest.raises(UsageError, match="only whole blocks have a name"):
        Prefix(SCOPE, toy_descriptor(), range(3))

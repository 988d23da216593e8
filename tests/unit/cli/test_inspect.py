"""`kvcs inspect FILE`: identity and digests that a manifest and another site would agree with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcs.kv import Descriptor, Prefix, Scope
from kvcs.kvfile import save_kv_file

Run = Callable[..., Any]

DATA = Path(__file__).resolve().parents[2] / "data" / "smollm2-135m.safetensors"


def make(path: Path, *, layers: list[int] | None = None, **changes: Any) -> Descriptor:
    members: dict[str, Any] = {"model": "tiny", "weights": "r1", "layers": 3, "kv_heads": 1}
    members |= {"head_dim": 2, "dtype": "uint8", "block_tokens": 4}
    descriptor = Descriptor(**{**members, **changes})

    def tensor(layer: int, dim: int) -> Any:
        start = 10 * layer
        return (start + np.arange(9 * dim)).astype(np.uint8).reshape(9, 1, dim)

    pairs = {
        layer: (tensor(layer, descriptor.head_dim), tensor(layer + 5, descriptor.v_head_dim))
        for layer in (range(3) if layers is None else layers)
    }
    save_kv_file(path, descriptor, range(9), pairs)
    return descriptor


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.safetensors"


def test_json_has_every_fact(run: Run, path: Path) -> None:
    descriptor = make(path)
    ran = run("inspect", path, "--json")
    assert (ran.code, ran.err) == (0, "")
    document = ran.json()
    assert document["descriptor"] == descriptor.to_json()
    assert document["compat_id"] == hashlib.sha256(descriptor.canonical()).hexdigest()
    assert (document["tokens"], document["blocks"], document["tokens_left_over"]) == (9, 2, 1)
    assert (document["complete"], document["layers"]) == (True, [0, 1, 2])
    assert document["octets"] == 3 * 2 * 9 * 2
    assert "token_ids" not in document


def test_digests_are_those_of_whole_blocks(run: Run, path: Path) -> None:
    make(path)
    digests = run("inspect", path, "--json").json()["object_digests"]
    assert list(digests) == ["k.raw.s0", "v.raw.s0"]
    for track, first in (("k.raw.s0", 10), ("v.raw.s0", 60)):
        expected = [
            hashlib.sha256(bytes(range(first + 8 * block, first + 8 * block + 8))).hexdigest()
            for block in range(2)
        ]
        assert digests[track][1] == expected


def test_latent_attention_has_one_track(run: Run, path: Path) -> None:
    make(path, v_head_dim=0)
    digests = run("inspect", path, "--json").json()["object_digests"]
    assert list(digests) == ["kv.raw.s0"]
    assert digests["kv.raw.s0"][0][0] == hashlib.sha256(bytes(range(8))).hexdigest()


def test_in_a_scope_it_has_a_name(run: Run, path: Path, tmp_path: Path) -> None:
    descriptor = make(path)
    key = tmp_path / "scope.key"
    run("keygen", "--out", key)
    document = run("inspect", path, "--scope-key-file", key, "--json").json()
    prefix = Prefix(Scope.from_hex(key.read_text()), descriptor, list(range(9)))
    assert document["scheme"] == "kvcs v1"
    assert document["block_keys"] == [block_key.hex() for block_key in prefix.block_keys]
    assert document["anchor_key"] == prefix.anchor_key().hex()
    assert document["scope_id"] == prefix.scope_id.hex()
    assert document["namespace_prefix"].startswith("kvcs.2d1-")
    shown = run("inspect", path, "--scope-key-file", key)
    assert document["anchor_key"] in shown.out
    assert key.read_text().strip() not in shown.out


def test_text_is_one_fact_a_line(run: Run, path: Path) -> None:
    make(path, extra={"rope": "none\x1b[2J"}, weights="sha256:" + "ab" * 32)
    ran = run("inspect", path)
    assert ran.code == 0
    facts = dict(line.split("  ", 1) for line in ran.out.splitlines())
    facts = {label: value.strip() for label, value in facts.items()}
    assert facts["weights"] == "sha256:" + "ab" * 32, "long values are not wrapped"
    assert facts["blocks"] == "2 (1 tokens left over)"
    assert facts["extra rope"] == "none\\x1b[2J"
    assert facts["k.raw.s0"].startswith("6 objects, sha256 of their digests ")
    assert "\x1b" not in ran.out


def test_equal_blocks_have_equal_lines(run: Run, tmp_path: Path) -> None:
    lines = []
    for name in ("a", "b"):
        make(tmp_path / name)
        out = run("inspect", tmp_path / name).out.splitlines()
        lines.append([line for line in out if ".raw." in line])
    assert lines[0] == lines[1]
    assert len(lines[0]) == 2
    make(tmp_path / "c", kv_heads=1, layers=[0, 2])
    out = run("inspect", tmp_path / "c").out
    assert lines[0][0] not in out


def test_a_part_of_a_cache_says_so(run: Run, path: Path) -> None:
    make(path, layers=[0, 2])
    assert "0, 2" in run("inspect", path).out
    document = run("inspect", path, "--json").json()
    assert (document["complete"], document["layers"]) == (False, [0, 2])
    assert len(document["object_digests"]["k.raw.s0"]) == 2


def test_a_foreign_file_is_one_line(run: Run, path: Path) -> None:
    path.write_bytes(b"GGUF" + bytes(100))
    ran = run("inspect", path, "--json")
    assert (ran.code, ran.out) == (2, "")
    assert ran.line() == f"kvcs: {path}: not a safetensors file"


def test_too_few_tokens_for_a_name(run: Run, path: Path, tmp_path: Path) -> None:
    make(path, block_tokens=16)
    assert "0 (9 tokens left over)" in run("inspect", path).out
    key = tmp_path / "scope.key"
    run("keygen", "--out", key)
    ran = run("inspect", path, "--scope-key-file", key)
    assert ran.code == 2
    assert "shorter than one block" in ran.line()


def test_the_real_cache(run: Run) -> None:
    document = run("inspect", DATA, "--json").json()
    assert document["blocks"] == 10
    assert [len(groups) for groups in document["object_digests"].values()] == [30, 30]
    every = {digest for group in document["object_digests"]["k.raw.s0"] for digest in group}
    assert len(every) == 300

"""A relay, certificates, a scope key and small KV cache files for tests of the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcs
from tests.certificates import PemFiles, write_pem
from tests.command import Process, logging_as_before, run

__all__ = ["logging_as_before", "run"]

LAYERS = 6
BLOCK_TOKENS = 4
TOKENS = 19
"""Four whole blocks and three tokens more."""

MEMBERS: dict[str, Any] = {
    "model": "tiny",
    "weights": "r1",
    "layers": LAYERS,
    "kv_heads": 2,
    "head_dim": 8,
    "dtype": "float16",
    "block_tokens": BLOCK_TOKENS,
}


def make_cache(path: Path, *, seed: int = 1, tokens: int = TOKENS, **changes: Any) -> Path:
    """Write a KV cache file of random tensors; its token ids depend on the seed too."""
    descriptor = kvcs.Descriptor(**{**MEMBERS, **changes})
    random = np.random.default_rng(seed)
    shape = (tokens, descriptor.kv_heads, descriptor.head_dim)
    layers = [
        [random.standard_normal(shape).astype(descriptor.numpy_dtype) for _ in "kv"]
        for _ in range(descriptor.layers)
    ]
    ids = np.arange(tokens) + 1000 * seed
    kvcs.save_kv_file(path, descriptor, ids, [(k, v) for k, v in layers])
    return path


@dataclass(frozen=True, slots=True)
class Place:
    """Files that the commands of one module share."""

    folder: Path
    pem: PemFiles
    scope_key: Path
    cache: Path
    """A KV cache file."""
    tokens: Path
    """Its token ids as JSON."""
    descriptor: Path
    """Its descriptor as JSON."""

    @property
    def keys(self) -> tuple[object, ...]:
        """Options of whoever listens."""
        return ("--cert", self.pem.cert, "--key", self.pem.key)

    @property
    def member(self) -> tuple[object, ...]:
        """Options of whoever is a member of the scope and trusts the certificates."""
        return ("--ca", self.pem.ca, "--scope-key-file", self.scope_key)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Certificates, a scope key and a cache."""
    folder = tmp_path_factory.mktemp("place")
    scope_key = folder / "scope.key"
    scope_key.touch(mode=0o600)
    scope_key.write_text("5c" * 32)
    cache = make_cache(folder / "cache.safetensors")
    opened = kvcs.load_kv_file(cache)
    tokens, descriptor = folder / "tokens.json", folder / "descriptor.json"
    tokens.write_text(json.dumps(opened.token_ids.tolist()))
    descriptor.write_text(json.dumps(opened.descriptor.to_json()))
    return Place(folder, write_pem(folder / "certs"), scope_key, cache, tokens, descriptor)


@dataclass(frozen=True, slots=True)
class RunningRelay:
    """A relay process."""

    process: Process
    url: str


@pytest.fixture(scope="module")
def relay(place: Place) -> Iterator[RunningRelay]:
    """A relay for the tests of one module."""
    with Process("relay", "--bind", "127.0.0.1:0", *place.keys, "--allow-anyone", "--lines") as it:
        yield RunningRelay(it, it.event("listening")["url"])

"""The committed KV cache of a real model is whole and is what its README says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from kvcs.kvfile import KvFile, load_kv_file

DATA = Path(__file__).resolve().parent / "data"
CACHE = DATA / "smollm2-135m.safetensors"


@pytest.fixture
def cache() -> KvFile:
    return load_kv_file(CACHE)


def test_its_descriptor_is_that_of_the_model(cache: KvFile) -> None:
    descriptor = cache.descriptor
    assert descriptor.model == "SmolLM2-135M-Instruct"
    shape = (descriptor.layers, descriptor.kv_heads, descriptor.head_dim, descriptor.block_tokens)
    assert shape == (30, 3, 64, 16)
    assert descriptor.dtype == "bfloat16"
    assert cache.blocks == 10
    assert 0 < cache.tokens - cache.blocks * 16 < 16, "a real prompt has tokens left over"


def test_it_is_the_file_that_the_readme_tells_of(cache: KvFile) -> None:
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(CACHE.read_bytes()).hexdigest() in readme
    assert str(cache.descriptor.weights).removeprefix("sha256:") in readme


def test_its_prompt_is_beside_it(cache: KvFile) -> None:
    prompt = json.loads((DATA / "smollm2-135m.json").read_text(encoding="utf-8"))
    assert prompt["token_ids"] == cache.token_ids.tolist()
    assert "Gudrun" in prompt["text"]
    assert "Gudrun" in prompt["answer"]


def test_its_layers_are_numbers_and_differ(cache: KvFile) -> None:
    seen = set()
    for layer in cache.layers.values():
        for array in layer:
            values = array.astype(np.float32)
            assert np.isfinite(values).all()
            assert values.std() > 0.01
            seen.add(hashlib.sha256(array.tobytes()).digest())
    assert len(seen) == 60

"""Publications whose every octet is known: a small model's cache, and a real one's.

What a test expects on the wire is built here from the arrays with `struct` and `hashlib` alone, as
the KVCS draft says it, so that our own encoder is not asked what it should have encoded.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import kvcs
from kvcs.kvfile import load_kv_file
from tests.interop import objects

SCOPE = kvcs.Scope(key=bytes(range(32)))
REAL = Path(__file__).resolve().parents[1] / "data"
"""Where the cache of a real model lies, if it was made."""

LAYERS, BLOCKS, BLOCK_TOKENS = 6, 5, 8
HEADS, HEAD_DIM, V_HEAD_DIM = 2, 32, 24

HEADER = struct.Struct(">IBBHIIQIHHI32s")
"""KVCS "Object Payload": 68 octets."""

MAGIC, VERSION, RAW = 0x4B564F31, 1, 1
COMPONENTS = {"k": 1, "v": 2}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Source:
    """A prefix and its tensors."""

    prefix: kvcs.Prefix
    layers: list[tuple[Array, Array]]
    """K and V of each layer, [tokens, heads, head_dim]; whole blocks."""

    @property
    def descriptor(self) -> kvcs.Descriptor:
        """Of the model."""
        return self.prefix.descriptor

    @property
    def objects(self) -> int:
        """Objects with a payload in the whole publication."""
        return 2 * len(self.layers) * self.prefix.blocks


def real_names() -> list[str]:
    """Return the files of a real model's cache, if they are there."""
    return sorted(path.name for path in REAL.glob("*.safetensors"))


def small(salt: int = 0) -> Source:
    """Return the small model's cache of one of many prompts."""
    descriptor = kvcs.Descriptor(
        model="small",
        weights=kvcs.UNPINNED,
        layers=LAYERS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        v_head_dim=V_HEAD_DIM,
        dtype="bfloat16",
        block_tokens=BLOCK_TOKENS,
    )
    tokens = BLOCKS * BLOCK_TOKENS
    # Three tokens more than whole blocks hold: they are nobody's business.
    first = 1000 * salt
    prefix = kvcs.Prefix(SCOPE, descriptor, range(first, first + tokens + 3))
    values = np.random.default_rng(salt)

    def tensor(width: int) -> Array:
        return values.standard_normal((tokens, HEADS, width)).astype(ml_dtypes.bfloat16)

    return Source(prefix, [(tensor(HEAD_DIM), tensor(V_HEAD_DIM)) for _ in range(LAYERS)])


def real(name: str) -> Source:
    """Return what a file holds, whole blocks."""
    file = load_kv_file(REAL / name)
    prefix = kvcs.Prefix(SCOPE, file.descriptor, file.token_ids)
    tokens = prefix.blocks * file.descriptor.block_tokens
    return Source(prefix, [(layer.k[:tokens], layer.v[:tokens]) for layer in file.layers.values()])


# --- what must arrive -----------------------------------------------------------------------


def digest(array: Array) -> str:
    """Return the SHA-256 of an array's octets in C order."""
    return hashlib.sha256(array.tobytes()).hexdigest()


def expected_layers(
    source: Source, layers: Iterable[int] | None = None, blocks: int | None = None
) -> list[list[object]]:
    """Return ``[layer, sha256 of K, sha256 of V]`` of each layer, its first blocks only."""
    tokens = None if blocks is None else blocks * source.descriptor.block_tokens
    chosen = range(len(source.layers)) if layers is None else layers
    return [
        [index, *(digest(array[:tokens]) for array in source.layers[index])] for index in chosen
    ]


def expected_tree(source: Source, first_segment_blocks: int | None = None) -> objects.Tree:
    """Return the payloads of all data tracks, as the draft's text builds them."""
    first = source.prefix.blocks if first_segment_blocks is None else first_segment_blocks
    runs = [(0, first)]
    if first < source.prefix.blocks:
        runs.append((first, source.prefix.blocks - first))
    return {
        f"{component}.raw.s{segment}": {
            (layer, block): payload(source, component, layer, start, block)
            for layer in range(len(source.layers))
            for block in range(count)
        }
        for segment, (start, count) in enumerate(runs)
        for component in COMPONENTS
    }


def payload(source: Source, component: str, layer: int, first_block: int, block: int) -> bytes:
    """Return one KVCS payload, header and tensor, of block ``block`` of a segment."""
    size = source.descriptor.block_tokens
    start = (first_block + block) * size
    data = source.layers[layer][COMPONENTS[component] - 1][start : start + size].tobytes()
    header = HEADER.pack(
        *(MAGIC, VERSION, COMPONENTS[component], 0, layer, block, start, size, RAW, 0),
        *(len(data), hashlib.sha256(data).digest()),
    )
    return header + data


def check_manifest(text: bytes, source: Source, tree: objects.Tree) -> None:
    """Hold a last manifest version to what was published; `AssertionError` tells the difference."""
    said = json.loads(text)
    assert said["kvcs"] == 1
    assert said["layers"] == len(source.layers)
    assert said["block_tokens"] == source.descriptor.block_tokens
    first_block = 0
    for number, entry in enumerate(said["segments"]):
        tracks = [f"{component}.raw.s{number}" for component in COMPONENTS]
        assert entry["segment"] == number
        assert entry["tracks"] == tracks
        assert entry["complete"] is True
        assert entry["first_block"] == first_block
        assert entry["object_digests"] == {
            track: _digests(tree[track], entry["blocks"]) for track in tracks
        }
        first_block += entry["blocks"]
    assert first_block == source.prefix.blocks
    assert set(tree) == {track for entry in said["segments"] for track in entry["tracks"]}


def _digests(payloads: Mapping[objects.Location, bytes], blocks: int) -> list[list[str]]:
    layers = 1 + max(layer for layer, _ in payloads)
    return [
        [payloads[layer, block][36 : HEADER.size].hex() for block in range(blocks)]
        for layer in range(layers)
    ]

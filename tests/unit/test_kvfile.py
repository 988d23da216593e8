"""KV cache files: what is written is read back bit by bit; what is wrong says so in one line."""

from __future__ import annotations

import json
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors import safe_open

from kvcs.errors import FileError, UsageError
from kvcs.kv.descriptor import UNPINNED, Descriptor
from kvcs.kv.layout import DTYPES
from kvcs.kvfile import MAX_HEADER_OCTETS, load_kv_file, save_kv_file

Array = npt.NDArray[Any]
TOKENS = 9


def make_descriptor(**changes: Any) -> Descriptor:
    members: dict[str, Any] = {
        "model": "tiny",
        "weights": UNPINNED,
        "layers": 3,
        "kv_heads": 2,
        "head_dim": 4,
        "dtype": "bfloat16",
        "block_tokens": 4,
    }
    return Descriptor(**{**members, **changes})


def make_layers(descriptor: Descriptor, tokens: int = TOKENS) -> list[tuple[Array, Array]]:
    octets = np.random.default_rng(7)

    def tensor(dim: int) -> Array:
        size = tokens * descriptor.kv_heads * dim * descriptor.numpy_dtype.itemsize
        flat = octets.integers(0, 256, size, np.uint8).view(descriptor.numpy_dtype)
        return flat.reshape(tokens, descriptor.kv_heads, dim)

    return [
        (tensor(descriptor.head_dim), tensor(descriptor.v_head_dim))
        for _ in range(descriptor.layers)
    ]


def bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.safetensors"


@pytest.fixture
def saved(path: Path) -> Path:
    descriptor = make_descriptor()
    save_kv_file(path, descriptor, range(100, 100 + TOKENS), make_layers(descriptor))
    return path


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_saved_is_read_back(path: Path, dtype: str) -> None:
    descriptor = make_descriptor(dtype=dtype, v_head_dim=6)
    layers = make_layers(descriptor)
    save_kv_file(path, descriptor, list(range(TOKENS)), layers)

    opened = load_kv_file(path)

    assert opened.descriptor == descriptor
    assert opened.token_ids.tolist() == list(range(TOKENS))
    assert (opened.path, opened.tokens, opened.blocks) == (path, TOKENS, 2)
    assert opened.is_complete
    assert list(opened.layers) == [0, 1, 2]
    for (k, v), layer in zip(layers, opened.layers.values(), strict=True):
        assert layer.k.dtype == layer.v.dtype == DTYPES[dtype]
        assert (layer.k.shape, layer.v.shape) == (k.shape, v.shape)
        assert (bits(layer.k), bits(layer.v)) == (bits(k), bits(v))


def test_latent_attention_has_empty_values(path: Path) -> None:
    descriptor = make_descriptor(v_head_dim=0)
    layers = make_layers(descriptor)
    save_kv_file(path, descriptor, range(TOKENS), layers)
    layer = load_kv_file(path).layers[2]
    assert layer.v.shape == (TOKENS, 2, 0)
    assert bits(layer.k) == bits(layers[2][0])


def test_the_library_reads_what_is_saved(saved: Path) -> None:
    with safe_open(str(saved), framework="numpy") as opened:
        metadata = opened.metadata()
        names = opened.offset_keys()
        tensor = opened.get_tensor("layers.1.v")
    assert metadata["kvcs.descriptor"].encode() == make_descriptor().canonical()
    assert json.loads(metadata["kvcs.token_ids"]) == list(range(100, 100 + TOKENS))
    assert names == [f"layers.{layer}.{part}" for layer in range(3) for part in "kv"]
    assert tensor.dtype == ml_dtypes.bfloat16
    assert bits(tensor) == bits(make_layers(make_descriptor())[1][1])


def test_tensors_are_aligned_views_that_cannot_be_written(saved: Path) -> None:
    layer = load_kv_file(saved).layers[0]
    assert not layer.k.flags.owndata
    assert layer.k.flags.aligned
    with pytest.raises(ValueError, match="read-only"):
        layer.k[0, 0, 0] = 1


def test_a_transposed_view_is_saved_in_its_own_order(path: Path) -> None:
    descriptor = make_descriptor(layers=1)
    heads_first = np.arange(2 * TOKENS * 4).reshape(2, TOKENS, 4).astype(ml_dtypes.bfloat16)
    view = heads_first.transpose(1, 0, 2)
    save_kv_file(path, descriptor, range(TOKENS), [(view, view)])
    assert (load_kv_file(path).layers[0].k == view).all()


def test_layers_come_from_an_iterator_one_by_one(path: Path) -> None:
    descriptor = make_descriptor()
    layers = make_layers(descriptor)
    sizes: list[int] = []

    def produce() -> Iterator[tuple[Array, Array]]:
        for pair in layers:
            sizes.append(len(list(path.parent.iterdir())))
            yield pair

    save_kv_file(path, descriptor, range(TOKENS), produce())
    assert sizes == [1, 1, 1], "one unfinished file while layers are still to come"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert bits(load_kv_file(path).layers[2].k) == bits(layers[2][0])


def test_some_layers_only_when_asked_for(path: Path) -> None:
    descriptor = make_descriptor()
    layers = make_layers(descriptor)
    save_kv_file(path, descriptor, range(TOKENS), {2: layers[2], 1: layers[1]})

    with pytest.raises(FileError, match=r"layer 0 missing, the descriptor says 3 layers"):
        load_kv_file(path)
    opened = load_kv_file(path, partial=True)
    assert list(opened.layers) == [1, 2]
    assert not opened.is_complete
    assert bits(opened.layers[1].v) == bits(layers[1][1])
    with pytest.raises(KeyError):
        opened.layers[0]


def test_a_saved_file_replaces_the_old_one_and_follows_the_umask(saved: Path) -> None:
    before = load_kv_file(saved)
    old = bits(before.layers[0].k)
    descriptor = make_descriptor(layers=1)
    mask = os.umask(0o027)
    try:
        save_kv_file(saved, descriptor, range(TOKENS), make_layers(descriptor))
    finally:
        os.umask(mask)
    assert load_kv_file(saved).descriptor.layers == 1
    assert stat.S_IMODE(saved.stat().st_mode) == 0o640
    assert bits(before.layers[0].k) == old, "an open file keeps what it had"


@pytest.mark.parametrize(
    ("token_ids", "layers", "complaint"),
    [
        (range(8), None, r"layer 0 k: expected shape \[8, 2, 4\], got \[9, 2, 4\]"),
        (range(9), slice(0, 2), "layer 2 is missing"),
        ([], None, "no token ids"),
        ([-1, *range(8)], None, "position 0"),
        ([True, *range(8)], None, "got a bool at 0"),
        ([2**32, *range(8)], None, "position 0"),
    ],
)
def test_what_disagrees_is_not_saved(
    path: Path, token_ids: Any, layers: slice | None, complaint: str
) -> None:
    descriptor = make_descriptor()
    given = make_layers(descriptor)[layers or slice(None)]
    with pytest.raises(UsageError, match=complaint):
        save_kv_file(path, descriptor, token_ids, given)
    assert list(path.parent.iterdir()) == []


def test_another_dtype_is_not_converted(path: Path) -> None:
    descriptor = make_descriptor(layers=1)
    wrong = np.zeros((TOKENS, 2, 4), np.float32)
    with pytest.raises(UsageError, match="layer 0 k: expected dtype bfloat16, got float32"):
        save_kv_file(path, descriptor, range(TOKENS), [(wrong, wrong)])
    assert list(path.parent.iterdir()) == []


def test_too_many_layers_are_refused(path: Path) -> None:
    descriptor = make_descriptor()
    layers = make_layers(descriptor)
    with pytest.raises(UsageError, match="more than the descriptor's 3 layers"):
        save_kv_file(path, descriptor, range(TOKENS), [*layers, layers[0]])
    with pytest.raises(UsageError, match="some of 0 to 2"):
        save_kv_file(path, descriptor, range(TOKENS), {3: layers[0]})
    with pytest.raises(UsageError, match="some of 0 to 2"):
        save_kv_file(path, descriptor, range(TOKENS), {})
    assert list(path.parent.iterdir()) == []


def test_a_producer_that_fails_leaves_nothing(path: Path) -> None:
    descriptor = make_descriptor()

    def produce() -> Iterator[tuple[Array, Array]]:
        yield make_layers(descriptor)[0]
        raise RuntimeError("prefill failed")

    with pytest.raises(RuntimeError, match="prefill failed"):
        save_kv_file(path, descriptor, range(TOKENS), produce())
    assert list(path.parent.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    descriptor = make_descriptor()
    path = tmp_path / "none" / "cache.safetensors"
    with pytest.raises(FileError, match=r"none/cache\.safetensors: No such file"):
        save_kv_file(path, descriptor, range(TOKENS), make_layers(descriptor))


# Foreign and damaged files


def refusal(path: Path, **options: bool) -> str:
    """The message of the error that opening ``path`` raises, without the path."""
    with pytest.raises(FileError) as caught:
        load_kv_file(path, **options)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return text.removeprefix(f"{path}: ")


def test_a_missing_file(path: Path) -> None:
    assert refusal(path) == "No such file or directory"


def test_a_folder_and_a_pipe_are_not_opened(tmp_path: Path, path: Path) -> None:
    assert refusal(tmp_path) == "not a regular file"
    os.mkfifo(path)
    assert refusal(path) == "not a regular file"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 8,
        b"\0" * 100,
        b"PK\x03\x04" + bytes(200),
        b"GGUF\x03\0\0\0" + bytes(50),
        bytes([5, 0, 0, 0, 0, 0, 0, 0]) + b"[1,2]",
        (MAX_HEADER_OCTETS + 1).to_bytes(8, "little") + b"{}",
        b"\xff" * 100,
    ],
)
def test_foreign_files(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert refusal(path).startswith("not a safetensors file")


def test_a_header_that_is_no_header(path: Path) -> None:
    path.write_bytes(bytes([8, 0, 0, 0, 0, 0, 0, 0]) + b'{"a":1} ')
    assert refusal(path).startswith("damaged safetensors header: ")
    path.write_bytes(bytes([8, 0, 0, 0, 0, 0, 0, 0]) + b"{'a':1} ")
    assert refusal(path).startswith("damaged safetensors header: ")


def test_every_truncation_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    saved.write_bytes(whole[: 8 + header - 1])
    assert refusal(saved) == f"truncated: {7 + header} octets, where its header needs {8 + header}"
    saved.write_bytes(whole[:-1])
    assert refusal(saved) == f"truncated: {len(whole) - 1} octets of {len(whole)}"
    for length in random.Random(3).sample(range(len(whole)), 40):
        saved.write_bytes(whole[:length])
        assert refusal(saved)


def test_octets_behind_the_last_tensor_are_refused(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"\0")
    assert refusal(saved).startswith("damaged safetensors header: ")


def tensor(dtype: str, shape: list[int], itemsize: int = 2) -> tuple[str, list[int], int]:
    return dtype, shape, int(np.prod(shape)) * itemsize


GOOD = {
    f"layers.{layer}.{part}": tensor("BF16", [TOKENS, 2, 4]) for layer in range(3) for part in "kv"
}


def write_raw(
    path: Path, tensors: dict[str, tuple[str, list[int], int]], metadata: dict[str, Any] | None
) -> None:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(offset))


def metadata(**changes: str) -> dict[str, str]:
    return {
        "kvcs.descriptor": make_descriptor().canonical().decode(),
        "kvcs.token_ids": json.dumps(list(range(TOKENS))),
        **{f"kvcs.{name}": value for name, value in changes.items()},
    }


def test_the_raw_builder_makes_a_good_file(path: Path) -> None:
    write_raw(path, GOOD, metadata())
    assert load_kv_file(path).is_complete


def test_a_header_of_odd_length_is_read(path: Path) -> None:
    for length in range(8):
        write_raw(path, GOOD, {**metadata(), "pad": "x" * length})
        assert load_kv_file(path).layers[2].v.shape == (TOKENS, 2, 4)


@pytest.mark.parametrize(
    ("held", "complaint"),
    [
        (None, "safetensors, but no KV cache: no metadata kvcs.descriptor"),
        ({"format": "pt"}, "safetensors, but no KV cache: no metadata kvcs.descriptor"),
        (
            {"kvcs.descriptor": make_descriptor().canonical().decode()},
            "safetensors, but no KV cache: no metadata kvcs.token_ids",
        ),
        (metadata(descriptor="{}"), "descriptor model: missing"),
        (metadata(descriptor="no"), "descriptor: not JSON"),
        (metadata(token_ids="{}"), "metadata kvcs.token_ids: expected an array, got object"),
        (metadata(token_ids="[1.5]"), "metadata kvcs.token_ids: number 1.5 is not an integer"),
        (metadata(token_ids="[true]"), "token ids: expected integers, got a bool at 0"),
        (metadata(token_ids="[[]]"), "metadata kvcs.token_ids: JSON text with 2 arrays"),
        (metadata(token_ids="[]"), "no token ids"),
        (metadata(token_ids="[0,1,2]"), "tensor layers.0.k has 9 tokens, there are 3 token ids"),
    ],
)
def test_metadata_that_is_none(path: Path, held: dict[str, str] | None, complaint: str) -> None:
    write_raw(path, GOOD, held)
    assert refusal(path).startswith(complaint)


def without(*names: str) -> dict[str, tuple[str, list[int], int]]:
    return {name: value for name, value in GOOD.items() if name not in names}


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        (without("layers.2.k", "layers.2.v"), "layer 2 missing, the descriptor says 3 layers"),
        (
            without("layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v"),
            "layer 0 and 1 more missing, the descriptor says 3 layers",
        ),
        (without("layers.1.v"), "tensor layers.1.v is missing"),
        ({}, "layer 0 and 2 more missing, the descriptor says 3 layers"),
        (
            {**GOOD, "layers.3.k": tensor("BF16", [TOKENS, 2, 4])},
            "tensor layers.3.k: the descriptor has 3 layers only",
        ),
        (
            {**GOOD, "layers.01.k": tensor("BF16", [TOKENS, 2, 4])},
            "tensor 'layers.01.k' is not layers.N.k or layers.N.v",
        ),
        (
            {**GOOD, "model.embed": tensor("F32", [1], 4)},
            "tensor 'model.embed' is not layers.N.k or layers.N.v",
        ),
        (
            {**GOOD, "layers.0.k": tensor("F16", [TOKENS, 2, 4])},
            "tensor layers.0.k is F16, the descriptor says bfloat16 (BF16)",
        ),
        (
            {**GOOD, "layers.2.v": tensor("BF16", [TOKENS, 4, 2])},
            "tensor layers.2.v has the shape [9, 4, 2], the descriptor says [9, 2, 4]",
        ),
        (
            {**GOOD, "layers.2.v": tensor("BF16", [TOKENS * 8])},
            "tensor layers.2.v has the shape [72], the descriptor says [9, 2, 4]",
        ),
        (
            {**GOOD, "layers.2.v": tensor("BF16", [])},
            "tensor layers.2.v has the shape [], the descriptor says [9, 2, 4]",
        ),
        (
            {**GOOD, "layers.1.k": tensor("BF16", [8, 2, 4])},
            "tensor layers.1.k has 8 tokens, there are 9 token ids",
        ),
    ],
)
def test_tensors_that_disagree_with_the_descriptor(
    path: Path, tensors: dict[str, tuple[str, list[int], int]], complaint: str
) -> None:
    write_raw(path, tensors, metadata())
    assert refusal(path) == complaint


def test_a_part_of_nothing_is_refused(path: Path) -> None:
    write_raw(path, {}, metadata())
    assert "missing" in refusal(path, partial=True)
    write_raw(path, without("layers.1.v"), metadata())
    assert refusal(path, partial=True) == "tensor layers.1.v is missing"


def test_damage_anywhere_in_the_header_raises_nothing_else(saved: Path) -> None:
    whole = saved.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    dice = random.Random(11)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[dice.randrange(end)] = dice.randrange(256)
        saved.write_bytes(damaged)
        try:
            opened = load_kv_file(saved)
        except FileError as exc:
            refused += 1
            assert "\n" not in str(exc)
        else:
            assert opened.layers[2].v.shape[0] == opened.tokens
    assert refused > 100

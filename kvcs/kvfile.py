"""KV cache files: safetensors with the descriptor and the token ids in their metadata.

Tensors ``layers.N.k`` and ``layers.N.v`` have the shape [tokens, kv_heads, head_dim], V with its
own head_dim. Metadata ``kvcs.descriptor`` is the Compatibility Descriptor as canonical JSON, and
``kvcs.token_ids`` a JSON array of as many integers as the tensors have tokens.

A file is checked when it is opened, from its header alone, and its tensors are mapped into memory:
octets are read when a layer is. Whoever shortens the file meanwhile ends the process (SIGBUS);
files that are written by `save_kv_file` are replaced whole and never change in place.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from kvcs.errors import FileError, UsageError
from kvcs.filekinds import LOOKED_AT, file_kind, told
from kvcs.kv import strict_json
from kvcs.kv.arrays import as_host_array, byte_view
from kvcs.kv.descriptor import Descriptor
from kvcs.kv.identity import token_array
from kvcs.targets import check_replaced

__all__ = ["KvFile", "KvLayer", "load_kv_file", "save_kv_file"]

DESCRIPTOR: Final = "kvcs.descriptor"
"""Metadata name of the descriptor."""

TOKEN_IDS: Final = "kvcs.token_ids"
"""Metadata name of the token ids."""

MAX_TOKEN_IDS_OCTETS: Final = 64 * 1024 * 1024
"""Longest JSON text of token ids that is parsed: some ten million of them."""

MAX_HEADER_OCTETS: Final = 100_000_000
"""Longest header that the safetensors format allows."""

_SAFETENSORS_DTYPES: Final = {
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
}
_TENSOR_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,4})\.(k|v)")


class KvLayer(NamedTuple):
    """Both tensors of one layer; those of a file are read-only views of it."""

    k: npt.NDArray[Any]
    """Keys, [tokens, kv_heads, head_dim]."""

    v: npt.NDArray[Any]
    """Values, [tokens, kv_heads, v_head_dim]."""


class _Placed(NamedTuple):
    """Where a tensor lies in its file."""

    shape: tuple[int, int, int]
    offset: int


class _MappedLayers(Mapping[int, KvLayer]):
    """Layers of one file by layer index, ascending; a tensor is mapped when it is asked for."""

    def __init__(
        self, octets: mmap.mmap, dtype: np.dtype[Any], placed: dict[int, dict[str, _Placed]]
    ) -> None:
        self._octets = octets
        self._dtype = dtype
        self._placed = placed

    def __getitem__(self, layer: int) -> KvLayer:
        placed = self._placed[layer]
        return KvLayer(self._array(placed["k"]), self._array(placed["v"]))

    def __iter__(self) -> Iterator[int]:
        return iter(self._placed)

    def __len__(self) -> int:
        return len(self._placed)

    def __repr__(self) -> str:
        return f"<{len(self)} mapped layers>"

    def _array(self, placed: _Placed) -> npt.NDArray[Any]:
        count = prod(placed.shape)
        if count == 0:
            # A buffer of no elements is an error to frombuffer.
            return np.empty(placed.shape, self._dtype)
        flat = np.frombuffer(self._octets, self._dtype, count, placed.offset)
        return flat.reshape(placed.shape)


@dataclass(frozen=True, slots=True, eq=False)
class KvFile:
    """An opened KV cache file."""

    path: Path
    """Where it is."""

    descriptor: Descriptor
    """What the cache belongs to."""

    token_ids: npt.NDArray[np.uint32]
    """Tokens whose keys and values it holds, from the start of the prompt; [tokens]."""

    layers: Mapping[int, KvLayer]
    """Layers by index, ascending; all of the descriptor's unless a part was asked for."""

    @property
    def tokens(self) -> int:
        """Tokens in every tensor."""
        return len(self.token_ids)

    @property
    def blocks(self) -> int:
        """Whole blocks; tokens behind the last one cannot be published."""
        return self.tokens // self.descriptor.block_tokens

    @property
    def is_complete(self) -> bool:
        """Whether every layer of the descriptor is there."""
        return len(self.layers) == self.descriptor.layers


def load_kv_file(path: str | os.PathLike[str], *, partial: bool = False) -> KvFile:
    """Open a KV cache file and check it, without reading its tensors.

    Args:
        path: the file.
        partial: accept a file that lacks layers; each layer that is there has both tensors.

    Raises:
        FileError: the file is missing, truncated, not safetensors, without our metadata, or its
            tensors disagree with its descriptor or token ids. One line, and it names the file.
    """
    path = Path(path)
    try:
        return _load(path, partial)
    except FileError:
        raise
    except UsageError as exc:
        raise FileError(f"{path}: {exc}") from exc
    except OSError as exc:
        raise FileError(f"{path}: {exc.strerror or exc}") from exc


def _load(path: Path, partial: bool) -> KvFile:
    # Asked first, since opening a pipe would wait for its writer.
    if not stat.S_ISREG(path.stat().st_mode):
        raise FileError(f"{path}: not a regular file")
    try:
        with safe_open(str(path), framework="numpy") as opened:
            metadata = opened.metadata() or {}
            tensors: list[tuple[str, str, list[int]]] = []
            for name in opened.offset_keys():
                part = opened.get_slice(name)
                tensors.append((name, part.get_dtype(), part.get_shape()))
    except SafetensorError as exc:
        raise FileError(f"{path}: {_diagnosis(path, exc)}") from exc

    descriptor = _read_descriptor(metadata)
    token_ids = _read_token_ids(metadata)
    with path.open("rb") as file:
        octets = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # The library has checked that tensors follow each other without a gap to the end of the file.
    offset = 8 + int.from_bytes(octets[:8], "little")
    placed: dict[int, dict[str, _Placed]] = {}
    for name, dtype, shape in tensors:
        layer, component, expected = _check_tensor(descriptor, len(token_ids), name, dtype, shape)
        placed.setdefault(layer, {})[component] = _Placed(expected, offset)
        offset += prod(expected) * descriptor.numpy_dtype.itemsize
    if offset != len(octets):
        raise FileError(f"{path}: changed while it was opened")
    _check_layers(descriptor, placed, partial)
    layers = _MappedLayers(octets, descriptor.numpy_dtype, dict(sorted(placed.items())))
    return KvFile(path, descriptor, token_ids, layers)


def _diagnosis(path: Path, error: SafetensorError) -> str:
    """Say in a user's words why the library refused a file, from its header alone."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 9 or length > MAX_HEADER_OCTETS or file.read(1) != b"{":
            file.seek(0)
            return f"not a safetensors file{told(file_kind(file.read(LOOKED_AT)))}"
        if size < 8 + length:
            return f"truncated: {size} octets, where its header needs {8 + length}"
        file.seek(8)
        try:
            header = json.loads(file.read(length))
            ends = [
                member["data_offsets"][1] for name, member in header.items() if name[:2] != "__"
            ]
            needed = 8 + length + max(ends, default=0)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return f"damaged safetensors header: {error}"
    if size < needed:
        return f"truncated: {size} octets of {needed}"
    return f"damaged safetensors header: {error}"


def _read_descriptor(metadata: Mapping[str, str]) -> Descriptor:
    if DESCRIPTOR not in metadata:
        raise UsageError(f"safetensors, but no KV cache: no metadata {DESCRIPTOR}")
    return Descriptor.parse(metadata[DESCRIPTOR].encode("utf-8"))


def _read_token_ids(metadata: Mapping[str, str]) -> npt.NDArray[np.uint32]:
    if TOKEN_IDS not in metadata:
        raise UsageError(f"safetensors, but no KV cache: no metadata {TOKEN_IDS}")
    try:
        value = strict_json.load(
            metadata[TOKEN_IDS].encode("utf-8"), max_octets=MAX_TOKEN_IDS_OCTETS, max_containers=1
        )
    except UsageError as exc:
        raise UsageError(f"metadata {TOKEN_IDS}: {exc}") from exc
    if not isinstance(value, list):
        raise UsageError(f"metadata {TOKEN_IDS}: expected an array, got {strict_json.kind(value)}")
    return _checked(value)


def _checked(token_ids: object) -> npt.NDArray[np.uint32]:
    checked = token_array(token_ids)
    if not checked.size:
        raise UsageError("no token ids; a KV cache has at least one token")
    return checked


def _shape(descriptor: Descriptor, component: str, tokens: int) -> tuple[int, int, int]:
    dim = descriptor.head_dim if component == "k" else descriptor.v_head_dim
    return (tokens, descriptor.kv_heads, dim)


def _check_tensor(
    descriptor: Descriptor, tokens: int, name: str, dtype: str, shape: Sequence[int]
) -> tuple[int, str, tuple[int, int, int]]:
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"tensor {name[:64]!r} is not layers.N.k or layers.N.v")
    layer, component = int(match[1]), match[2]
    if layer >= descriptor.layers:
        raise UsageError(f"tensor {name}: the descriptor has {descriptor.layers} layers only")
    if dtype != _SAFETENSORS_DTYPES[descriptor.dtype]:
        raise UsageError(
            f"tensor {name} is {dtype}, the descriptor says {descriptor.dtype}"
            f" ({_SAFETENSORS_DTYPES[descriptor.dtype]})"
        )
    expected = _shape(descriptor, component, tokens)
    if tuple(shape) != expected:
        if tuple(shape[1:]) == expected[1:]:
            raise UsageError(f"tensor {name} has {shape[0]} tokens, there are {tokens} token ids")
        raise UsageError(
            f"tensor {name} has the shape {list(shape)}, the descriptor says {list(expected)}"
        )
    return layer, component, expected


def _check_layers(
    descriptor: Descriptor, placed: Mapping[int, Mapping[str, _Placed]], partial: bool
) -> None:
    for layer, tensors in placed.items():
        for component in ("k", "v"):
            if component not in tensors:
                raise UsageError(f"tensor layers.{layer}.{component} is missing")
    missing = [layer for layer in range(descriptor.layers) if layer not in placed]
    if missing and (not partial or not placed):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(
            f"layer {missing[0]}{more} missing, the descriptor says {descriptor.layers} layers"
        )


def save_kv_file(
    path: str | os.PathLike[str],
    descriptor: Descriptor,
    token_ids: object,
    layers: Mapping[int, tuple[object, object]] | Iterable[tuple[object, object]],
) -> None:
    """Write a KV cache file; it appears under its name whole, or not at all.

    Layers are taken and written one by one, so an iterator need not hold them all.

    Args:
        path: the file; one that is there is replaced.
        descriptor: what the cache belongs to.
        token_ids: integers from the start of the prompt, as many as the tensors have tokens.
        layers: K [tokens, kv_heads, head_dim] and V [tokens, kv_heads, v_head_dim] in the
            descriptor's dtype, as numpy arrays or tensors in host memory, of every layer in
            order; a mapping by layer index may lack some.

    Raises:
        UsageError: a token id, shape, dtype or the number of layers disagrees; nothing is left.
        FileError: the file cannot be written; nothing is left.
    """
    path = Path(path)
    tokens = _checked(token_ids)
    if isinstance(layers, Mapping):
        indices = sorted(layers)
        if not indices or not 0 <= indices[0] <= indices[-1] < descriptor.layers:
            raise UsageError(f"layers must be some of 0 to {descriptor.layers - 1}, got {indices}")
        ordered: Iterator[tuple[object, object]] = (layers[i] for i in indices)
    else:
        indices = list(range(descriptor.layers))
        ordered = iter(layers)
    if not path.name:
        raise FileError(f"{str(path)!r} is not the name of a file")
    check_replaced(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            file.write(_header(descriptor, tokens, indices))
            for layer in indices:
                _write_layer(file, descriptor, len(tokens), layer, next(ordered, None))
            if next(ordered, None) is not None:
                raise UsageError(f"more than the descriptor's {descriptor.layers} layers")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as exc:
        raise FileError(f"{path}: {exc.strerror or exc}") from exc
    finally:
        part.unlink(missing_ok=True)


def _header(
    descriptor: Descriptor, token_ids: npt.NDArray[np.uint32], indices: Sequence[int]
) -> bytes:
    header: dict[str, Any] = {
        "__metadata__": {
            DESCRIPTOR: descriptor.canonical().decode("utf-8"),
            TOKEN_IDS: json.dumps(token_ids.tolist(), separators=(",", ":")),
        }
    }
    offset = 0
    for layer in indices:
        for component in ("k", "v"):
            shape = _shape(descriptor, component, len(token_ids))
            end = offset + prod(shape) * descriptor.numpy_dtype.itemsize
            header[f"layers.{layer}.{component}"] = {
                "dtype": _SAFETENSORS_DTYPES[descriptor.dtype],
                "shape": shape,
                "data_offsets": [offset, end],
            }
            offset = end
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    # Spaces up to a multiple of eight keep the tensors aligned for whoever maps them.
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_OCTETS:
        raise UsageError(f"a header of {len(text)} octets, safetensors allows {MAX_HEADER_OCTETS}")
    return len(text).to_bytes(8, "little") + text


def _write_layer(
    file: IO[bytes],
    descriptor: Descriptor,
    tokens: int,
    layer: int,
    pair: tuple[object, object] | None,
) -> None:
    if pair is None:
        raise UsageError(
            f"layer {layer} is missing, the descriptor says {descriptor.layers} layers"
        )
    for component, given in zip(("k", "v"), pair, strict=True):
        shape = _shape(descriptor, component, tokens)
        array = as_host_array(given, descriptor.numpy_dtype, shape, f"layer {layer} {component}")
        file.write(byte_view(np.ascontiguousarray(array)))

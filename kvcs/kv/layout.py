"""Array form of one block: shapes, element type and octets of each section.

The raw layout is C order with little-endian elements: the K section is [block_tokens, kv_heads,
head_dim], the V section the same with its own head_dim; ``kv`` is the K section then the V section
(KVCS "Object Payload").
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from kvcs.errors import UsageError
from kvcs.kv.tracks import Component

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
}
"""Element types that a Compatibility Descriptor may name, and their numpy form."""

MAX_LAYOUTS: Final = 64
"""Layouts that are kept: more than the models of one process have."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Numpy form of a descriptor's dtype.

    Raises:
        UsageError: the name is not one of `DTYPES`.
    """
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise UsageError(
            f"dtype must be one of {', '.join(DTYPES)}; got {reprlib.repr(name)}"
        ) from None


class BlockShape(NamedTuple):
    """Array form of one section of one block: C order, little-endian on the wire."""

    tokens: int
    """Tokens per block."""

    heads: int
    """KV heads; the wire carries all heads of a layer."""

    dim: int
    """Elements per head; 0 for the V section of latent attention."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Sections of one Object's tensor."""

    component: Component
    """Tensor kind of the track."""

    shapes: tuple[BlockShape, ...]
    """One shape per section: K, or V, or K then V."""

    dtype: np.dtype[Any]
    """Element type of every section."""

    section_octets: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """Octets of each section."""

    octets: int = field(init=False, compare=False, repr=False)
    """Octets of all sections together, which is a raw Object's Data Length."""

    def __post_init__(self) -> None:
        sizes = tuple(prod(shape) * self.dtype.itemsize for shape in self.shapes)
        object.__setattr__(self, "section_octets", sizes)
        object.__setattr__(self, "octets", sum(sizes))


@lru_cache(maxsize=MAX_LAYOUTS)
def block_layout(
    component: Component, tokens: int, heads: int, head_dim: int, v_head_dim: int, dtype: str
) -> BlockLayout:
    """The layout of one component of a geometry, made once: every Object asks for it.

    Raises:
        UsageError: the dtype is not one of `DTYPES`.
    """
    k, v = BlockShape(tokens, heads, head_dim), BlockShape(tokens, heads, v_head_dim)
    shapes = {Component.K: (k,), Component.V: (v,), Component.KV: (k, v)}[component]
    return BlockLayout(component, shapes, numpy_dtype(dtype))

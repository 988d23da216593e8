"""Array form of one block: shapes, element type and octets of each section.

The raw layout is C order with little-endian elements: the K section is [block_tokens, kv_heads,
head_dim], the V section the same with its own head_dim; ``kv`` is the K section then the V section
(KVCS "Object Payload").
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
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

    @property
    def section_octets(self) -> tuple[int, ...]:
        """Octets of each section."""
        return tuple(prod(shape) * self.dtype.itemsize for shape in self.shapes)

    @property
    def octets(self) -> int:
        """Octets of all sections together, which is a raw Object's Data Length."""
        return sum(self.section_octets)

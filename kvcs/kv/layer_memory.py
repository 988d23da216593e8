"""Where the layers of a retrieval lie: in memory made for each, or in the caller's own tensors.

An engine that copies layers to a device wants them in pinned memory, one that has a pool wants them
there; memory that was used before also saves the first touch of fresh pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcs.errors import UsageError
from kvcs.kv.arrays import as_host_array
from kvcs.kv.descriptor import Descriptor
from kvcs.kv.memory import new_array

Pair = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""K and V of one layer: [tokens, kv_heads, head_dim] and [tokens, kv_heads, v_head_dim]."""


class LayerMemory(Protocol):
    """Gives the tensors that layers are put into."""

    is_ours: bool
    """Whether it was made for the retrieval, and goes when the layer is dropped."""

    def layer(self, index: int, tokens: int) -> Pair:
        """Writable, C-contiguous tensors of one layer, the same memory each time or fresh."""


class FreshMemory:
    """Memory made for each layer when its first Object comes.

    Args:
        descriptor: the consumer's own.
    """

    is_ours = True

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor

    def layer(self, index: int, tokens: int) -> Pair:
        """Tensors of one layer; what is in them is not specified."""
        k, v = _shapes(self._descriptor, tokens)
        dtype = self._descriptor.numpy_dtype
        return new_array(k, dtype), new_array(v, dtype)


class GivenMemory:
    """The caller's own tensors, which are filled from their start.

    Args:
        given: K and V of each wanted layer, by its index: [tokens or more, kv_heads, head_dim] and
            [tokens or more, kv_heads, v_head_dim] of the descriptor's dtype, C-contiguous and
            writable; arrays, or anything else that `as_host_array` takes. V is not looked at where
            the model has latent attention.
        descriptor: the consumer's own.
        layers: indices of the wanted layers.
        tokens: how many are wanted at most.

    Raises:
        UsageError: one lacks or does not fit, or two share memory.
    """

    is_ours = False

    def __init__(
        self,
        given: Mapping[int, tuple[object, object]],
        descriptor: Descriptor,
        layers: range,
        tokens: int,
    ) -> None:
        self._tensors: dict[int, Pair] = {}
        shapes, dtype = _shapes(descriptor, tokens), descriptor.numpy_dtype
        for index in layers:
            try:
                pair = given[index]
                k, v = pair
            except (LookupError, TypeError, ValueError):
                raise UsageError(
                    f"into: expected (k, v) for each of the layers {layers[0]}..{layers[-1]}, and"
                    f" layer {index} has none"
                ) from None
            named = ((k, "k"), (v if descriptor.v_head_dim else new_array(shapes[1], dtype), "v"))
            self._tensors[index] = (
                _room(*named[0], index, shapes[0], dtype),
                _room(*named[1], index, shapes[1], dtype),
            )
        self._hold_apart()

    def _hold_apart(self) -> None:
        """Refuse memory that two layers would share: each would spoil the other."""
        ranges = sorted(self._ranges())
        for (_, end, first), (start, _, second) in pairwise(ranges):
            if start < end:
                raise UsageError(f"into: {first} and {second} share memory")

    def _ranges(self) -> Iterator[tuple[int, int, str]]:
        for index, pair in self._tensors.items():
            for name, array in zip("kv", pair, strict=True):
                if array.nbytes:
                    start = array.ctypes.data
                    yield start, start + array.nbytes, f"{name} of layer {index}"

    def layer(self, index: int, tokens: int) -> Pair:
        """The first tokens of the caller's tensors of one layer."""
        k, v = self._tensors[index]
        return k[:tokens], v[:tokens]


def _shapes(descriptor: Descriptor, tokens: int) -> tuple[tuple[int, int, int], ...]:
    heads = descriptor.kv_heads
    return (tokens, heads, descriptor.head_dim), (tokens, heads, descriptor.v_head_dim)


def _room(
    given: object, name: str, index: int, shape: tuple[int, int, int], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """What is filled of one tensor of the caller's.

    Raises:
        UsageError: it does not fit.
    """
    called = f"into: {name} of layer {index}"
    tokens, *rest = shape
    has = getattr(given, "shape", None)
    if isinstance(has, tuple) and len(has) == len(shape) and has[0] > tokens:
        tokens = int(has[0])
    # Twice: what is made anew for each is a copy, which the caller would wait for in vain.
    array, again = (as_host_array(given, dtype, (tokens, *rest), called) for _ in range(2))
    if array.ctypes.data != again.ctypes.data:
        raise UsageError(f"{called}: {type(given).__name__} gives copies; give the memory itself")
    array = array[: shape[0]]
    if not array.flags.c_contiguous:
        raise UsageError(f"{called} is not C-contiguous; give memory that is, and copy from there")
    if not array.flags.writeable:
        raise UsageError(f"{called} is read-only; give memory that may be written to")
    return array

"""Arrays to bytes and back: the only place where that happens.

Nothing here reinterprets silently: an array of another dtype is refused, and reading the bits of
one dtype as another needs an explicit word.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcs.errors import UsageError
from kvcs.kv.layout import DTYPES

Array = npt.NDArray[Any]

_WIDENINGS: Final[dict[str, frozenset[str]]] = {
    "float16": frozenset({"float32"}),
    "bfloat16": frozenset({"float32"}),
    "float8_e4m3fn": frozenset({"float16", "bfloat16", "float32"}),
    "float8_e5m2": frozenset({"float16", "bfloat16", "float32"}),
}
"""Conversions by value that lose nothing."""

_BITS: Final = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}


def byte_view(array: Array) -> memoryview:
    """Return the bytes of ``array`` without copying them.

    Args:
        array: C-contiguous, little-endian, any shape and dtype, bfloat16 included.

    Returns:
        ``array.nbytes`` unsigned bytes, writable if the array is. Do not write to ``array`` until
        they are sent.

    Raises:
        UsageError: ``array`` is not C-contiguous, since a silent copy would hide the cost; or its
            elements are not little-endian.
    """
    if not array.flags.c_contiguous:
        raise UsageError("array is not C-contiguous; copy it explicitly first")
    if not _is_little_endian(array.dtype):
        raise UsageError(f"array of {array.dtype} is not little-endian; convert it first")
    return array.reshape(-1).view(np.uint8).data


def _is_little_endian(dtype: np.dtype[Any]) -> bool:
    if dtype.itemsize == 1:
        return True
    order = dtype.byteorder
    return order == "<" or (order in "=|" and sys.byteorder == "little")


def as_host_array(obj: object, dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> Array:
    """Return ``obj`` as a numpy array that shares its memory where it can.

    Accepts numpy arrays, CPU torch tensors (bfloat16 and float8 too; torch is not imported),
    anything with ``__array__``, and DLPack. The result may be strided, for example the transposed
    view of a [heads, tokens, dim] tensor: copy it before `byte_view`.

    Args:
        obj: the caller's array or tensor.
        dtype: the dtype that it must have.
        shape: the shape that it must have.
        name: what the caller calls it, for messages.

    Raises:
        UsageError: no array, not in host memory, another dtype or shape, big-endian, masked, or
            with negative strides; the message names what was expected and what came.
    """
    array = _to_numpy(obj, name)
    # numpy reads a tenth of itself more for its masked arrays: without that there are none.
    if "numpy.ma" in sys.modules and isinstance(array, np.ma.MaskedArray):
        raise UsageError(f"{name}: masked arrays have no wire form; fill it first")
    if array.dtype != dtype:
        raise UsageError(
            f"{name}: expected dtype {dtype.name}, got {_dtype_text(array.dtype)}; convert it"
            f" explicitly, bits are never reinterpreted{_numpy_advice(dtype, array.dtype)}"
        )
    if array.shape != shape:
        raise UsageError(f"{name}: expected shape {list(shape)}, got {list(array.shape)}")
    if any(stride < 0 for stride in array.strides):
        raise UsageError(f"{name}: has negative strides {array.strides}; copy it first")
    return array


def _numpy_advice(wanted: np.dtype[Any], got: np.dtype[Any]) -> str:
    """How numpy has a dtype that it does not know itself, where integers of its width came."""
    if wanted.type.__module__ == "ml_dtypes" and got.kind in "iu" and got.isnative:
        if got.itemsize == wanted.itemsize:
            return f" (where they are {wanted.name} already: .view(ml_dtypes.{wanted.name}))"
    return ""


def _dtype_text(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.isnative else f"{dtype.name} of the other byte order"


def _to_numpy(obj: object, name: str) -> Array:
    if isinstance(obj, np.ndarray):
        return obj
    try:
        if str(getattr(obj, "dtype", "")).startswith("torch."):
            return _from_torch(obj, name)
        if hasattr(obj, "__array__"):
            return np.asarray(obj)
        if hasattr(obj, "__dlpack__"):
            return np.from_dlpack(obj)
    except UsageError:
        raise
    except (TypeError, ValueError, RuntimeError, BufferError, AttributeError) as exc:
        raise UsageError(f"{name}: {type(obj).__name__} gives no host array: {exc}") from exc
    raise UsageError(f"{name}: expected an array or tensor, got {type(obj).__name__}")


def _from_torch(tensor: Any, name: str) -> Array:
    """Numpy form of a torch tensor; numpy cannot ask torch for bfloat16 and float8 itself."""
    device = tensor.device.type
    if device != "cpu":
        raise UsageError(f"{name}: tensor is on device {device!r}; copy it to the host with .cpu()")
    tensor = tensor.detach()
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        return np.asarray(tensor.numpy())
    # Same width on both sides, so every stride stays what it was.
    module = sys.modules[type(tensor.dtype).__module__.partition(".")[0]]
    bits = module.int16 if kind == "bfloat16" else module.uint8
    return np.asarray(tensor.view(bits).numpy()).view(DTYPES[kind])


def convert(array: Array, dtype: str | np.dtype[Any] | type[Any], *, bits: bool = False) -> Array:
    """Give a consumer's array another dtype, by value and without loss, or its bare bits.

    Args:
        array: any shape, of a dtype of `kvcs.kv.layout.DTYPES`.
        dtype: the dtype wanted. The array's own returns the array itself.
        bits: say True to get the bits as an unsigned integer of the same width (a view).

    Returns:
        An array of the same shape.

    Raises:
        UsageError: the conversion would lose range or precision, or would need scales that are not
            in the array (int8, uint8), or would reread bits without ``bits=True``.
    """
    own = array.dtype
    target = _named_dtype(dtype)
    if bits:
        unsigned = _BITS.get(own.itemsize)
        if target != unsigned:
            raise UsageError(f"the bits of {own.name} are {unsigned}, not {target.name}")
        return array.view(target)
    if target == own:
        return array
    if target.name in _WIDENINGS.get(own.name, ()):
        # NaNs of narrow types may raise the processor's flag; they stay NaNs.
        with np.errstate(invalid="ignore"):
            return array.astype(target)
    if target.kind in "iu" and target == _BITS.get(own.itemsize):
        raise UsageError(
            f"{target.name} would reread the bits of {own.name}; say bits=True if that is meant"
        )
    exact = ", ".join(sorted(_WIDENINGS.get(own.name, ()))) or "nothing else"
    raise UsageError(
        f"{own.name} does not convert to {target.name} without loss; without loss: {exact}"
    )


def _named_dtype(dtype: str | np.dtype[Any] | type[Any]) -> np.dtype[Any]:
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    try:
        return np.dtype(dtype)
    except TypeError:
        raise UsageError(f"{dtype!r} is not a dtype") from None

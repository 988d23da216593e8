"""Memory of layer tensors: mapped for itself, in small pages, and used again.

The first touch of a page costs a fault and its clearing: together as much as the SHA-256 over it.
So some of what is let go is kept for the next tensor of the same size, as layers of a cache are:
one that is dropped layer by layer needs new memory only for the first of them.

numpy asks for large pages where an array has some MiB. In a virtual machine whose host gives
memory only when it is touched, their first touch was measured to cost four times that of small
ones. Here no advice is given: where large pages are switched on for all, these have them too.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import weakref
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

MAPPED_OCTETS: Final = 2**20
"""From here on memory is mapped for itself; below it the allocator has it ready."""

MAX_SPARE_OCTETS: Final = 128 * 2**20
"""What is kept in a process to be used again; the rest goes back to the system at once."""

_POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE of Linux; Python has no name for it."""


class Mapping(mmap.mmap):
    """Memory that was mapped for itself."""

    is_fresh = True
    """Whether nobody has used it before."""


class _Spare:
    """Mappings that nobody uses, the one that was given up first in front.

    An array may go in any thread and in the middle of anything, a call of this very object
    included, so each step stands for itself.
    """

    def __init__(self) -> None:
        self._mappings: list[Mapping] = []

    @property
    def octets(self) -> int:
        """How much is kept."""
        return sum(map(len, tuple(self._mappings)))

    def take(self, octets: int) -> Mapping | None:
        """One of just so many octets, the one that was used last."""
        for mapped in reversed(tuple(self._mappings)):
            if len(mapped) == octets:
                with contextlib.suppress(ValueError):  # somebody else has just taken it
                    self._mappings.remove(mapped)
                    return mapped
        return None

    def keep(self, mapped: Mapping) -> None:
        """Nobody uses a mapping any more."""
        mapped.is_fresh = False
        self._mappings.append(mapped)
        while self.octets > MAX_SPARE_OCTETS:
            with contextlib.suppress(IndexError):
                self._mappings.pop(0)

    def clear(self) -> None:
        """Give everything back to the system."""
        self._mappings.clear()


SPARE: Final = _Spare()
"""Of this process."""


def new_memory(octets: int) -> npt.NDArray[Any]:
    """Return writable memory.

    Args:
        octets: how much.

    Returns:
        An array of single octets; what is in them is not specified. When the last array that lies
        in it is gone, it is used again or goes back to the system.

    Raises:
        MemoryError: the system gives no more.
    """
    if octets < MAPPED_OCTETS or sys.platform == "win32":
        return np.empty(octets, np.uint8)
    mapped = SPARE.take(octets)
    if mapped is None:
        try:
            mapped = Mapping(-1, octets, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as exc:
            raise MemoryError(f"the system gives no {octets} octets: {exc.strerror}") from exc
    memory: npt.NDArray[Any] = np.frombuffer(mapped, np.uint8)
    # Every view of it holds the array itself.
    weakref.finalize(memory, SPARE.keep, mapped).atexit = False
    return memory


def commit(array: npt.NDArray[Any]) -> None:
    """Have the system give the pages of an array at once, where it can.

    That costs three quarters of a fault for each. Say it of what is written to next, so that the
    cleared pages are in the processor's cache still. Nothing happens where the array does not lie
    in memory that was mapped for itself and for the first time, or the system does not know how.

    Args:
        array: C-contiguous, a part of what `new_memory` gave.
    """
    if sys.platform != "linux":
        return
    holder: object = array
    while isinstance(holder, (np.ndarray, memoryview)):
        holder = holder.base if isinstance(holder, np.ndarray) else holder.obj
    if not isinstance(holder, Mapping) or not holder.is_fresh or not array.nbytes:
        return
    start = array.ctypes.data - np.frombuffer(holder, np.uint8, 1).ctypes.data
    first = start - start % mmap.PAGESIZE
    with contextlib.suppress(OSError):  # Linux before 5.14
        holder.madvise(_POPULATE_WRITE, first, start + array.nbytes - first)


def new_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a writable array of which nothing has been touched; see `new_memory`.

    Args:
        shape: its shape.
        dtype: its dtype.
    """
    octets = prod(shape) * dtype.itemsize
    return new_memory(octets).view(dtype).reshape(shape)

"""Memory of layer tensors: mapped for itself, used again, and given back above a limit."""

from __future__ import annotations

import errno
import mmap
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from kvcs.kv import memory
from kvcs.kv.memory import MAPPED_OCTETS, commit, new_array, new_memory

SIZES = (1, 4095, MAPPED_OCTETS - 1, MAPPED_OCTETS, MAPPED_OCTETS + 1, 3 * MAPPED_OCTETS + 12_345)

needs_mappings = pytest.mark.skipif(sys.platform == "win32", reason="its mappings take no flags")


@pytest.mark.parametrize("octets", SIZES)
def test_it_is_writable_and_just_as_long(octets: int) -> None:
    array = new_memory(octets)
    assert array.nbytes == octets and array.flags.writeable
    array[0] = array[-1] = 7
    assert int(array[0]) == int(array[-1]) == 7


@pytest.mark.parametrize("shape", [(0,), (3, 2, 8), (700, 8, 128), (700, 8, 0)])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", "u1"])
def test_an_array_has_its_shape_and_dtype(shape: tuple[int, ...], dtype: str) -> None:
    array = new_array(shape, np.dtype(dtype))
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    assert array.flags.c_contiguous and array.flags.writeable and array.flags.aligned


class Mapping(memory.Mapping):
    """A mapping that can be seen to go, and of which pages are asked for."""

    asked: ClassVar[list[tuple[int, int]]] = []

    made: ClassVar[weakref.WeakSet[Mapping]] = weakref.WeakSet()

    def __new__(cls, *given: Any, **named: Any) -> Mapping:
        new = super().__new__(cls, *given, **named)
        cls.made.add(new)
        return new

    def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
        assert length is not None
        self.asked.append((start, length))
        super().madvise(option, start, length)


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Nothing is spare; how many mappings were made since and are there."""
    memory.SPARE.clear()
    monkeypatch.setattr(memory, "Mapping", Mapping)
    yield lambda: len(Mapping.made)
    memory.SPARE.clear()
    Mapping.asked.clear()
    assert len(Mapping.made) == 0


@needs_mappings
def test_what_is_let_go_is_used_again_for_what_is_as_long(mappings: Callable[[], int]) -> None:
    new_memory(MAPPED_OCTETS - 1)
    assert mappings() == 0, "the allocator has that ready"
    first = new_memory(MAPPED_OCTETS)
    first[:] = 7
    part = first[100:200]
    del first
    other = new_memory(MAPPED_OCTETS)
    assert (mappings(), memory.SPARE.octets) == (2, 0), "a view is left of the first"
    del part
    assert (mappings(), memory.SPARE.octets) == (2, MAPPED_OCTETS)
    longer = new_memory(MAPPED_OCTETS + 1)
    assert (mappings(), memory.SPARE.octets) == (3, MAPPED_OCTETS)
    again = new_memory(MAPPED_OCTETS)
    assert (mappings(), memory.SPARE.octets) == (3, 0)
    assert (again == 7).all(), "nothing was cleared"
    again[:] = 8
    other[:] = 9
    assert (again == 8).all() and len(longer) == MAPPED_OCTETS + 1


@needs_mappings
def test_no_more_is_kept_than_the_limit(
    mappings: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MAX_SPARE_OCTETS", 3 * MAPPED_OCTETS)
    held = [new_memory(size * MAPPED_OCTETS) for size in (1, 1, 1, 2, 4)]
    del held[4]
    assert (mappings(), memory.SPARE.octets) == (4, 0), "alone it is above the limit"
    del held[0], held[0]
    assert (mappings(), memory.SPARE.octets) == (4, 2 * MAPPED_OCTETS)
    del held[1]
    assert (mappings(), memory.SPARE.octets) == (3, 3 * MAPPED_OCTETS), "the oldest went"


@needs_mappings
def test_no_memory_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    memory.SPARE.clear()
    monkeypatch.setattr(memory, "Mapping", refuse)
    with pytest.raises(MemoryError, match="Cannot allocate"):
        new_memory(MAPPED_OCTETS)


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that is asked")
def test_pages_are_asked_for_where_a_part_lies_in_memory_that_is_new(
    mappings: Callable[[], int],
) -> None:
    page = mmap.PAGESIZE
    first = new_memory(3 * MAPPED_OCTETS)
    first[:] = 7
    commit(first[10:20])
    commit(first[3 * page - 5 : 4 * page + 11].view("<u2").reshape(2, -1))
    commit(first[:0])
    commit(np.empty(page, np.uint8))
    commit(new_memory(MAPPED_OCTETS - 1))
    assert Mapping.asked == [(0, 20), (2 * page, 2 * page + 11)]
    assert (first == 7).all()
    del first
    commit(new_memory(3 * MAPPED_OCTETS))
    assert (mappings(), len(Mapping.asked)) == (1, 2), "its pages are there"


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that is asked")
def test_a_system_that_does_not_know_how_gives_pages_as_they_are_touched(
    mappings: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_POPULATE_WRITE", 2**30)
    array = new_memory(MAPPED_OCTETS)
    commit(array)
    array[:] = 7
    assert Mapping.asked == [(0, MAPPED_OCTETS)] and (array == 7).all()
    assert mappings() == 1

"""What an engine is told of the blocks that a load did not fill."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

import kvcs
from kvcs.integrations.block_loads import BlockLoads
from tests.virtual import virtual


class FakeCache:
    """Two layers of some blocks; what is missing never comes."""

    layers = (0, 1)

    def __init__(self, blocks: int = 3, error: kvcs.KvcsError | None = None) -> None:
        self.blocks = blocks
        self.missing: set[tuple[int, int]] = set()
        """Layer and block."""
        self.error = error or kvcs.CacheIncomplete("the deadline passed", (), 0)
        self.more = asyncio.Event()
        self.more.set()

    async def __aiter__(self) -> Any:
        for index in self.layers:
            await self.more.wait()
            if any(layer == index for layer, _ in self.missing):
                raise self.error
            yield SimpleNamespace(index=index)

    def block(self, layer: int, block: int) -> Any:
        if isinstance(self.error, kvcs.PublicationError):
            raise self.error
        if (layer, block) in self.missing:
            raise kvcs.UsageError("not verified")
        return SimpleNamespace(index=layer)


class Memory:
    """An engine's blocks."""

    def __init__(self) -> None:
        self.stored: list[tuple[int, int]] = []
        self.full: int | None = None

    def store(self, block_id: int, tensors: Any) -> None:
        if block_id == self.full:
            raise MemoryError("no room")
        self.stored.append((block_id, tensors.index))


def told(loads: BlockLoads) -> tuple[set[int], set[str]]:
    """A step of the engine."""
    return loads.get_block_ids_with_load_errors(), loads.get_finished()


@virtual
async def test_a_whole_cache_has_no_bad_blocks() -> None:
    memory = Memory()
    loads = BlockLoads(memory.store)
    await loads.start("a", cast(kvcs.Cache, FakeCache()), [5, 6, 7])
    assert told(loads) == (set(), {"a"})
    assert told(loads) == (set(), set())
    assert sorted(memory.stored) == [(5, 0), (5, 1), (6, 0), (6, 1), (7, 0), (7, 1)]


@virtual
async def test_blocks_that_the_publication_does_not_cover_are_bad() -> None:
    loads = BlockLoads(Memory().store)
    await loads.start("a", cast(kvcs.Cache, FakeCache(blocks=2)), [5, 6, 7])
    assert told(loads) == ({7}, {"a"})


@virtual
async def test_nothing_of_a_publication_that_contradicts_itself_is_stored() -> None:
    memory, cache = Memory(), FakeCache(error=kvcs.PublicationError("contradiction"))
    cache.missing.add((0, 1))
    loads = BlockLoads(memory.store)
    await loads.start("a", cast(kvcs.Cache, cache), [5, 6, 7])
    assert told(loads) == ({5, 6, 7}, {"a"})
    assert memory.stored == []


@virtual
async def test_what_the_engines_memory_raises_is_told() -> None:
    memory = Memory()
    memory.full = 6
    loads = BlockLoads(memory.store)
    await loads.start("a", cast(kvcs.Cache, FakeCache()), [5, 6, 7])
    assert isinstance(loads.failures["a"], MemoryError)
    assert told(loads) == ({5, 6, 7}, {"a"})  # of layer 1 nothing was stored
    assert loads.failures == {}


@virtual
@pytest.mark.parametrize("begun", [True, False])
async def test_a_load_that_is_cancelled_tells_what_it_did_not_load(begun: bool) -> None:
    cache = FakeCache()
    cache.more.clear()
    loads = BlockLoads(Memory().store)
    load = loads.start("a", cast(kvcs.Cache, cache), [5, 6])
    if begun:
        await asyncio.sleep(0)
    load.cancel()
    await asyncio.wait([load])
    assert told(loads) == ({5, 6}, {"a"})


@virtual
async def test_a_request_is_loaded_once_at_a_time() -> None:
    loads = BlockLoads(Memory().store)
    first = loads.start("a", cast(kvcs.Cache, FakeCache()), [5])
    with pytest.raises(kvcs.UsageError, match="being loaded"):
        loads.start("a", cast(kvcs.Cache, FakeCache()), [6])
    await first
    with pytest.raises(kvcs.UsageError, match="being loaded"):
        loads.start("a", cast(kvcs.Cache, FakeCache()), [6])
    assert told(loads) == (set(), {"a"})
    await loads.start("a", cast(kvcs.Cache, FakeCache()), [6])


@virtual
async def test_a_load_that_follows_at_once_is_not_taken_for_ended() -> None:
    loop, again = asyncio.get_running_loop(), FakeCache()
    again.more.clear()
    begun: list[asyncio.Task[None]] = []

    def step() -> None:
        assert told(loads) == (set(), {"a"})
        begun.append(loads.start("a", cast(kvcs.Cache, again), [6]))

    def store(block_id: int, tensors: Any) -> None:
        if (block_id, tensors.index) == (5, 1):  # the last one: the load ends in this step
            loop.call_soon(step)

    loads = BlockLoads(store)
    first = loads.start("a", cast(kvcs.Cache, FakeCache()), [5])
    await first
    [second] = begun
    assert told(loads) == (set(), set())
    again.more.set()
    await second
    assert told(loads) == (set(), {"a"})


@virtual
async def test_two_requests_that_share_blocks_are_both_told() -> None:
    loads = BlockLoads(Memory().store)
    for name in ("a", "b"):
        cache = FakeCache()
        cache.missing.add((1, 0))
        await loads.start(name, cast(kvcs.Cache, cache), [5, 6, 7])
    assert told(loads) == ({5}, {"a", "b"})

"""Loads of retrieved caches into an engine's paged memory, and what the engine must not use of it.

An engine that lets a connector load KV blocks asks it in each step which requests are loaded, and
which blocks must be computed after all (vLLM calls that `get_finished` and
`get_block_ids_with_load_errors`). `BlockLoads` answers both; a connector passes the calls on.
Nothing here knows an engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from kvcs.errors import KvcsError, UsageError
from kvcs.kv import LayerTensors
from kvcs.observe import get_logger
from kvcs.subscriber import Cache

_log = get_logger("kvcs.integrations")

StoreBlock = Callable[[int, LayerTensors], None]
"""Copies one layer of one block, [block_tokens, kv_heads, head_dim], into the engine's block of the
given ID. It may raise; the block then counts as not loaded."""


class BlockLoads:
    """Loads caches into an engine's blocks; a block that was not loaded whole is always told.

    A block counts as loaded once every selected layer of it was stored. `start` belongs to the
    event loop; the two questions may come from any thread.

    Args:
        store: copies what was verified into the engine's memory.
    """

    def __init__(self, store: StoreBlock) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: dict[str, set[int]] = {}
        """Requests whose load has ended and was not told, and their blocks that are not there and
        were not told either."""
        self.failures: dict[str, Exception] = {}
        """Why the load of a request is not whole, until it was told as finished."""

    def start(
        self, request_id: str, cache: Cache, block_ids: Sequence[int], *, drop: bool = False
    ) -> asyncio.Task[None]:
        """Begin to load an opened cache.

        Args:
            request_id: the engine's.
            cache: stays open until the returned task has ended.
            block_ids: the engine's block for each block of the prefix, from its start; those that
                the publication does not cover are told as not loaded.
            drop: let go of each whole layer once it was stored (`Cache.drop`): for a cache that is
                larger than memory, or than `SubscriberSettings.held_octets`.

        Returns:
            The load; it never raises. Cancelled, it tells what it has not loaded.

        Raises:
            UsageError: the request has a load that was not told as finished.
        """
        with self._lock:
            if request_id in self._tasks or request_id in self._ended:
                raise UsageError(f"request {request_id!r} is being loaded already")
            task = asyncio.get_running_loop().create_task(
                self._load(request_id, cache, block_ids, drop)
            )
            self._tasks[request_id] = task
        # A task that is cancelled before its first step runs nothing of its own.
        task.add_done_callback(lambda done: self._end(request_id, done, set(block_ids)))
        return task

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not loaded, of every load that has ended since the last call."""
        with self._lock:
            bad = {block_id for each in self._ended.values() for block_id in each}
            for block_ids in self._ended.values():
                block_ids.clear()
        return bad

    def get_finished(self) -> set[str]:
        """Requests whose load has ended, each once, and never before its bad blocks were told."""
        with self._lock:
            finished = {request_id for request_id, untold in self._ended.items() if not untold}
            for request_id in finished:
                del self._ended[request_id]
                self.failures.pop(request_id, None)
        return finished

    async def _load(
        self, request_id: str, cache: Cache, block_ids: Sequence[int], drop: bool
    ) -> None:
        left = {block: set(cache.layers) for block in range(len(block_ids))}
        try:
            try:
                async for layer in cache:
                    self._store_layer(cache, layer.index, block_ids, left)
                    if drop:
                        cache.drop(layer.index)
            except KvcsError as exc:
                # What was verified of layers that are not whole is as good as the rest.
                self.failures[request_id] = exc
                for index in cache.layers:
                    self._store_layer(cache, index, block_ids, left)
        except Exception as exc:
            # Whatever the engine's memory does to us: its blocks are told, and computed.
            self.failures[request_id] = exc
            _log.warning("block_load_failed", request=request_id, why=f"{type(exc).__name__}")
        finally:
            bad = {block_ids[block] for block, layers in left.items() if layers}
            self._end(request_id, asyncio.current_task(), bad)

    def _store_layer(
        self, cache: Cache, index: int, block_ids: Sequence[int], left: dict[int, set[int]]
    ) -> None:
        for block in range(min(cache.blocks, len(block_ids))):
            if index not in left[block]:
                continue
            try:
                tensors = cache.block(index, block)
            except KvcsError:
                continue  # it lacks, and stays in what is left
            self._store(block_ids[block], tensors)
            left[block].discard(index)

    def _end(self, request_id: str, task: asyncio.Task[None] | None, bad: set[int]) -> None:
        with self._lock:
            # Once a load was told as finished, the request may have another one.
            if self._tasks.get(request_id) is task:
                del self._tasks[request_id]
                self._ended[request_id] = bad

"""Iterating over the layers of an opened publication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcs.kv import LayerTensors


class Source(Protocol):
    """Gives layers one by one; the `Cache`."""

    async def layer(self, index: int) -> LayerTensors:
        """Wait for one layer."""

    async def complete(self) -> None:
        """Wait until all is there and confirmed."""


class Layers:
    """Iterates over the layers of a cache, in order, each as soon as it is whole.

    Not a generator: one that is left half-way would be closed by the loop, later, in a task.

    Args:
        indices: the layers.
        source: gives them.
    """

    def __init__(self, indices: Sequence[int], source: Source) -> None:
        self._source = source
        self._left = iter(indices)

    def __aiter__(self) -> Layers:
        return self

    async def __anext__(self) -> LayerTensors:
        for index in self._left:
            return await self._source.layer(index)
        await self._source.complete()
        raise StopAsyncIteration

"""Who waits for what of one retrieval, and whether anything was handed out."""

from __future__ import annotations

import asyncio

from kvcs.errors import KvcsError
from kvcs.kv import LayerTensors, Ledger
from kvcs.subscriber.kept import KeptLayers


class Readers:
    """The waiters of one retrieval.

    Args:
        ledger: holds the layers.

    Attributes:
        kept: which layers they need still.
        completion: done once all is there and confirmed, or with what went wrong.
        settled: done once it is known how many tokens the retrieval has.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.kept = KeptLayers(ledger)
        self._loop = asyncio.get_running_loop()
        self.completion: asyncio.Future[None] = self._loop.create_future()
        self.settled: asyncio.Future[int] = self._loop.create_future()
        self.handed_out = False
        """Whether anybody was given a layer: what it came from cannot be replaced any more."""
        self._waiters: dict[int, list[asyncio.Future[LayerTensors]]] = {}

    @property
    def waited_for(self) -> list[int]:
        """Layers that somebody waits for."""
        return list(self._waiters)

    def wait_for(self, index: int) -> asyncio.Future[LayerTensors]:
        """A future of a layer that is not whole yet; `forget` it."""
        future: asyncio.Future[LayerTensors] = self._loop.create_future()
        self._waiters.setdefault(index, []).append(future)
        return future

    def forget(self, index: int, future: asyncio.Future[LayerTensors]) -> None:
        """Nobody waits for a future any more."""
        waiters = self._waiters.get(index, [])
        if future in waiters:
            waiters.remove(future)
            if not waiters:
                del self._waiters[index]
        if future.done() and not future.cancelled():
            future.exception()  # retrieved: whoever waited may have been cancelled

    def hand_out(self, tensors: LayerTensors) -> LayerTensors:
        """Give a layer to everybody who waits for it, and to the caller."""
        self.handed_out = True
        for future in self._waiters.pop(tensors.index, ()):
            if not future.done():
                future.set_result(tensors)
        return tensors

    def release(self, error: KvcsError) -> None:
        """Nobody needs to wait any longer."""
        waiters, self._waiters = self._waiters, {}
        for futures in waiters.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        for waited in (self.completion, self.settled):
            if not waited.done():
                waited.set_exception(error)
                waited.exception()  # retrieved: nobody has to wait for it

"""`Cache`: one opened publication; hands out verified layers as they become whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from kvcs.errors import (
    KvcsError,
    MissingBlocks,
    PublicationAborted,
    PublicationError,
    UsageError,
)
from kvcs.kv import LayerTensors, Manifest, Prefix
from kvcs.moqt.names import TrackNamespace
from kvcs.quic.connection import Connection
from kvcs.subscriber.facts import progress_of, report_of
from kvcs.subscriber.layers import Layers
from kvcs.subscriber.report import CacheProgress, CacheReport
from kvcs.subscriber.retrieval import Retrieval

T = TypeVar("T")


class Cache:
    """An opened publication of a prefix; `Subscriber.open` gives it.

        async for layer in cache:            # verified, in order, as each becomes whole
            attend(layer.index, layer.k, layer.v)

    Iterating ends once every selected layer was handed out and the newest manifest has confirmed
    all of them; it raises what `layer` and `complete` raise. Several may read one retrieval: what
    fails there fails for each of them.

    Layers stay until the cache is closed, or until they are dropped:

        async for layer in cache:            # a cache larger than memory
            upload(layer.index, layer.k, layer.v)
            cache.drop(layer.index)

    Args:
        retrieval: where layers come from.
        prefix: the consumer's prefix.
        deadline_at: when its own waits end, in the loop's clock.
        seconds: how long that was when it was opened.
    """

    def __init__(
        self,
        retrieval: Retrieval,
        prefix: Prefix,
        deadline_at: float,
        seconds: float,
    ) -> None:
        self.prefix = prefix
        """The consumer's prefix."""
        self.namespace: TrackNamespace = retrieval.namespace
        """Track Namespace of the publication."""
        loop = asyncio.get_running_loop()
        self._retrieval = retrieval
        self._deadline_at, self._seconds = deadline_at, seconds
        self._error: KvcsError | None = None
        self._dropped: set[int] = set()
        retrieval.readers.kept.join(self)
        self._over: asyncio.Future[None] = loop.create_future()
        """Done once this reader waits no longer, whatever the others do."""
        self._timer = loop.call_at(deadline_at, self._deadline_passed)

    # What a consumer calls

    async def layer(self, index: int) -> LayerTensors:
        """Wait for one layer.

        Returns:
            Its tensors, [tokens, kv_heads, head_dim] of the descriptor's dtype, read-only.

        Raises:
            UsageError: the layer was not selected, or was dropped.
            CacheIncomplete: it did not become whole before the deadline, recovery failed, the
                session ended or the peer allows it no longer (`__cause__` says why), or the cache
                was closed.
            PublicationAborted: the producer gave the publication up.
            PublicationError: the publication contradicts itself.

        A layer that is whole is returned whatever happened to others, unless the publication
        contradicted itself.
        """
        if index in self._dropped:
            raise UsageError(f"layer {index} was dropped")
        whole = self._retrieval.ready(index)
        if whole is not None:
            return whole
        future = self._retrieval.readers.wait_for(index)
        try:
            return await self._first(future)
        finally:
            self._retrieval.readers.forget(index, future)

    def layer_now(self, index: int) -> LayerTensors | None:
        """One layer, if it is whole already, may be handed out and was not dropped; waits for
        nothing.

        Raises:
            UsageError: it was not selected.
            KvcsError: it will never be whole; as `layer`.
        """
        return None if index in self._dropped else self._retrieval.ready(index)

    def __aiter__(self) -> AsyncIterator[LayerTensors]:
        """Every selected layer, in order, each as soon as it is whole; then `complete`."""
        return Layers(self.layers, self)

    def drop(self, index: int) -> None:
        """Let go of a layer that was used: `layer` and iterating give it no more.

        Its memory is free as soon as nobody holds its tensors: neither the caller, whose loop's
        variable does until the next layer is there, nor another reader of the same retrieval. What
        was verified stays so in `usable_tokens`, `progress` and `report`. Does nothing twice.

        Args:
            index: a layer that is whole.

        Raises:
            UsageError: the layer was not selected or is not whole yet, or the cache was closed.
        """
        self._retrieval.readers.kept.drop(self, index)
        self._dropped.add(index)

    async def complete(self) -> None:
        """Wait until every selected layer is whole and the manifest says that its segments are.

        Raises:
            KvcsError: as `layer`.
        """
        await self._first(self._retrieval.readers.completion)

    def block(self, layer: int, block: int) -> LayerTensors:
        """One verified block of a layer that never became whole: what was verified stays usable.

        Args:
            layer: the layer.
            block: index of the block, from the start of the context.

        Returns:
            Its tensors, [block_tokens, kv_heads, head_dim], read-only.

        Raises:
            UsageError: the retrieval goes on and the layer is not whole yet, or the block is not
                selected or among `missing`.
            PublicationError: the publication contradicts itself.
        """
        try:
            goes_on = self._retrieval.ready(layer) is None and not self._retrieval.is_over
        except UsageError:
            raise
        except KvcsError as exc:
            if isinstance(exc, PublicationError) and not isinstance(exc, PublicationAborted):
                raise
            goes_on = False
        if goes_on:
            raise UsageError(f"layer {layer} is not whole yet; wait for it, or for what goes wrong")
        return self._retrieval.ledger.block(layer, block)

    async def settled(self) -> int:
        """Wait until it is known how many blocks the retrieval has; `blocks` is final then.

        That is at once unless the publication is still produced and covers less than the prefix.

        Returns:
            Tokens that every layer has, or will have.

        Raises:
            KvcsError: as `layer`.
        """
        return await self._first(self._retrieval.readers.settled)

    # Facts

    @property
    def connection(self) -> Connection:
        """The session that serves the retrieval, or did last."""
        return self._retrieval.connection

    @property
    def manifest(self) -> Manifest:
        """Newest manifest that was applied."""
        return self._retrieval.manifest

    @property
    def layers(self) -> tuple[int, ...]:
        """Selected layers, ascending."""
        return tuple(self._retrieval.ledger.layers)

    @property
    def blocks(self) -> int:
        """Selected blocks, from the start of the context: no more than the publication covers of
        the prefix, as soon as that is known."""
        return self._retrieval.ledger.blocks

    @property
    def usable_tokens(self) -> int:
        """Tokens from the start that are verified in every selected layer."""
        return self._retrieval.ledger.usable_tokens()

    @property
    def missing(self) -> tuple[MissingBlocks, ...]:
        """What lacks now, in runs of blocks, by segment, layer and component."""
        return self._retrieval.ledger.missing()

    @property
    def progress(self) -> CacheProgress:
        """How far the retrieval is."""
        return progress_of(self._retrieval)

    @property
    def report(self) -> CacheReport:
        """What the retrieval was, so far."""
        return report_of(self._retrieval)

    # What the Subscriber calls

    def close(self) -> None:
        """Read no more; waiters get what went wrong, or that the cache was closed."""
        self._timer.cancel()
        self._retrieval.readers.kept.leave(self)
        if self._error is None:
            self._end("the cache was closed")

    # Inner workings

    def _deadline_passed(self) -> None:
        # Where nobody has more time, the retrieval's own deadline is this one.
        if self._deadline_at < self._retrieval.deadline_at and not self._retrieval.is_over:
            self._end(f"the deadline of {self._seconds:g} s passed")

    def _end(self, reason: str) -> None:
        self._error = self._retrieval.incomplete(reason)
        self._over.set_result(None)

    async def _first(self, future: asyncio.Future[T]) -> T:
        """What a future of the retrieval gives, unless this reader's own end comes before."""
        if not future.done():
            await asyncio.wait((future, self._over), return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            return future.result()
        assert self._error is not None  # it is over
        raise self._error

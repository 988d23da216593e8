"""Retrievals that several readers of one process share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from contextlib import asynccontextmanager
from typing import Any

from kvcs.errors import PublicationNotFound
from kvcs.subscriber.retrieval import Retrieval

Open = Callable[[], Coroutine[Any, Any, Retrieval]]
"""Finds a publication and starts its retrieval."""


class _Shared:
    """One retrieval, or the search for one, and how many want it."""

    def __init__(self, opening: Coroutine[Any, Any, Retrieval], deadline_at: float) -> None:
        self.task = asyncio.get_running_loop().create_task(opening)
        self.deadline_at = deadline_at
        self.readers = 0

    @property
    def is_of_use(self) -> bool:
        """Whether one more reader may join."""
        if not self.task.done():
            return True
        if self.task.cancelled() or self.task.exception() is not None:
            return False
        retrieval = self.task.result()
        return not (retrieval.failed_or_closed or retrieval.readers.kept.too_late)

    async def opened(self, deadline_at: float) -> Retrieval:
        """The retrieval.

        Raises:
            PublicationNotFound: not in this reader's time.
            KvcsError: what opening it raised, for every reader.
        """
        patience = None
        if deadline_at < self.deadline_at:
            patience = deadline_at - asyncio.get_running_loop().time()
        await asyncio.wait((self.task,), timeout=patience)
        if not self.task.done():
            raise PublicationNotFound("unknown whether the prefix is published: the time is up")
        return self.task.result()

    async def end(self) -> None:
        """Nobody wants it any more."""
        if self.task.done():
            _close(self.task)  # at once: whoever leaves may be cancelled in any wait
            return
        self.task.add_done_callback(_close)
        self.task.cancel()
        await asyncio.wait((self.task,))


def _close(task: asyncio.Task[Retrieval]) -> None:
    """Close what a search has found that nobody wants any more."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()


class Sharing:
    """The retrievals of one Subscriber, by what is retrieved."""

    def __init__(self) -> None:
        self._shared: dict[Hashable, _Shared] = {}

    @asynccontextmanager
    async def join(
        self, key: Hashable, open_one: Open, deadline_at: float
    ) -> AsyncIterator[Retrieval]:
        """Read a retrieval that is under way, or a new one; the last who leaves closes it.

        Args:
            key: whoever gives the same wants the same.
            open_one: begins a new one.
            deadline_at: when this reader's time is up, in the loop's clock.

        Raises:
            KvcsError: what opening it raised.
        """
        while True:
            shared = self._shared.get(key)
            if shared is None or not shared.is_of_use:
                shared = self._shared[key] = _Shared(open_one(), deadline_at)
            shared.readers += 1
            try:
                try:
                    retrieval = await shared.opened(deadline_at)
                except PublicationNotFound:
                    now = asyncio.get_running_loop().time()
                    if shared.deadline_at <= now < deadline_at:
                        continue  # it was another reader's time that is up
                    raise
                if retrieval.readers.kept.too_late:
                    continue  # another reader was so fast
                retrieval.extend(deadline_at)
                yield retrieval
                return
            finally:
                shared.readers -= 1
                if not shared.readers:
                    if self._shared.get(key) is shared:
                        del self._shared[key]
                    await shared.end()

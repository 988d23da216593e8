"""Between a model's thread and the event loop: layers one way, waits for layers the other.

A model computes for seconds without ever awaiting, so it runs in a thread of its own while the loop
serves the network. The thread blocks where it has to: on a hand-over while too many layers are on
their way, or on a layer that is still on the wire. Nothing here knows an engine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from kvcs.errors import KvcsError, UsageError
from kvcs.kv import LayerTensors

T = TypeVar("T")

DEFAULT_AHEAD = 2
"""Layers that a model may be ahead of their publication; each is held until it is copied."""

LIVENESS_SECONDS = 0.5
"""How often a waiting thread looks whether its event loop still runs."""


class HandOverEnded(KvcsError):
    """The model's thread was told to stop, or its event loop has ended."""


class TakesLayers(Protocol):
    """What layers are handed to; `kvcs.Segment` is one."""

    async def put(self, layer: int, k: object, v: object = None, *, lend: bool = False) -> None:
        """Publish one layer."""


class GivesLayers(Protocol):
    """What layers come from; `kvcs.Cache` is one."""

    async def layer(self, index: int) -> LayerTensors:
        """Wait for one layer."""


class LoopBridge:
    """Lets one thread wait for coroutines on the event loop that made the bridge.

    Every wait ends: by the coroutine's result or exception, by `stop`, or because the loop no
    longer runs.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._lock = threading.Lock()
        self._running: set[concurrent.futures.Future[Any]] = set()
        self._stopped: str | None = None

    def start(self, body: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop, in the order of the calls.

        Raises:
            UsageError: called in the loop's own thread, which could never go on.
            HandOverEnded: `stop` was called, or the loop is closed.
        """
        try:
            if threading.get_ident() == self._loop_thread:
                raise UsageError(
                    "the model runs in the event loop's own thread, where it would wait for"
                    " itself; run it in another one, for example by asyncio.to_thread"
                )
            with self._lock:
                if self._stopped is not None:
                    raise HandOverEnded(self._stopped)
                future = asyncio.run_coroutine_threadsafe(body, self._loop)
                self._running.add(future)
        except BaseException as exc:
            body.close()
            if isinstance(exc, RuntimeError):
                raise HandOverEnded("the event loop has ended") from exc
            raise
        future.add_done_callback(self._forget)
        return future

    def wait(self, future: concurrent.futures.Future[T]) -> T:
        """Block the model's thread until a started coroutine has ended.

        Raises:
            HandOverEnded: `stop` was called, or the loop no longer runs.
            Exception: what the coroutine raised.
        """
        while True:
            try:
                return future.result(LIVENESS_SECONDS)
            except concurrent.futures.CancelledError:
                raise HandOverEnded(self._stopped or "the event loop has ended") from None
            except TimeoutError:
                # The coroutine's own TimeoutError is a result; ours means that there is none yet.
                if future.done():
                    return future.result()
                if not self._loop.is_running():
                    raise HandOverEnded("the event loop has ended") from None

    def stop(self, reason: str) -> None:
        """Make every wait, now and later, raise `HandOverEnded`; from any thread."""
        with self._lock:
            self._stopped = self._stopped or reason
            running = list(self._running)
        for future in running:
            future.cancel()

    def _forget(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._running.discard(future)


class Outlet:
    """Hands layers from a model's thread to a segment, a bounded number at a time.

    Args:
        ahead: layers that may be on their way; one more waits for the oldest.

    Raises:
        UsageError: `ahead` is less than 1.
    """

    def __init__(self, ahead: int = DEFAULT_AHEAD) -> None:
        if ahead < 1:
            raise UsageError(f"ahead must be at least 1, not {ahead}")
        self._ahead = ahead
        self._bridge = LoopBridge()
        self._pending: deque[concurrent.futures.Future[None]] = deque()

    def hand_over(self, to: TakesLayers, layer: int, k: object, v: object) -> None:
        """Give one layer away; called in the model's thread.

        The arrays must stay as they are until `finish` returns or a later hand-over has waited for
        them; a model that makes new tensors for each layer does so anyway.

        Raises:
            UsageError: called in the event loop's thread.
            HandOverEnded: `stop` was called, or the loop has ended.
            KvcsError: what publishing an earlier layer raised.
        """
        while self._pending and (len(self._pending) >= self._ahead or self._pending[0].done()):
            self._bridge.wait(self._pending.popleft())
        self._pending.append(self._bridge.start(to.put(layer, k, v)))

    async def finish(self) -> None:
        """Wait until every layer that was handed over is published.

        Raises:
            KvcsError: what publishing one of them raised, the first of these.
        """
        while self._pending:
            await asyncio.wrap_future(self._pending.popleft())

    def stop(self, reason: str) -> None:
        """Take no more layers; what is on its way is given up."""
        self._bridge.stop(reason)


class Inlet:
    """Waits in a model's thread for layers that come over the network.

    Args:
        source: an opened cache; its deadline bounds every wait.
    """

    def __init__(self, source: GivesLayers) -> None:
        self._source = source
        self._bridge = LoopBridge()

    def layer(self, index: int) -> LayerTensors:
        """Block until a layer is verified; called in the model's thread.

        Raises:
            UsageError: called in the event loop's thread.
            HandOverEnded: `stop` was called, or the loop has ended.
            KvcsError: what `kvcs.Cache.layer` raises, its deadline included.
        """
        return self._bridge.wait(self._bridge.start(self._source.layer(index)))

    def stop(self, reason: str) -> None:
        """Wait for no more layers."""
        self._bridge.stop(reason)


async def run_in_thread(function: Callable[[], T], stop: Callable[[str], None]) -> T:
    """Run a model's synchronous code in a thread of its own.

    The loop's common threads are not used: a publisher hashes large layers in those, and models
    that fill them all would wait for what has no thread left to run in.

    Args:
        function: what the thread runs.
        stop: called when this is cancelled; it must make `function` end soon.

    Cancelling waits until the thread has ended, which takes a model up to the time of one layer.
    """
    executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kvcs-model")
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(executor, lambda: context.run(function))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stop("the wait for the model was cancelled")
        await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # retrieved: the cancellation is what the caller gets
        raise
    finally:
        executor.shutdown(wait=False)

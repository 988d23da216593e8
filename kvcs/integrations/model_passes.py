"""Passes of a model in a thread: each runs from one lost layer to the next, and waits there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvcs.integrations.handover import HandOverEnded

KEEP_SECONDS = 5.0
"""How long a pass that has reached a lost layer stands there, for the next one that is lost."""

States = tuple[Any, Any]
"""Keys and values of a pass in one layer, as the model has them."""


class Turns:
    """Lets a pass of a model run from one lost layer to the next, and stand still between.

    The model's thread calls `reached`, everybody else `ask` and `stop`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reply: Future[States] | None = None
        self._target = -1
        self._stopped = False
        self._over = False

    def ask(self, layer: int) -> Future[States] | None:
        """Go on to a layer behind those that were reached; None where the pass has ended."""
        with self._changed:
            if self._over or self._stopped:
                return None
            self._target, self._reply = layer, Future()
            self._reply.set_running_or_notify_cancel()  # who waits may leave; it stays ours
            self._changed.notify_all()
            return self._reply

    def stop(self) -> None:
        """End the pass at its next layer."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def reached(self, layer: int, keys: Any, values: Any) -> None:
        """The model has a layer's keys and values: give them, if they were asked for, and wait.

        Raises:
            HandOverEnded: nothing more is wanted of the pass.
        """
        with self._changed:
            if layer == self._target and self._reply is not None:
                reply, self._reply = self._reply, None
                reply.set_result((keys, values))
            if self._reply is None:
                self._changed.wait_for(
                    lambda: self._stopped or self._reply is not None, KEEP_SECONDS
                )
            if self._stopped or self._reply is None:
                self._over = True
                raise HandOverEnded("no further layer is wanted")

    def end(self, error: BaseException | None) -> None:
        """The model has returned, or raised something."""
        with self._changed:
            self._over = True
            reply, self._reply = self._reply, None
        if reply is not None:
            reply.set_exception(error or HandOverEnded("the pass has ended"))


class RunningPass:
    """One pass over some tokens, which gives the layers that it is asked for, in order.

    Args:
        start: position of its first token.
        end: position behind its last one.
        run: computes; it calls `Turns.reached` at every layer.
    """

    def __init__(self, start: int, end: int, run: Callable[[Turns], None]) -> None:
        self.start = start
        self.end = end
        self.reached = -1
        """Layer that it was asked for last."""
        self._turns = Turns()
        self._run = run
        self._thread = threading.Thread(target=self._body, name="kvcs-recompute", daemon=True)
        self._thread_started = False

    def covers(self, layer: int, first: int, end: int) -> bool:
        """Whether it can still give some tokens of a layer."""
        return self.reached < layer and self.start <= first and end <= self.end

    async def layer(self, layer: int) -> States | None:
        """Keys and values of a layer; None where the pass has ended meanwhile.

        Cancelling ends the pass.

        Raises:
            Exception: what the model raised.
        """
        reply = self._turns.ask(layer)
        if reply is None:
            return None
        self.reached = layer
        if not self._thread_started:
            self._thread_started = True
            self._thread.start()
        try:
            return await asyncio.wrap_future(reply)
        except asyncio.CancelledError:
            self._turns.stop()
            raise

    def stop(self) -> None:
        """End it at its next layer."""
        self._turns.stop()

    def _body(self) -> None:
        error: BaseException | None = None
        try:
            self._run(self._turns)
        except BaseException as exc:  # whoever waits gets it
            error = exc
        self._turns.end(error)

"""Calls of the relay's core at a later time; one that is cancelled keeps nothing alive."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

Callback = Callable[[float], None]
"""Called with the time."""

CANCELLED_KEPT = 64
"""Cancelled timers kept beyond as many as are live, before they are swept out."""


class Timer:
    """One call to come."""

    __slots__ = ("_timers", "callback")

    def __init__(self, timers: Timers, callback: Callback) -> None:
        self._timers = timers
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """Call nothing; quiet where it was called or cancelled already."""
        if self.callback is not None:
            self.callback = None
            self._timers.cancelled()


class Timers:
    """Calls to come, in order of their times."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._serial = 0
        self._cancelled = 0

    def __len__(self) -> int:
        """Timers that are kept, some cancelled ones included."""
        return len(self._heap)

    def at(self, when: float, callback: Callback) -> Timer:
        """Call ``callback`` with the time, at ``when`` or soon after."""
        self._serial += 1
        timer = Timer(self, callback)
        heappush(self._heap, (when, self._serial, timer))
        return timer

    def next(self) -> float | None:
        """When `run` wants to be called."""
        while self._heap and self._heap[0][2].callback is None:
            heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def run(self, now: float) -> None:
        """Make the calls that are due."""
        while self._heap and self._heap[0][0] <= now:
            timer = heappop(self._heap)[2]
            callback, timer.callback = timer.callback, None
            if callback is None:
                self._cancelled -= 1
            else:
                callback(now)

    def cancelled(self) -> None:
        """One of them was cancelled: sweep them out once they are the greater part."""
        self._cancelled += 1
        if self._cancelled > len(self._heap) // 2 + CANCELLED_KEPT:
            self._heap = [entry for entry in self._heap if entry[2].callback is not None]
            heapify(self._heap)
            self._cancelled = 0

"""Whose turn it is to FETCH on one session: those who wait come in turns, not in one line."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator

from kvcs.relay.timers import Callback

Owner = object
"""Whoever has something fetched; told apart by identity."""


class Turns:
    """FETCHes of ours on one session: some run, the others wait for their turn.

    Args:
        most: FETCHes that run at a time.
        share: how many of them may be one owner's.
    """

    def __init__(self, most: int, share: int) -> None:
        self._most = most
        self._share = share
        self._waiting: OrderedDict[Owner, deque[Callback]] = OrderedDict()
        self._running: Counter[Owner] = Counter()
        self._starting = False
        """Whether they are being started."""

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Callback]:
        """Those that wait; changes meanwhile do not matter."""
        return iter([start for starts in self._waiting.values() for start in starts])

    @property
    def running(self) -> int:
        """How many run."""
        return self._running.total()

    def take(self, owner: Owner, start: Callback, now: float) -> None:
        """Call ``start`` once a FETCH for ``owner`` may run: at once, or when others have ended."""
        if self._may_run(owner):
            self._running[owner] += 1
            start(now)
        else:
            self._waiting.setdefault(owner, deque()).append(start)

    def free(self, owner: Owner, now: float) -> None:
        """A FETCH for ``owner`` has ended; the next ones begin, of each owner in its turn."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        if self._starting:
            return  # one that was started has ended at once: the loop below goes on
        self._starting = True
        try:
            while (next_owner := next(filter(self._may_run, self._waiting), None)) is not None:
                starts = self._waiting[next_owner]
                start = starts.popleft()
                if starts:
                    self._waiting.move_to_end(next_owner)
                else:
                    del self._waiting[next_owner]
                self._running[next_owner] += 1
                start(now)
        finally:
            self._starting = False

    def leave(self, start: Callback) -> None:
        """One that waits is not wanted any more; quiet where it has begun."""
        for owner, starts in self._waiting.items():
            if start in starts:
                starts.remove(start)
                if not starts:
                    del self._waiting[owner]
                return

    def _may_run(self, owner: Owner) -> bool:
        return self.running < self._most and self._running[owner] < self._share

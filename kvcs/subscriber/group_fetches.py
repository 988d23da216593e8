"""Asking Group by Group where a peer takes no FETCH that spans several (MOQT 9.11, 9.4).

A publisher may refuse a FETCH as NOT_SUPPORTED for its length alone; there are servers that do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvcs.errors import UsageError
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.names import Location
from kvcs.recovery import FetchEnd
from kvcs.subscriber.requests import Handler

MAX_AT_A_TIME = 4
"""FETCHes of one track that run at a time; a publisher takes 16 of one subscriber."""

Ask = Callable[[range, Location | None, Handler], None]
"""Makes a FETCH of some layers, from a Location on if it names one."""

Take = Callable[[events.Event, FetchEnd], None]
"""Takes an event of a FETCH and tells how its stream ended."""


class GroupByGroup:
    """One FETCH of several Groups, made anew as a FETCH for each of them, in order.

    Args:
        layers: what is wanted, ascending.
        start: where to begin within the first of them; None for its first Object.
        ask: makes a FETCH.
        take: takes its events.
        ended: told once, when all have ended: what went wrong last, or None.
    """

    def __init__(
        self, layers: range, start: Location | None, ask: Ask, take: Take, ended: FetchEnd
    ) -> None:
        self._several = len(layers) > 1
        self._left: Iterator[int] = iter(layers)
        self._first: Location | None = start
        self._ask = ask
        self._take = take
        self._ended = ended
        self._running = 0
        self._failure: str | None = None

    def is_called_for(self, event: events.Event) -> bool:
        """Whether an event refuses the FETCH of all because it spans several Groups."""
        return (
            self._several
            and isinstance(event, events.RequestRefused)
            and event.error.error_code == RequestCode.NOT_SUPPORTED
        )

    def start(self, watched: Callable[[Handler], Handler]) -> None:
        """Begin; ``watched`` wraps the handler of the first FETCH, whose answer counts for all."""
        self._next(watched)
        for _ in range(MAX_AT_A_TIME - 1):
            self._next()

    def _next(self, watched: Callable[[Handler], Handler] = lambda handler: handler) -> None:
        group = next(self._left, None)
        if group is None:
            return
        self._running += 1
        first, self._first = self._first, None

        def over(failure: str | None) -> None:
            self._running -= 1
            self._failure = failure or self._failure
            self._next()
            if self._running == 0:
                self._ended(self._failure)

        def deliver(event: events.Event) -> None:
            if isinstance(event, events.SessionClosed):
                self._left = iter(())
            self._take(event, over)

        try:
            self._ask(range(group, group + 1), first, watched(deliver))
        except UsageError as exc:  # the session takes no more requests
            self._left = iter(())
            over(str(exc))

"""A subscriber of one Track by MOQT alone: Next Object, and a fill from the start."""

from __future__ import annotations

import asyncio
from collections import Counter

import kvcs
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.objects import ObjectStatus, RangeKind
from kvcs.moqt.parameters import Parameters

JOIN = Parameters.of(
    location_filter=LocationFilter.next_object(),
    fill_parameters=Parameters.of(location_filter=LocationFilter.absolute_start(0, 0)),
)
"""The two requests of a join at any moment: together they cover each Object once."""


class Joined:
    """What one subscription brought."""

    def __init__(self) -> None:
        self.counts: Counter[Location] = Counter()
        """How often each Object with a payload came whole."""

        self.cut_short = False
        """Whether a stream was reset, or a range was marked unknown."""

        self.failure: str | None = None
        """Why the subscription ended otherwise than with its Track."""

        self.over = asyncio.Event()
        self._open: dict[int, Location] = {}
        self._streams: set[int] = set()
        self._done = False

    def take(self, event: events.Event) -> None:
        """One event of the request."""
        if isinstance(event, events.DataStreamOpened):
            self._streams.add(event.stream_id)
        elif isinstance(event, events.ObjectStarted):
            if event.header.status is ObjectStatus.NORMAL:
                self._open[event.stream_id] = event.header.location
        elif isinstance(event, events.ObjectEnded):
            location = self._open.pop(event.stream_id, None)
            if location is not None:
                self.counts[location] += 1
        elif isinstance(event, events.RangeMarked):
            self.cut_short = self.cut_short or event.kind is not RangeKind.NON_EXISTENT
        elif isinstance(event, events.DataStreamEnded):
            self._streams.discard(event.stream_id)
            self._open.pop(event.stream_id, None)
            self.cut_short = self.cut_short or event.reset_code is not None
        elif isinstance(event, events.SubscriptionEnded):
            self._done = True
            if event.status != PublishDoneCode.TRACK_ENDED:
                self.failure = f"the subscription ended with {event.status:#x}"
        elif isinstance(event, events.SessionClosed):
            self.failure = "the session was closed"
        elif isinstance(event, events.RequestCancelled | events.TrackMalformed):
            self.failure = type(event).__name__
        if self.failure or (self._done and not self._streams):
            self.over.set()


async def join(session: kvcs.Connection, name: FullTrackName, seconds: float) -> Joined:
    """Subscribe to a Track and take all of it, for at most so many seconds.

    Raises:
        RequestError: it was refused.
        ConnectionClosed: the session ended before the answer.
        TimeoutError: the time is up.
    """
    joined = Joined()
    session.check_open()
    request_id = session.core.requester.subscribe(name, JOIN)
    session.handle(request_id, joined.take)
    try:
        async with asyncio.timeout(seconds):
            await session.reply(request_id)
            await joined.over.wait()
    finally:
        session.cancel(request_id)
    return joined

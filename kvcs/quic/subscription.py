"""Following one Track: whole Objects from a subscription, as an asynchronous iterator (MOQT §3).

::

    async with subscribe(session, name) as track:
        async for item in track:
            print(item.location, item.payload)

A Track that the peer publishes by itself is followed in the same way::

    async for offered in session.tracks.watch((b"news",)):
        with take(offered) as track:
            ...
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvcs.contexts import entered_by
from kvcs.errors import KvcsError, StreamError
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, StreamCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.messages import SubscribeOk
from kvcs.moqt.names import FullTrackName, Location, check_our_track
from kvcs.moqt.objects import ObjectHeader, RangeKind
from kvcs.moqt.parameters import Parameters
from kvcs.quic.connection import Connection
from kvcs.quic.tracks import OfferedTrack

MIB: Final = 2**20

MAX_WAITING_OCTETS: Final = 16 * MIB
"""Octets of Objects that wait to be taken, those on their way in included; then it is too slow."""

OBJECT_COST: Final = 256
"""Octets that each waiting Object counts beside its payload and its Properties: empty ones must not
pile up."""


@dataclass(frozen=True, slots=True)
class ReceivedObject:
    """One whole Object."""

    header: ObjectHeader
    """Its fields."""

    payload: bytes
    """Its payload; empty where `ObjectHeader.status` is not NORMAL."""

    @property
    def location(self) -> Location:
        """Group ID and Object ID."""
        return self.header.location


@dataclass(slots=True)
class _Arriving:
    """An Object on its way in."""

    header: ObjectHeader
    payload: bytearray = field(default_factory=bytearray)


class Subscription:
    """A running subscription; `subscribe` makes it.

    Iterating gives Objects in the order in which they become whole, those of the fill among live
    ones, and ends with the Track. Streams are independent: order is kept inside a Subgroup only.
    """

    def __init__(self, connection: Connection, name: FullTrackName, max_octets: int) -> None:
        self.name = name
        """The Track."""
        self.reply: SubscribeOk | None = None
        """SUBSCRIBE_OK: Track Properties, and the Largest Object when the subscription began; None
        where the publisher began it."""
        self.lost = 0
        """Streams that were reset or never came, and ranges whose Objects the peer did not get:
        what was on them may be fetched."""
        self._connection = connection
        self._max_octets = max_octets
        self._octets = 0
        self._arriving: dict[int, _Arriving] = {}
        self._streams: set[int] = set()
        self._whole: deque[ReceivedObject] = deque()
        self._more = asyncio.Event()
        self._done = False
        self._error: KvcsError | None = None

    def __aiter__(self) -> Subscription:
        """Itself."""
        return self

    async def __anext__(self) -> ReceivedObject:
        """The next whole Object.

        Raises:
            StreamError: the publisher ended the subscription before the Track, the Track is
                malformed, or Objects wait faster than they are taken.
            ConnectionClosed: the session ended.

        Cancelling loses nothing.
        """
        while not self._whole:
            if self._error is not None:
                raise self._error
            if self._done and not self._streams:
                raise StopAsyncIteration
            self._more.clear()
            await self._more.wait()
        item = self._whole.popleft()
        self._octets -= len(item.payload) + _cost(item.header)
        return item

    def take(self, event: events.Event) -> None:
        """One event of the request."""
        if isinstance(event, events.ObjectsReceived):
            for single in event.singles():
                self._take_object(single)
        elif isinstance(event, events.DataStreamOpened):
            self._streams.add(event.stream_id)
        elif isinstance(event, events.DataStreamEnded):
            self._stream_ended(event)
        elif isinstance(event, events.DatagramReceived):
            self._datagram(event)
        else:
            self._take_end(event)
        self._more.set()

    def _take_object(self, event: events.Event) -> None:
        if self._error is not None:
            return  # of what comes now some octets were not kept
        if isinstance(event, events.ObjectStarted):
            self._arriving[event.stream_id] = _Arriving(event.header)
            self._count(_cost(event.header))
        elif isinstance(event, events.ObjectChunk):
            arriving = self._arriving.get(event.stream_id)
            if arriving is not None and self._count(len(event.data)):
                arriving.payload += event.data
        elif isinstance(event, events.ObjectEnded):
            arriving = self._arriving.pop(event.stream_id, None)
            if arriving is not None:
                self._whole.append(ReceivedObject(arriving.header, bytes(arriving.payload)))
        elif isinstance(event, events.RangeMarked) and event.kind is not RangeKind.NON_EXISTENT:
            self.lost += 1

    def _stream_ended(self, event: events.DataStreamEnded) -> None:
        self._streams.discard(event.stream_id)
        self.lost += event.reset_code is not None
        arriving = self._arriving.pop(event.stream_id, None)
        if arriving is not None:
            self._octets -= len(arriving.payload) + _cost(arriving.header)

    def _datagram(self, event: events.DatagramReceived) -> None:
        item = event.datagram
        header = ObjectHeader(
            item.group_id,
            item.object_id,
            None,
            item.publisher_priority,
            item.status,
            item.properties,
            len(item.payload),
        )
        if self._count(len(item.payload) + _cost(header)):
            self._whole.append(ReceivedObject(header, bytes(item.payload)))

    def _take_end(self, event: events.Event) -> None:
        if isinstance(event, events.SubscriptionEnded):
            self._done = True
            self.lost += not event.every_stream_seen
            if event.status != PublishDoneCode.TRACK_ENDED:
                why = f": {event.reason}" if event.reason else ""
                self._fail(StreamError(f"the publisher ended the subscription{why}", event.status))
        elif isinstance(event, events.TrackMalformed):
            self._fail(StreamError(f"the track is malformed: {event.reason}"))
        elif isinstance(event, events.SessionClosed):
            self._fail(self._connection.close_error())
        elif isinstance(event, events.RequestCancelled):
            self._fail(StreamError("the peer ended the subscription", StreamCode.CANCELLED))

    def _count(self, octets: int) -> bool:
        """Count octets that wait; False where they are too many."""
        if self._error is not None:
            return False
        self._octets += octets
        if self._octets > self._max_octets:
            self._fail(StreamError(f"more than {self._max_octets} octets wait to be taken"))
            return False
        return True

    def _fail(self, error: KvcsError) -> None:
        if self._error is None:
            self._error = error
            self._arriving.clear()


def _cost(header: ObjectHeader) -> int:
    """Octets that a waiting Object counts beside its payload."""
    return OBJECT_COST + len(header.properties)


@contextmanager
def take(offered: OfferedTrack, *, max_octets: int = MAX_WAITING_OCTETS) -> Iterator[Subscription]:
    """Follow a Track that the peer publishes by itself (§9.8); leaving the context cancels it.

    It begins with the next Object; `OfferedTrack.parameters` has the Largest Object before it, and
    a `subscribe` or FETCH brings what is older. Where the publisher has paused it (FORWARD 0),
    ``session.core.requester.update`` resumes it.

    Args:
        offered: what `TrackWatch` gives.
        max_octets: what may wait to be taken before the subscription ends as too slow.

    Yields:
        The `Subscription`.
    """
    connection = offered.connection
    subscription = Subscription(connection, offered.name, max_octets)
    request_id = offered.accept(subscription.take)
    try:
        yield subscription
    finally:
        connection.cancel(request_id)


@entered_by("async with subscribe(...) as subscription:")
async def subscribe(
    connection: Connection,
    name: FullTrackName,
    *,
    fill: bool = True,
    parameters: Parameters | None = None,
    max_octets: int = MAX_WAITING_OCTETS,
) -> AsyncIterator[Subscription]:
    """Follow a Track; leaving the context cancels the subscription.

    With ``fill`` it begins with the Track's first Object: what was published before comes on a fill
    stream, what is published from now on live, and each Object once (§3.4). Without, it begins with
    the next one.

    Args:
        connection: what `connect` gives.
        name: the Track.
        fill: whether Objects that were published before are wanted, too.
        parameters: of SUBSCRIBE, instead of those that ``fill`` stands for.
        max_octets: what may wait to be taken before the subscription ends as too slow.

    Yields:
        The `Subscription`, once the peer has accepted it.

    Raises:
        RequestError: the peer refused it.
        ConnectionClosed: the session ended.
        UsageError: the name cannot be sent.
    """
    check_our_track(name)
    if parameters is None:
        parameters = Parameters.of(location_filter=LocationFilter.next_object())
        if fill:
            everything = Parameters.of(location_filter=LocationFilter.absolute_start(0, 0))
            parameters = parameters.replace(fill_parameters=everything)
    connection.check_open()
    subscription = Subscription(connection, name, max_octets)
    request_id = connection.core.requester.subscribe(name, parameters)
    connection.handle(request_id, subscription.take)
    try:
        reply = await connection.reply(request_id)
        assert isinstance(reply, SubscribeOk)  # a SUBSCRIBE has no other answer
        subscription.reply = reply
        yield subscription
    finally:
        connection.cancel(request_id)

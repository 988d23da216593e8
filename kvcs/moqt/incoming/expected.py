"""What data streams may belong to: subscriptions and fetches, and how they are told apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvcs.moqt.events import Event
from kvcs.moqt.filters import Range
from kvcs.moqt.incoming.rules import TrackRules
from kvcs.moqt.names import FullTrackName, GroupOrder, Location
from kvcs.moqt.objects import Item, ObjectChunk, ObjectEnded, ObjectHeader, ObjectStarted

MAX_SHARED_PLACES = 4096
"""Streams and datagrams remembered of each subscription that shares its Track Alias with another
one, to give each its own; the oldest are forgotten."""


_ENDED = ObjectEnded()


class ObjectSink(Protocol):
    """Takes the Objects of a request's streams as they come, without an event for each datagram.

    Streams begin and end with their events as ever. While any event waits to be delivered, what
    comes is an event behind it, so the order is the same: an Object may begin in an event and go
    on here.
    """

    def take_items(self, stream_id: int, items: list[Item]) -> None:
        """What one input brought on a stream; see `kvcs.moqt.events.ObjectsReceived`."""

    def take_payload(self, stream_id: int, data: bytes) -> None:
        """Octets of the Object that began last on a stream, and not the last ones of it."""

    def take_run(
        self,
        stream_id: int,
        like: ObjectHeader,
        first: Location,
        data: bytes | memoryview,
        stop: int,
        lead: int,
        count: int,
    ) -> None:
        """The last octets of the Object that began last on a stream, and the next ones like it.

        Each of them begins where the one before ends.

        Args:
            stream_id: the stream.
            like: header of an Object before, which is that of each of them but for its place.
            first: Location of the first of them; it is the one behind the Object that ends.
            data: the octets as they came; a view must be one of single octets.
            stop: the Object ends before this position; it had at least one octet left.
            lead: octets of the header in front of each payload.
            count: how many they are, at least 1; of the last one there is at least one octet of
                payload in ``data``, and nothing behind it.
        """


@dataclass(slots=True, eq=False)
class Expected:
    """A subscription or fetch that data streams may belong to."""

    request_id: int
    full_track_name: FullTrackName
    group_order: GroupOrder
    """Group Order of the request; a fill of it may have its own."""

    rules: TrackRules
    filtered: bool = False
    """Whether range filters leave Objects out: then FIN does not tell which one is the last."""

    span: Range | None = None
    """What its Location Filter lets through, where that is known: tells it from another
    subscription with the same Track Alias."""

    updated: bool = False
    """Whether an update has changed its Location Filter."""

    sink: ObjectSink | None = None
    """Takes its Objects; None where they are events."""

    harmless: bytes = b""
    """Object Properties of its that were read last and told of no gap: most often all Objects have
    the same."""

    open_streams: set[int] = field(default_factory=set)
    streams_seen: int = 0
    places: dict[tuple[int, int], int] = field(default_factory=dict)
    """How often each Subgroup's stream, or each Location's datagram, was given to it; kept only
    while the Track Alias is shared."""

    def may_have(self, group_id: int, object_id: int | None = None) -> bool:
        """Whether its Location Filter lets anything of a Group, or an Object of it, through."""
        span = self.span
        if span is None:
            return True
        if object_id is not None:
            return Location(group_id, object_id) in span
        return span.start.group <= group_id and (span.end is None or group_id <= span.end.group)

    def note(self, place: tuple[int, int]) -> None:
        """A stream or datagram of ``place`` is its own."""
        self.places[place] = self.places.get(place, 0) + 1
        if len(self.places) > MAX_SHARED_PLACES:
            del self.places[next(iter(self.places))]


def as_items(
    like: ObjectHeader,
    first: Location,
    data: bytes | memoryview,
    stop: int,
    lead: int,
    count: int,
) -> list[Item]:
    """What `ObjectSink.take_run` is told, as the items that a parser would have given.

    ``stop`` and ``count`` may be 0 here: an Object that is all there and has not ended, and no
    other one.
    """
    view, size = memoryview(data), len(data)
    items: list[Item] = [ObjectChunk(view[:stop])] if stop else []
    items.append(_ENDED)
    group_id, object_id = first
    subgroup_id, priority, length = like.subgroup_id, like.publisher_priority, like.payload_length
    for number in range(object_id, object_id + count):
        begin = stop + lead
        stop = begin + length
        header = ObjectHeader(
            group_id, number, subgroup_id, priority, like.status, like.properties, length
        )
        items += (ObjectStarted(header), ObjectChunk(view[begin:stop]))
        if stop <= size:
            items.append(_ENDED)
    return items


class ReceiverHost(Protocol):
    """What the session offers to the receiving side."""

    def emit(self, event: Event) -> None:
        """Report an event."""

    def has_events(self) -> bool:
        """Whether an event waits to be delivered."""

    def stop_stream(self, stream_id: int, code: int) -> None:
        """STOP_SENDING a stream."""

    def track_malformed(self, expected: Expected, reason: str) -> None:
        """Cancel all that was asked of a malformed Track, and report it."""

    def stream_ended(self, expected: Expected) -> None:
        """One of a request's streams ended."""


def choose(
    bound: list[Expected], place: tuple[int, int], group_id: int, object_id: int | None = None
) -> Expected:
    """Which of several subscriptions with one Track Alias a stream or datagram belongs to.

    An Object is sent once for each subscription that wants it (§3.1.3), and looks the same: each
    gets its own in turn, those that cannot want it none.
    """
    able = [expected for expected in bound if expected.may_have(group_id, object_id)] or bound
    chosen = min(able, key=lambda expected: expected.places.get(place, 0))
    chosen.note(place)
    return chosen

"""Objects that go to a sink instead of into events (MOQT §11)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcs.moqt.errors import StreamCode
from kvcs.moqt.events import (
    DataStreamEnded,
    DataStreamOpened,
    Event,
    ObjectsReceived,
    ObjectStarted,
)
from kvcs.moqt.incoming.expected import as_items
from kvcs.moqt.names import Location
from kvcs.moqt.objects import Item, ObjectHeader
from kvcs.moqt.objects import ObjectChunk as Chunk
from kvcs.moqt.objects import ObjectEnded as Ended
from kvcs.moqt.objects import ObjectStarted as Started
from kvcs.moqt.parameters import Parameters
from kvcs.testing.pair import SessionPair
from kvcs.testing.tracks import NAME, payload, put, track
from tests.unit.moqt.subscriptions import serve

OCTETS = 40


class Recorder:
    """A sink that keeps what it gets, and what comes in events."""

    def __init__(self) -> None:
        self.whole: dict[Location, bytes] = {}
        self.payload_calls = self.run_calls = 0
        self.on_start: Callable[[Location], None] | None = None
        self._current: dict[int, tuple[Location, bytearray]] = {}

    def take(self, event: Event) -> None:
        if isinstance(event, ObjectsReceived):
            self.take_items(event.stream_id, event.items)

    def take_items(self, stream_id: int, items: list[Item]) -> None:
        for item in items:
            if isinstance(item, Started):
                self._current[stream_id] = (item.header.location, bytearray())
                if self.on_start is not None:
                    self.on_start(item.header.location)
            elif isinstance(item, Chunk):
                self._current[stream_id][1].extend(item.data)
            elif isinstance(item, Ended):
                location, data = self._current.pop(stream_id)
                self.whole[location] = bytes(data)

    def take_payload(self, stream_id: int, data: bytes) -> None:
        self.payload_calls += 1
        if stream_id in self._current:
            self._current[stream_id][1].extend(data)

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
        self.run_calls += 1
        self.take_items(stream_id, as_items(like, first, data, stop, lead, count))


def followed(piece: int) -> tuple[SessionPair, Recorder, int]:
    """A subscription whose Objects go to a sink, with an Object before and three behind."""
    pair, source, sink = SessionPair(piece=piece), track(), Recorder()
    serve(pair, source)
    request_id = pair.client.core.requester.subscribe(NAME, Parameters())
    pair.client.core.receptions.sink_to(request_id, sink)
    pair.client.on_batch = sink.take
    pair.run()
    put(source, 1, 0, octets=OCTETS)
    pair.run()
    for object_id in (1, 2, 3):
        put(source, 1, object_id, octets=OCTETS)
    source.finish_subgroup(1, 0)
    return pair, sink, request_id


@pytest.mark.parametrize("piece", [1, 3, 17, OCTETS, 1 << 20])
def test_a_sink_and_events_share_out_what_comes(piece: int) -> None:
    pair, sink, _ = followed(piece)
    pair.run()
    events = pair.client.events
    assert sink.whole == {
        Location(1, object_id): payload(Location(1, object_id), OCTETS) for object_id in range(4)
    }
    # Behind the event that opens the stream, in one input with it, Objects are events.
    in_events = [event.header.location for event in events if isinstance(event, ObjectStarted)]
    assert in_events == ([] if piece == 1 else [Location(1, 0)])
    assert (sink.payload_calls > 0) == (piece < OCTETS)
    # A piece that ends one Object and begins the next, with all of the header in between.
    assert (sink.run_calls > 0) == (piece in (17, OCTETS))
    assert len(pair.client.of(DataStreamOpened)) == 1
    assert [event.reset_code for event in pair.client.of(DataStreamEnded)] == [None]


def test_what_comes_while_events_wait_is_an_event_behind_them() -> None:
    pair, sink, _ = followed(1 << 20)
    core, heard = pair.client.core, []
    pair.client.on_batch = lambda event: heard.append(type(event))
    stream = pair.client.of(DataStreamOpened)[0].stream_id
    core.emit(DataStreamEnded(99, 99, None))
    core.receive_stream_data(stream, bytes((0, OCTETS)) + bytes(5), False, 0.0)
    core.receive_stream_data(stream, bytes(6), False, 0.0)
    core.receive_stream_data(stream, bytes(OCTETS - 11) + bytes((0, OCTETS)) + bytes(5), False, 0.0)
    assert not sink.payload_calls and not sink.run_calls
    pair.client.drain_events()
    assert heard == [DataStreamEnded, ObjectsReceived, ObjectsReceived, ObjectsReceived]
    core.receive_stream_data(stream, bytes(7), False, 0.0)
    assert sink.payload_calls == 1 and not core.has_events()


@pytest.mark.parametrize("piece", [3, 1 << 20])
def test_a_sink_may_be_taken_away(piece: int) -> None:
    """What comes from then on is events again."""
    pair, sink, request_id = followed(piece)

    def leave(location: Location) -> None:
        if location.object == 2:
            pair.client.core.receptions.sink_to(request_id, None)

    sink.on_start = leave
    pair.run()
    assert sink.whole == {
        Location(1, object_id): payload(Location(1, object_id), OCTETS) for object_id in range(4)
    }
    later = [event.header.location.object for event in pair.client.of(ObjectStarted)][1:]
    assert later == ([3] if piece < OCTETS else [])  # one input had brought the last three


@pytest.mark.parametrize("piece", [3, 1 << 20])
def test_a_sink_may_cancel_its_request(piece: int) -> None:
    pair, sink, request_id = followed(piece)

    def cancel(location: Location) -> None:
        if location.object == 2:
            pair.client.core.requester.cancel(request_id)

    sink.on_start = cancel
    pair.run()
    assert Location(1, 3) not in sink.whole or piece > OCTETS
    assert not pair.client.core.closed and not pair.client.of(DataStreamEnded)
    stops = [action for action in pair.client.actions if "StopSending" in repr(action)]
    assert all(StreamCode.CANCELLED == action.code for action in stops)
    assert pair.client.core.data_streams.next_timer() is None


def test_a_sink_that_fails_closes_the_session_and_tells_no_details() -> None:
    pair, sink, _ = followed(3)

    def fail(location: Location) -> None:
        raise RuntimeError("a secret")

    sink.on_start = fail
    pair.run()
    assert isinstance(pair.client.core.failure, RuntimeError)
    assert pair.client.core.closed and pair.server.core.closed

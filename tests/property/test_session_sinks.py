"""Whole sessions whose Objects go to sinks: the same comes, in the same order, as in events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcs.moqt.events import DataStreamOpened, Event, ObjectsReceived
from kvcs.moqt.incoming.expected import as_items
from kvcs.moqt.names import Location
from kvcs.moqt.objects import Item, ObjectChunk, ObjectHeader
from kvcs.testing.pair import End
from kvcs.testing.tracks import joined
from tests.property.session_world import STEPS, World

ALIKE = [40, 340, 640, 940]
"""Numbers with which an Object of 40 octets is published."""
LIKELY = ["answer", "subscribe", "answer", "fetch", "run"]

steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([*STEPS, *LIKELY]), st.integers(0, 10_000), st.booleans()),
        st.tuples(st.just("publish"), st.sampled_from(ALIKE), st.booleans()),
    ),
    min_size=20,
    max_size=80,
)


class AsEvents:
    """A sink that notes what it gets as if events had brought it."""

    def __init__(self, end: End, request_id: int) -> None:
        self._end = end
        self._request_id = request_id

    def take_items(self, stream_id: int, items: list[Item]) -> None:
        came = ObjectsReceived(self._request_id, stream_id, items)
        self._end.events.extend(came.singles())

    def take_payload(self, stream_id: int, data: bytes) -> None:
        self.take_items(stream_id, [ObjectChunk(memoryview(data))])

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
        self.take_items(stream_id, as_items(like, first, data, stop, lead, count))


def with_sinks(world: World) -> World:
    """Every request gets a sink when the first of its streams begins."""
    for side in world.sides:
        _give_sinks(side.end)
    return world


def _give_sinks(end: End) -> None:
    note = end.on_event
    assert note is not None  # each side notes what it is asked

    def noted(event: Event) -> None:
        note(event)
        if isinstance(event, DataStreamOpened):
            sink = AsEvents(end, event.request_id)
            end.core.receptions.sink_to(event.request_id, sink)

    end.on_event = noted


@settings(max_examples=40, deadline=None)
@given(steps, st.sampled_from([3, 17, 25, 41, 1 << 30]))
def test_sinks_and_events_bring_the_same(what: list[tuple[str, int, bool]], piece: int) -> None:
    plain, sunk = World(piece), with_sinks(World(piece))
    for step in what:
        plain.do(*step)
        sunk.do(*step)
    for world in (plain, sunk):
        world.close_down()
    for one, other in zip(plain.sides, sunk.sides, strict=True):
        assert joined(one.end.events) == joined(other.end.events)
        assert one.end.actions == other.end.actions
        assert one.end.core.failure is other.end.core.failure is None
    assert sunk.left_over() == {}

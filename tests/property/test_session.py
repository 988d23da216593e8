"""Whole sessions: nothing outlives what it was for, and no cut of the octets shows."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcs.moqt import messages as m
from kvcs.moqt.actions import Action, StopSending
from kvcs.moqt.events import (
    DataStreamEnded,
    DataStreamOpened,
    Event,
    ObjectEnded,
    TrackMalformed,
)
from kvcs.moqt.names import GroupOrder, Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus, RangeKind
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.settings import Role
from kvcs.moqt.streams import SubgroupHeader
from kvcs.testing.bench import Bench
from kvcs.testing.pair import End
from kvcs.testing.tracks import NAME, fetch_stream, joined, subgroup_stream
from tests.property.session_world import STEPS, World

LIKELY = ["answer", "publish", "subscribe", "answer", "publish", "fetch", "run"]
steps = st.lists(
    st.tuples(st.sampled_from([*STEPS, *LIKELY]), st.integers(0, 10_000), st.booleans()),
    min_size=20,
    max_size=80,
)


@settings(max_examples=100)
@given(steps, st.sampled_from([1, 3, 1 << 30]))
def test_nothing_is_left_of_any_run(what: list[tuple[str, int, bool]], piece: int) -> None:
    world = World(piece)
    for step in what:
        world.do(*step)
    world.close_down()
    for end in (world.pair.client, world.pair.server):
        if end.core.failure is not None:
            raise end.core.failure
        assert not end.core.closed, end.actions[-1]
        assert end.of(TrackMalformed) == []
    assert world.left_over() == {}


@settings(max_examples=30)
@given(steps, st.integers(1, 9))
def test_every_cut_of_the_octets_gives_the_same_events(
    what: list[tuple[str, int, bool]], piece: int
) -> None:
    whole, cut = World(), World(piece)
    for step in what:
        whole.do(*step)
        cut.do(*step)
    for world in (whole, cut):
        world.close_down()
    for one, other in zip(whole.sides, cut.sides, strict=True):
        assert joined(one.end.events) == joined(other.end.events)
        assert acted(one.end) == acted(other.end)


def acted(end: End) -> list[Action]:
    """What an end did, but for stopping data streams: one that is whole needs no stop."""
    return [
        action
        for action in end.actions
        if not (isinstance(action, StopSending) and action.stream_id & 2)
    ]


# Streams that are cut and interleaved in any way

END = ObjectHeader(0, 3, 0, 0, ObjectStatus.END_OF_GROUP)
PROPERTIES = ObjectHeader(1, 0, 0, 0, properties=b"\x78\x05", payload_length=8)
STREAMS = [
    subgroup_stream(SubgroupHeader(9, 0, 0, 0, end_of_group=True), 0, 1, 2, END),
    subgroup_stream(SubgroupHeader(9, 1, 0, 0, has_properties=True), PROPERTIES),
    subgroup_stream(SubgroupHeader(9, 2, 0, 0), 0, 200, octets=300),
    fetch_stream(2, Location(0, 0), Location(0, 1), (RangeKind.UNKNOWN, Location(4, 0))),
    bytes.fromhex("f0132b3e28") + bytes(20),
]


def receiver() -> Bench:
    bench = Bench(Role.CLIENT)
    bench.core.requester.subscribe(NAME, Parameters())
    bench.core.requester.fetch(NAME, Parameters.of(group_order=GroupOrder.ASCENDING))
    bench.drain()
    bench.say(0, m.SubscribeOk(9, Parameters(), KeyValues()))
    bench.say(4, m.FetchOk(False, Location(9, 9), Parameters(), KeyValues()))
    bench.events.clear()
    return bench


def by_stream(events: list[Event]) -> dict[int, list[object]]:
    """Events of each stream, each payload made one."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        found[event.stream_id].append(event)  # type: ignore[union-attr]
    return {stream_id: joined(seen) for stream_id, seen in found.items()}


def deliver_whole() -> dict[int, list[object]]:
    bench = receiver()
    for octets in STREAMS:
        bench.uni(octets, fin=True)
    return by_stream(bench.events)


@settings(max_examples=25)
@given(st.data())
def test_streams_may_be_cut_and_mixed_in_any_way(data: st.DataObject) -> None:
    bench = receiver()
    ids = [bench.uni(b"") for _ in STREAMS]
    left = dict(zip(ids, STREAMS, strict=True))
    while left:
        stream_id = data.draw(st.sampled_from(sorted(left)))
        size = data.draw(st.integers(1, 40))
        octets, left[stream_id] = left[stream_id][:size], left[stream_id][size:]
        last = not left[stream_id]
        bench.data(stream_id, octets, fin=last and data.draw(st.booleans()))
        if last:
            bench.data(stream_id, b"", fin=True)
            del left[stream_id]
    assert by_stream(bench.events) == deliver_whole()


def test_a_cut_at_every_octet_gives_the_same_events() -> None:
    """The kind of report "one send gives one event": every offset of a stream in turn."""
    expected = deliver_whole()
    for index, octets in enumerate(STREAMS):
        for offset in range(len(octets) + 1):
            bench = receiver()
            for number, other in enumerate(STREAMS):
                stream_id = bench.uni(
                    other[:offset] if number == index else other, fin=number != index
                )
                if number == index:
                    bench.data(stream_id, octets[offset:], fin=True)
            assert by_stream(bench.events) == expected


def test_the_cost_of_a_stream_grows_with_its_length_only() -> None:
    """Work is counted, not timed: events and octets held for 1,200-octet pieces of one Object."""
    for size in (100_000, 1_000_000):
        bench = receiver()
        octets = subgroup_stream(SubgroupHeader(9, 7, 0, 0), 0, octets=size)
        stream_id = bench.uni(octets[:1200])
        for at in range(1200, len(octets), 1200):
            bench.core.receive_stream_data(stream_id, octets[at : at + 1200], False, 0.0)
            assert bench.core.data_streams._streams[stream_id].early == b""
        bench.drain()
        pieces = -(-len(octets) // 1200)
        assert pieces <= len(bench.events) <= pieces + 3
        assert len(bench.take(ObjectEnded)) == 1
        assert bench.take(DataStreamEnded) == []
        assert len(bench.take(DataStreamOpened)) == 1

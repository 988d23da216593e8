"""What comes to a relay without events ends as what comes in them, whatever its publishers send.

Every world runs twice: once as it is, where Objects go from upstream streams straight to their
Track, and once where every input of a stream is parsed as a whole and comes as an event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcs.errors import UsageError
from kvcs.moqt.actions import Send, StopSending
from kvcs.moqt.data import SubgroupEncoder, SubgroupHeader
from kvcs.moqt.events import DataStreamEnded, DataStreamOpened, Event
from kvcs.moqt.incoming.receptions import Receptions
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.track.live import LiveStream
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import FIRST_PART_OCTETS, StoredObject
from kvcs.relay.cache import TRACK_OCTETS
from kvcs.relay.inflow import Inflow
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import ConsumerPeer, PublisherPeer
from kvcs.testing.hub import Hub, Spoke
from kvcs.testing.tracks import objects, payload, put

OCTETS = 40
BIG = 4000
"""How many times larger everything is on some streams: Objects then have several parts."""
FIRST_STREAM = 1002
GROUPS = 3

PROPERTIES = {
    "none": b"",
    "harmless": KeyValues.of({0x1230: 5}).write(),
    "gap": KeyValues.of({Property.PRIOR_OBJECT_ID_GAP: 1}).write(),
}


@dataclass(frozen=True)
class Item:
    """One Object of a stream, most often the one behind the one before."""

    skip: int = 0
    octets: int = OCTETS
    other: bool = False
    """Whether its payload is not what others send at its Location."""
    status: ObjectStatus = ObjectStatus.NORMAL
    properties: str = "none"


@dataclass(frozen=True)
class Stream:
    """One subgroup stream of one publisher: what is on it, how it is cut and how it ends."""

    publisher: int
    group: int
    first: int
    items: tuple[Item, ...]
    subgroup: int | None
    priority: int | None
    with_properties: bool
    end_of_group: bool
    scale: int
    flip: tuple[int, int] | None
    cuts: tuple[int, ...]
    end: str


ITEMS = st.one_of(
    st.just(Item()),
    st.just(Item()),
    st.just(Item(properties="harmless")),
    st.builds(
        Item,
        skip=st.sampled_from([0, 0, 0, 1]),
        octets=st.sampled_from([OCTETS, OCTETS, OCTETS - 1, OCTETS + 1, 0]),
        other=st.sampled_from([False, False, True]),
        status=st.sampled_from(
            [ObjectStatus.NORMAL] * 4 + [ObjectStatus.END_OF_GROUP, ObjectStatus.END_OF_TRACK]
        ),
        properties=st.sampled_from(sorted(PROPERTIES)),
    ),
)

STREAMS = st.builds(
    Stream,
    publisher=st.integers(0, 1),
    group=st.sampled_from([1, 1, 1, 2]),
    first=st.sampled_from([0, 0, 0, 1, 2]),
    items=st.one_of(
        st.lists(ITEMS, min_size=1, max_size=6).map(tuple),
        st.sampled_from(["none", "harmless"]).map(lambda p: (Item(properties=p),) * 6),
        st.sampled_from([(Item(),) * 14, (Item(),) * 9 + (Item(other=True),) * 4]),
    ),
    subgroup=st.sampled_from([0, 0, 0, 1, None]),
    priority=st.sampled_from([None, None, 9]),
    with_properties=st.booleans(),
    end_of_group=st.booleans(),
    scale=st.sampled_from([1, 1, BIG]),
    flip=st.none() | st.none() | st.tuples(st.integers(0, 300), st.integers(1, 255)),
    cuts=st.lists(
        st.integers(1, 90) | st.integers(20, 44) | st.integers(90, 500), min_size=1, max_size=5
    ).map(tuple),
    end=st.sampled_from(["fin", "fin alone", "reset", "open"]),
)

STEPS = st.one_of(
    st.tuples(st.just("piece"), st.integers(0, 3)),
    st.tuples(st.just("piece"), st.integers(0, 3)),
    st.tuples(st.just("piece"), st.integers(0, 3)),
    st.tuples(
        st.sampled_from(["join", "fetch", "leave", "evict", "wait", "stall", "vanish"]),
        st.integers(0, 3),
    ),
)


@dataclass(frozen=True)
class World:
    """All that happens at one relay to one Track."""

    streams: tuple[Stream, ...]
    steps: tuple[tuple[str, int], ...]
    cache_octets: int
    max_object_octets: int
    past: int
    """Objects of Group 0 that the first publisher has from the start."""
    piece: int


WORLDS = st.builds(
    World,
    streams=st.lists(STREAMS, min_size=1, max_size=3).map(tuple),
    steps=st.lists(STEPS, max_size=30).map(tuple),
    cache_octets=st.sampled_from(
        [1 << 40, 1 << 40, TRACK_OCTETS + 6000, TRACK_OCTETS + 5 * FIRST_PART_OCTETS]
    ),
    max_object_octets=st.sampled_from([1 << 40, 1 << 40, OCTETS, BIG * OCTETS]),
    past=st.sampled_from([0, 0, 5]),
    piece=st.sampled_from([1 << 30, 57]),
)


class Relay:
    """A relay with two publishers of one Track and those who take it."""

    def __init__(self, world: World) -> None:
        self.world = world
        limits = RelayLimits(
            cache_octets=world.cache_octets, max_object_octets=world.max_object_octets
        )
        self.hub = Hub(limits, piece=world.piece)
        self.publishers = [PublisherPeer(self.hub), PublisherPeer(self.hub)]
        self.tracks = [publisher.track() for publisher in self.publishers]
        for block in range(world.past):
            put(self.tracks[0], 0, block, octets=OCTETS)
        self.consumers: list[ConsumerPeer] = []
        self.join()
        self.pieces = [self.cut(number, stream) for number, stream in enumerate(world.streams)]

    def join(self) -> None:
        """One more consumer, with all of the past."""
        consumer = ConsumerPeer(self.hub)
        self.consumers.append(consumer)
        consumer.subscribe()

    def run(self) -> Relay:
        """Let everything happen, in the world's order; what is left of the streams at the end."""
        for step, number in self.world.steps:
            self.take(step, number)
        while any(self.pieces):
            self.take("piece", 0)
        self.hub.advance(0.5)
        return self

    def take(self, step: str, number: int) -> None:
        hub, consumer = self.hub, self.consumers[number % len(self.consumers)]
        if step == "piece":
            left = [pieces for pieces in self.pieces if pieces]
            if left:
                left[number % len(left)].pop(0)()
        elif step == "join" and len(self.consumers) < 4:
            self.join()
        elif step == "fetch" and not consumer.end.core.closed:
            try:
                consumer.fetch()
            except UsageError:
                pass  # none may be asked for any more
        elif step == "leave":
            for request in consumer.end.core.requests.all():
                consumer.cancel(request.request_id)
        elif step == "evict":
            track = self.hub.core.cache.open(self.tracks[0].name).track
            track.evict_group(number % GROUPS)
        elif step == "wait":
            hub.advance((0.001, 0.1, 1.5, 7)[number])
        elif step == "stall":
            relay = consumer.spoke.relay
            relay.credit.object_octets = 0 if relay.credit.object_octets else 1 << 60
            relay.core.receive_credit()
            hub.run()
        elif step == "vanish" and number < 2 and not self.publishers[number].spoke.lost:
            self.publishers[number].vanish()

    def cut(self, number: int, stream: Stream) -> list[Callable[[], None]]:
        """The inputs that one stream is to the relay."""
        header = SubgroupHeader(
            0,
            stream.group,
            stream.subgroup,
            stream.priority,
            end_of_group=stream.end_of_group,
            first_object=stream.first == 0,
            has_properties=stream.with_properties,
        )
        data = octets_of(stream, header)
        if stream.end == "reset":
            data = data[: len(data) * 2 // 3]
        pieces, at, turn = [header.encode()], 0, 0
        while at < len(data):
            size = stream.cuts[turn % len(stream.cuts)] * stream.scale
            pieces.append(data[at : at + size])
            at, turn = at + size, turn + 1
        if stream.end == "fin alone":
            pieces.append(b"")
        stream_id, spoke = FIRST_STREAM + 4 * number, self.publishers[stream.publisher].spoke
        fin = stream.end.startswith("fin")

        def giving(piece: bytes, last: bool) -> Callable[[], None]:
            return lambda: self.receive(spoke, stream_id, piece, last)

        steps = [giving(piece, fin and turn == len(pieces)) for turn, piece in enumerate(pieces, 1)]
        if stream.end == "reset":
            steps.append(lambda: self.reset(spoke, stream_id))
        return steps

    def receive(self, spoke: Spoke, stream_id: int, data: bytes, fin: bool) -> None:
        spoke.relay.core.receive_stream_data(stream_id, data, fin, self.hub.now)
        spoke.relay.drain_events()
        self.hub.run()

    def reset(self, spoke: Spoke, stream_id: int) -> None:
        spoke.relay.core.receive_reset(stream_id, 1, self.hub.now)
        spoke.relay.drain_events()
        self.hub.run()

    # What came of it

    def state(self) -> dict[str, object]:
        """All that anybody can see, and what a later input is held against."""
        stats, cache = self.hub.core.snapshot(), self.hub.core.cache
        entry = cache.get(self.tracks[0].name)
        relays = [spoke.relay for spoke in self.hub.spokes]
        return {
            "consumers": [came(consumer.end.events) for consumer in self.consumers],
            "stats": {each.name: getattr(stats, each.name) for each in fields(stats)},
            "octets": cache.octets,
            "track": None if entry is None else stored(entry.track),
            "ages": None if entry is None else [age[1:] for age in entry.ages],
            "closed": [(end.core.closed, repr(end.core.failure)) for end in relays],
            "told": [
                [repr(each) for each in end.actions if not isinstance(each, Send | StopSending)]
                for end in relays
            ],
            # Of an input that is both too much and malformed, either may be said.
            "stopped": [
                {each.stream_id for each in end.actions if isinstance(each, StopSending)}
                for end in relays
            ],
            "sent": [sent(end.actions) for end in relays],
            "rules": [rules_of(publisher.spoke) for publisher in self.publishers],
        }


def octets_of(stream: Stream, header: SubgroupHeader) -> bytes:
    """A stream, behind its header; what an encoder refuses ends it."""
    encoder, data, object_id = SubgroupEncoder(header), b"", stream.first
    for item in stream.items:
        object_id += item.skip
        normal = item.status is ObjectStatus.NORMAL
        place = Location(stream.group, object_id)
        octets = payload(place, item.octets * stream.scale) if normal else b""
        if item.other and octets:
            middle = len(octets) // 2
            octets = octets[:middle] + b"~" + octets[middle + 1 :]
        properties = PROPERTIES[item.properties] if normal and stream.with_properties else b""
        made = ObjectHeader(
            *place, stream.subgroup, stream.priority, item.status, properties, len(octets)
        )
        data += encoder.object(made) + octets
        object_id += 1
    if stream.flip is not None and data:
        at, bits = stream.flip
        flipped = bytearray(data)
        flipped[at % len(data)] ^= bits
        data = bytes(flipped)
    return data


def came(events: list[Event]) -> list[object]:
    """What a consumer got: Objects with their payloads, and how streams began and ended."""
    found: list[object] = [
        (each.header, each.stream_id, bytes(each.payload), each.whole)
        for each in objects(events, None)
    ]
    found += [e for e in events if isinstance(e, DataStreamOpened | DataStreamEnded)]
    return found


def sent(actions: list[object]) -> dict[int, tuple[bytes, bool]]:
    """What went out on each stream."""
    found: dict[int, tuple[bytes, bool]] = {}
    for action in actions:
        if isinstance(action, Send):
            data, fin = found.get(action.stream_id, (b"", False))
            found[action.stream_id] = data + b"".join(action.data), fin or action.fin
    return found


def stored(track: Track) -> object:
    """What a Track holds and knows."""
    groups = {
        group_id: (
            group.octets,
            group.final,
            group.arriving,
            group.wanted,
            [
                (
                    each.header,
                    each.received,
                    each.failed,
                    each.live,
                    each.continues,
                    each.followers,
                    each.octets,
                    b"".join(each.views(0, each.received)),
                )
                for each in map(group.objects.__getitem__, group.object_ids)
            ],
            {
                number: (
                    [each.header.location for each in subgroup.objects],
                    subgroup.finished,
                    subgroup.reset_code,
                    subgroup.streams,
                )
                for number, subgroup in group.subgroups.items()
            },
        )
        for group_id, group in track.groups.items()
    }
    return (
        groups,
        track.known.ranges(),
        track.delivered.ranges(),
        (track.largest, track.final, track.ended, track.octets),
    )


def rules_of(spoke: Spoke) -> object:
    """What later Objects of one publisher are held against."""
    found = spoke.relay.core.data_streams._rules
    return [
        (
            users,
            rules.entries,
            rules._last,
            rules._end,
            {
                group_id: (g.runs._bounds, g.gaps._bounds, g.end, g.final, g.gap, g.subgroups)
                for group_id, g in rules._groups.items()
            },
        )
        for rules, users in found.values()
    ]


def both(world: World) -> tuple[Relay, Relay]:
    """The same world, as it is and with every input in events."""
    short = Relay(world).run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Receptions, "sink_to", lambda *arguments: None)
        return short, Relay(world).run()


@settings(max_examples=60, deadline=None)
@given(WORLDS)
def test_both_ways_end_alike(world: World) -> None:
    short, in_events = both(world)
    assert short.state() == in_events.state()


def row(publisher: int, *, cut: int = 23, other: bool = False, scale: int = 1) -> Stream:
    """Six Objects of one Subgroup, one behind the other."""
    return Stream(
        publisher=publisher,
        group=1,
        first=0,
        items=(Item(),) * 3 + (Item(other=other),) * 3,
        subgroup=0,
        priority=None,
        with_properties=False,
        end_of_group=True,
        scale=scale,
        flip=None,
        cuts=(cut,),
        end="fin",
    )


@pytest.mark.parametrize("scale", [1, BIG])
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("cuts", [(23, 31), (7, 9), (130, 30), (23, 300), (90, 150)])
@pytest.mark.parametrize("order", [(0,), (0, 1), (1, 0, 0), (0, 0, 0, 1), (1,)])
def test_two_publishers_of_one_track_at_once_end_alike_both_ways(
    order: tuple[int, ...], cuts: tuple[int, int], other: bool, scale: int
) -> None:
    streams = (row(0, cut=cuts[0], scale=scale), row(1, cut=cuts[1], other=other, scale=scale))
    steps = tuple(("piece", number) for number in order * 30)
    world = World(streams, steps, 1 << 40, 1 << 40, past=0, piece=1 << 30)
    short, in_events = both(world)
    assert short.state() == in_events.state()
    assert (short.hub.core.stats.malformed > 0) == other


@pytest.mark.parametrize("cut", [7, 11, 16, 43, 100, 170])
@pytest.mark.parametrize("parts", [4, 5, 6, 7])
def test_a_cache_without_room_in_the_middle_ends_alike_both_ways(parts: int, cut: int) -> None:
    room = TRACK_OCTETS + parts * FIRST_PART_OCTETS
    world = World((row(0, cut=cut, scale=BIG),), (), room, 1 << 40, past=0, piece=1 << 30)
    short, in_events = both(world)
    assert short.state() == in_events.state()
    assert short.hub.core.stats.too_large == 1


def test_plain_streams_come_without_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is saved by a short way that nobody takes."""
    calls: list[Location] = []
    take_run = Inflow.take_run

    def noted(
        self: Inflow,
        stream_id: int,
        like: ObjectHeader,
        first: Location,
        data: bytes | memoryview,
        stop: int,
        lead: int,
        count: int,
    ) -> None:
        calls.extend(Location(first.group, first.object + number) for number in range(count))
        take_run(self, stream_id, like, first, data, stop, lead, count)

    monkeypatch.setattr(Inflow, "take_run", noted)
    relay = Relay(World((row(0),), (), 1 << 40, 1 << 40, past=0, piece=1 << 30)).run()
    assert len(calls) == 5
    assert relay.consumers[0].locations() == [Location(1, number) for number in range(6)]


@pytest.mark.parametrize("scale", [1, BIG])
@pytest.mark.parametrize("cut", [45, 90, 130, 500])
def test_objects_that_come_in_one_piece_are_taken_in_one_step(
    cut: int, scale: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    begin_run = LiveStream.begin_run

    def noted(
        self: LiveStream,
        like: ObjectHeader,
        first: Location,
        count: int,
        whole: Sequence[bytes],
        now: float,
    ) -> StoredObject | None:
        last = begin_run(self, like, first, count, whole, now)
        if last is not None:
            taken.append(count)
        return last

    monkeypatch.setattr(LiveStream, "begin_run", noted)
    stream = replace(row(0, cut=cut, scale=scale), items=(Item(),) * 14, end="fin alone")
    world = World((stream,), (), 1 << 40, 1 << 40, past=0, piece=1 << 30)
    relay = Relay(world).run()
    assert relay.consumers[0].locations() == [Location(1, number) for number in range(14)]
    # The first piece gives the Subgroup; it has to be parsed.
    assert sum(taken) >= 14 - cut // OCTETS - 1
    assert max(taken, default=0) >= min(cut // (OCTETS + 3), 2) or cut >= 500

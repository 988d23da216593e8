"""What a relay keeps in memory is what its cache counts, however small Objects are (MOQT §7)."""

from __future__ import annotations

import sys

import pytest

from kvcs.moqt.data import FetchEncoder, FetchHeader, SubgroupEncoder, SubgroupHeader
from kvcs.moqt.datagrams import ObjectDatagram
from kvcs.moqt.events import SubscribeReceived
from kvcs.moqt.incoming.receptions import Receptions
from kvcs.moqt.names import GroupOrder, Location
from kvcs.moqt.objects import ObjectHeader
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import FIRST_PART_OCTETS, OBJECT_BOOKKEEPING_OCTETS
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import payload, put

PIECE = 64_000
"""Octets of one input, about as many as a datagram has."""

LIMIT = 20_000
"""Larger Objects are not carried."""


class Scene:
    """A relay with one publisher, whose streams a test writes, and one consumer."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.hub = Hub(RelayLimits(max_object_octets=limit))
        self.publisher = PublisherPeer(self.hub)
        put(self.publisher.track(), 0, 0, octets=1)
        self.consumer = ConsumerPeer(self.hub)

    @property
    def track(self) -> Track:
        entry = self.hub.core.cache.get(full_name())
        assert entry is not None
        return entry.track

    def give(self, stream_id: int, data: bytes) -> int:
        """Octets come, and go on to the consumer; how many more refer to them than before."""
        before = sys.getrefcount(data)
        self._give(stream_id, data)
        self.hub.run()
        self.consumer.spoke.relay.actions.clear()
        return sys.getrefcount(data) - before

    def _give(self, stream_id: int, data: bytes) -> None:
        relay = self.publisher.spoke.relay
        relay.core.receive_stream_data(stream_id, data, False, self.hub.now)
        relay.drain_events()
        relay.events.clear()

    def check(self) -> None:
        """Every part refers to memory of its own, which the cache counts."""
        for group in self.track.groups.values():
            counted = 0
            for stored in group.objects.values():
                pinned = sum(len(part.obj) for part in stored.parts)
                assert pinned <= stored.octets - OBJECT_BOOKKEEPING_OCTETS
                counted += stored.octets
            assert counted <= group.octets


def subgroup_head(group: int, *lengths: int) -> tuple[bytes, list[bytes]]:
    """Header of a subgroup stream, and what goes before each payload."""
    header = SubgroupHeader(0, group, 0, 9)
    encoder = SubgroupEncoder(header)
    heads = [
        encoder.object(ObjectHeader(group, number, 0, 9, payload_length=length))
        for number, length in enumerate(lengths)
    ]
    return header.encode(), heads


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("octets", [1, 40, 31_000])
def test_small_objects_do_not_keep_the_pieces_in_which_they_came(
    octets: int, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sinks:
        monkeypatch.setattr(Receptions, "sink_to", lambda *arguments: None)
    scene = Scene()
    request_id = scene.consumer.subscribe()
    count = 3 * PIECE // octets if octets > 40 else 60
    begin, heads = subgroup_head(1, *[octets] * count)
    body = b"".join(
        head + payload(Location(1, number), octets) for number, head in enumerate(heads)
    )
    assert scene.give(1002, begin + body[: octets // 2 + 3]) <= 0
    rest = body[octets // 2 + 3 :]
    for start in range(0, len(rest), PIECE):
        assert scene.give(1002, rest[start : start + PIECE]) <= 0
    scene.check()
    assert len(scene.consumer.locations(request_id)) == 1 + count


@pytest.mark.parametrize("sinks", [True, False])
def test_an_object_that_is_reset_leaves_nothing_of_its_piece(
    sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of one small Object and the most of a large one, whose stream is then reset."""
    if not sinks:
        monkeypatch.setattr(Receptions, "sink_to", lambda *arguments: None)
    scene = Scene()
    scene.consumer.subscribe()
    for group in range(1, 9):
        begin, heads = subgroup_head(group, 1, 1, PIECE)
        stream_id = 1002 + 4 * group
        assert scene.give(stream_id, begin + heads[0]) <= 0
        data = b"a" + heads[1] + b"b" + heads[2] + bytes(PIECE - 10)
        before = sys.getrefcount(data)
        scene._give(stream_id, data)
        relay = scene.publisher.spoke.relay
        relay.core.receive_reset(stream_id, 0x1, scene.hub.now)
        relay.drain_events()
        relay.events.clear()
        scene.hub.run()
        scene.consumer.spoke.relay.actions.clear()
        assert sys.getrefcount(data) <= before
    scene.check()
    counted = [scene.track.groups[group].octets for group in range(1, 9)]
    assert counted == [2 * (1 + OBJECT_BOOKKEEPING_OCTETS)] * 8


def test_what_is_not_carried_of_a_fetch_stream_is_not_kept_for_its_neighbours() -> None:
    scene = Scene(limit=LIMIT)
    subscribes: list[SubscribeReceived] = []
    scene.publisher.before_answer = lambda event: (
        subscribes.append(event) if isinstance(event, SubscribeReceived) else None
    )
    scene.publisher.end.credit.object_octets = 0  # its own fill does not come
    put(scene.publisher.tracks[full_name()], 0, 5, octets=1)
    scene.consumer.subscribe()
    encoder = FetchEncoder(GroupOrder.ASCENDING)
    pieces = [FetchHeader(subscribes[0].request_id).encode()]
    for number in range(6):
        length = 1 if number % 2 == 0 else LIMIT + 1
        header = ObjectHeader(0, number, 0, 9, payload_length=length)
        pieces.append(encoder.object(header) + bytes(length))
    data = b"".join(pieces)
    assert scene.give(5002, data) <= 0
    scene.check()
    assert [stored.header.object_id for stored in scene.track.groups[0].objects.values()] == [
        0,
        2,
        4,
    ]


@pytest.mark.parametrize("octets", [1, 900])
def test_a_datagram_is_kept_as_its_payload_alone(octets: int) -> None:
    scene = Scene()
    scene.consumer.subscribe()
    datagram = ObjectDatagram(
        track_alias=0,
        group_id=3,
        object_id=0,
        publisher_priority=9,
        properties=b"",
        payload=bytes(octets),
    )
    relay = scene.publisher.spoke.relay
    relay.core.receive_datagram(datagram.encode(), scene.hub.now)
    relay.drain_events()
    scene.hub.run()
    scene.check()
    assert scene.track.get(Location(3, 0)) is not None


def test_what_is_only_announced_counts_as_its_first_part() -> None:
    scene = Scene()
    scene.consumer.subscribe()
    begin, heads = subgroup_head(1, 10, 10, 1 << 24)
    scene.give(1002, begin + heads[0] + bytes(5))
    scene.give(1002, bytes(5) + heads[1] + bytes(10) + heads[2] + bytes(7))
    scene.check()
    announced = scene.track.groups[1].objects[2]
    assert announced.octets == FIRST_PART_OCTETS + OBJECT_BOOKKEEPING_OCTETS
    assert announced.received == 7

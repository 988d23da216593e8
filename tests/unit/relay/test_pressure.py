"""A cache that is full of what cannot leave: the lowest priority gives way, and nothing else."""

from __future__ import annotations

import pytest

from kvcs.moqt.errors import StreamCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.track.store import Track
from kvcs.relay.cache import TRACK_OCTETS
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import put, put_group

KIB = 1024
OVER: list[int | None] = [StreamCode.EXCESSIVE_LOAD]
OBJECT = 60 * KIB
ROOM = 4 * (OBJECT + 3 * KIB) + 4 * TRACK_OCTETS
"""Four Groups of one Object each, and no fifth."""

LOW, HIGH, LIVE = (full_name(each) for each in (b"low", b"high", b"live"))


def stop(peer: ConsumerPeer) -> None:
    peer.spoke.relay.credit.object_octets = 0


class Scene:
    """Two readers of the past at a relay that had to get it, and one that follows a third Track."""

    def __init__(self, **limits: float) -> None:
        self.hub = Hub(RelayLimits(cache_octets=ROOM, **limits))  # type: ignore[arg-type]
        self.origin = PublisherPeer(self.hub)
        self.tracks = {name: self.origin.track(name) for name in (LOW, HIGH, LIVE)}
        for name in (LOW, HIGH):
            for group in range(2):
                put_group(self.tracks[name], group, 1, octets=OBJECT)
        self.peers: dict[FullTrackName, ConsumerPeer] = {}
        self.asked: dict[FullTrackName, int] = {}

    def read(self, name: FullTrackName, priority: int, *, stalled: bool) -> None:
        """A fetch of two Groups, of which only the first octets are taken where ``stalled``."""
        peer = self.peers[name] = ConsumerPeer(self.hub)
        peer.subscribe(name, fill=None)
        peer.spoke.relay.credit.per_stream_octets = 10 if stalled else 1 << 40
        chosen = LocationFilter.absolute_range(0, 0, 1, 9)
        self.asked[name] = peer.fetch(name, chosen, subscriber_priority=priority, run=False)
        for _ in range(400):
            if stalled:
                peer.spoke.relay.credit.object_octets = 10
            if not self.hub.step():
                break
            if stalled and self.hub.core.stats.objects_in >= 2 * len(self.peers):
                break
        if stalled:
            stop(peer)

    def follow(self, groups: range) -> ConsumerPeer:
        """Somebody else follows what is published now."""
        peer = ConsumerPeer(self.hub)
        self.asked[LIVE] = peer.subscribe(LIVE, fill=None)
        for group in groups:
            put_group(self.tracks[LIVE], group, 1, octets=OBJECT)
            self.hub.run()
        return peer

    def ends(self, name: FullTrackName) -> list[int | None]:
        return self.peers[name].stream_ends(self.asked[name])


def test_a_stalled_reader_of_the_lowest_priority_lets_go_first() -> None:
    scene = Scene()
    scene.read(LOW, 200, stalled=True)
    scene.read(HIGH, 10, stalled=True)
    scene.hub.advance(scene.hub.core.limits.pinned_seconds + 1)
    live = scene.follow(range(3))
    assert live.locations(scene.asked[LIVE]) == [Location(group, 0) for group in range(3)]
    assert (scene.ends(LOW), scene.ends(HIGH)) == (OVER, [])
    assert scene.hub.core.stats.pressure_resets == 1
    # What the other one waits for is still there, and comes whole.
    scene.peers[HIGH].spoke.relay.credit.object_octets = 1 << 40
    scene.peers[HIGH].spoke.relay.credit.per_stream_octets = 1 << 40
    scene.peers[HIGH].spoke.relay.core.receive_credit()
    fetches = scene.hub.core.stats.upstream_fetches
    scene.hub.run()
    assert scene.ends(HIGH) == [None] and scene.hub.core.stats.upstream_fetches == fetches


def test_readers_that_move_are_not_reset() -> None:
    scene = Scene(pinned_seconds=60)
    scene.read(LOW, 200, stalled=True)
    scene.read(HIGH, 10, stalled=True)
    scene.hub.advance(50)
    live = scene.follow(range(3))
    assert len(live.locations(scene.asked[LIVE])) == 3
    assert (scene.ends(LOW), scene.ends(HIGH)) == ([], [])


def test_nobody_is_reset_while_there_is_room() -> None:
    scene = Scene()
    scene.read(LOW, 200, stalled=True)
    scene.hub.advance(60)
    scene.follow(range(2))
    assert scene.ends(LOW) == [] and scene.hub.core.stats.pressure_resets == 0


BIG = 100 * KIB
PART = 70 * KIB
"""What comes of an Object before its stream stands still."""


def arriving(hub: Hub, priorities: list[int]) -> tuple[ConsumerPeer, list[Track]]:
    """Subgroups of such priorities, of each of which a part has come, and somebody who follows."""
    origins = [PublisherPeer(hub) for _ in priorities]
    peer, tracks = ConsumerPeer(hub), []
    for number, (origin, priority) in enumerate(zip(origins, priorities, strict=True)):
        for other in origins:
            other.silent = other is not origin
        name = full_name(b"t%d" % number)
        tracks.append(origin.track(name))
        peer.subscribe(name, fill=None)
        origin.end.credit.object_octets = 1 << 40
        origin.end.credit.per_stream_octets = PART
        put(tracks[-1], 0, 0, octets=BIG, priority=priority)
        before = hub.core.stats.octets_in
        while hub.core.stats.octets_in < before + 60 * KIB and hub.step():
            pass
        origin.end.credit.object_octets = 0
    return peer, tracks


@pytest.mark.parametrize(("priority", "gives_way"), [(10, True), (100, False), (200, False)])
def test_what_arrives_gives_way_to_what_counts_more(priority: int, gives_way: bool) -> None:
    hub = Hub(RelayLimits(cache_octets=2 * PART + 60 * KIB))
    peer, tracks = arriving(hub, [50, 100])
    assert hub.core.stats.too_large == 0
    late = PublisherPeer(hub, None)
    name = full_name(b"late")
    requested = late.end.core.requester.publish(late.track(name))
    hub.run()
    asked = peer.subscribe(name, fill=None)
    put(late.tracks[name], 0, 0, octets=BIG, priority=priority)
    hub.run()
    assert requested is not None and len(tracks) == 2
    assert hub.core.stats.pressure_resets == gives_way
    assert hub.core.stats.too_large == (not gives_way)
    assert peer.stream_ends(0) == []
    assert peer.stream_ends(2) == (OVER if gives_way else [])
    assert peer.locations(asked) == ([Location(0, 0)] if gives_way else [])

"""Upstreams that take no FETCH of several Groups: they are asked for one after the other."""

from __future__ import annotations

import pytest

from kvcs.moqt import events
from kvcs.moqt.errors import NotSupported
from kvcs.moqt.filters import LocationFilter, LocationFilterType
from kvcs.moqt.names import GroupOrder, Location
from kvcs.moqt.sending.publishing import location_filter
from kvcs.testing.actors import ConsumerPeer, PublisherPeer
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import put_group

GROUPS = 6
LAYERS = [Location(g, o) for g in range(GROUPS) for o in range(3)]
SHORT = (LocationFilterType.ABSOLUTE_GROUP_END, LocationFilterType.ABSOLUTE_RANGE)


class Scene:
    """A publisher that refuses long FETCHes, a relay, and one consumer."""

    def __init__(self, *, groups: range = range(GROUPS)) -> None:
        self.hub = Hub()
        self.publisher = PublisherPeer(self.hub)
        self.publisher.before_answer = self._judge
        self.track = self.publisher.track()
        for group in groups:
            put_group(self.track, group, 3, octets=100)
        self.refused: list[LocationFilter | None] = []
        self.taken: list[LocationFilter | None] = []
        self.consumer = ConsumerPeer(self.hub)

    def _judge(self, event: events.Event) -> None:
        self.publisher.refusal = None
        if not isinstance(event, events.FetchReceived):
            return
        chosen = location_filter(event.parameters)
        if chosen is None or chosen.type not in SHORT or chosen.end_group_delta:
            self.publisher.refusal = NotSupported("one Group at a time")
            self.refused.append(chosen)
        else:
            self.taken.append(chosen)


@pytest.mark.parametrize("order", list(GroupOrder))
def test_a_range_comes_group_by_group(order: GroupOrder) -> None:
    scene = Scene()
    request_id = scene.consumer.fetch(
        chosen=LocationFilter.group_end(1, 1, 3), group_order=int(order)
    )
    groups = (1, 2, 3) if order is GroupOrder.ASCENDING else (3, 2, 1)
    wanted = [Location(g, o) for g in groups for o in range(3) if (g, o) != (1, 0)]
    assert scene.consumer.locations(request_id) == wanted
    assert scene.consumer.markers(request_id) == []
    assert scene.consumer.stream_ends(request_id) == [None]
    assert len(scene.refused) == 1
    taken = sorted(chosen.start_group for chosen in scene.taken if chosen is not None)
    assert taken == [1, 2, 3]


def test_a_session_that_has_refused_once_is_not_asked_so_again() -> None:
    scene = Scene()
    scene.consumer.fetch(chosen=LocationFilter.group_end(0, 0, 2))
    second = scene.consumer.fetch(chosen=LocationFilter.group_end(3, 0, 5))
    assert scene.consumer.locations(second) == LAYERS[9:]
    assert len(scene.refused) == 1
    assert len(scene.taken) == 6


def test_evicted_groups_come_again() -> None:
    scene = Scene()
    assert scene.consumer.locations(scene.consumer.subscribe()) == LAYERS
    entry = scene.hub.core.cache.get(scene.track.name)
    assert entry is not None
    for group in (1, 2, 4):
        assert entry.track.evict_group(group) > 0
    late = ConsumerPeer(scene.hub)
    request_id = late.subscribe()
    assert late.locations(request_id) == LAYERS
    assert late.markers(request_id) == []


def test_a_group_that_does_not_exist_ends_nothing() -> None:
    scene = Scene(groups=range(3))
    for group in (4, 5):
        put_group(scene.track, group, 3, octets=100)
    request_id = scene.consumer.fetch(chosen=LocationFilter.group_end(1, 0, 5))
    wanted = [Location(g, o) for g in (1, 2, 4, 5) for o in range(3)]
    assert scene.consumer.locations(request_id) == wanted


def test_a_fetch_without_an_end_ends() -> None:
    scene = Scene()
    request_id = scene.consumer.fetch()
    assert scene.consumer.locations(request_id) == LAYERS
    assert scene.consumer.stream_ends(request_id) == [None]


def test_a_single_group_that_is_refused_is_unknown() -> None:
    scene = Scene()
    scene.publisher.before_answer = None
    assert scene.consumer.locations(scene.consumer.subscribe()) == LAYERS
    entry = scene.hub.core.cache.get(scene.track.name)
    assert entry is not None
    assert entry.track.evict_group(2) > 0
    scene.publisher.refusal = NotSupported("no FETCH at all")
    late = ConsumerPeer(scene.hub)
    request_id = late.subscribe()
    assert late.locations(request_id) == LAYERS[:6] + LAYERS[9:]
    assert len(late.markers(request_id)) == 1
    assert len(scene.publisher.fetches) == 1

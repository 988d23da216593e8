"""Random joins, leaves, evictions and orders: each Object reaches each consumer exactly once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectStatus
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.track.stored import OBJECT_BOOKKEEPING_OCTETS
from kvcs.relay.cache import TRACK_OCTETS
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import ConsumerPeer, PublisherPeer
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import payload, put

GROUPS, OBJECTS = 5, 4
EVERY = {Location(g, o) for g in range(GROUPS) for o in range(OBJECTS)}
OCTETS = 300
GROUP_COST = (OBJECTS + 1) * (OCTETS + OBJECT_BOOKKEEPING_OCTETS)


class Production:
    """Publishes the Track one Object at a time."""

    def __init__(self, publisher: PublisherPeer) -> None:
        self.track = publisher.track()
        self.steps = [(g, o) for g in range(GROUPS) for o in range(OBJECTS + 1)]
        self.steps.append((GROUPS, 0))

    @property
    def over(self) -> bool:
        return not self.steps

    def step(self) -> None:
        """The next Object, with its Group's or Track's end where that is due."""
        group, object_id = self.steps.pop(0)
        if group == GROUPS:
            put(self.track, group, 0, status=ObjectStatus.END_OF_TRACK)
            self.track.finish_subgroup(group, 0)
            self.track.end()
        elif object_id == OBJECTS:
            put(self.track, group, object_id, status=ObjectStatus.END_OF_GROUP)
            self.track.finish_subgroup(group, 0)
        else:
            put(self.track, group, object_id, octets=OCTETS)


def check(consumer: ConsumerPeer, request_id: int) -> None:
    """Each Object exactly once, each with its own octets, and a proper end."""
    counts = Counter(consumer.locations(request_id))
    assert set(counts) == EVERY
    assert set(counts.values()) == {1}
    for location, octets in consumer.contents(request_id).items():
        assert octets == payload(location, OCTETS)
    done = consumer.done(request_id)
    assert done is not None and done.status == PublishDoneCode.TRACK_ENDED
    assert consumer.markers(request_id) == []


@pytest.mark.parametrize("consumers", [2, 5])
@pytest.mark.parametrize("seed", range(12))
def test_joins_at_any_moment_get_each_object_once_and_the_publisher_sends_each_once(
    consumers: int, seed: int
) -> None:
    rng = random.Random(seed)
    hub = Hub(piece=rng.choice([37, 500, 1 << 30]), order=rng.randrange)
    publisher = PublisherPeer(hub)
    production = Production(publisher)
    joiners = [ConsumerPeer(hub) for _ in range(consumers)]
    joined: list[tuple[ConsumerPeer, int]] = []
    while joiners or not production.over:
        choice = rng.random()
        if joiners and choice < 0.1:
            consumer = joiners.pop()
            joined.append((consumer, consumer.subscribe(run=False)))
        elif not production.over and choice < 0.3:
            production.step()
        elif choice < 0.35:
            hub.advance(rng.random() / 100)
        else:
            hub.run(steps=rng.randrange(1, 8))
    hub.advance(5)
    for consumer, request_id in joined:
        check(consumer, request_id)
    assert production.track.objects_sent <= len(EVERY) + GROUPS + 1
    assert len(publisher.subscribes) <= consumers  # one, but for those after the end
    assert publisher.fetches == [] or hub.core.snapshot().upstream_fetches == len(publisher.fetches)


@pytest.mark.parametrize("forward", [0, 1])
@pytest.mark.parametrize("seed", range(16))
def test_a_published_track_that_is_paused_and_resumed_loses_and_doubles_nothing(
    seed: int, forward: int
) -> None:
    rng = random.Random(seed)
    limits = RelayLimits(upstream_linger=rng.choice([0.0, 0.01, 0.05]))
    hub = Hub(limits, piece=rng.choice([37, 500, 1 << 30]), order=rng.randrange)
    publisher = PublisherPeer(hub, namespace=None)
    production = Production(publisher)
    publisher.end.core.requester.publish(production.track, Parameters.of(forward=forward))
    hub.run()
    joiners = [ConsumerPeer(hub) for _ in range(5)]
    joined: list[tuple[ConsumerPeer, int]] = []
    while joiners or not production.over:
        choice = rng.random()
        if joiners and choice < 0.1:
            consumer = joiners.pop()
            joined.append((consumer, consumer.subscribe(run=False)))
        elif len(joined) > 1 and choice < 0.15 and joiners:
            consumer, request_id = joined.pop(rng.randrange(len(joined)))
            consumer.end.core.requester.cancel(request_id)
        elif choice < 0.3 and len(production.steps) > bool(joiners):
            production.step()  # the last one when all have joined
        elif choice < 0.4:
            hub.advance(rng.random() / 20)
        else:
            hub.run(steps=rng.randrange(1, 8))
    hub.advance(20)
    assert joined
    for consumer, request_id in joined:
        check(consumer, request_id)
    assert publisher.subscribes == []


actions = st.lists(
    st.one_of(
        st.tuples(st.just("produce"), st.integers(1, 4)),
        st.tuples(st.just("join"), st.sampled_from([1, 2])),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(0, GROUPS - 1)),
        st.tuples(st.just("run"), st.integers(1, 12)),
        st.tuples(st.just("wait"), st.integers(1, 70)),
        st.tuples(st.just("stall"), st.integers(0, 9)),
        st.tuples(st.just("fetch"), st.integers(0, 9)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(actions, st.integers(0, 2**32))
def test_random_operations_lose_and_duplicate_nothing_and_keep_the_budget(
    operations: list[tuple[str, int]], seed: int
) -> None:
    budget = 2 * TRACK_OCTETS + 3 * GROUP_COST
    rng = random.Random(seed)
    hub = Hub(
        RelayLimits(cache_octets=budget, fetch_wait=1e6, upstream_wait=1e6), order=rng.randrange
    )
    publisher = PublisherPeer(hub)
    production = Production(publisher)
    joined: list[tuple[ConsumerPeer, int]] = []
    fetches: list[tuple[ConsumerPeer, int]] = []
    stalled: list[ConsumerPeer] = []
    for name, number in operations:
        if name == "produce":
            for _ in range(number):
                if not production.over:
                    production.step()
        elif name == "join":
            consumer = ConsumerPeer(hub)
            joined.append((consumer, consumer.subscribe(run=False, group_order=number)))
        elif name == "leave" and joined:
            consumer, request_id = joined.pop(number % len(joined))
            consumer.end.core.requester.cancel(request_id)
        elif name == "evict":
            entry = hub.core.cache.get(production.track.name)
            if entry is not None:
                group = entry.track.groups.get(number)
                live = entry.track.ended is None and number == max(entry.track.groups, default=-1)
                if group is not None and not group.arriving and not live:
                    entry.track.evict_group(number)
        elif name == "run":
            hub.run(steps=number)
        elif name == "wait":
            hub.advance(number / 10)
        elif name == "stall" and joined:
            consumer, _ = joined[number % len(joined)]
            consumer.spoke.relay.credit.object_octets = 0
            stalled.append(consumer)
        elif name == "fetch" and joined and not production.over:
            consumer = ConsumerPeer(hub)
            fetches.append((consumer, consumer.fetch(run=False)))
        assert 0 <= hub.core.cache.octets <= budget
    while not production.over:
        production.step()
    for consumer in stalled:
        consumer.spoke.relay.credit.object_octets = 1 << 40
        consumer.spoke.relay.core.receive_credit()
    hub.advance(5)
    assert 0 <= hub.core.cache.octets <= budget
    for consumer, request_id in joined:
        done = consumer.done(request_id)
        assert done is not None
        counts = Counter(consumer.locations(request_id))
        assert all(count == 1 for count in counts.values())
        if done.status == PublishDoneCode.TOO_FAR_BEHIND:
            continue  # it was stalled while its Groups were evicted, and was told so
        assert done.status == PublishDoneCode.TRACK_ENDED
        assert set(counts) == EVERY
        assert consumer.markers(request_id) == []
    for consumer, request_id in fetches:
        counts = Counter(consumer.locations(request_id))
        assert all(count == 1 for count in counts.values())
    for spoke in hub.spokes:
        assert spoke.relay.core.failure is None and spoke.peer.core.failure is None
        assert not spoke.peer.core.closed

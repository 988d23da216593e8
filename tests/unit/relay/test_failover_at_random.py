"""Whenever an upstream is lost, each Object comes once (MOQT §7); seeded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from kvcs.testing.tracks import payload
from tests.unit.relay.two_upstreams import OCTETS, Streaming, World

Step = tuple[str, int, int, int]


def plan(chance: Random) -> Iterator[Step]:
    """Steps of a publisher: Groups of one or two Subgroups, Objects in two parts."""
    for group in range(chance.randrange(2, 5)):
        subgroups = chance.randrange(1, 3)
        for subgroup in range(subgroups):
            yield "open", group, 0, subgroup
        for item in range(chance.randrange(1, 6)):
            yield "begin", group, item, item % subgroups
            yield "complete", group, item, 0
        for subgroup in range(subgroups):
            yield "finish", group, 0, subgroup


def play(streaming: Streaming, step: Step) -> None:
    what, group, item, subgroup = step
    if what == "open":
        streaming.open(group, subgroup)
    elif what == "begin":
        streaming.begin(group, item, subgroup)
    elif what == "complete":
        streaming.complete(group, item)
    else:
        streaming.finish(group, subgroup)


@pytest.mark.parametrize("seed", range(40))
def test_whenever_an_upstream_is_lost_each_object_comes_once(seed: int) -> None:
    chance = Random(seed)
    world = World()
    for hub in (*world.uppers, world.lower):
        hub.piece = chance.choice([7, 64, 1 << 20])
    steps = list(plan(chance))
    positions, end = [0, 0], len(steps)
    lost_at = chance.randrange(end)
    joined_at = chance.randrange(lost_at + 1)
    request: int | None = None
    consumer = world.consumer
    while positions != [end, end]:
        which = chance.choice([index for index in range(2) if positions[index] < end])
        play(world.streaming[which], steps[positions[which]])
        positions[which] += 1
        if request is None and positions[0] > joined_at:
            request = consumer.subscribe(run=False)
        if chance.random() < 0.7:
            world.lower.run()
        if not world.links[0].lost and positions[0] > lost_at:
            world.lose()
    for track in world.tracks:
        track.end()
    world.lower.run()
    world.lower.advance(3.0)
    assert request is not None
    wanted = {Location(group, item) for what, group, item, _ in steps if what == "begin"}
    got = Counter(item.header.location for item in consumer.objects(request))
    if set(got) != wanted:
        # The fill asked for what the next upstream had not got yet, and says so.
        marks = [mark.location for mark in consumer.markers(request)]
        assert marks and max(marks) >= max(wanted - set(got))
        again = consumer.fetch(chosen=LocationFilter.between(Location(0, 0), max(marks)))
        late = [item.header.location for item in consumer.objects(again)]
        got.update(location for location in late if location not in got)
    assert got == Counter(wanted)
    for location, octets in consumer.contents().items():
        assert octets == payload(location, OCTETS)
    ended = consumer.done(request)
    assert ended is not None and ended.status == PublishDoneCode.TRACK_ENDED
    assert ended.every_stream_seen
    assert world.stats in ((1, 0), (0, 0))  # it may be lost before it has answered
    world.lower.advance(60.0)
    assert len(world.lower.core._tracks) == 0
    entry = world.lower.core.cache.get(world.tracks[0].name)
    if entry is not None:
        assert not any(group.arriving or group.wanted for group in entry.track.groups.values())

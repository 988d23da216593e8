"""One consumer that does not read, beside one that does: the fast one and the relay do not notice.

The kinds of fault: a slow reader stops others, or what it is owed piles up without bound.
"""

from __future__ import annotations

from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.names import Location
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import ConsumerPeer, PublisherPeer
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import end_track, payload, put_group

MIB = 2**20
OBJECT = 64 * 1024
LAYERS, BLOCKS = 32, 2
CACHE = MIB
"""A quarter of what is published."""


def publish(hub: Hub, publisher: PublisherPeer, fast: ConsumerPeer) -> None:
    """Publish layer by layer; the fast consumer has each before the next is there."""
    track = publisher.tracks[next(iter(publisher.tracks))]
    for layer in range(LAYERS):
        put_group(track, layer, BLOCKS, octets=OBJECT)
        hub.run()
        assert len(fast.locations()) == (layer + 1) * BLOCKS
        assert hub.core.cache.octets <= CACHE
    end_track(track, LAYERS)
    hub.run()


def stall(consumer: ConsumerPeer, *, stalled: bool) -> None:
    """Let the relay send nothing of Objects to a consumer, or everything again."""
    consumer.spoke.relay.credit.object_octets = 0 if stalled else 1 << 30


def test_the_fast_one_is_not_held_and_the_slow_one_is_told() -> None:
    hub = Hub(RelayLimits(cache_octets=CACHE))
    publisher = PublisherPeer(hub)
    track = publisher.track()
    fast, slow = ConsumerPeer(hub), ConsumerPeer(hub)
    fast_id, slow_id = fast.subscribe(), slow.subscribe()
    stall(slow, stalled=True)
    publish(hub, publisher, fast)
    hub.advance(1)
    ended = fast.done(fast_id)
    assert ended is not None and ended.status == PublishDoneCode.TRACK_ENDED
    # What it is owed has left the cache: it is told so, and may ask again.
    ended = slow.done(slow_id)
    assert ended is not None and ended.status == PublishDoneCode.TOO_FAR_BEHIND
    stall(slow, stalled=False)
    fetched = slow.fetch()
    hub.advance(1)
    wanted = {Location(layer, block) for layer in range(LAYERS) for block in range(BLOCKS)}
    got = slow.contents(fetched)
    assert set(got) == wanted
    assert all(octets == payload(location, OBJECT) for location, octets in got.items())
    assert hub.core.cache.octets <= CACHE
    assert track.objects_sent > LAYERS * BLOCKS  # evicted ones came from the publisher again


def test_what_is_owed_is_not_copied_for_each_consumer() -> None:
    hub = Hub(RelayLimits(cache_octets=4 * CACHE))
    publisher = PublisherPeer(hub)
    publisher.track()
    fast = ConsumerPeer(hub)
    fast.subscribe()
    slow = [ConsumerPeer(hub) for _ in range(8)]
    for consumer in slow:
        consumer.subscribe()
        stall(consumer, stalled=True)
    track = publisher.tracks[next(iter(publisher.tracks))]
    for layer in range(4):
        put_group(track, layer, BLOCKS, octets=OBJECT)
    hub.run()
    # Eight who are owed everything, and one copy.
    assert hub.core.cache.octets < 4 * BLOCKS * OBJECT + MIB // 4
    for consumer in slow:
        assert consumer.locations() == []
        stall(consumer, stalled=False)
    # The next Objects tell the sessions that they may send again.
    put_group(track, 4, BLOCKS, octets=OBJECT)
    hub.run()
    for consumer in slow:
        assert len(consumer.locations()) == 5 * BLOCKS

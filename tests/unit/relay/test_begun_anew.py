"""A publication that begins anew under the same name, seen by a relay that has cached the first."""

from __future__ import annotations

import pytest

from kvcs.moqt.names import Location
from kvcs.relay.cache import TRACK_OCTETS
from kvcs.testing.actors import ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import fetch_stream, payload, put, put_group

STREAM = 1002
OCTETS = 1000


@pytest.mark.parametrize("came", ["part", "whole", "fin"])
def test_a_fill_that_is_faster_than_its_answer_goes_to_the_track_that_begins_anew(
    came: str,
) -> None:
    """Its first Objects came to the Track that was cached: they are neither lost nor counted."""
    hub = Hub()
    former = PublisherPeer(hub)
    put_group(former.track(), 0, 5)
    earlier = ConsumerPeer(hub)
    earlier.cancel(earlier.subscribe())
    former.vanish()
    cached = hub.core.cache.get(full_name())
    assert cached is not None and cached.track.largest == Location(0, 5)
    cached.track.evict_group(0)  # so that all of it is asked for
    publisher = PublisherPeer(hub)
    source = publisher.track()
    for number in range(3):
        put(source, 0, number, octets=OCTETS, priority=0)
    publisher.silent = True
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    asked = publisher.subscribes[0].request_id
    fill = fetch_stream(asked, *(Location(0, number) for number in range(3)), octets=OCTETS)
    cut = {"part": OCTETS + 100, "whole": 2 * OCTETS + 30, "fin": len(fill)}[came]
    relay = publisher.spoke.relay
    relay.core.receive_stream_data(STREAM, fill[:cut], came == "fin", hub.now)
    relay.drain_events()
    publisher.silent = False
    publisher.end.core.responder.accept_subscribe(asked, source, hub.now)
    hub.run()
    if came != "fin":
        relay.core.receive_stream_data(STREAM, fill[cut:], True, hub.now)
        relay.drain_events()
    hub.advance(5)
    places = [Location(0, number) for number in range(3)]
    assert consumer.contents(request_id) == {place: payload(place, OCTETS) for place in places}
    cache = hub.core.cache
    entry = cache.get(source.name)
    assert entry is not None
    assert cache.octets == TRACK_OCTETS + entry.track.octets
    assert entry.track.octets == sum(group.octets for group in entry.track.groups.values())

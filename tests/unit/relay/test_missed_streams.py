"""Streams that never came from upstream: a relay does not call its own whole (MOQT §9.9)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.names import Location
from kvcs.testing.actors import ConsumerPeer, PublisherPeer
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import end_track, put_group


def lose_a_stream(hub: Hub, publisher: PublisherPeer) -> None:
    """Let the relay's session report that not every stream of the publisher came."""
    spoke = publisher.spoke

    def told(event: events.Event) -> None:
        if isinstance(event, events.SubscriptionEnded):
            event = replace(event, every_stream_seen=False)
        hub.core.event(spoke.key, event, hub.now)

    spoke.relay.on_event = told


@pytest.mark.parametrize("lost", [False, True])
def test_a_live_subscriber_is_told_whether_every_stream_came(lost: bool) -> None:
    hub = Hub()
    publisher, consumer = PublisherPeer(hub), ConsumerPeer(hub)
    if lost:
        lose_a_stream(hub, publisher)
    track = publisher.track()
    request_id = consumer.subscribe()
    put_group(track, 0, 2)
    end_track(track, 1)
    hub.advance(60)
    done = consumer.done(request_id)
    assert done is not None
    assert done.status == PublishDoneCode.TRACK_ENDED
    assert done.every_stream_seen is not lost
    assert consumer.locations(request_id) == [Location(0, 0), Location(0, 1)]


def test_who_comes_later_gets_all_of_it_and_is_told_so() -> None:
    hub = Hub()
    publisher, early, late = PublisherPeer(hub), ConsumerPeer(hub), ConsumerPeer(hub)
    lose_a_stream(hub, publisher)
    track = publisher.track()
    early.subscribe()
    put_group(track, 0, 2)
    end_track(track, 1)
    hub.advance(60)
    request_id = late.subscribe()
    hub.advance(60)
    done = late.done(request_id)
    assert done is not None and done.every_stream_seen
    assert late.locations(request_id) == [Location(0, 0), Location(0, 1)]

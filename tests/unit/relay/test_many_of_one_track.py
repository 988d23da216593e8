"""Many subscriptions of one Track: what one more, or one less, costs does not grow with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.session import Session
from kvcs.relay.core import RelayCore
from kvcs.testing.actors import SCOPE, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import put_group

MANY = 120


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the relay has looked a session up since the last call."""
    seen = [0]
    real = RelayCore.session

    def counted(self: RelayCore, key: int) -> Session | None:
        seen[0] += 1
        return real(self, key)

    monkeypatch.setattr(RelayCore, "session", counted)

    def taken() -> int:
        taken, seen[0] = seen[0], 0
        return taken

    return taken


def paused(hub: Hub) -> ConsumerPeer:
    """A peer with many subscriptions of one Track, all of them paused."""
    peer = ConsumerPeer(hub)
    for _ in range(MANY):
        peer.end.core.requester.subscribe(full_name(), Parameters.of(forward=0))
    hub.run()
    return peer


def test_paused_subscriptions_of_others_cost_nothing(lookups: Callable[[], int]) -> None:
    hub = Hub()
    put_group(PublisherPeer(hub).track(), 0, 1)
    costs = []
    others = [paused(hub)]
    for _ in range(2):
        leaver = paused(hub)
        lookups()
        hub.disconnect(leaver.spoke)
        hub.run()
        costs.append(lookups())
        others += [paused(hub) for _ in range(3)]
    assert costs[1] < costs[0] + MANY


def test_one_that_is_resumed_counts_again() -> None:
    hub = Hub()
    origin = PublisherPeer(hub)
    source = origin.track()
    put_group(source, 0, 1)
    peer = ConsumerPeer(hub)
    request_id = peer.subscribe(forward=0)
    hub.advance(1)
    peer.end.core.requester.update(request_id, Parameters.of(forward=1))
    hub.advance(2 * hub.core.limits.upstream_linger)
    put_group(source, 1, 1)
    hub.run()
    assert (1, 0) in peer.locations(request_id)


def test_offers_to_others_cost_nothing(lookups: Callable[[], int]) -> None:
    def publish(listeners: int) -> int:
        hub = Hub()
        pusher = PublisherPeer(hub, None)
        for _ in range(listeners):
            ConsumerPeer(hub).end.core.requester.subscribe_tracks(SCOPE, Parameters())
        hub.run()
        lookups()
        pusher.end.core.requester.publish(pusher.track(), Parameters())
        hub.run()
        return lookups()

    assert publish(64) < 3 * publish(32)


def test_a_paused_publish_is_resumed_behind_the_end_of_its_publication() -> None:
    hub = Hub()
    pusher = PublisherPeer(hub, None)
    peer = ConsumerPeer(hub)

    def accept(event: events.Event) -> None:
        if isinstance(event, events.PublishReceived):
            peer.end.core.responder.accept_publish(event.request_id)

    peer.end.on_event = accept
    peer.end.core.requester.subscribe_tracks(SCOPE, Parameters.of(forward=0))
    hub.run()
    source = pusher.track()
    pusher.end.core.requester.publish(source, Parameters.of(forward=0))
    hub.run()
    [offered] = peer.end.of(events.PublishReceived)
    source.end(PublishDoneCode.TRACK_ENDED)
    [track] = hub.core._tracks
    while track.sources:  # the relay's own PUBLISH_DONE is sent a moment after this
        hub.advance(0.01)
    peer.end.core.requester.update(offered.request_id, Parameters.of(forward=1))
    hub.advance(5)
    assert peer.end.of(events.SessionClosed) == []
    [ended] = peer.end.of(events.SubscriptionEnded)
    assert ended.status == PublishDoneCode.TRACK_ENDED

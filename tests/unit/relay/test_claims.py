"""A publisher that names a Largest Object which it has not keeps nobody from the others."""

from __future__ import annotations

import pytest

from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.names import Location
from kvcs.moqt.track.store import Track
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import PUBLICATION, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import end_track, put_group
from tests.unit.relay.chains import locations
from tests.unit.relay.publishing import Pusher

FAR = Location(1 << 40, 7)


def liar(hub: Hub, how: str = "refuses") -> PublisherPeer:
    """A publisher that names a Location where it has nothing."""
    peer = PublisherPeer(hub, None)
    peer.track().note_largest(FAR)
    lie(peer, how)
    peer.announce(PUBLICATION)
    return peer


def lie(peer: PublisherPeer, how: str) -> None:
    """Let a publisher show nothing of what it names."""

    def before(event: events.Event) -> None:
        fetched = isinstance(event, events.FetchReceived)
        peer.silent = fetched and how == "is silent"
        refuses = fetched and how == "refuses"
        peer.refusal = RequestError("no", RequestCode.NOT_SUPPORTED) if refuses else None

    peer.before_answer = before


HOW = pytest.mark.parametrize("how", ["refuses", "is silent", "sends nothing"])


@HOW
@pytest.mark.parametrize("first", [False, True])
def test_what_others_publish_is_delivered(how: str, first: bool) -> None:
    """Whoever announced first, and whoever answers first."""
    hub = Hub()
    if first:
        false = liar(hub, how)
    honest = PublisherPeer(hub)
    put_group(honest.track(), 0, 3)
    if not first:
        false = liar(hub, how)
    early = ConsumerPeer(hub)
    asked = [early.subscribe()]
    hub.advance(2)
    late = ConsumerPeer(hub)
    asked.append(late.subscribe())
    put_group(honest.tracks[full_name()], 1, 3)
    hub.advance(12)
    for peer, request_id in zip((early, late), asked, strict=True):
        assert sorted(peer.locations(request_id)) == locations(range(2))
    assert len(false.subscribes) == 1 and hub.core.stats.largest_not_there == 1
    accepted = late.accepted(asked[1])
    assert accepted is not None
    # And it is asked no more.
    late.cancel(asked[1])
    early.cancel(asked[0])
    hub.advance(10)
    assert len(late.locations(late.subscribe())) == 6 and len(false.subscribes) == 1


@HOW
def test_one_that_comes_later_does_not_stop_what_is_followed(how: str) -> None:
    hub = Hub()
    honest = PublisherPeer(hub)
    put_group(honest.track(), 0, 3)
    early = ConsumerPeer(hub)
    followed = early.subscribe()
    liar(hub, how)
    hub.advance(2)
    late = ConsumerPeer(hub)
    joined = late.subscribe()
    put_group(honest.tracks[full_name()], 1, 3)
    hub.advance(2)
    for peer, request_id in ((early, followed), (late, joined)):
        assert sorted(peer.locations(request_id)) == locations(range(2))
    assert hub.core.stats.largest_not_there == 1


@pytest.mark.parametrize("ended", [False, True])
def test_one_that_has_what_it_names_counts(ended: bool) -> None:
    hub = Hub()
    behind, ahead = PublisherPeer(hub), PublisherPeer(hub)
    put_group(behind.track(), 0, 3)
    track = ahead.track()
    for group in range(4):
        put_group(track, group, 3)
    if ended:
        end_track(track, 4)
    consumer = ConsumerPeer(hub)
    consumer.subscribe(fill=None)
    hub.advance(2)
    late = ConsumerPeer(hub)
    request_id = late.subscribe()
    hub.advance(5)
    assert sorted(late.locations(request_id)) == locations(range(4))
    assert hub.core.stats.largest_not_there == 0


def test_the_only_publisher_is_believed() -> None:
    hub = Hub()
    peer = liar(hub)
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe(fill=None)
    accepted = consumer.accepted(request_id)
    assert accepted is not None and not peer.fetches
    assert hub.core.stats.largest_not_there == 0


def test_where_the_others_have_nothing_one_is_believed_in_the_end() -> None:
    hub = Hub()
    liar(hub)
    PublisherPeer(hub)  # it announces, and has no Track
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe(fill=None)
    hub.advance(3)
    assert consumer.accepted(request_id) is not None


def test_a_publisher_that_leaves_while_it_is_asked_leaves_nothing_behind() -> None:
    hub = Hub()
    put_group(PublisherPeer(hub).track(), 0, 3)
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    false = liar(hub, "is silent")
    hub.run()
    false.vanish()
    hub.advance(5)
    [track] = hub.core._tracks
    assert not track.sources.claims._checks
    assert consumer.locations(request_id) == locations(range(1))
    assert hub.core.stats.largest_not_there == 0


def test_what_one_of_two_has_shown_need_not_be_shown_by_the_other() -> None:
    hub = Hub()
    first, second = PublisherPeer(hub), PublisherPeer(hub)
    for peer in (first, second):
        put_group(peer.track(), 0, 3)

    def before(event: events.Event) -> None:
        first.silent = isinstance(event, events.FetchReceived)

    first.before_answer = before
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    # Without waiting for what the first one does not send.
    assert consumer.accepted(request_id) is not None
    [track] = hub.core._tracks
    assert not track.sources.claims._checks and len(track.sources.sessions()) == 2
    hub.advance(15)
    assert consumer.locations(request_id) == locations(range(1))
    assert hub.core.stats.largest_not_there == 0


@HOW
def test_a_track_that_is_pushed_is_held_to_the_same(how: str) -> None:
    hub = Hub()
    honest = PublisherPeer(hub)
    put_group(honest.track(), 0, 3)
    early = ConsumerPeer(hub)
    followed = early.subscribe()
    false = liar(hub, how)
    false.withdraw()
    pusher = PublisherPeer(hub, None)
    pusher.track().note_largest(FAR)
    pusher.end.core.requester.publish(pusher.tracks[full_name()])
    hub.advance(3)
    late = ConsumerPeer(hub)
    joined = late.subscribe()
    put_group(honest.tracks[full_name()], 1, 3)
    hub.advance(3)
    for peer, request_id in ((early, followed), (late, joined)):
        assert sorted(peer.locations(request_id)) == locations(range(2))


def paused(hub: Hub) -> list[tuple[Pusher, Track]]:
    """Two publishers of one Track, whose subscriber has come and gone."""
    pushers = [Pusher(hub, None) for _ in range(2)]
    pushed = [pusher.push() for pusher in pushers]
    for track, _ in pushed:
        put_group(track, 0, 3)
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    assert consumer.locations(request_id) == locations(range(1))
    consumer.cancel(request_id)
    hub.advance(2.0)
    found = list(zip(pushers, pushed, strict=True))
    assert all(pusher.updates(published) is False for pusher, (_, published) in found)
    return [(pusher, track) for pusher, (track, _) in found]


@HOW
@pytest.mark.parametrize("false", [0, 1])
def test_one_that_is_resumed_is_held_to_the_same(how: str, false: int) -> None:
    """What it names in its answer to the REQUEST_UPDATE keeps nobody from the other."""
    hub = Hub(RelayLimits(upstream_linger=1.0))
    both = paused(hub)
    (pusher, track), (_, honest) = both[false], both[1 - false]
    track.note_largest(FAR)
    lie(pusher, how)
    early = ConsumerPeer(hub)
    asked = [early.subscribe()]
    hub.advance(3.0)
    late = ConsumerPeer(hub)
    asked.append(late.subscribe())
    hub.run()
    put_group(honest, 1, 3)
    hub.advance(3.0)
    for peer, request_id in zip((early, late), asked, strict=True):
        assert sorted(peer.locations(request_id)) == locations(range(2))
    assert hub.core.stats.largest_not_there == 1


def test_what_two_have_published_while_they_were_paused_is_delivered() -> None:
    hub = Hub(RelayLimits(upstream_linger=1.0))
    both = paused(hub)
    for _, track in both:
        put_group(track, 1, 3)
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    hub.advance(3.0)
    for _, track in both:
        put_group(track, 2, 3)
    hub.advance(3.0)
    assert sorted(consumer.locations(request_id)) == locations(range(3))
    assert hub.core.stats.largest_not_there == 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_one_has_published_while_both_were_paused_comes_from_it(ahead: int) -> None:
    """The other one, that would have brought it some day, is lost."""
    hub = Hub(RelayLimits(upstream_linger=1.0))
    both = paused(hub)
    put_group(both[ahead][1], 1, 3)
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    hub.advance(3.0)
    both[1 - ahead][0].vanish()
    put_group(both[ahead][1], 2, 3)
    hub.advance(3.0)
    assert consumer.done(request_id) is None
    assert sorted(consumer.locations(request_id)) == locations(range(3))
    assert hub.core.stats.largest_not_there == 0


def test_one_that_is_paused_again_while_it_is_asked_stays_so() -> None:
    hub = Hub(RelayLimits(upstream_linger=0.2))
    (pusher, track), (other, _) = paused(hub)
    track.note_largest(FAR)
    lie(pusher, "is silent")
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    consumer.cancel(request_id)
    hub.advance(5.0)
    assert [each.forward for each in other.end.core.deliveries.subscriptions()] == [False]
    assert not pusher.end.core.deliveries.subscriptions()  # it had not what it named
    [owner] = hub.core._tracks
    assert not owner.sources.claims._checks

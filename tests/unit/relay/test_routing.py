"""Which upstream is asked, and what a subscriber is told meanwhile (MOQT §7, §9.20)."""

from __future__ import annotations

import pytest

from kvcs.errors import Redirected, RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, RequestCode
from kvcs.moqt.filters import LocationFilter, LocationFilterType
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import ParameterType
from kvcs.moqt.properties import KeyValues, Property
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import PUBLICATION, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import end_track, put, put_group


def test_a_track_that_nobody_announces_does_not_exist() -> None:
    hub = Hub()
    consumer = ConsumerPeer(hub)
    assert consumer.refused(consumer.subscribe()) == RequestCode.DOES_NOT_EXIST
    assert consumer.refused(consumer.fetch()) == RequestCode.DOES_NOT_EXIST
    request_id = consumer.end.core.requester.track_status(full_name())
    hub.run()
    assert consumer.refused(request_id) == RequestCode.DOES_NOT_EXIST
    assert hub.core.snapshot().tracks == 0


def test_rendezvous_holds_a_subscribe_and_times_out() -> None:
    hub = Hub()
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe(rendezvous_timeout=500)
    hub.advance(0.4)
    assert consumer.refused(request_id) is None
    hub.advance(0.2)
    assert consumer.refused(request_id) == RequestCode.TIMEOUT
    assert hub.core.snapshot().tracks == 0


def test_rendezvous_meets_a_publisher_that_comes_in_time() -> None:
    hub = Hub()
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe(rendezvous_timeout=5000)
    publisher = PublisherPeer(hub, None)
    track = publisher.track()
    put_group(track, 0, 2)
    publisher.announce(PUBLICATION)
    hub.advance(10)
    assert consumer.locations(request_id) == [Location(0, 0), Location(0, 1)]
    assert consumer.done(request_id) is None


def test_rendezvous_is_cut_to_the_relays_own_limit() -> None:
    hub = Hub(RelayLimits(max_rendezvous=1.0))
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe(rendezvous_timeout=60_000)
    hub.advance(1.1)
    assert consumer.refused(request_id) == RequestCode.TIMEOUT


def test_no_ok_before_upstream_is_established() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    publisher.silent = True
    publisher.track()
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    assert consumer.accepted(request_id) is None
    subscribe = publisher.subscribes[0]
    responder = publisher.end.core.responder
    responder.accept_subscribe(subscribe.request_id, publisher.tracks[full_name()], hub.now)
    hub.run()
    assert consumer.accepted(request_id) is not None


def test_an_upstream_that_never_answers_is_a_timeout() -> None:
    hub = Hub(RelayLimits(upstream_wait=3.0))
    publisher = PublisherPeer(hub)
    publisher.silent = True
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    hub.advance(3.1)
    assert consumer.refused(request_id) == RequestCode.TIMEOUT


def test_a_refusal_of_every_upstream_is_passed_on() -> None:
    hub = Hub()
    publishers = [PublisherPeer(hub), PublisherPeer(hub)]
    for publisher in publishers:
        publisher.refusal = RequestError("busy", RequestCode.EXCESSIVE_LOAD, 700)
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    refusal = consumer.end.of(events.RequestRefused)[0].error
    assert (refusal.error_code, refusal.retry_interval) == (RequestCode.EXCESSIVE_LOAD, 701)
    assert consumer.refused(request_id) is not None
    assert [len(publisher.subscribes) for publisher in publishers] == [1, 1]


def test_a_redirect_of_upstream_is_not_passed_on() -> None:
    """It is for this relay, and nobody below may follow it."""
    hub = Hub()
    publisher = PublisherPeer(hub)
    publisher.refusal = Redirected("there", "", PUBLICATION, b"v.raw.s0")
    consumer = ConsumerPeer(hub)
    for request_id in (consumer.subscribe(), consumer.fetch()):
        assert consumer.refused(request_id) == RequestCode.DOES_NOT_EXIST
    assert all(refused.error.redirect is None for refused in consumer.end.of(events.RequestRefused))
    assert publisher.subscribes


def test_one_refusal_of_two_upstreams_does_no_harm() -> None:
    hub = Hub()
    refusing, serving = PublisherPeer(hub), PublisherPeer(hub)
    put_group(serving.track(), 0, 1)
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    assert len(refusing.subscribes) == 1
    assert consumer.locations(request_id) == [Location(0, 0)]


def test_every_matching_publisher_is_asked_and_each_object_goes_on_once() -> None:
    hub = Hub()
    publishers = [PublisherPeer(hub), PublisherPeer(hub), PublisherPeer(hub, (b"other",))]
    tracks = [publisher.track() for publisher in publishers[:2]]
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    assert [len(publisher.subscribes) for publisher in publishers] == [1, 1, 0]
    for track in tracks:
        put_group(track, 0, 3)
        hub.run()
    assert consumer.locations(request_id) == [Location(0, i) for i in range(3)]


def test_a_new_publisher_is_asked_for_tracks_that_are_followed() -> None:
    hub = Hub()
    first = PublisherPeer(hub)
    first.track()
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    second = PublisherPeer(hub, None)
    track = second.track()
    second.announce(PUBLICATION)
    assert len(second.subscribes) == 1
    put_group(track, 0, 2)
    hub.run()
    assert consumer.locations(request_id) == [Location(0, 0), Location(0, 1)]
    first.leave()
    hub.advance(2)
    assert consumer.done(request_id) is None  # the other publisher is still there
    second.vanish()
    hub.advance(2)
    done = consumer.done(request_id)
    assert done is not None and done.status == PublishDoneCode.GOING_AWAY


def test_many_consumers_share_one_upstream_subscription() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    track = publisher.track()
    consumers = [ConsumerPeer(hub) for _ in range(5)]
    requests = [consumer.subscribe() for consumer in consumers]
    put_group(track, 0, 4)
    hub.run()
    for consumer, request_id in zip(consumers, requests, strict=True):
        assert consumer.locations(request_id) == [Location(0, i) for i in range(4)]
    assert len(publisher.subscribes) == 1
    assert track.objects_sent == 5  # four and the End of Group, once each
    asked = publisher.subscribes[0].parameters
    chosen = asked.get(ParameterType.LOCATION_FILTER)
    assert chosen == LocationFilter.next_object()
    fill = asked.get(ParameterType.FILL_PARAMETERS)
    assert fill.get(ParameterType.LOCATION_FILTER).type is LocationFilterType.ABSOLUTE_START


def test_an_unused_upstream_subscription_lingers_and_is_cancelled() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    put_group(publisher.track(), 0, 1)
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    consumer.cancel(request_id)
    hub.advance(4.9)
    assert not [event for event in publisher.end.of(events.RequestCancelled) if not event.ours]
    again = consumer.subscribe()
    assert consumer.locations(again) == [Location(0, 0)]
    assert len(publisher.subscribes) == 1  # it was still there
    hub.advance(20)
    consumer.cancel(again)
    hub.advance(5.1)
    assert [event.ours for event in publisher.end.of(events.RequestCancelled)] == [False]
    assert hub.core.snapshot().tracks == 1  # what it brought stays cached


def test_largest_object_is_the_larger_of_what_upstream_said_and_what_came() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    track = publisher.track()
    put_group(track, 3, 2)
    consumer = ConsumerPeer(hub)

    def largest(request_id: int) -> object:
        accepted = consumer.accepted(request_id)
        assert accepted is not None
        return accepted.reply.parameters.get(ParameterType.LARGEST_OBJECT)

    assert largest(consumer.subscribe(fill=None)) == Location(3, 2)
    put(track, 4, 0)
    hub.run()
    assert largest(consumer.subscribe(fill=None)) == Location(4, 0)
    # A FETCH of the past does not move it.
    consumer.fetch(chosen=LocationFilter.group_end(3, 0, 3))
    assert largest(consumer.subscribe(fill=None)) == Location(4, 0)


def test_track_status_is_answered_from_upstream() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    properties = KeyValues.of({Property.MAX_CACHE_DURATION: 60_000})
    put_group(publisher.track(properties=properties), 1, 1)
    consumer = ConsumerPeer(hub)
    request_id = consumer.end.core.requester.track_status(full_name())
    hub.run()
    accepted = consumer.accepted(request_id)
    assert accepted is not None
    assert accepted.reply.parameters.get(ParameterType.LARGEST_OBJECT) == Location(1, 1)
    assert accepted.reply.track_properties == properties
    hub.advance(6)
    assert [event.ours for event in publisher.end.of(events.RequestCancelled)] == [False]


def test_track_properties_go_on() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    properties = KeyValues.of({Property.DEFAULT_PUBLISHER_PRIORITY: 7, 0x3C01: b"unknown"})
    track = publisher.track(properties=properties)
    put(track, 0, 0, priority=None)
    consumer = ConsumerPeer(hub)
    plain = consumer.accepted(consumer.subscribe())
    assert plain is not None and plain.reply.track_properties == properties
    hidden = consumer.accepted(consumer.subscribe(include_properties=0))
    assert hidden is not None and not hidden.reply.track_properties
    put(track, 0, 1, priority=None)
    hub.run()
    # Who does not know the default gets the priority with each stream (§11.3).
    assert {item.header.publisher_priority for item in consumer.objects()} == {7}


def test_a_peer_may_subscribe_to_what_it_publishes() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    track = publisher.track()
    put_group(track, 0, 2)
    peer = ConsumerPeer.__new__(ConsumerPeer)
    peer.hub, peer.spoke, peer.end = hub, publisher.spoke, publisher.end
    request_id = peer.subscribe()
    put_group(track, 1, 1)
    hub.run()
    assert peer.locations(request_id) == [Location(0, 0), Location(0, 1), Location(1, 0)]


def test_a_fetch_of_ones_own_track_reaches_oneself() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    track = publisher.track()
    put_group(track, 0, 2)
    peer = ConsumerPeer.__new__(ConsumerPeer)
    peer.hub, peer.spoke, peer.end = hub, publisher.spoke, publisher.end
    request_id = peer.fetch()
    assert peer.locations(request_id) == [Location(0, 0), Location(0, 1)]


def test_requests_that_wait_for_one_track_are_limited() -> None:
    hub = Hub(RelayLimits(max_waiting_per_track=2))
    consumer = ConsumerPeer(hub)
    requests = [consumer.subscribe(rendezvous_timeout=1000) for _ in range(3)]
    codes = [consumer.refused(request_id) for request_id in requests]
    assert codes == [None, None, RequestCode.EXCESSIVE_LOAD]


def test_tracks_are_limited_and_unused_ones_make_room() -> None:
    hub = Hub(RelayLimits(max_tracks=2, upstream_linger=0.0))
    publisher = PublisherPeer(hub)
    names = [full_name(b"track-%d" % number) for number in range(3)]
    for name in names:
        put_group(publisher.track(name), 0, 1)
    consumer = ConsumerPeer(hub)
    first, second = consumer.subscribe(names[0]), consumer.subscribe(names[1])
    refused = consumer.subscribe(names[2])
    assert consumer.refused(refused) == RequestCode.EXCESSIVE_LOAD
    consumer.cancel(first)
    hub.advance(0.1)
    third = consumer.subscribe(names[2])
    assert consumer.locations(third) == [Location(0, 0)]
    assert hub.core.snapshot().tracks == 2
    assert consumer.done(second) is None


def test_a_publisher_that_goes_away_is_not_asked_for_more() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    put_group(publisher.track(), 0, 1)
    publisher.end.core.goaway(now=hub.now)
    hub.run()
    consumer = ConsumerPeer(hub)
    assert consumer.refused(consumer.subscribe()) == RequestCode.DOES_NOT_EXIST


@pytest.mark.parametrize("cancelled_first", [True, False])
def test_a_request_cancelled_while_it_waits_is_forgotten(cancelled_first: bool) -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    publisher.silent = True
    track = publisher.track()
    put_group(track, 0, 1)
    end_track(track, 1)
    consumer, other = ConsumerPeer(hub), ConsumerPeer(hub)
    request_id = consumer.subscribe()
    kept = other.subscribe()
    if cancelled_first:
        consumer.cancel(request_id)
    else:
        hub.disconnect(consumer.spoke)
    subscribe = publisher.subscribes[0]
    publisher.end.core.responder.accept_subscribe(subscribe.request_id, track, hub.now)
    hub.advance(3)
    assert consumer.locations(request_id) == []
    assert other.locations(kept) == [Location(0, 0)]
    done = other.done(kept)
    assert done is not None and done.status == PublishDoneCode.TRACK_ENDED


def test_what_a_fetch_brought_first_still_reaches_subscriptions_live() -> None:
    hub = Hub()
    behind, ahead = PublisherPeer(hub), PublisherPeer(hub, None)
    slow, fast = behind.track(), ahead.track()
    for track in (slow, fast):
        put_group(track, 0, 1)
    live = ConsumerPeer(hub)
    request_id = live.subscribe()
    put_group(fast, 1, 2)
    ahead.announce(PUBLICATION)  # it is past what the relay has seen: its Largest Object is 1/2
    late = ConsumerPeer(hub)
    fill = late.subscribe()
    assert late.locations(fill) == [Location(0, 0), Location(1, 0), Location(1, 1)]
    assert live.locations(request_id) == [Location(0, 0)]
    put_group(slow, 1, 2)
    hub.run()
    assert live.locations(request_id) == [Location(0, 0), Location(1, 0), Location(1, 1)]
    assert late.locations(fill) == [Location(0, 0), Location(1, 0), Location(1, 1)]

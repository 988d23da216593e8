"""Relays whose upstream is a relay (MOQT §7; KVCS "Relay Considerations")."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcs.access.permits import Place
from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import DoesNotExist, PublishDoneCode, RequestCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import ParameterType
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.relay.server import RelaySettings
from kvcs.relay.settings import RelayLimits
from kvcs.relay.uplinks import upstream_quic
from kvcs.relay.upstreams import MAX_PREFIXES, TRIES, Kind
from kvcs.testing.actors import EVERYTHING, PUBLICATION, SCOPE, ConsumerPeer, PublisherPeer
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import end_track, put_group
from tests.unit.relay.chains import (
    OBJECTS,
    A,
    B,
    C,
    chain,
    locations,
    named,
    subscribe_namespace,
    withdrawn,
)


def test_example_of_the_draft_message_by_message() -> None:
    """KVCS "Example Delivery through Two Relays": groups 0..4 are cached at B, 5 and on come."""
    upper, lower = chain()
    producer = PublisherPeer(upper)
    track = producer.track()
    for group in range(5):
        put_group(track, group, OBJECTS)
    early = ConsumerPeer(lower)  # the part that B has cached comes of an earlier consumer
    first = early.subscribe()
    assert early.locations(first) == locations(range(5))
    asked = lower.core.stats.upstream_subscriptions, upper.core.stats.upstream_subscriptions
    assert asked == (1, 1)

    consumer = ConsumerPeer(lower)
    request = consumer.subscribe(fill=EVERYTHING)
    reply = consumer.accepted(request)
    assert reply is not None
    assert reply.reply.parameters.get(ParameterType.LARGEST_OBJECT) == Location(4, OBJECTS)
    assert consumer.locations(request) == locations(range(5))  # the fill, from B's cache
    assert len(producer.subscribes) == 1 and not producer.fetches

    put_group(track, 5, OBJECTS)
    upper.run()
    assert consumer.locations(request) == locations(range(6))
    put_group(track, 6, OBJECTS)
    end_track(track, 7)
    upper.run()
    upper.advance(1.0)
    for who, subscription in ((early, first), (consumer, request)):
        assert who.locations(subscription) == locations(range(7))
        ended = who.done(subscription)
        assert ended is not None and ended.status == PublishDoneCode.TRACK_ENDED
    # One SUBSCRIBE for each hop, with Next Object and a fill from 0/0; each Object crossed once.
    (subscribe,) = producer.subscribes
    assert subscribe.parameters.get(ParameterType.LOCATION_FILTER) == LocationFilter.next_object()
    fill = subscribe.parameters.get(ParameterType.FILL_PARAMETERS)
    assert fill.get(ParameterType.LOCATION_FILTER) == LocationFilter.absolute_start(0, 0)
    assert upper.core.stats.upstream_subscriptions == 1
    assert lower.core.stats.upstream_subscriptions == 1
    normal_and_status = 7 * (OBJECTS + 1) + 1
    for hub in (upper, lower):
        assert 7 * OBJECTS <= hub.core.stats.objects_in <= normal_and_status


def test_fifty_consumers_are_one_upstream_subscription() -> None:
    upper, lower = chain()
    producer = PublisherPeer(upper)
    put_group(producer.track(), 0, OBJECTS)
    consumers = [ConsumerPeer(lower) for _ in range(50)]
    requests = [consumer.subscribe(run=False) for consumer in consumers]
    upper.run()
    for consumer, request in zip(consumers, requests, strict=True):
        assert consumer.locations(request) == locations(range(1))
    assert len(producer.subscribes) == 1
    assert lower.core.stats.upstream_subscriptions == 1
    assert lower.core.stats.objects_in == OBJECTS


@pytest.mark.parametrize("ask", ["subscribe", "fetch", "status"])
def test_what_no_upstream_has_does_not_exist(ask: str) -> None:
    upper, lower = chain()
    consumer = ConsumerPeer(lower)
    if ask == "status":
        request = consumer.end.core.requester.track_status(PublisherPeer(lower, None).track().name)
        lower.run()
    else:
        request = consumer.subscribe() if ask == "subscribe" else consumer.fetch()
    assert consumer.refused(request) == RequestCode.DOES_NOT_EXIST
    assert not len(lower.core._tracks) and not len(upper.core._tracks)


def test_upstreams_are_tried_in_order() -> None:
    first, second, lower = Hub(relay_id=A), Hub(relay_id=C), Hub(relay_id=B)
    lower.link(first, 0)
    lower.link(second, 1)
    producer = PublisherPeer(second)
    put_group(producer.track(), 0, OBJECTS)
    consumer = ConsumerPeer(lower)
    fetched = consumer.fetch(chosen=LocationFilter.group_end(0, 0, 0))
    assert consumer.locations(fetched) == locations(range(1))
    other = PublisherPeer(first)
    put_group(other.track(), 0, OBJECTS)
    lower.advance(30.0)
    lower.core.cache.drop(producer.track().name)
    again = consumer.fetch(chosen=LocationFilter.group_end(0, 0, 0))
    assert consumer.locations(again) == locations(range(1))
    assert len(other.subscribes) == 1 and len(producer.subscribes) == 1


def test_a_silent_upstream_is_joined_by_the_next() -> None:
    first, second, lower = Hub(relay_id=A), Hub(relay_id=C), Hub(relay_id=B)
    lower.link(first, 0)
    lower.link(second, 1)
    stalled, producer = PublisherPeer(first), PublisherPeer(second)
    stalled.silent = True
    put_group(producer.track(), 0, OBJECTS)
    consumer = ConsumerPeer(lower)
    request = consumer.subscribe()
    assert consumer.accepted(request) is None
    lower.advance(lower.core.limits.upstream_try + 0.1)
    assert consumer.locations(request) == locations(range(1))
    assert len(stalled.subscribes) == 1


def test_an_upstream_that_is_lost_is_followed_by_the_next() -> None:
    first, second, lower = Hub(relay_id=A), Hub(relay_id=C), Hub(relay_id=B)
    link = lower.link(first, 0)
    lower.link(second, 1)
    one, two = PublisherPeer(first), PublisherPeer(second)
    tracks = [one.track(), two.track()]
    consumer = ConsumerPeer(lower)
    for track in tracks:
        put_group(track, 0, OBJECTS)
    request = consumer.subscribe()
    put_group(tracks[0], 1, OBJECTS)
    put_group(tracks[1], 1, OBJECTS)
    lower.run()
    assert consumer.locations(request) == locations(range(2))
    first.disconnect(link)
    lower.run()
    lower.advance(1.0)
    put_group(tracks[1], 2, OBJECTS)
    lower.run()
    assert consumer.locations(request) == locations(range(3))
    assert consumer.done(request) is None
    put_group(tracks[1], 3, OBJECTS)
    lower.run()
    assert consumer.locations(request) == locations(range(4))
    (asked,) = two.subscribes
    fill = asked.parameters.get(ParameterType.FILL_PARAMETERS)
    # From the first Location that the cache of B lacks, not from the beginning.
    assert fill.get(ParameterType.LOCATION_FILTER) == LocationFilter.absolute_start(2, 0)


def test_whoever_waits_for_a_publisher_waits_at_the_upstream_too() -> None:
    upper, lower = chain()
    consumer, hasty = ConsumerPeer(lower), ConsumerPeer(lower)
    request = consumer.subscribe(rendezvous_timeout=20_000)
    for refused in (hasty.subscribe(), hasty.fetch()):
        assert hasty.refused(refused) == RequestCode.DOES_NOT_EXIST
    lower.advance(15.0)
    assert consumer.refused(request) is None
    producer = PublisherPeer(upper, None)
    put_group(producer.track(), 0, OBJECTS)
    producer.announce(PUBLICATION)
    assert consumer.locations(request) == locations(range(1))


def test_waiting_for_a_publisher_ends_in_time() -> None:
    _, lower = chain()
    consumer = ConsumerPeer(lower)
    request = consumer.subscribe(rendezvous_timeout=5_000)
    lower.advance(5.5)
    assert consumer.refused(request) == RequestCode.TIMEOUT
    lower.advance(60.0)
    assert not len(lower.core._tracks)


def test_an_upstream_that_comes_later_is_asked_for_those_who_wait() -> None:
    upper, lower = Hub(relay_id=A), Hub(relay_id=B)
    producer = PublisherPeer(upper)
    put_group(producer.track(), 0, OBJECTS)
    consumer = ConsumerPeer(lower)
    request = consumer.subscribe(rendezvous_timeout=20_000)
    lower.link(upper)
    assert consumer.locations(request) == locations(range(1))


def test_holes_of_the_cache_are_fetched_upstream() -> None:
    upper, lower = chain()
    producer = PublisherPeer(upper)
    track = producer.track()
    for group in range(3):
        put_group(track, group, OBJECTS)
    consumer = ConsumerPeer(lower)
    consumer.subscribe()
    entry = lower.core.cache.get(track.name)
    assert entry is not None
    entry.track.evict_group(1)
    again = consumer.fetch(chosen=LocationFilter.group_end(0, 0, 2))
    assert consumer.locations(again) == locations(range(3))
    assert lower.core.stats.upstream_fetches == 1
    assert not producer.fetches  # A had it


def test_namespaces_of_upstreams_are_named_on_demand_and_asked_once() -> None:
    upper, lower = chain()
    producer = PublisherPeer(upper)
    assert len(lower.core._routing.namespaces) == 0
    consumers = [ConsumerPeer(lower) for _ in range(5)]
    for consumer in consumers:
        subscribe_namespace(consumer)
        assert named(consumer) == [PUBLICATION[2:]]
    narrow = ConsumerPeer(lower)
    subscribe_namespace(narrow, PUBLICATION[:4])
    assert named(narrow) == [PUBLICATION[4:]]
    asked = [request for request in upper.spokes[0].relay.core.requests.all() if not request.ours]
    assert len(asked) == 1
    producer.withdraw()
    lower.run()
    for consumer in consumers:
        assert withdrawn(consumer) == [PUBLICATION[2:]]
    assert withdrawn(narrow) == [PUBLICATION[4:]]


def test_whoever_wants_many_prefixes_leaves_room_for_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MAX_PREFIXES, Kind.NAMESPACES, 3)
    upper, lower = chain()
    PublisherPeer(upper)
    greedy, consumer = ConsumerPeer(lower), ConsumerPeer(lower)
    for number in range(5):
        subscribe_namespace(greedy, (b"!", bytes([number])))
    subscribe_namespace(consumer)
    assert named(consumer) == [PUBLICATION[2:]]
    asked = [request for request in upper.spokes[0].relay.core.requests.all() if not request.ours]
    assert len(asked) == 3


def test_a_prefix_that_no_upstream_could_be_asked_for_is_refused_not_called_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MAX_PREFIXES, Kind.NAMESPACES, 2)
    _, lower = chain()
    consumer = ConsumerPeer(lower)
    numbers = [subscribe_namespace(consumer, (b"!", bytes([each]))) for each in range(3)]
    lower.advance(10.0)
    assert [consumer.refused(number) for number in numbers] == [
        None,
        None,
        RequestCode.EXCESSIVE_LOAD,
    ]
    # What is known here is named all the same.
    PublisherPeer(lower)
    here = subscribe_namespace(consumer)
    assert consumer.accepted(here) is not None and named(consumer) == [PUBLICATION[2:]]


def test_what_one_session_may_cause_is_a_part_of_the_request_streams_upstream() -> None:
    upstream = RelaySettings(cert="cert.pem", key="key.pem", allow_anyone=True)
    prefixes = sum(MAX_PREFIXES.values())
    assert upstream.quic.bidi_streams > 2 * upstream.limits.max_caused_per_session + prefixes
    # Of upstreams that allow fewer streams, prefixes leave some for the Tracks.
    assert prefixes < QuicSettings().bidi_streams


def test_what_one_publisher_leaves_open_is_a_part_of_the_data_streams_of_an_upstream() -> None:
    listening = RelaySettings(cert="cert.pem", key="key.pem", allow_anyone=True).quic
    asking = upstream_quic(listening)
    assert asking.uni_streams >= 8 * listening.uni_streams
    assert replace(asking, uni_streams=listening.uni_streams) == listening
    assert upstream_quic(replace(listening, uni_streams=10_000)).uni_streams == 10_000


def test_a_wider_prefix_takes_over_without_a_gap() -> None:
    upper, lower = chain()
    PublisherPeer(upper)
    narrow, wide = ConsumerPeer(lower), ConsumerPeer(lower)
    subscribe_namespace(narrow, PUBLICATION[:4])
    subscribe_namespace(wide)
    lower.advance(5.0)
    assert named(wide) == [PUBLICATION[2:]]
    assert named(narrow) == [PUBLICATION[4:]] and not withdrawn(narrow)
    asked = [one for one in upper.spokes[0].relay.core.requests.all() if not one.ours]
    assert len(asked) == 1


def test_an_upstream_is_asked_no_longer_when_nobody_wants_to_hear() -> None:
    upper, lower = chain()
    consumer = ConsumerPeer(lower)
    request = subscribe_namespace(consumer)
    consumer.cancel(request)
    lower.advance(lower.core.limits.upstream_linger + 1)
    assert not [one for one in upper.spokes[0].relay.core.requests.all() if not one.ours]


def test_a_lost_upstream_takes_its_namespaces_with_it() -> None:
    upper, lower = Hub(relay_id=A), Hub(relay_id=B)
    link = lower.link(upper)
    PublisherPeer(upper)
    consumer = ConsumerPeer(lower)
    subscribe_namespace(consumer)
    upper.disconnect(link)
    lower.run()
    assert withdrawn(consumer) == [PUBLICATION[2:]]
    lower.link(upper)
    assert named(consumer) == [PUBLICATION[2:]] * 2


def test_a_silent_upstream_does_not_hold_a_namespace_subscription_for_ever() -> None:
    upper, lower = chain()
    upper.core.event = lambda *_: None  # type: ignore[method-assign]
    consumer = ConsumerPeer(lower)
    request = subscribe_namespace(consumer)
    assert consumer.accepted(request) is None
    lower.advance(lower.core.limits.namespace_wait + 0.1)
    assert consumer.accepted(request) is not None


def test_tracks_of_upstreams_are_published_to_whoever_subscribes_to_tracks() -> None:
    upper, lower = chain()
    publisher = PublisherPeer(upper, None)
    track = publisher.track()
    put_group(track, 0, OBJECTS)
    consumer = ConsumerPeer(lower)
    consumer.end.core.requester.subscribe_tracks(SCOPE)
    lower.run()
    publisher.end.core.requester.publish(track)
    lower.run()
    (published,) = consumer.end.of(events.PublishReceived)
    assert published.full_track_name == track.name
    consumer.end.core.responder.accept_publish(published.request_id)
    lower.run()
    put_group(track, 1, OBJECTS)
    lower.run()
    assert consumer.locations(published.request_id) == locations(range(1, 2))


# Circles


def test_a_relay_is_no_upstream_of_its_own() -> None:
    hub = Hub(relay_id=A)
    link = hub.link(hub)
    assert link.lost
    reports = []
    while (report := hub.core.next_report()) is not None:
        reports.append(report.event)
    assert "upstream_is_this_relay" in reports
    consumer = ConsumerPeer(hub)
    assert consumer.refused(consumer.subscribe()) == RequestCode.DOES_NOT_EXIST


@pytest.mark.parametrize("known", [True, False])
def test_two_relays_that_are_each_others_upstream(known: bool) -> None:
    one, two = (Hub(relay_id=name if known else b"") for name in (A, B))
    one.link(two)
    two.link(one)
    consumer = ConsumerPeer(one)
    request = consumer.subscribe()
    if not known:  # nothing tells that it is a circle: time alone ends it
        one.advance(one.core.limits.upstream_wait + 5)
    assert consumer.refused(request) is not None
    one.advance(60.0)
    assert not len(one.core._tracks) and not len(two.core._tracks)
    producer = PublisherPeer(two)
    put_group(producer.track(), 0, OBJECTS)
    assert consumer.locations(consumer.subscribe()) == locations(range(1))
    beside = ConsumerPeer(two)
    assert beside.locations(beside.subscribe()) == locations(range(1))
    assert len(producer.subscribes) == 1


def test_two_relays_do_not_keep_a_namespace_alive_between_them() -> None:
    one, two = Hub(relay_id=A), Hub(relay_id=B)
    one.link(two)
    two.link(one)
    consumers = [ConsumerPeer(one), ConsumerPeer(two)]
    for consumer in consumers:
        subscribe_namespace(consumer)
    producer = PublisherPeer(one)
    for consumer in consumers:
        assert named(consumer) == [PUBLICATION[2:]]
    producer.withdraw()
    for consumer in consumers:
        assert withdrawn(consumer) == [PUBLICATION[2:]]
    assert len(one.core._routing.namespaces) == len(two.core._routing.namespaces) == 0


def test_three_relays_in_a_circle_are_bounded_by_time() -> None:
    hubs = [Hub(relay_id=name) for name in (A, B, C)]
    for index, hub in enumerate(hubs):
        hub.link(hubs[(index + 1) % 3])
    consumer = ConsumerPeer(hubs[0])
    request = consumer.subscribe()
    hubs[0].advance(hubs[0].core.limits.upstream_wait + 1)
    assert consumer.refused(request) is not None
    hubs[0].advance(60.0)
    assert all(not len(hub.core._tracks) for hub in hubs)


# What goes wrong upstream


def test_the_code_of_an_upstream_goes_to_whoever_asked() -> None:
    upper, lower = chain()
    producer = PublisherPeer(upper)
    producer.track()
    producer.refusal = RequestError("no", RequestCode.UNAUTHORIZED)
    consumer = ConsumerPeer(lower)
    assert consumer.refused(consumer.subscribe()) == RequestCode.UNAUTHORIZED
    producer.refusal = DoesNotExist("gone")
    assert consumer.refused(consumer.fetch()) == RequestCode.DOES_NOT_EXIST


def test_too_many_matches_are_refused_once_upstreams_have_answered() -> None:
    _, lower = chain(limits=RelayLimits(max_namespace_matches=1))
    publisher = PublisherPeer(lower, (b"free", b"1"))
    publisher.announce((b"free", b"2"))
    consumer = ConsumerPeer(lower)
    assert consumer.refused(subscribe_namespace(consumer, (b"free",))) == (
        RequestCode.NAMESPACE_TOO_LARGE
    )
    assert named(consumer) == []
    publisher.withdraw()
    assert consumer.refused(subscribe_namespace(consumer, (b"free",))) is None
    publisher.announce((b"free", b"3"))
    assert named(consumer) == [(b"3",)]


@pytest.mark.parametrize("held", [2.0, 0.0])
def test_a_prefix_is_asked_again_however_often_an_upstream_has_ended_it(held: float) -> None:
    """But not one that it ends again and again as soon as it is accepted."""
    upper, lower = chain()
    consumer = ConsumerPeer(lower)
    subscribe_namespace(consumer)
    (relay,) = upper.core._peers.values()
    ended = 0
    for _ in range(600):
        for request_id in list(relay.interests):
            ended += 1
            relay.core.responder.revoke(request_id)
            upper.core.cancelled(Place(0, request_id), relay, upper.now)
        lower.advance(held or 0.1)
        if held and ended > 2 * TRIES:
            break
    assert ended == TRIES if not held else ended > 2 * TRIES
    PublisherPeer(upper)
    lower.advance(5.0)
    assert named(consumer) == ([PUBLICATION[2:]] if held else [])

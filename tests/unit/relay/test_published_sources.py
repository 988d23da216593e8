"""A Track that was published to a relay serves all who ask for it (MOQT §9.8)."""

from __future__ import annotations

import pytest

from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, RequestCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.settings import SessionSettings
from kvcs.moqt.streams import SubgroupHeader
from kvcs.relay.new_groups import NEW_GROUP_PAUSE
from kvcs.testing.actors import SCOPE, ConsumerPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.residue import residue
from kvcs.testing.tracks import end_track, put, put_group, subgroup_stream
from tests.unit.relay.publishing import Listener, Pusher, pair


def test_a_published_track_serves_a_later_subscribe_and_its_fill() -> None:
    hub, pusher = pair()
    source, request_id = pusher.push()
    put_group(source, 0, 2)
    hub.run()
    consumer = ConsumerPeer(hub)
    asked = consumer.subscribe()
    put_group(source, 1, 1)
    hub.run()
    assert sorted(consumer.locations(asked)) == [(0, 0), (0, 1), (1, 0)]
    assert pusher.subscribes == []
    assert pusher.fetches == [], "all of it was cached"
    assert pusher.updates(request_id) is True


@pytest.mark.parametrize("fill", [LocationFilter.absolute_start(0, 0), None])
def test_a_paused_publish_is_resumed_and_nothing_is_lost_at_the_seam(
    fill: LocationFilter | None,
) -> None:
    hub, pusher = pair()
    source, request_id = pusher.push(parameters=Parameters.of(forward=0))
    put_group(source, 0, 2)
    put_group(source, 1, 2)
    hub.run()
    assert pusher.updates(request_id) is False
    consumer = ConsumerPeer(hub)
    asked = consumer.subscribe(fill=fill)
    accepted = consumer.accepted(asked)
    assert accepted is not None
    assert accepted.reply.parameters.get(ParameterType.LARGEST_OBJECT) == Location(1, 2)
    put_group(source, 2, 1)
    hub.run()
    past = [] if fill is None else [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sorted(consumer.locations(asked)) == [*past, (2, 0)]
    assert pusher.updates(request_id) is True


def test_a_published_track_that_nobody_needs_is_paused_and_resumed() -> None:
    hub, pusher = pair(upstream_linger=5.0)
    source, request_id = pusher.push()
    consumer = ConsumerPeer(hub)
    first = consumer.subscribe()
    put_group(source, 0, 1)
    hub.run()
    consumer.cancel(first)
    hub.advance(4.0)
    assert pusher.updates(request_id) is True
    hub.advance(2.0)
    assert pusher.updates(request_id) is False
    put_group(source, 1, 1)
    hub.run()
    again = consumer.subscribe()
    put_group(source, 2, 1)
    hub.run()
    assert sorted(consumer.locations(again)) == [(0, 0), (1, 0), (2, 0)]


def test_pausing_and_resuming_at_once_ends_as_it_should() -> None:
    hub, pusher = pair(upstream_linger=0.0)
    source, request_id = pusher.push()
    consumer = ConsumerPeer(hub)
    for _ in range(5):
        asked = consumer.subscribe(fill=None, run=False)
        for _ in range(4):
            hub.step()
        consumer.end.core.requester.cancel(asked)
        for _ in range(3):
            hub.step()
    last = consumer.subscribe(fill=None)
    put_group(source, 0, 1)
    hub.run()
    assert consumer.locations(last) == [(0, 0)]
    assert pusher.updates(request_id) is True


def test_who_only_looks_for_tracks_leaves_their_publishers_paused() -> None:
    hub, pusher = pair()
    source, request_id = pusher.push(parameters=Parameters.of(forward=0))
    put_group(source, 0, 2)
    listener = Listener(hub)
    listener.ask(forward=0)
    (published,) = listener.published()
    assert published.parameters.get(ParameterType.FORWARD) == 0
    hub.advance(20.0)
    put_group(source, 1, 1)
    hub.run()
    assert pusher.updates(request_id) is False
    fill = Parameters.of(location_filter=LocationFilter.absolute_start(0, 0))
    resumed = Parameters.of(forward=1, fill_parameters=fill)
    listener.end.core.requester.update(published.request_id, resumed)
    hub.run()
    assert pusher.updates(request_id) is True
    (answered,) = listener.end.of(events.RequestUpdateAnswered)
    assert answered.reply.parameters.get(ParameterType.LARGEST_OBJECT) == Location(1, 1)
    put_group(source, 2, 1)
    hub.run()
    assert sorted(listener.locations()) == [(0, 0), (0, 1), (1, 0), (2, 0)]


def test_a_paused_subscribe_leaves_its_publisher_paused_and_is_resumed_in_order() -> None:
    hub, pusher = pair()
    source, request_id = pusher.push(parameters=Parameters.of(forward=0))
    consumer = ConsumerPeer(hub)
    asked = consumer.subscribe(fill=None, forward=0)
    assert consumer.accepted(asked) is not None
    assert pusher.updates(request_id) is False
    put_group(source, 0, 1)
    requester = consumer.end.core.requester
    updates = [
        requester.update(asked, Parameters.of(forward=1)),
        requester.update(asked, Parameters.of(subscriber_priority=3)),
    ]
    hub.run()
    answered = consumer.end.of(events.RequestUpdateAnswered)
    assert [event.update_id for event in answered] == updates
    assert answered[0].reply.parameters.get(ParameterType.LARGEST_OBJECT) == Location(0, 1)
    put_group(source, 1, 1)
    hub.run()
    assert consumer.locations(asked) == [(1, 0)]


def test_a_subscription_that_pauses_lets_its_publisher_pause() -> None:
    hub, pusher = pair(upstream_linger=5.0)
    source, request_id = pusher.push()
    consumer = ConsumerPeer(hub)
    asked = consumer.subscribe(fill=None)
    requester = consumer.end.core.requester
    requester.update(asked, Parameters.of(forward=0))
    hub.advance(6.0)
    assert pusher.updates(request_id) is False
    requester.update(asked, Parameters.of(forward=1))
    hub.run()
    put_group(source, 0, 1)
    hub.run()
    assert consumer.locations(asked) == [(0, 0)]
    hub.advance(20.0)
    assert pusher.updates(request_id) is True


@pytest.mark.parametrize("end", ["publisher", "consumer", "relay"])
def test_an_update_that_waits_for_upstream_ends_with_either(end: str) -> None:
    hub, pusher = pair()
    _, request_id = pusher.push(parameters=Parameters.of(forward=0))
    consumer = ConsumerPeer(hub)
    asked = consumer.subscribe(fill=None, forward=0)
    consumer.end.core.requester.update(asked, Parameters.of(forward=1))
    for _ in range(2):
        hub.step()
    if end == "publisher":
        pusher.end.core.responder.end_subscription(request_id, PublishDoneCode.TRACK_ENDED)
    elif end == "consumer":
        consumer.end.core.requester.cancel(asked)
    else:
        hub.disconnect(pusher.spoke)
        hub.core.session_closed(pusher.spoke.key, events.SessionClosed(None, "lost", True), hub.now)
    hub.run()
    hub.advance(20.0)
    assert residue(consumer.spoke.relay.core) == {}
    assert residue(consumer.end.core) == {}


def test_a_publish_that_waits_for_its_stream_keeps_upstream_flowing() -> None:
    hub, pusher = pair(upstream_linger=1.0)
    listener = Listener(hub)
    listener.ask()
    listener.spoke.relay.credit.bidirectional = 0
    source, request_id = pusher.push()
    hub.advance(10.0)
    assert pusher.updates(request_id) is True
    put_group(source, 0, 1)
    hub.run()
    listener.spoke.relay.credit.bidirectional = 1
    hub.run()
    (published,) = listener.published()
    assert published.parameters.get(ParameterType.LARGEST_OBJECT) == Location(0, 1)
    put_group(source, 1, 1)
    hub.run()
    assert listener.locations() == [(1, 0)]


@pytest.mark.parametrize("dynamic", [0, 1])
def test_a_request_for_a_new_group_is_handed_on_once(dynamic: int) -> None:
    hub, pusher = pair()
    properties = KeyValues.of({Property.DYNAMIC_GROUPS: dynamic})
    source, request_id = pusher.push(properties=properties)
    put_group(source, 3, 1)
    hub.run()
    consumer = ConsumerPeer(hub)
    asked = consumer.subscribe(fill=None, new_group_request=4)
    for value in (4, 2, 0, 5):
        again = Parameters.of(new_group_request=value)
        consumer.end.core.requester.update(asked, again)
        hub.advance(2 * NEW_GROUP_PAUSE)
    put_group(source, 7, 1)
    hub.run()
    consumer.end.core.requester.update(asked, Parameters.of(new_group_request=0))
    hub.advance(2 * NEW_GROUP_PAUSE)
    heard = [
        event.parameters.get(ParameterType.NEW_GROUP_REQUEST)
        for event in pusher.end.of(events.SubscriptionUpdated)
        if ParameterType.NEW_GROUP_REQUEST in event.parameters
    ]
    assert heard == ([4, 5, 0] if dynamic else [])
    assert request_id == 0


def test_requests_for_new_groups_without_end_cost_others_nothing() -> None:
    hub = Hub()
    pusher = Pusher(hub, namespace=None, settings=SessionSettings(request_burst=20))
    source, _ = pusher.push(properties=KeyValues.of({Property.DYNAMIC_GROUPS: 1}))
    put_group(source, 0, 1)
    other, flooder = ConsumerPeer(hub), ConsumerPeer(hub)
    served, asked = other.subscribe(fill=None), flooder.subscribe(fill=None)
    for value in range(1, 101):
        flooder.end.core.requester.update(asked, Parameters.of(new_group_request=value))
        hub.run()
    hub.advance(2 * NEW_GROUP_PAUSE)
    heard = [
        event.parameters.get(ParameterType.NEW_GROUP_REQUEST)
        for event in pusher.end.of(events.SubscriptionUpdated)
        if ParameterType.NEW_GROUP_REQUEST in event.parameters
    ]
    assert heard == [1, 100]
    put_group(source, 1, 1)
    hub.advance(1)
    assert other.done(served) is None and (1, 0) in other.locations(served)


def test_waiting_subscribes_are_refused_when_a_paused_publish_ends() -> None:
    hub, pusher = pair()
    _, request_id = pusher.push(parameters=Parameters.of(forward=0))
    consumer = ConsumerPeer(hub)
    asked = consumer.subscribe(run=False)
    pusher.end.core.responder.end_subscription(request_id, PublishDoneCode.TRACK_ENDED)
    hub.run()
    hub.advance(1.0)
    assert consumer.refused(asked) == RequestCode.DOES_NOT_EXIST


def test_a_publish_joins_a_track_that_is_subscribed_upstream_already() -> None:
    hub = Hub()
    publisher = Pusher(hub)
    source = publisher.track()
    consumer = ConsumerPeer(hub)
    asked = consumer.subscribe()
    request_id = publisher.push_track(source, Parameters.of(forward=0))
    assert publisher.updates(request_id) is True, "a downstream forwards"
    put_group(source, 0, 2)
    hub.run()
    assert consumer.locations(asked) == [(0, 0), (0, 1)]


def test_a_publish_ends_a_rendezvous() -> None:
    hub, pusher = pair()
    consumer = ConsumerPeer(hub)
    asked = consumer.subscribe(rendezvous_timeout=500)
    hub.advance(0.4)
    source, _ = pusher.push()
    assert consumer.accepted(asked) is not None
    put_group(source, 0, 1)
    hub.run()
    assert consumer.locations(asked) == [(0, 0)]


def test_a_track_only_published_is_fetched_from_its_publisher() -> None:
    hub, pusher = pair()
    source = pusher.track()
    put_group(source, 0, 3)
    pusher.push_track(source)
    consumer = ConsumerPeer(hub)
    asked = consumer.fetch(chosen=LocationFilter.absolute_range(0, 0, 0, 1))
    assert consumer.locations(asked) == [(0, 0), (0, 1)]
    assert len(pusher.fetches) == 1


def test_a_publish_is_accepted_without_any_subscriber_and_leaves_nothing() -> None:
    hub, pusher = pair()
    source, request_id = pusher.push()
    assert len(pusher.end.of(events.RequestAccepted)) == 1
    pusher.end.core.responder.end_subscription(request_id, PublishDoneCode.TRACK_ENDED)
    hub.run()
    hub.advance(10.0)
    assert residue(pusher.end.core, source) == {}
    assert residue(pusher.spoke.relay.core) == {}
    assert not len(hub.core._tracks)
    assert hub.core.snapshot().tracks == 0


def test_a_finished_published_track_is_served_from_the_cache() -> None:
    hub, pusher = pair()
    source, _ = pusher.push()
    consumer = ConsumerPeer(hub)
    first = consumer.subscribe()
    put_group(source, 0, 2)
    end_track(source, 1)
    hub.run()
    hub.advance(2.0)
    assert consumer.done(first) is not None
    late = ConsumerPeer(hub)
    asked = late.subscribe()
    hub.advance(2.0)
    assert late.locations(asked) == [(0, 0), (0, 1)]
    done = late.done(asked)
    assert done is not None
    assert done.status == PublishDoneCode.TRACK_ENDED


def test_a_malformed_published_track_ends_for_all_and_is_not_taken_again() -> None:
    hub, pusher = pair()
    listener = Listener(hub)
    listener.ask()
    source, request_id = pusher.push()
    delivery = pusher.end.core.deliveries.subscription(request_id)
    assert delivery is not None
    put(source, 0, 0)
    hub.run()
    header = SubgroupHeader(delivery.track_alias, 0, 0, 9)
    stream_id = 2 + 4 * 50
    pusher.spoke.relay.core.receive_stream_data(
        stream_id, subgroup_stream(header, 1), False, hub.now
    )
    pusher.spoke.relay.drain_events()
    hub.run()
    hub.advance(1.0)
    (done,) = listener.end.of(events.SubscriptionEnded)
    assert done.status == PublishDoneCode.MALFORMED_TRACK
    again = pusher.push_track(pusher.track())
    refused = pusher.end.of(events.RequestRefused)
    assert [event.request_id for event in refused] == [again]


def test_tracks_published_by_a_session_are_limited() -> None:
    hub, pusher = pair(max_published_per_session=1)
    _, first = pusher.push()
    pusher.push(full_name(b"v.raw.s0"))
    (refused,) = pusher.end.of(events.RequestRefused)
    assert refused.error.error_code == RequestCode.EXCESSIVE_LOAD
    pusher.end.core.responder.end_subscription(first, PublishDoneCode.TRACK_ENDED)
    hub.run()
    hub.advance(1.0)
    pusher.push(full_name(b"v.raw.s0"))
    assert len(pusher.end.of(events.RequestRefused)) == 1


def test_a_publish_of_a_kvcs_namespace_has_five_fields() -> None:
    _, pusher = pair()
    pusher.push(FullTrackName(SCOPE, b"t"))
    (refused,) = pusher.end.of(events.RequestRefused)
    assert refused.error.error_code == RequestCode.UNAUTHORIZED

"""PUBLISH through the relay: to SUBSCRIBE_TRACKS, and as a source of later SUBSCRIBEs (MOQT §7)."""

from __future__ import annotations

import pytest

from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, RequestCode
from kvcs.moqt.filters import LocationFilter, RangeFilter
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.settings import SessionSettings
from kvcs.moqt.store import Track
from kvcs.moqt.streams import SubgroupHeader
from kvcs.relay.new_groups import NEW_GROUP_PAUSE
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import PUBLICATION, SCOPE, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.residue import residue
from kvcs.testing.tracks import end_track, put, put_group, subgroup_stream

NAME = full_name()
TASTE = 0x78


class Pusher(PublisherPeer):
    """Publishes Tracks by PUBLISH, without an announcement where ``namespace`` is None."""

    def push(
        self,
        name: FullTrackName = NAME,
        parameters: Parameters | None = None,
        properties: KeyValues | None = None,
    ) -> tuple[Track, int]:
        """PUBLISH an empty Track; returns it and the Request ID."""
        target = self.track(name, properties)
        return target, self.push_track(target, parameters)

    def push_track(self, target: Track, parameters: Parameters | None = None) -> int:
        request_id = self.end.core.requester.publish(target, parameters)
        self.hub.run()
        return request_id

    def updates(self, request_id: int) -> bool | None:
        """The Forward State that the relay wants of a PUBLISH."""
        delivery = self.end.core.deliveries.subscription(request_id)
        return None if delivery is None else delivery.forward


class Listener(ConsumerPeer):
    """Asks for the Tracks below a prefix and takes what is published, or refuses it."""

    def __init__(self, hub: Hub, *, takes: bool = True) -> None:
        super().__init__(hub)
        self.takes = takes
        self.end.on_event = self._take

    def ask(self, prefix: tuple[bytes, ...] = SCOPE, **parameters: object) -> int:
        """SUBSCRIBE_TRACKS."""
        asked = Parameters.of(**parameters)
        request_id = self.end.core.requester.subscribe_tracks(prefix, asked)
        self.hub.run()
        return request_id

    def published(self) -> list[events.PublishReceived]:
        return self.end.of(events.PublishReceived)

    def _take(self, event: events.Event) -> None:
        if not isinstance(event, events.PublishReceived):
            return
        if self.takes:
            self.end.core.responder.accept_publish(event.request_id)
        else:
            refusal = RequestError("no", RequestCode.UNINTERESTED)
            self.end.core.responder.refuse(event.request_id, refusal)


def pair(**limits: float) -> tuple[Hub, Pusher]:
    hub = Hub(RelayLimits(**limits))  # type: ignore[arg-type]
    return hub, Pusher(hub, namespace=None)


# To SUBSCRIBE_TRACKS


@pytest.mark.parametrize("first", ["publisher", "listener"])
def test_a_published_track_reaches_who_asked_for_tracks(first: str) -> None:
    hub, pusher = pair()
    listener = Listener(hub)
    if first == "publisher":
        source, _ = pusher.push()
        listener.ask()
    else:
        listener.ask()
        source, _ = pusher.push()
    (published,) = listener.published()
    assert published.full_track_name == NAME
    put_group(source, 0, 2)
    hub.run()
    assert listener.locations() == [(0, 0), (0, 1)]
    end_track(source, 1)
    hub.run()
    hub.advance(2.0)
    done = listener.done(published.request_id)
    assert done is not None
    assert (done.status, done.every_stream_seen) == (PublishDoneCode.TRACK_ENDED, True)


def test_a_published_track_is_told_with_properties_and_largest_object() -> None:
    hub, pusher = pair()
    source = pusher.track(NAME, KeyValues.of({TASTE: 4}))
    put_group(source, 0, 2)
    pusher.push_track(source)
    listener = Listener(hub)
    listener.ask(group_order=2)
    (published,) = listener.published()
    assert published.track_properties == KeyValues.of({TASTE: 4})
    assert published.parameters == Parameters.of(largest_object=Location(0, 2), group_order=2)


@pytest.mark.parametrize(("taste", "told"), [(4, True), (9, False)])
def test_a_track_property_filter_selects(taste: int, told: bool) -> None:
    hub, pusher = pair()
    pusher.push(properties=KeyValues.of({TASTE: taste}))
    listener = Listener(hub)
    listener.ask(track_property_filter=[RangeFilter(0, ((1, 5),), TASTE)])
    assert len(listener.published()) == told


def test_the_publisher_itself_and_other_scopes_are_not_told() -> None:
    hub, pusher = pair()
    pusher.end.core.requester.subscribe_tracks(SCOPE)
    other = Listener(hub)
    other.ask((SCOPE[0], b"T" * 16))
    pusher.push()
    assert pusher.end.of(events.PublishReceived) == []
    assert other.published() == []


def test_a_held_subscribe_is_served_instead_of_a_publish() -> None:
    hub, pusher = pair()
    listener = Listener(hub)
    listener.ask()
    held = listener.subscribe(rendezvous_timeout=5000)
    assert listener.accepted(held) is None
    source, _ = pusher.push()
    assert listener.accepted(held) is not None
    assert listener.published() == []
    put_group(source, 0, 1)
    hub.run()
    assert listener.locations(held) == [(0, 0)]


def test_two_publishers_of_a_track_are_published_once_and_merged() -> None:
    hub, first = pair()
    second = Pusher(hub, namespace=None)
    listener = Listener(hub)
    listener.ask()
    source, _ = first.push()
    copy, _ = second.push()
    assert len(listener.published()) == 1
    put_group(source, 0, 2)
    put_group(copy, 0, 2)
    hub.run()
    assert listener.locations() == [(0, 0), (0, 1)]
    first.vanish()
    put_group(copy, 1, 1)
    hub.run()
    assert listener.locations() == [(0, 0), (0, 1), (1, 0)]
    assert listener.end.of(events.SubscriptionEnded) == []
    second.vanish()
    hub.advance(2.0)
    (done,) = listener.end.of(events.SubscriptionEnded)
    assert done.status == PublishDoneCode.GOING_AWAY


def test_a_refused_publish_is_not_offered_again_but_the_next_publication_is() -> None:
    hub, pusher = pair()
    listener = Listener(hub, takes=False)
    listener.ask()
    source, _ = pusher.push()
    Pusher(hub, namespace=None).push_track(source)
    assert len(listener.published()) == 1
    end_track(source, 0)
    hub.run()
    hub.advance(2.0)
    pusher.push()
    assert len(listener.published()) == 2


def test_what_led_to_a_publish_may_end_and_the_publish_goes_on() -> None:
    hub, pusher = pair()
    listener = Listener(hub)
    asked = listener.ask()
    source, _ = pusher.push()
    listener.cancel(asked)
    pusher.push(full_name(b"v.raw.s0"))
    assert len(listener.published()) == 1
    put_group(source, 0, 1)
    hub.run()
    assert listener.locations() == [(0, 0)]


def test_a_new_prefix_brings_what_lies_below_it() -> None:
    hub, pusher = pair()
    pusher.push(FullTrackName((b"free", b"a"), b"t"))
    pusher.push(FullTrackName((b"free", b"b"), b"t"))
    listener = Listener(hub)
    asked = listener.ask((b"free", b"a"))
    assert len(listener.published()) == 1
    moved = Parameters.of(track_namespace_prefix=(b"free", b"b"))
    listener.end.core.requester.update(asked, moved)
    hub.run()
    _, second = listener.published()
    assert second.full_track_name.namespace == (b"free", b"b")


def test_a_new_prefix_of_a_namespace_subscription_names_everything_anew() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    publisher.announce((b"free", b"b"))
    consumer = ConsumerPeer(hub)
    requester = consumer.end.core.requester
    asked = requester.subscribe_namespace(SCOPE)
    hub.run()
    requester.update(asked, Parameters.of(track_namespace_prefix=(b"free",)))
    hub.run()
    told = consumer.end.of(events.NamespaceAnnounced)
    assert [event.suffix for event in told] == [PUBLICATION[2:], (b"b",)]
    publisher.announce((b"free", b"c"))
    assert consumer.end.of(events.NamespaceAnnounced)[-1].suffix == (b"c",)


def test_too_many_matches_are_refused() -> None:
    hub, pusher = pair(max_namespace_matches=1)
    for track in (b"a", b"b"):
        pusher.push(FullTrackName((b"free",), track))
    listener = Listener(hub)
    assert listener.refused(listener.ask((b"free",))) == RequestCode.NAMESPACE_TOO_LARGE


def test_tracks_that_are_looked_at_in_vain_count_for_who_asks() -> None:
    hub = Hub()
    publisher, reader = PublisherPeer(hub), ConsumerPeer(hub)
    for number in range(5):
        name = full_name(b"%d" % number)
        publisher.track(name)
        reader.subscribe(name)
    limits = SessionSettings(max_matches_per_second=1.0, matches_burst=4)
    asker = ConsumerPeer(hub, None, limits)

    def ask(prefix: tuple[bytes, ...]) -> int:
        request_id = asker.end.core.requester.subscribe_tracks(prefix)
        hub.run()
        return request_id

    first = ask(SCOPE)
    assert asker.refused(first) is None
    asker.cancel(first)
    assert asker.refused(ask(SCOPE)) == RequestCode.EXCESSIVE_LOAD
    hub.advance(3)
    assert asker.refused(ask(SCOPE)) is None


def test_a_session_that_goes_away_is_offered_nothing_new() -> None:
    hub, pusher = pair()
    listener = Listener(hub)
    listener.ask()
    listener.end.core.goaway(now=hub.now)
    hub.run()
    pusher.push()
    assert listener.published() == []


# Ends at every moment

MOMENTS = ["before the relay knows", "before the answer", "established", "in mid object", "done"]


@pytest.mark.parametrize("who", ["publisher cancels", "subscriber cancels", "publisher is lost"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_published_track_that_ends_early_leaves_nothing(moment: str, who: str) -> None:
    hub, pusher = pair(upstream_linger=0.5)
    listener = Listener(hub)
    listener.ask()
    source = pusher.track()
    put_group(source, 0, 1, octets=500)
    request_id = pusher.end.core.requester.publish(source)
    relay_end = listener.spoke.relay
    if moment == "before the answer":
        listener.end.on_event = None
    if moment != "before the relay knows":
        hub.run()
    if moment == "in mid object":
        put(source, 1, 0, octets=500)
        relay_end.credit.object_octets = 100
        while not listener.end.of(events.ObjectChunk):
            assert hub.step()
        relay_end.credit.object_octets = 0
        hub.run()
        assert len(listener.end.of(events.ObjectStarted)) == 1
        assert listener.end.of(events.ObjectEnded) == []
    if moment == "done":
        end_track(source, 1)
        hub.run()
        hub.advance(1.0)
    if who == "publisher cancels":
        pusher.end.core.requester.cancel(request_id)
    elif who == "publisher is lost":
        hub.disconnect(pusher.spoke)
    else:
        for published in listener.published():
            listener.end.core.requester.cancel(published.request_id)
            refusal = RequestError("no", RequestCode.UNINTERESTED)
            if moment == "before the answer":
                listener.end.core.responder.refuse(published.request_id, refusal)
        hub.run()
        pusher.end.core.responder.end_subscription(request_id, PublishDoneCode.TRACK_ENDED)
    relay_end.credit.object_octets = 1 << 40
    hub.run()
    hub.advance(5.0)
    if moment == "before the answer" and who != "subscriber cancels":
        for published in listener.published():
            refusal = RequestError("no", RequestCode.UNINTERESTED)
            listener.end.core.responder.refuse(published.request_id, refusal)
    for interest in list(listener.end.core.requests.all()):
        listener.end.core.requester.cancel(interest.request_id)
    hub.run()
    hub.advance(60.0)
    assert not len(hub.core._tracks)
    assert residue(relay_end.core) == {}
    assert residue(listener.end.core) == {}
    assert residue(pusher.end.core, source) == {}
    if who != "publisher is lost":
        assert residue(pusher.spoke.relay.core) == {}
        assert not pusher.end.core.closed
    assert not listener.end.core.closed


# As a source


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

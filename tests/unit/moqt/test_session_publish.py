"""PUBLISH from both sides: subscriptions that begin at the publisher (MOQT §9.8 to §9.10)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcs.errors import RequestError, UsageError
from kvcs.moqt import messages as m
from kvcs.moqt.errors import PublishDoneCode, RequestCode, SessionCode
from kvcs.moqt.events import (
    DataStreamOpened,
    Event,
    ObjectStarted,
    PublishReceived,
    RequestAccepted,
    RequestCancelled,
    RequestRefused,
    RequestUpdateAnswered,
    StateNotified,
    SubscribeReceived,
    SubscriptionEnded,
)
from kvcs.moqt.filters import LocationFilter, RangeFilter
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.settings import Role
from kvcs.moqt.streams import SubgroupHeader
from kvcs.testing.bench import Bench
from kvcs.testing.pair import SessionPair
from kvcs.testing.residue import residue
from kvcs.testing.tracks import (
    NAME,
    end_track,
    locations,
    payload,
    put,
    put_group,
    subgroup_stream,
    track,
)

NONE, BARE = Parameters(), KeyValues()
OK = m.RequestOk(NONE, BARE)
OTHER = FullTrackName(NAME.namespace, b"other")
PAUSED = Parameters.of(forward=0)
FILL = Parameters.of(
    fill_parameters=Parameters.of(location_filter=LocationFilter.absolute_start(0, 0))
)


class Scene:
    """The client publishes a Track to the server, which answers with ``answer``."""

    def __init__(
        self,
        parameters: Parameters = NONE,
        answer: Callable[[SessionPair, int], None] | None = None,
        properties: KeyValues | None = None,
    ) -> None:
        self.pair = SessionPair()
        self.track = track(properties=properties)
        put_group(self.track, 0, 2)
        self._answer = answer or (lambda pair, it: pair.server.core.responder.accept_publish(it))
        self.pair.server.on_event = self._take
        self.request_id = self.pair.client.core.requester.publish(self.track, parameters)
        self.pair.run()

    def _take(self, event: Event) -> None:
        if isinstance(event, PublishReceived):
            self._answer(self.pair, event.request_id)

    def update(self, **parameters: object) -> m.RequestOk | m.RequestError:
        """REQUEST_UPDATE of the subscriber; returns its answer."""
        asked = Parameters.of(**parameters)
        self.pair.server.core.requester.update(self.request_id, asked)
        self.pair.run()
        return self.pair.server.of(RequestUpdateAnswered)[-1].reply

    def got(self) -> list[Location]:
        self.pair.run()
        return locations(self.pair.server.events)

    def check_nothing_is_left(self) -> None:
        self.pair.advance(5.0)
        assert residue(self.pair.client.core, self.track) == {}
        assert residue(self.pair.server.core) == {}
        assert not self.pair.client.core.closed


def test_a_published_track_is_told_with_its_largest_object_and_properties() -> None:
    scene = Scene(properties=KeyValues.of({0x78: 5}))
    (received,) = scene.pair.server.of(PublishReceived)
    assert received.full_track_name == NAME
    assert received.parameters.get(ParameterType.LARGEST_OBJECT) == Location(0, 2)
    assert received.track_properties == KeyValues.of({0x78: 5})
    assert scene.pair.client.of(RequestAccepted) == [RequestAccepted(scene.request_id, OK)]


def test_objects_follow_from_the_next_one_on_until_publish_done() -> None:
    scene = Scene()
    put_group(scene.track, 1, 2)
    assert scene.got() == [(1, 0), (1, 1)]
    end_track(scene.track, 2)
    scene.pair.run()
    scene.pair.advance(1.0)
    (ended,) = scene.pair.server.of(SubscriptionEnded)
    assert ended == SubscriptionEnded(
        scene.request_id, PublishDoneCode.TRACK_ENDED, "", every_stream_seen=True
    )
    scene.check_nothing_is_left()


def test_objects_that_overtake_the_answer_are_given_out_with_it() -> None:
    waiting: list[int] = []
    scene = Scene(answer=lambda _, request_id: waiting.append(request_id))
    put_group(scene.track, 1, 2)
    assert scene.got() == []
    assert scene.pair.server.of(DataStreamOpened) == []
    scene.pair.server.core.responder.accept_publish(waiting[0])
    assert scene.got() == [(1, 0), (1, 1)]


def test_a_paused_track_sends_nothing_until_the_subscriber_resumes_it() -> None:
    scene = Scene(PAUSED)
    put_group(scene.track, 1, 2)
    assert scene.got() == []
    reply = scene.update(forward=1)
    assert reply.parameters.get(ParameterType.LARGEST_OBJECT) == Location(1, 2)
    put_group(scene.track, 2, 1)
    assert scene.got() == [(2, 0)]
    scene.update(forward=0)
    put_group(scene.track, 3, 1)
    assert scene.got() == [(2, 0)]


def test_a_published_track_is_joined_with_a_fill() -> None:
    scene = Scene(PAUSED)
    put_group(scene.track, 1, 1)
    reply = scene.update(forward=1, fill_parameters=FILL.get(ParameterType.FILL_PARAMETERS))
    assert reply.parameters.get(ParameterType.LARGEST_OBJECT) == Location(1, 1)
    put_group(scene.track, 2, 1)
    assert sorted(scene.got()) == [(0, 0), (0, 1), (1, 0), (2, 0)]
    end_track(scene.track, 3)
    scene.pair.run()
    scene.pair.advance(1.0)
    (ended,) = scene.pair.server.of(SubscriptionEnded)
    assert ended.every_stream_seen


def test_the_subscriber_changes_filters_and_priority() -> None:
    scene = Scene()
    scene.update(objectid_filter=[RangeFilter(0, ((1, 1),))], subscriber_priority=3)
    put_group(scene.track, 1, 3)
    assert scene.got() == [(1, 1)]
    delivery = scene.pair.client.core.deliveries.subscription(scene.request_id)
    assert delivery is not None
    assert delivery.subscriber_priority == 3


def test_an_update_that_cannot_be_applied_ends_the_subscription() -> None:
    scene = Scene()
    reply = scene.update(
        objectid_filter=[RangeFilter(0, ((1, 1),)), RangeFilter(0, ((3, 3),))],
    )
    assert isinstance(reply, m.RequestError)
    assert reply.error_code == RequestCode.INVALID_FILTER
    (ended,) = scene.pair.server.of(SubscriptionEnded)
    assert ended.status == PublishDoneCode.UPDATE_FAILED
    scene.check_nothing_is_left()


def test_a_refused_track_sends_nothing_more_and_leaves_nothing() -> None:
    error = RequestError("no", RequestCode.UNINTERESTED)
    scene = Scene(answer=lambda pair, it: pair.server.core.responder.refuse(it, error))
    (refused,) = scene.pair.client.of(RequestRefused)
    assert refused.error.error_code == RequestCode.UNINTERESTED
    put_group(scene.track, 1, 1)
    assert scene.got() == []
    scene.check_nothing_is_left()


def test_streams_of_a_refused_track_are_stopped() -> None:
    bench = Bench()
    early = bench.uni(subgroup_stream(SubgroupHeader(7, 0, 0, 0), 0))
    other = bench.uni(subgroup_stream(SubgroupHeader(8, 0, 0, 0), 0))
    stream = bench.open(m.Publish(0, *NAME, 7, NONE, BARE))
    bench.core.responder.refuse(0, RequestError("no", RequestCode.UNINTERESTED))
    bench.drain()
    assert bench.stops == {early: 0x1}
    assert stream in bench.fins
    assert bench.core.data_streams.next_timer() is not None, f"{other} still waits"


def test_publish_done_may_come_before_the_answer() -> None:
    waiting: list[int] = []
    scene = Scene(answer=lambda _, request_id: waiting.append(request_id))
    put_group(scene.track, 1, 1)
    scene.pair.run()
    scene.pair.client.core.responder.end_subscription(scene.request_id, PublishDoneCode.TRACK_ENDED)
    scene.pair.run()
    assert scene.pair.server.of(SubscriptionEnded) == []
    scene.pair.server.core.responder.accept_publish(waiting[0])
    assert scene.got() == [(1, 0)]
    (ended,) = scene.pair.server.of(SubscriptionEnded)
    assert ended.every_stream_seen
    scene.check_nothing_is_left()


def test_publish_done_before_a_refusal_leaves_nothing() -> None:
    waiting: list[int] = []
    scene = Scene(answer=lambda _, request_id: waiting.append(request_id))
    scene.pair.client.core.responder.end_subscription(scene.request_id, PublishDoneCode.TRACK_ENDED)
    scene.pair.run()
    error = RequestError("no", RequestCode.UNINTERESTED)
    scene.pair.server.core.responder.refuse(waiting[0], error)
    scene.pair.run()
    scene.check_nothing_is_left()


def test_a_second_publish_done_closes() -> None:
    bench = Bench()
    stream = bench.open(m.Publish(0, *NAME, 7, NONE, BARE), m.PublishDone(0x2, 0, ""))
    assert bench.close is None
    bench.say(stream, m.PublishDone(0x2, 0, ""))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_fin_without_publish_done_is_a_failed_publish() -> None:
    bench = Bench()
    stream = bench.open(m.Publish(0, *NAME, 7, NONE, BARE))
    bench.core.responder.accept_publish(0)
    bench.drain()
    bench.data(stream, b"", fin=True)
    assert bench.take(RequestCancelled) == [RequestCancelled(0, False, None)]
    assert residue(bench.core) == {}


def test_fin_of_the_subscriber_behind_its_answer_ends_nothing() -> None:
    bench = Bench(Role.CLIENT)
    source = track()
    bench.core.requester.publish(source)
    bench.drain()
    bench.say(0, OK, fin=True)
    put_group(source, 0, 1)
    bench.drain()
    assert bench.take(RequestCancelled) == []
    assert payload(Location(0, 0)) in bench.sent[bench.opened[-1]]
    end_track(source, 1)
    bench.drain()
    bench.advance(1.0)
    assert residue(bench.core, source) == {}


def test_an_answer_and_updates_behind_our_publish_done_are_read_over() -> None:
    bench = Bench(Role.CLIENT)
    source = track()
    bench.core.requester.publish(source)
    bench.drain()
    bench.core.responder.end_subscription(0, PublishDoneCode.TRACK_ENDED)
    bench.drain()
    bench.say(0, OK, m.RequestUpdate(1, NONE), fin=True)
    assert bench.close is None
    assert residue(bench.core, source) == {}
    bench.open(m.TrackStatus(1, *NAME, NONE))
    assert bench.close_code == SessionCode.INVALID_REQUEST_ID, "the update had used it up"


# Track Aliases


def test_one_alias_for_two_tracks_closes_whether_subscribed_or_published() -> None:
    bench = Bench()
    bench.core.requester.subscribe(OTHER, NONE)
    bench.drain()
    bench.say(1, m.SubscribeOk(7, NONE, BARE))
    bench.open(m.Publish(0, *NAME, 7, NONE, BARE))
    assert bench.close_code == SessionCode.DUPLICATE_TRACK_ALIAS


def test_an_alias_that_a_publish_was_given_may_not_denote_a_subscription() -> None:
    bench = Bench()
    bench.open(m.Publish(0, *NAME, 7, NONE, BARE))
    bench.core.responder.accept_publish(0)
    bench.core.requester.subscribe(OTHER, NONE)
    bench.drain()
    bench.say(1, m.SubscribeOk(7, NONE, BARE))
    assert bench.close_code == SessionCode.DUPLICATE_TRACK_ALIAS


def test_two_publishes_of_one_alias_close_when_the_second_is_accepted() -> None:
    bench = Bench()
    bench.open(m.Publish(0, *NAME, 7, NONE, BARE))
    bench.open(m.Publish(2, *OTHER, 7, NONE, BARE))
    assert bench.close is None, "neither is established"
    bench.core.responder.accept_publish(0)
    bench.core.responder.accept_publish(2)
    bench.drain()
    assert bench.close_code == SessionCode.DUPLICATE_TRACK_ALIAS
    assert bench.core.failure is None


def test_an_alias_may_denote_one_track_twice() -> None:
    bench = Bench()
    bench.core.requester.subscribe(NAME, NONE)
    bench.drain()
    bench.say(1, m.SubscribeOk(7, NONE, BARE))
    bench.open(m.Publish(0, *NAME, 7, NONE, BARE))
    bench.core.responder.accept_publish(0)
    bench.drain()
    assert bench.close is None


def test_aliases_of_published_and_subscribed_tracks_differ() -> None:
    pair = SessionPair()
    first, second = track(), track(OTHER)
    requester, server = pair.client.core.requester, pair.server.core

    def answer(event: Event) -> None:
        if isinstance(event, PublishReceived):
            server.responder.accept_publish(event.request_id)

    def serve(event: Event) -> None:
        if isinstance(event, SubscribeReceived):
            pair.client.core.responder.accept_subscribe(event.request_id, second, pair.now)

    pair.server.on_event, pair.client.on_event = answer, serve
    requester.publish(first)
    asked = server.requester.subscribe(OTHER, NONE)
    pair.run()
    put_group(first, 0, 1)
    put_group(second, 0, 2)
    pair.run()
    assert len(locations(pair.server.events, asked)) == 2
    assert len(locations(pair.server.events)) == 3


# Stream credit


def test_a_publish_that_waits_for_a_stream_names_what_is_largest_when_it_goes() -> None:
    pair = SessionPair()
    source = track()
    pair.client.credit.bidirectional = 0
    pair.client.core.requester.publish(source)
    put_group(source, 0, 1)
    pair.run()
    assert pair.server.of(PublishReceived) == []
    pair.client.credit.bidirectional = 1
    pair.run()
    (received,) = pair.server.of(PublishReceived)
    assert received.parameters.get(ParameterType.LARGEST_OBJECT) == Location(0, 1)
    pair.server.core.responder.accept_publish(received.request_id)
    put_group(source, 1, 1)
    pair.run()
    assert locations(pair.server.events) == [(1, 0)]


@pytest.mark.parametrize("how", ["cancel", "end"])
def test_a_publish_that_waits_for_a_stream_can_be_taken_back(how: str) -> None:
    pair = SessionPair()
    source = track()
    pair.client.credit.bidirectional = 0
    request_id = pair.client.core.requester.publish(source)
    if how == "cancel":
        pair.client.core.requester.cancel(request_id)
    else:
        pair.client.core.responder.end_subscription(request_id, PublishDoneCode.TRACK_ENDED)
    pair.client.credit.bidirectional = 1
    pair.run()
    assert pair.server.of(PublishReceived) == []
    assert residue(pair.client.core, source) == {}


def test_what_no_message_can_hold_is_not_published() -> None:
    pair = SessionPair()
    source = track(properties=KeyValues.of({0x79: bytes(65535)}))
    with pytest.raises(UsageError):
        pair.client.core.requester.publish(source)
    assert residue(pair.client.core, source) == {}


# Track Properties


def test_a_mandatory_property_that_we_do_not_know_refuses_a_publish() -> None:
    bench = Bench()
    stream = bench.open(m.Publish(0, *NAME, 7, NONE, KeyValues.of({0x4000: 1})))
    (reply,) = bench.replies(stream)
    assert isinstance(reply, m.RequestError)
    assert reply.error_code == RequestCode.UNSUPPORTED_EXTENSION
    assert bench.take(PublishReceived) == []


def test_a_malformed_object_ends_a_published_track_only() -> None:
    bench = Bench()
    stream = bench.open(m.Publish(0, *NAME, 7, NONE, BARE))
    bench.core.responder.accept_publish(0)
    bench.drain()
    bench.uni(subgroup_stream(SubgroupHeader(7, 0, 0, 0), 0), fin=True)
    bench.uni(subgroup_stream(SubgroupHeader(7, 0, 0, 0), 1), fin=True)
    assert (bench.resets[stream], bench.stops[stream]) == (0x12, 0x12)
    assert bench.close is None


@pytest.mark.parametrize("field", [b".", b".session"])
def test_reserved_namespaces_are_not_published(field: bytes) -> None:
    bench = Bench()
    stream = bench.open(m.Publish(0, (field,), b"t", 7, NONE, BARE))
    (reply,) = bench.replies(stream)
    assert isinstance(reply, m.RequestError)
    assert reply.error_code == RequestCode.DOES_NOT_EXIST


# PUBLISH_STATE_NOTIFY


def test_a_publisher_tells_what_has_changed() -> None:
    scene = Scene()
    put_group(scene.track, 4, 1)
    scene.pair.client.core.responder.notify_state(
        scene.request_id, forward=True, location_filter=LocationFilter.next_object()
    )
    scene.pair.run()
    (notified,) = scene.pair.server.of(StateNotified)
    assert notified.request_id == scene.request_id
    assert notified.parameters == Parameters.of(
        largest_object=Location(4, 1), forward=1, location_filter=LocationFilter.next_object()
    )


def test_the_publisher_of_a_subscribe_tells_too_and_a_subscriber_may_not() -> None:
    bench = Bench()
    source = track()
    stream = bench.open(m.Subscribe(0, *NAME, NONE))
    bench.core.responder.notify_state(0)
    bench.core.responder.accept_subscribe(0, source, 0.0)
    bench.core.responder.notify_state(0)
    bench.drain()
    ok, notify = bench.replies(stream)
    assert isinstance(ok, m.SubscribeOk)
    assert notify == m.PublishStateNotify(NONE)
    bench.say(stream, m.PublishStateNotify(NONE))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_the_subscriber_of_a_publish_may_not_notify() -> None:
    bench = Bench(Role.CLIENT)
    bench.core.requester.publish(track())
    bench.drain()
    bench.say(0, OK, m.PublishStateNotify(NONE))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_a_notification_before_the_answer_closes() -> None:
    bench = Bench()
    bench.open(m.Publish(0, *NAME, 7, NONE, BARE), m.PublishStateNotify(NONE))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


# What else may come


def test_the_publisher_may_update_its_own_publish() -> None:
    scene = Scene()
    scene.pair.client.core.requester.update(scene.request_id, NONE)
    scene.pair.run()
    (answered,) = scene.pair.client.of(RequestUpdateAnswered)
    assert answered.reply == OK


def test_a_cancelled_subscription_stops_what_is_open() -> None:
    scene = Scene()
    put(scene.track, 1, 0)
    scene.pair.run()
    assert len(scene.pair.server.of(ObjectStarted)) == 1
    scene.pair.server.core.requester.cancel(scene.request_id)
    scene.pair.run()
    assert scene.pair.client.of(RequestCancelled) == [RequestCancelled(scene.request_id, True, 1)]
    scene.check_nothing_is_left()


def test_expires_goes_with_the_answer() -> None:
    scene = Scene(
        answer=lambda pair, it: pair.server.core.responder.accept_publish(it, expires_ms=500)
    )
    (accepted,) = scene.pair.client.of(RequestAccepted)
    assert accepted.reply == m.RequestOk(Parameters.of(expires=500), BARE)

"""Subscriptions from both sides: replies, aliases, updates and streams (MOQT §3.1, §9)."""

from __future__ import annotations

import pytest

from kvcs.errors import RequestError, UsageError
from kvcs.moqt import messages as m
from kvcs.moqt.errors import PublishDoneCode, RequestCode, SessionCode, StreamCode
from kvcs.moqt.events import (
    DatagramReceived,
    DataStreamOpened,
    ObjectStarted,
    RequestAccepted,
    RequestRefused,
    RequestUpdateAnswered,
    SubscribeReceived,
    SubscriptionEnded,
    TrackMalformed,
)
from kvcs.moqt.filters import LocationFilter, RangeFilter
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectHeader
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.streams import SubgroupHeader
from kvcs.testing.bench import Bench
from kvcs.testing.pair import SessionPair
from kvcs.testing.residue import residue
from kvcs.testing.tracks import (
    NAME,
    locations,
    put,
    put_group,
    track,
)
from tests.unit.moqt.subscriptions import (
    BARE,
    NONE,
    OK,
    OTHER,
    ends,
    serve,
    served,
    stream_of,
    subscriber,
    update,
)

# Replies


def test_subscribe_goes_out_with_its_order_and_is_accepted() -> None:
    pair, source, request_id = served(Parameters.of(subscriber_priority=3))
    (asked,) = pair.server.of(SubscribeReceived)
    assert asked.full_track_name == NAME
    assert asked.parameters.get(ParameterType.GROUP_ORDER) == 1
    (accepted,) = pair.client.of(RequestAccepted)
    assert accepted.request_id == request_id
    assert isinstance(accepted.reply, m.SubscribeOk)
    assert ParameterType.LARGEST_OBJECT not in accepted.reply.parameters
    put_group(source, 0, 1)
    pair.client.core.requester.subscribe(NAME, NONE)
    pair.run()
    _, accepted = pair.client.of(RequestAccepted)
    assert accepted.reply.parameters.get(ParameterType.LARGEST_OBJECT) == (0, 1)


@pytest.mark.parametrize(("include", "sent"), [(None, True), (1, True), (0, False)])
def test_track_properties_go_with_the_reply_unless_they_are_not_wanted(
    include: int | None, sent: bool
) -> None:
    properties = KeyValues.of({Property.DEFAULT_PUBLISHER_PRIORITY: 3})
    pair, source = SessionPair(), track(properties=properties)
    serve(pair, source)
    wanted = NONE if include is None else Parameters.of(include_properties=include)
    pair.client.core.requester.subscribe(NAME, wanted)
    pair.run()
    (accepted,) = pair.client.of(RequestAccepted)
    assert accepted.reply.track_properties == (properties if sent else BARE)


def test_a_refusal_ends_both_sides() -> None:
    pair = SessionPair()
    request_id = pair.client.core.requester.subscribe(NAME, NONE)
    pair.run()
    pair.server.core.responder.refuse(request_id, RequestError("later", 0x9, 250))
    pair.run()
    (refused,) = pair.client.of(RequestRefused)
    assert (refused.error.error_code, refused.error.retry_interval) == (0x9, 251)
    assert residue(pair.client.core) == {}
    assert residue(pair.server.core) == {}


def test_a_request_is_answered_once() -> None:
    pair, source, request_id = served()
    with pytest.raises(UsageError):
        pair.server.core.responder.accept_subscribe(request_id, source, 0.0)


def test_an_answer_to_a_request_that_was_cancelled_is_quiet() -> None:
    bench = Bench()
    stream = bench.open(m.Subscribe(0, *NAME, NONE))
    bench.reset(stream)
    responder = bench.core.responder
    responder.accept_subscribe(0, track(), 0.0)
    responder.accept_fetch(0, track(), 0.0)
    responder.answer_track_status(0, track())
    responder.accept(0)
    responder.end_subscription(0, PublishDoneCode.TRACK_ENDED)
    responder.revoke(0)
    bench.drain()
    assert bench.replies(stream) == []


def test_an_unknown_error_code_ends_the_request_only() -> None:
    bench = subscriber(None)
    bench.say(0, m.RequestError(0x9D, 0, "grease", None), fin=True)
    (refused,) = bench.take(RequestRefused)
    assert refused.error.error_code == 0x9D
    assert bench.close is None
    assert residue(bench.core) == {}


@pytest.mark.parametrize(
    ("properties", "code", "malformed"),
    [
        ({0x4000: 1}, None, False),
        ({Property.IMMUTABLE_PROPERTIES: KeyValues.of({0x4001: b"x"}).write()}, None, False),
        ({Property.IMMUTABLE_PROPERTIES: b"\x01"}, None, True),
        ({Property.DYNAMIC_GROUPS: 2}, SessionCode.PROTOCOL_VIOLATION, False),
        ({Property.DEFAULT_PUBLISHER_GROUP_ORDER: 0}, SessionCode.PROTOCOL_VIOLATION, False),
    ],
)
def test_track_properties_that_we_may_not_process(
    properties: dict[int, int | bytes], code: SessionCode | None, malformed: bool
) -> None:
    bench = subscriber(m.SubscribeOk(9, NONE, KeyValues.of(properties)))
    assert bench.close_code == code
    if code is not None:
        return
    if malformed:
        assert len(bench.take(TrackMalformed)) == 1
    else:
        (refused,) = bench.take(RequestRefused)
        assert refused.error.error_code == RequestCode.UNSUPPORTED_EXTENSION
    assert 0 in bench.resets
    assert 0 in bench.stops
    bench.reset(0)
    assert residue(bench.core) == {}


# Track Aliases


def test_an_alias_of_another_track_closes() -> None:
    bench = subscriber()
    bench.core.requester.subscribe(OTHER, NONE)
    bench.drain()
    bench.say(4, OK)
    assert bench.close_code == SessionCode.DUPLICATE_TRACK_ALIAS


def test_an_alias_may_be_shared_by_subscriptions_of_one_track() -> None:
    bench = subscriber()
    second = bench.core.requester.subscribe(NAME, NONE)
    bench.drain()
    bench.say(4, OK)
    bench.core.requester.cancel(second)
    bench.uni(stream_of(0, 0), fin=True)
    assert locations(bench.events, 0) == [(0, 0)]


def test_an_alias_is_free_again_when_its_subscription_is_over() -> None:
    bench = subscriber()
    bench.core.requester.cancel(0)
    bench.core.requester.subscribe(OTHER, NONE)
    bench.drain()
    bench.say(4, OK)
    assert bench.close is None


# Updates


def test_an_update_that_overtook_the_reply_is_applied_behind_it() -> None:
    bench = Bench()
    source = track()
    pause = Parameters.of(forward=0)
    stream = bench.open(m.Subscribe(0, *NAME, NONE), m.RequestUpdate(2, pause))
    bench.core.responder.accept_subscribe(0, source, 0.0)
    bench.drain()
    assert [type(reply) for reply in bench.replies(stream)] == [m.SubscribeOk, m.RequestOk]
    put(source, 0, 0)
    bench.drain()
    assert len(bench.opened) == 2


def test_updates_behind_one_that_failed_are_not_answered() -> None:
    bench = Bench()
    bad = Parameters.of(objectid_filter=[RangeFilter(0, ((0, 1),) * 1), RangeFilter(0, ((0, 1),))])
    stream = bench.open(
        m.Subscribe(0, *NAME, NONE), m.RequestUpdate(2, bad), m.RequestUpdate(4, NONE)
    )
    bench.core.responder.accept_subscribe(0, track(), 0.0)
    bench.drain()
    kinds = [type(reply) for reply in bench.replies(stream)]
    assert kinds == [m.SubscribeOk, m.RequestError, m.PublishDone]


def test_pausing_resets_what_is_open_and_resuming_goes_on_with_new_objects() -> None:
    pair, source, request_id = served()
    put(source, 0, 0)
    pair.run()
    update(pair, request_id, forward=0)
    assert ends(pair) == [StreamCode.CANCELLED]
    put(source, 0, 1)
    pair.run()
    update(pair, request_id, forward=1)
    (_, answered) = pair.client.of(RequestUpdateAnswered)
    assert answered.reply.parameters.get(ParameterType.LARGEST_OBJECT) == (0, 1)
    put(source, 0, 2)
    source.finish_subgroup(0, 0)
    pair.run()
    assert locations(pair.client.events) == [(0, 0), (0, 2)]
    assert ends(pair) == [StreamCode.CANCELLED, None]
    headers = [event.header for event in pair.client.of(DataStreamOpened)]
    assert [header.first_object for header in headers] == [True, False]


def test_a_narrowed_range_is_kept_at_once() -> None:
    pair, source, request_id = served()
    put(source, 0, 0)
    pair.run()
    update(pair, request_id, location_filter=LocationFilter.absolute_range(0, 0, 0, 1))
    for object_id in (1, 2):
        put(source, 0, object_id)
    source.finish_subgroup(0, 0)
    put(source, 1, 0)
    pair.run()
    assert locations(pair.client.events) == [(0, 0), (0, 1)]
    assert ends(pair) == [StreamCode.CANCELLED]


@pytest.mark.parametrize(("first", "sent"), [(0, [0, 1, 2]), (2, [2]), (3, [])])
def test_of_a_run_what_lies_in_the_range_is_sent(first: int, sent: list[int]) -> None:
    pair, source = SessionPair(), track()
    serve(pair, source)
    wanted = Parameters.of(location_filter=LocationFilter.absolute_range(4, first, 4, 9))
    pair.client.core.requester.subscribe(NAME, wanted)
    pair.run()
    run = [(ObjectHeader(4, object_id, 0, 0), ()) for object_id in range(3)]
    source.publish_run(run, 0.0)
    source.finish_subgroup(4, 0)
    pair.run()
    assert locations(pair.client.events) == [(4, object_id) for object_id in sent]


def test_datagrams_of_a_run_are_sent_one_by_one() -> None:
    pair, source, _ = served()
    source.publish_run([(ObjectHeader(0, object_id, None, 0), ()) for object_id in (0, 1)], 0.0)
    pair.run()
    came = [event.datagram.location for event in pair.client.of(DatagramReceived)]
    assert came == [(0, 0), (0, 1)]


def test_new_filters_reach_an_open_stream() -> None:
    pair, source, request_id = served()
    source.publish(ObjectHeader(0, 0, 0, 0), (), 0.0)
    pair.run()
    update(pair, request_id, objectid_filter=[RangeFilter(0, ((2, 2),))])
    for object_id in (1, 2):
        source.publish(ObjectHeader(0, object_id, 0, 0), (), 0.0)
    source.finish_subgroup(0, 0)
    pair.run()
    assert locations(pair.client.events) == [(0, 0), (0, 2)]
    assert ends(pair) == [None]


def test_a_new_priority_moves_what_is_queued() -> None:
    pair, source = SessionPair(), track()
    serve(pair, source)
    first = pair.client.core.requester.subscribe(NAME, NONE)
    second = pair.client.core.requester.subscribe(NAME, Parameters.of(subscriber_priority=100))
    pair.run()
    pair.server.credit.object_octets = 0
    put_group(source, 0, 2)
    update(pair, first, subscriber_priority=50)
    pair.server.credit.object_octets = 1 << 40
    pair.run()
    order = [event.request_id for event in pair.client.of(ObjectStarted)]
    assert order == [first] * 3 + [second] * 3


def test_an_update_leaves_a_fill_the_priority_of_its_own() -> None:
    pair, source = SessionPair(), track()
    serve(pair, source)
    put_group(source, 0, 1)
    fill = Parameters.of(location_filter=LocationFilter.none())
    own = fill.replace(subscriber_priority=10)
    pair.server.credit.object_octets = 0
    with_own = pair.client.core.requester.subscribe(NAME, Parameters.of(fill_parameters=own))
    taken_over = pair.client.core.requester.subscribe(NAME, Parameters.of(fill_parameters=fill))
    pair.run()
    update(pair, with_own, subscriber_priority=200)
    update(pair, taken_over, subscriber_priority=5)
    pair.server.credit.object_octets = 1 << 40
    pair.run()
    assert [event.request_id for event in pair.client.of(ObjectStarted)] == [taken_over, with_own]


def test_an_empty_update_is_a_sign_of_life() -> None:
    pair, _, request_id = served()
    update(pair, request_id)
    assert len(pair.client.of(RequestUpdateAnswered)) == 1


@pytest.mark.parametrize(
    "reply",
    [
        m.RequestOk(NONE, KeyValues.of({0x78: 1})),
        m.RequestOk(Parameters.of(expires=1, largest_object=Location(0, 0)), KeyValues.of({2: 1})),
    ],
)
def test_track_properties_in_the_answer_to_an_update_close(reply: m.RequestOk) -> None:
    bench = subscriber()
    bench.core.requester.update(0, NONE)
    bench.drain()
    bench.say(0, reply)
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_a_refused_update_is_reported_and_publish_done_ends_the_subscription() -> None:
    bench = subscriber()
    update_id = bench.core.requester.update(0, NONE)
    bench.drain()
    error = m.RequestError(0x36, 0, "", None)
    bench.say(0, error, m.PublishDone(0x8, 0, "REQUEST_UPDATE failed"), fin=True)
    assert bench.take(RequestUpdateAnswered) == [RequestUpdateAnswered(0, update_id, error)]
    (ended,) = bench.take(SubscriptionEnded)
    assert ended.status == PublishDoneCode.UPDATE_FAILED
    assert residue(bench.core) == {}


def test_publish_state_notify_changes_nothing() -> None:
    bench = subscriber()
    bench.say(0, m.PublishStateNotify(Parameters.of(forward=0, largest_object=Location(3, 4))))
    assert bench.close is None
    bench.uni(stream_of(0, 0))
    assert locations(bench.events) == [(0, 0)]


# Streams of a publisher


def test_a_stream_that_the_subscriber_stops_is_not_opened_again() -> None:
    pair, source, request_id = served()
    put(source, 0, 0)
    pair.run()
    (opened,) = pair.client.of(DataStreamOpened)
    pair.client.core.requester.stop_stream(opened.stream_id)
    pair.run()
    put(source, 0, 1)
    put(source, 1, 0)
    pair.run()
    assert locations(pair.client.events) == [(0, 0), (1, 0)]
    source.finish_subgroup(0, 0)
    update(pair, request_id, forward=0)
    update(pair, request_id, forward=1)
    put(source, 1, 1)
    pair.run()
    assert locations(pair.client.events)[2:] == [(1, 1)]


def test_what_breaks_off_upstream_and_comes_back_is_delivered_again() -> None:
    pair, source = SessionPair(), track(authoritative=False)
    serve(pair, source)
    request_id = pair.client.core.requester.subscribe(NAME, NONE)
    pair.run()
    header = SubgroupHeader(5, 0, 0, 0, first_object=True)

    def bring(*object_ids: int, cut: bool = False) -> None:
        stream = source.open_stream(header)
        for object_id in object_ids:
            writer = stream.begin(ObjectHeader(0, object_id, 0, 0, payload_length=4), 0.0)
            writer.write(memoryview(b"1234")[: 2 if cut else 4])
            pair.run()
        if cut:
            stream.reset(StreamCode.INTERNAL_ERROR)
        else:
            stream.finish()

    bring(0, cut=True)
    bring(0, 1)
    pair.run()
    assert locations(pair.client.events, request_id) == [(0, 0), (0, 1)]
    assert len(ends(pair)) == 2
    assert ends(pair)[1] is None


def test_a_group_that_is_evicted_while_it_is_owed_ends_the_subscription() -> None:
    pair, source, request_id = served()
    pair.server.credit.object_octets = 0
    put(source, 0, 0)
    put(source, 1, 0)
    pair.run()
    source.evict_group(0)
    pair.run()
    pair.advance(3.0)
    (ended,) = pair.client.of(SubscriptionEnded)
    assert (ended.request_id, ended.status) == (request_id, PublishDoneCode.TOO_FAR_BEHIND)
    assert residue(pair.server.core, source) == {}


def test_a_group_that_is_evicted_when_its_stream_was_stopped_is_nothing() -> None:
    pair, source, _ = served()
    put(source, 0, 0)
    put(source, 1, 0)
    pair.run()
    first, _ = pair.client.of(DataStreamOpened)
    pair.client.core.requester.stop_stream(first.stream_id)
    pair.run()
    source.evict_group(0)
    put(source, 1, 1)
    pair.run()
    assert locations(pair.client.events) == [(0, 0), (1, 0), (1, 1)]


def test_what_comes_behind_an_object_that_broke_off_goes_on_another_stream() -> None:
    pair, source = SessionPair(), track(authoritative=False)
    serve(pair, source)
    pair.client.core.requester.subscribe(NAME, NONE)
    pair.run()
    header = SubgroupHeader(5, 0, 0, 0, first_object=True)
    stream = source.open_stream(header)
    for object_id, octets in ((0, b"1234"), (1, b"12")):
        fields = ObjectHeader(0, object_id, 0, 0, payload_length=4)
        stream.begin(fields, 0.0).write(memoryview(octets))
    pair.run()
    pair.server.credit.object_octets = 0
    stream.reset(StreamCode.INTERNAL_ERROR)
    for object_id, octets in ((2, b"12"), (3, b"1234"), (4, b"1234")):
        stream = source.open_stream(header)
        fields = ObjectHeader(0, object_id, 0, 0, payload_length=4)
        stream.begin(fields, 0.0).write(memoryview(octets))
        stream.reset(StreamCode.INTERNAL_ERROR)
    pair.server.credit.object_octets = 1 << 40
    pair.run()
    assert locations(pair.client.events) == [(0, 0), (0, 3), (0, 4)]


def test_a_subgroup_of_which_nothing_passes_opens_no_stream() -> None:
    filters = Parameters.of(priority_filter=[RangeFilter(0, ((9, 9),))])
    pair, source, _ = served(filters)
    source.publish(ObjectHeader(0, 0, 0, 0), (), 0.0)
    source.finish_subgroup(0, 0)
    pair.run()
    assert pair.client.of(DataStreamOpened) == []
    assert residue(pair.server.core).get("scheduler") is None


def test_a_group_that_is_evicted_when_it_was_sent_is_nothing() -> None:
    pair, source, _ = served()
    put_group(source, 0, 1)
    pair.run()
    source.evict_group(0)
    put_group(source, 1, 1)
    pair.run()
    assert locations(pair.client.events) == [(0, 0), (1, 0)]


def test_objects_below_the_largest_do_not_pass_next_object() -> None:
    source = track()
    put(source, 5, 0)
    pair = SessionPair()
    serve(pair, source)
    next_object = Parameters.of(location_filter=LocationFilter.next_object())
    pair.client.core.requester.subscribe(NAME, next_object)
    pair.run()
    put(source, 4, 0)
    put(source, 5, 1)
    pair.run()
    assert locations(pair.client.events) == [(5, 1)]


def test_subgroups_of_a_group_go_on_streams_of_their_own() -> None:
    pair, source, _ = served()
    put(source, 0, 0, subgroup=0)
    put(source, 0, 1, subgroup=1, priority=4)
    pair.run()
    headers = [event.header for event in pair.client.of(DataStreamOpened)]
    assert [(h.subgroup_id, h.publisher_priority) for h in headers] == [(0, 0), (1, 4)]

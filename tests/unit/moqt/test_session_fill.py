"""A subscription and its fill: each Object exactly once, whatever the moment (MOQT §3.4, §3.5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvcs.moqt.errors import StreamCode
from kvcs.moqt.events import (
    DataStreamEnded,
    DataStreamOpened,
    Event,
    RequestAccepted,
    RequestUpdateAnswered,
    SubscribeReceived,
    SubscriptionEnded,
)
from kvcs.moqt.filters import LocationFilter, RangeFilter
from kvcs.moqt.messages import RequestOk, SubscribeOk
from kvcs.moqt.names import GroupOrder, Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.streams import FetchHeader, SubgroupHeader
from kvcs.moqt.track.store import Track
from kvcs.testing.pair import End, SessionPair
from kvcs.testing.residue import residue
from kvcs.testing.tracks import (
    NAME,
    end_track,
    locations,
    objects,
    payload,
    put,
    put_group,
    track,
)

Step = Callable[[], None]

EVERYTHING = Parameters.of(location_filter=LocationFilter.absolute_start(0, 0))
JOIN = Parameters.of(location_filter=LocationFilter.next_object(), fill_parameters=EVERYTHING)
GROUPS, OBJECTS = 2, 3
ALL = [Location(group, object_id) for group in range(GROUPS) for object_id in range(OBJECTS)]


def serve(pair: SessionPair, source: Track) -> None:
    """The server accepts every SUBSCRIBE to a Track."""

    def answer(event: Event) -> None:
        if isinstance(event, SubscribeReceived):
            pair.server.core.responder.accept_subscribe(event.request_id, source, pair.now)

    pair.server.on_event = answer


def join(pair: SessionPair, parameters: Parameters = JOIN) -> int:
    request_id = pair.client.core.requester.subscribe(NAME, parameters)
    pair.run()
    return request_id


def publication(source: Track) -> Iterator[Step]:
    """The steps of a publication, with moments inside of each Object."""
    for group in range(GROUPS):
        header = SubgroupHeader(0, group, 0, group, end_of_group=True, first_object=True)
        stream = source.open_stream(header)
        for object_id in range(OBJECTS):
            place = Location(group, object_id)
            octets = memoryview(payload(place, 10))
            fields = ObjectHeader(*place, 0, group, payload_length=10)
            writers = []
            yield lambda stream=stream, fields=fields, writers=writers: writers.append(
                stream.begin(fields, 0.0)
            )
            yield lambda writers=writers, octets=octets: writers[0].write(octets[:4])
            yield lambda writers=writers, octets=octets: writers[0].write(octets[4:])
        end = ObjectHeader(group, OBJECTS, 0, group, ObjectStatus.END_OF_GROUP)
        yield lambda stream=stream, end=end: stream.begin(end, 0.0) and None
        yield stream.finish
    yield lambda: end_track(source, GROUPS)


MOMENTS = len(list(publication(track()))) + 1


def check_whole(end: End, request_id: int) -> None:
    """Each Object came exactly once, whole and right, and the end is known."""
    got = [item for item in objects(end.events, request_id) if item.header.status == 0]
    assert sorted(item.header.location for item in got) == ALL
    for item in got:
        assert item.whole
        assert item.payload == payload(item.header.location, 10)
    (ended,) = (event for event in end.of(SubscriptionEnded) if event.request_id == request_id)
    assert ended.every_stream_seen


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_subscriber_gets_each_object_once_whenever_it_joins(moment: int) -> None:
    source = track()
    pair = SessionPair(piece=5)
    serve(pair, source)
    request_id = -1
    for number, step in enumerate(publication(source)):
        if number == moment:
            request_id = join(pair)
        step()
        pair.run()
    if moment == MOMENTS - 1:
        request_id = join(pair)
    pair.advance(1.0)
    check_whole(pair.client, request_id)
    assert residue(pair.client.core) == {}
    assert residue(pair.server.core, source) == {}


@pytest.mark.parametrize("moment", range(MOMENTS - 1))
def test_the_seam_holds_where_nothing_is_sent_until_the_end(moment: int) -> None:
    source = track()
    pair = SessionPair()
    serve(pair, source)
    pair.server.credit.object_octets = 0
    for number, step in enumerate(publication(source)):
        if number == moment:
            request_id = join(pair)
        step()
    pair.run()
    pair.server.credit.object_octets = 1 << 40
    pair.run()
    pair.advance(1.0)
    check_whole(pair.client, request_id)


@pytest.mark.parametrize("offset", range(7))
def test_several_subscribers_on_several_sessions(offset: int) -> None:
    source = track()
    pairs = [SessionPair(piece=7), SessionPair()]
    for pair in pairs:
        serve(pair, source)
    joined: list[tuple[SessionPair, int]] = []
    for number, step in enumerate(publication(source)):
        if number % 7 == offset:
            pair = pairs[number // 7 % 2]
            joined.append((pair, join(pair)))
        step()
        for pair in pairs:
            pair.run()
    assert len(joined) >= 3
    for pair in pairs:
        pair.advance(1.0)
    for pair, request_id in joined:
        check_whole(pair.client, request_id)
    assert not source.listeners


# A write-once track, and joining late


def test_three_late_joiners_of_a_write_once_track_get_the_newest_object_once() -> None:
    source = track()
    put(source, 0, 0, octets=50)
    source.finish_subgroup(0, 0)
    pair = SessionPair()
    serve(pair, source)
    for _ in range(3):
        request_id = join(pair)
        assert locations(pair.client.events, request_id) == [(0, 0)]
        pair.advance(1.0)
        assert locations(pair.client.events, request_id) == [(0, 0)]
    assert pair.client.of(SubscriptionEnded) == []


def test_late_joiner_of_an_ended_track_gets_ok_then_the_fill_then_publish_done() -> None:
    source = track()
    put_group(source, 0, 2)
    end_track(source, 1)
    pair = SessionPair()
    serve(pair, source)
    pair.advance(5.0)
    request_id = join(pair)
    (accepted,) = pair.client.of(RequestAccepted)
    assert isinstance(accepted.reply, SubscribeOk)
    assert accepted.reply.parameters.get(ParameterType.LARGEST_OBJECT) == (1, 0)
    assert locations(pair.client.events) == [(0, 0), (0, 1)]
    pair.advance(0.29)
    assert pair.client.of(SubscriptionEnded) == []
    pair.advance(0.02)
    assert [type(event) for event in pair.client.events[1:]][-1] is SubscriptionEnded
    assert pair.client.of(SubscriptionEnded) == [SubscriptionEnded(request_id, 0x2, "", True)]


def test_publish_done_keeps_its_distance_from_a_fill_that_took_long() -> None:
    source = track()
    put_group(source, 0, 2)
    end_track(source, 1)
    pair = SessionPair()
    serve(pair, source)
    pair.server.credit.unidirectional = 0
    join(pair)
    pair.now = 10.0  # nothing but credit comes meanwhile
    pair.server.credit.unidirectional = 1
    pair.run()
    assert locations(pair.client.events) == [(0, 0), (0, 1)]
    pair.advance(0.29)
    assert pair.client.of(SubscriptionEnded) == []
    pair.advance(0.02)
    assert len(pair.client.of(SubscriptionEnded)) == 1


def test_publish_done_never_comes_before_the_fill() -> None:
    source = track()
    put_group(source, 0, 2)
    end_track(source, 1)
    pair = SessionPair()
    serve(pair, source)
    pair.server.credit.object_octets = 0
    join(pair)
    pair.advance(20.0)
    assert pair.client.of(SubscriptionEnded) == []
    pair.server.credit.object_octets = 1 << 40
    pair.run()
    pair.advance(1.0)
    order = [type(event) for event in pair.client.events]
    assert order.index(DataStreamEnded) < order.index(SubscriptionEnded)


def test_an_ended_track_without_objects_is_ended_without_a_stream() -> None:
    source = track()
    source.end()
    pair = SessionPair()
    serve(pair, source)
    request_id = join(pair)
    pair.advance(1.0)
    assert pair.client.of(DataStreamOpened) == []
    assert pair.client.of(SubscriptionEnded) == [SubscriptionEnded(request_id, 0x2, "", True)]


# What a fill is


def streams(end: End) -> list[SubgroupHeader | FetchHeader]:
    return [event.header for event in end.of(DataStreamOpened)]


def filled() -> tuple[SessionPair, Track]:
    """Groups 0 to 2 of two Objects each are there; nothing is subscribed."""
    source = track()
    for group in range(3):
        put_group(source, group, 2)
    pair = SessionPair()
    serve(pair, source)
    return pair, source


@pytest.mark.parametrize(
    ("subscription", "fill", "expected"),
    [
        (LocationFilter.next_object(), {}, None),
        (None, {}, [*ALL, Location(2, 0), Location(2, 1)]),
        (
            LocationFilter.next_object(),
            {"location_filter": LocationFilter.relative_start(1)},
            [Location(2, 0), Location(2, 1)],
        ),
        (
            LocationFilter.next_object(),
            {"location_filter": LocationFilter.absolute_range(0, 1, 1, 0)},
            [Location(0, 1), Location(1, 0)],
        ),
        (LocationFilter.absolute_start(1, 1), {}, [(1, 1), (2, 0), (2, 1)]),
        (
            LocationFilter.next_object(),
            {"location_filter": LocationFilter.absolute_start(9, 0)},
            None,
        ),
    ],
)
def test_range_of_a_fill(
    subscription: LocationFilter | None,
    fill: dict[str, object],
    expected: list[Location] | None,
) -> None:
    pair, _ = filled()
    parameters = Parameters.of(fill_parameters=Parameters.of(**fill))
    if subscription is not None:
        parameters = parameters.replace(location_filter=subscription)
    join(pair, parameters)
    if expected is None:
        assert streams(pair.client) == []
    else:
        wanted = [place for place in expected if place[1] < 2]
        assert locations(pair.client.events) == wanted
        assert streams(pair.client) == [FetchHeader(0)]


def test_no_fill_without_its_parameter_and_none_while_paused() -> None:
    pair, source = filled()
    join(pair, Parameters.of(location_filter=LocationFilter.none()))
    paused = join(pair, JOIN.replace(forward=0))
    put(source, 3, 0)
    pair.run()
    assert locations(pair.client.events, paused) == []
    pair.client.core.requester.update(paused, Parameters.of(forward=1))
    pair.run()
    put(source, 3, 1)
    pair.run()
    assert locations(pair.client.events, paused) == [(3, 1)]
    assert not [header for header in streams(pair.client) if isinstance(header, FetchHeader)]


def test_a_fill_by_update_carries_the_updates_id_and_its_own_order() -> None:
    pair, _ = filled()
    descending = Parameters.of(
        location_filter=LocationFilter.none(), group_order=GroupOrder.DESCENDING
    )
    request_id = join(pair, JOIN.replace(fill_parameters=descending))
    requester = pair.client.core.requester
    for fill in (EVERYTHING, descending, EVERYTHING):
        pair.client.events.clear()
        update_id = requester.update(request_id, Parameters.of(fill_parameters=fill))
        pair.run()
        (answered,) = pair.client.of(RequestUpdateAnswered)
        assert isinstance(answered.reply, RequestOk)
        assert answered.reply.parameters.get(ParameterType.LARGEST_OBJECT) == (2, 2)
        assert streams(pair.client) == [FetchHeader(update_id)]
        groups = [place.group for place in locations(pair.client.events, request_id)]
        assert groups == ([2, 2, 1, 1, 0, 0] if fill is descending else [0, 0, 1, 1, 2, 2])


def test_an_update_takes_one_snapshot_for_filter_fill_and_reply() -> None:
    pair, source = filled()
    request_id = join(pair, Parameters.of(forward=0))
    parameters = JOIN.replace(forward=1)
    pair.client.core.requester.update(
        request_id,
        Parameters.of(
            forward=1,
            location_filter=parameters.get(ParameterType.LOCATION_FILTER),
            fill_parameters=EVERYTHING,
        ),
    )
    pair.run()
    put_group(source, 3, 2)
    pair.run()
    everything = [Location(group, object_id) for group in range(4) for object_id in range(2)]
    assert sorted(locations(pair.client.events)) == everything


def test_a_fill_takes_over_filters_and_priority_unless_it_names_its_own() -> None:
    pair, _ = filled()
    one = RangeFilter(0, ((1, 1),))
    join(pair, JOIN.replace(objectid_filter=[one]))
    assert locations(pair.client.events) == [(0, 1), (1, 1), (2, 1)]
    pair.client.events.clear()
    removed = EVERYTHING.replace(objectid_filter=[RangeFilter(None)])
    join(pair, JOIN.replace(objectid_filter=[one], fill_parameters=removed))
    assert len(locations(pair.client.events)) == 6


def test_a_stopped_fill_leaves_the_subscription_and_counts_as_a_stream() -> None:
    pair, source = filled()
    stop: list[int] = []

    def stop_first(event: Event) -> None:
        if isinstance(event, DataStreamOpened) and not stop:
            stop.append(event.stream_id)
            pair.client.core.requester.stop_stream(event.stream_id)

    pair.client.on_event = stop_first
    request_id = join(pair)
    assert len(locations(pair.client.events)) < 6
    put_group(source, 3, 1)
    end_track(source, 4)
    pair.run()
    pair.advance(1.0)
    assert (3, 0) in locations(pair.client.events)
    assert pair.client.of(DataStreamEnded)[0].reset_code == StreamCode.CANCELLED
    assert pair.client.of(SubscriptionEnded) == [SubscriptionEnded(request_id, 0x2, "", True)]


def test_a_fill_of_an_object_that_breaks_off_is_reset() -> None:
    source = track()
    stream = source.open_stream(SubgroupHeader(0, 0, 0, 0, first_object=True))
    writer = stream.begin(ObjectHeader(0, 0, 0, 0, payload_length=10), 0.0)
    writer.write(memoryview(b"12345"))
    pair = SessionPair()
    serve(pair, source)
    request_id = join(pair)
    stream.reset(StreamCode.CANCELLED)
    pair.run()
    assert pair.client.of(DataStreamEnded) == [
        DataStreamEnded(request_id, pair.client.of(DataStreamOpened)[0].stream_id, 0x0)
    ]
    assert pair.client.of(SubscriptionEnded) == []

"""FETCH from both sides (MOQT §3.2, §9.11, §9.12)."""

from __future__ import annotations

import pytest

from kvcs.moqt import messages as m
from kvcs.moqt.errors import RequestCode, SessionCode, StreamCode
from kvcs.moqt.events import (
    DataStreamEnded,
    DataStreamOpened,
    Event,
    FetchReceived,
    GoawayReceived,
    ObjectStarted,
    RangeMarked,
    RequestAccepted,
    RequestCancelled,
    RequestRefused,
    RequestUpdateAnswered,
    TrackMalformed,
)
from kvcs.moqt.filters import LocationFilter, RangeFilter
from kvcs.moqt.names import MAX_VI64, FullTrackName, GroupOrder, Location
from kvcs.moqt.objects import ObjectHeader, RangeKind
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.settings import Role
from kvcs.moqt.tokens import Token
from kvcs.moqt.track.store import Track
from kvcs.testing.bench import Bench
from kvcs.testing.pair import SessionPair
from kvcs.testing.residue import residue
from kvcs.testing.tracks import (
    NAME,
    end_track,
    fetch_stream,
    locations,
    objects,
    payload,
    put_group,
    track,
)

NONE, BARE = Parameters(), KeyValues()
OK = m.FetchOk(False, Location(9, 9), NONE, BARE)
OTHER = FullTrackName(NAME.namespace, b"v.raw.s0")
PLACES = [Location(group, object_id) for group in range(3) for object_id in range(2)]


def at(group: int, object_id: int) -> Location:
    return Location(group, object_id)


def three_groups(*, ended: bool = False) -> Track:
    source = track()
    for group in range(3):
        put_group(source, group, 2)
    if ended:
        end_track(source, 3)
    return source


def serve(pair: SessionPair, source: Track) -> None:
    """The server answers FETCH."""

    def answer(event: Event) -> None:
        if isinstance(event, FetchReceived):
            pair.server.core.responder.accept_fetch(event.request_id, source, pair.now)

    pair.server.on_event = answer


def fetched(source: Track, parameters: Parameters = NONE, piece: int = 1 << 20) -> SessionPair:
    """One FETCH, run to its end."""
    pair = SessionPair(piece=piece)
    serve(pair, source)
    pair.client.core.requester.fetch(NAME, parameters)
    pair.run()
    return pair


def fetcher(reply: m.FetchOk | None = OK, parameters: Parameters = NONE) -> Bench:
    """A core with a FETCH on stream 0, accepted where ``reply`` says so."""
    bench = Bench(Role.CLIENT)
    bench.core.requester.fetch(NAME, parameters)
    bench.drain()
    if reply is not None:
        bench.say(0, reply)
    return bench


# Both sides


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
@pytest.mark.parametrize("order", [None, GroupOrder.ASCENDING, GroupOrder.DESCENDING])
def test_a_fetch_brings_everything_in_its_order(order: GroupOrder | None, piece: int) -> None:
    source = three_groups()
    parameters = NONE if order is None else Parameters.of(group_order=order)
    pair = fetched(source, parameters, piece)
    expected = PLACES
    if order is GroupOrder.DESCENDING:
        expected = [*PLACES[4:], *PLACES[2:4], *PLACES[:2]]
    assert locations(pair.client.events) == expected
    for item in objects(pair.client.events):
        assert item.payload == payload(item.header.location)
    (accepted,) = pair.client.of(RequestAccepted)
    assert accepted.reply == m.FetchOk(False, at(2, 2), NONE, BARE)
    assert [event.reset_code for event in pair.client.of(DataStreamEnded)] == [None]
    assert residue(pair.client.core) == {}
    assert residue(pair.server.core, source) == {}


@pytest.mark.parametrize(
    ("chosen", "end", "expected"),
    [
        (LocationFilter.none(), at(2, 2), PLACES),
        (LocationFilter.relative_start(1), at(2, 2), PLACES[4:]),
        (LocationFilter.relative_start(2), at(2, 2), PLACES[2:]),
        (LocationFilter.relative_start(MAX_VI64), at(2, 2), PLACES),
        (LocationFilter.absolute_start(1, 1), at(2, 2), PLACES[3:]),
        (LocationFilter.group_end(0, 1, 1), at(1, 2), PLACES[1:4]),
        (LocationFilter.absolute_range(1, 0, 1, 0), at(1, 0), PLACES[2:3]),
        (LocationFilter.absolute_range(1, 0, 9, 9), at(2, 2), PLACES[2:]),
        (LocationFilter.absolute_range(1, 2, 1, 9), at(1, 9), []),
    ],
)
def test_every_form_of_range(
    chosen: LocationFilter, end: Location, expected: list[Location]
) -> None:
    pair = fetched(three_groups(), Parameters.of(location_filter=chosen))
    (accepted,) = pair.client.of(RequestAccepted)
    assert isinstance(accepted.reply, m.FetchOk)
    assert accepted.reply.end_location == end
    assert locations(pair.client.events) == expected
    # A range without an Object is a stream with a header and FIN.
    assert len(pair.client.of(DataStreamEnded)) == 1


@pytest.mark.parametrize(
    "chosen",
    [
        LocationFilter.next_object(),
        LocationFilter.relative_start(0),
        LocationFilter.absolute_start(2, 3),
        LocationFilter.absolute_range(1, 5, 1, 4),
    ],
)
def test_an_empty_range_is_refused(chosen: LocationFilter) -> None:
    pair = fetched(three_groups(), Parameters.of(location_filter=chosen))
    (refused,) = pair.client.of(RequestRefused)
    assert refused.error.error_code == RequestCode.INVALID_RANGE
    assert pair.client.of(DataStreamOpened) == []
    assert residue(pair.client.core) == residue(pair.server.core) == {}


def test_a_track_without_objects_is_refused() -> None:
    (refused,) = fetched(track()).client.of(RequestRefused)
    assert refused.error.error_code == RequestCode.INVALID_RANGE


def test_end_of_track_is_told() -> None:
    pair = fetched(three_groups(ended=True))
    (accepted,) = pair.client.of(RequestAccepted)
    assert accepted.reply == m.FetchOk(True, at(3, 0), NONE, BARE)
    assert locations(pair.client.events) == PLACES
    only_the_end = Parameters.of(location_filter=LocationFilter.absolute_start(3, 0))
    pair = fetched(three_groups(ended=True), only_the_end)
    assert pair.client.of(RequestAccepted)[0].reply == m.FetchOk(True, at(3, 0), NONE, BARE)
    assert locations(pair.client.events) == []


def test_a_filter_by_object_id_drops_objects_and_never_moves_the_end() -> None:
    only = Parameters.of(objectid_filter=[RangeFilter(0, ((1, 1),))])
    pair = fetched(three_groups(), only)
    assert locations(pair.client.events) == PLACES[1::2]
    (accepted,) = pair.client.of(RequestAccepted)
    assert isinstance(accepted.reply, m.FetchOk)
    assert accepted.reply.end_location == at(2, 2)


@pytest.mark.parametrize(("include", "sent"), [(1, True), (0, False)])
def test_track_properties_come_with_the_reply_unless_they_are_not_wanted(
    include: int, sent: bool
) -> None:
    properties = KeyValues.of({Property.DEFAULT_PUBLISHER_PRIORITY: 3})
    source = track(properties=properties)
    put_group(source, 0, 1)
    pair = fetched(source, Parameters.of(include_properties=include))
    (accepted,) = pair.client.of(RequestAccepted)
    assert accepted.reply.track_properties == (properties if sent else BARE)


def test_what_a_relay_cannot_tell_is_marked() -> None:
    source = track(authoritative=False)
    source.note_largest(at(1, 5))
    pair = fetched(source)
    marks = pair.client.of(RangeMarked)
    assert [(mark.kind, mark.location) for mark in marks] == [(RangeKind.UNKNOWN, at(1, 5))]


def test_a_new_priority_reaches_a_running_fetch() -> None:
    source = three_groups()
    pair = SessionPair()
    serve(pair, source)
    pair.server.credit.object_octets = 0
    requester = pair.client.core.requester
    first, second = requester.fetch(NAME, NONE), requester.fetch(NAME, NONE)
    pair.run()
    requester.update(second, Parameters.of(subscriber_priority=1))
    pair.run()
    assert len(pair.client.of(RequestUpdateAnswered)) == 1
    pair.server.credit.object_octets = 1 << 40
    pair.run()
    order = [event.request_id for event in pair.client.of(ObjectStarted)]
    assert order == [second] * 6 + [first] * 6


def test_an_update_that_overtook_the_reply_reaches_the_fetch() -> None:
    bench = Bench()
    bench.credit.object_octets = 0
    for number in (0, 2):
        bench.open(m.Fetch(number, *NAME, NONE))
    sooner = Parameters.of(subscriber_priority=1)
    bench.say(4, m.RequestUpdate(4, sooner))
    source = three_groups()
    for number in (0, 2):
        bench.core.responder.accept_fetch(number, source, 0.0)
    bench.credit.object_octets = 1 << 40
    bench.drain()
    assert bench.sent[bench.opened[-2]].startswith(b"\x05\x02")


def test_a_failed_update_resets_the_data_stream() -> None:
    bench = Bench()
    stream = bench.open(m.Fetch(0, *NAME, NONE))
    source = track(authoritative=False)
    source.note_largest(at(0, 0))
    bench.core.responder.accept_fetch(0, source, 0.0, lambda sender, run: True)
    bench.drain()
    (data,) = bench.opened[2:]
    bad = Parameters.of(authorization_token=[Token.use_alias(3)])
    bench.say(stream, m.RequestUpdate(2, bad))
    assert bench.resets == {data: StreamCode.CANCELLED}
    assert stream in bench.fins
    assert bench.take(RequestCancelled) == [RequestCancelled(0, False, None)]
    bench.data(stream, b"", fin=True)
    assert residue(bench.core, source) == {}


def test_a_fetch_that_cannot_be_delivered_is_reset() -> None:
    source = track(authoritative=False)
    source.note_largest(at(0, 0))
    pair = SessionPair()
    responder = pair.server.core.responder
    request_id = pair.client.core.requester.fetch(NAME, NONE)
    pair.run()
    responder.accept_fetch(request_id, source, 0.0, lambda sender, run: True)
    pair.run()
    responder.fail_fetch(request_id, StreamCode.UNKNOWN_OBJECT_STATUS)
    responder.fail_fetch(99, StreamCode.UNKNOWN_OBJECT_STATUS)
    pair.run()
    assert [event.reset_code for event in pair.client.of(DataStreamEnded)] == [0x6]
    assert residue(pair.client.core) == residue(pair.server.core, source) == {}


def test_a_place_that_moved_while_it_was_waited_for_lets_others_go_first() -> None:
    source, other = track(authoritative=False), track(OTHER)
    for group, priority in ((0, 0), (1, 9)):
        source.begin_fetched(ObjectHeader(group, 0, 0, priority), 0.0)
    put_group(other, 0, 1, priority=5)
    source.note_largest(at(1, 0))
    pair = SessionPair()
    responder = pair.server.core.responder
    first = pair.client.core.requester.fetch(NAME, NONE)
    pair.run()
    responder.accept_fetch(first, source, 0.0, lambda sender, run: True)
    pair.run()
    second = pair.client.core.requester.fetch(OTHER, NONE)
    pair.run()
    pair.server.credit.object_octets = 0
    responder.accept_fetch(second, other, 0.0)
    source.learn(at(0, 0), at(1, 0))
    pair.server.credit.object_octets = 1 << 40
    pair.run()
    assert [event.request_id for event in pair.client.of(ObjectStarted)] == [first, second, first]


@pytest.mark.parametrize("what", ["fetch", "goaway"])
def test_who_is_asked_for_an_unknown_run_may_act_on_the_same_session(what: str) -> None:
    source = track(authoritative=False)
    source.begin_fetched(ObjectHeader(0, 0, 0, 0), 0.0)
    source.note_largest(at(0, 1))
    pair = SessionPair()
    server = pair.server.core

    def ask(_: object, __: object) -> bool:
        if what == "fetch":
            server.requester.fetch(OTHER, NONE)
        else:
            server.goaway(now=pair.now)
        return True

    request_id = pair.client.core.requester.fetch(NAME, NONE)
    pair.run()
    server.responder.accept_fetch(request_id, source, 0.0, ask)
    pair.run()
    assert len(pair.client.of(FetchReceived if what == "fetch" else GoawayReceived)) == 1


# The asking side alone


@pytest.mark.parametrize("first", ["reply", "stream"])
@pytest.mark.parametrize("how", ["fin", "reset"])
def test_reply_and_stream_come_in_either_order(first: str, how: str) -> None:
    bench = fetcher(None)
    if first == "reply":
        bench.say(0, OK, fin=True)
    stream = bench.uni(fetch_stream(0, at(0, 0)), fin=how == "fin")
    if how == "reset":
        bench.reset(stream, 0x6)
    if first == "stream":
        bench.say(0, OK, fin=True)
    kinds = {type(event) for event in bench.events}
    assert {RequestAccepted, DataStreamOpened, DataStreamEnded} <= kinds
    assert bench.take(DataStreamEnded) == [
        DataStreamEnded(0, stream, 0x6 if how == "reset" else None)
    ]
    assert 0 in bench.fins
    assert residue(bench.core) == {}


def test_a_refusal_may_follow_what_came_from_a_cache() -> None:
    bench = fetcher(None)
    stream = bench.uni(fetch_stream(0, at(0, 0)))
    bench.say(0, m.RequestError(0x12, 0, "malformed", None), fin=True)
    assert len(bench.take(RequestRefused)) == 1
    assert bench.stops == {stream: StreamCode.CANCELLED}
    bench.reset(stream)
    assert residue(bench.core) == {}


def test_a_second_stream_for_one_fetch_is_stopped() -> None:
    bench = fetcher()
    bench.uni(fetch_stream(0, at(0, 0)))
    second = bench.uni(fetch_stream(0, at(0, 1)))
    assert bench.stops == {second: StreamCode.CANCELLED}
    assert locations(bench.events) == [(0, 0)]


def test_a_fill_stream_that_was_not_asked_for_is_stopped() -> None:
    bench = Bench(Role.CLIENT)
    bench.core.requester.subscribe(NAME, NONE)
    bench.drain()
    stream = bench.uni(fetch_stream(0, at(0, 0)))
    assert bench.stops == {stream: StreamCode.CANCELLED}
    assert bench.close is None


@pytest.mark.parametrize(
    ("asked", "end", "code"),
    [
        (LocationFilter.absolute_start(3, 5), at(3, 4), SessionCode.PROTOCOL_VIOLATION),
        (LocationFilter.absolute_start(3, 5), at(3, 5), None),
        (LocationFilter.group_end(3, 5, 4), at(2, 9), SessionCode.PROTOCOL_VIOLATION),
        (LocationFilter.relative_start(1), at(0, 0), None),
        (None, at(0, 0), None),
    ],
)
def test_an_end_before_the_start_closes(
    asked: LocationFilter | None, end: Location, code: SessionCode | None
) -> None:
    parameters = NONE if asked is None else Parameters.of(location_filter=asked)
    bench = fetcher(m.FetchOk(False, end, NONE, BARE), parameters)
    assert bench.close_code == code


@pytest.mark.parametrize(
    "octets",
    [
        pytest.param(fetch_stream(0, at(0, 3)) + b"\x04\x00\x00", id="an object twice"),
        pytest.param(
            fetch_stream(0, at(0, 0), (RangeKind.UNKNOWN, at(0, 3))) + bytes.fromhex("04 00 00"),
            id="an object in the place of a marker",
        ),
    ],
)
def test_an_object_id_that_does_not_grow_is_malformed(octets: bytes) -> None:
    bench = fetcher()
    bench.uni(octets)
    assert len(bench.take(TrackMalformed)) == 1
    assert bench.close is None


@pytest.mark.parametrize(
    "octets",
    [
        pytest.param(bytes.fromhex("0500 5d"), id="fin inside an object"),
        pytest.param(bytes.fromhex("0500 00 00"), id="first object refers to a prior one"),
        pytest.param(bytes.fromhex("0500 818d"), id="undefined flags"),
        pytest.param(bytes.fromhex("0500 1c ffffffffffffffffff 00 00 00 08 00 00"), id="group"),
    ],
)
def test_a_broken_fetch_stream_closes(octets: bytes) -> None:
    bench = fetcher()
    bench.uni(octets, fin=True)
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_properties_that_we_may_not_process_cancel_the_fetch() -> None:
    bench = fetcher(m.FetchOk(False, at(0, 0), NONE, KeyValues.of({0x4000: 1})))
    (refused,) = bench.take(RequestRefused)
    assert refused.error.error_code == RequestCode.UNSUPPORTED_EXTENSION
    assert bench.stops == {0: StreamCode.CANCELLED}


def test_fin_of_the_request_stream_leaves_the_data_stream() -> None:
    bench = fetcher()
    bench.data(0, b"", fin=True)
    bench.uni(fetch_stream(0, at(0, 0)), fin=True)
    assert locations(bench.events) == [(0, 0)]
    assert residue(bench.core) == {}


def test_fin_without_a_reply_is_a_failed_fetch() -> None:
    bench = fetcher(None)
    bench.data(0, b"", fin=True)
    assert bench.take(RequestCancelled) == [RequestCancelled(0, True, None)]
    assert residue(bench.core) == {}


def test_an_answer_to_an_update_may_come_when_the_fetch_is_complete() -> None:
    bench = fetcher()
    bench.core.requester.update(0, Parameters.of(subscriber_priority=1))
    bench.drain()
    bench.uni(fetch_stream(0), fin=True)
    bench.say(0, m.RequestOk(NONE, BARE))
    assert bench.close is None
    bench.say(0, m.RequestOk(NONE, BARE))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION

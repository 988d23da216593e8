"""What a peer can make a session hold, and what it may ask of one (MOQT §6.4, §9.1)."""

from __future__ import annotations

import pytest

from kvcs.errors import UsageError
from kvcs.moqt import messages as m
from kvcs.moqt.asking.request_streams import MAX_WAITING_REQUESTS
from kvcs.moqt.errors import NotSupported, RequestCode, SessionCode
from kvcs.moqt.events import (
    DataStreamOpened,
    FetchReceived,
    NamespaceAnnounced,
    ObjectEnded,
    RequestCancelled,
    RequestRefused,
    RequestUpdateAnswered,
    SubscribeReceived,
    TrackStatusReceived,
)
from kvcs.moqt.filters import RangeFilter
from kvcs.moqt.limits import EarlyLimits
from kvcs.moqt.names import MAX_VI64
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues, SetupOption
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.moqt.streams import SubgroupHeader
from kvcs.moqt.tokens import Token
from kvcs.testing.bench import Bench
from kvcs.testing.residue import residue
from kvcs.testing.tracks import NAME, locations, put, subgroup_stream, track

NONE = Parameters()
BARE = KeyValues()
OK = m.SubscribeOk(9, NONE, BARE)


def subscribe(request_id: int, parameters: Parameters = NONE) -> m.Subscribe:
    return m.Subscribe(request_id, *NAME, parameters)


def subscriber(early: EarlyLimits | None = None) -> Bench:
    """A core that has sent SUBSCRIBE on stream 0 and has no answer yet."""
    settings = SessionSettings(early=EarlyLimits() if early is None else early)
    bench = Bench(Role.CLIENT, settings)
    bench.core.requester.subscribe(NAME, NONE)
    bench.drain()
    return bench


def stream_of(group: int, *items: int, octets: int = 8, alias: int = 9) -> bytes:
    return subgroup_stream(SubgroupHeader(alias, group, 0, 0), *items, octets=octets)


def refusal(bench: Bench, stream: int) -> m.RequestError:
    (message,) = bench.replies(stream)
    assert isinstance(message, m.RequestError)
    return message


def ranges(count: int, first: int = 0) -> RangeFilter:
    return RangeFilter(0, tuple((first + 2 * n, first + 2 * n) for n in range(count)))


# Data streams that overtake SUBSCRIBE_OK


@pytest.mark.parametrize("cut", [1, 3, 7, 1000])
def test_early_streams_are_given_out_with_the_alias_in_order(cut: int) -> None:
    bench = subscriber()
    whole, open_one = stream_of(0, 0, 1), stream_of(1, 0)
    first = bench.uni(whole[:cut])
    bench.data(first, whole[cut:], fin=True)
    second = bench.uni(open_one)
    assert bench.take(DataStreamOpened) == []
    bench.say(0, OK)
    assert [event.stream_id for event in bench.take(DataStreamOpened)] == [first, second]
    bench.data(second, stream_of(1, 0, 1)[len(open_one) :], fin=True)
    assert locations(bench.events) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert bench.core.data_streams.next_timer() is None


def test_early_streams_of_another_alias_wait_on() -> None:
    bench = subscriber()
    other = bench.uni(stream_of(0, 0, alias=8))
    bench.say(0, OK)
    assert bench.take(DataStreamOpened) == []
    bench.advance(2.0)
    assert bench.stops == {other: 0x1}


def test_early_streams_are_given_up_after_a_while() -> None:
    bench = subscriber(EarlyLimits(seconds=1.5))
    first = bench.uni(stream_of(0, 0))
    bench.advance(1.0)
    second = bench.uni(stream_of(1, 0))
    assert bench.core.next_timer() == 1.5
    bench.advance(1.0)
    assert bench.stops == {first: 0x1}
    bench.say(0, OK)
    assert locations(bench.events) == [(1, 0)]
    bench.data(first, b"more")
    bench.data(first, b"", fin=True)
    bench.reset(second)
    assert bench.close is None


def test_the_oldest_early_stream_makes_room_where_there_are_too_many() -> None:
    bench = subscriber(EarlyLimits(streams=3))
    streams = [bench.uni(stream_of(group, 0)) for group in range(5)]
    assert bench.stops == {streams[0]: 0x1, streams[1]: 0x1}
    bench.say(0, OK)
    assert locations(bench.events) == [(2, 0), (3, 0), (4, 0)]


def test_the_oldest_early_stream_makes_room_where_they_hold_too_much() -> None:
    bench = subscriber(EarlyLimits(octets=1000))
    streams = [bench.uni(stream_of(group, 0, octets=400)) for group in range(3)]
    assert bench.stops == {streams[0]: 0x1}
    assert bench.core.data_streams._early_octets <= 1000
    bench.data(streams[2], bytes(1000))
    assert bench.stops == dict.fromkeys(streams, 0x1)
    assert bench.core.data_streams._early_octets == 0


def test_an_early_stream_that_is_whole_is_not_stopped_when_it_is_given_up() -> None:
    bench = subscriber(EarlyLimits(streams=1))
    bench.uni(stream_of(0, 0), fin=True)
    bench.uni(stream_of(1, 0))
    assert bench.stops == {}
    bench.say(0, OK)
    assert locations(bench.events) == [(1, 0)]


def test_an_early_stream_in_single_octets_costs_what_it_holds() -> None:
    bench = subscriber()
    octets = stream_of(0, 0, octets=5000)
    stream = bench.uni(b"")
    for at in range(len(octets)):
        bench.core.receive_stream_data(stream, octets[at : at + 1], False, 0.0)
    held = bench.core.data_streams._streams[stream]
    assert len(held.early) == 5000 + len(octets) - len(stream_of(0)) - 5000
    bench.say(0, OK)
    assert locations(bench.events) == [(0, 0)]


def test_an_early_stream_that_was_reset_is_forgotten() -> None:
    bench = subscriber()
    stream = bench.uni(stream_of(0, 0))
    bench.reset(stream)
    bench.say(0, OK)
    assert bench.take(DataStreamOpened) == []
    assert bench.core.data_streams._early_octets == 0


def test_a_stream_of_an_unknown_alias_or_request_does_not_close_the_session() -> None:
    bench = Bench(Role.CLIENT)
    alias = bench.uni(stream_of(0, 0, alias=77))
    fetch = bench.uni(b"\x05\x08")
    whole = bench.uni(b"\x05\x08", fin=True)
    bench.advance(3.0)
    assert bench.stops == {alias: 0x1, fetch: 0x1}
    assert whole not in bench.stops
    bench.reset(alias)
    bench.data(fetch, b"\x1c", fin=True)
    assert bench.close is None
    assert residue(bench.core) == {}


# Requests of the peer


def test_too_many_open_requests_are_refused_with_a_time_to_come_back() -> None:
    bench = Bench(settings=SessionSettings(max_peer_requests=2))
    streams = [bench.open(subscribe(2 * n)) for n in range(3)]
    assert len(bench.take(SubscribeReceived)) == 2
    error = refusal(bench, streams[2])
    assert error.error_code == RequestCode.EXCESSIVE_LOAD
    assert error.retry_interval == 1001
    assert streams[2] in bench.fins
    bench.reset(streams[0])
    bench.open(subscribe(6))
    assert len(bench.take(SubscribeReceived)) == 1


def test_a_token_registered_by_a_refused_request_counts() -> None:
    settings = SessionSettings(max_peer_requests=1, max_auth_token_cache_size=100)
    bench = Bench(settings=settings)
    first = bench.open(subscribe(0))
    token = Token.register(5, b"secret")
    second = bench.open(subscribe(2, Parameters.of(authorization_token=[token])))
    assert refusal(bench, second).error_code == RequestCode.EXCESSIVE_LOAD
    bench.reset(first)
    bench.take(SubscribeReceived)
    bench.open(subscribe(4, Parameters.of(authorization_token=[Token.use_alias(5)])))
    (event,) = bench.take(SubscribeReceived)
    assert [resolved.value for resolved in event.tokens] == [b"secret"]


def test_too_many_fetches_are_refused_even_before_the_first_is_answered() -> None:
    bench = Bench(settings=SessionSettings(max_concurrent_fetches=2))
    streams = [bench.open(m.Fetch(2 * n, *NAME, NONE)) for n in range(3)]
    assert len(bench.take(FetchReceived)) == 2
    assert refusal(bench, streams[2]).error_code == RequestCode.EXCESSIVE_LOAD
    target = track()
    put(target, 0, 0)
    bench.core.responder.accept_fetch(0, target, 0.0)
    bench.drain()
    bench.open(m.Fetch(6, *NAME, NONE))
    assert len(bench.take(FetchReceived)) == 1


@pytest.mark.parametrize(
    "parameters",
    [
        Parameters.of(objectid_filter=[ranges(4)]),
        Parameters.of(objectid_filter=[ranges(2)], subgroup_filter=[ranges(2)]),
        Parameters.of(
            objectid_filter=[ranges(2)],
            fill_parameters=Parameters.of(subgroup_filter=[ranges(2)]),
        ),
        Parameters.of(priority_filter=[RangeFilter(0, ((0, 256),))]),
        Parameters.of(objectid_filter=[RangeFilter(0, ((1, MAX_VI64 + 1),))]),
    ],
    ids=["many", "in sum", "in the fill", "priority above 255", "above 2^64-1"],
)
def test_filters_that_are_not_allowed_are_refused(parameters: Parameters) -> None:
    bench = Bench(settings=SessionSettings(max_filter_ranges=3))
    stream = bench.open(subscribe(0, parameters))
    assert refusal(bench, stream).error_code == RequestCode.INVALID_FILTER
    assert bench.take(SubscribeReceived) == []
    assert bench.close is None


def test_filters_within_the_limit_are_taken_and_none_are_where_it_is_zero() -> None:
    parameters = Parameters.of(objectid_filter=[ranges(3)])
    bench = Bench(settings=SessionSettings(max_filter_ranges=3))
    bench.open(subscribe(0, parameters))
    assert len(bench.take(SubscribeReceived)) == 1
    bench = Bench(settings=SessionSettings(max_filter_ranges=0))
    stream = bench.open(m.Fetch(0, *NAME, parameters))
    assert refusal(bench, stream).error_code == RequestCode.INVALID_FILTER


def test_filters_of_an_update_count_together_with_those_that_stay() -> None:
    bench = Bench(settings=SessionSettings(max_filter_ranges=3))
    stream = bench.open(subscribe(0, Parameters.of(objectid_filter=[ranges(2)])))
    bench.core.responder.accept_subscribe(0, track(), 0.0)
    bench.drain()
    bench.replies(stream)
    bench.say(stream, m.RequestUpdate(2, Parameters.of(objectid_filter=[ranges(3)])))
    assert bench.replies(stream) == [m.RequestOk(NONE, BARE)]
    bench.say(stream, m.RequestUpdate(4, Parameters.of(subgroup_filter=[ranges(1)])))
    error, done = bench.replies(stream)
    assert isinstance(error, m.RequestError)
    assert error.error_code == RequestCode.INVALID_FILTER
    assert isinstance(done, m.PublishDone)
    assert done.status_code == 0x8
    assert stream in bench.fins


def test_updates_without_an_answer_are_bounded() -> None:
    bench = Bench(settings=SessionSettings(max_request_updates=2))
    stream = bench.open(subscribe(0))
    bench.say(stream, m.RequestUpdate(2, NONE), m.RequestUpdate(4, NONE))
    assert bench.close is None
    bench.say(stream, m.RequestUpdate(6, NONE))
    assert bench.close_code == SessionCode.TOO_MANY_REQUEST_UPDATES


def test_an_answer_gives_the_credit_of_an_update_back() -> None:
    bench = Bench(settings=SessionSettings(max_request_updates=1))
    stream = bench.open(subscribe(0), m.RequestUpdate(2, NONE))
    bench.core.responder.accept_subscribe(0, track(), 0.0)
    bench.drain()
    bench.say(stream, m.RequestUpdate(4, NONE), m.RequestUpdate(6, NONE))
    assert bench.close is None
    assert len(bench.replies(stream)) == 4


# Our own requests


def test_our_updates_stay_within_the_peers_limit() -> None:
    bench = Bench(Role.CLIENT, options=KeyValues.of({SetupOption.MAX_REQUEST_UPDATES: 1}))
    requester = bench.core.requester
    requester.subscribe(NAME, NONE)
    bench.drain()
    bench.say(0, OK)
    update = requester.update(0, NONE)
    with pytest.raises(UsageError):
        requester.update(0, NONE)
    bench.say(0, m.RequestOk(NONE, BARE))
    assert [event.update_id for event in bench.take(RequestUpdateAnswered)] == [update]
    assert requester.update(0, NONE) == update + 2


def test_our_filters_stay_within_the_peers_limit() -> None:
    bench = Bench(Role.CLIENT, options=KeyValues.of({SetupOption.MAX_FILTER_RANGES: 2}))
    requester = bench.core.requester
    nested = Parameters.of(objectid_filter=[ranges(2)])
    for parameters in (
        Parameters.of(objectid_filter=[ranges(3)]),
        Parameters.of(objectid_filter=[ranges(1)], fill_parameters=nested),
    ):
        with pytest.raises(UsageError):
            requester.subscribe(NAME, parameters)
    assert requester.subscribe(NAME, nested) == 0
    bench.drain()
    bench.say(0, OK)
    with pytest.raises(UsageError):
        requester.update(0, Parameters.of(objectid_filter=[ranges(3)]))
    with pytest.raises(UsageError):
        Bench(Role.CLIENT).core.requester.fetch(NAME, nested)


def test_requests_of_ours_wait_for_stream_credit_in_order_and_in_bounds() -> None:
    bench = Bench(Role.CLIENT)
    bench.credit.bidirectional = 0
    ids = [bench.core.requester.track_status(NAME) for _ in range(MAX_WAITING_REQUESTS)]
    with pytest.raises(UsageError):
        bench.core.requester.track_status(NAME)
    bench.core.requester.cancel(ids[0])
    bench.drain()
    assert bench.opened == [2]
    bench.credit.bidirectional = 1
    bench.drain()
    assert bench.opened[1:3] == [0, 4]
    (first,) = bench.replies(0)
    assert first == m.TrackStatus(ids[1], *NAME, NONE)


def test_a_request_that_cannot_be_encoded_changes_nothing() -> None:
    bench = Bench(Role.CLIENT)
    requester = bench.core.requester
    bad = Parameters.of(expires=5)
    with pytest.raises(UsageError):
        requester.subscribe(NAME, bad)
    with pytest.raises(UsageError):
        requester.publish_namespace((b"x" * 5000,))
    with pytest.raises(UsageError):
        requester.subscribe_namespace((b"",))
    assert requester.subscribe(NAME, NONE) == 0
    bench.drain()
    bench.say(0, OK)
    for parameters in (bad, Parameters.of(group_order=1), Parameters.of(fill_timeout=3)):
        with pytest.raises(UsageError):
            requester.update(0, parameters)
    assert requester.update(0, NONE) == 2
    bench.drain()
    assert bench.close is None


def test_a_parameter_of_another_kind_of_update_is_refused_here_not_by_the_peer() -> None:
    bench = Bench(Role.CLIENT)
    bench.core.requester.publish_namespace((b"a",))
    bench.drain()
    bench.say(0, m.RequestOk(NONE, BARE))
    with pytest.raises(UsageError):
        bench.core.requester.update(0, Parameters.of(subscriber_priority=1))


def test_no_request_is_made_on_a_closed_session() -> None:
    bench = Bench(Role.CLIENT)
    bench.core.close()
    with pytest.raises(UsageError):
        bench.core.requester.track_status(NAME)


def test_namespaces_that_a_peer_announces_are_bounded() -> None:
    bench = Bench(Role.CLIENT, SessionSettings(max_namespaces=2))
    bench.core.requester.subscribe_namespace((b"a",))
    bench.drain()
    bench.say(0, m.RequestOk(NONE, BARE))
    bench.say(0, *(m.Namespace((bytes([n]),)) for n in (1, 2, 1, 3, 4)))
    assert len(bench.take(NamespaceAnnounced)) == 2
    (refused,) = bench.take(RequestRefused)
    assert refused.error.error_code == RequestCode.NAMESPACE_TOO_LARGE
    assert bench.stops == {0: 0x9}
    assert bench.close is None


# Tokens


@pytest.mark.parametrize(
    ("tokens", "code"),
    [
        ([Token.register(1, b"a")], SessionCode.AUTH_TOKEN_CACHE_OVERFLOW),
        ([Token.use_alias(1)], None),
        ([Token.delete(1)], None),
    ],
)
def test_aliases_without_a_cache(tokens: list[Token], code: SessionCode | None) -> None:
    bench = Bench()
    stream = bench.open(subscribe(0, Parameters.of(authorization_token=tokens)))
    assert bench.close_code == code
    if code is None:
        assert refusal(bench, stream).error_code == RequestCode.UNKNOWN_AUTH_TOKEN_ALIAS


def test_tokens_reach_the_application_with_each_kind_of_request() -> None:
    bench = Bench(settings=SessionSettings(max_auth_token_cache_size=100))
    register = Parameters.of(authorization_token=[Token.register(1, b"a", 7)])
    alias = Parameters.of(authorization_token=[Token.use_alias(1)])
    bench.open(subscribe(0, register))
    bench.open(m.Fetch(2, *NAME, alias))
    bench.open(m.TrackStatus(4, *NAME, alias))
    bench.open(m.PublishNamespace(6, (b"a",), alias))
    bench.open(m.SubscribeNamespace(8, (b"a",), alias))
    assert [list(getattr(event, "tokens", ())) for event in bench.events[1:]] == [[(7, b"a")]] * 5
    bench.open(m.Fetch(10, *NAME, register))
    assert bench.close_code == SessionCode.DUPLICATE_AUTH_TOKEN_ALIAS


def test_a_bad_token_in_an_update_ends_the_subscription() -> None:
    bench = Bench()
    stream = bench.open(subscribe(0))
    bench.core.responder.accept_subscribe(0, track(), 0.0)
    alias = Parameters.of(authorization_token=[Token.use_alias(1)])
    bench.say(stream, m.RequestUpdate(2, alias))
    _, error, done = bench.replies(stream)
    assert isinstance(error, m.RequestError)
    assert error.error_code == RequestCode.UNKNOWN_AUTH_TOKEN_ALIAS
    assert isinstance(done, m.PublishDone)
    assert bench.take(RequestCancelled) == [RequestCancelled(0, False, None)]
    bench.data(stream, b"", fin=True)
    assert residue(bench.core) == {}


# Reserved namespaces


@pytest.mark.parametrize("first", [b".", b".session"])
def test_reserved_namespaces_never_reach_the_application(first: bytes) -> None:
    bench = Bench()
    streams = [
        bench.open(m.Subscribe(0, (first, b"a"), b"t", NONE)),
        bench.open(m.Fetch(2, (first,), b"", NONE)),
        bench.open(m.TrackStatus(4, (first,), b"t", NONE)),
        bench.open(m.PublishNamespace(6, (first,), NONE)),
        bench.open(m.SubscribeNamespace(8, (first,), NONE)),
    ]
    assert len(bench.events) == 1
    for stream in streams:
        assert refusal(bench, stream).error_code == RequestCode.DOES_NOT_EXIST


def test_other_namespaces_with_a_dot_are_the_applications_to_judge() -> None:
    bench = Bench()
    bench.open(m.TrackStatus(0, (b".registered",), b"t", NONE))
    assert len(bench.take(TrackStatusReceived)) == 1


@pytest.mark.parametrize(
    "message",
    [m.Publish(0, *NAME, 7, NONE, BARE), m.SubscribeTracks(0, (b"a",), NONE)],
    ids=["PUBLISH", "SUBSCRIBE_TRACKS"],
)
def test_requests_that_are_not_supported_are_answered(message: m.Publish) -> None:
    bench = Bench()
    stream = bench.open(message)
    bench.core.responder.refuse(0, NotSupported("not here"))
    bench.drain()
    assert refusal(bench, stream).error_code == RequestCode.NOT_SUPPORTED
    assert stream in bench.fins
    bench.say(stream, m.PublishDone(0x2, 0, ""), fin=True)
    assert bench.close is None
    assert residue(bench.core) == {}


def test_datagrams_of_an_unknown_alias_are_dropped() -> None:
    bench = subscriber()
    datagram = bytes.fromhex("0c0900") + b"payload"
    bench.datagram(datagram)
    bench.say(0, OK)
    bench.datagram(datagram)
    assert bench.close is None
    assert [type(event).__name__ for event in bench.events][-1] == "DatagramReceived"
    assert bench.take(ObjectEnded) == []

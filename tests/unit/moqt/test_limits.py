"""Limits on what a peer can grow: each by its name, with its answer and its counter."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcs.moqt import messages as m
from kvcs.moqt.asking import request_streams
from kvcs.moqt.errors import RequestCode, SessionCode
from kvcs.moqt.events import NamespaceAnnounced, RequestRefused, SubscribeReceived
from kvcs.moqt.filters import LocationFilter, RangeFilter
from kvcs.moqt.framing import encode_message
from kvcs.moqt.incoming import receiving, rules
from kvcs.moqt.incoming.rules import TrackRules
from kvcs.moqt.limits import Budget, EarlyLimits, Limit, LimitCounters, Rate, SharedBudgets
from kvcs.moqt.load import STREAMS_A_REQUEST, weigh
from kvcs.moqt.objects import ObjectHeader
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.moqt.streams import SubgroupHeader
from kvcs.moqt.tokens import Token
from kvcs.moqt.wire import encode_vi64
from kvcs.testing.bench import Bench
from kvcs.testing.residue import residue
from kvcs.testing.tracks import NAME, put, put_group, subgroup_stream, track

NONE, BARE = Parameters(), KeyValues()
SUBSCRIBE_OK = m.SubscribeOk(9, NONE, BARE)


def status(request_id: int) -> m.TrackStatus:
    return m.TrackStatus(request_id, *NAME, NONE)


def refusals(bench: Bench, streams: list[int]) -> list[int]:
    """Codes with which requests were refused, in order."""
    replies = [reply for stream in streams for reply in bench.replies(stream)]
    return [reply.error_code for reply in replies if isinstance(reply, m.RequestError)]


def asks(bench: Bench, count: int) -> list[int]:
    return [bench.open(status(2 * number)) for number in range(count)]


# Requests


def test_open_requests() -> None:
    bench = Bench(settings=SessionSettings(max_peer_requests=3))
    assert refusals(bench, asks(bench, 5)) == [RequestCode.EXCESSIVE_LOAD] * 2
    assert bench.core.limits[Limit.OPEN_REQUESTS] == 2
    assert bench.close is None


def test_octets_of_open_requests() -> None:
    small = weigh(status(0))
    bench = Bench(settings=SessionSettings(max_request_octets=3 * small))
    streams = asks(bench, 4)
    assert refusals(bench, streams) == [RequestCode.EXCESSIVE_LOAD]
    assert bench.core.limits[Limit.REQUEST_OCTETS] == 1
    bench.core.responder.answer_track_status(0, track())
    bench.drain()
    assert refusals(bench, [bench.open(status(40))]) == []  # one ended, and made room


def test_a_request_of_many_small_parts_weighs_more_than_its_octets() -> None:
    ranges = RangeFilter(0, tuple((number, number) for number in range(200)))
    small, many = status(0), m.Subscribe(0, *NAME, Parameters.of(objectid_filter=ranges))
    assert weigh(many) - weigh(small) > 10 * (
        len(encode_message(many)) - len(encode_message(small))
    )


def test_requests_in_a_time() -> None:
    settings = SessionSettings(max_requests_per_second=2.0, request_burst=3)
    bench = Bench(settings=settings)
    assert refusals(bench, asks(bench, 5)) == [RequestCode.EXCESSIVE_LOAD] * 2
    bench.advance(1.0)
    streams = [bench.open(status(number)) for number in (20, 22, 24)]
    assert refusals(bench, streams) == [RequestCode.EXCESSIVE_LOAD]
    assert bench.core.limits[Limit.REQUEST_RATE] == 3


def test_updates_count_as_requests() -> None:
    bench = Bench(settings=SessionSettings(max_requests_per_second=1.0, request_burst=2))
    stream = bench.open(m.Subscribe(0, *NAME, NONE))
    bench.core.responder.accept_subscribe(0, track(), bench.now)
    bench.drain()
    bench.say(stream, m.RequestUpdate(2, NONE), m.RequestUpdate(4, NONE))
    kinds = [type(reply) for reply in bench.replies(stream)]
    assert kinds == [m.SubscribeOk, m.RequestOk, m.RequestError, m.PublishDone]
    assert bench.core.limits[Limit.REQUEST_RATE] == 1


@pytest.mark.parametrize(
    ("change", "served"),
    [("object_delivery_timeout", 2), ("location_filter", 9), ("subscriber_priority", 9)],
)
def test_updates_count_by_the_streams_that_are_looked_at(change: str, served: int) -> None:
    """A priority looks at them so often as that is cheap, and a range in no time."""
    settings = SessionSettings(max_requests_per_second=1.0, request_burst=10)
    bench = Bench(settings=settings)
    stream, source = bench.open(m.Subscribe(0, *NAME, NONE)), track()
    bench.core.responder.accept_subscribe(0, source, bench.now)
    bench.drain()
    bench.credit.object_octets = 0
    for group in range(5 * STREAMS_A_REQUEST):
        put_group(source, group, 1, octets=10, priority=0)
    for number in range(10):
        value = LocationFilter.absolute_start(number, 0) if "filter" in change else number + 1
        bench.say(stream, m.RequestUpdate(2 + 2 * number, Parameters.of(**{change: value})))
    kinds = [type(reply) for reply in bench.replies(stream)]
    assert kinds.count(m.RequestOk) == served
    assert bench.core.limits[Limit.REQUEST_RATE] >= 1


def test_what_prefixes_match_in_a_time() -> None:
    settings = SessionSettings(max_matches_per_second=2.0, matches_burst=3)
    bench = Bench(settings=settings)

    def ask(request_id: int) -> int:
        prefix = (b"%d" % request_id,)
        stream = bench.open(m.SubscribeNamespace(request_id, prefix, NONE))
        if bench.core.requests.get(request_id) is not None:
            bench.core.responder.accept(request_id)
        return stream

    stream = ask(0)
    for number in range(7):  # what one request matches is told in full
        bench.core.responder.namespace(0, (b"%d" % number,))
    bench.drain()
    assert sum(isinstance(reply, m.Namespace) for reply in bench.replies(stream)) == 7
    assert refusals(bench, [ask(2)]) == [RequestCode.EXCESSIVE_LOAD]
    other = m.SubscribeTracks(4, (b"x",), NONE)
    assert refusals(bench, [bench.open(other)]) == [RequestCode.EXCESSIVE_LOAD]
    bench.say(stream, m.RequestUpdate(6, Parameters.of(track_namespace_prefix=(b"y",))))
    assert refusals(bench, [stream]) == [RequestCode.EXCESSIVE_LOAD]
    assert bench.core.limits[Limit.PREFIX_MATCHES] == 3
    bench.advance(2.6)
    assert refusals(bench, [ask(8), ask(10)]) == []


def test_tracks_that_prefixes_match_count_too() -> None:
    bench = Bench(settings=SessionSettings(matches_burst=2))
    bench.open(m.SubscribeTracks(0, NAME.namespace, NONE))
    bench.core.responder.accept(0)
    for _ in range(2):
        assert bench.core.asked_prefixes.selects(0, track())
    other = m.SubscribeNamespace(2, NAME.namespace, NONE)
    assert refusals(bench, [bench.open(other)]) == [RequestCode.EXCESSIVE_LOAD]


def test_tokens_of_a_message() -> None:
    bench = Bench(settings=SessionSettings(max_tokens=2))
    tokens = [Token.use_value(bytes((number,))) for number in range(3)]
    stream = bench.open(m.Subscribe(0, *NAME, Parameters.of(authorization_token=tokens)))
    assert refusals(bench, [stream]) == [RequestCode.EXCESSIVE_LOAD]
    assert bench.core.limits[Limit.TOKENS] == 1
    assert bench.take(SubscribeReceived) == []


def test_filters_fills_fetches_and_updates_are_counted() -> None:
    settings = SessionSettings(
        max_filter_ranges=1, max_fills=0, max_concurrent_fetches=1, max_request_updates=1
    )
    bench = Bench(settings=settings)
    ranges = Parameters.of(objectid_filter=RangeFilter(0, ((0, 1), (4, 5))))
    assert refusals(bench, [bench.open(m.Subscribe(0, *NAME, ranges))]) == [0x36]
    fetches = [bench.open(m.Fetch(number, *NAME, NONE)) for number in (2, 4)]
    assert refusals(bench, fetches) == [RequestCode.EXCESSIVE_LOAD]
    stream = bench.open(m.Subscribe(6, *NAME, NONE))
    bench.core.responder.accept_subscribe(6, track(), bench.now)
    bench.drain()
    fill = Parameters.of(fill_parameters=Parameters.of(location_filter=LocationFilter.none()))
    bench.say(stream, m.RequestUpdate(8, fill))
    pending = bench.open(m.Subscribe(10, *NAME, NONE))
    bench.say(pending, m.RequestUpdate(12, NONE), m.RequestUpdate(14, NONE))
    assert bench.close_code == SessionCode.TOO_MANY_REQUEST_UPDATES
    counted = (
        Limit.FILTER_RANGES,
        Limit.CONCURRENT_FETCHES,
        Limit.CONCURRENT_FILLS,
        Limit.REQUEST_UPDATES,
    )
    assert [bench.core.limits[limit] for limit in counted] == [1, 1, 1, 1]


def test_the_cache_of_token_aliases() -> None:
    bench = Bench(settings=SessionSettings(max_auth_token_cache_size=20))
    tokens = Parameters.of(authorization_token=Token.register(1, bytes(5)))
    bench.open(m.Subscribe(0, *NAME, tokens))
    assert bench.close_code == SessionCode.AUTH_TOKEN_CACHE_OVERFLOW
    assert bench.core.limits[Limit.TOKEN_CACHE] == 1


def test_properties_of_an_object() -> None:
    bench = Bench(Role.CLIENT)
    bench.core.requester.subscribe(NAME, NONE)
    bench.drain()
    bench.say(0, SUBSCRIBE_OK)
    header = SubgroupHeader(9, 0, 0, 0, has_properties=True).encode()
    bench.uni(header + b"\0" + encode_vi64(65536))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION
    assert bench.core.limits[Limit.OBJECT_PROPERTIES] == 1


# Streams that do not say what they want


def test_half_open_request_streams_are_given_up_by_time() -> None:
    bench = Bench(settings=SessionSettings(request_wait=4.0))
    octets = encode_message(status(0))
    early = bench.bidi()
    bench.data(early, octets[:3])
    bench.advance(3.0)
    late = bench.bidi()
    bench.data(late, octets[:3])
    bench.advance(2.0)
    assert bench.stops == {early: 0x1} and bench.resets == {early: 0x1}
    bench.data(late, octets[3:])
    bench.advance(10.0)
    assert bench.stops == {early: 0x1}
    assert bench.core.limits[Limit.HALF_OPEN_SECONDS] == 1


def test_half_open_request_streams_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_streams, "MAX_HALF_OPEN_STREAMS", 3)
    bench = Bench()
    streams = [bench.bidi() for _ in range(5)]
    for stream in streams:
        bench.data(stream, b"\x0d")
    assert list(bench.stops) == streams[:2]
    assert bench.core.limits[Limit.HALF_OPEN_STREAMS] == 2
    assert bench.close is None


def test_a_first_message_in_single_octets_is_taken() -> None:
    bench = Bench()
    stream = bench.bidi()
    for octet in encode_message(status(0)):
        bench.data(stream, bytes((octet,)))
    assert bench.core.requests.get(0) is not None
    bench.advance(60)
    assert bench.close is None and not bench.stops


def test_octets_of_messages_that_are_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_streams, "MAX_PARTIAL_OCTETS", 1000)
    bench = Bench()
    stream = bench.open(m.Subscribe(0, *NAME, NONE))
    bench.data(stream, b"\x02\xff\xff" + bytes(500))
    other = bench.bidi()
    bench.data(other, b"\x03\xff\xff" + bytes(400))
    assert bench.close is None
    bench.reset(other)
    bench.data(stream, bytes(400))
    assert bench.close is None
    bench.data(stream, bytes(100))
    assert bench.close_code == SessionCode.CONTROL_MESSAGE_TIMEOUT
    assert bench.core.limits[Limit.PARTIAL_OCTETS] == 1


def test_octets_before_setup() -> None:
    bench = Bench(setup=False)
    for _ in range(20):
        bench.data(bench.bidi(), bytes(65000))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION
    assert bench.core.limits[Limit.HELD_OCTETS] == 1
    silent = Bench(setup=False)
    silent.advance(11)
    assert silent.core.limits[Limit.SETUP_SECONDS] == 1


def test_data_streams_that_never_show_their_header_are_given_up() -> None:
    bench = Bench(Role.CLIENT)
    streams = [bench.uni(b"\x50") for _ in range(3)]
    bench.advance(2.1)
    assert sorted(bench.stops) == streams
    assert bench.core.limits[Limit.EARLY_SECONDS] == 3


@pytest.mark.parametrize(
    ("limits", "limit"),
    [(EarlyLimits(streams=2), Limit.EARLY_STREAMS), (EarlyLimits(octets=50), Limit.EARLY_OCTETS)],
)
def test_early_streams(limits: EarlyLimits, limit: Limit) -> None:
    bench = Bench(Role.CLIENT, SessionSettings(early=limits))
    for group in range(3):
        bench.uni(subgroup_stream(SubgroupHeader(7, group, 0, 0), 0, octets=20))
    assert len(bench.stops) == 1 and bench.core.limits[limit] == 1


def test_early_streams_of_all_sessions_of_a_server_together() -> None:
    settings = SessionSettings(shared=SharedBudgets(early_octets=Budget(100)))
    one, other = Bench(Role.CLIENT, settings), Bench(Role.CLIENT, settings)
    octets = subgroup_stream(SubgroupHeader(7, 0, 0, 0), 0, octets=60)
    held = one.uni(octets)
    stopped = other.uni(octets)
    assert one.stops == {} and list(other.stops) == [stopped]
    assert other.core.limits[Limit.EARLY_TOTAL] == 1
    one.reset(held)
    assert settings.shared.early_octets.used == 0
    other.uni(octets)
    assert len(other.stops) == 1
    other.core.close()
    assert settings.shared.early_octets.used == 0


@pytest.mark.parametrize("end", [True, False])
def test_stopped_data_streams_that_stay_open(end: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MAX_UNENDED_STREAMS", 3)
    bench = Bench(Role.CLIENT)
    streams = [bench.uni(b"\x05\x63") for _ in range(4)]
    assert len(bench.stops) == 4
    bench.advance(9.9)
    assert bench.close is None
    if end:
        bench.reset(streams[0])
    bench.advance(1)
    assert bench.close_code == (None if end else SessionCode.DATA_STREAM_TIMEOUT)
    assert bench.core.limits[Limit.UNENDED_STREAMS] == (0 if end else 1)


# What is remembered


def namespaces(settings: SessionSettings, *suffixes: bytes) -> Bench:
    bench = Bench(Role.CLIENT, settings)
    bench.core.requester.subscribe_namespace((b"kvcs-1",))
    bench.drain()
    bench.say(0, m.RequestOk(NONE, BARE), *(m.Namespace((suffix,)) for suffix in suffixes))
    return bench


@pytest.mark.parametrize(
    "settings",
    [SessionSettings(max_namespaces=2), SessionSettings(max_namespace_octets=2 * weigh((b"a",)))],
    ids=["number", "octets"],
)
def test_namespaces(settings: SessionSettings) -> None:
    bench = namespaces(settings, b"a", b"b", b"c")
    assert len(bench.take(NamespaceAnnounced)) == 2
    (refused,) = bench.take(RequestRefused)
    assert refused.error.error_code == RequestCode.NAMESPACE_TOO_LARGE
    assert bench.core.limits[Limit.NAMESPACES] == 1
    bench.reset(0)
    assert residue(bench.core) == {}


def test_namespaces_that_go_make_room() -> None:
    bench = namespaces(SessionSettings(max_namespace_octets=2 * weigh((b"a",))), b"a", b"b")
    bench.say(0, m.NamespaceDone((b"a",)), m.Namespace((b"c",)))
    assert bench.take(RequestRefused) == []


def objects(*places: tuple[int, int]) -> list[ObjectHeader]:
    return [ObjectHeader(group, object_id, 0, 0) for group, object_id in places]


def test_rules_stay_within_what_all_tracks_share() -> None:
    budget = Budget(40)
    tracks = [TrackRules(budget) for _ in range(4)]
    for number in range(400):
        for one in objects((number % 100, 3 * number)):
            tracks[number % 4].check_object(one)
    assert budget.used <= 40 + len(tracks)
    assert sum(one.entries for one in tracks) == budget.used
    for one in tracks:
        one.release()
    assert budget.used == 0


@pytest.mark.parametrize(
    "grow",
    [
        lambda number: ObjectHeader(0, 3 * number, 0, 0),
        lambda number: ObjectHeader(0, number, number, 0),
        lambda number: ObjectHeader(number, 0, 0, 0),
        lambda number: ObjectHeader(5, 10**6 - 3 * number, 0, 0),
    ],
    ids=["runs", "subgroups", "groups", "downwards"],
)
def test_rules_of_one_track_are_bounded(
    grow: Callable[[int], ObjectHeader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "MAX_RULE_ENTRIES", 50)
    track_rules = TrackRules()
    for number in range(500):
        track_rules.check_object(grow(number))
        held = sum(group.entries for group in track_rules._groups.values())
        assert held == track_rules.entries <= 51
    assert track_rules.forgotten


def test_gaps_of_one_track_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_GROUP_GAPS", 8)
    track_rules = TrackRules()
    for number in range(1, 100):
        track_rules.check_object(ObjectHeader(3 * number, 0, 0, 0), group_gap=1)
    assert len(track_rules._group_gaps) <= 8


def test_rules_that_were_forgotten_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_RULE_ENTRIES", 3)
    bench = Bench(Role.CLIENT)
    bench.core.requester.subscribe(NAME, NONE)
    bench.drain()
    bench.say(0, SUBSCRIBE_OK)
    for group in range(5):
        bench.uni(subgroup_stream(SubgroupHeader(9, group, 0, 0), 0), fin=True)
    bench.core.requester.cancel(0)
    assert bench.core.limits[Limit.RULES_TOTAL] == 1
    assert bench.core.settings.shared.rules.used == 0


# A slow reader


def test_a_slow_reader_holds_up_itself_only_and_costs_no_copy() -> None:
    """Payloads are held once, by their Track, whoever reads; each reader costs its place."""
    source = track()
    slow, quick = Bench(), Bench()
    for bench in (slow, quick):
        bench.open(m.Subscribe(0, *NAME, NONE))
        bench.core.responder.accept_subscribe(0, source, 0.0)
        bench.drain()
    slow.credit.object_octets = 0
    for object_id in range(200):
        put(source, 0, object_id, octets=1000)
        for bench in (slow, quick):
            bench.drain()
    assert sum(map(len, quick.sent.values())) > 200_000
    assert sum(map(len, slow.sent.values())) < 200
    assert len(slow.core._outbox) == 0
    assert len(slow.core.scheduler) == 1


# The counters


def test_counters_know_every_limit() -> None:
    heard: list[Limit] = []
    counters = LimitCounters(heard.append)
    assert set(counters) == set(Limit) and len(counters) == len(Limit)
    assert not any(counters.values())
    counters.reached(Limit.TOKENS)
    assert counters[Limit.TOKENS] == 1 and heard == [Limit.TOKENS]
    assert repr(counters) == "LimitCounters(tokens=1)"


def test_a_rate_lets_a_burst_through_and_then_its_share() -> None:
    rate = Rate(10.0, 2)
    assert [rate.take(0.0) for _ in range(3)] == [True, True, False]
    assert [rate.take(0.1) for _ in range(2)] == [True, False]
    assert [rate.take(100.0) for _ in range(3)] == [True, True, False]


def test_good_messages_before_a_broken_one_count() -> None:
    bench = Bench(Role.CLIENT)
    bench.core.requester.subscribe(NAME, NONE)
    bench.core.requester.subscribe_namespace((b"kvcs-1",))
    bench.drain()
    good = encode_message(m.RequestOk(NONE, BARE)) + encode_message(m.Namespace((b"a",)))
    bench.data(4, good + b"\x08\0\1\x40")
    assert [event.suffix for event in bench.take(NamespaceAnnounced)] == [(b"a",)]
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION

"""GOAWAY on control and request streams (MOQT §6.6.1, §9.2)."""

from __future__ import annotations

import pytest

from kvcs.errors import UsageError
from kvcs.moqt import messages as m
from kvcs.moqt.errors import RequestCode, SessionCode, StreamCode
from kvcs.moqt.events import (
    GoawayReceived,
    RequestAccepted,
    RequestCancelled,
    RequestRefused,
    SubscribeReceived,
)
from kvcs.moqt.framing import encode_message
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.settings import Role
from kvcs.testing.bench import Bench
from kvcs.testing.pair import SessionPair
from kvcs.testing.tracks import NAME, put, track

NONE = Parameters()
ELSEWHERE = "moqt://other.example/"


@pytest.mark.parametrize("role", Role)
def test_goaway_is_sent_once_on_the_control_stream(role: Role) -> None:
    bench = Bench(role)
    bench.replies(bench.opened[0])
    bench.core.goaway(timeout_ms=5, now=0.0)
    bench.core.goaway(timeout_ms=9, now=0.0)
    bench.drain()
    assert bench.replies(bench.opened[0]) == [m.Goaway("", 5)]


def test_only_a_server_says_where_to_go() -> None:
    bench = Bench(Role.SERVER)
    bench.replies(bench.opened[0])
    bench.core.goaway(ELSEWHERE, now=0.0)
    bench.drain()
    assert bench.replies(bench.opened[0]) == [m.Goaway(ELSEWHERE, 0)]
    client = Bench(Role.CLIENT)
    with pytest.raises(UsageError):
        client.core.goaway(ELSEWHERE, now=0.0)
    assert not client.core.draining


@pytest.mark.parametrize(
    ("role", "uri", "code"),
    [
        (Role.CLIENT, ELSEWHERE, None),
        (Role.CLIENT, "", None),
        (Role.SERVER, "", None),
        (Role.SERVER, ELSEWHERE, SessionCode.PROTOCOL_VIOLATION),
    ],
)
def test_goaway_of_the_peer(role: Role, uri: str, code: SessionCode | None) -> None:
    bench = Bench(role)
    bench.data(bench.control, encode_message(m.Goaway(uri, 30)))
    assert bench.close_code == code
    expected = [] if code else [GoawayReceived(None, uri, 30)]
    assert bench.take(GoawayReceived) == expected


def test_a_second_goaway_closes() -> None:
    bench = Bench()
    for _ in range(2):
        bench.data(bench.control, encode_message(m.Goaway("", 0)))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_one_goaway_for_the_session_and_one_for_each_request() -> None:
    bench = Bench(Role.CLIENT)
    for _ in range(2):
        bench.core.requester.publish_namespace((b"a",))
    bench.drain()
    bench.data(bench.control, encode_message(m.Goaway("", 0)))
    for stream in (0, 4):
        bench.say(stream, m.RequestOk(NONE, KeyValues()), m.Goaway(ELSEWHERE, 7))
    assert bench.take(GoawayReceived) == [
        GoawayReceived(None, "", 0),
        GoawayReceived(0, ELSEWHERE, 7),
        GoawayReceived(2, ELSEWHERE, 7),
    ]
    bench.say(4, m.Goaway("", 0))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_goaway_on_a_request_of_a_client_names_no_uri() -> None:
    bench = Bench()
    stream = bench.open(m.Subscribe(0, *NAME, NONE), m.Goaway("", 1))
    assert bench.take(GoawayReceived) == [GoawayReceived(0, "", 1)]
    other = bench.open(m.Subscribe(2, *NAME, NONE))
    bench.say(other, m.Goaway(ELSEWHERE, 1))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION
    assert stream not in bench.fins


def test_goaway_begins_no_request_stream() -> None:
    bench = Bench()
    bench.open(m.Goaway("", 0))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_new_requests_are_refused_and_running_ones_go_on() -> None:
    pair, source = SessionPair(), track()
    requester = pair.client.core.requester
    requester.subscribe(NAME, NONE)
    pair.run()
    pair.server.core.responder.accept_subscribe(0, source, 0.0)
    pair.server.core.goaway(now=0.0)
    put(source, 0, 0)
    late = requester.subscribe(NAME, NONE)
    pair.run()
    assert len(pair.server.of(SubscribeReceived)) == 1
    (refused,) = pair.client.of(RequestRefused)
    assert refused.request_id == late
    assert refused.error.error_code == RequestCode.GOING_AWAY
    requester.update(0, NONE)
    pair.run()
    assert not pair.client.core.closed


@pytest.mark.parametrize(
    ("still_open", "code"),
    [(True, SessionCode.GOAWAY_TIMEOUT), (False, SessionCode.NO_ERROR)],
)
def test_the_session_closes_when_the_time_is_over(still_open: bool, code: SessionCode) -> None:
    bench = Bench()
    if still_open:
        bench.open(m.Subscribe(0, *NAME, NONE))
    bench.core.goaway(timeout_ms=1500, now=bench.now)
    bench.advance(1.4)
    assert bench.close is None
    bench.advance(0.2)
    assert bench.close_code == code


def test_without_a_time_the_session_stays() -> None:
    bench = Bench()
    bench.core.goaway(now=0.0)
    bench.advance(3600.0)
    assert bench.close is None


# One request


def test_a_server_asks_a_client_to_move_one_request() -> None:
    pair, source = SessionPair(), track()
    first, second = (pair.client.core.requester.subscribe(NAME, NONE) for _ in range(2))
    pair.run()
    for request_id in (first, second):
        pair.server.core.responder.accept_subscribe(request_id, source, 0.0)
    control = pair.server.core.control
    control.goaway_request(second, ELSEWHERE, 500, now=pair.now)
    control.goaway_request(second, ELSEWHERE, 500, now=pair.now)  # quiet the second time
    pair.run()
    assert pair.client.of(GoawayReceived) == [GoawayReceived(second, ELSEWHERE, 500)]
    put(source, 0, 0)
    pair.advance(0.4)
    assert not pair.client.of(RequestCancelled)
    pair.advance(0.2)
    assert pair.server.of(RequestCancelled) == [
        RequestCancelled(second, False, StreamCode.GOING_AWAY)
    ]
    (ended,) = pair.client.of(RequestCancelled)
    assert (ended.request_id, ended.ours, ended.code) == (second, True, StreamCode.GOING_AWAY)
    # The session and the other request go on.
    assert not pair.client.core.closed and not pair.server.core.draining
    assert pair.client.core.requests.get(first) is not None


def test_a_request_that_was_moved_in_time_is_left_alone() -> None:
    pair, source = SessionPair(), track()
    old = pair.client.core.requester.subscribe(NAME, NONE)
    pair.run()
    pair.server.core.responder.accept_subscribe(old, source, 0.0)
    pair.server.core.control.goaway_request(old, timeout_ms=500, now=pair.now)
    pair.run()
    new = pair.client.core.requester.subscribe(NAME, NONE)
    pair.run()
    pair.server.core.responder.accept_subscribe(new, source, 0.0)
    pair.client.core.requester.cancel(old)
    pair.advance(1.0)
    assert not pair.client.of(RequestCancelled)
    assert [event.request_id for event in pair.client.of(RequestAccepted)] == [old, new]
    assert pair.client.core.requests.get(new) is not None


def test_without_a_time_the_request_stays() -> None:
    bench = Bench()
    stream = bench.open(m.Subscribe(0, *NAME, NONE))
    bench.core.responder.accept_subscribe(0, track(), bench.now)
    bench.core.control.goaway_request(0, now=bench.now)
    bench.advance(3600.0)
    assert bench.replies(stream)[-1] == m.Goaway("", 0)
    assert not bench.resets


def test_a_client_asks_to_move_a_request_of_its_own() -> None:
    bench = Bench(Role.CLIENT)
    request_id = bench.core.requester.publish_namespace((b"a",))
    bench.drain()
    with pytest.raises(UsageError, match="New Session URI"):
        bench.core.control.goaway_request(request_id, ELSEWHERE, now=0.0)
    bench.core.control.goaway_request(request_id, timeout_ms=100, now=0.0)
    bench.drain()
    assert bench.replies(0)[-1] == m.Goaway("", 100)
    bench.advance(0.1)
    assert (bench.resets, bench.stops) == ({0: 0x4}, {0: 0x4})
    assert bench.take(RequestCancelled) == [
        RequestCancelled(request_id, True, StreamCode.GOING_AWAY)
    ]


def test_what_cannot_be_moved() -> None:
    bench = Bench(Role.CLIENT)
    control = bench.core.control
    with pytest.raises(UsageError, match="there is no request"):
        control.goaway_request(0, now=0.0)
    bench.credit.bidirectional = 0
    waiting = bench.core.requester.publish_namespace((b"a",))
    bench.drain()
    with pytest.raises(UsageError, match="has not been sent"):
        control.goaway_request(waiting, now=0.0)
    bench.credit.bidirectional = 1
    bench.drain()
    bench.stop(0)
    with pytest.raises(UsageError):
        control.goaway_request(waiting, now=0.0)


def test_goaway_for_a_request_that_is_over_is_read_over() -> None:
    bench = Bench(Role.CLIENT)
    request_id = bench.core.requester.publish_namespace((b"a",))
    bench.drain()
    bench.core.requester.cancel(request_id)
    bench.drain()
    bench.say(0, m.RequestOk(NONE, KeyValues()), m.Goaway("", 7))
    assert bench.take(GoawayReceived) == []
    bench.say(0, m.Goaway("", 7))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


@pytest.mark.parametrize("on_request", [False, True])
def test_a_new_session_uri_that_is_too_long_closes(on_request: bool) -> None:
    bench = Bench(Role.CLIENT)
    long = "moqt://h/" + "a" * 8192  # 8201 octets: vi64 a0 09
    octets = b"\x10" + (len(long) + 3).to_bytes(2) + b"\xa0\x09" + long.encode() + b"\x00"
    if on_request:
        bench.core.requester.publish_namespace((b"a",))
        bench.drain()
    bench.data(0 if on_request else bench.control, octets)
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION

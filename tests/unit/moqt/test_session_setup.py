"""Control streams: SETUP, what may follow it, and what overtakes it (MOQT §6.3, §9.1)."""

from __future__ import annotations

import pytest

from kvcs.moqt import messages as m
from kvcs.moqt.asking.request_streams import MAX_HELD_OCTETS
from kvcs.moqt.data import FetchHeader, SubgroupHeader
from kvcs.moqt.errors import DoesNotExist, RequestCode, SessionCode
from kvcs.moqt.events import (
    PublishNamespaceReceived,
    RequestCancelled,
    SessionClosed,
    SessionEstablished,
    SubscribeReceived,
)
from kvcs.moqt.framing import encode_message
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues, SetupOption
from kvcs.moqt.sending.delivery import SubgroupSender
from kvcs.moqt.session import Session
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.moqt.tokens import Token
from kvcs.moqt.wire import Reader
from kvcs.testing.bench import Bench
from kvcs.testing.residue import residue
from kvcs.testing.tracks import NAME, put, track


def subscribe(request_id: int, parameters: Parameters | None = None) -> m.Subscribe:
    return m.Subscribe(request_id, NAME.namespace, NAME.name, parameters or Parameters())


def setup_of(bench: Bench) -> KeyValues:
    control = bench.opened[0]
    (message,) = bench.replies(control)
    assert isinstance(message, m.Setup)
    return message.options


# What we say


def test_client_says_where_it_goes() -> None:
    settings = SessionSettings(path="/moq?x=1", authority="relay.example:4433")
    bench = Bench(Role.CLIENT, settings)
    options = setup_of(bench)
    assert bench.opened == [2]
    assert options.octets(SetupOption.PATH) == b"/moq?x=1"
    assert options.octets(SetupOption.AUTHORITY) == b"relay.example:4433"
    assert options.octets(SetupOption.MOQT_IMPLEMENTATION) == b"kvcs"


def test_client_of_a_uri_without_path_sends_an_empty_one() -> None:
    options = setup_of(Bench(Role.CLIENT, SessionSettings(authority="relay.example")))
    assert options.octets(SetupOption.PATH) == b""


def test_server_says_its_limits_and_not_where_it_is() -> None:
    settings = SessionSettings(
        path="/x",
        authority="x",
        max_filter_ranges=3,
        max_request_updates=5,
        max_auth_token_cache_size=99,
        tokens=(b"abc",),
    )
    bench = Bench(Role.SERVER, settings)
    options = setup_of(bench)
    assert bench.opened == [3]
    assert SetupOption.PATH not in options
    assert SetupOption.AUTHORITY not in options
    assert options.integer(SetupOption.MAX_FILTER_RANGES) == 3
    assert options.integer(SetupOption.MAX_REQUEST_UPDATES) == 5
    assert options.integer(SetupOption.MAX_AUTH_TOKEN_CACHE_SIZE) == 99
    (token,) = options.all(SetupOption.AUTHORIZATION_TOKEN)
    assert isinstance(token, bytes)
    assert Token.read(Reader(token)).value == b"abc"


# What the peer says


def test_setup_establishes_the_session() -> None:
    token = Token.use_value(b"secret").write()
    options = KeyValues.of({SetupOption.AUTHORIZATION_TOKEN: token})
    bench = Bench(options=options)
    (event,) = bench.take(SessionEstablished)
    assert event.options == options
    assert [resolved.value for resolved in event.tokens] == [b"secret"]
    assert bench.core.peer_options == options


@pytest.mark.parametrize("cut", range(1, 6))
def test_setup_may_come_in_pieces(cut: int) -> None:
    frame = encode_message(m.Setup(KeyValues.of({SetupOption.MAX_FILTER_RANGES: 7})))
    bench = Bench(setup=False)
    stream = bench.uni(frame[:cut])
    assert bench.take(SessionEstablished) == []
    bench.data(stream, frame[cut:])
    assert len(bench.take(SessionEstablished)) == 1


def test_unknown_options_are_ignored_even_repeated() -> None:
    bench = Bench(options=KeyValues(((0x9D, b"a"), (0x9D, b"b"))))
    assert len(bench.take(SessionEstablished)) == 1


@pytest.mark.parametrize(
    ("role", "option", "code"),
    [
        (Role.CLIENT, {SetupOption.PATH: b"/"}, SessionCode.INVALID_PATH),
        (Role.CLIENT, {SetupOption.AUTHORITY: b"a"}, SessionCode.INVALID_AUTHORITY),
        (Role.SERVER, {SetupOption.PATH: b"no-slash"}, SessionCode.MALFORMED_PATH),
        (Role.SERVER, {SetupOption.AUTHORITY: b"a b"}, SessionCode.MALFORMED_AUTHORITY),
        (
            Role.SERVER,
            {SetupOption.AUTHORIZATION_TOKEN: Token.use_alias(1).write()},
            SessionCode.PROTOCOL_VIOLATION,
        ),
        (
            Role.SERVER,
            {SetupOption.AUTHORIZATION_TOKEN: b"\x09"},
            SessionCode.KEY_VALUE_FORMATTING_ERROR,
        ),
        (
            Role.CLIENT,
            {SetupOption.AUTHORIZATION_TOKEN: Token.use_alias(1).write()},
            SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS,
        ),
        (
            Role.CLIENT,
            {SetupOption.AUTHORIZATION_TOKEN: Token.delete(1).write()},
            SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS,
        ),
    ],
)
def test_setup_that_breaks_a_rule_closes(
    role: Role, option: dict[int, int | bytes], code: SessionCode
) -> None:
    bench = Bench(role, options=KeyValues.of(option))
    assert bench.close_code == code
    assert bench.core.failure is None
    assert bench.take(SessionEstablished) == []


def test_the_same_token_twice_in_setup_closes_as_malformed() -> None:
    token = Token.use_value(b"x").write()
    kind = SetupOption.AUTHORIZATION_TOKEN
    bench = Bench(options=KeyValues.of([(kind, token), (kind, token)]))
    assert bench.close_code == SessionCode.MALFORMED_AUTH_TOKEN


def test_token_in_setup_beyond_the_cache_is_used_once() -> None:
    token = Token.register(1, b"abc").write()
    bench = Bench(options=KeyValues.of({SetupOption.AUTHORIZATION_TOKEN: token}))
    (event,) = bench.take(SessionEstablished)
    assert [resolved.value for resolved in event.tokens] == [b"abc"]
    bench.open(subscribe(0, Parameters.of(authorization_token=[Token.use_alias(1)])))
    (error,) = bench.replies(0)
    assert isinstance(error, m.RequestError)
    assert error.error_code == RequestCode.UNKNOWN_AUTH_TOKEN_ALIAS


def test_second_setup_closes() -> None:
    bench = Bench()
    bench.data(bench.control, encode_message(m.Setup(KeyValues())))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_second_control_stream_closes() -> None:
    bench = Bench()
    bench.uni(encode_message(m.Setup(KeyValues())))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_second_control_stream_that_begins_before_the_first_is_whole_closes() -> None:
    bench = Bench(setup=False)
    frame = encode_message(m.Setup(KeyValues()))
    bench.uni(frame[:3])
    bench.uni(frame)
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_control_stream_that_begins_otherwise_closes() -> None:
    bench = Bench(setup=False)
    bench.uni(encode_message(subscribe(0)))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_request_on_the_control_stream_closes() -> None:
    bench = Bench()
    bench.data(bench.control, encode_message(subscribe(0)))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_fin_of_the_control_stream_closes() -> None:
    bench = Bench()
    bench.data(bench.control, b"", fin=True)
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_setup_with_fin_closes() -> None:
    bench = Bench(setup=False)
    bench.uni(encode_message(m.Setup(KeyValues())), fin=True)
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_reset_of_the_control_stream_closes() -> None:
    bench = Bench()
    bench.reset(bench.control)
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_stop_sending_for_our_control_stream_closes() -> None:
    bench = Bench()
    bench.stop(bench.opened[0])
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


@pytest.mark.parametrize("octets", [b"\x04", b"\x7f", b"\x16", b"\x80\x90"])
def test_unknown_unidirectional_stream_type_closes(octets: bytes) -> None:
    bench = Bench()
    bench.uni(octets)
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_padding_stream_is_read_over() -> None:
    bench = Bench()
    stream = bench.uni(bytes.fromhex("f0132b3e28") + bytes(10))
    bench.data(stream, bytes(2000))
    bench.data(stream, b"", fin=True)
    whole = bench.uni(bytes.fromhex("f0132b3e28"), fin=True)
    bench.reset(bench.uni(bytes.fromhex("f0132b3e28")))
    assert bench.close is None
    assert whole not in bench.stops
    assert residue(bench.core) == {}


def test_padding_datagram_is_discarded_and_an_unknown_one_closes() -> None:
    bench = Bench()
    bench.datagram(bytes.fromhex("f0132b3e29") + bytes(10))
    assert bench.close is None
    bench.datagram(b"\x10")
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_stream_that_ends_without_an_octet_is_nothing() -> None:
    bench = Bench()
    bench.uni(b"", fin=True)
    assert bench.close is None
    assert residue(bench.core) == {}


def test_fin_inside_a_stream_header_closes() -> None:
    bench = Bench()
    bench.uni(FetchHeader(300).encode()[:-1], fin=True)
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_reset_inside_a_stream_header_is_nothing() -> None:
    bench = Bench()
    bench.reset(bench.uni(FetchHeader(300).encode()[:-1]))
    assert bench.close is None
    assert residue(bench.core) == {}


# What overtakes SETUP


def test_requests_before_setup_are_held_and_answered_after_it() -> None:
    bench = Bench(setup=False)
    first = bench.bidi()
    frame = encode_message(subscribe(0))
    bench.data(first, frame[:5])
    second = bench.open(m.PublishNamespace(2, (b"a",), Parameters()), fin=True)
    bench.data(first, frame[5:])
    assert bench.events == []
    assert bench.sent.keys() == {bench.opened[0]}
    bench.send_setup()
    kinds = [type(event) for event in bench.events]
    assert kinds == [SessionEstablished, SubscribeReceived, PublishNamespaceReceived]
    bench.core.responder.accept(2)
    bench.drain()
    assert bench.replies(second) == [m.RequestOk(Parameters(), KeyValues())]


def test_held_request_that_was_reset_is_forgotten() -> None:
    bench = Bench(setup=False)
    stream = bench.open(subscribe(0))
    bench.reset(stream)
    bench.send_setup()
    assert bench.take(SubscribeReceived) == []
    assert residue(bench.core) == {}
    bench.open(subscribe(2))
    assert len(bench.take(SubscribeReceived)) == 1


def test_held_request_that_was_stopped_is_cancelled_with_setup() -> None:
    bench = Bench(setup=False)
    stream = bench.open(subscribe(0), fin=True)
    bench.stop(stream, 0x1)
    bench.send_setup()
    assert bench.take(RequestCancelled) == [RequestCancelled(0, False, 0x1)]
    assert residue(bench.core) == {}


def test_octets_before_setup_are_bounded() -> None:
    bench = Bench(setup=False)
    stream = bench.bidi()
    piece = bytes.fromhex("03ffff") + bytes(65533)
    for _ in range(MAX_HELD_OCTETS // len(piece) - 1):
        bench.data(stream, piece)
    assert bench.close is None
    bench.data(stream, piece)
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_streams_before_setup_are_bounded_even_if_they_are_empty() -> None:
    bench = Bench(setup=False)
    for _ in range(MAX_HELD_OCTETS):
        bench.data(bench.bidi(), b"")
        if bench.close is not None:
            break
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_fin_inside_a_request_closes() -> None:
    bench = Bench()
    bench.data(bench.bidi(), encode_message(subscribe(0))[:-1], fin=True)
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_a_stopped_stream_that_ends_without_a_request_is_over() -> None:
    bench = Bench()
    stream = bench.bidi()
    bench.stop(stream)
    bench.data(stream, b"", fin=True)
    assert bench.resets == {}
    assert residue(bench.core) == {}


def test_held_octets_of_a_reset_stream_count_no_more() -> None:
    bench = Bench(setup=False)
    for _ in range(3):
        stream = bench.bidi()
        bench.data(stream, bytes.fromhex("03ffff") + bytes(MAX_HELD_OCTETS // 2))
        bench.reset(stream)
    assert bench.close is None


def test_data_streams_before_setup_are_kept_as_early_ones() -> None:
    bench = Bench(setup=False)
    bench.uni(SubgroupHeader(1, 0, 0, 0).encode())
    bench.send_setup()
    assert bench.close is None
    assert len(bench.take(SessionEstablished)) == 1


# The end


def test_nothing_happens_after_the_close() -> None:
    bench = Bench()
    bench.core.close(SessionCode.NO_ERROR, "bye")
    bench.core.close(SessionCode.INTERNAL_ERROR, "again")
    bench.drain()
    assert bench.close_code == SessionCode.NO_ERROR
    assert bench.take(SessionClosed) == [SessionClosed(SessionCode.NO_ERROR, "bye", False)]
    bench.open(subscribe(0))
    bench.core.goaway(now=0.0)
    bench.core.receive_closed(None, "late", True)
    bench.drain()
    assert bench.events[1:] == []
    assert bench.core.next_timer() is None


def test_loss_of_the_transport_ends_the_session_once() -> None:
    bench = Bench()
    bench.core.receive_closed(None, "idle", False)
    bench.core.receive_closed(None, "idle", False)
    bench.drain()
    assert bench.take(SessionClosed) == [SessionClosed(None, "idle", False)]


def test_close_drops_what_was_not_sent() -> None:
    bench = Bench()
    bench.open(subscribe(0))
    bench.core.responder.refuse(0, DoesNotExist("no"))
    bench.core.close()
    bench.drain()
    assert bench.replies(0) == []
    assert bench.close_code == SessionCode.NO_ERROR


def test_a_fault_of_ours_closes_with_internal_error_and_keeps_the_cause() -> None:
    bench = Bench()

    def fault(_: object) -> None:
        raise ZeroDivisionError("boom")

    bench.core.at(1.0, fault)
    bench.advance(2.0)
    assert bench.close_code == SessionCode.INTERNAL_ERROR
    assert isinstance(bench.core.failure, ZeroDivisionError)
    assert bench.close is not None
    assert "boom" not in bench.close.reason


def test_a_fault_in_sending_closes_too_and_the_pump_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    source = track()
    bench.open(subscribe(0))
    bench.core.responder.accept_subscribe(0, source, 0.0)

    def fault(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(SubgroupSender, "next_piece", fault)
    put(source, 0, 0)
    bench.drain()
    assert bench.close_code == SessionCode.INTERNAL_ERROR
    assert isinstance(bench.core.failure, ZeroDivisionError)
    assert residue(bench.core, source) == {}


def test_who_pumps_is_woken_when_a_track_gets_an_object() -> None:
    woken: list[str] = []
    core = Session(Role.SERVER, on_wake=lambda: woken.append("now"))
    core.receive_connected(0.0)
    assert woken
    woken.clear()
    core.close()
    core.wake()
    assert woken == []


def test_idle_says_whether_control_messages_wait() -> None:
    bench = Bench(Role.CLIENT)
    assert bench.core.idle
    bench.credit.bidirectional = 0
    bench.core.requester.publish_namespace((b"a",))
    bench.drain()
    assert not bench.core.idle
    bench.credit.bidirectional = 1
    bench.drain()
    assert bench.core.idle

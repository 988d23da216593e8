"""What nobody knows is ignored where it may be, padding is read over, names survive their text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import UsageError
from kvcs.moqt import messages as m
from kvcs.moqt.datagrams import ObjectDatagram, PaddingDatagram, decode_datagram
from kvcs.moqt.events import (
    DatagramReceived,
    DataStreamEnded,
    RequestAccepted,
    RequestRefused,
    SubscribeReceived,
    SubscriptionEnded,
)
from kvcs.moqt.names import (
    FullTrackName,
    name_text,
    namespace_text,
    parse_name_text,
    parse_namespace_text,
)
from kvcs.moqt.objects import ObjectHeader
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.registry import is_grease
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.moqt.streams import PaddingHeader, SubgroupHeader, read_stream_header
from kvcs.moqt.tokens import TOKEN_OVERHEAD_OCTETS, Token
from kvcs.moqt.wire import Reader
from kvcs.testing.bench import Bench
from kvcs.testing.residue import residue
from kvcs.testing.tracks import NAME, locations, objects, put, subgroup_stream, track

NONE, BARE = Parameters(), KeyValues()
GREASE = 0x7F * 5 + 0x9D
EVEN = 0x7F * 3 + 0x9D
PAIRS = KeyValues.of([(EVEN, 1), (EVEN, 2), (GREASE + 1 - GREASE % 2, b"x" * 9)])


def test_grease_follows_its_pattern() -> None:
    assert is_grease(0x9D) and is_grease(GREASE) and is_grease(EVEN)
    assert not is_grease(0x9C) and not is_grease(GREASE + 1)
    assert EVEN % 2 == 0


@pytest.mark.parametrize("role", Role)
def test_setup_options_nobody_knows_are_ignored_also_twice(role: Role) -> None:
    bench = Bench(role, options=PAIRS)
    assert bench.close is None and bench.core.peer_options == PAIRS


def subscribed(parameters: Parameters = NONE, properties: KeyValues = BARE) -> Bench:
    bench = Bench(Role.CLIENT)
    bench.core.requester.subscribe(NAME, parameters)
    bench.drain()
    bench.say(0, m.SubscribeOk(9, NONE, properties))
    return bench


def test_properties_nobody_knows_are_handed_on_as_they_came() -> None:
    bench = subscribed(properties=PAIRS)
    (accepted,) = bench.take(RequestAccepted)
    assert isinstance(accepted.reply, m.SubscribeOk) and accepted.reply.track_properties == PAIRS
    header = SubgroupHeader(9, 0, 0, 0, has_properties=True)
    one = ObjectHeader(0, 0, 0, 0, properties=PAIRS.write(), payload_length=8)
    bench.uni(subgroup_stream(header, one), fin=True)
    (got,) = objects(bench.events)
    assert got.header.properties == PAIRS.write()


def test_codes_nobody_knows_end_what_they_end_and_no_more() -> None:
    bench = subscribed()
    stream = bench.uni(subgroup_stream(SubgroupHeader(9, 0, 0, 0), 0))
    bench.reset(stream, GREASE)
    assert [event.reset_code for event in bench.take(DataStreamEnded)] == [GREASE]
    bench.say(0, m.PublishDone(GREASE, 1, ""))
    assert [event.status for event in bench.take(SubscriptionEnded)] == [GREASE]
    bench.core.requester.track_status(NAME)
    bench.drain()
    bench.say(4, m.RequestError(GREASE, 0, "", None))
    assert [event.error.error_code for event in bench.take(RequestRefused)] == [GREASE]
    assert bench.close is None


def test_a_token_type_nobody_knows_is_the_applications_to_judge() -> None:
    bench = Bench()
    token = Token.use_value(b"t", GREASE)
    bench.open(m.Subscribe(0, *NAME, Parameters.of(authorization_token=token)))
    (asked,) = bench.take(SubscribeReceived)
    assert asked.tokens == ((GREASE, b"t"),)


# Padding


@pytest.mark.parametrize("cut", [1, 3, 5, 50])
def test_padding_streams_are_read_over_to_their_end(cut: int) -> None:
    bench = subscribed()
    octets = PaddingHeader().encode() + bytes(100)
    stream = bench.uni(octets[:cut])
    bench.data(stream, octets[cut:])
    bench.advance(60)
    bench.data(stream, bytes(1000), fin=True)
    reset = bench.uni(octets)
    bench.reset(reset)
    assert bench.close is None and not bench.stops
    bench.core.requester.cancel(0)
    bench.reset(0)
    assert residue(bench.core) == {}


def test_padding_datagrams_are_dropped() -> None:
    bench = subscribed()
    for octets in (PaddingDatagram().encode(0), PaddingDatagram().encode(900)):
        bench.datagram(octets)
    bench.datagram(ObjectDatagram(9, 0, 0, 0, b"x").encode())
    assert len(bench.take(DatagramReceived)) == 1 and bench.close is None


def test_long_forms_of_a_stream_type_are_legal() -> None:
    short = SubgroupHeader(9, 0, 0, 0).encode()
    long_form = b"\xc0\x00" + bytes((short[0],)) + short[1:]
    assert read_stream_header(Reader(long_form)) == SubgroupHeader(9, 0, 0, 0)


# INCLUDE_PROPERTIES


@pytest.mark.parametrize("priority", [None, 7])
def test_hidden_properties_hide_no_priority(priority: int | None) -> None:
    """A default that the subscriber was not told would be read as 128."""
    source = track(properties=KeyValues.of({Property.DEFAULT_PUBLISHER_PRIORITY: 7}))
    put(source, 0, 0, priority=priority)
    bench = Bench()
    stream = bench.open(m.Subscribe(0, *NAME, Parameters.of(include_properties=0)))
    bench.core.responder.accept_subscribe(0, source, bench.now)
    put(source, 1, 0, priority=priority)
    bench.drain()
    (ok,) = bench.replies(stream)
    assert isinstance(ok, m.SubscribeOk) and not ok.track_properties
    (data,) = [octets for id_, octets in bench.sent.items() if id_ & 2 and id_ != 3]
    header = read_stream_header(Reader(data))
    assert isinstance(header, SubgroupHeader) and header.publisher_priority == 7


def test_hidden_properties_hide_no_priority_of_a_datagram() -> None:
    source = track(properties=KeyValues.of({Property.DEFAULT_PUBLISHER_PRIORITY: 7}))
    bench = Bench()
    bench.open(m.Subscribe(0, *NAME, Parameters.of(include_properties=0)))
    bench.core.responder.accept_subscribe(0, source, bench.now)
    source.publish(ObjectHeader(0, 0, None, None, payload_length=1), (memoryview(b"x"),), 0.0)
    bench.drain()
    (octets,) = bench.datagrams
    datagram = decode_datagram(octets)
    assert isinstance(datagram, ObjectDatagram) and datagram.publisher_priority == 7


# Tokens


def test_an_alias_cache_fills_to_the_octet_and_only_delete_makes_room() -> None:
    room = 2 * (TOKEN_OVERHEAD_OCTETS + 4)
    bench = Bench(settings=SessionSettings(max_auth_token_cache_size=room))

    def present(request_id: int, *tokens: Token) -> None:
        bench.open(m.TrackStatus(request_id, *NAME, Parameters.of(authorization_token=tokens)))

    present(0, Token.register(1, b"aaaa"), Token.register(2, b"bbbb"))
    assert bench.core.tokens.size == room and bench.close is None
    present(2, Token.delete(1))
    present(4, Token.register(3, b"cccc"), Token.use_alias(2))
    assert bench.core.tokens.size == room and bench.close is None
    present(6, Token.register(4, b""))
    assert bench.close_code == 0x13


# Names


fields = st.lists(st.binary(min_size=1, max_size=12), max_size=8).map(tuple)


@given(fields, st.binary(max_size=20))
def test_names_survive_their_text(namespace: tuple[bytes, ...], name: bytes) -> None:
    full = FullTrackName(namespace, name)
    assert parse_name_text(name_text(full)) == full
    assert parse_namespace_text(namespace_text(namespace)) == namespace
    assert set(name_text(full)) <= set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
    )


@given(st.text(max_size=30))
def test_text_is_a_name_in_one_way_or_none(text: str) -> None:
    try:
        full = parse_name_text(text)
    except UsageError:
        return
    assert name_text(full) == text


def test_no_objects_of_a_stream_are_lost_to_padding_beside_it() -> None:
    bench = subscribed()
    stream = bench.uni(b"")
    padding = bench.uni(PaddingHeader().encode())
    for octet in subgroup_stream(SubgroupHeader(9, 0, 0, 0), 0, 1):
        bench.data(padding, bytes(3))
        bench.data(stream, bytes((octet,)))
    assert len(locations(bench.events)) == 2

"""Integers, field kinds and control frames (MOQT §8, §9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest

from kvcs.errors import UsageError
from kvcs.moqt import messages as m
from kvcs.moqt.errors import ProtocolViolation
from kvcs.moqt.framing import MessageReader, decode_body, encode_message
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.wire import (
    FLAG,
    MAX_MESSAGE_BODY,
    MAX_REASON_OCTETS,
    NAMESPACE,
    PREFIXED,
    REASON,
    VI64,
    NeedMore,
    Reader,
    Text,
    encode_vi64,
    message,
)

EMPTY_SETUP = bytes.fromhex("af000000")


@pytest.mark.parametrize("value", [-1, 2**64])
def test_integers_outside_64_bits_are_not_encoded(value: int) -> None:
    with pytest.raises(UsageError, match="64-bit"):
        encode_vi64(value)


def test_reader_reads_between_its_bounds() -> None:
    reader = Reader(bytes.fromhex("ff0102030405ff"), 1, 6)
    assert reader.remaining == 5
    assert (reader.uint8(), reader.uint16()) == (1, 0x0203)
    inner = reader.sub(1)
    assert (inner.rest(), inner.remaining, reader.remaining) == (b"\x04", 0, 1)
    with pytest.raises(ProtocolViolation, match="1 octets too many"):
        reader.finish()
    assert reader.vi64() == 5
    reader.finish()
    for read in (reader.vi64, reader.uint8, reader.uint16):
        with pytest.raises(NeedMore):
            read()
    with pytest.raises(NeedMore):
        reader.take(1)
    with pytest.raises(NeedMore):
        reader.sub(1)
    assert reader.rest() == b""


def test_a_length_beyond_what_is_here_is_not_allocated() -> None:
    with pytest.raises(NeedMore):
        PREFIXED.read(Reader(b"\xff" * 9 + b"abc"))


def test_a_reader_takes_views_and_gives_octets() -> None:
    reader = Reader(memoryview(b"\x80\x05abc"))
    assert reader.vi64() == 5
    assert reader.take(3) == b"abc"


def test_flags_are_0_or_1() -> None:
    assert FLAG.read(Reader(b"\x01")) is True
    assert FLAG.write(False) == b"\x00"
    with pytest.raises(ProtocolViolation):
        FLAG.read(Reader(b"\x02"))
    with pytest.raises(UsageError):
        FLAG.write(2)


def test_text_has_a_limit_and_is_utf8() -> None:
    kind = Text("URI", 4)
    assert kind.read(Reader(kind.write("é12"))) == "é12"
    with pytest.raises(UsageError, match="limit 4"):
        kind.write("é123")
    with pytest.raises(ProtocolViolation, match="limit 4"):
        kind.read(Reader(b"\x05abcde"))
    with pytest.raises(ProtocolViolation, match="UTF-8"):
        kind.read(Reader(b"\x01\xff"))
    with pytest.raises(UsageError, match="UTF-8"):
        kind.write("\udcff")


def test_a_reason_is_cut_to_what_may_be_sent_and_never_fails_over_its_text() -> None:
    sent = REASON.read(Reader(REASON.write("é" * MAX_REASON_OCTETS)))
    assert sent == "é" * (MAX_REASON_OCTETS // 2)
    assert REASON.read(Reader(REASON.write("x" + "é" * 600))).endswith("é")
    assert REASON.read(Reader(b"\x02a\xff")) == "a�"
    assert REASON.read(Reader(REASON.write("\udcff"))) == "\\udcff"
    with pytest.raises(ProtocolViolation):
        REASON.read(Reader(encode_vi64(MAX_REASON_OCTETS + 1) + bytes(MAX_REASON_OCTETS + 1)))


def test_namespaces_have_three_limits() -> None:
    assert NAMESPACE.read(Reader(NAMESPACE.write((b"a",) * 32))) == (b"a",) * 32
    assert NAMESPACE.read(Reader(NAMESPACE.write((b"a" * 4096,)))) == (b"a" * 4096,)
    for bad in ((b"a",) * 33, (b"",), (b"a", b"b" * 4096)):
        with pytest.raises(UsageError):
            NAMESPACE.write(bad)
        octets = encode_vi64(len(bad)) + b"".join(map(PREFIXED.write, bad))
        with pytest.raises(ProtocolViolation):
            NAMESPACE.read(Reader(octets))


def test_a_field_that_breaks_a_limit_is_refused_before_its_octets_are_here() -> None:
    with pytest.raises(ProtocolViolation):
        NAMESPACE.read(Reader(b"\x01" + encode_vi64(4097)))
    with pytest.raises(ProtocolViolation):
        NAMESPACE.read(Reader(encode_vi64(2**64 - 1)))
    with pytest.raises(ProtocolViolation):
        REASON.read(Reader(encode_vi64(2**64 - 1)))


def test_a_type_cannot_be_declared_twice() -> None:
    @dataclass(frozen=True)
    class Again:
        number: Annotated[int, VI64]

    with pytest.raises(TypeError, match="reuses message type 0x3"):
        message(0x3)(Again)


def test_a_body_of_65535_octets_is_the_longest() -> None:
    def setup(size: int) -> m.Setup:
        # Type and Length take four octets, the second pair's two.
        return m.Setup(KeyValues(((0x07, b"x" * (size - 6)), (0x08, 1))))

    assert len(encode_message(setup(MAX_MESSAGE_BODY))) == MAX_MESSAGE_BODY + 4
    with pytest.raises(UsageError, match="limit 65535"):
        encode_message(setup(MAX_MESSAGE_BODY + 1))


def test_names_are_held_to_their_common_limit_on_both_sides() -> None:
    fits = m.Subscribe(0, (b"a" * 4000,), b"b" * 96, Parameters())
    frame = encode_message(fits)
    assert MessageReader().feed(frame) == [fits]
    with pytest.raises(UsageError, match="4097"):
        encode_message(m.Subscribe(0, (b"a" * 4000,), b"b" * 97, Parameters()))
    body = frame[3:].replace(b"\x60" + b"b" * 96, b"\x61" + b"b" * 97)
    with pytest.raises(ProtocolViolation, match="4097"):
        decode_body(0x03, body)


def test_bodies_have_to_be_used_up_exactly() -> None:
    assert decode_body(0x10, b"\x00\x05") == m.Goaway("", 5)
    with pytest.raises(ProtocolViolation, match="inside a field"):
        decode_body(0x10, b"\x00")
    with pytest.raises(ProtocolViolation, match="1 octets behind"):
        decode_body(0x10, b"\x00\x05\x00")


def test_an_unknown_type_has_no_body_to_decode() -> None:
    with pytest.raises(ProtocolViolation, match="0x1e"):
        decode_body(0x1E, b"")


def test_an_unknown_type_is_refused_before_its_length_is_here() -> None:
    reader = MessageReader()
    assert reader.feed(b"\xbf") == []
    with pytest.raises(ProtocolViolation, match="0x3fff"):
        reader.feed(b"\xff")


def test_messages_out_of_place_are_refused_by_their_type() -> None:
    control = MessageReader({m.SETUP_TYPE}, {0x10})
    assert control.feed(EMPTY_SETUP) == [m.Setup(KeyValues())]
    with pytest.raises(ProtocolViolation, match="Setup does not belong here"):
        control.feed(EMPTY_SETUP[:2])
    request = MessageReader(m.REQUESTS, m.FOLLOWUPS)
    with pytest.raises(ProtocolViolation, match="Goaway does not belong here"):
        request.feed(b"\x10")


def test_a_message_in_pieces_is_pending() -> None:
    reader = MessageReader()
    pending = [reader.pending]
    received = []
    for piece in (
        EMPTY_SETUP[:3],
        EMPTY_SETUP[3:] + EMPTY_SETUP[:1],
        EMPTY_SETUP[1:] + EMPTY_SETUP,
    ):
        received.append(len(reader.feed(piece)))
        pending.append(reader.pending)
    assert received == [0, 1, 2]
    assert pending == [False, True, True, False]


def test_one_long_message_in_single_octets_is_decoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = 0

    class CountingReader(Reader):
        def take(self, length: int) -> bytes:
            nonlocal taken
            octets = super().take(length)
            taken += len(octets)
            return octets

    monkeypatch.setattr("kvcs.moqt.wire.Reader", CountingReader)
    frame = encode_message(m.Setup(KeyValues(((0x07, b"x" * 60000),))))
    reader = MessageReader()
    messages = [got for index in range(len(frame)) for got in reader.feed(frame[index : index + 1])]
    assert len(messages) == 1
    # Once as the body, once as the option's value: nothing is copied while the body is cut.
    assert taken < 2 * len(frame)

"""What holds for every control message and every sequence of octets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import SessionError
from kvcs.moqt import messages as m
from kvcs.moqt.framing import MessageReader, decode_body, encode_message
from kvcs.moqt.parameters import PARAMETER_KINDS, Parameters, ParameterType, Scope
from kvcs.moqt.properties import KeyValues, check_setup_options, setup_tokens
from kvcs.moqt.wire import FIELDS, MESSAGES, Kind, NeedMore, Reader, encode_vi64
from tests.property import moqt_strategies as moqt

EACH_MESSAGE = pytest.mark.parametrize("cls", MESSAGES.values(), ids=lambda cls: cls.__name__)


@EACH_MESSAGE
@given(data=st.data())
def test_every_message_decodes_to_itself(cls: type[Any], data: st.DataObject) -> None:
    message = data.draw(moqt.messages_of(cls))
    reader = MessageReader()
    assert reader.feed(encode_message(message)) == [message]
    assert not reader.pending


@given(moqt.vi64, st.integers(0, 8))
def test_integers_decode_from_every_length_that_holds_them(value: int, longer: int) -> None:
    shortest = encode_vi64(value)
    assert Reader(shortest).vi64() == value
    length = min(9, len(shortest) + longer)
    prefix = {9: 0xFF}.get(length, (0xFF00 >> (length - 1)) & 0xFF)
    shift = 8 * (length - 1)
    whole = (prefix << shift | value).to_bytes(length, "big")
    reader = Reader(whole)
    assert reader.vi64() == value
    reader.finish()


@given(st.data(), st.lists(moqt.messages, max_size=4))
def test_messages_do_not_depend_on_the_cut(data: st.DataObject, sent: list[m.Message]) -> None:
    reader = MessageReader()
    octets = b"".join(map(encode_message, sent))
    received: list[m.Message] = []
    for piece in data.draw(moqt.chopped(octets)):
        received += reader.feed(piece)
    assert received == sent
    assert not reader.pending


@given(st.sampled_from([*MESSAGES, 0x01, 0x1E, 0x40]), st.binary(max_size=200))
def test_any_body_gives_a_message_or_a_session_error(type_id: int, body: bytes) -> None:
    try:
        message = decode_body(type_id, body)
    except SessionError:
        return
    assert type_id in MESSAGES
    _survives_encoding(message)


def _survives_encoding(message: m.Message) -> None:
    reason = getattr(message, "reason", "")
    if "�" not in reason:  # which may stand for an octet that is not UTF-8
        assert MessageReader().feed(encode_message(message)) == [message]


@st.composite
def spoilt(draw: st.DrawFn, octets: bytes) -> bytes:
    """``octets`` with something changed, lost or added."""
    start = draw(st.integers(0, len(octets)))
    stop = draw(st.integers(start, min(len(octets), start + 3)))
    return octets[:start] + draw(st.binary(max_size=3)) + octets[stop:]


@EACH_MESSAGE
@given(data=st.data())
def test_spoilt_messages_give_messages_or_a_session_error(
    cls: type[Any], data: st.DataObject
) -> None:
    frame = encode_message(data.draw(moqt.messages_of(cls)))
    try:
        messages = MessageReader().feed(data.draw(spoilt(frame)))
    except SessionError:
        return
    for message in messages:
        _survives_encoding(message)


@given(st.data(), st.binary(max_size=60))
def test_octets_that_are_no_messages_fail_however_they_are_cut(
    data: st.DataObject, octets: bytes
) -> None:
    whole, outcome = _feed([octets])
    cut, cut_outcome = _feed(data.draw(moqt.chopped(octets)))
    # A violation takes messages of its own piece with it, so less may come out of one piece.
    assert cut[: len(whole)] == whole
    assert outcome == cut_outcome


def _feed(pieces: list[bytes]) -> tuple[list[m.Message], object]:
    reader = MessageReader()
    received: list[m.Message] = []
    for piece in pieces:
        try:
            received += reader.feed(piece)
        except SessionError as exc:
            return received, exc.code
    return received, reader.pending


KINDS: list[Kind] = list(
    {
        id(kind): kind
        for kind in (
            *PARAMETER_KINDS.values(),
            *(kind for fields in FIELDS.values() for _, kind in fields),
        )
    }.values()
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
@given(octets=st.binary(max_size=60))
def test_any_field_gives_a_value_need_more_or_a_session_error(kind: Kind, octets: bytes) -> None:
    reader = Reader(octets)
    try:
        kind.read(reader)
    except (NeedMore, SessionError):
        return
    assert 0 <= reader.pos <= len(octets)


@given(moqt.key_values)
def test_key_values_decode_to_themselves(block: KeyValues) -> None:
    assert KeyValues.decode(block.write()) == block


@given(moqt.key_values, st.booleans())
def test_any_setup_options_are_taken_or_close_the_session(
    options: KeyValues, from_client: bool
) -> None:
    try:
        check_setup_options(options, from_client)
    except SessionError:
        return
    assert len(setup_tokens(options)) == len(options.all(0x03))


@given(moqt.parameters(Scope.SUBSCRIBE), moqt.vi64)
def test_replacing_a_parameter_changes_that_one_only(before: Parameters, value: int) -> None:
    after = before.replace(rendezvous_timeout=value)
    assert after.get(ParameterType.RENDEZVOUS_TIMEOUT) == value
    assert after.replace(rendezvous_timeout=None) == before.replace(rendezvous_timeout=None)
    types = [type_ for type_, _ in after]
    assert types == sorted(types)

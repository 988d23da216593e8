"""Key-Value-Pairs, Setup Options and Properties (MOQT §8.3, §9.1, §10)."""

from __future__ import annotations

import pytest

from kvcs.errors import SessionError, UsageError
from kvcs.moqt.errors import (
    KeyValueError,
    MalformedTrack,
    ProtocolViolation,
    SessionCode,
    UnsupportedExtension,
)
from kvcs.moqt.names import Location
from kvcs.moqt.properties import (
    MAX_KEY_VALUE_OCTETS,
    KeyValues,
    Property,
    SetupOption,
    check_object_properties,
    check_setup_options,
    check_track_properties,
    find_property,
    setup_tokens,
)
from kvcs.moqt.registry import is_grease
from kvcs.moqt.tokens import Token
from kvcs.moqt.wire import encode_vi64

IMMUTABLE = Property.IMMUTABLE_PROPERTIES


def immutable(inner: KeyValues) -> KeyValues:
    return KeyValues.of({IMMUTABLE: inner.write()})


def test_parity_is_that_of_the_type_and_not_of_the_delta() -> None:
    block = KeyValues.of({0x3C: 2, 0x3F: b"xyz", 0x40: 5})
    assert block.write().hex() == "3c02" + "0303" + b"xyz".hex() + "0105"
    assert KeyValues.decode(block.write()) == block


def test_values_are_looked_up_by_type() -> None:
    block = KeyValues.of([(0x5D, b"two"), (0x04, 7), (0x5D, b"one")])
    assert block.items == ((0x04, 7), (0x5D, b"two"), (0x5D, b"one"))
    assert block.get(0x5D) == block.octets(0x5D) == b"two"
    assert block.get(0x04) == block.integer(0x04) == 7
    assert block.all(0x5D) == (b"two", b"one")
    assert block.get(0x06, 3) == block.integer(0x06, 3) == 3
    assert block.octets(0x07) is None and block.octets(0x04) is None
    assert 0x04 in block and 0x06 not in block
    assert block and not KeyValues()


@pytest.mark.parametrize(
    "pairs",
    [
        {2: b"octets"},
        {3: 5},
        {2: -1},
        {2: 2**64},
        {-2: 1},
        {2**64: 1},
        {2: 1, 2**64: 1},
        {3: bytes(MAX_KEY_VALUE_OCTETS + 1)},
    ],
    ids=lambda pairs: repr(pairs)[:20],
)
def test_pairs_that_cannot_be_sent_are_refused(pairs: dict[int, int | bytes]) -> None:
    with pytest.raises(UsageError):
        KeyValues.of(pairs)


def test_types_ascend() -> None:
    with pytest.raises(UsageError):
        KeyValues(((4, 1), (2, 1))).write()


@pytest.mark.parametrize(
    "octets",
    [
        encode_vi64(3) + encode_vi64(MAX_KEY_VALUE_OCTETS + 1) + bytes(MAX_KEY_VALUE_OCTETS + 1),
        b"\x03\x05abcd",
        b"\x02",
        b"\x02\x80",
        b"\x02\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\x00",
    ],
    ids=["long", "overrun", "no-value", "cut-value", "type-overflow"],
)
def test_blocks_that_break_the_format_close_the_session(octets: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        KeyValues.decode(octets)


def test_the_longest_value_is_taken() -> None:
    block = KeyValues.of({3: bytes(MAX_KEY_VALUE_OCTETS)})
    assert KeyValues.decode(block.write()) == block


def test_grease_has_its_pattern() -> None:
    assert [n for n in range(0x19C) if is_grease(n)] == [0x9D, 0x11C, 0x19B]


# ------------------------------------------------------------------------------ Setup Options


def close_code(options: KeyValues, from_client: bool = True) -> int | None:
    try:
        check_setup_options(options, from_client)
    except SessionError as exc:
        return exc.code
    return None


@pytest.mark.parametrize(
    "path", [b"", b"/", b"/moq", b"/a/b;c=1/%2F?q=1&r=/?", b"/kv?model=a&v=1", b"?only=query"]
)
def test_paths_are_absolute_or_empty(path: bytes) -> None:
    assert close_code(KeyValues.of({SetupOption.PATH: path})) is None


@pytest.mark.parametrize("path", [b"moq", b"/a b", b"/%zz", b"/a#f", b"/\xff", b"/a\n"])
def test_malformed_paths(path: bytes) -> None:
    assert close_code(KeyValues.of({SetupOption.PATH: path})) == SessionCode.MALFORMED_PATH


@pytest.mark.parametrize(
    "authority",
    [
        b"relay.example.com:4433",
        b"127.0.0.1",
        b"[2001:db8::1]:4443",
        b"[::1]",
        b"a",
        b"h:",
        b"u@h:1",
    ],
)
def test_authorities_are_host_and_port(authority: bytes) -> None:
    assert close_code(KeyValues.of({SetupOption.AUTHORITY: authority})) is None


@pytest.mark.parametrize("authority", [b"", b":443", b"a b", b"h:port", b"[::1", b"a/b", b"h\xff"])
def test_malformed_authorities(authority: bytes) -> None:
    options = KeyValues.of({SetupOption.AUTHORITY: authority})
    assert close_code(options) == SessionCode.MALFORMED_AUTHORITY


def test_servers_have_neither_path_nor_authority() -> None:
    path, authority = ({SetupOption.PATH: b"/"}, {SetupOption.AUTHORITY: b"h"})
    assert close_code(KeyValues.of(path), from_client=False) == SessionCode.INVALID_PATH
    assert close_code(KeyValues.of(authority), from_client=False) == SessionCode.INVALID_AUTHORITY
    assert close_code(KeyValues.of({SetupOption.MAX_REQUEST_UPDATES: 3}), from_client=False) is None


def test_known_options_do_not_repeat_and_unknown_ones_may() -> None:
    for option in SetupOption:
        value: int | bytes = 1 if option % 2 == 0 else b"/"
        if option is SetupOption.AUTHORIZATION_TOKEN:
            value = Token.use_value(b"x").write()
        code = close_code(KeyValues.of([(option, value), (option, value)]))
        if option is SetupOption.AUTHORIZATION_TOKEN:
            assert code is None
        else:
            assert code == SessionCode.PROTOCOL_VIOLATION
    assert close_code(KeyValues.of([(0x5C, 1), (0x5C, 2), (0x9D, b"x")])) is None


def test_tokens_of_a_setup() -> None:
    sent = [Token.register(7, b"cached", 1), Token.use_value(b"x")]
    options = KeyValues.of((SetupOption.AUTHORIZATION_TOKEN, token.write()) for token in sent)
    assert setup_tokens(options) == tuple(sent)
    assert close_code(options) is None
    for token in (Token.use_alias(1), Token.delete(1)):
        with_alias = KeyValues.of({SetupOption.AUTHORIZATION_TOKEN: token.write()})
        assert close_code(with_alias) == SessionCode.PROTOCOL_VIOLATION
        assert close_code(with_alias, from_client=False) is None
    broken = KeyValues.of({SetupOption.AUTHORIZATION_TOKEN: b""})
    assert close_code(broken) == SessionCode.KEY_VALUE_FORMATTING_ERROR


def test_the_implementation_is_text() -> None:
    broken = KeyValues.of({SetupOption.MOQT_IMPLEMENTATION: b"\xff"})
    assert close_code(broken) == SessionCode.KEY_VALUE_FORMATTING_ERROR


# ------------------------------------------------------------------ Track and Object Properties


@pytest.mark.parametrize("wrap", [False, True], ids=["outer", "immutable"])
@pytest.mark.parametrize(
    ("type_", "good", "bad", "error"),
    [
        (Property.DEFAULT_PUBLISHER_GROUP_ORDER, (1, 2), (0, 3), ProtocolViolation),
        (Property.DYNAMIC_GROUPS, (0, 1), (2,), ProtocolViolation),
        (Property.DEFAULT_PUBLISHER_PRIORITY, (0, 255), (256,), KeyValueError),
    ],
)
def test_track_properties_have_bounds(
    wrap: bool, type_: int, good: tuple[int], bad: tuple[int], error: type[SessionError]
) -> None:
    for value in good + bad:
        properties = KeyValues.of({type_: value})
        properties = immutable(properties) if wrap else properties
        assert find_property(properties, type_) == value
        if value in bad:
            with pytest.raises(error):
                check_track_properties(properties)
        else:
            check_track_properties(properties)


@pytest.mark.parametrize("wrap", [False, True], ids=["outer", "immutable"])
@pytest.mark.parametrize(("type_", "value"), [(0x4000, 1), (0x7FFF, b"x")])
def test_mandatory_track_properties_have_to_be_known(
    wrap: bool, type_: int, value: int | bytes
) -> None:
    properties = KeyValues.of({type_: value})
    properties = immutable(properties) if wrap else properties
    with pytest.raises(UnsupportedExtension):
        check_track_properties(properties)
    check_track_properties(properties, known={type_})
    with pytest.raises(MalformedTrack):
        check_object_properties(properties)


def test_properties_around_the_mandatory_range_are_optional() -> None:
    properties = KeyValues.of({0x3FFF: b"", 0x8000: 1})
    check_track_properties(properties)
    check_object_properties(properties)


BROKEN_IMMUTABLES = [
    KeyValues.of({IMMUTABLE: KeyValues.of({IMMUTABLE: b""}).write()}),
    KeyValues.of({IMMUTABLE: b"\x03\x09"}),
    KeyValues.of([(IMMUTABLE, b""), (IMMUTABLE, b"")]),
]


@pytest.mark.parametrize("properties", BROKEN_IMMUTABLES, ids=["nested", "unparsable", "repeated"])
def test_immutable_properties_that_cannot_be_read_make_the_track_malformed(
    properties: KeyValues,
) -> None:
    for check in (check_track_properties, check_object_properties):
        with pytest.raises(MalformedTrack):
            check(properties)
    with pytest.raises(MalformedTrack):
        find_property(properties, 2)


def test_closing_the_session_comes_before_a_malformed_track() -> None:
    properties = KeyValues.of({IMMUTABLE: b"\x03\x09", Property.DYNAMIC_GROUPS: 2, 0x4000: 1})
    with pytest.raises(ProtocolViolation):
        check_track_properties(properties)


def test_the_outer_list_comes_before_the_immutable_one() -> None:
    properties = KeyValues.of({2: 1, IMMUTABLE: KeyValues.of({2: 5, 4: 6}).write()})
    assert find_property(properties, 2) == 1
    assert find_property(properties, 4) == 6
    assert find_property(properties, 6) is None


GROUP_GAP, OBJECT_GAP = Property.PRIOR_GROUP_ID_GAP, Property.PRIOR_OBJECT_ID_GAP


def test_gaps_do_not_repeat_and_are_no_larger_than_the_id() -> None:
    gaps = KeyValues.of({GROUP_GAP: 5, OBJECT_GAP: 3})
    check_object_properties(gaps)
    check_object_properties(gaps, Location(5, 3))
    for location in (Location(4, 3), Location(5, 2)):
        with pytest.raises(MalformedTrack, match="larger"):
            check_object_properties(gaps, location)
    for twice in (
        KeyValues.of([(GROUP_GAP, 1), (GROUP_GAP, 1)]),
        KeyValues.of({OBJECT_GAP: 1, IMMUTABLE: KeyValues.of({OBJECT_GAP: 1}).write()}),
    ):
        with pytest.raises(MalformedTrack, match="repeats"):
            check_object_properties(twice)

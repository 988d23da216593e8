"""Key-Value-Pairs: Setup Options, Track Properties and Object Properties (MOQT §8.3, §8.4, §10).

Message Parameters are another encoding; they are in `kvcs.moqt.parameters`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, overload

from kvcs.errors import SessionError, UsageError
from kvcs.moqt.errors import (
    KeyValueError,
    MalformedTrack,
    ProtocolViolation,
    SessionCode,
    UnsupportedExtension,
)
from kvcs.moqt.names import MAX_VI64, GroupOrder, Location
from kvcs.moqt.registry import MANDATORY_TRACK_PROPERTIES, Property, SetupOption
from kvcs.moqt.tokens import Token, TokenAliasType
from kvcs.moqt.wire import NeedMore, Octets, Reader, encode_vi64

__all__ = [
    "KEY_VALUES",
    "MAX_KEY_VALUE_OCTETS",
    "KeyValues",
    "Property",
    "SetupOption",
    "check_object_properties",
    "check_setup_options",
    "check_track_properties",
    "find_property",
    "setup_tokens",
]

MAX_KEY_VALUE_OCTETS = 65535
"""Octets of one odd-typed value (§8.3)."""

Value = int | bytes

_ABSOLUTE_PATH = re.compile(
    rb"(?:/(?:[\w.~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*)*"
    rb"(?:\?(?:[\w.~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*)?",
    re.ASCII,
)
_AUTHORITY = re.compile(
    rb"(?:(?:[\w.~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*@)?"
    rb"(?:\[[0-9A-Za-z:.%~_-]+\]|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+)"
    rb"(?::[0-9]*)?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class KeyValues:
    """A block of Key-Value-Pairs, unknown types included."""

    items: tuple[tuple[int, Value], ...] = ()
    """Type and value of each pair, in ascending order of types; even types hold an int."""

    @overload
    @classmethod
    def of(cls, pairs: Mapping[Any, Value]) -> KeyValues: ...

    @overload
    @classmethod
    def of(cls, pairs: Iterable[tuple[int, Value]] = ()) -> KeyValues: ...

    @classmethod
    def of(cls, pairs: Mapping[Any, Value] | Iterable[tuple[int, Value]] = ()) -> KeyValues:
        """Build a block from types and values; equal types keep their order.

        Raises:
            UsageError: a value does not fit the parity or the bounds of its type.
        """
        items = pairs.items() if isinstance(pairs, Mapping) else pairs
        block = cls(tuple(sorted(((int(type_), value) for type_, value in items), key=_by_type)))
        block.write()
        return block

    @classmethod
    def read(cls, reader: Reader) -> KeyValues:
        """Read pairs to the end of ``reader``.

        Raises:
            ProtocolViolation: a type is above 2^64-1, a value above 65535 octets, or a pair
                does not end within the block.
        """
        items: list[tuple[int, Value]] = []
        type_ = 0
        try:
            while reader.pos != reader.end:
                type_ += reader.vi64()
                if type_ > MAX_VI64:
                    raise ProtocolViolation("Key-Value-Pair type above 2^64-1")
                if type_ & 1:
                    length = reader.vi64()
                    if length > MAX_KEY_VALUE_OCTETS:
                        raise ProtocolViolation(
                            f"Key-Value-Pair {type_:#x} has {length} octets,"
                            f" limit {MAX_KEY_VALUE_OCTETS}"
                        )
                    items.append((type_, reader.take(length)))
                else:
                    items.append((type_, reader.vi64()))
        except NeedMore as exc:
            raise ProtocolViolation(f"Key-Value-Pair {type_:#x} overruns its block") from exc
        return cls(tuple(items))

    @classmethod
    def decode(cls, octets: Octets) -> KeyValues:
        """Read a whole block, such as ``ObjectHeader.properties``; raises as `read`."""
        return cls.read(Reader(octets))

    def write(self) -> bytes:
        """Encode the pairs, without an outer length.

        Raises:
            UsageError: types descend, or a value does not fit its type.
        """
        parts = []
        previous = 0
        for type_, value in self.items:
            if type_ < previous:
                raise UsageError(f"Key-Value-Pair {type_:#x} behind {previous:#x}")
            parts.append(encode_vi64(type_ - previous))
            previous = type_
            if not isinstance(value, bytes if type_ & 1 else int):
                raise UsageError(f"Key-Value-Pair {type_:#x} cannot hold {type(value).__name__}")
            if isinstance(value, int):
                parts.append(encode_vi64(value))
            else:
                if len(value) > MAX_KEY_VALUE_OCTETS:
                    raise UsageError(f"Key-Value-Pair {type_:#x} has {len(value)} octets")
                parts += (encode_vi64(len(value)), value)
        if previous > MAX_VI64:
            raise UsageError("Key-Value-Pair type above 2^64-1")
        return b"".join(parts)

    def get(self, type_: int, default: Value | None = None) -> Value | None:
        """Return the first value of ``type_``."""
        for found, value in self.items:
            if found == type_:
                return value
        return default

    def integer(self, type_: int, default: int | None = None) -> int | None:
        """Return the first value of an even ``type_``."""
        value = self.get(type_)
        return value if isinstance(value, int) else default

    def octets(self, type_: int, default: bytes | None = None) -> bytes | None:
        """Return the first value of an odd ``type_``."""
        value = self.get(type_)
        return value if isinstance(value, bytes) else default

    def all(self, type_: int) -> tuple[Value, ...]:
        """Return every value of ``type_`` in order."""
        return tuple(value for found, value in self.items if found == type_)

    def __contains__(self, type_: int) -> bool:
        return any(found == type_ for found, _ in self.items)

    def __bool__(self) -> bool:
        return bool(self.items)


def _by_type(item: tuple[int, Value]) -> int:
    return item[0]


class _KeyValuesKind:
    """A block of Key-Value-Pairs that runs to the end of its message."""

    def read(self, reader: Reader) -> KeyValues:
        return KeyValues.read(reader)

    def write(self, value: KeyValues) -> bytes:
        return value.write()


KEY_VALUES = _KeyValuesKind()


# ------------------------------------------------------------------------------ Setup Options


def setup_tokens(options: KeyValues) -> tuple[Token, ...]:
    """Return the tokens of a SETUP in order.

    Raises:
        KeyValueError: one cannot be decoded (§8.9).
    """
    values = options.all(SetupOption.AUTHORIZATION_TOKEN)
    return tuple(Token.decode(value) for value in values if isinstance(value, bytes))


def check_setup_options(options: KeyValues, from_client: bool) -> None:
    """Check the options of a peer's SETUP; unknown ones are ignored, repeated or not (§9.1).

    Args:
        options: what the peer sent.
        from_client: whether the peer is the client, on native QUIC.

    Raises:
        SessionError: PROTOCOL_VIOLATION for a known option that repeats, and for a DELETE or
            USE_ALIAS token of a client; INVALID_PATH or INVALID_AUTHORITY for a server's;
            MALFORMED_PATH or MALFORMED_AUTHORITY; KEY_VALUE_FORMATTING_ERROR for a token or
            text that cannot be decoded.
    """
    counts = Counter(type_ for type_, _ in options.items)
    for option in SetupOption:
        if counts[option] > 1 and option is not SetupOption.AUTHORIZATION_TOKEN:
            raise ProtocolViolation(f"Setup Option {option.name} repeats")
    path = options.octets(SetupOption.PATH)
    authority = options.octets(SetupOption.AUTHORITY)
    if not from_client:
        if path is not None:
            raise SessionError("PATH from a server", SessionCode.INVALID_PATH)
        if authority is not None:
            raise SessionError("AUTHORITY from a server", SessionCode.INVALID_AUTHORITY)
    if path is not None and not _ABSOLUTE_PATH.fullmatch(path):
        raise SessionError("PATH is not an absolute path", SessionCode.MALFORMED_PATH)
    if authority is not None and not _AUTHORITY.fullmatch(authority):
        raise SessionError("AUTHORITY is not host[:port]", SessionCode.MALFORMED_AUTHORITY)
    try:
        (options.octets(SetupOption.MOQT_IMPLEMENTATION) or b"").decode()
    except UnicodeDecodeError as exc:
        raise KeyValueError("MOQT_IMPLEMENTATION is not UTF-8") from exc
    for token in setup_tokens(options):
        if from_client and token.alias_type in (TokenAliasType.DELETE, TokenAliasType.USE_ALIAS):
            raise ProtocolViolation(f"token {token.alias_type.name} in a client's SETUP")


# ------------------------------------------------------------------ Track and Object Properties


def _immutable(properties: KeyValues) -> KeyValues:
    """Return the pairs inside IMMUTABLE_PROPERTIES.

    Raises:
        MalformedTrack: it repeats, holds another one, or holds a pair that cannot be parsed.
    """
    blocks = properties.all(Property.IMMUTABLE_PROPERTIES)
    if not blocks:
        return KeyValues()
    if len(blocks) > 1:
        raise MalformedTrack("IMMUTABLE_PROPERTIES repeats")
    block = blocks[0]
    try:
        inner = KeyValues.decode(block if isinstance(block, bytes) else b"")
    except SessionError as exc:
        raise MalformedTrack(f"IMMUTABLE_PROPERTIES: {exc.reason}") from exc
    if Property.IMMUTABLE_PROPERTIES in inner:
        raise MalformedTrack("IMMUTABLE_PROPERTIES inside IMMUTABLE_PROPERTIES")
    return inner


def find_property(properties: KeyValues, type_: int) -> Value | None:
    """Return the first value of ``type_``, from the list itself or from IMMUTABLE_PROPERTIES (§10).

    Raises:
        MalformedTrack: IMMUTABLE_PROPERTIES has to be searched and cannot be parsed.
    """
    value = properties.get(type_)
    return _immutable(properties).get(type_) if value is None else value


def _check_known_track_properties(properties: KeyValues) -> None:
    for type_, value in properties.items:
        if type_ == Property.DEFAULT_PUBLISHER_GROUP_ORDER and value not in tuple(GroupOrder):
            raise ProtocolViolation(f"DEFAULT_PUBLISHER_GROUP_ORDER is {value!r}, not 1 or 2")
        if type_ == Property.DYNAMIC_GROUPS and value not in (0, 1):
            raise ProtocolViolation(f"DYNAMIC_GROUPS is {value!r}, not 0 or 1")
        if type_ == Property.DEFAULT_PUBLISHER_PRIORITY and value not in range(256):
            raise KeyValueError(f"DEFAULT_PUBLISHER_PRIORITY is {value!r}, not 0 to 255")


def check_track_properties(properties: KeyValues, known: Collection[int] = ()) -> None:
    """Check the Track Properties of PUBLISH, SUBSCRIBE_OK, FETCH_OK or TRACK_STATUS_OK (§10).

    What closes the session is found first, then what makes the Track malformed.

    Args:
        properties: what the peer sent.
        known: Mandatory Track Properties the application knows.

    Raises:
        SessionError: a known property has a value that is not allowed.
        MalformedTrack: IMMUTABLE_PROPERTIES cannot be read.
        UnsupportedExtension: a Mandatory Track Property is not known.
    """
    _check_known_track_properties(properties)
    inner = _immutable(properties)
    _check_known_track_properties(inner)
    for type_, _ in properties.items + inner.items:
        if type_ in MANDATORY_TRACK_PROPERTIES and type_ not in known:
            raise UnsupportedExtension(f"Mandatory Track Property {type_:#x} is not known")


def check_object_properties(
    properties: KeyValues, location: Location | None = None
) -> tuple[int | None, int | None]:
    """Check the Properties of one Object (§10, §12.1).

    Args:
        properties: the decoded Object Properties.
        location: the Object's; with it, gaps larger than its IDs are found.

    Returns:
        PRIOR_GROUP_ID_GAP and PRIOR_OBJECT_ID_GAP; None where the Object has none.

    Raises:
        MalformedTrack: IMMUTABLE_PROPERTIES cannot be read, a Mandatory Track Property is
            among them, or a gap repeats or is larger than the ID.
    """
    group_gap: int | None = None
    object_gap: int | None = None
    for type_, value in properties.items + _immutable(properties).items:
        if type_ in MANDATORY_TRACK_PROPERTIES:
            raise MalformedTrack(f"Mandatory Track Property {type_:#x} on an Object")
        if not isinstance(value, int):
            continue
        if type_ == Property.PRIOR_GROUP_ID_GAP:
            if group_gap is not None:
                raise MalformedTrack("PRIOR_GROUP_ID_GAP repeats on one Object")
            group_gap = value
        elif type_ == Property.PRIOR_OBJECT_ID_GAP:
            if object_gap is not None:
                raise MalformedTrack("PRIOR_OBJECT_ID_GAP repeats on one Object")
            object_gap = value
    if location is not None:
        if group_gap is not None and group_gap > location.group:
            raise MalformedTrack(f"PRIOR_GROUP_ID_GAP {group_gap} is larger than its Group ID")
        if object_gap is not None and object_gap > location.object:
            raise MalformedTrack(f"PRIOR_OBJECT_ID_GAP {object_gap} is larger than its Object ID")
    return group_gap, object_gap

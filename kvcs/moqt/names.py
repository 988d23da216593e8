"""Locations, Track Namespaces and Full Track Names (MOQT §2.4, §8.2, §8.8)."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from kvcs.errors import SessionError, UsageError

MAX_VI64 = 2**64 - 1
MAX_NAMESPACE_FIELDS = 32
MAX_NAME_OCTETS = 4096
_LITERAL = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")

_FORM = (
    "a Track Namespace is a tuple of octet strings, and a Track Name is one of them, as in"
    " FullTrackName((b'example', b'weather'), b'temperature')"
)
"""What our caller is told who gives something else."""

TrackNamespace = tuple[bytes, ...]


class GroupOrder(IntEnum):
    """Order in which the Groups of a request are delivered (§9.20)."""

    ASCENDING = 1
    DESCENDING = 2


class Location(NamedTuple):
    """Place of an Object in its Track; compares by Group, then Object (§8.2)."""

    group: int
    """Group ID."""

    object: int
    """Object ID."""

    def __str__(self) -> str:
        return f"{self.group}/{self.object}"


class FullTrackName(NamedTuple):
    """Track Namespace and Track Name (§2.4)."""

    namespace: TrackNamespace
    name: bytes

    def __str__(self) -> str:
        return name_text(self)


def check_namespace(namespace: TrackNamespace, name: bytes = b"") -> None:
    """Hold a Track Namespace, with its Track Name, to the limits of §2.4.

    Raises:
        SessionError: PROTOCOL_VIOLATION, for more than 32 fields, an empty field, or more than
            4096 octets in all.
    """
    if len(namespace) > MAX_NAMESPACE_FIELDS:
        raise SessionError(f"Track Namespace has {len(namespace)} fields, limit 32", 0x3)
    if not all(namespace):
        raise SessionError("Track Namespace has an empty field", 0x3)
    total = sum(map(len, namespace)) + len(name)
    if total > MAX_NAME_OCTETS:
        raise SessionError(f"Full Track Name has {total} octets, limit {MAX_NAME_OCTETS}", 0x3)


def check_ours(namespace: TrackNamespace, name: bytes = b"") -> None:
    """Hold a Track Namespace, with its Track Name, that our caller gives to what can be sent.

    Raises:
        UsageError: fields that are not octet strings, or beyond the limits of `check_namespace`.
    """
    if not isinstance(namespace, tuple) or not all(
        isinstance(field, bytes) for field in (*namespace, name)
    ):
        raise UsageError(_FORM)
    try:
        check_namespace(namespace, name)
    except SessionError as exc:
        raise UsageError(exc.reason) from None


def check_our_track(name: FullTrackName) -> None:
    """Hold a Full Track Name that our caller gives to what can be sent.

    Raises:
        UsageError: it is none, or as `check_ours`.
    """
    if not isinstance(name, tuple) or len(name) != 2:
        raise UsageError(_FORM)
    check_ours(*name)


def is_prefix(prefix: TrackNamespace, namespace: TrackNamespace) -> bool:
    """Whether ``prefix`` matches ``namespace`` field by field (§2.4.2)."""
    return namespace[: len(prefix)] == prefix


def overlaps(a: TrackNamespace, b: TrackNamespace) -> bool:
    """Whether one of two prefixes matches the other (§2.4.2)."""
    shorter = min(len(a), len(b))
    return a[:shorter] == b[:shorter]


def _escape(field: bytes) -> str:
    return "".join(chr(octet) if octet in _LITERAL else f".{octet:02x}" for octet in field)


def namespace_text(namespace: TrackNamespace) -> str:
    """Text form of a Track Namespace (§8.8)."""
    return "-".join(_escape(field) for field in namespace)


def name_text(name: FullTrackName) -> str:
    """Text form of a Full Track Name: the namespace, two hyphens, the Track Name (§8.8)."""
    return f"{namespace_text(name.namespace)}--{_escape(name.name)}"


def _unescape(text: str) -> bytes:
    field = bytearray()
    position = 0
    while position < len(text):
        char = text[position]
        if char != ".":
            if not char.isascii() or ord(char) not in _LITERAL:
                raise UsageError(f"{char!r} is not allowed in the text form of a name")
            field.append(ord(char))
            position += 1
            continue
        digits = text[position + 1 : position + 3]
        if len(digits) != 2 or any(digit not in "0123456789abcdef" for digit in digits):
            raise UsageError(f"{'.' + digits!r} is not a dot and two lower-case hex digits")
        octet = int(digits, 16)
        if octet in _LITERAL:
            raise UsageError(f"'.{digits}' escapes an octet that has a literal form")
        field.append(octet)
        position += 3
    return bytes(field)


def parse_namespace_text(text: str) -> TrackNamespace:
    """Read the text form of a Track Namespace (§8.8).

    Raises:
        UsageError: the text is not in that form.
    """
    if not text:
        return ()
    fields = tuple(_unescape(field) for field in text.split("-"))
    if not all(fields):
        raise UsageError("the text form of a Track Namespace has an empty field")
    return fields


def parse_name_text(text: str) -> FullTrackName:
    """Read the text form of a Full Track Name (§8.8).

    Raises:
        UsageError: the text is not in that form.
    """
    namespace, separator, name = text.partition("--")
    if not separator:
        raise UsageError("the text form of a Full Track Name has no '--'")
    return FullTrackName(parse_namespace_text(namespace), _unescape(name))

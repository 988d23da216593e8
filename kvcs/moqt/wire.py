"""MOQT's integers and field kinds, and what each control message consists of (MOQT §8, §9).

A message is a frozen dataclass whose annotations name the wire form of its fields, in wire order.
`message` registers it; encoding, decoding and test strategies come from that one declaration.

A *kind* has ``read(reader)`` and ``write(value)`` and checks its own bounds: ``read`` raises a
`SessionError` for what a peer may not send, ``write`` a `UsageError` for what our caller may not.
Octets that are not here yet are `NeedMore`, never an error; inside a body whose Length is known
they are a violation, and `kvcs.moqt.framing.decode_body` makes them one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, get_type_hints

from kvcs.errors import SessionError, UsageError
from kvcs.moqt.errors import ProtocolViolation
from kvcs.moqt.names import (
    MAX_NAME_OCTETS,
    MAX_NAMESPACE_FIELDS,
    MAX_VI64,
    Location,
    TrackNamespace,
    check_namespace,
)

__all__ = [
    "FIELDS",
    "FLAG",
    "LOCATION",
    "MAX_MESSAGE_BODY",
    "MAX_REASON_OCTETS",
    "MESSAGES",
    "NAMESPACE",
    "PREFIXED",
    "REASON",
    "TYPE_IDS",
    "UINT8",
    "VI64",
    "VI64_LENGTH",
    "VI64_MASK",
    "Bounded8",
    "Kind",
    "NeedMore",
    "Reader",
    "Text",
    "encode_vi64",
    "message",
]

MAX_MESSAGE_BODY = 65535
"""Octets of a control message's body: what its 16-bit Length can say (§9)."""

MAX_REASON_OCTETS = 1024
"""Octets of a Reason Phrase (§8.5)."""

Octets = bytes | bytearray | memoryview


class NeedMore(Exception):
    """The octets so far are a proper beginning; more have to come before they can be read."""


# --------------------------------------------------------------------------------- integers


def _leading_ones(octet: int) -> int:
    return 8 - (octet ^ 0xFF).bit_length()


VI64_LENGTH = bytes(1 + _leading_ones(octet) for octet in range(256))
"""Octets of a vi64, by its first octet (§8.1)."""

VI64_MASK = (0, *((1 << 7 * length) - 1 for length in range(1, 9)), MAX_VI64)
"""Bits of a vi64 that hold its value, by its length in octets."""

_ONE_OCTET = tuple(bytes((value,)) for value in range(0x80))


def encode_vi64(value: int) -> bytes:
    """Encode an integer in its shortest form (§8.1).

    Raises:
        UsageError: ``value`` is negative or above 2^64-1.
    """
    if 0 <= value < 0x80:
        return _ONE_OCTET[value]
    if not 0 <= value <= MAX_VI64:
        raise UsageError(f"{value} does not fit a 64-bit unsigned integer")
    bits = value.bit_length()
    if bits > 56:
        return b"\xff" + value.to_bytes(8, "big")
    length = (bits + 6) // 7
    prefix = (0xFF00 >> (length - 1)) & 0xFF
    return (prefix << 8 * (length - 1) | value).to_bytes(length, "big")


class Reader:
    """Reads fields from octets that are already here.

    Args:
        data: the octets; they are not copied, and must not change while read.
        pos: index of the first octet to read.
        end: index behind the last one; None for the end of ``data``.

    After `NeedMore`, ``pos`` is that of the field which is not complete.
    """

    __slots__ = ("_data", "end", "pos")

    def __init__(self, data: Octets, pos: int = 0, end: int | None = None) -> None:
        self._data = data
        self.pos = pos
        self.end = len(data) if end is None else end

    @property
    def remaining(self) -> int:
        """Octets not read yet."""
        return self.end - self.pos

    def vi64(self) -> int:
        """Read a variable-length integer of any legal length (§8.1)."""
        pos = self.pos
        if pos >= self.end:
            raise NeedMore
        first = self._data[pos]
        if first < 0x80:
            self.pos = pos + 1
            return first
        length = VI64_LENGTH[first]
        if pos + length > self.end:
            raise NeedMore
        self.pos = pos + length
        return int.from_bytes(self._data[pos : pos + length], "big") & VI64_MASK[length]

    def uint8(self) -> int:
        """Read one octet."""
        if self.pos >= self.end:
            raise NeedMore
        self.pos += 1
        return self._data[self.pos - 1]

    def uint16(self) -> int:
        """Read two octets, big-endian."""
        if self.pos + 2 > self.end:
            raise NeedMore
        self.pos += 2
        return self._data[self.pos - 2] << 8 | self._data[self.pos - 1]

    def take(self, length: int) -> bytes:
        """Read ``length`` octets; nothing is allocated before they are here."""
        start, stop = self.pos, self.pos + length
        if stop > self.end:
            raise NeedMore
        self.pos = stop
        return bytes(self._data[start:stop])

    def rest(self) -> bytes:
        """Read all that is left."""
        return self.take(self.end - self.pos)

    def sub(self, length: int) -> Reader:
        """Return a reader of the next ``length`` octets, and step over them."""
        start, stop = self.pos, self.pos + length
        if stop > self.end:
            raise NeedMore
        self.pos = stop
        return Reader(self._data, start, stop)

    def finish(self) -> None:
        """Check that all was read.

        Raises:
            ProtocolViolation: octets are left.
        """
        if self.pos != self.end:
            raise ProtocolViolation(f"{self.end - self.pos} octets too many at the end")


# -------------------------------------------------------------------------------- field kinds


class Kind(Protocol):
    """Wire form of one field."""

    def read(self, reader: Reader) -> Any:
        """Read a value; raises `NeedMore` or a `SessionError`."""

    def write(self, value: Any) -> bytes:
        """Encode a value; raises `UsageError`."""


class _Vi64:
    """A variable-length integer."""

    def read(self, reader: Reader) -> int:
        return reader.vi64()

    def write(self, value: int) -> bytes:
        return encode_vi64(value)


class Bounded8:
    """One octet between two bounds.

    Args:
        what: name of the field, for errors.
        low: smallest legal value.
        high: largest legal value.
    """

    def __init__(self, what: str, low: int, high: int) -> None:
        self.what, self.low, self.high = what, low, high

    def read(self, reader: Reader) -> int:
        value = reader.uint8()
        if not self.low <= value <= self.high:
            raise ProtocolViolation(f"{self.what} is {value}, not {self.low} to {self.high}")
        return value

    def write(self, value: int) -> bytes:
        if not self.low <= value <= self.high:
            raise UsageError(f"{self.what} is {value}, not {self.low} to {self.high}")
        return bytes((value,))


class _Flag(Bounded8):
    """One octet that is 0 or 1, as a bool."""

    def read(self, reader: Reader) -> bool:
        return bool(super().read(reader))


class _Prefixed:
    """Octets behind their Length."""

    def read(self, reader: Reader) -> bytes:
        return reader.take(reader.vi64())

    def write(self, value: bytes) -> bytes:
        return encode_vi64(len(value)) + value


class Text:
    """Text in UTF-8 behind its Length in octets.

    Args:
        what: name of the field, for errors.
        limit: most octets.
    """

    def __init__(self, what: str, limit: int) -> None:
        self.what, self.limit = what, limit

    def _octets(self, reader: Reader) -> bytes:
        length = reader.vi64()
        if length > self.limit:
            raise ProtocolViolation(f"{self.what} has {length} octets, limit {self.limit}")
        return reader.take(length)

    def read(self, reader: Reader) -> str:
        try:
            return self._octets(reader).decode()
        except UnicodeDecodeError as exc:
            raise ProtocolViolation(f"{self.what} is not UTF-8") from exc

    def write(self, value: str) -> bytes:
        try:
            octets = value.encode()
        except UnicodeEncodeError as exc:
            raise UsageError(f"{self.what} cannot be written in UTF-8") from exc
        if len(octets) > self.limit:
            raise UsageError(f"{self.what} has {len(octets)} octets, limit {self.limit}")
        return encode_vi64(len(octets)) + octets


class _Reason(Text):
    """A Reason Phrase (§8.5): for people to read, so neither side fails over its text.

    Octets that are not UTF-8 are read as U+FFFD; a longer phrase is cut to what may be sent.
    """

    def read(self, reader: Reader) -> str:
        return self._octets(reader).decode(errors="replace")

    def write(self, value: str) -> bytes:
        octets = value.encode(errors="backslashreplace")
        if len(octets) > self.limit:
            octets = octets[: self.limit].decode(errors="ignore").encode()
        return encode_vi64(len(octets)) + octets


class _Namespace:
    """A Track Namespace, or a prefix or suffix of one (§2.4)."""

    def read(self, reader: Reader) -> TrackNamespace:
        count = reader.vi64()
        if count > MAX_NAMESPACE_FIELDS:
            raise ProtocolViolation(
                f"Track Namespace has {count} fields, limit {MAX_NAMESPACE_FIELDS}"
            )
        fields = []
        room = MAX_NAME_OCTETS
        for _ in range(count):
            length = reader.vi64()
            if not 0 < length <= room:
                raise ProtocolViolation(
                    f"Track Namespace field of {length} octets, where 1 to {room} are allowed"
                )
            room -= length
            fields.append(reader.take(length))
        return tuple(fields)

    def write(self, value: TrackNamespace) -> bytes:
        try:
            check_namespace(value)
        except SessionError as exc:
            raise UsageError(exc.reason) from exc
        return encode_vi64(len(value)) + b"".join(map(PREFIXED.write, value))


class _Location:
    """Group ID and Object ID (§8.2)."""

    def read(self, reader: Reader) -> Location:
        return Location(reader.vi64(), reader.vi64())

    def write(self, value: tuple[int, int]) -> bytes:
        group, object_ = value
        return encode_vi64(group) + encode_vi64(object_)


VI64 = _Vi64()
UINT8 = Bounded8("octet", 0, 255)
FLAG = _Flag("flag", 0, 1)
PREFIXED = _Prefixed()
REASON = _Reason("Reason Phrase", MAX_REASON_OCTETS)
NAMESPACE = _Namespace()
LOCATION = _Location()


# ------------------------------------------------------------------------------ messages

T = TypeVar("T")

MESSAGES: dict[int, type[Any]] = {}
"""Message classes by their type; importing `kvcs.moqt.messages` fills it."""

TYPE_IDS: dict[type[Any], int] = {}
"""Message types by class."""

FIELDS: dict[type[Any], tuple[tuple[str, Kind], ...]] = {}
"""Fields of each message in wire order, with their kinds."""


def message(type_id: int) -> Callable[[type[T]], type[T]]:
    """Register a dataclass as the control message of type ``type_id``.

    A method ``check()``, if it has one, raises `ProtocolViolation` for fields that do not go
    together; it runs on what is received and on what is sent.
    """

    def register(cls: type[T]) -> type[T]:
        if type_id in MESSAGES:
            raise TypeError(f"{cls.__name__} reuses message type {type_id:#x}")
        hints = get_type_hints(cls, include_extras=True)
        FIELDS[cls] = tuple((name, hint.__metadata__[0]) for name, hint in hints.items())
        MESSAGES[type_id], TYPE_IDS[cls] = cls, type_id
        return cls

    return register

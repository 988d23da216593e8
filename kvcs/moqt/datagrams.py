"""Objects that travel as datagrams, and padding datagrams (MOQT §11.2.1, §11.5)."""

from __future__ import annotations

from dataclasses import dataclass

from kvcs.errors import UsageError
from kvcs.moqt.errors import ProtocolViolation
from kvcs.moqt.names import Location
from kvcs.moqt.objects import (
    MAX_OBJECT_PROPERTIES,
    OBJECT_STATUSES,
    ObjectHeader,
    ObjectStatus,
)
from kvcs.moqt.streams import encode_priority
from kvcs.moqt.wire import NeedMore, Octets, Reader, encode_vi64

__all__ = ["PADDING_DATAGRAM_TYPE", "ObjectDatagram", "PaddingDatagram", "decode_datagram"]

PADDING_DATAGRAM_TYPE = 0x132B3E29

_PROPERTIES = 0x01
_END_OF_GROUP = 0x02
_ZERO_OBJECT_ID = 0x04
_DEFAULT_PRIORITY = 0x08
_STATUS = 0x20
_ALL_FLAGS = 0x2F


@dataclass(frozen=True, slots=True)
class ObjectDatagram:
    """One Object in one datagram."""

    track_alias: int
    """Track Alias."""

    group_id: int
    """Group ID."""

    object_id: int
    """Object ID."""

    publisher_priority: int | None = None
    """0 to 255, lower first; None for the Track's default."""

    payload: bytes = b""
    """Payload; empty when ``status`` is not NORMAL."""

    status: ObjectStatus = ObjectStatus.NORMAL
    """Status."""

    end_of_group: bool = False
    """Whether this is the last Object of its Group."""

    properties: bytes = b""
    """Object Properties, undecoded."""

    @property
    def location(self) -> Location:
        """Group ID and Object ID."""
        return Location(self.group_id, self.object_id)

    @property
    def header(self) -> ObjectHeader:
        """The Object's header, as a stream would give it."""
        return ObjectHeader(
            self.group_id,
            self.object_id,
            None,
            self.publisher_priority,
            self.status,
            self.properties,
            len(self.payload),
        )

    def encode(self) -> bytes:
        """Encode the whole datagram.

        Raises:
            UsageError: a field is out of bounds, or two do not go together.
        """
        is_status = self.status is not ObjectStatus.NORMAL
        if is_status and (self.payload or self.properties or self.end_of_group):
            raise UsageError(
                f"a {self.status.name} datagram has no payload, Properties or END_OF_GROUP"
            )
        if len(self.properties) > MAX_OBJECT_PROPERTIES:
            raise UsageError(f"Object Properties have {len(self.properties)} octets")
        flags = (
            (_PROPERTIES if self.properties else 0)
            | (_END_OF_GROUP if self.end_of_group else 0)
            | (_DEFAULT_PRIORITY if self.publisher_priority is None else 0)
            | (0 if self.object_id else _ZERO_OBJECT_ID)
            | (_STATUS if is_status else 0)
        )
        parts = [encode_vi64(flags), encode_vi64(self.track_alias), encode_vi64(self.group_id)]
        if self.object_id:
            parts.append(encode_vi64(self.object_id))
        if self.publisher_priority is not None:
            parts.append(encode_priority(self.publisher_priority))
        if self.properties:
            parts += (encode_vi64(len(self.properties)), self.properties)
        parts.append(encode_vi64(self.status) if is_status else self.payload)
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class PaddingDatagram:
    """A datagram to discard."""

    def encode(self, octets: int = 0) -> bytes:
        """Encode a padding datagram with ``octets`` zero octets."""
        return encode_vi64(PADDING_DATAGRAM_TYPE) + bytes(octets)


def decode_datagram(data: Octets) -> ObjectDatagram | PaddingDatagram:
    """Decode a whole datagram.

    Raises:
        ProtocolViolation: its type is not defined, it is cut, or fields do not go together.
    """
    reader = Reader(data)
    try:
        flags = reader.vi64()
        if flags == PADDING_DATAGRAM_TYPE:
            return PaddingDatagram()
        if flags & ~_ALL_FLAGS:
            raise ProtocolViolation(f"unknown datagram type {flags:#x}")
        if flags & _STATUS and flags & _END_OF_GROUP:
            raise ProtocolViolation("a datagram with both STATUS and END_OF_GROUP")
        return _decode_object(flags, reader)
    except NeedMore as exc:
        raise ProtocolViolation("a datagram ends inside a field") from exc


def _decode_object(flags: int, reader: Reader) -> ObjectDatagram:
    track_alias, group_id = reader.vi64(), reader.vi64()
    object_id = 0 if flags & _ZERO_OBJECT_ID else reader.vi64()
    priority = None if flags & _DEFAULT_PRIORITY else reader.uint8()
    properties = b""
    if flags & _PROPERTIES:
        properties = reader.take(reader.vi64())
        if not properties:
            raise ProtocolViolation("a datagram with the PROPERTIES bit and no Properties")
    status = ObjectStatus.NORMAL
    payload = b""
    if flags & _STATUS:
        code = reader.vi64()
        if code not in OBJECT_STATUSES:
            raise ProtocolViolation(f"Object Status {code:#x} is not defined")
        status = OBJECT_STATUSES[code]
        if properties and status is not ObjectStatus.NORMAL:
            raise ProtocolViolation(f"Properties on a {status.name} Object")
        reader.finish()
    else:
        payload = reader.rest()
    return ObjectDatagram(
        track_alias=track_alias,
        group_id=group_id,
        object_id=object_id,
        publisher_priority=priority,
        payload=payload,
        status=status,
        end_of_group=bool(flags & _END_OF_GROUP),
        properties=properties,
    )

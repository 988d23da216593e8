"""First octets of unidirectional streams: what each stream carries (MOQT §6.4.1, §11)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from kvcs.errors import UsageError
from kvcs.moqt.errors import ProtocolViolation
from kvcs.moqt.messages import SETUP_TYPE
from kvcs.moqt.wire import NeedMore, Reader, encode_vi64

__all__ = [
    "CONTROL_STREAM",
    "FETCH_STREAM_TYPE",
    "MAX_STREAM_HEADER_OCTETS",
    "PADDING_STREAM_TYPE",
    "ControlStream",
    "FetchHeader",
    "PaddingHeader",
    "StreamHeader",
    "SubgroupHeader",
    "read_stream_header",
]

FETCH_STREAM_TYPE = 0x05
PADDING_STREAM_TYPE = 0x132B3E28

MAX_STREAM_HEADER_OCTETS = 4 * 9 + 1
"""Octets of the longest header: four integers in their longest form and a priority."""

_PROPERTIES = 0x01
_MODE = 0x06
_MODE_ZERO = 0x00
_MODE_FIRST_OBJECT = 0x02
_MODE_PRESENT = 0x04
_END_OF_GROUP = 0x08
_SUBGROUP = 0x10
_DEFAULT_PRIORITY = 0x20
_FIRST_OBJECT = 0x40
_ALL_FLAGS = 0x7F


class ControlStream(Enum):
    """Type of `CONTROL_STREAM`."""

    CONTROL_STREAM = auto()


CONTROL_STREAM: Final = ControlStream.CONTROL_STREAM
"""The stream begins with SETUP: its messages come from the first octet on."""


@dataclass(frozen=True, slots=True)
class SubgroupHeader:
    """Begins a stream of Objects of one Subgroup (§11.3.1)."""

    track_alias: int
    """Track Alias."""

    group_id: int
    """Group ID of every Object on the stream."""

    subgroup_id: int | None = 0
    """Subgroup ID; None for the ID of the first Object on the stream."""

    publisher_priority: int | None = None
    """0 to 255, lower first; None for the Track's default."""

    end_of_group: bool = False
    """With FIN, no Object of the Group has a larger ID than the last one here."""

    first_object: bool = False
    """The first Object here is the first one ever published in the Subgroup."""

    has_properties: bool = False
    """Whether Objects have a Properties field."""

    def encode(self) -> bytes:
        """Encode the header.

        Raises:
            UsageError: a field is out of bounds.
        """
        flags = (
            _SUBGROUP
            | (_PROPERTIES if self.has_properties else 0)
            | (_END_OF_GROUP if self.end_of_group else 0)
            | (_FIRST_OBJECT if self.first_object else 0)
        )
        subgroup = priority = b""
        if self.subgroup_id is None:
            flags |= _MODE_FIRST_OBJECT
        elif self.subgroup_id:
            flags |= _MODE_PRESENT
            subgroup = encode_vi64(self.subgroup_id)
        if self.publisher_priority is None:
            flags |= _DEFAULT_PRIORITY
        else:
            priority = encode_priority(self.publisher_priority)
        alias, group = encode_vi64(self.track_alias), encode_vi64(self.group_id)
        return b"".join((encode_vi64(flags), alias, group, subgroup, priority))


@dataclass(frozen=True, slots=True)
class FetchHeader:
    """Begins the stream that answers a FETCH or fill (§11.4.1)."""

    request_id: int
    """Request ID of the message that asked for it."""

    def encode(self) -> bytes:
        """Encode the header."""
        return encode_vi64(FETCH_STREAM_TYPE) + encode_vi64(self.request_id)


@dataclass(frozen=True, slots=True)
class PaddingHeader:
    """Begins a stream whose octets are read and discarded (§11.5)."""

    def encode(self) -> bytes:
        """Encode the header."""
        return encode_vi64(PADDING_STREAM_TYPE)


StreamHeader = SubgroupHeader | FetchHeader | PaddingHeader | ControlStream
"""What a unidirectional stream can begin with."""


def encode_priority(priority: int) -> bytes:
    """Encode a Publisher Priority.

    Raises:
        UsageError: it is not 0 to 255.
    """
    if not 0 <= priority <= 255:
        raise UsageError(f"Publisher Priority is {priority}, not 0 to 255")
    return bytes((priority,))


def read_stream_header(reader: Reader) -> StreamHeader:
    """Read the header of a unidirectional stream.

    A control stream's type is SETUP's, and is left in ``reader``.

    Raises:
        NeedMore: the header is cut; ``reader`` is back where it was.
        ProtocolViolation: the stream type is not defined.
    """
    start = reader.pos
    try:
        type_ = reader.vi64()
        if type_ == SETUP_TYPE:
            reader.pos = start
            return CONTROL_STREAM
        if type_ == FETCH_STREAM_TYPE:
            return FetchHeader(reader.vi64())
        if type_ == PADDING_STREAM_TYPE:
            return PaddingHeader()
        if type_ & ~_ALL_FLAGS or not type_ & _SUBGROUP or type_ & _MODE == _MODE:
            raise ProtocolViolation(f"unknown stream type {type_:#x}")
        return _read_subgroup_header(type_, reader)
    except NeedMore:
        reader.pos = start
        raise


def _read_subgroup_header(flags: int, reader: Reader) -> SubgroupHeader:
    track_alias, group_id = reader.vi64(), reader.vi64()
    mode = flags & _MODE
    subgroup_id: int | None = 0
    if mode == _MODE_PRESENT:
        subgroup_id = reader.vi64()
    elif mode == _MODE_FIRST_OBJECT:
        subgroup_id = None
    return SubgroupHeader(
        track_alias=track_alias,
        group_id=group_id,
        subgroup_id=subgroup_id,
        publisher_priority=None if flags & _DEFAULT_PRIORITY else reader.uint8(),
        end_of_group=bool(flags & _END_OF_GROUP),
        first_object=bool(flags & _FIRST_OBJECT),
        has_properties=bool(flags & _PROPERTIES),
    )

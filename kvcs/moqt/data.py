"""Objects on data streams: incremental parsers (MOQT §11.3, §11.4).

This is the hot path, so it is written by hand. Payload octets are never joined or copied: they
come out as views of what was fed. Only an item's header that a cut divides is buffered; it is
completed field by field, each time with just the octets that the next field is known to need. So
what is buffered never exceeds one header, a header is looked at again only when its next field is
whole, and the cost is linear in the stream's length whatever the cut.

Nearly every Object of a stream follows the one before it and has the same header, octet by octet.
`run_like` finds that by one comparison for each, so that nothing has to be parsed.

Types, headers, encoders and datagrams are in modules of their own; all are exported here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvcs.moqt.datagrams import ObjectDatagram, PaddingDatagram, decode_datagram
from kvcs.moqt.encoders import FetchEncoder, SubgroupEncoder
from kvcs.moqt.errors import PropertiesTooLong, ProtocolViolation
from kvcs.moqt.names import MAX_VI64, GroupOrder, Location
from kvcs.moqt.objects import (
    FETCH_DATAGRAM,
    FETCH_FIRST_MARKER,
    FETCH_GROUP_DELTA,
    FETCH_OBJECT_DELTA,
    FETCH_PRIORITY,
    FETCH_PROPERTIES,
    FETCH_SUBGROUP_MODE,
    FETCH_SUBGROUP_NEXT,
    FETCH_SUBGROUP_PRESENT,
    FETCH_SUBGROUP_PRIOR,
    MAX_OBJECT_PROPERTIES,
    OBJECT_STATUSES,
    Item,
    ObjectChunk,
    ObjectEnded,
    ObjectHeader,
    ObjectStarted,
    ObjectStatus,
    RangeKind,
    RangeMarked,
)
from kvcs.moqt.streams import (
    CONTROL_STREAM,
    ControlStream,
    FetchHeader,
    PaddingHeader,
    StreamHeader,
    SubgroupHeader,
    read_stream_header,
)
from kvcs.moqt.wire import VI64_LENGTH, VI64_MASK

__all__ = [
    "CONTROL_STREAM",
    "MAX_OBJECT_PROPERTIES",
    "ControlStream",
    "FetchEncoder",
    "FetchHeader",
    "FetchParser",
    "Item",
    "ObjectChunk",
    "ObjectDatagram",
    "ObjectEnded",
    "ObjectHeader",
    "ObjectStarted",
    "ObjectStatus",
    "PaddingDatagram",
    "PaddingHeader",
    "RangeKind",
    "RangeMarked",
    "StreamHeader",
    "SubgroupEncoder",
    "SubgroupHeader",
    "SubgroupParser",
    "decode_datagram",
    "read_stream_header",
]

_NORMAL = ObjectStatus.NORMAL
_ENDED = ObjectEnded()
_tuple = tuple.__new__
"""Makes a named tuple without the call of its own constructor: several times for each Object."""
_RANGE_KINDS = {int(kind): kind for kind in RangeKind}


class _Short(Exception):
    """An item's header is cut.

    Args:
        needed: octets, from the item's first one, that the next field needs at least.
    """

    def __init__(self, needed: int) -> None:
        self.needed = needed


def _vi64(buffer: bytearray | memoryview, pos: int, end: int, start: int) -> tuple[int, int]:
    """Return the integer at ``pos`` and the position behind it; ``start`` is the item's."""
    if pos >= end:
        raise _Short(pos + 1 - start)
    first = buffer[pos]
    if first < 0x80:
        return first, pos + 1
    length = VI64_LENGTH[first]
    stop = pos + length
    if stop > end:
        raise _Short(stop - start)
    return int.from_bytes(buffer[pos:stop], "big") & VI64_MASK[length], stop


class _ItemParser(ABC):
    """Cuts a data stream behind its header into items."""

    __slots__ = (
        "_length",
        "_like",
        "_max_properties",
        "_needed",
        "_object_id",
        "_pending",
        "_remaining",
    )

    def __init__(self, max_properties: int) -> None:
        self._max_properties = max_properties
        self._object_id = -1
        """Of the last Object."""
        self._like = b""
        """Octets of the last header, where the same ones again mean the Object right behind its
        own, alike but for its ID; else empty."""
        self._length = 0
        """Octets of the payload that such a header announces."""
        self._pending = bytearray()
        self._needed = 0
        self._remaining = 0

    @property
    def mid_object(self) -> bool:
        """Whether the stream so far ends inside an item."""
        return bool(self._remaining or self._pending)

    @property
    def buffered(self) -> int:
        """Octets held: those of an item's header that is cut, never payload."""
        return len(self._pending)

    def pass_over(self, octets: int) -> bool:
        """Count octets that are payload of the Object on its way and do not end it.

        Returns:
            Whether they are; else nothing is counted, and `feed` has to take them.
        """
        if octets < self._remaining:
            self._remaining -= octets
            return True
        return False

    def run_like(self, data: bytes | memoryview) -> tuple[int, int, int]:
        """Whether octets end the Object on its way and go on with Objects that are like it.

        Like it is the Object with the next ID that has the same header otherwise: `feed` would give
        the items of just those. Nothing is counted before `take_run`.

        Returns:
            The position in ``data`` behind the Object on its way, the octets of each header, and
            how many Objects like it begin in ``data``, with one octet of payload at least; 0 where
            it is not so. Each begins where the one before ends, and the last one may go on behind
            ``data``.
        """
        like, stop = self._like, self._remaining
        lead = len(like)
        if not lead or not stop:
            return stop, lead, 0
        step, last = lead + self._length, len(data) - lead
        count, at = 0, stop
        while at < last and data[at : at + lead] == like:
            count += 1
            at += step
        return stop, lead, min(count, MAX_VI64 - self._object_id)

    def take_run(self, count: int, size: int) -> int:
        """Count Objects that `run_like` has found.

        Args:
            count: how many; 1 or more, and not more than it has found.
            size: length of its ``data``.

        Returns:
            The position in ``data`` behind what belongs to them.
        """
        end = self._remaining + count * (len(self._like) + self._length)
        self._object_id += count
        if end > size:
            self._remaining = end - size
            return size
        self._remaining = 0
        return end

    def finish(self) -> None:
        """Take the stream's FIN; a reset may cut anywhere and needs no call.

        Raises:
            ProtocolViolation: it came inside an item.
        """
        if self._remaining:
            raise ProtocolViolation(f"FIN with {self._remaining} octets of an Object to come")
        if self._pending:
            raise ProtocolViolation("FIN inside the header of an Object")

    def feed(self, data: bytes | memoryview) -> list[Item]:
        """Take the next octets of the stream and return the items they give.

        Args:
            data: octets; chunks are views of them, so they must not change afterwards.

        Raises:
            ProtocolViolation: the stream breaks the format; nothing more may be fed.
        """
        view = data if isinstance(data, memoryview) else memoryview(data)
        size = len(view)
        remaining = self._remaining
        if size < remaining:
            self._remaining = remaining - size
            return [_tuple(ObjectChunk, (view,))] if size else []
        items: list[Item] = []
        pos = 0
        while True:
            if remaining:
                stop = pos + remaining
                if stop > size:
                    if pos < size:
                        items.append(_tuple(ObjectChunk, (view[pos:size],)))
                    self._remaining = stop - size
                    return items
                items.append(_tuple(ObjectChunk, (view[pos:stop],)))
                items.append(_ENDED)
                pos = stop
                self._remaining = 0
            if pos == size:
                return items
            if self._pending:
                pos = self._complete(view, pos, size, items)
            else:
                try:
                    pos = self._parse(view, pos, size, items)
                except _Short as short:
                    self._pending += view[pos:size]
                    self._needed = short.needed
                    return items
            remaining = self._remaining

    def _complete(self, view: memoryview, pos: int, size: int, items: list[Item]) -> int:
        """Go on with an item's header that was cut; returns the position behind what it took."""
        pending = self._pending
        while pos < size:
            stop = min(size, pos + self._needed - len(pending))
            pending += view[pos:stop]
            pos = stop
            if len(pending) < self._needed:
                break
            try:
                self._parse(pending, 0, len(pending), items)
            except _Short as short:
                self._needed = short.needed
            else:
                pending.clear()
                break
        return pos

    @abstractmethod
    def _parse(
        self, buffer: bytearray | memoryview, start: int, end: int, items: list[Item]
    ) -> int:
        """Parse the item header at ``start`` and add its items.

        Sets ``_remaining`` to the octets of payload. State changes only when all is there.

        Returns:
            The position behind the header.

        Raises:
            _Short: the header is cut.
            ProtocolViolation: it is wrong.
        """

    def _properties_end(self, length: int, pos: int, end: int, start: int) -> int:
        if length > self._max_properties:
            raise PropertiesTooLong(
                f"Object Properties have {length} octets, limit {self._max_properties}"
            )
        stop = pos + length
        if stop > end:
            raise _Short(stop - start)
        return stop


class SubgroupParser(_ItemParser):
    """Parses a subgroup stream behind its SUBGROUP_HEADER (§11.3).

    Args:
        header: the stream's header; it gives Group, Subgroup and priority of every Object.
        max_properties: octets of Properties that one Object may have.
    """

    __slots__ = ("_has_properties", "header", "subgroup_id")

    def __init__(self, header: SubgroupHeader, max_properties: int = MAX_OBJECT_PROPERTIES) -> None:
        super().__init__(max_properties)
        self.header = header
        self.subgroup_id = header.subgroup_id
        """Subgroup ID; None until the first Object gives it."""
        self._has_properties = header.has_properties

    def _parse(
        self, buffer: bytearray | memoryview, start: int, end: int, items: list[Item]
    ) -> int:
        # Nearly every delta is one octet; a call would cost more than to read it.
        if start < end and buffer[start] < 0x80:
            delta, pos = buffer[start], start + 1
        else:
            delta, pos = _vi64(buffer, start, end, start)
        object_id = self._object_id + 1 + delta
        if object_id > MAX_VI64:
            raise ProtocolViolation("Object ID above 2^64-1")
        properties = b""
        if self._has_properties:
            length, pos = _vi64(buffer, pos, end, start)
            if length:
                stop = self._properties_end(length, pos, end, start)
                properties = bytes(buffer[pos:stop])
                pos = stop
        payload_length, pos = _vi64(buffer, pos, end, start)
        status = _NORMAL
        if not payload_length:
            code, pos = _vi64(buffer, pos, end, start)
            if code:
                if code not in OBJECT_STATUSES:
                    raise ProtocolViolation(f"Object Status {code:#x} is not defined")
                status = OBJECT_STATUSES[code]
                if properties:
                    raise ProtocolViolation(f"Properties on a {status.name} Object")
        self._object_id = object_id
        self._like = bytes(buffer[start:pos]) if payload_length and not delta else b""
        self._length = payload_length
        if self.subgroup_id is None:
            self.subgroup_id = object_id
        header = self.header
        items.append(
            ObjectStarted(
                ObjectHeader(
                    header.group_id,
                    object_id,
                    self.subgroup_id,
                    header.publisher_priority,
                    status,
                    properties,
                    payload_length,
                )
            )
        )
        self._remaining = payload_length
        if not payload_length:
            items.append(_ENDED)
        return pos


class FetchParser(_ItemParser):
    """Parses a fetch or fill stream behind its FETCH_HEADER (§11.4.1).

    An Object that repeats the Location of the one before parses: whether the Track is malformed
    is not the codec's to say.

    Args:
        group_order: the order the request resolved to; deltas of Group IDs count in it.
        max_properties: octets of Properties that one Object may have.
    """

    __slots__ = ("_descending", "_prior", "_priority", "_subgroup_id")

    def __init__(
        self, group_order: GroupOrder, max_properties: int = MAX_OBJECT_PROPERTIES
    ) -> None:
        super().__init__(max_properties)
        self._descending = group_order is GroupOrder.DESCENDING
        self._prior: Location | None = None
        self._subgroup_id: int | None = None
        self._priority: int | None = None

    def _parse(
        self, buffer: bytearray | memoryview, start: int, end: int, items: list[Item]
    ) -> int:
        flags, pos = _vi64(buffer, start, end, start)
        if flags >= FETCH_FIRST_MARKER:
            return self._parse_marker(flags, buffer, pos, end, start, items)
        self._check_flags(flags)
        prior = self._prior
        group_id = prior.group if prior is not None else 0
        if flags & FETCH_GROUP_DELTA:
            delta, pos = _vi64(buffer, pos, end, start)
            if prior is None:
                group_id = delta
            elif self._descending:
                group_id -= delta + 1
            else:
                group_id += delta + 1
            if not 0 <= group_id <= MAX_VI64:
                raise ProtocolViolation("Group ID below 0 or above 2^64-1")
        subgroup_id: int | None = 0
        mode = flags & FETCH_SUBGROUP_MODE
        if flags & FETCH_DATAGRAM:
            subgroup_id = None
        elif mode == FETCH_SUBGROUP_PRESENT:
            subgroup_id, pos = _vi64(buffer, pos, end, start)
        elif mode:
            # What a datagram leaves behind counts as Subgroup 0.
            subgroup_id = (self._subgroup_id or 0) + (mode == FETCH_SUBGROUP_NEXT)
            if subgroup_id > MAX_VI64:
                raise ProtocolViolation("Subgroup ID above 2^64-1")
        object_id = prior.object + 1 if prior is not None else 0
        if flags & FETCH_OBJECT_DELTA:
            object_id, pos = _vi64(buffer, pos, end, start)
            if prior is not None and not flags & FETCH_GROUP_DELTA:
                object_id += prior.object
        if object_id > MAX_VI64:
            raise ProtocolViolation("Object ID above 2^64-1")
        priority = self._priority
        if flags & FETCH_PRIORITY:
            if pos >= end:
                raise _Short(pos + 1 - start)
            priority = buffer[pos]
            pos += 1
        properties = b""
        if flags & FETCH_PROPERTIES:
            length, pos = _vi64(buffer, pos, end, start)
            stop = self._properties_end(length, pos, end, start)
            properties = bytes(buffer[pos:stop])
            pos = stop
        payload_length, pos = _vi64(buffer, pos, end, start)
        self._prior = Location(group_id, object_id)
        self._object_id = object_id
        self._subgroup_id = subgroup_id
        self._priority = priority
        repeats = payload_length and not flags & ~(FETCH_PROPERTIES | FETCH_SUBGROUP_PRIOR)
        self._like = bytes(buffer[start:pos]) if repeats else b""
        self._length = payload_length
        items.append(
            ObjectStarted(
                ObjectHeader(
                    group_id, object_id, subgroup_id, priority, _NORMAL, properties, payload_length
                )
            )
        )
        self._remaining = payload_length
        if not payload_length:
            items.append(_ENDED)
        return pos

    def take_run(self, count: int, size: int) -> int:
        """As of every parser."""
        end = super().take_run(count, size)
        assert self._prior is not None  # an Object came before
        self._prior = Location(self._prior.group, self._object_id)
        return end

    def _check_flags(self, flags: int) -> None:
        """Refuse an Object that refers to what has not been on the stream."""
        if self._prior is None and flags & (FETCH_GROUP_DELTA | FETCH_OBJECT_DELTA) != (
            FETCH_GROUP_DELTA | FETCH_OBJECT_DELTA
        ):
            raise ProtocolViolation("the first Object has no Group ID or no Object ID")
        if self._priority is None:
            if not flags & FETCH_PRIORITY:
                raise ProtocolViolation("the first Object refers to a prior Publisher Priority")
            if not flags & FETCH_DATAGRAM and flags & FETCH_SUBGROUP_MODE in (
                FETCH_SUBGROUP_PRIOR,
                FETCH_SUBGROUP_NEXT,
            ):
                raise ProtocolViolation("the first Object refers to a prior Subgroup ID")

    def _parse_marker(
        self,
        flags: int,
        buffer: bytearray | memoryview,
        pos: int,
        end: int,
        start: int,
        items: list[Item],
    ) -> int:
        kind = _RANGE_KINDS.get(flags)
        if kind is None:
            raise ProtocolViolation(f"Serialization Flags {flags:#x} are not defined")
        group_id, pos = _vi64(buffer, pos, end, start)
        object_id, pos = _vi64(buffer, pos, end, start)
        self._prior = Location(group_id, object_id)
        items.append(RangeMarked(kind, self._prior))
        return pos

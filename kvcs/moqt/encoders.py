"""Encoders of data streams: the octets that go before each payload (MOQT §11.3, §11.4)."""

from __future__ import annotations

from kvcs.errors import UsageError
from kvcs.moqt.names import GroupOrder, Location
from kvcs.moqt.objects import (
    FETCH_DATAGRAM,
    FETCH_GROUP_DELTA,
    FETCH_OBJECT_DELTA,
    FETCH_PRIORITY,
    FETCH_PROPERTIES,
    FETCH_SUBGROUP_NEXT,
    FETCH_SUBGROUP_PRESENT,
    FETCH_SUBGROUP_PRIOR,
    MAX_OBJECT_PROPERTIES,
    ObjectHeader,
    ObjectStatus,
    RangeKind,
)
from kvcs.moqt.streams import SubgroupHeader, encode_priority
from kvcs.moqt.wire import encode_vi64

__all__ = ["FetchEncoder", "SubgroupEncoder"]


def _check_object(header: ObjectHeader) -> None:
    if header.status is not ObjectStatus.NORMAL and (header.payload_length or header.properties):
        raise UsageError(f"a {header.status.name} Object has neither payload nor Properties")
    if len(header.properties) > MAX_OBJECT_PROPERTIES:
        raise UsageError(
            f"Object Properties have {len(header.properties)} octets, limit {MAX_OBJECT_PROPERTIES}"
        )


class SubgroupEncoder:
    """Encodes the Objects of a subgroup stream, in the order of their IDs.

    Args:
        header: the stream's header; its own octets come from ``header.encode()``.
    """

    __slots__ = ("_head", "_length", "_object_id", "header")

    def __init__(self, header: SubgroupHeader) -> None:
        self.header = header
        self._object_id = -1
        self._head, self._length = b"", 0
        """What goes before a payload of this length, where the Object follows the one before it;
        those of a Subgroup mostly have one length."""

    def object(self, header: ObjectHeader) -> bytes:
        """Return the octets that go before the payload.

        Raises:
            UsageError: the Object is of another Group, its ID does not ascend, or it has
                Properties where the stream has none.
        """
        delta = header.object_id - self._object_id - 1
        if (
            not delta
            and header.payload_length == self._length
            and header.group_id == self.header.group_id
            and header.status is ObjectStatus.NORMAL
            and not header.properties
            and self._length
        ):
            self._object_id += 1
            return self._head
        if header.group_id != self.header.group_id or delta < 0:
            raise UsageError(
                f"Object {header.location} cannot follow Object {self._object_id}"
                f" of Group {self.header.group_id}"
            )
        _check_object(header)
        parts = [encode_vi64(delta)]
        if self.header.has_properties:
            parts += (encode_vi64(len(header.properties)), header.properties)
        elif header.properties:
            raise UsageError("the subgroup stream has no Properties field")
        parts.append(encode_vi64(header.payload_length))
        if not header.payload_length:
            parts.append(encode_vi64(header.status))
        self._object_id = header.object_id
        head = b"".join(parts)
        if not delta and not header.properties:
            self._head, self._length = head, header.payload_length
        return head


class FetchEncoder:
    """Encodes the items of a fetch or fill stream, in the order of the request.

    Args:
        group_order: the order the request resolved to.
    """

    __slots__ = ("_descending", "_prior", "_priority", "_subgroup_id")

    def __init__(self, group_order: GroupOrder) -> None:
        self._descending = group_order is GroupOrder.DESCENDING
        self._prior: Location | None = None
        self._subgroup_id: int | None = None
        self._priority: int | None = None

    def object(self, header: ObjectHeader) -> bytes:
        """Return the octets that go before the payload.

        Raises:
            UsageError: the Object is out of order, has a status, or no Publisher Priority.
        """
        if header.status is not ObjectStatus.NORMAL or header.publisher_priority is None:
            raise UsageError("a fetch stream carries NORMAL Objects with an explicit priority")
        _check_object(header)
        flags, place = self._place(header.location)
        flags |= FETCH_DATAGRAM if header.subgroup_id is None else 0
        subgroup = priority = properties = b""
        if header.subgroup_id:
            # Nothing refers to the Subgroup of a datagram: what that is, peers may read otherwise.
            if self._subgroup_id is not None and header.subgroup_id == self._subgroup_id:
                flags |= FETCH_SUBGROUP_PRIOR
            elif self._subgroup_id is not None and header.subgroup_id == self._subgroup_id + 1:
                flags |= FETCH_SUBGROUP_NEXT
            else:
                flags |= FETCH_SUBGROUP_PRESENT
                subgroup = encode_vi64(header.subgroup_id)
        if header.publisher_priority != self._priority:
            flags |= FETCH_PRIORITY
            priority = encode_priority(header.publisher_priority)
        if header.properties:
            flags |= FETCH_PROPERTIES
            properties = encode_vi64(len(header.properties)) + header.properties
        group, object_ = place
        octets = b"".join(
            (
                encode_vi64(flags),
                group,
                subgroup,
                object_,
                priority,
                properties,
                encode_vi64(header.payload_length),
            )
        )
        self._prior = header.location
        self._subgroup_id = header.subgroup_id
        self._priority = header.publisher_priority
        return octets

    def marker(self, kind: RangeKind, location: Location) -> bytes:
        """Return an End of Range marker: absolute IDs, and nothing else behind them.

        Raises:
            UsageError: ``location`` is before what is already on the stream.
        """
        self._check_order(location)
        octets = encode_vi64(kind) + encode_vi64(location.group) + encode_vi64(location.object)
        self._prior = Location(*location)
        return octets

    def _place(self, location: Location) -> tuple[int, tuple[bytes, bytes]]:
        """Flags, Group ID Delta and Object ID Delta of an Object."""
        self._check_order(location)
        prior = self._prior
        if prior is None:
            return FETCH_GROUP_DELTA | FETCH_OBJECT_DELTA, (
                encode_vi64(location.group),
                encode_vi64(location.object),
            )
        if location.group != prior.group:
            # The Object ID is always given: without it, it would go on from the prior Group.
            delta = abs(location.group - prior.group) - 1
            return FETCH_GROUP_DELTA | FETCH_OBJECT_DELTA, (
                encode_vi64(delta),
                encode_vi64(location.object),
            )
        if location.object == prior.object + 1:
            return 0, (b"", b"")
        return FETCH_OBJECT_DELTA, (b"", encode_vi64(location.object - prior.object))

    def _check_order(self, location: Location) -> None:
        prior = self._prior
        if prior is None:
            return
        if location.group == prior.group:
            later = location.object > prior.object
        else:
            later = (location.group < prior.group) == self._descending
        if not later:
            raise UsageError(f"{location} cannot follow {prior} on this stream")

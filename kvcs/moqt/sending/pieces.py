"""What senders of Objects give and need: pieces of a stream, the session, range filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvcs.moqt.actions import Buffer
from kvcs.moqt.filters import Range, RangeFilters
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import StoredObject

if TYPE_CHECKING:
    from kvcs.moqt.sending.delivery import ObjectSender


@dataclass(slots=True)
class Piece:
    """What goes on a stream now."""

    data: list[Buffer]
    fin: bool = False
    reset: int | None = None
    """Reset the stream with this code after ``data``."""
    datagram: bytes | None = None
    """Send this instead of anything on a stream."""


class Host(Protocol):
    """What the session offers to what it delivers."""

    def schedule(self, sendable: ObjectSender) -> None:
        """``sendable`` has something to send."""

    def reschedule(self, sendable: ObjectSender) -> None:
        """The place of ``sendable`` in the order has changed."""

    def unschedule(self, sendable: ObjectSender) -> None:
        """``sendable`` will send nothing more."""

    def reset_sender(self, sender: ObjectSender, code: int) -> None:
        """Reset the sender's stream, if it is open, and close the sender."""


def passes(filters: RangeFilters, header: ObjectHeader, default_priority: int) -> bool:
    """Whether an Object passes the range filters (§3.3); status Objects always do."""
    if not filters or header.status is not ObjectStatus.NORMAL:
        return True
    priority = header.publisher_priority
    return filters.passes(
        group_id=header.group_id,
        subgroup_id=header.subgroup_id,
        object_id=header.object_id,
        priority=default_priority if priority is None else priority,
        properties=KeyValues.decode(header.properties) if header.properties else None,
    )


def whole_objects(
    track: Track,
    objects: Sequence[StoredObject],
    index: int,
    span: Range,
    timeout: float | None,
    limit: int,
    now: float,
) -> tuple[int, list[StoredObject]]:
    """Objects of a Subgroup that go out as they are: most do, and are found in few steps each.

    Args:
        track: their Track.
        objects: of the Subgroup.
        index: of the first that may go.
        span: the subscription's range.
        timeout: the delivery timeout of Objects, in seconds.
        limit: most payload octets.
        now: the caller's clock, seconds.

    Returns:
        Their payload octets, and Objects from ``index`` on that are all there, follow each other,
        are in the range and in time. The one behind them is to be looked at.
    """
    start, end, authoritative = span.start, span.end, track.authoritative
    left = limit
    stop = index
    for stop in range(index, len(objects)):
        stored = objects[stop]
        header = stored.header
        size = header.payload_length
        if (
            size > left
            or stored.received < size
            or stored.failed
            or not stored.continues
            or header.location < start
            or (end is not None and header.location > end)
            or (timeout is not None and stored.is_late(timeout, now))
            or (not authoritative and track.expired(stored, now))
        ):
            break
        left -= size
    else:
        stop = len(objects)
    return limit - left, list(objects[index:stop])

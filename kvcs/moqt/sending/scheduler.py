"""Which Object goes next: the order of draft-22 as pure logic (MOQT §5.1).

1. lower Subscriber Priority, 2. lower Publisher Priority, then within requests of one Track
Namespace 3. by Group in the request's order, 4. a fill before live, a datagram before a Subgroup,
then the lower Subgroup or Object ID.
Namespaces of equal priority take turns, and so do requests that are equal in everything, so each
progresses.

Publisher Priorities of neighbouring Groups are equal where a model has more than 128 layers;
ordering by Group across the requests of one namespace keeps K and V of a layer before those of
the next.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import Protocol

from kvcs.moqt.actions import SendKey
from kvcs.moqt.names import GroupOrder, TrackNamespace

__all__ = ["Scheduler", "SendKey", "Sendable", "send_key"]


def send_key(
    *,
    subscriber_priority: int,
    publisher_priority: int,
    group_id: int,
    group_order: GroupOrder,
    is_fill: bool,
    position: int,
    is_datagram: bool = False,
    order_differs: bool = False,
) -> SendKey:
    """Sort key of one request's next Object: smallest goes first (MOQT §5.1).

    Args:
        subscriber_priority: 0 to 255, of the request.
        publisher_priority: 0 to 255, of the Object.
        group_id: Group of the Object.
        group_order: order of the request.
        is_fill: whether a fill or fetch stream delivers it.
        position: Subgroup ID; Object ID of a datagram.
        is_datagram: whether a datagram delivers it.
        order_differs: a fill whose Group Order differs from its subscription's.
    """
    rank = group_id if group_order is GroupOrder.ASCENDING else -group_id
    return SendKey(
        subscriber_priority,
        publisher_priority,
        order_differs,
        rank,
        not is_fill,
        not is_datagram,
        position,
    )


class Sendable(Protocol):
    """Something that has an Object to send now."""

    family: TrackNamespace
    """Requests of one family are ordered by Group; families take turns."""

    queued: int
    """Number of its live entry in the scheduler, 0 while it has none; the scheduler's own."""

    def key(self) -> SendKey:
        """Where its next Object stands."""


_Entry = tuple[tuple[bool, int, bool, bool, int], int, Sendable]
_Families = OrderedDict[TrackNamespace, list[_Entry]]

STALE_ENTRIES = 64
"""Entries of sendables that left, kept beyond as many as are live, before they are swept out."""


class Scheduler:
    """The sendables that are ready, and the next of them.

    A sendable enters by `ready`, leaves by `pick`, and enters again while it has more. One that
    flow control or stream credit stops is set aside by `block` or `park`, and counts for nothing
    until `unblock` or `unpark` brings it back.

    An entry is valid while its sendable carries its number; one that left is skipped when it comes
    up, and swept out when such entries become many, so a peer without credit cannot pile them up.
    """

    def __init__(self) -> None:
        self._levels: dict[tuple[int, int], _Families] = {}
        self._order: list[tuple[int, int]] = []
        self._serial = self._front = 0
        self._blocked: list[tuple[int, Sendable]] = []
        self._parked: list[tuple[int, Sendable]] = []
        self._live = 0
        self._entries = 0

    def __len__(self) -> int:
        """Sendables that are ready, blocked or parked."""
        return self._live

    def ready(self, sendable: Sendable) -> None:
        """Queue ``sendable`` by its current key; a sendable that is queued already stays once."""
        if not sendable.queued:
            self._push(sendable)

    def put_back(self, sendable: Sendable) -> None:
        """Queue a sendable that was picked and has not used its turn: it goes before its equals."""
        self._front -= 1
        families = self._push(sendable, self._front)
        families.move_to_end(sendable.family, last=False)

    def requeue(self, sendable: Sendable) -> None:
        """Queue ``sendable`` anew because its key changed."""
        if sendable.queued:
            self._push(sendable)  # the old entry no longer carries the sendable's number
            self._sweep()

    def remove(self, sendable: Sendable) -> None:
        """Forget ``sendable``, wherever it stands."""
        if sendable.queued:
            sendable.queued = 0
            self._live -= 1
            self._sweep()

    def block(self, sendable: Sendable) -> None:
        """Set aside a sendable whose stream the peer's flow control has stopped."""
        self._blocked.append((self._number(sendable), sendable))

    def park(self, sendable: Sendable) -> None:
        """Set aside a sendable that needs a new stream while there is no stream credit."""
        self._parked.append((self._number(sendable), sendable))

    def unblock(self) -> None:
        """Bring back what flow control had stopped."""
        blocked, self._blocked = self._blocked, []
        self._bring_back(blocked)

    def unpark(self) -> None:
        """Bring back what waited for stream credit."""
        parked, self._parked = self._parked, []
        self._bring_back(parked)

    @property
    def waiting_for_streams(self) -> int:
        """Sendables that wait for stream credit."""
        return sum(1 for serial, sendable in self._parked if sendable.queued == serial)

    def pick(self) -> Sendable | None:
        """Take the sendable whose next Object goes first; None when nothing is ready."""
        while self._order:
            level = self._order[0]
            families = self._levels[level]
            while families:
                family, heap = next(iter(families.items()))
                sendable = self._take(heap)
                if not heap:
                    del families[family]
                else:
                    families.move_to_end(family)
                if sendable is not None:
                    return sendable
            heappop(self._order)
            del self._levels[level]
        return None

    def _take(self, heap: list[_Entry]) -> Sendable | None:
        while heap:
            _, serial, sendable = heappop(heap)
            self._entries -= 1
            if sendable.queued == serial:
                sendable.queued = 0
                self._live -= 1
                return sendable
        return None

    def _number(self, sendable: Sendable, serial: int | None = None) -> int:
        """Give ``sendable`` a new number, for an entry that is about to be made."""
        if not sendable.queued:
            self._live += 1
        if serial is None:
            self._serial += 1
            serial = self._serial
        self._entries += 1
        sendable.queued = serial
        return serial

    def _push(self, sendable: Sendable, serial: int | None = None) -> _Families:
        serial = self._number(sendable, serial)
        key = sendable.key()
        level = (key.subscriber_priority, key.publisher_priority)
        families = self._levels.get(level)
        if families is None:
            families = self._levels[level] = OrderedDict()
            heappush(self._order, level)
        heap = families.setdefault(sendable.family, [])
        # The serial grows with every push: among equals, who was served longest ago goes first.
        heappush(heap, (key[2:], serial, sendable))
        return families

    def _bring_back(self, aside: list[tuple[int, Sendable]]) -> None:
        self._entries -= len(aside)
        for serial, sendable in aside:
            if sendable.queued == serial:
                self._push(sendable)

    def _sweep(self) -> None:
        """Drop the entries of sendables that left, once they outnumber the others."""
        if self._entries <= 2 * self._live + STALE_ENTRIES:
            return
        for level, families in list(self._levels.items()):
            for family, heap in list(families.items()):
                heap[:] = [entry for entry in heap if entry[2].queued == entry[1]]
                heapify(heap)
                if not heap:
                    del families[family]
            if not families:
                del self._levels[level]
        self._order = sorted(self._levels)
        self._blocked = [entry for entry in self._blocked if entry[1].queued == entry[0]]
        self._parked = [entry for entry in self._parked if entry[1].queued == entry[0]]
        self._entries = self._live

"""How far a subscriber is behind what is published (MOQT §9.9, TOO_FAR_BEHIND)."""

from __future__ import annotations

from collections.abc import Sequence

from kvcs.moqt.sending.delivery import ObjectSender, SubgroupSender

Place = tuple[int, int]
"""Index of an Object in its Subgroup, and an offset in its payload."""


class Lag:
    """What one subscription is owed, looked at from time to time.

    Octets that were owed at one look and are owed still at another are as late as the time between
    them. So one mark is enough: what was there when it was set. Once all of that has gone, a new
    one is set. What is looked at costs a step for each Subgroup that is under way and for each
    Object since the last look.
    """

    __slots__ = ("_counted", "_mark", "_since", "octets")

    def __init__(self) -> None:
        self.octets = 0
        """Payload octets that are here and were not handed over, at the last look."""
        self._counted: dict[ObjectSender, tuple[int, int]] = {}
        """Objects that each Subgroup's sender had passed at the last look, and their octets."""
        self._mark: dict[ObjectSender, Place] = {}
        self._since = 0.0

    def look(self, senders: Sequence[ObjectSender], now: float) -> float:
        """Look at what is owed.

        Args:
            senders: Subgroups and datagrams that are not over.
            now: the time, seconds.

        Returns:
            Seconds for which something has been owed, at least.
        """
        behind: dict[ObjectSender, Place] = {}
        counted: dict[ObjectSender, tuple[int, int]] = {}
        self.octets = 0
        for sender in senders:
            edge = _edge(sender)
            if _place(sender) < edge:
                behind[sender] = edge
            if isinstance(sender, SubgroupSender):
                counted[sender] = self._pass(sender)
                self.octets += _owed(sender, counted[sender][1])
        self._counted = counted
        if any(not each.closed and _place(each) < at for each, at in self._mark.items()):
            return now - self._since
        self._mark, self._since = behind, now
        return 0.0

    def excuse(self) -> None:
        """What is owed is not late: something else that was asked for goes first."""
        self._mark = {}

    def _pass(self, sender: SubgroupSender) -> tuple[int, int]:
        """Objects that a sender has passed by now, and their octets."""
        index, _ = sender.place
        before, octets = self._counted.get(sender, (0, 0))
        passed = sender.subgroup.objects[before:index]
        return index, octets + sum(stored.header.payload_length for stored in passed)


def _place(sender: ObjectSender) -> Place:
    """Up to where a sender has handed over."""
    return sender.place if isinstance(sender, SubgroupSender) else (0, 0)


def _edge(sender: ObjectSender) -> Place:
    """Up to where it could."""
    if not isinstance(sender, SubgroupSender):
        return 1, 0
    objects = sender.subgroup.objects
    return len(objects) - 1, objects[-1].received


def _owed(sender: SubgroupSender, passed: int) -> int:
    objects = sender.subgroup.objects
    _, offset = sender.place
    to_come = objects[-1].header.payload_length - objects[-1].received
    return max(0, sender.subgroup.octets - passed - offset - to_come)

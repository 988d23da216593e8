"""Which layers of one retrieval its readers need still."""

from __future__ import annotations

from kvcs.errors import StoreFull, UsageError
from kvcs.kv import Ledger


class KeptLayers:
    """What the readers of one retrieval have dropped. A layer stays until each of them has.

    Args:
        ledger: holds the layers.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._dropped: dict[object, set[int]] = {}
        """By reader."""
        self._told = False
        """Whether it was said that they take too much."""

    @property
    def too_late(self) -> bool:
        """Whether a new reader would not get every layer."""
        return self._ledger.has_dropped

    def join(self, reader: object) -> None:
        """Somebody reads it."""
        self._dropped[reader] = set()

    def leave(self, reader: object) -> None:
        """A reader needs nothing any more. Does nothing twice."""
        self._dropped.pop(reader, None)
        if self._dropped:
            self._let_go(set.union(*self._dropped.values()))

    def drop(self, reader: object, index: int) -> None:
        """A reader needs a layer no longer.

        Raises:
            UsageError: the layer is not whole, or the reader has left.
        """
        if reader not in self._dropped:
            raise UsageError("the cache was closed: it holds no layer any more")
        if not self._ledger.is_ready(index):
            raise UsageError(f"layer {index} is not whole: it cannot be dropped")
        self._dropped[reader].add(index)
        self._let_go({index})

    def excess(self, octets: int | None) -> StoreFull | None:
        """Say, once, that the layers which are held take more than so many octets; None where they
        do not, or where None is the limit."""
        held = self._ledger.held_octets
        if octets is None or held <= octets or self._told:
            return None
        self._told = True
        return StoreFull(
            f"the layers that are held take {held} octets, the limit is {octets}: drop those that"
            " were used (Cache.drop), or set SubscriberSettings.held_octets"
        )

    def _let_go(self, indices: set[int]) -> None:
        """Drop those layers that no reader needs; one that was contradicted since is kept."""
        for index in set.intersection(indices, *self._dropped.values()):
            if self._ledger.is_ready(index):
                self._ledger.drop(index)

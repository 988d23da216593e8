"""Where a publisher's copies of tensors lie: in memory up to a budget, then in a spill file."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass

from kvcs.errors import StoreFull, UsageError
from kvcs.kv.memory import new_memory
from kvcs.moqt.track.stored import StoreBudget

COPIES_SHARE = (7, 8)
"""With a spill folder, copies take at most this part of the budget: what is spilled needs
bookkeeping in memory, too."""


@dataclass(frozen=True, slots=True)
class Room:
    """Writable octets for one layer's copies."""

    octets: memoryview
    """The room itself."""

    charged: int
    """What it counts in the budget: 0 where it lies in a file."""


class LayerMemory:
    """Gives room for copies of layers.

    Args:
        budget: octets of memory that all publications of a Publisher share.
        spill: folder for what does not fit; None refuses it instead.

    Raises:
        UsageError: ``spill`` is not a folder that can be written.
    """

    def __init__(self, budget: StoreBudget, spill: str | os.PathLike[str] | None) -> None:
        if spill is not None and not (os.path.isdir(spill) and os.access(spill, os.W_OK | os.X_OK)):
            raise UsageError(f"the spill folder {os.fspath(spill)!r} cannot be written")
        self.budget = budget
        self._spill = spill

    def reserve(self, octets: int) -> None:
        """Take octets of the budget for bookkeeping; ``budget.release`` gives them back.

        Raises:
            StoreFull: they do not fit and nothing can be freed.
        """
        self.budget.reserve(octets)

    def room(self, octets: int) -> Room:
        """Room for ``octets`` of copies.

        Past the budget they go to the spill folder. Without one, or where that is full, finished
        publications make room.

        Raises:
            StoreFull: neither memory nor the spill folder has it.
        """
        if self._spill is not None and not self._fits(octets):
            try:
                return Room(self._file(self._spill, octets), 0)
            except StoreFull as full:
                try:
                    self.budget.reserve(octets)
                except StoreFull:
                    raise full from None
        else:
            self.budget.reserve(octets)
        # Not zeroed, and paged in where it is written to: in the thread that copies, not here.
        return Room(new_memory(octets).data, octets)

    def _fits(self, octets: int) -> bool:
        part, whole = COPIES_SHARE
        return whole * (self.budget.used + octets) <= part * self.budget.limit

    @staticmethod
    def _file(folder: str | os.PathLike[str], octets: int) -> memoryview:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                # Blocks are taken now: a full disk must be an error here, not a fault on access.
                os.posix_fallocate(file.fileno(), 0, octets)
                return memoryview(mmap.mmap(file.fileno(), octets))
        except OSError as exc:
            raise StoreFull(
                f"{octets} octets fit neither the store nor the spill folder: {exc.strerror}"
            ) from exc

"""Where a publisher's copies of tensors lie: in memory up to a budget, then in a spill file."""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass

from kvcs.errors import StoreFull, UsageError
from kvcs.moqt.stored import StoreBudget


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
        if spill is not None and not os.access(spill, os.W_OK | os.X_OK):
            raise UsageError(f"the spill folder {os.fspath(spill)!r} cannot be written")
        self.budget = budget
        self._spill = spill

    def room(self, octets: int) -> Room:
        """Room for ``octets``.

        Raises:
            StoreFull: neither memory nor the spill folder has it.
        """
        try:
            self.budget.reserve(octets)
        except StoreFull:
            if self._spill is None or octets == 0:
                raise
            return Room(self._file(octets), 0)
        return Room(memoryview(bytearray(octets)), octets)

    def _file(self, octets: int) -> memoryview:
        assert self._spill is not None
        with tempfile.TemporaryFile(dir=self._spill) as file:
            try:
                # Blocks are taken now: a full disk must be an error here, not a fault on access.
                os.posix_fallocate(file.fileno(), 0, octets)
            except OSError as exc:
                raise StoreFull(
                    f"{octets} octets fit neither the store nor the spill folder: {exc.strerror}"
                ) from exc
            return memoryview(mmap.mmap(file.fileno(), octets))

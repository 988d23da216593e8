"""What recovery may try where no session brings what lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from kvcs.errors import MissingBlocks
from kvcs.moqt.intervals import LocationSet
from kvcs.moqt.names import Location


class LastMeans(Protocol):
    """Ways that lead past every session."""

    @property
    def can_recompute(self) -> bool:
        """Whether the caller recomputes what nobody has."""

    async def look_around(self) -> None:
        """The sessions are gone: get a newer manifest, if there is one elsewhere."""

    async def fetch(self, missing: Sequence[MissingBlocks]) -> str | None:
        """Get blocks from elsewhere; why some could not be had, if anything is to be told."""

    async def recompute(self, missing: Sequence[MissingBlocks]) -> None:
        """Let the caller recompute blocks.

        Raises:
            KvcsError: it failed.
        """


def clipped(run: MissingBlocks, places: LocationSet, block_tokens: int) -> Iterator[MissingBlocks]:
    """The parts of a run of missing blocks that lie in some ranges of Locations.

    Args:
        run: blocks of one layer.
        places: the ranges.
        block_tokens: tokens of a block.
    """
    first, last = Location(run.layer, run.first_block), Location(run.layer, run.last_block)
    for start, end in places.ranges():
        low, high = max(first, start), min(last, end)
        if low <= high:
            yield replace(
                run,
                first_block=low.object,
                last_block=high.object,
                first_token=run.first_token + (low.object - run.first_block) * block_tokens,
                last_token=run.last_token - (run.last_block - high.object) * block_tokens,
            )

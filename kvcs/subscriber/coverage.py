"""How much of a prefix a publication covers, and what an index says about that.

A manifest gives one hash over the Block Keys of each segment, so a consumer can confirm whole
segments of its own tokens and no part of one (KVCS "Manifest Track"). Of a segment that reaches
beyond its tokens, or parts from them in the middle, it can know only through an index (KVCS
"Discovering Publications"): by the Block Keys that it lacks, or by the index's word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcs.errors import UsageError
from kvcs.kv import Manifest, Prefix, SegmentEntry
from kvcs.kv.tracks import BLOCK_KEY_OCTETS, parse_holder_uri

MAX_FURTHER_KEYS = 2**20
"""Block Keys beyond the consumer's own that an index may give for one publication."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What an index says: a publication holds the first blocks of a prefix.

    Raises:
        UsageError: the URI is no holder URI, there is no block, or a key has another length.
    """

    uri: str
    """Holder URI of the publication."""

    blocks: int
    """Leading blocks of the prefix that it holds: their last Block Key was found there."""

    further_keys: tuple[bytes, ...] = ()
    """Block Keys of the publication behind those, in order, at least to the end of the segment.
    With them `block_keys_sha256` confirms what the index says; without them it is believed."""

    def __post_init__(self) -> None:
        parse_holder_uri(self.uri)
        if self.blocks < 1:
            raise UsageError(f"a holding has at least 1 block, not {self.blocks}")
        if len(self.further_keys) > MAX_FURTHER_KEYS:
            raise UsageError(f"{len(self.further_keys)} further keys, limit {MAX_FURTHER_KEYS}")
        if any(len(key) != BLOCK_KEY_OCTETS for key in self.further_keys):
            raise UsageError(f"a Block Key has {BLOCK_KEY_OCTETS} octets")


class Index(Protocol):
    """A lookup of Block Keys, such as a KVSP Index Service."""

    async def find(self, prefix: Prefix) -> Sequence[Holding | str]:
        """Publications that hold blocks of a prefix, the best first.

        Args:
            prefix: its `block_keys` are what is looked up; its tokens stay here.

        Returns:
            A `Holding` where it is known how many leading blocks a publication has; else a holder
            URI, whose publication is held to its manifest alone.
        """


class Coverage:
    """Holds manifests to a prefix.

    Args:
        prefix: the consumer's own.
        holding: what an index says about the publication, if one does.
    """

    def __init__(self, prefix: Prefix, holding: Holding | None = None) -> None:
        self.prefix = prefix
        self.blocks = prefix.blocks if holding is None else min(holding.blocks, prefix.blocks)
        """Leading blocks of the prefix that the publication can have at most."""
        self.believed = False
        """Whether a segment was taken on the index's word."""
        self._holding = holding

    def entries(self, manifest: Manifest) -> tuple[SegmentEntry, ...]:
        """Leading segments that hold blocks of the prefix, the last one perhaps more than those.

        Raises:
            PublicationError: segment 0 has other keys than the Anchor Key says.
        """
        if self._holding is None:
            return manifest.covering(self.prefix)
        further = self._holding.further_keys
        keys = self.prefix.block_keys[: self.blocks] + further
        found: list[SegmentEntry] = []
        for entry in manifest.segments:
            first, end = entry.first_block, entry.first_block + entry.blocks
            if first >= self.blocks:
                break
            if end <= len(keys):
                digest = hashlib.sha256(b"".join(keys[first:end])).digest()
                if digest != entry.block_keys_sha256:
                    break
            elif further:
                break  # the keys that the index gave do not reach its end
            else:
                self.believed = True
            found.append(entry)
        return tuple(found)

    def covered(self, entries: Sequence[SegmentEntry]) -> int:
        """Blocks of the prefix in some leading segments."""
        return min(self.blocks, sum(entry.blocks for entry in entries))

    def is_final(self, manifest: Manifest, entries: Sequence[SegmentEntry]) -> bool:
        """Whether later versions of a manifest can cover no more of the prefix."""
        return self.covered(entries) == self.blocks or len(entries) < len(manifest.segments)

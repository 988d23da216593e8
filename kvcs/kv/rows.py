"""What is known of each block of one layer on one track: its state, its digest and its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

from kvcs.errors import PublicationError
from kvcs.kv.codecs import Codec
from kvcs.kv.layout import BlockLayout
from kvcs.kv.manifest import Manifest
from kvcs.kv.payload import DIGEST_OCTETS, HeaderCheck
from kvcs.kv.tracks import DataTrack

OWED: Final = 0
"""Block state: not here."""

WAITING: Final = 1
"""Block state: here, but no signed list names it yet."""

VERIFIED: Final = 2
"""Block state: here and released."""


@dataclass(frozen=True, slots=True)
class Part:
    """A segment as selected."""

    first_block: int
    """Absolute index of its first block."""

    blocks: int
    """All its blocks."""

    wanted: int
    """Its leading blocks that are within the selection."""

    tracks: tuple[DataTrack, ...]
    """Tracks that it is taken from."""

    codec: Codec
    """Codec of all of them."""

    def check(self, number: int, manifest: Manifest) -> None:
        """Hold it, as segment ``number``, to a manifest that describes it.

        Raises:
            PublicationError: it is described otherwise than it was selected.
        """
        if number >= len(manifest.segments):
            return
        entry = manifest.segments[number]
        if entry.blocks != self.blocks:
            raise PublicationError(
                f"manifest: segment {number} has {entry.blocks} blocks, expected {self.blocks}"
            )
        for track in self.tracks:
            if track not in entry.tracks:
                raise PublicationError(f"manifest: segment {number} has no track {track}")


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """What the Objects of one selected track have in common."""

    track: DataTrack
    """The track."""

    part: Part
    """Its segment."""

    layout: BlockLayout
    """Sections of one block."""

    check: HeaderCheck
    """Checks their headers."""

    payload_octets: int | None
    """Octets of each payload, where the codec fixes them."""

    rows: dict[int, Row] = field(default_factory=dict)
    """By layer, those of which something has come."""

    @property
    def octets(self) -> int:
        """Tensor octets of one layer."""
        return self.layout.octets * self.part.wanted


class Holder(Protocol):
    """Fills the place of a block."""

    def leave(self) -> None:
        """Somebody else has the place now: only count as a copy."""


class Row:
    """State, digest and place of each wanted block of one layer on one track."""

    __slots__ = ("digests", "holders", "listed", "places", "states")

    def __init__(self, blocks: int) -> None:
        self.states = bytearray(blocks)
        self.digests = bytearray(blocks * DIGEST_OCTETS)
        self.listed: bytes | None = None
        """Digests of the layer's Objects on the track, one after the other, if a manifest lists
        them."""
        self.places: tuple[memoryview, ...] = ()
        """Octets of all the segment's blocks in the layer's tensors, for each section; none before
        the first is needed."""
        self.holders: dict[int, Holder] = {}
        """Who fills the place of a block now."""

    def digest(self, block: int) -> bytes:
        """Digest of a block that is not owed."""
        return bytes(self.digests[block * DIGEST_OCTETS : (block + 1) * DIGEST_OCTETS])

    def known(self) -> list[int]:
        """Blocks that are not owed."""
        return [block for block, state in enumerate(self.states) if state != OWED]

    def leading(self) -> int:
        """Verified blocks before the first that is not."""
        return len(self.states) - len(self.states.lstrip(b"\x02"))

    def take_over(self, block: int) -> None:
        """Whoever fills the place of a block now only counts as a copy."""
        holder = self.holders.pop(block, None)
        if holder is not None:
            holder.leave()


def digest_at(listed: bytes, block: int) -> bytes:
    """Digest of one block in the list of a layer's."""
    return listed[block * DIGEST_OCTETS : (block + 1) * DIGEST_OCTETS]

"""What is in place of one publication, block by block and layer by layer, and what lacks.

`Holdings` keeps the layer tensors and the state of every selected block, and answers questions;
`kvcs.kv.ledger.Ledger` is what receives Objects.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcs.errors import MissingBlocks, UsageError
from kvcs.kv.arrays import byte_view
from kvcs.kv.codecs import Codec
from kvcs.kv.descriptor import Descriptor
from kvcs.kv.layout import BlockLayout
from kvcs.kv.payload import DIGEST_OCTETS, HeaderCheck
from kvcs.kv.tracks import MAX_BLOCK, Component, DataTrack
from kvcs.moqt.names import Location

OWED: Final = 0
"""Block state: not here."""

WAITING: Final = 1
"""Block state: here, but no signed list names it yet."""

VERIFIED: Final = 2
"""Block state: here and released."""

_LACKING = re.compile(rb"[^\x02]+", re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False)
class LayerTensors:
    """One layer's verified tensors."""

    index: int
    """Layer index."""

    k: npt.NDArray[Any]
    """Keys, [tokens, kv_heads, head_dim], the descriptor's dtype, read-only. The joint tensor where
    the model has latent attention."""

    v: npt.NDArray[Any]
    """Values, [tokens, kv_heads, v_head_dim], read-only; of size 0 for latent attention."""


@dataclass(slots=True)
class LedgerCounters:
    """What happened so far; all only grow."""

    verified: int = 0
    """Objects that are in place and count."""

    verified_octets: int = 0
    """Tensor octets of those."""

    supplied: int = 0
    """Objects that the consumer has recomputed itself."""

    duplicates: int = 0
    """Copies dropped because the same octets were there, or another copy held the place."""

    excess: int = 0
    """Objects outside the selection, dropped unread."""

    abandoned: int = 0
    """Objects given up before their end."""

    octets: int = 0
    """Payload octets that slots took, whatever became of them."""

    rejected: Counter[str] = field(default_factory=Counter)
    """Objects dropped, by failed check: magic, version, component, layer, block, token_start,
    token_count, codec, length, digest, listed."""


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


@dataclass(frozen=True, slots=True)
class Lane:
    """What the Objects of one selected track have in common."""

    part: Part
    """Its segment."""

    layout: BlockLayout
    """Sections of one block."""

    check: HeaderCheck
    """Checks their headers."""

    payload_octets: int | None
    """Octets of each payload, where the codec fixes them."""


class Row:
    """State and digest of each wanted block of one layer on one track."""

    __slots__ = ("digests", "states")

    def __init__(self, blocks: int) -> None:
        self.states = bytearray(blocks)
        self.digests = bytearray(blocks * DIGEST_OCTETS)

    def digest(self, block: int) -> bytes:
        """Digest of a block that is not owed."""
        return bytes(self.digests[block * DIGEST_OCTETS : (block + 1) * DIGEST_OCTETS])

    def known(self) -> list[int]:
        """Blocks that are not owed."""
        return [block for block, state in enumerate(self.states) if state != OWED]

    def leading(self) -> int:
        """Verified blocks before the first that is not."""
        return len(self.states) - len(self.states.lstrip(b"\x02"))


class Holdings:
    """Layer tensors of a selection, and which blocks of them are verified.

    Args:
        descriptor: the consumer's own.
        blocks: how many blocks of the context are wanted, from its start, over all segments.
        layers: first and last layer wanted, inclusive; all by default.

    Raises:
        UsageError: the selection is empty or out of bounds.
    """

    def __init__(
        self, descriptor: Descriptor, *, blocks: int, layers: tuple[int, int] | None = None
    ) -> None:
        first, last = (0, descriptor.layers - 1) if layers is None else layers
        if not 0 <= first <= last < descriptor.layers:
            raise UsageError(f"layers {first}..{last} are not within 0..{descriptor.layers - 1}")
        if not 1 <= blocks <= MAX_BLOCK + 1:
            raise UsageError(f"blocks: expected 1 or more, got {blocks}")
        self.descriptor = descriptor
        self.layers = range(first, last + 1)
        self.blocks = blocks
        self.counters = LedgerCounters()
        self._parts: list[Part] = []
        self._covered = 0
        self._objects = 0
        """Objects of one layer in the segments added so far."""
        self._rows: dict[tuple[DataTrack, int], Row] = {}
        self._lanes: dict[DataTrack, Lane] = {}
        self._tensors: dict[int, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}
        self._octets: dict[int, tuple[memoryview, memoryview]] = {}
        """The same as octets."""
        self._verified: Counter[int] = Counter()
        self._contradicted: set[int] = set()
        self._ready: list[int] = []

    descriptor: Descriptor
    """The consumer's own descriptor."""

    layers: range
    """Layers wanted."""

    blocks: int
    """Blocks wanted, from the start of the context."""

    counters: LedgerCounters
    """What happened so far."""

    @property
    def covered(self) -> int:
        """Blocks of the selection that lie in the segments added so far."""
        return self._covered

    @property
    def tracks(self) -> tuple[DataTrack, ...]:
        """The selected tracks of all segments added so far."""
        return tuple(track for part in self._parts for track in part.tracks)

    def want_covered(self) -> None:
        """Want no more blocks than lie in the segments added so far: there will be no others.

        Layers that this makes ready are given by `take_ready`.

        Raises:
            UsageError: there are none.
        """
        if not self._covered:
            raise UsageError("no segment was added; nothing would be wanted")
        self.blocks = self._covered
        self._ready = [layer for layer in self.layers if self.is_ready(layer)]

    # --- places ---

    def _select(self, part: Part, lanes: dict[DataTrack, Lane]) -> None:
        self._parts.append(part)
        self._lanes.update(lanes)
        self._covered += part.wanted
        self._objects += part.wanted * len(part.tracks)

    def payload_octets(self, track: DataTrack) -> int | None:
        """Octets of each payload of a selected track, where its codec fixes them."""
        return self._lane(track).payload_octets

    def _lane(self, track: DataTrack) -> Lane:
        lane = self._lanes.get(track)
        if lane is None:
            raise UsageError(f"track {track} was not selected")
        return lane

    def _row(self, track: DataTrack, layer: int) -> Row:
        row = self._rows.get((track, layer))
        if row is None:
            row = self._rows[track, layer] = Row(self._parts[track.segment].wanted)
        return row

    def _layer(self, layer: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        tensors = self._tensors.get(layer)
        if tensors is None:
            tokens, heads = self.blocks * self.descriptor.block_tokens, self.descriptor.kv_heads
            dtype = self.descriptor.numpy_dtype
            tensors = self._tensors[layer] = (
                np.empty((tokens, heads, self.descriptor.head_dim), dtype),
                np.empty((tokens, heads, self.descriptor.v_head_dim), dtype),
            )
        return tensors

    def _sections(self, track: DataTrack, location: Location) -> list[memoryview]:
        """Writable octets of one block's sections."""
        views = self._octets.get(location.group)
        if views is None:
            k, v = self._layer(location.group)
            views = self._octets[location.group] = (byte_view(k), byte_view(v))
        wanted: tuple[memoryview, ...] = views
        if track.component is not Component.KV:
            wanted = views[:1] if track.component is Component.K else views[1:]
        lane = self._lanes[track]
        block = lane.part.first_block + location.object
        sizes = lane.layout.section_octets
        return [
            view[block * size : (block + 1) * size]
            for view, size in zip(wanted, sizes, strict=True)
        ]

    def _release(
        self, track: DataTrack, layer: int, row: Row, block: int, *, ours: bool = False
    ) -> None:
        row.states[block] = VERIFIED
        self._verified[layer] += 1
        if ours:
            self.counters.supplied += 1
        else:
            self.counters.verified += 1
            self.counters.verified_octets += self._lanes[track].layout.octets
        if self.is_ready(layer):
            self._ready.append(layer)

    # --- asking ---

    def is_ready(self, layer: int) -> bool:
        """Whether every selected block of a layer is verified in all its tracks."""
        if layer in self._contradicted or layer not in self.layers:
            return False
        return self._covered == self.blocks and self._verified[layer] == self._objects

    def take_ready(self) -> list[int]:
        """Layers that became ready since the last call, in the order in which they did."""
        if not self._ready:
            return []
        ready, self._ready = self._ready, []
        return [layer for layer in ready if self.is_ready(layer)]

    def ready_layers(self) -> list[LayerTensors]:
        """Every ready layer's tensors, by ascending index."""
        return [self.layer(layer) for layer in self.layers if self.is_ready(layer)]

    def layer(self, layer: int, tokens: int | None = None) -> LayerTensors:
        """A layer's tensors: all selected tokens, or the first ``tokens``.

        Returns:
            Read-only views; the memory is this ledger's and does not change any more.

        Raises:
            UsageError: not all of that is verified.
        """
        if layer not in self.layers:
            raise UsageError(f"layer {layer} was not selected")
        everything = self.blocks * self.descriptor.block_tokens
        wanted = everything if tokens is None else tokens
        usable = everything if self.is_ready(layer) else self.usable_tokens(layer)
        if not 0 <= wanted <= usable:
            raise UsageError(f"layer {layer}: {usable} tokens are verified, not {wanted}")
        k, v = (array[:wanted] for array in self._layer(layer))
        k.flags.writeable = v.flags.writeable = False
        return LayerTensors(layer, k, v)

    @property
    def whole(self) -> bool:
        """Whether every selected layer is ready."""
        return all(self.is_ready(layer) for layer in self.layers)

    def usable_tokens(self, layer: int | None = None) -> int:
        """Tokens from the start that are verified in one layer, or in every selected one."""
        layers = self.layers if layer is None else (layer,)
        return min(self._leading(each) for each in layers) * self.descriptor.block_tokens

    def _leading(self, layer: int) -> int:
        """Leading verified blocks of one layer."""
        if layer in self._contradicted or layer not in self.layers:
            return 0
        leading = 0
        for part in self._parts:
            rows = [self._rows.get((track, layer)) for track in part.tracks]
            here = min(0 if row is None else row.leading() for row in rows)
            leading += here
            if here < part.wanted:
                break
        return leading

    def lacking(self, track: DataTrack, layers: range) -> Iterator[tuple[Location, Location]]:
        """What is not verified yet of one selected track, in runs of one layer, ascending.

        Args:
            track: one of `tracks`.
            layers: look at these layers only, as far as they are selected; ascending by 1.

        Yields:
            First and last Location of a run, both inclusive.
        """
        for layer in self._selected(layers):
            for start, end in self._runs_of(track, layer):
                yield Location(layer, start), Location(layer, end - 1)

    def missing(self, layers: range | None = None) -> tuple[MissingBlocks, ...]:
        """What is not verified yet, in runs of blocks, by segment, layer and component.

        Blocks beyond the segments added so far are reported under the next segment's number.

        Args:
            layers: look at these layers only, as far as they are selected; ascending by 1.
        """
        layers = self.layers if layers is None else self._selected(layers)
        found: list[MissingBlocks] = []
        for number, part in enumerate(self._parts):
            for layer in layers:
                for track in part.tracks:
                    for start, end in self._runs_of(track, layer):
                        found.append(
                            self._run(number, track.component, layer, part.first_block, start, end)
                        )
        beyond = self.blocks - self.covered
        if beyond > 0:
            components: tuple[Component, ...] = self.descriptor.components
            if self._parts:
                components = tuple(track.component for track in self._parts[-1].tracks)
            for layer in layers:
                for component in components:
                    number, first = len(self._parts), self.covered
                    found.append(self._run(number, component, layer, first, 0, beyond))
        return tuple(found)

    def _selected(self, layers: range) -> range:
        first, last = max(layers.start, self.layers.start), min(layers.stop, self.layers.stop)
        return range(first, max(first, last))

    def _runs_of(self, track: DataTrack, layer: int) -> list[tuple[int, int]]:
        """Runs of blocks of one track and layer that are not verified, without their ends."""
        row = self._rows.get((track, layer))
        if row is None:
            return [(0, self._lane(track).part.wanted)]
        return [match.span() for match in _LACKING.finditer(row.states)]

    def _run(
        self, segment: int, component: Component, layer: int, first_block: int, start: int, end: int
    ) -> MissingBlocks:
        size = self.descriptor.block_tokens
        return MissingBlocks(
            segment=segment,
            component=component,
            layer=layer,
            first_block=start,
            last_block=end - 1,
            first_token=(first_block + start) * size,
            last_token=(first_block + end) * size - 1,
        )

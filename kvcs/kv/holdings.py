"""What is in place of one publication, block by block and layer by layer, and what lacks.

`Holdings` keeps the layer tensors and the state of every selected block, and answers questions;
`kvcs.kv.ledger.Ledger` is what receives Objects.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import index as integer
from typing import Any

import numpy.typing as npt

from kvcs.errors import MissingBlocks, UsageError
from kvcs.kv.arrays import byte_view
from kvcs.kv.descriptor import Descriptor
from kvcs.kv.layer_memory import FreshMemory, LayerMemory
from kvcs.kv.rows import VERIFIED, Lane, Part, Row
from kvcs.kv.tracks import MAX_BLOCK, Component, DataTrack
from kvcs.moqt.names import Location

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
    token_count, codec, length, digest, listed; of sealed ones unprotected, key, seal, room, too."""


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
        try:
            first, last = (0, descriptor.layers - 1) if layers is None else map(integer, layers)
        except (TypeError, ValueError):
            raise UsageError(
                f"layers: expected (first, last), both included, not {layers!r:.100}"
            ) from None
        if not 0 <= first <= last < descriptor.layers:
            raise UsageError(f"layers {first}..{last} are not within 0..{descriptor.layers - 1}")
        if not 1 <= blocks <= MAX_BLOCK + 1:
            raise UsageError(f"blocks: expected 1 or more, got {blocks}")
        self.descriptor = descriptor
        self.layers = range(first, last + 1)
        self.blocks = blocks
        self.counters = LedgerCounters()
        self.memory: LayerMemory = FreshMemory(descriptor)
        self.held_octets = 0
        self._parts: list[Part] = []
        self._covered = 0
        self._objects = 0
        """Objects of one layer in the segments added so far."""
        self._lanes: dict[DataTrack, Lane] = {}
        self._tensors: dict[int, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}
        self._verified = [0] * descriptor.layers
        """Objects of each layer that are in place and count."""
        self._contradicted: set[int] = set()
        self._dropped: set[int] = set()
        self._ready: list[int] = []

    descriptor: Descriptor
    """The consumer's own descriptor."""

    layers: range
    """Layers wanted."""

    blocks: int
    """Blocks wanted, from the start of the context."""

    counters: LedgerCounters
    """What happened so far."""

    memory: LayerMemory
    """What layers are put into; set it before the first Object comes."""

    held_octets: int
    """Octets that tensors of ours have for the segments and components that have begun to come,
    whole or not, but of layers that were dropped."""

    @property
    def covered(self) -> int:
        """Blocks of the selection that lie in the segments added so far."""
        return self._covered

    @property
    def tracks(self) -> tuple[DataTrack, ...]:
        """The selected tracks of all segments added so far."""
        return tuple(track for part in self._parts for track in part.tracks)

    @property
    def filling(self) -> int:
        """Blocks whose place an Object fills that is on its way in."""
        return sum(len(row.holders) for lane in self._lanes.values() for row in lane.rows.values())

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

    def lane(self, track: DataTrack) -> Lane:
        """What the Objects of a selected track have in common.

        Raises:
            UsageError: ``track`` was not selected.
        """
        lane = self._lanes.get(track)
        if lane is None:
            raise UsageError(f"track {track} was not selected")
        return lane

    def _row(self, lane: Lane, layer: int) -> Row:
        """Row of a layer on a track; a new one knows what is listed."""
        row = lane.rows.get(layer)
        if row is None:
            row = lane.rows[layer] = Row(lane.part.wanted)
            row.listed = self._list_of(lane.track, layer)
        return row

    def _list_of(self, track: DataTrack, layer: int) -> bytes | None:
        """Digests of a layer's Objects on a track, where they are listed."""
        return None

    def _layer(self, layer: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        tensors = self._tensors.get(layer)
        if tensors is None:
            tokens = self.blocks * self.descriptor.block_tokens
            tensors = self._tensors[layer] = self.memory.layer(layer, tokens)
        return tensors

    def _places(self, lane: Lane, row: Row, layer: int) -> tuple[memoryview, ...]:
        """Writable octets of all the segment's blocks, for each section."""
        if not row.places:
            k, v = map(byte_view, self._layer(layer))
            wanted = {Component.K: (k,), Component.V: (v,), Component.KV: (k, v)}
            first, last = lane.part.first_block, lane.part.first_block + lane.part.wanted
            pairs = zip(wanted[lane.track.component], lane.layout.section_octets, strict=True)
            row.places = tuple([view[first * size : last * size] for view, size in pairs])
            self.held_octets += lane.octets if self.memory.is_ours else 0
        return row.places

    def _sections(self, lane: Lane, row: Row, layer: int, block: int) -> list[memoryview]:
        """Writable octets of one block's sections."""
        pairs = zip(self._places(lane, row, layer), lane.layout.section_octets, strict=True)
        return [view[block * size : (block + 1) * size] for view, size in pairs]

    def _release(self, lane: Lane, layer: int, row: Row, block: int, *, ours: bool = False) -> None:
        row.states[block] = VERIFIED
        verified = self._verified[layer] = self._verified[layer] + 1
        counters = self.counters
        if ours:
            counters.supplied += 1
        else:
            counters.verified += 1
            counters.verified_octets += lane.layout.octets
        if verified >= self._objects and self.is_ready(layer):
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
        """The tensors of every ready layer that was not dropped, by ascending index."""
        return [
            self.layer(layer)
            for layer in self.layers
            if self.is_ready(layer) and layer not in self._dropped
        ]

    def layer(self, layer: int, tokens: int | None = None) -> LayerTensors:
        """A layer's tensors: all selected tokens, or the first ``tokens``.

        Returns:
            Read-only views; the memory is this ledger's and does not change any more.

        Raises:
            UsageError: not all of that is verified.
        """
        if layer not in self.layers:
            raise UsageError(f"layer {layer} was not selected")
        if layer in self._dropped:
            raise UsageError(f"layer {layer} was dropped")
        everything = self.blocks * self.descriptor.block_tokens
        wanted = everything if tokens is None else tokens
        usable = everything if self.is_ready(layer) else self.usable_tokens(layer)
        if not 0 <= wanted <= usable:
            raise UsageError(f"layer {layer}: {usable} tokens are verified, not {wanted}")
        k, v = (array[:wanted] for array in self._layer(layer))
        k.flags.writeable = v.flags.writeable = False
        return LayerTensors(layer, k, v)

    def drop(self, layer: int) -> None:
        """Let a ready layer go: its tensors are given no more, and their memory is free as soon as
        nobody else holds them. It stays verified. Does nothing twice.

        Raises:
            UsageError: the layer is not ready.
        """
        if not self.is_ready(layer):
            raise UsageError(f"layer {layer} is not whole yet: it cannot be dropped")
        self._dropped.add(layer)
        self._tensors.pop(layer, None)
        for lane in self._lanes.values():
            row = lane.rows[layer]  # each has one: the layer is ready
            self.held_octets -= lane.octets if row.places and self.memory.is_ours else 0
            row.places = ()

    @property
    def has_dropped(self) -> bool:
        """Whether any layer was dropped."""
        return bool(self._dropped)

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
            rows = [self._lanes[track].rows.get(layer) for track in part.tracks]
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
        lane = self.lane(track)
        row = lane.rows.get(layer)
        if row is None:
            return [(0, lane.part.wanted)]
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

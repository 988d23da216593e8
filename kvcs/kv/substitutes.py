"""What stands in a publication's layers in place of its own Objects.

That is what the consumer has recomputed, block by block; and whole segments of another publication
of the same tokens (KVCS "Verification and Recovery": Objects of different publications are not
combined in one segment, so all of a segment is taken or nothing).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from kvcs.errors import UsageError
from kvcs.kv.descriptor import Descriptor
from kvcs.kv.holdings import Holdings, LayerTensors
from kvcs.kv.payload import DIGEST_OCTETS
from kvcs.kv.rows import OWED, VERIFIED, WAITING, Lane, Row
from kvcs.kv.strict_json import Octets
from kvcs.kv.tracks import Component, DataTrack
from kvcs.moqt.names import Location


class Substitutes(Holdings):
    """Holdings whose places others than the publication may fill; arguments as for `Holdings`."""

    def __init__(
        self, descriptor: Descriptor, *, blocks: int, layers: tuple[int, int] | None = None
    ) -> None:
        super().__init__(descriptor, blocks=blocks, layers=layers)
        self.replaced: dict[int, tuple[DataTrack, ...]] = {}
        self._supplied: set[tuple[DataTrack, Location]] = set()
        """What the consumer has recomputed: it need not be the producer's bits."""

    replaced: dict[int, tuple[DataTrack, ...]]
    """Segments that another publication has filled, and its tracks that they came from."""

    @property
    def sources(self) -> tuple[DataTrack, ...]:
        """Tracks that the tensors come from, whichever publication has them."""
        return tuple(
            chain.from_iterable(
                self.replaced.get(number, part.tracks) for number, part in enumerate(self._parts)
            )
        )

    def block(self, layer: int, block: int) -> LayerTensors:
        """One block of one layer: [block_tokens, kv_heads, head_dim].

        Args:
            layer: one of `layers`.
            block: absolute index of the block.

        Returns:
            Read-only views, as `layer`.

        Raises:
            UsageError: it is not selected, or not verified in every track.
        """
        part = next((p for p in self._parts if 0 <= block - p.first_block < p.wanted), None)
        if part is None or layer not in self.layers:
            raise UsageError(f"block {block} of layer {layer} was not selected")
        rows = [self._lanes[track].rows.get(layer) for track in part.tracks]
        if layer in self._contradicted or layer in self._dropped:
            raise UsageError(f"layer {layer} was dropped, or contradicts the manifest")
        if any(row is None or row.states[block - part.first_block] != VERIFIED for row in rows):
            raise UsageError(f"block {block} of layer {layer} is not verified")
        size = self.descriptor.block_tokens
        k, v = (array[block * size : (block + 1) * size] for array in self._layer(layer))
        k.flags.writeable = v.flags.writeable = False
        return LayerTensors(layer, k, v)

    def has_segment(self, number: int) -> bool:
        """Whether every selected block of a segment is verified, in every layer and track."""
        part = self._parts[number]
        lanes = [self._lanes[track] for track in part.tracks]
        rows = [lane.rows.get(layer) for lane in lanes for layer in self.layers]
        return all(row is not None and row.leading() == part.wanted for row in rows)

    def take_segment(self, number: int, other: Substitutes) -> None:
        """Take a whole segment from another publication, in place of all that is here of it.

        What still comes of it from this publication is dropped as a copy. Nothing of the segment
        may have been handed out: `layer` gives views.

        Args:
            number: the segment.
            other: holds all of it: the same blocks in the same layers of the same descriptor.

        Raises:
            UsageError: it does not.
        """
        part, theirs = self._parts[number], other._parts[number]
        here, there = (part.first_block, part.wanted), (theirs.first_block, theirs.wanted)
        same = here == there and self.layers == other.layers
        if not same or self.descriptor != other.descriptor or not other.has_segment(number):
            raise UsageError(f"the other publication does not have all of segment {number}")
        size = self.descriptor.block_tokens
        tokens = slice(part.first_block * size, (part.first_block + part.wanted) * size)
        self.replaced[number] = theirs.tracks
        lanes = [self._lanes[track] for track in part.tracks]
        for layer in self.layers:
            rows = [self._row(lane, layer) for lane in lanes]
            for block in range(part.wanted):
                for row in rows:
                    row.take_over(block)
            for mine, its in zip(self._layer(layer), other._layer(layer), strict=True):
                mine[tokens] = its[tokens]
            for lane, row in zip(lanes, rows, strict=True):
                self._places(lane, row, layer)  # its memory is used from now on
                for block in range(part.wanted):
                    if row.states[block] != VERIFIED:
                        self._release(lane, layer, row, block)

    def confirm(self, number: int, listed: Mapping[DataTrack, Sequence[bytes]]) -> bool:
        """Count a segment as another publication's, whose manifest lists just what is here of it.

        What waits for a list is released: it is on that one.

        Args:
            number: the segment.
            listed: for each track and layer of the other segment, the digests of its Objects, one
                after the other; of a manifest whose signature was verified, where ours are.

        Returns:
            Whether all of it is here and listed there.
        """
        part = self._parts[number]
        octets = part.wanted * DIGEST_OCTETS
        waiting: list[tuple[Lane, int, Row, int]] = []
        for track in part.tracks:
            lane, layers = self._lanes[track], listed.get(track, ())
            for layer in self.layers:
                row = lane.rows.get(layer)
                if row is None or OWED in row.states or layer >= len(layers):
                    return False
                if layers[layer][:octets] != bytes(row.digests):
                    return False
                states = enumerate(row.states)
                waiting += [(lane, layer, row, at) for at, state in states if state == WAITING]
        self.replaced[number] = part.tracks
        for each in waiting:
            self._release(*each)
        return True

    def _is_of_another(self, track: DataTrack, location: Location) -> bool:
        """Whether what is verified there need not have the publication's bits."""
        return track.segment in self.replaced or (track, location) in self._supplied

    def supply(self, layer: int, block: int, sections: Mapping[Component, Octets]) -> bool:
        """Take one block's tensors from the consumer itself, which has recomputed them.

        What is verified stays as it is, and what still comes of the block is dropped as a copy.

        Args:
            layer: one of `layers`.
            block: absolute index of the block.
            sections: octets of its K and of its V section.

        Returns:
            Whether anything of it lacked.

        Raises:
            UsageError: no segment that was added has the block, or a section has another length.
        """
        parts = (p for p in self._parts if 0 <= block - p.first_block < p.wanted)
        part = next(parts, None)
        if part is None or layer not in self.layers:
            raise UsageError(f"block {block} of layer {layer} is in no segment that was added")
        lacked = False
        for track in part.tracks:
            location = Location(layer, block - part.first_block)
            lane = self._lanes[track]
            row = self._row(lane, layer)
            if row.states[location.object] == VERIFIED:
                continue
            kinds = (Component.K, Component.V) if track.component is Component.KV else ()
            given = [sections[kind] for kind in kinds or (track.component,)]
            places = self._sections(lane, row, layer, location.object)
            if [len(piece) for piece in given] != [len(place) for place in places]:
                raise UsageError(f"{track} {location}: sections of another length were supplied")
            row.take_over(location.object)
            for place, piece in zip(places, given, strict=True):
                place[:] = piece
            self._supplied.add((track, location))
            self._release(lane, layer, row, location.object, ours=True)
            lacked = True
        return lacked

"""Sealing one segment's Objects: what a layer's sealed octets are and where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcs.kv import HEADER_OCTETS, DataTrack, Descriptor, lookup
from kvcs.kv.layout import BlockLayout
from kvcs.kv.memory import new_memory
from kvcs.kv.payload import BlockEncoder, EncodedBlock
from kvcs.kv.protection import TAG_OCTETS, Sealer, sealed_octets
from kvcs.moqt.names import Location
from kvcs.moqt.wire import encode_vi64

ALIGNED_OCTETS: Final = 64
"""Sections are copied to multiples of this."""

Array = npt.NDArray[Any]


class SegmentSealer:
    """Seals a segment's Objects, each once (KVCS "Security Considerations").

    Args:
        tracks: data tracks of the segment.
        descriptor: the geometry.
        blocks: blocks of the segment.
        padding: blocks of zeros that are sealed behind them.
        sealer: makes the sealer of a data track.
    """

    def __init__(
        self,
        tracks: Sequence[DataTrack],
        descriptor: Descriptor,
        blocks: int,
        padding: int,
        sealer: Callable[[DataTrack], Sealer],
    ) -> None:
        self._blocks = blocks
        self._all = blocks + padding
        self._sealers = {track: sealer(track) for track in tracks}
        self._octets = {track: _fixed_octets(track, descriptor) for track in tracks}

    @property
    def properties(self) -> bytes:
        """Object properties of every sealed payload."""
        return next(iter(self._sealers.values())).properties

    @property
    def layer_octets(self) -> int:
        """Octets of one layer's sealed payloads, as far as they are known before."""
        return self._all * sum(self._octets.values())

    def rooms(self, room: memoryview) -> dict[DataTrack, memoryview]:
        """A layer's room, shared out among its tracks."""
        shares, start = {}, 0
        for track, octets in self._octets.items():
            shares[track] = room[start : start + self._all * octets]
            start += self._all * octets
        return shares

    def seal(
        self,
        track: DataTrack,
        layer: int,
        priority: int,
        encoder: BlockEncoder,
        arrays: Sequence[Array],
        room: memoryview,
    ) -> list[EncodedBlock]:
        """Encode, hash and seal the blocks of one track of a layer, padding behind the real ones.

        Args:
            track: the data track.
            layer: its Group.
            priority: Publisher Priority of its Objects; it cannot change any more.
            encoder: encoder of the track.
            arrays: the sections of all blocks, [blocks * block_tokens, kv_heads, dim].
            room: where the sealed payloads go, one behind the other; those of a codec whose Data
                has no fixed length get memory of their own.
        """
        if self._octets[track]:
            return self._seal_in_place(layer, priority, encoder, arrays, room, self._sealers[track])
        tokens = len(arrays[0]) // self._blocks
        sealed: list[EncodedBlock] = []
        zeros = [np.zeros_like(array[:tokens], order="C") for array in arrays]
        for block in range(self._all):
            location = Location(layer, block)
            sections = zeros
            if block < self._blocks:
                sections = [
                    np.ascontiguousarray(array[block * tokens : (block + 1) * tokens])
                    for array in arrays
                ]
            plain = encoder.encode(location, sections)
            payload = self._sealers[track].seal(location, priority, plain.parts)
            sealed.append(EncodedBlock((payload,), len(payload), plain.digest))
        return sealed

    def _seal_in_place(
        self,
        layer: int,
        priority: int,
        encoder: BlockEncoder,
        arrays: Sequence[Array],
        room: memoryview,
        sealer: Sealer,
    ) -> list[EncodedBlock]:
        """As `seal`, where Data is the sections themselves: each block is copied to one place,
        hashed and sealed from there while it is in the processor's cache."""
        frame = _Frame(encoder.layout)
        octets, tokens = len(frame.octets) + TAG_OCTETS, len(arrays[0]) // self._blocks
        sealed: list[EncodedBlock] = []
        for block in range(self._all):
            location = Location(layer, block)
            for section, array in zip(frame.sections, arrays, strict=True):
                if block < self._blocks:
                    source = array[block * tokens : (block + 1) * tokens]
                    np.copyto(section, source, casting="no")
                elif block == self._blocks:
                    section[...] = 0
            (header, *_), _, digest = encoder.encode(location, frame.sections)
            frame.header[:] = header
            payload = room[block * octets : (block + 1) * octets]
            sealer.seal_framed(location, priority, frame.octets, payload)
            sealed.append(EncodedBlock((payload,), octets, digest))
        return sealed


class _Frame:
    """Where a payload lies as it is sealed: its length, the header, the sections.

    Args:
        layout: sections of the block.
    """

    def __init__(self, layout: BlockLayout) -> None:
        payload_octets = HEADER_OCTETS + layout.octets
        prefix = encode_vi64(payload_octets)
        start = len(prefix) + HEADER_OCTETS
        # Behind so much that the sections are aligned as arrays should be.
        before = -start % ALIGNED_OCTETS
        memory = new_memory(before + len(prefix) + payload_octets)
        self.octets = memory.data[before:]
        """All of it."""
        self.octets[: len(prefix)] = prefix
        self.header = self.octets[len(prefix) : start]
        """Place of the payload's header."""
        self.sections: list[Array] = []
        """Places of the sections."""
        at = before + start
        for shape, size in zip(layout.shapes, layout.section_octets, strict=True):
            self.sections.append(memory[at : at + size].view(layout.dtype).reshape(shape))
            at += size


def _fixed_octets(track: DataTrack, descriptor: Descriptor) -> int:
    """Octets of each sealed payload of a track; 0 where only encoding tells."""
    codec = lookup(track.codec)
    octets = codec.data_octets(descriptor.layout(track.component)) if codec.in_place else None
    return 0 if octets is None else sealed_octets(HEADER_OCTETS + octets)

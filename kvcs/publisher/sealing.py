"""Sealing one segment's Objects: what a layer's sealed octets are and where they lie."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcs.kv import HEADER_OCTETS, RAW, DataTrack, Descriptor, lookup
from kvcs.kv.arrays import byte_view
from kvcs.kv.layout import BlockLayout
from kvcs.kv.memory import commit, new_memory
from kvcs.kv.payload import BlockEncoder, EncodedBlock
from kvcs.kv.protection import TAG_OCTETS, Sealer, sealed_octets
from kvcs.moqt.names import Location
from kvcs.moqt.wire import encode_vi64
from kvcs.publisher.steps import STEP_OCTETS, Steps

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
    ) -> Steps[list[EncodedBlock]]:
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
            sealer = self._sealers[track]
            return (yield from self._seal_in_place(layer, priority, encoder, arrays, room, sealer))
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
    ) -> Steps[list[EncodedBlock]]:
        """As `seal`, where Data is the sections themselves: each block is copied to one place,
        hashed and sealed from there while it is in the processor's cache."""
        frame = _Frame(encoder.layout)
        octets, count = len(frame.octets) + TAG_OCTETS, self._blocks
        fill = frame.filler(arrays, count)
        run = sealer.run(layer, range(self._all), priority, len(frame.octets))
        digest_of = frame.digest if encoder.codec is RAW else None
        sealed: list[EncodedBlock] = []
        step = max(1, STEP_OCTETS // octets)
        for block in range(self._all):
            if block % step == 0:
                if block:
                    yield
                commit(np.frombuffer(room[block * octets : (block + step) * octets], np.uint8))
            if block < count:
                fill(block)
            elif block == count:
                frame.data[:] = bytes(len(frame.data))
            if digest_of is not None:
                digest = digest_of()
            else:
                # A codec of one's own is asked for each block, as it is where nothing is sealed.
                digest = encoder.encode(Location(layer, block), frame.sections).digest
            encoder.write_header(frame.header, layer, block, digest)
            payload = room[block * octets : (block + 1) * octets]
            run.seal_next(frame.octets, payload)
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
        self.data = self.octets[start:]
        """Place of Data: the sections, one behind the other."""
        self.sections: list[Array] = []
        """Places of the sections."""
        at = before + start
        for shape, size in zip(layout.shapes, layout.section_octets, strict=True):
            self.sections.append(memory[at : at + size].view(layout.dtype).reshape(shape))
            at += size

    def digest(self) -> bytes:
        """SHA-256 of Data."""
        return hashlib.sha256(self.data).digest()

    def filler(self, arrays: Sequence[Array], blocks: int) -> Callable[[int], None]:
        """What copies a block to the sections.

        Args:
            arrays: the sections of so many blocks, one behind the other.
            blocks: how many.
        """
        if not all(array.flags.c_contiguous for array in arrays):
            tokens = len(arrays[0]) // blocks

            def strided(block: int) -> None:
                rows = slice(block * tokens, (block + 1) * tokens)
                for section, array in zip(self.sections, arrays, strict=True):
                    np.copyto(section, array[rows], casting="no")

            return strided
        # As octets: numpy would let go of the interpreter for each, and wait to get it again.
        cuts = [
            (byte_view(section), byte_view(array), section.nbytes)
            for section, array in zip(self.sections, arrays, strict=True)
        ]

        def whole(block: int) -> None:
            for section, octets, size in cuts:
                section[:] = octets[block * size : (block + 1) * size]

        return whole


def _fixed_octets(track: DataTrack, descriptor: Descriptor) -> int:
    """Octets of each sealed payload of a track; 0 where only encoding tells."""
    codec = lookup(track.codec)
    octets = codec.data_octets(descriptor.layout(track.component)) if codec.in_place else None
    return 0 if octets is None else sealed_octets(HEADER_OCTETS + octets)

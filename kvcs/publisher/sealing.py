"""Sealing one segment's Objects: what a layer's sealed octets are and where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcs.kv import HEADER_OCTETS, DataTrack, Descriptor, lookup
from kvcs.kv.payload import BlockEncoder, EncodedBlock
from kvcs.kv.protection import Sealer, sealed_octets
from kvcs.moqt.names import Location

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
        octets, sealer = self._octets[track], self._sealers[track]
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
            place = room[block * octets : (block + 1) * octets] if octets else None
            payload = sealer.seal(location, priority, plain.parts, place)
            sealed.append(EncodedBlock((payload,), len(payload), plain.digest))
        return sealed


def _fixed_octets(track: DataTrack, descriptor: Descriptor) -> int:
    """Octets of each sealed payload of a track; 0 where only encoding tells."""
    codec = lookup(track.codec)
    octets = codec.data_octets(descriptor.layout(track.component)) if codec.in_place else None
    return 0 if octets is None else sealed_octets(HEADER_OCTETS + octets)

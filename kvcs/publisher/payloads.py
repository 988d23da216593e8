"""Payloads of a segment's layers: arrays are copied, encoded and hashed, or sealed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcs.kv import RAW, Component, DataTrack, Descriptor
from kvcs.kv.arrays import byte_view
from kvcs.kv.memory import commit
from kvcs.kv.payload import BlockEncoder, EncodedBlock
from kvcs.moqt.names import Location
from kvcs.publisher.sealing import SegmentSealer
from kvcs.publisher.steps import RUN_OCTETS, STEP_OCTETS, Steps, finished

THREAD_OCTETS = 1 << 20
"""Layers of more octets than this are copied and hashed in a thread, off the event loop; or on it,
a step at a time."""

PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
"""Processors that this process may use; None where nobody can tell."""

FEW_PROCESSORS: Final = 2
"""So many have no room for a thread beside the two ends of a connection. There it only takes the
interpreter from the event loop at each block and back: a tenth of what a producer costs in all."""

Array = npt.NDArray[Any]


def is_large(octets: int) -> bool:
    """Whether so many octets are too many to be copied and hashed in one go on the event loop."""
    return octets > THREAD_OCTETS


class LayerPayloads:
    """Makes the payloads of a segment's layers, by track and block.

    Args:
        tracks: the data tracks.
        descriptor: the geometry.
        first_block: absolute index of the segment's first block.
        blocks: whole blocks of the segment.
        max_data_octets: largest Data of one Object.
        sealer: seals them; None where the publication is not protected.
    """

    def __init__(
        self,
        tracks: Sequence[DataTrack],
        descriptor: Descriptor,
        first_block: int,
        blocks: int,
        max_data_octets: int,
        sealer: SegmentSealer | None,
    ) -> None:
        self._tracks = tracks
        self._descriptor = descriptor
        self._blocks = blocks
        self._sealer = sealer
        self._encoders = {
            track: BlockEncoder(track, first_block, descriptor, max_data_octets) for track in tracks
        }
        # Only our own codec is known to take little time for a block.
        self._quick = all(encoder.codec is RAW for encoder in self._encoders.values())

    async def make(
        self,
        layer: int,
        priority: int,
        arrays: Sequence[Array],
        room: memoryview | None,
        large: bool,
    ) -> list[list[EncodedBlock]]:
        """Copy, encode and hash each block, once, or seal it.

        Args:
            layer: the layer.
            priority: Publisher Priority of its Objects.
            arrays: the producer's arrays, K then V.
            room: where copies or sealed payloads go; None keeps views of the arrays.
            large: whether it takes so long that others have turns meanwhile; see `is_large`.

        Cancelled, it may go on in a thread for a while.
        """
        steps = self._steps(layer, priority, arrays, room)
        if not large:
            return finished(steps)
        if not self._quick or PROCESSORS is None or PROCESSORS > FEW_PROCESSORS:
            return await asyncio.to_thread(finished, steps)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                made: list[list[EncodedBlock]] = end.value
                return made
            await asyncio.sleep(0)

    def _steps(
        self, layer: int, priority: int, arrays: Sequence[Array], room: memoryview | None
    ) -> Steps[list[list[EncodedBlock]]]:
        held = arrays if room is None or self._sealer is not None else _placed(arrays, room)
        pairs = tuple(zip(held, arrays, strict=True))
        by_component = {Component.K: pairs[:1], Component.V: pairs[1:], Component.KV: pairs}
        made: list[list[EncodedBlock]] = []
        if self._sealer is None or room is None:
            for name in self._tracks:
                made.append((yield from self._encode(layer, name, by_component[name.component])))
            return made
        for name, share in self._sealer.rooms(room).items():
            sources = [source for _, source in by_component[name.component]]
            sealing = self._sealer.seal(name, layer, priority, self._encoders[name], sources, share)
            made.append((yield from sealing))
        return made

    def _encode(
        self, layer: int, name: DataTrack, arrays: Sequence[tuple[Array, Array]]
    ) -> Steps[list[EncodedBlock]]:
        encoder = self._encoders[name]
        if encoder.codec is RAW:
            return (yield from self._encode_in_place(layer, encoder, arrays))
        size = self._descriptor.block_tokens
        encoded: list[EncodedBlock] = []
        for block in range(self._blocks):
            sections: list[Array] = []
            for held, source in arrays:
                section = held[block * size : (block + 1) * size]
                if held is not source:
                    np.copyto(section, source[block * size : (block + 1) * size], casting="no")
                sections.append(section)
            made = encoder.encode(Location(layer, block), sections)
            if not encoder.codec.in_place:
                # Its pieces may be views of what the caller goes on to use.
                made = made._replace(parts=tuple(memoryview(bytes(part)) for part in made.parts))
            encoded.append(made)
        return encoded

    def _encode_in_place(
        self, layer: int, encoder: BlockEncoder, arrays: Sequence[tuple[Array, Array]]
    ) -> Steps[list[EncodedBlock]]:
        """As `_encode`, where Data is the arrays themselves and no codec is to be asked."""
        tokens, blocks = self._descriptor.block_tokens, self._blocks
        sections = [byte_view(held) for held, _ in arrays]
        # Run by run: each is hashed while it is in the processor's cache.
        run = max(1, RUN_OCTETS // encoder.layout.octets)
        encoded: list[EncodedBlock] = []
        done = 0
        for first in range(0, blocks, run):
            stop = min(first + run, blocks)
            part = slice(first * tokens, stop * tokens)
            for held, source in arrays:
                if held is not source:
                    commit(held[part])
                    np.copyto(held[part], source[part], casting="no")
            encoded += encoder.encode_run(layer, range(first, stop), sections)
            done += (stop - first) * encoder.layout.octets
            if done >= STEP_OCTETS:
                done = 0
                yield
        return encoded


def _placed(arrays: Sequence[Array], octets: memoryview) -> tuple[Array, ...]:
    """Arrays like ``arrays`` that lie one behind the other in ``octets``."""
    placed, start = [], 0
    for array in arrays:
        piece = octets[start : start + array.nbytes]
        placed.append(np.frombuffer(piece, np.uint8).view(array.dtype).reshape(array.shape))
        start += array.nbytes
    return tuple(placed)

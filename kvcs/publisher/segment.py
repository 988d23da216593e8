"""`Segment`: takes the layers of a run of blocks and publishes their Objects."""

from __future__ import annotations

import asyncio
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcs.errors import UsageError
from kvcs.kv import as_host_array, lookup
from kvcs.kv.payload import EncodedBlock
from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import OBJECT_BOOKKEEPING_OCTETS
from kvcs.observe import metrics
from kvcs.publisher.encodings import tracks_of
from kvcs.publisher.payloads import LayerPayloads, is_large
from kvcs.publisher.sealing import SegmentSealer

if TYPE_CHECKING:
    from kvcs.publisher.publication import Publication

END_OF_TRACK_PRIORITY = 127
"""Publisher Priority of the Group that ends a data track, behind every layer."""

Array = npt.NDArray[Any]


def layer_priority(layer: int, layers: int) -> int:
    """Publisher Priority of a layer's Objects: floor(128 * layer / layers) (KVCS "Objects")."""
    return 128 * layer // layers


class Segment:
    """A contiguous run of whole blocks; made by `Publication.segment`.

    Layers are put in order, each once. Layer g is Group g of the segment's data tracks and block b
    its Object b; behind the last Object comes End of Group, and behind the last layer End of Track
    (KVCS "Groups").
    """

    def __init__(
        self, publication: Publication, number: int, first_block: int, blocks: int
    ) -> None:
        descriptor = publication.prefix.descriptor
        self.number = number
        """Segment number."""
        self.first_block = first_block
        """Absolute index of the first block."""
        self.blocks = blocks
        """Whole blocks."""
        self.padding_blocks = publication.padding(blocks)
        """Blocks of zeros that every layer has behind the real ones."""
        self.tokens = blocks * descriptor.block_tokens
        """Tokens that every layer's arrays have."""
        self.layers_put = 0
        """Layers published so far."""
        self.layers_in_manifest = 0
        """Layers that the newest manifest version lists; the publication keeps it."""
        self.objects = 0
        """Objects with a payload published so far."""
        self.octets = 0
        """Their payload octets."""
        self.track_names = tracks_of(publication.encodings, descriptor, number)
        """Names of the data tracks."""
        self._publication = publication
        self._descriptor = descriptor
        self._tracks = {name: publication.new_track(name.name) for name in self.track_names}
        self._sealer = (
            SegmentSealer(
                self.track_names,
                descriptor,
                blocks,
                self.padding_blocks,
                publication.data_sealer,
            )
            if publication.is_protected
            else None
        )
        self._payloads = LayerPayloads(
            self.track_names,
            descriptor,
            first_block,
            blocks,
            publication.max_data_octets,
            self._sealer,
        )
        self._sealed = 0
        """Layers of which something was sealed, and so cannot be sealed again."""
        self._expected = 0
        self._turn = asyncio.Lock()

    @property
    def tracks(self) -> tuple[Track, ...]:
        """The data tracks, in the order of `track_names`."""
        return tuple(self._tracks.values())

    @property
    def complete(self) -> bool:
        """Whether every layer was put."""
        return self.layers_put == self._descriptor.layers

    async def put(self, layer: int, k: object, v: object = None, *, lend: bool = False) -> None:
        """Publish one layer as soon as it is computed.

        The arrays are copied before this returns, so an engine may overwrite them then. It waits
        for copying and hashing, never for a consumer.

        Args:
            layer: the model's layer index; layers come in order, each once.
            k: keys, [segment.tokens, kv_heads, head_dim] of the descriptor's dtype: all blocks of
                the segment and nothing beyond, so a prompt's last tokens that fill no block are
                cut off by ``k[:segment.tokens]``; numpy, or anything that shares host memory. The
                joint tensor where the model has latent attention.
            v: values, [segment.tokens, kv_heads, v_head_dim]; left out for latent attention.
            lend: keep views instead of copies: the arrays must stay unchanged until the
                publication is closed, and be C-contiguous. Where the publication is protected,
                sealing copies them all the same.

        Raises:
            UsageError: another layer is due, a shape or dtype is wrong, or the publication has
                ended. Nothing of the layer is published.
            StoreFull: the copies fit neither the store nor the spill folder.
            ConnectionClosed: every session of the Publisher has ended.

        Cancelling leaves the layer unpublished; it may be put again. Where the publication is
        protected and sealing had begun, nothing can be sealed a second time: the publication is
        aborted, then and where putting the layer fails otherwise.
        """
        layer = self._check_turn(layer)
        arrays = self._arrays(layer, k, v)
        self._expected = layer + 1
        try:
            async with self._turn:
                if layer != self.layers_put:
                    raise UsageError(
                        f"layer {layer} of segment {self.number} was put while layer"
                        f" {self.layers_put} was on its way, which failed; put that again first"
                    )
                await self._publish(layer, arrays, lend)
        except BaseException:
            if self.layers_put <= layer:
                self._expected = self.layers_put
                if self._sealed > layer:
                    self._publication.abort(
                        f"layer {layer} was sealed and not published, and nothing is sealed twice;"
                        " start a new publication"
                    )
            raise

    def finish(self) -> None:
        """Check that every layer was put.

        Raises:
            UsageError: layers lack; the message says from which on.
        """
        if not self.complete:
            raise UsageError(
                f"segment {self.number} is not complete: {self.layers_put} of"
                f" {self._descriptor.layers} layers were put"
            )

    # Inner workings

    def _check_turn(self, layer: int) -> int:
        self._publication.check_open()
        try:
            layer = index(layer)  # an integer of numpy, too
        except TypeError:
            raise UsageError(
                f"put takes the layer's index first, then k and v, not {type(layer).__name__}"
            ) from None
        layers = self._descriptor.layers
        if not 0 <= layer < layers:
            raise UsageError(f"layer {layer} does not exist; the model has layers 0..{layers - 1}")
        if layer < self._expected:
            raise UsageError(f"layer {layer} of segment {self.number} was put already")
        if layer > self._expected:
            raise UsageError(
                f"layer {layer} of segment {self.number} came before layer {self._expected};"
                " layers are put in order"
            )
        return layer

    def _arrays(self, layer: int, k: object, v: object) -> tuple[Array, ...]:
        descriptor = self._descriptor
        dtype, heads = descriptor.numpy_dtype, descriptor.kv_heads
        keys = as_host_array(
            k, dtype, (self.tokens, heads, descriptor.head_dim), f"k of layer {layer}"
        )
        if descriptor.latent:
            if v is not None:
                raise UsageError("latent attention has one tensor per layer; leave v out")
            return (keys, np.empty((self.tokens, heads, 0), dtype))
        if v is None:
            raise UsageError(f"v of layer {layer} is missing")
        shape = (self.tokens, heads, descriptor.v_head_dim)
        return (keys, as_host_array(v, dtype, shape, f"v of layer {layer}"))

    async def _publish(self, layer: int, arrays: tuple[Array, ...], lend: bool) -> None:
        publication = self._publication
        sealer = self._sealer
        octets = sum(array.nbytes for array in arrays)
        # Of what only encoding tells the length of, the sealer takes no room here.
        kept = octets if sealer is None else sealer.layer_octets
        bookkeeping = (
            OBJECT_BOOKKEEPING_OCTETS * (self.blocks + self.padding_blocks) * len(self.track_names)
        )
        large = is_large(max(octets, kept))
        if large:
            # What was put before is handed over first: beside what is hashed it takes long.
            await asyncio.sleep(0)
        publication.memory.reserve(bookkeeping)
        charged = bookkeeping
        try:
            room: memoryview | None = None
            if sealer is not None or not lend:
                given = publication.memory.room(kept)
                charged += given.charged
                room = given.octets
            if sealer is not None:
                # Before it is begun: cancelled now, a thread may seal all the same.
                self._sealed = layer + 1
            priority = layer_priority(layer, self._descriptor.layers)
            payloads = await self._payloads.make(layer, priority, arrays, room, large)
            # What a codec has made lies beside the copies of the arrays.
            made = sum(
                octets
                for name, blocks in zip(self.track_names, payloads, strict=True)
                if not lookup(name.codec).in_place
                for _, octets, _ in blocks
            )
            publication.memory.reserve(made)
            charged += made
            publication.charge(charged)
        except BaseException:
            publication.memory.budget.release(charged)
            raise
        self._send(layer, payloads)

    def _send(self, layer: int, payloads: list[list[EncodedBlock]]) -> None:
        publication = self._publication
        now, layers = publication.now, self._descriptor.layers
        priority = layer_priority(layer, layers)
        properties = b"" if self._sealer is None else self._sealer.properties
        for name, blocks in zip(self.track_names, payloads, strict=True):
            track = self._tracks[name]
            payload_octets = sum(each[1] for each in blocks)
            metrics.published(name.component.value, name.codec, len(blocks), payload_octets)
            run = [
                (
                    ObjectHeader(
                        layer, block, 0, priority, ObjectStatus.NORMAL, properties, octets
                    ),
                    parts,
                )
                for block, (parts, octets, _) in enumerate(blocks)
            ]
            track.publish_run(run, now, end_of_group=True, octets=0)
            self.objects += len(blocks)
            self.octets += payload_octets
            self._status(track, layer, len(blocks), priority, ObjectStatus.END_OF_GROUP)
            publication.writer.add_group(name, [block.digest for block in blocks[: self.blocks]])
        self.layers_put = layer + 1
        if self.complete:
            publication.writer.complete(self.number)
        publication.layer_completed(self, self._end_tracks)

    def _end_tracks(self) -> None:
        """End the data tracks; a manifest that says so is published."""
        layers = self._descriptor.layers
        for track in self._tracks.values():
            # Alone in a Group of its own: some readers stop a stream at its first status.
            self._status(track, layers, 0, END_OF_TRACK_PRIORITY, ObjectStatus.END_OF_TRACK)
            track.end(PublishDoneCode.TRACK_ENDED)

    def _status(
        self, track: Track, group_id: int, object_id: int, priority: int, status: ObjectStatus
    ) -> None:
        header = ObjectHeader(group_id, object_id, 0, priority, status, b"", 0)
        track.publish(header, (), self._publication.now, end_of_group=True, octets=0)
        track.finish_subgroup(group_id, 0)

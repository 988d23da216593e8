"""`Passes`: chunks of any length, published in whole blocks (KVCS "Groups").

An engine's chunked prefill cuts the tokens where it likes; each chunk passes through all layers. A
segment has whole blocks, so what does not fill one waits for the next pass, layer by layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcs.errors import UsageError
from kvcs.kv import Prefix, as_host_array

if TYPE_CHECKING:
    from kvcs.publisher.publication import Publication
    from kvcs.publisher.segment import Segment

Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""K and V of some tokens of one layer."""


def extended(ours: Prefix, longer: Prefix) -> Prefix:
    """A prefix that continues a publication's.

    Raises:
        UsageError: it is another one.
    """
    same = (longer.scope_id, longer.compat_id) == (ours.scope_id, ours.compat_id)
    if not same or longer.block_keys[: ours.blocks] != ours.block_keys:
        raise UsageError(
            f"the prefix of {longer.blocks} blocks does not begin with the {ours.blocks} of the"
            " publication"
        )
    return longer


class Passes:
    """Takes a prefix's tokens chunk by chunk; made by `Publication.passes`.

    Segment 0 has the blocks that name the publication: until so many are there, chunks are held,
    and what a chunk has beyond them is a segment behind it.
    """

    def __init__(self, publication: Publication, first_blocks: int) -> None:
        self.tokens = 0
        """Tokens of all passes so far."""
        self.blocks = 0
        """Whole blocks of these that are in segments."""
        self._publication = publication
        self._first_blocks = first_blocks
        self._last: Pass | None = None

    @property
    def first_tokens(self) -> int:
        """Tokens of segment 0."""
        return self._first_blocks * self._publication.prefix.descriptor.block_tokens

    @property
    def held(self) -> int:
        """Tokens that wait for the next pass, or, after the last one, are in no segment."""
        return self.tokens - self.blocks * self._publication.prefix.descriptor.block_tokens

    async def next(self, tokens: int) -> Pass:
        """Begin with the next chunk.

        Args:
            tokens: how many it has, at least one; they follow those of the former passes.

        Raises:
            UsageError: the prefix has not so many left, layers of the former pass were not put, or
                the publication has ended.
            ConnectionClosed: every session has ended.
        """
        publication = self._publication
        publication.check_open()
        left = len(publication.prefix.token_ids) - self.tokens
        if not 1 <= tokens <= left:
            raise UsageError(f"a pass of {tokens} tokens; {left} of the prefix's are left")
        self.check()
        size = publication.prefix.descriptor.block_tokens
        blocks = (self.held + tokens) // size
        sizes = [blocks]
        if not self.blocks:
            sizes = [] if blocks < self._first_blocks else [self._first_blocks]
            sizes += [blocks - self._first_blocks] if sizes else []
        segments = [await publication.segment(count) for count in sizes if count]
        self._last = Pass(publication, tokens, tuple(segments), self._last)
        self.tokens += tokens
        self.blocks += sum(segment.blocks for segment in segments)
        return self._last

    def check(self) -> None:
        """Check that every layer of the last pass was put.

        Raises:
            UsageError: layers lack; the message says from which on.
        """
        if self._last is not None:
            self._last.check()

    async def finish(self) -> int:
        """Check that all is published; the publication is served until it is closed.

        Returns:
            Tokens at the end that fill no block, or not the blocks of segment 0: they are in no
            segment.

        Raises:
            UsageError: layers lack, or segment 0 was not reached.
        """
        self.check()
        await self._publication.finish()
        return self.held


class Pass:
    """One chunk's way through the layers; made by `Passes.next`."""

    def __init__(
        self,
        publication: Publication,
        tokens: int,
        segments: tuple[Segment, ...],
        former: Pass | None,
    ) -> None:
        self.tokens = tokens
        """Tokens that every layer's arrays have: those of the chunk."""
        self.segments = segments
        """Segments that it fills: one, as a rule; none where no block becomes whole."""
        self.layers_put = 0
        """Layers that are published, as far as they fill blocks."""
        self._descriptor = publication.prefix.descriptor
        self._held: list[Arrays | None] = [None] * self._descriptor.layers
        if former is not None:
            self._held = former._rest
        self._rest: list[Arrays | None] = [None] * self._descriptor.layers
        self._due = 0

    async def put(self, layer: int, k: object, v: object = None, *, lend: bool = False) -> None:
        """Publish one layer of the chunk as soon as it is computed, as `Segment.put` does.

        Args:
            layer: the model's layer index; layers come in order, each once.
            k: keys, [tokens, kv_heads, head_dim] of the descriptor's dtype: all of the chunk.
            v: values, [tokens, kv_heads, v_head_dim]; left out for latent attention.
            lend: keep views instead of copies, where the chunk's blocks are whole as they come.

        Raises:
            UsageError: another layer is due, or as `Segment.put`.
            StoreFull: as `Segment.put`; it may be put again.
            ConnectionClosed: every session of the Publisher has ended.
        """
        if layer != self._due:
            raise UsageError(f"layer {layer} of a pass came where layer {self._due} is due")
        arrays = self._with_held(layer, self._arrays(layer, k, v))
        size = self._descriptor.block_tokens
        whole = sum(segment.blocks for segment in self.segments) * size
        rest = tuple(array[whole:] for array in arrays)
        # The engine's arrays are its own again when this returns.
        self._rest[layer] = (rest[0].copy(), rest[1].copy()) if len(rest[0]) else None
        self._due = layer + 1
        first = 0
        try:
            for segment in self.segments:
                last = first + segment.blocks * size
                if segment.layers_put <= layer:  # not where a former try has come so far
                    mine = [np.ascontiguousarray(array[first:last]) for array in arrays]
                    v_part = None if self._descriptor.latent else mine[1]
                    await segment.put(layer, mine[0], v_part, lend=lend)
                first = last
        except BaseException:
            self._due = min(self._due, layer)
            raise
        self.layers_put = layer + 1

    def check(self) -> None:
        """Check that every layer was put.

        Raises:
            UsageError: layers lack.
        """
        layers = self._descriptor.layers
        if self.layers_put < layers:
            raise UsageError(f"the last pass has {self.layers_put} of {layers} layers")

    def _arrays(self, layer: int, k: object, v: object) -> Arrays:
        descriptor = self._descriptor
        dtype, heads = descriptor.numpy_dtype, descriptor.kv_heads
        shape = (self.tokens, heads, descriptor.head_dim)
        keys = as_host_array(k, dtype, shape, f"k of layer {layer}")
        if descriptor.latent:
            if v is not None:
                raise UsageError("latent attention has one tensor per layer; leave v out")
            return keys, np.empty((self.tokens, heads, 0), dtype)
        if v is None:
            raise UsageError(f"v of layer {layer} is missing")
        shape = (self.tokens, heads, descriptor.v_head_dim)
        return keys, as_host_array(v, dtype, shape, f"v of layer {layer}")

    def _with_held(self, layer: int, arrays: Arrays) -> Arrays:
        held = self._held[layer]
        if held is None:
            return arrays
        k, v = (np.concatenate(pair) for pair in zip(held, arrays, strict=True))
        return k, v

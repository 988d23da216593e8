"""Caches of Hugging Face transformers that publish as they fill, or fill as layers arrive.

The only module of this adapter that imports both libraries at once; its front is
`kvcs.integrations.transformers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvcs.errors import UsageError
from kvcs.integrations.handover import DEFAULT_AHEAD, Outlet, TakesLayers
from kvcs.integrations.model_passes import Turns
from kvcs.kv import LayerTensors

Tensor = Any
"""A torch tensor; torch is not there when types are checked."""

OnLayer = Callable[[int], None]
"""Called in the model's thread with a layer's index."""

_SAME_WIDTH = {"bfloat16": (np.int16, torch.bfloat16)} | {
    name: (np.uint8, getattr(torch, name)) for name in ("float8_e4m3fn", "float8_e5m2")
}
"""dtypes that torch cannot take from numpy: the bits travel as integers."""


class Pass(TakesLayers, Protocol):
    """A run of blocks that one pass of the model computes; `kvcs.Segment` is one."""

    @property
    def tokens(self) -> int:
        """Tokens that every layer has."""


def as_heads_first(array: npt.NDArray[Any], device: Any = None) -> Tensor:
    """Copy an array [tokens, heads, dim] into a tensor [1, heads, tokens, dim].

    Args:
        array: any dtype of `kvcs.kv.layout.DTYPES`; may be read-only.
        device: where the tensor is to lie; the host by default.
    """
    copied = array.transpose(1, 0, 2).copy()
    bits, dtype = _SAME_WIDTH.get(array.dtype.name, (None, None))
    tensor = torch.from_numpy(copied if bits is None else copied.view(bits))
    if dtype is not None:
        tensor = tensor.view(dtype)
    return tensor.unsqueeze(0).to(device)


def as_tokens_first(states: Tensor, tokens: int | None = None) -> Tensor:
    """View a tensor [1, heads, tokens, dim] as [tokens, heads, dim] in host memory.

    Args:
        states: keys or values of one layer; copied only where it lies on a device.
        tokens: the first so many; all by default.

    Raises:
        UsageError: a batch of more than one sequence.
    """
    if states.ndim != 4 or states.shape[0] != 1:
        raise UsageError(
            "expected one sequence, [1, heads, tokens, dim], got"
            f" {list(states.shape)}; publish each sequence of a batch by itself"
        )
    return states[0, :, :tokens].detach().transpose(0, 1).cpu()


def layer_tensors(cache: Any, tokens: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of each layer of a cache, [tokens, heads, dim], as views.

    Args:
        cache: a `DynamicCache` of one sequence.
        tokens: the first so many; all by default.

    Raises:
        UsageError: a layer is empty, has fewer tokens, or is of another kind than full attention.
    """
    for index, layer in enumerate(cache.layers):
        _check_plain(index, layer)
        held = layer.get_seq_length()
        if held < (1 if tokens is None else tokens):
            wanted = "some" if tokens is None else tokens
            raise UsageError(f"layer {index} holds {held} tokens, expected {wanted}")
        yield as_tokens_first(layer.keys, tokens), as_tokens_first(layer.values, tokens)


def filled_cache(layers: Iterable[LayerTensors], config: Any = None, device: Any = None) -> Any:
    """A `DynamicCache` of layers that are all here.

    Args:
        layers: every layer of the model, in order.
        config: the model's, which makes sure that it has full attention only.
        device: where the model computes.

    Raises:
        UsageError: layers are missing, or the model keeps other layers than full attention.
    """
    cache = _plain_cache(config)
    wanted, given = len(cache.layers), 0
    for layer in layers:
        if layer.index != given or (config is not None and given >= wanted):
            raise UsageError(f"layer {layer.index} came where the model has layer {given}")
        cache.update(as_heads_first(layer.k, device), as_heads_first(layer.v, device), given)
        given += 1
    if given < wanted:
        raise UsageError(f"{given} layers came, where the model has {wanted}")
    return cache


def _plain_cache(config: Any) -> Any:
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        _check_plain(index, layer)
    return cache


def _check_plain(index: int, layer: Any) -> None:
    # A subclass keeps something else, or not everything.
    if type(layer) is not DynamicLayer:
        raise UsageError(
            f"layer {index} keeps a {type(layer).__name__}; only layers of full attention, which"
            " keep the keys and values of every token, can be published"
        )


def _plain_copy(cache: Any, memo: dict[int, Any]) -> Any:
    copied = memo[id(cache)] = DynamicCache()
    for index, layer in enumerate(cache.layers):
        if layer.is_initialized:
            copied.update(layer.keys.clone(), layer.values.clone(), index)
    return copied


# Types are checked without the library: to them its class is anything.
class PublishingCache(DynamicCache):  # type: ignore[misc]
    """A `DynamicCache` that publishes each layer of a pass as the model computes it.

    It is an ordinary cache to the model: layer l goes on its way when its keys and values exist,
    before its attention is computed. Give it a segment by `follow` before each pass; passes
    without one, decoding for example, publish nothing.

    Args:
        config: the model's.
        ahead: layers that the model may be ahead of their publication.
        on_layer: called in the model's thread with each layer's index once it is computed.

    Raises:
        UsageError: the model keeps other layers than full attention.

    Make it on the event loop and run the model in another thread.
    """

    def __init__(
        self, config: Any = None, *, ahead: int = DEFAULT_AHEAD, on_layer: OnLayer | None = None
    ) -> None:
        super().__init__(config=config)
        for index, layer in enumerate(self.layers):
            _check_plain(index, layer)
        self._outlet = Outlet(ahead)
        self._on_layer = on_layer
        self._pass: Pass | None = None
        self._due = 0

    def follow(self, segment: Pass) -> None:
        """Publish the next pass's layers to `segment`.

        A pass may have more tokens than the segment, those that fill no block; it takes the first.
        """
        self._pass, self._due = segment, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values, and hand them over.

        Raises:
            UsageError: layers come in another order than 0, 1, ..., or a batch is computed.
            HandOverEnded: `stop` was called, or the loop has ended.
            KvcsError: what publishing an earlier layer raised.
        """
        states: tuple[Tensor, Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        # The first layer again: the pass that was followed is over, and this is another.
        if self._pass is not None and 0 == layer_idx < self._due:
            self._pass = None
        if self._pass is not None:
            tokens = self._pass.tokens
            if self._on_layer is not None:
                self._on_layer(layer_idx)
            self._outlet.hand_over(
                self._pass,
                layer_idx,
                as_tokens_first(key_states, tokens),
                as_tokens_first(value_states, tokens),
            )
            self._due = layer_idx + 1
        return states

    async def published(self) -> None:
        """Wait until every layer so far is published.

        Raises:
            KvcsError: what publishing one of them raised.
        """
        await self._outlet.finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An ordinary cache with the same content, for one request; it publishes nothing."""
        return _plain_copy(self, memo)

    def stop(self, reason: str) -> None:
        """Publish nothing more: the model's thread gets `HandOverEnded` at its next layer."""
        self._outlet.stop(reason)


class LayersInThread(Protocol):
    """Gives layers in the model's thread; `kvcs.integrations.handover.Inlet` is one."""

    def layer(self, index: int) -> LayerTensors:
        """A layer; waits for it if need be."""

    def stop(self, reason: str) -> None:
        """Wait for no more."""


# Types are checked without the library: to them its class is anything.
class StreamedCache(DynamicCache):  # type: ignore[misc]
    """A `DynamicCache` whose layers come over the network while the model already computes.

    It says from the start how many tokens it holds. When the model's pass reaches layer l, it
    waits until that layer is verified, and goes on with the attention of layer l while later ones
    are still on the wire. Once all are here it is an ordinary cache.

    Args:
        source: where layers come from.
        layers: layers of the model.
        tokens: tokens of the cache that are used; at most those that the layers have.
        device: where the model computes.
        on_layer: called in the model's thread with each layer's index once it is in place.

    Make it on the event loop and run the model in another thread.
    """

    def __init__(
        self,
        source: LayersInThread,
        layers: int,
        tokens: int,
        *,
        device: Any = None,
        on_layer: OnLayer | None = None,
    ) -> None:
        super().__init__()
        self.layers.extend(DynamicLayer() for _ in range(layers))
        self._source: LayersInThread | None = source
        self._tokens = tokens
        self._device = device
        self._on_layer = on_layer
        self._owed = set(range(layers))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Wait for a layer and extend it by new keys and values.

        Raises:
            UsageError: the layer has another geometry than the model.
            HandOverEnded: `stop` was called, or the loop has ended.
            KvcsError: the layer did not come: what `kvcs.Cache.layer` raises.
        """
        self._place(layer_idx)
        held = self.layers[layer_idx].keys
        if held is not None and (held.shape[1], held.shape[3], held.dtype) != (
            key_states.shape[1],
            key_states.shape[3],
            key_states.dtype,
        ):
            raise UsageError(
                f"layer {layer_idx}: the cache has {held.shape[1]} heads of {held.shape[3]}"
                f" {held.dtype}, the model {key_states.shape[1]} of {key_states.shape[3]}"
                f" {key_states.dtype}"
            )
        states: tuple[Tensor, Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of a layer, also of one that has not come yet."""
        if layer_idx in self._owed:
            return self._tokens
        length: int = super().get_seq_length(layer_idx)
        return length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that a query of so many tokens will see."""
        if layer_idx in self._owed:
            return self._tokens + query_length, 0
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def fill(self) -> None:
        """Wait for every layer that has not come yet; called in the model's thread.

        Raises:
            KvcsError: as `update`.
        """
        for index in sorted(self._owed):
            self._place(index)

    def stop(self, reason: str) -> None:
        """Wait for no more layers: the model's thread gets `HandOverEnded`."""
        if self._source is not None:
            self._source.stop(reason)

    # What changes every layer needs them all

    def crop(self, tokens_to_remove: int) -> None:
        """Drop tokens from the end; waits for every layer."""
        self.fill()
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget everything; waits for every layer."""
        self.fill()
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder sequences; waits for every layer."""
        self.fill()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat the sequence; waits for every layer."""
        self.fill()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select sequences; waits for every layer."""
        self.fill()
        super().batch_select_indices(indices)

    def __iter__(self) -> Iterator[Any]:
        """Every layer's keys and values; waits for every layer."""
        self.fill()
        yield from super().__iter__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An ordinary cache with the same content, for one request; waits for every layer."""
        self.fill()
        return _plain_copy(self, memo)

    def _place(self, index: int) -> None:
        if index not in self._owed or self._source is None:
            return
        tensors = self._source.layer(index)
        layer = self.layers[index]
        keys, values = (
            as_heads_first(array[: self._tokens], self._device) for array in (tensors.k, tensors.v)
        )
        # `update` would join them to nothing, which copies them once more.
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        self._owed.discard(index)
        if not self._owed:
            self._source = None
        if self._on_layer is not None:
            self._on_layer(index)


class RecomputingCache(StreamedCache):
    """The cache of a pass that computes lost tokens of some layers, and stops behind the last.

    Args:
        turns: told of each layer's new keys and values; holds the pass up, or ends it.
        past: what the cache has of the layers below, looked at when a layer is reached.
        layers: layers of the model.
        tokens: tokens before the lost ones, which every layer of ``past`` has.
        device: where the model computes.
    """

    def __init__(
        self,
        turns: Turns,
        past: Mapping[int, LayerTensors],
        layers: int,
        tokens: int,
        *,
        device: Any = None,
    ) -> None:
        super().__init__(_Past(past), layers, tokens, device=device)
        self._turns = turns
        if not tokens:
            self._owed.clear()  # nothing is taken from anywhere

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Give a layer's new keys and values, and go on once a later layer is wanted.

        Raises:
            HandOverEnded: none is.
        """
        self._turns.reached(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class _Past:
    """Layers that are all here."""

    def __init__(self, layers: Mapping[int, LayerTensors]) -> None:
        self._layers = layers

    def layer(self, index: int) -> LayerTensors:
        """A layer."""
        return self._layers[index]

    def stop(self, reason: str) -> None:
        """Nothing is waited for."""

"""Recomputing what a cache lacks with the consumer's own copy of a model, one layer at a time.

A layer's keys and values need the hidden states of their tokens at that layer, so the layers below
are computed for these tokens: l of L layers for a lost layer l, and of layer l itself nothing but
the projections. Nobody else has these states; a pass that goes on behind a cache has those of the
tokens behind it only.
"""

from __future__ import annotations

from typing import Any, Protocol

from kvcs.errors import KvcsError, MissingBlocks, UsageError
from kvcs.integrations.model_descriptors import check_model
from kvcs.integrations.model_passes import RunningPass, States, Turns
from kvcs.kv import LayerTensors, Prefix
from kvcs.subscriber import MissingLayer


class Reading(Protocol):
    """What a `Recomputer` asks of an opened cache; `kvcs.Cache` is one."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Selected layers, ascending."""

    @property
    def missing(self) -> tuple[MissingBlocks, ...]:
        """What lacks now."""

    def layer_now(self, index: int) -> LayerTensors | None:
        """A layer that is whole already."""


class Recomputer:
    """The `recompute` of `kvcs.Subscriber.open`: computes lost layers with a transformers model.

        engine = hf.Recomputer(model, prefix)
        async with kvcs.Subscriber(session).open(prefix, recompute=engine) as streamed:
            engine.follow(streamed)
            cache, logits = await hf.resume(model, streamed)

    For a lost layer l the model runs over the lost tokens through the layers below l, and stops
    there. The next layer that is lost goes on from the same pass, so that losing all layers behind
    l costs no more than computing them once. With `follow`, tokens before the lost ones are taken
    from the cache; without, they are computed again.

    What comes out is what this machine computes: close to the producer's bits, and not always the
    same.

    Args:
        model: the consumer's copy of the model. `resume` may use it at the same time: it stands
            still where it waits for the lost layer.
        prefix: that of the cache.

    Raises:
        DescriptorMismatch: the model is another than the prefix's descriptor says.
        UsageError: as `descriptor_for`.
    """

    def __init__(self, model: Any, prefix: Prefix) -> None:
        check_model(model, prefix.descriptor)
        self._model = model
        self._prefix = prefix
        self._cache: Reading | None = None
        self._pass: RunningPass | None = None
        self._past: dict[int, LayerTensors] = {}
        """Layers of the cache that the pass may look at."""

    def follow(self, cache: Reading) -> None:
        """Take the tokens before lost ones from this cache, which is of the same prefix.

        Raises:
            UsageError: its first layer is not layer 0.
        """
        if cache.layers != tuple(range(len(cache.layers))):
            raise UsageError(
                "a layer is computed from those below: the cache has to begin with layer 0"
            )
        self._cache = cache

    async def __call__(self, missing: MissingLayer) -> States:
        """Keys and values of lost tokens of one layer, [tokens, kv_heads, head_dim].

        Raises:
            KvcsError: the pass was stopped.
            Exception: what the model raised.
        """
        from kvcs.integrations.transformers_caches import as_tokens_first

        layer, first, end = missing.layer, missing.first_token, missing.last_token + 1
        for _ in range(2):  # a pass that stood still may end in just this moment
            running = self._pass_to(layer, first, end)
            states = await running.layer(layer)
            if states is not None:
                part = slice(first - running.start, end - running.start)
                k, v = (as_tokens_first(each)[part] for each in states)
                return k, v
            self._pass = None
        raise KvcsError(f"the pass that recomputes layer {layer} has ended")

    def close(self) -> None:
        """End a pass that stands still; it would end by itself after a few seconds."""
        if self._pass is not None:
            self._pass.stop()
            self._pass = None
        self._past = {}

    def _pass_to(self, layer: int, first: int, end: int) -> RunningPass:
        """A pass that can give some tokens of a layer: the one that runs, or a new one."""
        running = self._pass
        if running is not None and running.covers(layer, first, end):
            if not running.start or self._take_past(layer):
                return running
        self.close()
        past = self._past = {}
        start = first if first and self._take_past(layer) else 0
        self._pass = RunningPass(start, end, lambda turns: self._compute(turns, past, start, end))
        return self._pass

    def _take_past(self, layer: int) -> bool:
        """Note the layers below one as the cache has them; whether all of them are there."""
        if self._cache is None or any(run.layer < layer for run in self._cache.missing):
            return False
        for index in range(layer):
            tensors = self._past.get(index) or self._cache.layer_now(index)
            if tensors is None:
                return False
            self._past[index] = tensors
        return True

    def _compute(self, turns: Turns, past: dict[int, LayerTensors], start: int, end: int) -> None:
        """The model's pass over tokens; called in its thread."""
        import torch

        from kvcs.integrations.transformers_caches import RecomputingCache

        model = self._model
        layers = self._prefix.descriptor.layers
        device = getattr(model, "device", None)
        cache = RecomputingCache(turns, past, layers, start, device=device)
        with torch.no_grad():
            ids = torch.tensor([self._prefix.token_ids[start:end].tolist()], device=device)
            model(ids, cache=cache, use_cache=True, logits_to_keep=1)

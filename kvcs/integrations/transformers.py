"""Hugging Face transformers: publish a prefill layer by layer, decode from a cache that streams in.

    from kvcs.integrations import transformers as hf

    descriptor = hf.descriptor_for(model, weights="sha256:...")
    prefix = kvcs.Prefix(scope, descriptor, token_ids)

    async with kvcs.Publisher(session).publish(prefix) as publication:     # a producer
        cache = await hf.prefill(model, publication)

    async with kvcs.Subscriber(session).open(prefix) as streamed:          # a consumer
        cache, logits = await hf.resume(model, streamed)

`Recomputer` computes what lacks of a cache: give it to `open` as ``recompute``.

The model is the caller's, in host memory or on a device, and so is decoding: `cache` is a
`DynamicCache`, good for `model.generate(...)` or a loop of one's own. torch and transformers are
imported when a function needs them, not before.

A cache that an adapter (LoRA) has changed needs ``extra_identity`` in its `kvcs.Prefix`, and so
does one behind images: equal tokens alone would name different caches alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcs.errors import UsageError
from kvcs.integrations.handover import DEFAULT_AHEAD, Inlet, run_in_thread
from kvcs.integrations.model_descriptors import check_model, decoder_config
from kvcs.integrations.model_descriptors import descriptor_for as descriptor_for
from kvcs.integrations.recomputing import Recomputer as Recomputer
from kvcs.publisher import Publication
from kvcs.subscriber import Cache

if TYPE_CHECKING:
    from kvcs.integrations.transformers_caches import OnLayer


class Resumed(NamedTuple):
    """Where a consumer's model stands behind the prompt."""

    cache: Any
    """`DynamicCache` of every token of the prompt."""

    logits: Any
    """Logits behind the last token, [vocabulary]."""


async def prefill(
    model: Any,
    publication: Publication,
    *,
    chunk_tokens: int | Sequence[int] | None = None,
    ahead: int = DEFAULT_AHEAD,
    on_layer: OnLayer | None = None,
) -> Any:
    """Compute the whole blocks of a publication's prefix and publish each layer when it exists.

    The model runs in a thread of its own. A layer goes on its way before its attention is
    computed. Where the publication was opened with ``first_segment_blocks``, each pass computes so
    many blocks and is a segment; with ``chunk_tokens`` passes are as long as that says, and what
    fills no block waits for the next one.

    Args:
        model: a causal language model; nothing else may run it meanwhile.
        publication: what `kvcs.Publisher.publish` gives; nothing was put yet.
        chunk_tokens: tokens of each pass, or of the passes one by one; the last one takes what is
            left.
        ahead: layers that the model may be ahead of their publication; then it waits.
        on_layer: called in the model's thread with each layer's index once it is computed.

    Returns:
        A `DynamicCache` of the whole blocks. `continue_from` takes it on.

    Raises:
        DescriptorMismatch: the model is another than the prefix's descriptor says.
        UsageError: a pass of less than one token.
        UsageError, StoreFull, ConnectionClosed: as `kvcs.Segment.put`, at the next layer at the
            latest.
        Exception: what the model raised.

    Raised through ``async with publish(...)``, each of them aborts the publication. Cancelling
    stops the model at its next layer.
    """
    from kvcs.integrations.transformers_caches import PublishingCache

    prefix = publication.prefix
    check_model(model, prefix.descriptor)
    cache = PublishingCache(_config(model), ahead=ahead, on_layer=on_layer)
    total = prefix.blocks * prefix.descriptor.block_tokens
    passes = publication.passes()
    sizes = _chunks(total, passes.first_tokens if chunk_tokens is None else chunk_tokens)
    try:
        for tokens in sizes:
            first = passes.tokens
            cache.follow(await passes.next(tokens))
            token_ids = prefix.token_ids[first : first + tokens].tolist()
            await run_in_thread(_pass(model, cache, token_ids), cache.stop)
            await cache.published()
        await passes.finish()
    except BaseException:
        cache.stop("the prefill has failed")
        raise
    return cache


async def resume(
    model: Any,
    cache: Cache,
    token_ids: Sequence[int] | None = None,
    *,
    on_layer: OnLayer | None = None,
) -> Resumed:
    """Compute what a prompt has behind a cache that is streaming in, layer by layer.

    The model runs in a thread of its own and needs only the tokens that the cache lacks: their
    attention in layer l starts when layer l is verified, while later layers are on the wire. If
    the cache has them all, the last token is computed again, since its logits are in no cache.
    Returns once the publication's manifest has confirmed every layer that was used.

    Args:
        model: the consumer's copy of the model; nothing else may run it meanwhile.
        cache: what `kvcs.Subscriber.open` gives, with all layers.
        token_ids: the prompt, whose first tokens are the cache's; by default that of the prefix.
        on_layer: called in the model's thread with each layer's index once it is in place.

    Raises:
        DescriptorMismatch: the model is another than the prefix's descriptor says.
        UsageError: layers were left out, or the prompt begins otherwise than the cache.
        KvcsError: the cache did not come: what `kvcs.Cache.layer` raises. Nothing of it may be
            used then; recompute the prompt.
        Exception: what the model raised.

    Cancelling stops the model at its next layer.
    """
    from kvcs.integrations.transformers_caches import StreamedCache

    prefix = cache.prefix
    descriptor = prefix.descriptor
    check_model(model, descriptor)
    if len(cache.layers) != descriptor.layers:
        raise UsageError(
            f"the cache was opened with {len(cache.layers)} of {descriptor.layers} layers; a model"
            " needs them all"
        )
    held = await cache.settled()
    prompt = prefix.token_ids.tolist() if token_ids is None else list(token_ids)
    if prompt[:held] != prefix.token_ids[:held].tolist():
        raise UsageError(f"the prompt does not begin with the {held} tokens of the cache")
    streamed = StreamedCache(
        Inlet(cache),
        descriptor.layers,
        min(held, len(prompt) - 1),
        device=getattr(model, "device", None),
        on_layer=on_layer,
    )

    def compute() -> Any:
        return continue_from(model, streamed, prompt)

    logits = await run_in_thread(compute, streamed.stop)
    await cache.complete()
    return Resumed(streamed, logits)


def continue_from(model: Any, cache: Any, token_ids: Sequence[int]) -> Any:
    """Run a model over the tokens of a prompt that its cache lacks; synchronous.

    Args:
        model: a causal language model.
        cache: a `DynamicCache` of the first tokens of the prompt; it is extended. If it has them
            all, the last one is dropped and computed again.
        token_ids: the prompt, at least one token.

    Returns:
        Logits behind the last token, [vocabulary].

    Raises:
        UsageError: an empty prompt, or one shorter than the cache.
    """
    held = cache.get_seq_length()
    if not token_ids or held > len(token_ids):
        raise UsageError(f"a prompt of {len(token_ids)} tokens, where the cache holds {held}")
    if held == len(token_ids):
        cache.crop(-1)
        held -= 1
    return _pass(model, cache, list(token_ids[held:]))()


def from_dynamic_cache(cache: Any, tokens: int | None = None) -> list[tuple[Any, Any]]:
    """Keys and values of a `DynamicCache` as `kvcs.Segment.put` takes them.

    Args:
        cache: of one sequence, full attention only.
        tokens: the first so many; all by default.

    Returns:
        For each layer two tensors [tokens, kv_heads, head_dim]: views, where the cache is in host
        memory.

    Raises:
        UsageError: a batch, a layer of another kind, or one with fewer tokens.
    """
    from kvcs.integrations.transformers_caches import layer_tensors

    return list(layer_tensors(cache, tokens))


async def to_dynamic_cache(cache: Cache, model: Any) -> Any:
    """Wait for a whole cache and make a `DynamicCache` of it.

    `resume` is sooner done: it computes while layers come.

    Args:
        cache: what `kvcs.Subscriber.open` gives, with all layers.
        model: the consumer's copy of the model.

    Raises:
        DescriptorMismatch: the model is another than the prefix's descriptor says.
        UsageError: layers were left out.
        KvcsError: the cache did not come: what `kvcs.Cache.layer` raises.
    """
    from kvcs.integrations.transformers_caches import filled_cache

    check_model(model, cache.prefix.descriptor)
    layers = [layer async for layer in cache]
    return filled_cache(layers, _config(model), getattr(model, "device", None))


def _chunks(total: int, lengths: int | Sequence[int]) -> list[int]:
    """Lengths of passes that add up to ``total`` tokens.

    Raises:
        UsageError: one of them is less than one token.
    """
    given = repeat(lengths) if isinstance(lengths, int) else chain(lengths, repeat(total))
    found: list[int] = []
    left = total
    while left > 0:
        length = next(given)
        if length < 1:
            raise UsageError(f"a pass has at least one token, not {length}")
        found.append(min(length, left))
        left -= found[-1]
    return found


def _pass(model: Any, cache: Any, token_ids: list[int]) -> Callable[[], Any]:
    """One pass of the model over tokens behind those in the cache; gives the last logits."""
    import torch

    def run() -> Any:
        with torch.no_grad():
            ids = torch.tensor([token_ids], device=getattr(model, "device", None))
            # Logits of the last token only: those of the others cost much and are of no use.
            out = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
        return out.logits[0, -1]

    return run


def _config(model: Any) -> Any:
    return decoder_config(model.config)

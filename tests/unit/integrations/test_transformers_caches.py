"""Caches that publish as they fill or fill as layers arrive, with a tiny model and no network."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Any

import numpy as np
import pytest

import kvcs
from kvcs.integrations import transformers as hf
from kvcs.integrations.handover import Inlet, run_in_thread
from kvcs.kv import LayerTensors, as_host_array
from tests import tiny_model as tiny

# The first one reads torch and transformers from the disk.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DTYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture(autouse=True)
def _live() -> None:
    tiny.require_live()


class Segment:
    """Keeps what is put, as a publisher's segment copies it."""

    def __init__(self, tokens: int, descriptor: kvcs.Descriptor) -> None:
        self.tokens = tokens
        self.layers: dict[int, LayerTensors] = {}
        self._shape = (tokens, descriptor.kv_heads, descriptor.head_dim)
        self._dtype = descriptor.numpy_dtype

    async def put(self, layer: int, k: object, v: object = None, *, lend: bool = False) -> None:
        arrays = [as_host_array(a, self._dtype, self._shape, "array").copy() for a in (k, v)]
        for array in arrays:
            array.flags.writeable = False
        self.layers[layer] = LayerTensors(layer, *arrays)


class Source:
    """Gives the layers of a segment once they are released, as an opened cache does."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._released = {layer: asyncio.Event() for layer in segment.layers}
        self.asked: asyncio.Queue[int] = asyncio.Queue()

    def release(self, *layers: int) -> None:
        for layer in layers or self._released:
            self._released[layer].set()

    async def layer(self, index: int) -> LayerTensors:
        self.asked.put_nowait(index)
        await self._released[index].wait()
        return self._segment.layers[index]


async def publish(model: Any, prefix: kvcs.Prefix, token_ids: list[int]) -> tuple[Any, Segment]:
    """Run tokens through a publishing cache whose segment has the prefix's whole blocks."""
    from kvcs.integrations.transformers_caches import PublishingCache

    segment = Segment(prefix.blocks * prefix.descriptor.block_tokens, prefix.descriptor)
    cache = PublishingCache(model.config)
    cache.follow(segment)
    await run_in_thread(lambda: hf.continue_from(model, cache, token_ids), cache.stop)
    await cache.published()
    return cache, segment


def streamed(source: Source, tokens: int, **options: Any) -> Any:
    from kvcs.integrations.transformers_caches import StreamedCache

    return StreamedCache(Inlet(source), tiny.LAYERS, tokens, **options)


def same(one: Any, other: Any) -> bool:
    """Whether two caches hold the same bits."""
    import torch

    return all(
        torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        for a, b in zip(one.layers, other.layers, strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES)
async def test_a_streamed_cache_is_the_models_own_bit_by_bit(dtype: str) -> None:
    model = tiny.tiny_model(dtype)
    prefix = tiny.tiny_prefix(model, tiny.prompt(29))
    own, logits = tiny.computed(model, prefix)
    _, segment = await publish(model, prefix, prefix.token_ids[:24].tolist())
    source = Source(segment)
    source.release()
    cache = streamed(source, 24)
    other_copy = tiny.tiny_model(dtype)
    got = await run_in_thread(
        lambda: hf.continue_from(other_copy, cache, prefix.token_ids.tolist()), cache.stop
    )
    assert got.tolist() == logits.tolist()
    assert same(cache, own)
    assert tiny.greedy(other_copy, cache, got) == tiny.greedy(model, own, logits)


async def test_the_models_answer_depends_on_the_cache() -> None:
    """Else the tests of equal answers would show nothing."""
    model = tiny.tiny_model()
    answers = set()
    for seed in range(4):
        prefix = tiny.tiny_prefix(model, tiny.prompt(24, seed) + tiny.prompt(5))
        answers.add(tuple(tiny.greedy(model, *tiny.computed(model, prefix))))
    assert len(answers) == 4


async def test_each_layer_is_handed_over_before_the_next_is_computed() -> None:
    from kvcs.integrations.transformers_caches import PublishingCache

    model = tiny.tiny_model()
    prefix = tiny.tiny_prefix(model, tiny.prompt(16))
    seen: list[tuple[str, int]] = []
    arrived = [threading.Event() for _ in range(tiny.LAYERS)]

    class Watching(Segment):
        async def put(self, layer: int, k: object, v: object = None, *, lend: bool = False) -> None:
            await super().put(layer, k, v, lend=lend)
            seen.append(("published", layer))
            arrived[layer].set()

    def before(layer: int) -> Any:
        def hook(*_: Any) -> None:
            # The model stands still here until the layer before has been published.
            if layer:
                assert arrived[layer - 1].wait(5)
            seen.append(("computing", layer))

        return hook

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(before(index))
    cache = PublishingCache(model.config)
    cache.follow(Watching(16, prefix.descriptor))
    await run_in_thread(
        lambda: hf.continue_from(model, cache, prefix.token_ids.tolist()), cache.stop
    )
    await cache.published()
    assert seen == [
        (what, layer) for layer in range(tiny.LAYERS) for what in ("computing", "published")
    ]


async def test_a_layers_attention_does_not_wait_for_later_layers() -> None:
    model = tiny.tiny_model()
    prefix = tiny.tiny_prefix(model, tiny.prompt(20))
    own, logits = tiny.computed(model, prefix)
    _, segment = await publish(model, prefix, prefix.token_ids[:16].tolist())
    source, placed = Source(segment), []
    cache = streamed(source, 16, on_layer=placed.append)
    running = asyncio.ensure_future(
        run_in_thread(lambda: hf.continue_from(model, cache, prefix.token_ids.tolist()), cache.stop)
    )
    for layer in range(tiny.LAYERS):
        # It asks for a layer when it has computed with those before, and for none sooner.
        assert await asyncio.wait_for(source.asked.get(), 20) == layer
        assert placed == list(range(layer))
        source.release(layer)
    assert (await running).tolist() == logits.tolist()
    assert same(cache, own)


async def test_a_prompt_that_is_wholly_published_computes_its_last_token_again() -> None:
    model = tiny.tiny_model()
    prefix = tiny.tiny_prefix(model, tiny.prompt(16))
    own, logits = tiny.computed(model, prefix)
    _, segment = await publish(model, prefix, prefix.token_ids.tolist())
    source = Source(segment)
    source.release()
    cache = streamed(source, 15)
    got = await run_in_thread(
        lambda: hf.continue_from(model, cache, prefix.token_ids.tolist()), cache.stop
    )
    assert got.tolist() == logits.tolist()
    assert same(cache, own)


async def test_one_pass_over_everything_publishes_its_whole_blocks() -> None:
    model = tiny.tiny_model()
    prefix = tiny.tiny_prefix(model, tiny.prompt(21))
    cache, segment = await publish(model, prefix, prefix.token_ids.tolist())
    assert cache.get_seq_length() == 21
    for layer, (k, v) in enumerate(hf.from_dynamic_cache(cache, 16)):
        assert np.array_equal(segment.layers[layer].k, k.numpy())
        assert np.array_equal(segment.layers[layer].v, v.numpy())


async def test_decoding_publishes_nothing() -> None:
    model = tiny.tiny_model()
    prefix = tiny.tiny_prefix(model, tiny.prompt(16))
    cache, segment = await publish(model, prefix, prefix.token_ids.tolist())
    before = dict(segment.layers)
    # In the loop's own thread: nothing is handed over any more, so nothing can wait.
    tiny.greedy(model, cache, hf.continue_from(model, cache, [*prefix.token_ids.tolist(), 3]))
    assert segment.layers == before


@pytest.mark.parametrize("change", ["crop", "deepcopy", "iterate", "repeat", "select", "reorder"])
async def test_what_changes_every_layer_waits_for_them_all(change: str) -> None:
    import torch

    model = tiny.tiny_model()
    prefix = tiny.tiny_prefix(model, tiny.prompt(16))
    own, segment = await publish(model, prefix, prefix.token_ids.tolist())
    source = Source(segment)
    cache = streamed(source, 16)
    assert cache.get_seq_length() == 16
    assert cache.get_mask_sizes(4, 2) == (20, 0)

    def act(of: Any) -> Any:
        if change == "crop":
            of.crop(-3)
        elif change == "deepcopy":
            return copy.deepcopy(of)
        elif change == "iterate":
            assert len(list(of)) == tiny.LAYERS
        elif change == "repeat":
            of.batch_repeat_interleave(2)
        elif change == "select":
            of.batch_select_indices(torch.tensor([0, 0]))
        else:
            of.reorder_cache(torch.tensor([0]))
        return of

    running = asyncio.ensure_future(run_in_thread(lambda: act(cache), cache.stop))
    assert await asyncio.wait_for(source.asked.get(), 20) == 0
    assert not running.done()
    source.release()
    assert same(await running, act(copy.deepcopy(own)) if change != "deepcopy" else own)


async def test_a_streamed_cache_can_be_forgotten() -> None:
    model = tiny.tiny_model()
    prefix = tiny.tiny_prefix(model, tiny.prompt(16))
    _, segment = await publish(model, prefix, prefix.token_ids.tolist())
    source = Source(segment)
    source.release()
    cache = streamed(source, 16)
    await run_in_thread(cache.reset, cache.stop)
    assert cache.get_seq_length() == 0


async def test_generate_streams_too() -> None:
    import torch

    model = tiny.tiny_model()
    prefix = tiny.tiny_prefix(model, tiny.prompt(20))
    _, segment = await publish(model, prefix, prefix.token_ids[:16].tolist())
    source = Source(segment)
    source.release()
    cache = streamed(source, 16)
    ids = torch.tensor([prefix.token_ids.tolist()])

    def generate(**options: Any) -> list[int]:
        out = model.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=0, **options)
        tokens: list[int] = out[0, 20:].tolist()
        return tokens

    assert await run_in_thread(lambda: generate(cache=cache), cache.stop) == generate()


def test_a_batch_is_refused() -> None:
    import torch

    model = tiny.tiny_model()
    with torch.no_grad():
        out = model(torch.tensor([tiny.prompt(8), tiny.prompt(8, 6)]), use_cache=True)
    with pytest.raises(kvcs.UsageError, match=r"expected one sequence.*\[2, 2, 8, 8\]"):
        hf.from_dynamic_cache(out.cache)


def test_fewer_tokens_than_asked_for_are_refused() -> None:
    from transformers import DynamicCache

    model = tiny.tiny_model()
    cache = DynamicCache()
    hf.continue_from(model, cache, tiny.prompt(8))
    with pytest.raises(kvcs.UsageError, match="holds 8 tokens, expected 9"):
        hf.from_dynamic_cache(cache, 9)


async def test_layers_of_another_kind_are_refused() -> None:
    from transformers import LlamaConfig
    from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

    from kvcs.integrations.transformers_caches import PublishingCache, filled_cache

    config = LlamaConfig(num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=4)
    for make in (lambda: PublishingCache(config), lambda: filled_cache([], config)):
        with pytest.raises(kvcs.UsageError, match="layer 0 keeps a DynamicSlidingWindowLayer"):
            make()
    cache = DynamicCache()
    cache.layers.append(DynamicSlidingWindowLayer(sliding_window=4))
    with pytest.raises(kvcs.UsageError, match="full attention"):
        hf.from_dynamic_cache(cache)


@pytest.mark.parametrize(
    ("indices", "message"),
    [([0, 1, 2], "3 layers came, where the model has 4"), ([0, 2], "layer 2 came"), ([], "0 lay")],
)
def test_missing_layers_are_refused(indices: list[int], message: str) -> None:
    from kvcs.integrations.transformers_caches import filled_cache

    array = np.zeros((8, tiny.KV_HEADS, tiny.HEAD_DIM), np.float32)
    layers = [LayerTensors(index, array, array) for index in indices]
    with pytest.raises(kvcs.UsageError, match=message):
        filled_cache(layers, tiny.tiny_model().config)


@pytest.mark.parametrize("other", [{"num_key_value_heads": 1}, {"head_dim": 16}, "bfloat16"])
async def test_layers_of_another_geometry_are_refused(other: Any) -> None:
    model = tiny.tiny_model()
    prefix = tiny.tiny_prefix(model, tiny.prompt(20))
    _, segment = await publish(model, prefix, prefix.token_ids[:16].tolist())
    source = Source(segment)
    source.release()
    cache = streamed(source, 16)
    stranger = tiny.tiny_model(other) if isinstance(other, str) else tiny.tiny_model(**other)
    with pytest.raises(kvcs.UsageError, match="layer 0: the cache has 2 heads of 8"):
        await run_in_thread(
            lambda: hf.continue_from(stranger, cache, prefix.token_ids.tolist()), cache.stop
        )


def test_a_prompt_has_to_go_on_from_its_cache() -> None:
    from transformers import DynamicCache

    model = tiny.tiny_model()
    cache = DynamicCache()
    hf.continue_from(model, cache, tiny.prompt(8))
    with pytest.raises(kvcs.UsageError, match="a prompt of 7 tokens, where the cache holds 8"):
        hf.continue_from(model, cache, tiny.prompt(7))
    with pytest.raises(kvcs.UsageError, match="a prompt of 0 tokens"):
        hf.continue_from(model, DynamicCache(), [])


async def test_float8_arrays_keep_their_bits() -> None:
    import ml_dtypes

    from kvcs.integrations.transformers_caches import as_heads_first, as_tokens_first

    for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8):
        array = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4).view(dtype)
        array.flags.writeable = False
        tensor = as_heads_first(array)
        assert tuple(tensor.shape) == (1, 3, 2, 4)
        back = as_host_array(as_tokens_first(tensor), array.dtype, array.shape, "back")
        assert back.tobytes() == array.tobytes()

"""A small model recomputes what a cache lacks: which layers compute what, and what ends it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import kvcs
from kvcs.integrations import transformers as hf
from kvcs.integrations.model_passes import KEEP_SECONDS
from tests import tiny_model as tiny
from tests.certificates import PemFiles
from tests.live.test_shared_prefixes import computed_layers, lose, sessions

TOKENS = 45
"""Five whole blocks of eight, and five tokens more."""


def missing(layer: int, first: int, last: int) -> kvcs.MissingLayer:
    """Blocks of one layer."""
    return kvcs.MissingLayer(layer, first, last, 8 * first, 8 * last + 7)


def kept(cache: Any, layer: int, first: int, last: int) -> list[Any]:
    """Keys and values of some blocks of a cache."""
    return [part[8 * first : 8 * last + 8] for part in hf.from_dynamic_cache(cache)[layer]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_layers_one_after_the_other_are_one_pass(dtype: str) -> None:
    model = tiny.tiny_model(dtype)
    prefix = tiny.tiny_prefix(model, tiny.prompt(TOKENS))
    own, _ = tiny.computed(model, prefix)
    engine = hf.Recomputer(model, prefix)
    with computed_layers(model) as computed:
        for layer in (1, 3):
            got = await engine(missing(layer, 0, 4))
            assert all(a.equal(b) for a, b in zip(got, kept(own, layer, 0, 4), strict=True))
        # A layer that it has passed needs another pass, and so do tokens behind its last.
        got = await engine(missing(2, 0, 2))
        assert [part.shape for part in got] == [(24, 2, 8)] * 2
    engine.close()
    assert computed == [(0, 40), (1, 40), (2, 40), (0, 24), (1, 24)]


async def test_tokens_before_the_lost_ones_are_taken_from_the_cache(files: PemFiles) -> None:
    model = tiny.tiny_model()
    prefix = tiny.tiny_prefix(model, tiny.prompt(TOKENS))
    async with (
        sessions(files) as (server, session),
        kvcs.Publisher(server).publish(prefix) as publication,
    ):
        own = await hf.prefill(model, publication)
        for whole in (False, True):
            engine = hf.Recomputer(model, prefix)
            async with kvcs.Subscriber(session).open(prefix, deadline=120, whole=whole) as cache:
                await cache.complete()
                engine.follow(cache)
                with computed_layers(model) as computed:
                    for layer in (1, 3):
                        got = await engine(missing(layer, 2, 3))
                        for mine, theirs in zip(got, kept(own, layer, 2, 3), strict=True):
                            assert mine.allclose(theirs, atol=1e-5)
                engine.close()
            assert computed == [(0, 16), (1, 16), (2, 16)]
        async with kvcs.Subscriber(session).open(prefix, layers=(1, 3), deadline=120) as cache:
            with pytest.raises(kvcs.UsageError, match="begin with layer 0"):
                engine.follow(cache)


@pytest.mark.parametrize("lost", [(0,), (3,), (1, 2), (0, 1, 2, 3)])
async def test_a_cache_that_lacks_layers_is_finished_and_decoded(
    files: PemFiles, lost: tuple[int, ...]
) -> None:
    producer, consumer = tiny.tiny_model(), tiny.tiny_model()
    prefix = tiny.tiny_prefix(producer, tiny.prompt(TOKENS))
    async with (
        sessions(files) as (server, session),
        kvcs.Publisher(server).publish(prefix) as publication,
    ):
        own = await hf.prefill(producer, publication)
        for layer in lost:
            lose(server, publication, layer)
        engine = hf.Recomputer(consumer, prefix)
        async with kvcs.Subscriber(session).open(prefix, deadline=120, recompute=engine) as cache:
            engine.follow(cache)
            with computed_layers(consumer) as computed:
                got = await hf.resume(consumer, cache)
            assert cache.report.recomputed == 2 * 5 * len(lost)
        engine.close()
    assert [layer for layer, count in computed if count == 40] == list(range(lost[-1]))
    logits = hf.continue_from(producer, own, prefix.token_ids.tolist())
    assert tiny.greedy(consumer, got.cache, got.logits) == tiny.greedy(producer, own, logits)


async def test_what_the_model_raises_is_told_and_leaves_no_thread() -> None:
    model = tiny.tiny_model()
    prefix = tiny.tiny_prefix(model, tiny.prompt(TOKENS))
    engine = hf.Recomputer(model, prefix)

    def fail(*_: Any) -> None:
        raise ArithmeticError("a test")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        await engine(missing(2, 0, 4))
    hook.remove()
    k, _ = await engine(missing(2, 0, 4))
    assert k.shape == (40, 2, 8)
    engine.close()
    await gone()


async def test_a_wait_that_is_cancelled_ends_the_pass() -> None:
    model = tiny.tiny_model()
    prefix = tiny.tiny_prefix(model, tiny.prompt(TOKENS))
    engine = hf.Recomputer(model, prefix)
    reached, go = threading.Event(), threading.Event()

    def stand(*_: Any) -> None:
        reached.set()
        go.wait(60)

    hook = model.model.layers[1].register_forward_pre_hook(stand)
    waiting = asyncio.create_task(engine(missing(3, 0, 4)))
    assert await asyncio.to_thread(reached.wait, 60)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    hook.remove()
    await gone()
    k, _ = await engine(missing(3, 0, 4))
    assert k.shape == (40, 2, 8)
    engine.close()
    await gone()


async def test_another_model_is_refused() -> None:
    model = tiny.tiny_model()
    prefix = tiny.tiny_prefix(model, tiny.prompt(TOKENS))
    with pytest.raises(kvcs.DescriptorMismatch):
        hf.Recomputer(tiny.tiny_model(num_hidden_layers=3), prefix)


async def gone() -> None:
    """Wait until no pass is under way; sooner than one would end by itself, if it is not asked."""
    for thread in threading.enumerate():
        if thread.name == "kvcs-recompute":
            await asyncio.to_thread(thread.join, KEEP_SECONDS * 10)
            assert not thread.is_alive()

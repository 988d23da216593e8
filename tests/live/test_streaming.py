"""A model's prefill over a real session, and another copy of the model that goes on from there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import kvcs
from kvcs.integrations import transformers as hf
from tests import tiny_model as tiny
from tests.certificates import PemFiles

TOKENS = 45
"""Five whole blocks of eight, and five tokens more."""


@asynccontextmanager
async def sessions(files: PemFiles) -> AsyncIterator[tuple[kvcs.Server, kvcs.Connection]]:
    """A publisher's server and a consumer's session with it."""
    async with kvcs.serve("127.0.0.1", 0, cert=files.cert, key=files.key) as server:
        async with kvcs.connect(server.url, ca=files.ca) as session:
            yield server, session


def fails_at(model: Any, layer: int, error: BaseException) -> Any:
    """Make a model raise an error when it comes to a layer."""

    def hook(*_: Any) -> None:
        raise error

    return model.model.layers[layer].register_forward_pre_hook(hook)


def stands_still_at(model: Any, layer: int) -> threading.Event:
    """Make a model wait before a layer until an event is set; a minute at most."""
    go = threading.Event()
    model.model.layers[layer].register_forward_pre_hook(lambda *_: go.wait(60) and None)
    return go


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [TOKENS, 40, 41, 8])
async def test_the_consumer_goes_on_exactly_as_the_producer(
    files: PemFiles, dtype: str, tokens: int
) -> None:
    producer, consumer = tiny.tiny_model(dtype), tiny.tiny_model(dtype)
    prefix = tiny.tiny_prefix(producer, tiny.prompt(tokens))
    async with sessions(files) as (server, session):

        async def produce() -> list[int]:
            async with kvcs.Publisher(server).publish(prefix) as publication:
                cache = await hf.prefill(producer, publication)
                assert cache.get_seq_length() == prefix.blocks * 8
                assert publication.complete
                logits = hf.continue_from(producer, cache, prefix.token_ids.tolist())
                return tiny.greedy(producer, cache, logits)

        async def consume() -> tuple[list[int], list[float]]:
            async with kvcs.Subscriber(session).open(prefix, deadline=50) as cache:
                got = await hf.resume(consumer, cache)
            return tiny.greedy(consumer, got.cache, got.logits), got.logits.tolist()

        (text, logits), expected = await asyncio.gather(consume(), produce())
    own, own_logits = tiny.computed(consumer, prefix)
    assert logits == own_logits.tolist()
    assert text == expected == tiny.greedy(consumer, own, own_logits)


async def test_layers_arrive_while_the_producer_computes(files: PemFiles) -> None:
    producer, consumer = tiny.tiny_model(), tiny.tiny_model()
    prefix = tiny.tiny_prefix(producer, tiny.prompt(TOKENS))
    go = stands_still_at(producer, 2)
    placed: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    async with sessions(files) as (server, session):
        async with kvcs.Publisher(server).publish(prefix) as publication:
            prefilling = asyncio.ensure_future(hf.prefill(producer, publication))
            async with kvcs.Subscriber(session).open(prefix, deadline=50) as cache:
                resuming = asyncio.ensure_future(
                    hf.resume(
                        consumer,
                        cache,
                        on_layer=lambda layer: loop.call_soon_threadsafe(placed.put_nowait, layer),
                    )
                )
                # The producer stands before layer 2, and the consumer has used layer 1.
                assert [await asyncio.wait_for(placed.get(), 30) for _ in range(2)] == [0, 1]
                assert not prefilling.done()
                assert publication.progress.layers == 2
                go.set()
                got = await resuming
            await prefilling
    own, logits = tiny.computed(consumer, prefix)
    assert got.logits.tolist() == logits.tolist()
    assert tiny.greedy(consumer, got.cache, got.logits) == tiny.greedy(consumer, own, logits)


async def test_each_pass_of_a_chunked_prefill_is_a_segment(files: PemFiles) -> None:
    producer, consumer = tiny.tiny_model(), tiny.tiny_model()
    prefix = tiny.tiny_prefix(producer, tiny.prompt(TOKENS))
    layers: list[int] = []
    async with (
        sessions(files) as (server, session),
        kvcs.Publisher(server).publish(prefix, first_segment_blocks=2) as publication,
    ):
        own = await hf.prefill(producer, publication, on_layer=layers.append)
        assert layers == [*range(tiny.LAYERS)] * 3
        async with kvcs.Subscriber(session).open(
            prefix, deadline=20, publication=publication.uri(server.url)
        ) as cache:
            assert [entry.blocks for entry in cache.manifest.segments] == [2, 2, 1]
            got = await hf.resume(consumer, cache)
    logits = hf.continue_from(producer, own, prefix.token_ids.tolist())
    assert got.logits.tolist() == logits.tolist()


async def test_a_longer_prompt_goes_on_from_a_shared_prefix(files: PemFiles) -> None:
    from transformers import DynamicCache

    producer, consumer = tiny.tiny_model(), tiny.tiny_model()
    prompt = tiny.prompt(70)
    shared = tiny.tiny_prefix(producer, prompt[:TOKENS])
    async with (
        sessions(files) as (server, session),
        kvcs.Publisher(server).publish(shared) as publication,
    ):
        await hf.prefill(producer, publication)
        subscriber = kvcs.Subscriber(session)
        async with subscriber.open(shared, deadline=50) as cache:
            got = await hf.resume(consumer, cache, prompt)
        async with subscriber.open(shared, deadline=50, blocks=3) as cache:
            part = await hf.resume(consumer, cache, prompt[:30])
    for tokens, count, result in ((prompt, 40, got), (prompt[:30], 24, part)):
        own = DynamicCache()
        hf.continue_from(consumer, own, prompt[:40])
        own.crop(count - 40)
        assert result.logits.tolist() == hf.continue_from(consumer, own, tokens).tolist()


async def test_a_whole_cache_can_be_waited_for(files: PemFiles) -> None:
    producer, consumer = tiny.tiny_model("bfloat16"), tiny.tiny_model("bfloat16")
    prefix = tiny.tiny_prefix(producer, tiny.prompt(TOKENS))
    async with (
        sessions(files) as (server, session),
        kvcs.Publisher(server).publish(prefix) as publication,
    ):
        own = await hf.prefill(producer, publication)
        async with kvcs.Subscriber(session).open(prefix, deadline=50) as cache:
            whole = await hf.to_dynamic_cache(cache, consumer)
    for mine, other in zip(
        hf.from_dynamic_cache(whole), hf.from_dynamic_cache(own, 40), strict=True
    ):
        assert all(a.equal(b) for a, b in zip(mine, other, strict=True))
    logits = hf.continue_from(consumer, whole, prefix.token_ids.tolist())
    assert logits.tolist() == tiny.computed(consumer, prefix)[1].tolist()


async def test_a_cache_that_was_put_afterwards_is_the_same(files: PemFiles) -> None:
    from transformers import DynamicCache

    producer, consumer = tiny.tiny_model(), tiny.tiny_model()
    prefix = tiny.tiny_prefix(producer, tiny.prompt(TOKENS))
    own = DynamicCache()
    hf.continue_from(producer, own, prefix.token_ids.tolist())
    async with (
        sessions(files) as (server, session),
        kvcs.Publisher(server).publish(prefix) as publication,
    ):
        segment = await publication.segment()
        for layer, (k, v) in enumerate(hf.from_dynamic_cache(own, segment.tokens)):
            await segment.put(layer, k, v)
        async with kvcs.Subscriber(session).open(prefix, deadline=50) as cache:
            got = await hf.resume(consumer, cache)
    own.crop(40 - TOKENS)
    again = hf.continue_from(producer, own, prefix.token_ids.tolist())
    assert got.logits.tolist() == again.tolist()


async def test_a_failed_prefill_reaches_both_ends(files: PemFiles) -> None:
    producer, consumer = tiny.tiny_model(), tiny.tiny_model()
    prefix = tiny.tiny_prefix(producer, tiny.prompt(TOKENS))
    fails_at(producer, 3, ArithmeticError("secret numbers"))
    go = stands_still_at(producer, 2)
    loop = asyncio.get_running_loop()
    async with sessions(files) as (server, session):

        async def produce() -> None:
            async with kvcs.Publisher(server).publish(prefix) as publication:
                await hf.prefill(producer, publication)

        async def consume() -> Any:
            async with kvcs.Subscriber(session).open(prefix, deadline=50) as cache:
                return await hf.resume(
                    consumer,
                    cache,
                    on_layer=lambda layer: layer == 1 and loop.call_soon_threadsafe(go.set),
                )

        produced, consumed = await asyncio.gather(produce(), consume(), return_exceptions=True)
    assert isinstance(produced, ArithmeticError)
    assert isinstance(consumed, kvcs.PublicationAborted)
    assert "ArithmeticError" in str(consumed) and "secret" not in str(consumed)


async def test_a_lost_session_stops_the_prefill(files: PemFiles) -> None:
    producer = tiny.tiny_model()
    prefix = tiny.tiny_prefix(producer, tiny.prompt(TOKENS))
    go = stands_still_at(producer, 1)
    computed: list[int] = []
    settings = kvcs.RelaySettings(cert=files.cert, key=files.key, port=0, allow_anyone=True)
    async with (
        kvcs.Relay(settings) as relay,
        kvcs.connect(relay.url, ca=files.ca, reconnect=None) as session,
    ):
        with pytest.raises(kvcs.ConnectionClosed):
            async with kvcs.Publisher(session).publish(prefix) as publication:
                running = asyncio.ensure_future(
                    hf.prefill(producer, publication, on_layer=computed.append, ahead=1)
                )
                await session.close()
                go.set()
                await running
    assert computed != list(range(tiny.LAYERS))


async def test_a_cancelled_prefill_stops_at_its_next_layer(
    files: PemFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcs.integrations.transformers_caches import PublishingCache

    producer = tiny.tiny_model()
    prefix = tiny.tiny_prefix(producer, tiny.prompt(TOKENS))
    go = stands_still_at(producer, 1)
    stop = PublishingCache.stop

    def stop_and_go(cache: Any, reason: str) -> None:
        stop(cache, reason)
        go.set()

    monkeypatch.setattr(PublishingCache, "stop", stop_and_go)
    computed: list[int] = []
    stands = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handed_over(*_: object) -> None:
        loop.call_soon_threadsafe(stands.set)

    producer.model.layers[0].register_forward_hook(handed_over)

    async def produce(server: kvcs.Server) -> None:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            publications.append(publication)
            await hf.prefill(producer, publication, on_layer=computed.append)

    publications: list[kvcs.Publication] = []
    async with sessions(files) as (server, _):
        running = asyncio.ensure_future(produce(server))
        # Layer 0 was handed over: told of any earlier, the model would stop at layer 0 already.
        await stands.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert publications[0].aborted is not None
    # Layer 1 was computed when the model went on, and could not be handed over.
    assert computed == [0, 1]


async def test_a_stalled_producer_costs_no_more_than_the_deadline(files: PemFiles) -> None:
    producer, consumer = tiny.tiny_model(), tiny.tiny_model()
    prefix = tiny.tiny_prefix(producer, tiny.prompt(TOKENS))
    go = stands_still_at(producer, 2)
    loop = asyncio.get_running_loop()
    async with (
        sessions(files) as (server, session),
        kvcs.Publisher(server).publish(prefix) as publication,
    ):
        stands = asyncio.Event()
        prefilling = asyncio.ensure_future(
            hf.prefill(
                producer,
                publication,
                on_layer=lambda layer: layer == 1 and loop.call_soon_threadsafe(stands.set),
            )
        )
        await stands.wait()
        begun = loop.time()
        with pytest.raises(kvcs.CacheIncomplete, match="deadline") as caught:
            async with kvcs.Subscriber(session).open(prefix, deadline=2) as cache:
                await hf.resume(consumer, cache)
        assert 2 <= loop.time() - begun < 20
        assert {run.layer for run in caught.value.missing} == {2, 3}
        go.set()
        await prefilling


async def test_a_cancelled_consumer_leaves_no_thread_waiting(files: PemFiles) -> None:
    producer, consumer = tiny.tiny_model(), tiny.tiny_model()
    prefix = tiny.tiny_prefix(producer, tiny.prompt(TOKENS))
    go = stands_still_at(producer, 1)
    placed = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with (
        sessions(files) as (server, session),
        kvcs.Publisher(server).publish(prefix) as publication,
    ):
        prefilling = asyncio.ensure_future(hf.prefill(producer, publication))
        async with kvcs.Subscriber(session).open(prefix, deadline=50) as cache:
            resuming = asyncio.ensure_future(
                hf.resume(consumer, cache, on_layer=lambda _: loop.call_soon_threadsafe(placed.set))
            )
            await placed.wait()
            resuming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await resuming
        go.set()
        await prefilling
    for thread in [t for t in threading.enumerate() if t.name.startswith("kvcs-model")]:
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({"num_hidden_layers": 3}, "layers: ours 3, theirs 4"),
        ({"num_key_value_heads": 1}, "kv_heads: ours 1, theirs 2"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "extra.rope_theta"),
    ],
)
async def test_a_model_of_another_geometry_is_refused_on_both_ends(
    files: PemFiles, settings: dict[str, Any], difference: str
) -> None:
    model, stranger = tiny.tiny_model(), tiny.tiny_model(**settings)
    prefix = tiny.tiny_prefix(model, tiny.prompt(TOKENS))
    async with (
        sessions(files) as (server, session),
        kvcs.Publisher(server).publish(prefix) as publication,
    ):
        with pytest.raises(kvcs.DescriptorMismatch, match=difference):
            await hf.prefill(stranger, publication)
        await hf.prefill(model, publication)
        async with kvcs.Subscriber(session).open(prefix, deadline=50) as cache:
            for use in (hf.resume(stranger, cache), hf.to_dynamic_cache(cache, stranger)):
                with pytest.raises(kvcs.DescriptorMismatch, match=difference):
                    await use


async def test_a_part_or_another_prompt_is_refused(files: PemFiles) -> None:
    model = tiny.tiny_model()
    prefix = tiny.tiny_prefix(model, tiny.prompt(TOKENS))
    async with (
        sessions(files) as (server, session),
        kvcs.Publisher(server).publish(prefix) as publication,
    ):
        await hf.prefill(model, publication)
        subscriber = kvcs.Subscriber(session)
        async with subscriber.open(prefix, deadline=50, layers=(0, 2)) as cache:
            for use in (hf.resume(model, cache), hf.to_dynamic_cache(cache, model)):
                with pytest.raises(kvcs.UsageError, match=r"3 (of|layers)"):
                    await use
        async with subscriber.open(prefix, deadline=50) as cache:
            with pytest.raises(kvcs.UsageError, match="does not begin with the 40 tokens"):
                await hf.resume(model, cache, tiny.prompt(TOKENS, 6))
            with pytest.raises(kvcs.UsageError, match="does not begin with the 40 tokens"):
                await hf.resume(model, cache, tiny.prompt(39))


def test_a_prompt_shorter_than_a_block_has_no_name() -> None:
    with pytest.raises(kvcs.UsageError, match="7 tokens is shorter than one block of 8"):
        tiny.tiny_prefix(tiny.tiny_model(), tiny.prompt(7))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_torch_tensors_go_out_and_come_into_torch_tensors(
    files: PemFiles, dtype: str
) -> None:
    model = tiny.tiny_model(dtype)
    import torch  # `tiny_model` has seen to it that it is there

    prefix = tiny.tiny_prefix(model, tiny.prompt(40))
    owner = prefix.descriptor
    shape = (owner.layers, 2, prefix.blocks * owner.block_tokens, owner.kv_heads, owner.head_dim)
    kind = getattr(torch, dtype)
    sent = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(kind)
    pool = torch.zeros(shape, dtype=kind)
    async with sessions(files) as (server, session):
        async with kvcs.Publisher(server).publish(prefix) as publication:
            segment = await publication.segment()
            for layer, (k, v) in enumerate(sent):
                await segment.put(layer, k, v, lend=True)
            into = {layer: (k, v) for layer, (k, v) in enumerate(pool)}
            async with kvcs.Subscriber(session).open(prefix, into=into) as cache:
                await cache.complete()
    assert torch.equal(sent, pool)

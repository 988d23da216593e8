"""SmolLM2: chunks of any length, prompts that share only their beginning with what is there, and a
layer that is lost."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvcs
from kvcs.integrations import transformers as hf
from kvcs.moqt.names import FullTrackName
from tests.certificates import PemFiles

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SCOPE = kvcs.Scope(key=bytes(range(32)))
ANSWER = 12
"""Tokens of each answer."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def smol() -> Any:
    """The model, loaded once; both ends use it, one after the other."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import smollm2
    finally:
        sys.path.remove(str(SCRIPTS))
    return smollm2.SmolLM2()


@pytest.fixture(scope="module")
def prompt(smol: Any) -> list[int]:
    """Token ids of a prompt of a bit more than ten blocks."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        from make_test_data import MESSAGES
    finally:
        sys.path.remove(str(SCRIPTS))
    token_ids: list[int] = smol.prompt(MESSAGES)[1]
    assert len(token_ids) > 160
    return token_ids


class Directory:
    """An index of one publication, as a lookup of Block Keys would answer."""

    def __init__(self, uri: str, published: kvcs.Prefix) -> None:
        self.uri, self.keys = uri, published.block_keys

    async def find(self, prefix: kvcs.Prefix) -> Sequence[kvcs.Holding]:
        shared = 0
        for ours, theirs in zip(prefix.block_keys, self.keys, strict=False):
            shared += ours == theirs
        return [kvcs.Holding(self.uri, shared, self.keys[shared:])] if shared else []


@asynccontextmanager
async def sessions(files: PemFiles) -> AsyncIterator[tuple[kvcs.Server, kvcs.Connection]]:
    """A publisher's server and a consumer's session with it."""
    async with kvcs.serve("127.0.0.1", 0, cert=files.cert, key=files.key) as server:
        async with kvcs.connect(server.url, ca=files.ca) as session:
            yield server, session


@contextmanager
def computed_tokens(model: Any) -> Iterator[list[int]]:
    """How many tokens each pass of the model computes."""
    counts: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: counts.append(inputs[0].shape[1])
    )
    try:
        yield counts
    finally:
        hook.remove()


async def test_uneven_chunks_and_the_same_text(
    smol: Any, prompt: list[int], files: PemFiles
) -> None:
    prefix = kvcs.Prefix(SCOPE, smol.descriptor, prompt)
    chunks = (37, 3, 1, 50, 16, 29)
    async with (
        sessions(files) as (server, session),
        kvcs.Publisher(server).publish(prefix, first_segment_blocks=2) as publication,
    ):
        with computed_tokens(smol.model) as counts:
            own = await hf.prefill(smol.model, publication, chunk_tokens=chunks)
        whole = prefix.blocks * 16
        assert counts == [*chunks, whole - sum(chunks)]
        assert own.get_seq_length() == whole and publication.complete
        async with kvcs.Subscriber(session).open(prefix, deadline=120, anchors=(2,)) as cache:
            entries = [entry.blocks for entry in cache.manifest.segments]
            got = await hf.resume(smol.model, cache)
    # 37 tokens fill two blocks; 41 none more; 91, 107 and 136 tokens fill 5, 6 and 8.
    assert entries == [2, 3, 1, 2, prefix.blocks - 8]
    logits = hf.continue_from(smol.model, own, prompt)
    assert got.logits.tolist() == logits.tolist()
    text = smol.answer(own, logits, ANSWER)
    assert len(text) > 2
    assert smol.answer(got.cache, got.logits, ANSWER) == text


@pytest.mark.parametrize("by", ["anchor", "index"])
async def test_two_thirds_are_reused_and_the_rest_is_computed(
    smol: Any, prompt: list[int], files: PemFiles, by: str
) -> None:
    published = kvcs.Prefix(SCOPE, smol.descriptor, prompt)
    shared = published.blocks * 2 // 3
    # The other prompt parts from it inside a block: three tokens more are equal, and not reused.
    other = [*prompt[: 16 * shared + 3], *reversed(prompt[16 * shared + 3 :])]
    assert other[16 * shared + 3] != prompt[16 * shared + 3]
    theirs = kvcs.Prefix(SCOPE, smol.descriptor, other)
    async with (
        sessions(files) as (server, session),
        kvcs.Publisher(server).publish(
            published, first_segment_blocks=shared if by == "anchor" else None
        ) as publication,
    ):
        own = await hf.prefill(smol.model, publication, chunk_tokens=16 * published.blocks)
        index = Directory(publication.uri(server.url), published) if by == "index" else None
        subscriber = kvcs.Subscriber(session, index=index)
        async with subscriber.open(theirs, deadline=120, anchors=(shared,)) as cache:
            assert cache.blocks == shared
            with computed_tokens(smol.model) as counts:
                got = await hf.resume(smol.model, cache)
        report = cache.report
    assert counts == [len(other) - 16 * shared]
    assert (report.tokens, report.prefix_tokens) == (16 * shared, 16 * theirs.blocks)
    assert not report.believed
    own.crop(16 * shared - own.get_seq_length())
    logits = hf.continue_from(smol.model, own, other)
    assert got.logits.tolist() == logits.tolist()
    assert smol.answer(got.cache, got.logits, ANSWER) == smol.answer(own, logits, ANSWER)


LOST = 17
"""A layer in the middle of the thirty."""


async def test_one_lost_layer_is_recomputed_alone(
    smol: Any, prompt: list[int], files: PemFiles
) -> None:
    prefix = kvcs.Prefix(SCOPE, smol.descriptor, prompt)
    tokens = 16 * prefix.blocks
    asked: list[kvcs.MissingLayer] = []
    engine = hf.Recomputer(smol.model, prefix)

    async def recompute(missing: kvcs.MissingLayer) -> tuple[Any, Any]:
        asked.append(missing)
        return await engine(missing)

    async with (
        sessions(files) as (server, session),
        kvcs.Publisher(server).publish(prefix) as publication,
    ):
        own = await hf.prefill(smol.model, publication)
        lose(server, publication, LOST)
        with pytest.raises(kvcs.CacheIncomplete) as caught:
            async with kvcs.Subscriber(session).open(prefix, deadline=120) as cache:
                await cache.complete()
        assert {run.layer for run in caught.value.missing} == {LOST}
        async with kvcs.Subscriber(session).open(
            prefix, deadline=120, recompute=recompute
        ) as cache:
            with computed_layers(smol.model) as computed:
                got = await hf.resume(smol.model, cache)
            report = cache.report
        engine.close()
    [missing] = asked
    assert (missing.layer, missing.first_token, missing.last_token) == (LOST, 0, tokens - 1)
    assert (report.recomputed, report.objects) == (2 * prefix.blocks, 2 * prefix.blocks * 29)
    # The layers below it, once, for all tokens; it itself and those above, never.
    assert [layer for layer, count in computed if count == tokens] == list(range(LOST))
    assert [layer for layer, count in computed if count < tokens] == list(range(30))
    k, v = hf.from_dynamic_cache(own, tokens)[LOST]
    for mine, theirs in zip(hf.from_dynamic_cache(got.cache, tokens)[LOST], (k, v), strict=True):
        assert (mine - theirs).abs().max() <= 0.05 * theirs.abs().max()
    logits = hf.continue_from(smol.model, own, prompt)
    text = smol.answer(own, logits, ANSWER)
    assert len(text) > 2
    assert smol.answer(got.cache, got.logits, ANSWER) == text


def lose(server: kvcs.Server, publication: kvcs.Publication, layer: int) -> None:
    """Make a producer lose a layer of what it has published."""
    for name in (b"k.raw.s0", b"v.raw.s0"):
        track = server.origin._tracks[FullTrackName(publication.namespace, name)]
        assert layer in track.groups
        track.evict_group(layer)


@contextmanager
def computed_layers(model: Any) -> Iterator[list[tuple[int, int]]]:
    """Layers whose last part a pass computes, and for how many tokens."""
    counts: list[tuple[int, int]] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(
            lambda _, inputs, index=index: counts.append((index, inputs[0].shape[1]))
        )
        for index, layer in enumerate(model.model.layers)
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()

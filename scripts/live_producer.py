"""The producer of `scripts/live.py`: publishes a real model's prefill while it computes it.

Says what happens as JSON lines, and waits for a word on standard input: "go" to start, and then
anything to end. Until then whoever comes late is served.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import smollm2

import kvcs
from kvcs.cli.lines import Lines
from kvcs.integrations import transformers as hf

TOLD = Lines(True)


async def word() -> str:
    """The next word from whoever started this; empty when they have left."""
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


async def publish(options: argparse.Namespace, model: smollm2.SmolLM2, prefix: kvcs.Prefix) -> None:
    """Prefill the whole blocks, each layer published as it is computed, and serve them."""
    async with kvcs.connect(options.relay, ca=options.ca) as session:
        async with kvcs.Publisher(session).publish(prefix) as publication:
            cache = await hf.prefill(
                model.model,
                publication,
                on_layer=lambda layer: TOLD.event("layer_computed", layer=layer),
            )
            TOLD.event("published", octets=publication.progress.octets)
            await asyncio.to_thread(answer, options, model, cache, prefix.token_ids.tolist())
            await word()


def answer(
    options: argparse.Namespace, model: smollm2.SmolLM2, cache: Any, token_ids: list[int]
) -> None:
    """Go on from the whole blocks, as every consumer does."""
    logits = hf.continue_from(model.model, cache, token_ids)
    TOLD.event("first_token")
    tokens = model.answer(cache, logits, options.answer_tokens)
    TOLD.event("answered", text=model.tokenizer.decode(tokens), token_ids=tokens)


async def main(options: argparse.Namespace) -> None:
    """Load the model, wait for the word, publish and answer."""
    model = smollm2.SmolLM2()
    _, token_ids = model.prompt(json.loads(options.messages.read_text()))
    TOLD.event("ready", tokens=len(token_ids), block_tokens=smollm2.BLOCK_TOKENS)
    await word()
    scope = kvcs.Scope.from_hex(options.scope_key_file.read_text())
    try:
        prefix = kvcs.Prefix(scope, model.descriptor, token_ids)
    except kvcs.UsageError as exc:
        # Only whole blocks have names under which they can be published.
        TOLD.event("not_published", error=type(exc).__name__, reason=str(exc))
        await asyncio.to_thread(answer, options, model, model.empty_cache(), token_ids)
        await word()
    else:
        await publish(options, model, prefix)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Publish a model's prefill while it computes.")
    parser.add_argument("--relay", required=True)
    parser.add_argument("--ca", type=Path)
    parser.add_argument("--scope-key-file", type=Path, required=True)
    parser.add_argument("--messages", type=Path, required=True, help="the conversation, JSON")
    parser.add_argument("--answer-tokens", type=int, default=32, help="most tokens to choose")
    asyncio.run(main(parser.parse_args()))

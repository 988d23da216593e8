"""The consumer of `scripts/live.py`: its own copy of the model goes on from a cache on the wire.

Says what happens as JSON lines. Words on standard input tell it what to do: "follow" takes the
cache from the relay and answers, recomputing the prompt if it does not come; "recompute" answers
without it; "time" computes up to the first token as fast as it can; "end" ends.
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


class Consumer:
    """One prompt and the model that answers it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model = smollm2.SmolLM2()
        self.descriptor = self.model.descriptor
        if options.layers is not None:
            self._shorten(options.layers)
        messages = json.loads(options.messages.read_text())
        _, self.token_ids = self.model.prompt(messages)

    def _shorten(self, layers: int) -> None:
        """Take layers off the model, while its descriptor says what the publication's does."""
        model = self.model.model
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers

    async def follow(self) -> None:
        """Answer from the cache as it streams in, or recompute and say why."""
        try:
            got = await self._resume()
            how = "streamed"
        except kvcs.KvcsError as exc:
            TOLD.event("recomputing", error=type(exc).__name__, reason=str(exc))
            got = await asyncio.to_thread(self._recompute)
            how = "recomputed"
            TOLD.event("first_token")
        await asyncio.to_thread(self._answer, how, *got)

    async def recompute(self) -> None:
        """Answer without a cache."""
        got = await asyncio.to_thread(self._recompute)
        await asyncio.to_thread(self._answer, "recomputed", *got)

    async def time(self) -> None:
        """Compute the whole prompt in one pass: what a cache has to be compared with."""
        TOLD.event("computing")
        await asyncio.to_thread(
            hf.continue_from, self.model.model, self.model.empty_cache(), self.token_ids
        )
        TOLD.event("first_token")

    async def _resume(self) -> hf.Resumed:
        options = self.options
        scope = kvcs.Scope.from_hex(options.scope_key_file.read_text())
        prefix = kvcs.Prefix(scope, self.descriptor, self.token_ids)
        TOLD.event("following")
        async with kvcs.connect(options.relay, ca=options.ca) as session:
            subscriber = kvcs.Subscriber(session)
            async with subscriber.open(prefix, deadline=options.deadline) as cache:
                watching = asyncio.create_task(self._watch(cache))
                try:
                    got = await hf.resume(
                        self.model.model,
                        cache,
                        on_layer=lambda layer: TOLD.event("layer_in_use", layer=layer),
                    )
                    TOLD.event("first_token")
                    await watching
                finally:
                    watching.cancel()
                return got

    async def _watch(self, cache: kvcs.Cache) -> None:
        """Say when each layer is verified; `resume` waits for the same ones and raises."""
        try:
            async for layer in cache:
                TOLD.event("layer_verified", layer=layer.index)
        except kvcs.KvcsError as exc:
            TOLD.event("stream_ended", error=type(exc).__name__)

    def _recompute(self) -> hf.Resumed:
        """Compute the prompt in the producer's two steps, so that every bit can be the same."""
        whole = len(self.token_ids) // smollm2.BLOCK_TOKENS * smollm2.BLOCK_TOKENS
        cache = self.model.empty_cache()
        if whole:
            hf.continue_from(self.model.model, cache, self.token_ids[:whole])
        return hf.Resumed(cache, hf.continue_from(self.model.model, cache, self.token_ids))

    def _answer(self, how: str, cache: Any, logits: Any) -> None:
        tokens = self.model.answer(cache, logits, self.options.answer_tokens)
        text = self.model.tokenizer.decode(tokens)
        TOLD.event("answered", how=how, text=text, token_ids=tokens)


async def main(options: argparse.Namespace) -> None:
    """Load the model and do what the words say."""
    consumer = Consumer(options)
    TOLD.event("ready")
    does = {"follow": consumer.follow, "recompute": consumer.recompute, "time": consumer.time}
    while (wanted := await word()) in does:
        await does[wanted]()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answer a prompt from a cache on the wire.")
    parser.add_argument("--relay", required=True)
    parser.add_argument("--ca", type=Path)
    parser.add_argument("--scope-key-file", type=Path, required=True)
    parser.add_argument("--messages", type=Path, required=True, help="the conversation, JSON")
    parser.add_argument("--answer-tokens", type=int, default=32, help="most tokens to choose")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds to the last layer")
    parser.add_argument("--layers", type=int, help="use a model of so many layers only")
    asyncio.run(main(parser.parse_args()))

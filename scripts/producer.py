#!/usr/bin/env python
"""A producer to copy from: publishes a KV cache while its layers are computed.

    scripts/producer.py CACHE --relay moqt://127.0.0.1:4433 --ca ca.pem --scope-key KEYFILE

Here the layers come from a file; in an engine, `prefill` is the forward pass.
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import kvcs


async def prefill(file: kvcs.KvFile, tokens: int) -> AsyncIterator[kvcs.KvLayer]:
    """Yield K and V, each [tokens, kv_heads, head_dim], layer by layer as they are computed."""
    for layer in file.layers.values():
        yield kvcs.KvLayer(layer.k[:tokens], layer.v[:tokens])


async def main(options: argparse.Namespace) -> None:
    file = kvcs.load_kv_file(options.cache)
    scope = kvcs.Scope.from_hex(options.scope_key.read_text())
    prefix = kvcs.Prefix(scope, file.descriptor, file.token_ids)

    reconnect = kvcs.Reconnect(deadline=options.reconnect)
    async with kvcs.connect(options.relay, ca=options.ca, reconnect=reconnect) as session:
        async with kvcs.Publisher(session).publish(prefix) as publication:
            segment = await publication.segment()
            layer = 0
            async for k, v in prefill(file, segment.tokens):
                await segment.put(layer, k, v)  # copied: the engine may overwrite k and v now
                layer += 1
            print("published", publication.progress, flush=True)
            # Late consumers fill from here. A relay that stops or is lost is come back to; when it
            # stays away there is nobody left to serve.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(options.retain):
                    await session.gone()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Publish a KV cache file.")
    parser.add_argument("cache", type=Path)
    parser.add_argument("--relay", required=True)
    parser.add_argument("--ca", type=Path)
    parser.add_argument("--scope-key", type=Path, required=True)
    parser.add_argument("--retain", type=float, default=60.0, help="seconds to stay")
    parser.add_argument(
        "--reconnect", type=float, default=60.0, help="seconds to wait for a lost relay"
    )
    try:
        asyncio.run(main(parser.parse_args()))
    except (kvcs.KvcsError, OSError) as exc:
        parser.exit(2, f"{parser.prog}: {exc}\n")
    except KeyboardInterrupt:
        parser.exit(130)

#!/usr/bin/env python
"""A consumer to copy from: attends to each layer as soon as it is whole and verified.

    scripts/consumer.py CACHE --relay moqt://127.0.0.1:4433 --ca ca.pem --scope-key KEYFILE

The file names the prompt: its token ids and descriptor. In an engine these come from the request,
and `attend` is the decode step that was waiting for the layer.
"""

import argparse
import asyncio
import contextlib
from pathlib import Path

import kvcs


def attend(layer: kvcs.Layer) -> None:
    """Use one layer: k and v are numpy arrays [tokens, kv_heads, head_dim], read-only."""
    print(f"layer {layer.index}: k {layer.k.shape} v {layer.v.shape} {layer.k.dtype}", flush=True)


async def main(options: argparse.Namespace) -> None:
    file = kvcs.load_kv_file(options.cache, partial=True)
    scope = kvcs.Scope.from_hex(options.scope_key.read_text())
    prefix = kvcs.Prefix(scope, file.descriptor, file.token_ids)

    async with contextlib.AsyncExitStack() as stack:
        # Where one relay fails, the retrieval goes on over another, or over the same one once it is
        # back: from the first block that is not there, as long as the deadline allows.
        sessions = [
            await stack.enter_async_context(kvcs.connect(url, ca=options.ca))
            for url in options.relay
        ]
        try:
            async with kvcs.Subscriber(*sessions).open(prefix, deadline=options.deadline) as cache:
                async for layer in cache:
                    attend(layer)
        except (kvcs.PublicationNotFound, kvcs.CacheIncomplete) as exc:
            print(f"compute the prefix here instead: {exc}")
            raise SystemExit(3) from None
        print("retrieved", cache.report)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Retrieve a KV cache.")
    parser.add_argument("cache", type=Path)
    parser.add_argument("--relay", required=True, action="append", help="may be repeated")
    parser.add_argument("--ca", type=Path)
    parser.add_argument("--scope-key", type=Path, required=True)
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds to the last layer")
    try:
        asyncio.run(main(parser.parse_args()))
    except (kvcs.KvcsError, OSError) as exc:
        parser.exit(2, f"{parser.prog}: {exc}\n")
    except KeyboardInterrupt:
        parser.exit(130)

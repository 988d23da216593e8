"""`kvcs demo`: relays, producer and consumer as processes on loopback."""

from __future__ import annotations

import asyncio
import secrets
import string
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvcs.cli.certs import make_certificates
from kvcs.cli.children import ChildFailed, run_child
from kvcs.cli.files import write_file
from kvcs.cli.frame import command
from kvcs.cli.options import seconds
from kvcs.cli.output import Output, octets_text
from kvcs.errors import FileError
from kvcs.kv import UNPINNED, Descriptor
from kvcs.kv.identity import SCOPE_KEY_OCTETS
from kvcs.kvfile import KvFile, load_kv_file, save_kv_file

RUN_SECONDS = 60.0
"""Longest wait for the whole exchange, beside what the producer's pace takes."""

REDRAW_SECONDS = 0.05
"""How often the bars are drawn."""

ROWS_SHOWN = 6
"""Layers of the timeline that are printed, about."""

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
"""Where a checkout keeps the KV cache of a real prompt."""


@dataclass(slots=True)
class Timeline:
    """When each layer was published and verified, seconds since 1970."""

    published: dict[int, float] = field(default_factory=dict)
    verified: dict[int, float] = field(default_factory=dict)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "demo")
    async def demo(
        output: Output,
        file: Annotated[
            Path | None,
            typer.Option(
                "--file", metavar="FILE", help="KV cache file; a real prompt's by default."
            ),
        ] = None,
        pace: Annotated[
            float,
            typer.Option(
                "--pace",
                parser=seconds,
                metavar="SECONDS",
                help="Time between layers of the producer.",
            ),
        ] = 0.03,
        chain: Annotated[
            bool,
            typer.Option("--chain", help="Through two relays: B asks A, the producer is at A."),
        ] = False,
    ) -> None:
        """Stream a KV cache through a relay and compare both ends.

        Producer, relay and consumer are processes of their own on this machine.
        """
        with tempfile.TemporaryDirectory(prefix="kvcs-demo-") as folder:
            cache = _cache(output, file, Path(folder))
            timeline = Timeline()
            seconds = RUN_SECONDS + pace * cache.descriptor.layers
            try:
                async with asyncio.timeout(seconds):
                    result = await _exchange(
                        output, cache, Path(folder), pace, timeline, relays=2 if chain else 1
                    )
            except TimeoutError:
                raise ChildFailed(f"the cache was not there within {seconds:g} s") from None
            _show(output, cache, timeline, result)
        if not result["equal"]:
            raise FileError("the received cache differs from the one that was published")


def _cache(output: Output, file: Path | None, folder: Path) -> KvFile:
    """The file that was named, the checkout's, or one of random tensors."""
    found = [file] if file is not None else sorted(DATA.glob("*.safetensors"))
    if found:
        return load_kv_file(found[0])
    output.note("no checkout with a real prompt's cache here: using random tensors")
    path = folder / "random.safetensors"
    descriptor = Descriptor(
        model="random",
        weights=UNPINNED,
        layers=30,
        kv_heads=3,
        head_dim=64,
        dtype="bfloat16",
        block_tokens=16,
    )
    shape = (192, descriptor.kv_heads, descriptor.head_dim)
    random = np.random.default_rng(1)
    layers = [
        [random.standard_normal(shape).astype(descriptor.numpy_dtype) for _ in "kv"]
        for _ in range(descriptor.layers)
    ]
    save_kv_file(path, descriptor, range(shape[0]), [(k, v) for k, v in layers])
    return load_kv_file(path)


async def _exchange(
    output: Output,
    cache: KvFile,
    folder: Path,
    pace: float,
    timeline: Timeline,
    *,
    relays: int = 1,
) -> dict[str, Any]:
    """Run relays, producer and consumer until the consumer has told its result.

    The producer is at the first relay, the consumer at the last; each asks the one before it.
    """
    certificates = folder / "certs"
    make_certificates(certificates, ("localhost", "127.0.0.1"))
    scope_key = folder / "scope.key"
    write_file(scope_key, secrets.token_hex(SCOPE_KEY_OCTETS).encode(), private=True)
    descriptor = cache.descriptor
    output.note(
        f"{descriptor.model}: {descriptor.layers} layers, {cache.blocks} blocks of"
        f" {descriptor.block_tokens} tokens, from {cache.path.name}"
    )
    keys = ("--cert", str(certificates / "cert.pem"), "--key", str(certificates / "key.pem"))
    authority = ("--ca", str(certificates / "ca.pem"))
    common = (*authority, "--scope-key-file", str(scope_key), "--lines")
    async with AsyncExitStack() as stack:
        urls: list[str] = []
        for name in string.ascii_uppercase[:relays]:
            upstream = ("--upstream", urls[-1], *authority) if urls else ()
            options = ("--bind", "127.0.0.1:0", *keys, "--allow-anyone", "--lines", *upstream)
            relay = await stack.enter_async_context(run_child("relay", *options))
            urls.append((await relay.event("listening"))["url"])
            behind = f", whose upstream is {urls[-2]}" if upstream else ""
            named = f"relay {name}" if relays > 1 else "relay"
            output.note(f"{named} at {urls[-1]}{behind}")
        at_first, at_last = ("--relay", urls[0]), ("--relay", urls[-1])
        source = str(cache.path)
        target = ("--out", str(folder / "received.safetensors"), "--compare", source)
        # The exchange as a whole is bounded; the consumer waits as long as it takes.
        patience = ("--deadline", str(2 * RUN_SECONDS + pace * descriptor.layers))
        async with (
            run_child(
                "subscribe", *at_last, *common, "--like", source, *target, *patience
            ) as consumer,
            run_child("publish", source, *at_first, *common, "--pace", str(pace)) as producer,
            asyncio.TaskGroup() as tasks,
        ):
            with _bars(output, descriptor.layers, timeline):
                watching = tasks.create_task(producer.watch("layer_published", timeline.published))
                result = await consumer.watch("layer_verified", timeline.verified, "retrieved")
                watching.cancel()
    return result


@contextmanager
def _bars(output: Output, layers: int, timeline: Timeline) -> Iterator[None]:
    """Two bars that follow a timeline, where somebody watches."""
    if output.as_json or not sys.stderr.isatty():
        yield
        return
    # Rich takes a tenth of a second to import, which quiet runs need not pay.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
    )
    published = bars.add_task("published by the producer", total=layers)
    verified = bars.add_task("verified by the consumer ", total=layers)

    def draw() -> None:
        bars.update(published, completed=len(timeline.published))
        bars.update(verified, completed=len(timeline.verified))

    async def follow() -> None:
        while True:
            draw()
            await asyncio.sleep(REDRAW_SECONDS)

    with bars:
        task = asyncio.get_running_loop().create_task(follow())
        try:
            yield
        finally:
            task.cancel()
            draw()


def _show(output: Output, cache: KvFile, timeline: Timeline, result: dict[str, Any]) -> None:
    begun = min([*timeline.published.values(), *timeline.verified.values()])
    rows = [
        {
            "layer": layer,
            "published_ms": _milliseconds(timeline.published.get(layer), begun),
            "verified_ms": _milliseconds(timeline.verified.get(layer), begun),
        }
        for layer in range(cache.descriptor.layers)
    ]
    if output.as_json:
        output.result({**result, "timeline": rows}, [])
        return
    shown = rows[:: max(1, len(rows) // ROWS_SHOWN)]
    if rows[-1] not in shown:
        shown.append(rows[-1])
    print("layer  published  verified   (ms since the first layer was published)")
    for row in shown:
        print(f"{row['layer']:>5}  {row['published_ms']!s:>9}  {row['verified_ms']!s:>8}")
    goodput = result["goodput_octets_per_second"] or 0
    output.result(
        result,
        [
            ("tracks", " ".join(result["tracks"])),
            ("layers", result["layers"]),
            ("objects", result["objects"]),
            ("octets", octets_text(result["octets"])),
            ("first layer", f"{result['first_layer_seconds']:.3f} s after the consumer opened"),
            ("last layer", f"{result['last_layer_seconds']:.3f} s"),
            ("goodput", f"{octets_text(goodput)}/s, paced by the producer"),
            (
                "verdict",
                "equal, byte for byte" if result["equal"] else "DIFFERENT from what was published",
            ),
        ],
    )


def _milliseconds(when: float | None, begun: float) -> int | None:
    return None if when is None else round((when - begun) * 1000)

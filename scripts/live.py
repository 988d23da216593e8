"""A real model on both sides of a relay: the text that a consumer decodes is the producer's.

    scripts/demo --live                          # sets everything up, then runs this

Four processes on one machine. A producer prefills a prompt and publishes each layer's keys and
values when it has computed them; a relay forwards them; a consumer's own copy of the model goes on
from the streamed cache. Then the consumer recomputes the prompt, and once more takes the cache,
which is now complete. Every answer must be the same, token by token.

Exit codes: 0 the same answers, from the streamed cache; 1 they differ; 2 bad input, or a process
failed; 3 the same answers, but the consumer had to recompute the prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import live_report
import smollm2
from make_test_data import MESSAGES

from kvcs.cli.certs import make_certificates
from kvcs.cli.children import Child, ChildFailed, run_child
from kvcs.cli.failures import report
from kvcs.cli.files import write_file
from kvcs.kv.identity import SCOPE_KEY_OCTETS

LOAD_SECONDS = 180.0
"""Longest wait for a process to import its libraries and load the model."""

ANSWER_SECONDS = 300.0
"""Longest wait for an answer."""

KILL_AT = ("layer_computed", 10)
"""When the producer is killed, where that is wanted: a third of its prefill is done."""

KILL_AT_VERIFIED = ("layer_verified", 10)
"""When the consumer is."""

HERE = Path(__file__).resolve().parent


@dataclass(slots=True)
class Heard:
    """What one process said about one answer."""

    events: list[dict[str, Any]] = field(default_factory=list)
    died: bool = False

    def at(self, name: str) -> float | None:
        """When something was first said, seconds since 1970."""
        return next((event["at"] for event in self.events if event["event"] == name), None)

    def layers(self, name: str) -> dict[int, float]:
        """When something happened to each layer."""
        return {e["layer"]: e["at"] for e in self.events if e["event"] == name}

    def fact(self, name: str, member: str) -> Any:
        """A member of the first event of a name, or None."""
        return next((e[member] for e in self.events if e["event"] == name), None)


async def hear(
    child: Child, last: str = "answered", *, kill_at: tuple[str, int] | None = None
) -> Heard:
    """Listen to a process until it has answered, or kill it at a layer.

    Args:
        child: the process.
        last: the event that is waited for.
        kill_at: an event and a layer at which it is killed without warning.

    Raises:
        ChildFailed: it ended by itself.
        TimeoutError: it never answered.
    """
    heard = Heard()
    async with asyncio.timeout(ANSWER_SECONDS):
        while heard.at(last) is None:
            try:
                event = await child.next_event()
            except ChildFailed:
                if not heard.died:
                    raise
                break
            heard.events.append(event)
            if kill_at == (event["event"], event.get("layer")):
                heard.died = True
                child.process.kill()
    return heard


class Stage:
    """The relay and what every process needs to use it.

    Args:
        options: the command line.
        folder: a folder that is removed afterwards.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self._folder = folder
        self._url = ""

    @asynccontextmanager
    async def set(self) -> AsyncIterator[None]:
        """Make keys, write the conversation down, and run the relay."""
        folder, prompt = self._folder, self.options.prompt
        make_certificates(folder / "certs", ("localhost", "127.0.0.1"))
        key = secrets.token_hex(SCOPE_KEY_OCTETS).encode()
        write_file(folder / "scope.key", key, private=True)
        messages = MESSAGES
        if prompt is not None:
            messages = [{"role": "system", "content": ""}, {"role": "user", "content": prompt}]
        (folder / "messages.json").write_text(json.dumps(messages))
        certs = ("--cert", str(folder / "certs/cert.pem"), "--key", str(folder / "certs/key.pem"))
        bind = ("--bind", "127.0.0.1:0", "--allow-anyone", "--lines")
        async with run_child("relay", *bind, *certs) as relay:
            self._url = (await relay.event("listening"))["url"]
            yield

    @asynccontextmanager
    async def process(self, name: str, *arguments: str) -> AsyncIterator[Child]:
        """Run the producer or a consumer."""
        async with run_child(
            *("--relay", self._url, "--ca", str(self._folder / "certs/ca.pem")),
            *("--scope-key-file", str(self._folder / "scope.key")),
            *("--messages", str(self._folder / "messages.json")),
            *("--answer-tokens", str(self.options.answer_tokens)),
            *arguments,
            program=(sys.executable, str(HERE / f"live_{name}.py")),
            name=name,
        ) as child:
            yield child

    async def run(self) -> dict[str, Any]:
        """Let producer and consumer do their parts; returns what `live_report` shows."""
        fault = self.options.fault
        flags = ["--deadline", str(self.options.deadline)]
        if fault == "other-model":
            flags += ["--layers", "29"]
        async with AsyncExitStack() as stack:
            producer = await stack.enter_async_context(self.process("producer"))
            consumer = await stack.enter_async_context(self.process("consumer", *flags))
            ready = await producer.event("ready", LOAD_SECONDS)
            await consumer.event("ready", LOAD_SECONDS)
            note(f"relay at {self._url}; producer and consumer have loaded {smollm2.MODEL}")
            begun = time.time()
            await asyncio.gather(producer.tell("go"), consumer.tell("follow"))
            produced, followed = await asyncio.gather(
                hear(producer, kill_at=KILL_AT if fault == "producer-killed" else None),
                hear(consumer, kill_at=KILL_AT_VERIFIED if fault == "consumer-killed" else None),
            )
            asked = begun
            if followed.died:
                note("the consumer was killed in mid-prefill; starting another one")
                consumer = await stack.enter_async_context(self.process("consumer", *flags))
                await consumer.event("ready", LOAD_SECONDS)
                asked = time.time()
                await consumer.tell("follow")
                followed = await hear(consumer)
            await consumer.tell("recompute")
            recomputed = await hear(consumer)
            late = timed = None
            if fault is None:
                await consumer.tell("time")
                timed = await hear(consumer, "first_token")
            if fault is None and followed.fact("answered", "how") == "streamed":
                await consumer.tell("follow")
                late = await hear(consumer)
            for child in (producer, consumer):
                await child.tell("end")
        return live_report.document(
            live_report.Run(ready, fault, begun, asked, produced, followed, recomputed, timed, late)
        )


def note(text: str) -> None:
    """Tell a person something on the way."""
    print(f"live: {text}", file=sys.stderr)


async def prepare() -> None:
    """Get the model ready before two processes load it at once."""
    if not smollm2.UNPACKED.is_dir():
        process = await asyncio.create_subprocess_exec(sys.executable, str(HERE / "smollm2.py"))
        if await process.wait() != 0:
            raise ChildFailed(f"{smollm2.MODEL} cannot be made ready; see above")


async def main(options: argparse.Namespace) -> int:
    """Run the demonstration and print what happened; returns the exit code."""
    await prepare()
    with tempfile.TemporaryDirectory(prefix="kvcs-live-") as folder:
        stage = Stage(options, Path(folder))
        async with stage.set():
            result = await stage.run()
    if options.json:
        print(json.dumps(result, ensure_ascii=False, indent=2))
    else:
        print("\n".join(live_report.lines(result)))
    return live_report.exit_code(result)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo --live",
        description="Stream a real model's KV cache through a relay while it is computed.",
    )
    parser.add_argument("--prompt", help="what the model is asked; by default about a text")
    parser.add_argument("--answer-tokens", type=int, default=32, help="most tokens to choose")
    parser.add_argument(
        "--deadline", type=float, default=60.0, help="seconds from opening to the last layer"
    )
    parser.add_argument(
        "--fault",
        choices=("producer-killed", "consumer-killed", "other-model"),
        help="let something go wrong in mid-prefill, to see what the consumer does",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main(parse())))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as exc:
        sys.exit(report(exc, sys.stderr))

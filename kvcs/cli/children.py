"""Runs `kvcs` commands and other programs as processes and follows their JSON lines."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvcs.errors import KvcsError

READY_SECONDS = 15.0
"""Longest wait for an event of a process, and for its end when it is told to."""


KVCS = (sys.executable, "-m", "kvcs")
"""How the command is started."""


class ChildFailed(KvcsError):
    """One of the processes failed; the message repeats what it said."""


class Child:
    """One process that prints its events as JSON lines."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self.process = process

    async def next_event(self) -> dict[str, Any]:
        """The next event.

        Raises:
            ChildFailed: the process ended instead.
        """
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise ChildFailed(f"the {self._name} ended early: {await self._complaint()}")
        event: dict[str, Any] = json.loads(line)
        return event

    async def tell(self, word: str) -> None:
        """Write a line to the process's standard input; one that has ended hears nothing."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())
        try:
            await self.process.stdin.drain()
        except ConnectionError:
            return

    async def event(self, name: str, seconds: float = READY_SECONDS) -> dict[str, Any]:
        """The next event of that name.

        Raises:
            ChildFailed: the process ended instead, or the event did not come in time.
        """
        try:
            async with asyncio.timeout(seconds):
                while True:
                    event = await self.next_event()
                    if event["event"] == name:
                        return event
        except TimeoutError:
            raise ChildFailed(f"the {self._name} was not {name} within {seconds:g} s") from None

    async def watch(
        self, layer_event: str, times: dict[int, float], last: str | None = None
    ) -> dict[str, Any]:
        """Note when layers happen, until the event ``last``, which is returned."""
        while True:
            event = await self.next_event()
            if event["event"] == layer_event:
                times[event["layer"]] = event["at"]
            elif event["event"] == last:
                return event

    async def _complaint(self) -> str:
        assert self.process.stderr is not None
        text = (await self.process.stderr.read()).decode(errors="replace").strip()
        return text.splitlines()[-1] if text else f"exit code {await self.process.wait()}"


@asynccontextmanager
async def run_child(
    *arguments: str, program: Sequence[str] = KVCS, name: str | None = None
) -> AsyncIterator[Child]:
    """Run a program; leaving the context ends it.

    Args:
        arguments: what stands behind the program.
        program: what is run; `kvcs` by default.
        name: what messages call it; the first argument by default.
    """
    process = await asyncio.create_subprocess_exec(
        *program,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Child(name or arguments[0], process)
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(READY_SECONDS):
                    # Its pipes are read to the end, so that it cannot block on writing.
                    await process.communicate()
            except TimeoutError:
                process.kill()
                await process.wait()

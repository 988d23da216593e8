"""Runs `kvcs` commands as processes of their own and follows their JSON lines."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvcs.errors import KvcsError

READY_SECONDS = 15.0
"""Longest wait for an event of a process, and for its end when it is told to."""


class ChildFailed(KvcsError):
    """One of the processes failed; the message repeats what it said."""


class Child:
    """One `kvcs` command that prints its events as JSON lines."""

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

    async def event(self, name: str) -> dict[str, Any]:
        """The next event of that name."""
        async with asyncio.timeout(READY_SECONDS):
            while True:
                event = await self.next_event()
                if event["event"] == name:
                    return event

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
async def run_child(*arguments: str) -> AsyncIterator[Child]:
    """Run a `kvcs` command; leaving the context ends it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvcs",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Child(arguments[0], process)
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

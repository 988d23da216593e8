"""Starts the processes of a measurement, follows them, and ends them whatever happens."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from kvcs.errors import KvcsError

ROOT: Final = Path(__file__).resolve().parents[2]
"""The folder that holds the package: a checkout, or where it is installed."""

EXIT_SECONDS: Final = 10.0
"""Longest wait for a process that was told to end, before it is killed."""

MAX_LINE: Final = 1 << 20


class ChildFailed(KvcsError):
    """A process ended before it said what it was to say; the message repeats its complaint."""


class Unavailable(KvcsError):
    """Something that is measured beside kvcs is not on this machine; the message says what."""


class Child:
    """One process of the bench."""

    def __init__(self, role: str, process: asyncio.subprocess.Process) -> None:
        self.role = role
        self.process = process

    def tell(self, word: str) -> None:
        """Tell it a word."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())

    async def event(self, name: str) -> dict[str, Any]:
        """Its next event, which must be this.

        Raises:
            ChildFailed: it ended, or said something else.
        """
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise ChildFailed(await self._early_end())
        event: dict[str, Any] = json.loads(line)
        if event.pop("event") != name:
            raise ChildFailed(f"{self.role} said {line!r} in the place of {name}")
        return event

    async def ready(self, options: dict[str, Any]) -> str:
        """Give it its options and wait until it is ready; returns where it is reached."""
        self.tell(json.dumps(options))
        return str((await self.event("ready"))["url"])

    async def ended(self) -> str:
        """Wait until it has ended, which it should not; returns what to say of it."""
        await self.process.wait()
        return await self._early_end()

    async def _early_end(self) -> str:
        return f"{self.role} ended early: {await self._complaint()}"

    async def _complaint(self) -> str:
        assert self.process.stderr is not None
        text = (await self.process.stderr.read()).decode(errors="replace").strip()
        return text.splitlines()[-1] if text else f"exit code {await self.process.wait()}"


@asynccontextmanager
async def child(role: str, loop: str = "asyncio") -> AsyncIterator[Child]:
    """Start a process of the bench; leaving the context waits for its end or ends it.

    Args:
        role: what it does, see `worker.ROLES`.
        loop: what it runs on, "asyncio" or "uvloop".
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "kvcs.bench.worker", role, loop),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=MAX_LINE,
    )
    killed = True
    try:
        yield Child(role, process)
        killed = False
    finally:
        await _end(process, at_once=killed)


async def _end(process: asyncio.subprocess.Process, *, at_once: bool) -> None:
    if process.returncode is not None:
        return
    if at_once:
        process.kill()
    try:
        async with asyncio.timeout(EXIT_SECONDS):
            # Its pipes are read to the end, so that it cannot block on writing.
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()

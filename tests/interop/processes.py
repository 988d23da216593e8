"""Child processes with deadlines: start one, wait until it is ready, read what it says, end it.

Nothing here waits by sleeping: every wait is for a line of output or for the end of the
process, and every wait has a deadline.
"""

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

T = TypeVar("T")

LINE_LIMIT = 4 * 1024 * 1024
"""Longest line of output in octets."""

TAIL_LINES = 40
"""Lines of each stream that an error message shows."""

STOP_SECONDS = 20.0
"""Between SIGTERM and SIGKILL."""


class ProcessFailed(Exception):
    """A process ended too early, said nothing in time, or could not be started."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to start."""

    name: str
    """How messages call it."""

    argv: tuple[str, ...]

    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Changes to the environment of the driver; None removes a variable."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a process left behind."""

    name: str
    returncode: int
    """Negative: the number of the signal that ended it."""

    stdout: str
    stderr: str
    events: list[dict[str, Any]]
    """The lines of standard output that were JSON objects, in order."""


class Process:
    """A running child whose output is kept line by line."""

    def __init__(self, name: str, child: asyncio.subprocess.Process) -> None:
        self.name = name
        self.events: list[dict[str, Any]] = []
        self._child = child
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._changed = asyncio.Event()
        assert child.stdout is not None and child.stderr is not None
        self._readers = (
            asyncio.create_task(self._read("stdout", child.stdout)),
            asyncio.create_task(self._read("stderr", child.stderr)),
        )

    @classmethod
    async def start(cls, spec: ProcessSpec) -> Self:
        """Start what ``spec`` says.

        Raises:
            ProcessFailed: If the program cannot be executed.
        """
        environment = {**os.environ, **spec.environment}
        try:
            child = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=LINE_LIMIT,
                env={name: value for name, value in environment.items() if value is not None},
            )
        except OSError as error:
            raise ProcessFailed(f"{spec.name} did not start: {error}") from error
        return cls(spec.name, child)

    @property
    def pid(self) -> int:
        """Process ID, as seen in the driver's namespace."""
        return self._child.pid

    async def wait_ready(self, pattern: str, *, seconds: float = 60.0) -> re.Match[str]:
        """Return the first match of ``pattern`` in any line said so far or from now on.

        Raises:
            ProcessFailed: If the process ends first, or the time is over.
        """

        def find() -> re.Match[str] | None:
            for lines in self._lines.values():
                for line in lines:
                    if match := re.search(pattern, line):
                        return match
            return None

        return await self._until(find, f"/{pattern}/", seconds)

    async def wait_event(
        self, event: str, *, seconds: float = 60.0, **members: object
    ) -> dict[str, Any]:
        """Return the first JSON line, past or future, whose ``event`` and members are these.

        Raises:
            ProcessFailed: If the process ends first, or the time is over.
        """
        wanted = {"event": event, **members}

        def find() -> dict[str, Any] | None:
            for said in self.events:
                if all(name in said and said[name] == value for name, value in wanted.items()):
                    return said
            return None

        return await self._until(find, str(wanted), seconds)

    async def send_line(self, line: str) -> None:
        """Write one line to its standard input."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(line.encode() + b"\n")
            await self._child.stdin.drain()
        except ConnectionError as error:
            raise ProcessFailed(f"{self.name} does not listen: {error}\n{self.tail()}") from error

    async def collect(self, *, seconds: float = 90.0) -> Finished:
        """Wait until the process ends by itself.

        Raises:
            ProcessFailed: If the time is over; the process goes on.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._child.wait()
                await asyncio.gather(*self._readers)
        except TimeoutError:
            raise ProcessFailed(
                f"{self.name} still runs after {seconds:g} s\n{self.tail()}"
            ) from None
        return self._finished()

    async def stop(self) -> Finished:
        """End the process by its ID: SIGTERM, then SIGKILL. One that has ended is left as it is."""
        for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
            if self._child.returncode is not None:
                break
            try:
                self._child.send_signal(number)
                async with asyncio.timeout(seconds):
                    await self._child.wait()
            except (ProcessLookupError, TimeoutError):
                continue
        return await self.collect(seconds=STOP_SECONDS)

    def tail(self) -> str:
        """Return the end of what it said, for a person to read."""
        parts = [f"--- {self.name} (pid {self.pid}, exit {self._child.returncode})"]
        for stream, lines in self._lines.items():
            parts += [f"{stream}: {line}" for line in lines[-TAIL_LINES:]]
        return "\n".join(parts)

    def _finished(self) -> Finished:
        assert self._child.returncode is not None
        return Finished(
            self.name,
            self._child.returncode,
            "".join(f"{line}\n" for line in self._lines["stdout"]),
            "".join(f"{line}\n" for line in self._lines["stderr"]),
            list(self.events),
        )

    async def _until(self, find: Callable[[], T | None], what: str, seconds: float) -> T:
        try:
            async with asyncio.timeout(seconds):
                while True:
                    # Read the end before looking, or the last lines of a process could be missed.
                    ended = all(reader.done() for reader in self._readers)
                    if (found := find()) is not None:
                        return found
                    if ended:
                        await self._child.wait()
                        raise ProcessFailed(f"{self.name} ended without {what}\n{self.tail()}")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise ProcessFailed(
                f"{self.name} did not say {what} in {seconds:g} s\n{self.tail()}"
            ) from None

    async def _read(self, stream: str, source: asyncio.StreamReader) -> None:
        try:
            while raw := await source.readline():
                line = raw.decode(errors="replace").rstrip("\n")
                self._lines[stream].append(line)
                if stream == "stdout" and line.startswith("{"):
                    self._take_event(line)
                self._changed.set()
        except ValueError as error:  # a line longer than LINE_LIMIT
            self._lines[stream].append(f"[{error}]")
        finally:
            # The flag wakes a waiter, which then sees that this reader is done.
            asyncio.get_running_loop().call_soon(self._changed.set)

    def _take_event(self, line: str) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            return
        if isinstance(said, dict):
            self.events.append(said)

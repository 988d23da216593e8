"""How a process of the bench speaks with the one that started it."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any


class Parent:
    """The process that started this one."""

    def __init__(self, words: asyncio.StreamReader) -> None:
        self._words = words

    @classmethod
    async def connect(cls) -> Parent:
        """Watch standard input."""
        words = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
        return cls(words)

    def tell(self, event: str, **facts: Any) -> None:
        """Say that something happened."""
        print(json.dumps({"event": event, **facts}), flush=True)

    def ready(self, url: str = "") -> None:
        """Say that what this process needs is imported and set up, and where it is reached.

        From here on garbage collections pass over that, as in a process of a command of kvcs.
        """
        gc.freeze()
        self.tell("ready", url=url)

    async def options(self) -> dict[str, Any]:
        """Wait for what this process is to do; it comes once, before every word.

        Raises:
            EOFError: the parent is gone.
        """
        line = await self._words.readline()
        if not line:
            raise EOFError("no options came")
        found: dict[str, Any] = json.loads(line)
        return found

    async def word(self, expected: str) -> None:
        """Wait to be told a word.

        Raises:
            EOFError: the parent is gone, or says something else.
        """
        line = (await self._words.readline()).decode().strip()
        if line != expected:
            raise EOFError(f"told {line!r}, not {expected!r}")


Role = Callable[[Parent, dict[str, Any]], Awaitable[None]]
"""What a process does, with the options that it was given."""

"""One process of the bench: ``python -m bench.worker ROLE JSON``, started by `bench.children`.

It tells events as JSON lines on standard output and is told words on standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib import import_module
from typing import Any, Final

from bench.parent import Parent, Role

LIFE_SECONDS: Final = 120.0
"""Longest life of a process, whatever became of its parent."""

ROLES: Final = {
    "producer": "bench.roles.streaming:producer",
    "consumer": "bench.roles.streaming:consumer",
    "relay": "bench.roles.streaming:relay",
    "raw-sender": "bench.roles.raw:sender",
    "raw-receiver": "bench.roles.raw:receiver",
    "stock-sender": "bench.roles.stock:sender",
    "stock-receiver": "bench.roles.stock:receiver",
}
"""Each in a module of its own, so that a process imports only what its role needs."""


async def run(role: str, options: dict[str, Any]) -> None:
    """Play one role to its end."""
    module, _, name = ROLES[role].partition(":")
    play: Role = getattr(import_module(module), name)
    async with asyncio.timeout(LIFE_SECONDS):
        await play(await Parent.connect(), options)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], json.loads(sys.argv[2])))

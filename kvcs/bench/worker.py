"""One process of the bench: ``python -m kvcs.bench.worker ROLE LOOP``, started by `children`.

It is given its options as the first line of standard input and then words, and tells events as
JSON lines on standard output.
"""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from typing import Final

from kvcs.bench.parent import Parent, Role

ROLES: Final = {
    "producer": "streaming:producer",
    "consumer": "streaming:consumer",
    "relay": "streaming:relay",
    "churner": "churn:churner",
    "watched-relay": "churn:relay",
    "raw-sender": "raw:sender",
    "raw-receiver": "raw:receiver",
    "stock-sender": "stock:sender",
    "stock-receiver": "stock:receiver",
    "tcp-sender": "tcp:sender",
    "tcp-receiver": "tcp:receiver",
    "http-sender": "http:sender",
    "http-receiver": "http:receiver",
    "redis-sender": "redis_store:sender",
    "redis-receiver": "redis_store:receiver",
    "link": "link:link",
}
"""Each in a module of its own, so that a process imports only what its role needs."""


async def run(role: str) -> None:
    """Play one role to its end."""
    module, _, name = ROLES[role].partition(":")
    # Imported before the options come: the processes of a case get ready side by side.
    play: Role = getattr(import_module(f"kvcs.bench.roles.{module}"), name)
    parent = await Parent.connect()
    options = await parent.options()
    async with asyncio.timeout(options["seconds"]):
        await play(parent, options)


def main(role: str, loop: str) -> None:
    """Play a role on asyncio's own loop, or on uvloop's."""
    factory = None if loop == "asyncio" else import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run(role))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Roles of HTTP/1.1 by aiohttp: one GET for each Object, several in flight."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final

from aiohttp import ClientSession, web

from kvcs.bench.parent import Parent
from kvcs.bench.usage import Meter
from kvcs.bench.workload import Workload

LOOPBACK: Final = "127.0.0.1"
IN_FLIGHT: Final = 8
"""Requests at a time, each on a connection of its own."""


async def sender(parent: Parent, options: dict[str, Any]) -> None:
    """Serve Objects."""
    workload = Workload(**options["workload"])
    payload = os.urandom(workload.data_octets)

    async def serve(_: web.Request) -> web.Response:
        return web.Response(body=payload)

    application = web.Application()
    application.router.add_get("/{number}", serve)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, LOOPBACK, 0)
        await site.start()
        parent.ready(str(runner.addresses[0][1]))
        await parent.word("go")
        meter = Meter()
        await parent.word("stop")
        meter.stop()
        parent.tell("sent", **meter.reading())
    finally:
        await runner.cleanup()


async def receiver(parent: Parent, options: dict[str, Any]) -> None:
    """Get every Object."""
    workload = Workload(**options["workload"])
    numbers = iter(range(workload.objects))
    octets = 0

    async def get(session: ClientSession) -> None:
        nonlocal octets
        for number in numbers:
            async with session.get(f"/{number}") as response:
                response.raise_for_status()
                body = await response.read()
                octets += len(body)

    async with ClientSession(f"http://{LOOPBACK}:{options['url']}") as session:
        parent.ready()
        await parent.word("go")
        meter = Meter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(IN_FLIGHT):
                tasks.create_task(get(session))
        meter.stop()
        parent.tell("received", octets=octets, **meter.reading())
        await parent.word("check")
        parent.tell("checked")

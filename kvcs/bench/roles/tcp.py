"""Roles of plain TCP by asyncio streams: no encryption, no order of use, nothing verified."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final

from kvcs.bench.parent import Parent
from kvcs.bench.usage import Meter
from kvcs.bench.workload import Workload

LOOPBACK: Final = "127.0.0.1"
WAITING_OCTETS: Final = 1 << 22
"""What a stream reader holds unread, at most twice."""


async def sender(parent: Parent, options: dict[str, Any]) -> None:
    """Listen, and write one Object after the other to the one client when told."""
    workload = Workload(**options["workload"])
    payload = os.urandom(workload.data_octets)
    client: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client.set_result(writer)

    server = await asyncio.start_server(accept, LOOPBACK, 0)
    async with server:
        parent.ready(str(server.sockets[0].getsockname()[1]))
        await parent.word("go")
        writer = await client
        meter = Meter()
        for _ in range(workload.objects):
            writer.write(payload)
            await writer.drain()
        await parent.word("stop")
        meter.stop()
        parent.tell("sent", **meter.reading())
        writer.close()


async def receiver(parent: Parent, options: dict[str, Any]) -> None:
    """Connect, and read Object after Object."""
    workload = Workload(**options["workload"])
    port = int(options["url"])
    reader, writer = await asyncio.open_connection(LOOPBACK, port, limit=WAITING_OCTETS)
    try:
        parent.ready()
        await parent.word("go")
        meter = Meter()
        octets = 0
        for _ in range(workload.objects):
            octets += len(await reader.readexactly(workload.data_octets))
        meter.stop()
        parent.tell("received", octets=octets, **meter.reading())
        await parent.word("check")
        parent.tell("checked")
    finally:
        writer.close()

"""Roles of Redis: values are set first, then every one is got over several connections."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import Any, Final

from redis.asyncio import Redis

from kvcs.bench.parent import Parent
from kvcs.bench.usage import Meter
from kvcs.bench.workload import Workload

IN_FLIGHT: Final = 8
"""Connections, each with one GET at a time."""

RUN_SERVER: Final = """
"$@" >/dev/null 2>&1 &
server=$!
echo $server
read -r _
kill $server
"""
"""Runs the server until standard input ends, which it does whatever becomes of this process."""

TRIES: Final = 200
TRY_SECONDS: Final = 0.05


async def _until_up(client: Redis) -> None:
    from redis.exceptions import ConnectionError as NotYet

    for _ in range(TRIES):
        try:
            await client.ping()
            return
        except NotYet:
            await asyncio.sleep(TRY_SECONDS)
    raise TimeoutError("redis-server does not answer")


async def sender(parent: Parent, options: dict[str, Any]) -> None:
    """Run a server without persistence on a socket of its own, and set every Object."""
    workload = Workload(**options["workload"])
    program = shutil.which("redis-server")
    assert program is not None  # whoever starts this has looked
    path = f"{options['folder']}/redis-{os.getpid()}.sock"
    arguments = ("--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no")
    server = await asyncio.create_subprocess_exec(
        *("sh", "-c", RUN_SERVER, "sh", program, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        pid = int(await server.stdout.readline())
        async with Redis(unix_socket_path=path) as client:
            await _until_up(client)
            parent.ready(path)
            await parent.word("go")
            payload = os.urandom(workload.data_octets)
            for number in range(workload.objects):
                await client.set(f"object:{number}", payload)
            meter, cpu = Meter(), _server_cpu_seconds(pid)
            parent.tell("put")
            await parent.word("stop")
            meter.stop()
            reading = meter.reading()
            # This process only waits: what counts is what the server uses.
            reading["cpu_seconds"] = _server_cpu_seconds(pid) - cpu
            reading["peak_octets"] = int((await client.info("memory"))["used_memory_peak"])
            parent.tell("sent", computed_at=[], **reading)
    finally:
        server.stdin.close()
        await server.wait()


async def receiver(parent: Parent, options: dict[str, Any]) -> None:
    """Get every Object."""
    workload = Workload(**options["workload"])
    numbers = iter(range(workload.objects))
    octets = 0

    async def get(client: Redis) -> None:
        nonlocal octets
        for number in numbers:
            value = await client.get(f"object:{number}")
            octets += len(value or b"")

    async with Redis(unix_socket_path=options["url"], max_connections=IN_FLIGHT) as client:
        await client.ping()
        parent.ready()
        await parent.word("go")
        meter = Meter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(IN_FLIGHT):
                tasks.create_task(get(client))
        meter.stop()
        parent.tell("received", octets=octets, **meter.reading())
        await parent.word("check")
        parent.tell("checked")


def _server_cpu_seconds(pid: int) -> float:
    """User and system time of another process (Linux)."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

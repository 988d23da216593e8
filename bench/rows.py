"""One transfer of each kind: which processes it takes, and what they say of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.children import Child, ChildFailed, child
from bench.figures import Process, Sample
from bench.workload import Workload

TRANSFER_SECONDS: Final = 90.0
"""Longest time of one transfer, the start of its processes included."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files of a server for 127.0.0.1."""

    folder: Path

    def to_json(self) -> dict[str, str]:
        """For a process of the bench."""
        return {name: str(self.folder / f"{name}.pem") for name in ("ca", "cert", "key")}


async def raw(workload: Workload, certificates: Certificates) -> Sample:
    """The backend's transport alone, with the settings that kvcs uses."""
    return await _transfer("raw-sender", "raw-receiver", workload, certificates)


async def stock(workload: Workload, certificates: Certificates) -> Sample:
    """The library's own asyncio protocol and settings."""
    return await _transfer("stock-sender", "stock-receiver", workload, certificates)


async def direct(workload: Workload, certificates: Certificates) -> Sample:
    """A listening producer and a consumer, live: each layer leaves as soon as it is put."""
    return await _transfer("producer", "consumer", workload, certificates)


async def relay(workload: Workload, certificates: Certificates) -> Sample:
    """The same through our relay."""
    return await _transfer("producer", "consumer", workload, certificates, relay_role="relay")


ROWS: Final[dict[str, Callable[[Workload, Certificates], Awaitable[Sample]]]] = {
    "raw": raw,
    "direct": direct,
    "relay": relay,
    "stock": stock,
}


async def _transfer(
    sender_role: str,
    receiver_role: str,
    workload: Workload,
    certificates: Certificates,
    relay_role: str | None = None,
) -> Sample:
    """Start the processes in order, let them go, and gather what they measured.

    Raises:
        ChildFailed: a process failed, or what arrived is not what was sent.
        TimeoutError: it took longer than `TRANSFER_SECONDS`.
    """
    options = {"workload": workload.to_json(), **certificates.to_json()}
    children: dict[str, Child] = {}
    async with asyncio.timeout(TRANSFER_SECONDS), AsyncExitStack() as stack:

        async def start(name: str, role: str) -> str:
            children[name] = await stack.enter_async_context(child(role, options))
            return str((await children[name].event("ready"))["url"])

        if relay_role is not None:
            options["relay"] = await start("relay", relay_role)
        options["url"] = await start("sender", sender_role)
        await start("receiver", receiver_role)
        for each in reversed(children.values()):
            each.tell("go")
        received = await children["receiver"].event("received")
        readings = {"receiver": received}
        for name in ("sender", "relay"):
            if name in children:
                children[name].tell("stop")
                readings[name] = await children[name].event("sent")
    return sample(workload, readings)


def sample(workload: Workload, readings: dict[str, dict[str, Any]]) -> Sample:
    """Join what the processes of one transfer said.

    Raises:
        ChildFailed: the receiver confirmed something else than what was to be sent.
    """
    received, sent = readings["receiver"], readings["sender"]
    if received["octets"] != workload.octets:
        raise ChildFailed(f"{received['octets']} of {workload.octets} octets were confirmed")
    digests_match = None
    if "digest" in received:
        digests_match = received["digest"] == sent["digest"]
        if not digests_match or received["objects"] != workload.objects:
            raise ChildFailed(f"{received['objects']} of {workload.objects} objects were verified")
    order = [name for name in ("sender", "relay", "receiver") if name in readings]
    return Sample(
        octets=received["octets"],
        seconds=received["at"] - sent["started_at"],
        processes={
            name: Process(readings[name]["cpu_seconds"], readings[name]["peak_octets"])
            for name in order
        },
        objects_verified=received.get("objects", 0),
        digests_match=digests_match,
    )

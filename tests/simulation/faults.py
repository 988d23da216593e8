"""What goes wrong on a virtual network, how it is made to, and how it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvcs.testing.network import Network, Path

FaultKind = Literal[
    "blackout", "long blackout", "sever", "move", "stall", "mtu", "burst", "kill", "restart"
]

HARMLESS: frozenset[FaultKind] = frozenset({"move", "stall", "blackout", "burst", "mtu"})
"""Faults that a connection outlives, so a retrieval with enough time must be complete."""

KILLED = 0x1
"""Code with which a transport is closed behind its session's back."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong."""

    at: float
    kind: FaultKind
    host: str
    seconds: float


async def strike(
    network: Network,
    fault: Fault,
    middles: Sequence[str],
    restart: Callable[[float], Awaitable[None]],
) -> None:
    """Let a fault happen when it is time.

    Args:
        network: where.
        fault: what.
        middles: names of the hosts that others connect to.
        restart: stops one of them and starts another in its place after some seconds.
    """
    await asyncio.sleep(fault.at)
    network.note("fault", fault.kind, fault.host)
    host = network.host(fault.host)
    listens = fault.host in middles
    paths = [network.path(host, middle) for middle in middles if middle != host.name]
    if fault.kind in ("blackout", "long blackout"):
        for path in paths:
            path.blackout(60.0 if fault.kind == "long blackout" else fault.seconds)
    elif fault.kind == "sever" and not listens:
        host.sever()
    elif fault.kind == "move" and not listens:
        host.move()
    elif fault.kind == "stall":
        host.stall(fault.seconds)
    elif fault.kind == "restart":
        await restart(fault.seconds)
    elif fault.kind == "kill":
        for session in host.sessions:
            if session.is_open:
                session.transport.close(KILLED, "killed")
    elif fault.kind == "mtu":
        await _changed(paths, fault.seconds, mtu=600)
    elif fault.kind == "burst":
        await _changed(paths, fault.seconds, loss=0.5)


async def _changed(paths: Sequence[Path], seconds: float, **changes: float) -> None:
    """Change conditions for a while."""
    before = [(link, link.conditions) for path in paths for link in (path.there, path.back)]
    for path in paths:
        path.change(**changes)
    await asyncio.sleep(seconds)
    for link, conditions in before:
        link.change(**{name: getattr(conditions, name) for name in changes})


def text_of(exc: BaseException) -> str:
    """An error in a line, and each of a group of them."""
    if isinstance(exc, BaseExceptionGroup):
        return "; ".join(text_of(each) for each in exc.exceptions)
    return f"{type(exc).__name__}: {exc}"

"""A relay on a network with peers that attack it: others get everything all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

import kvcs
from kvcs.errors import ConnectionClosed, UsageError
from kvcs.moqt.names import FullTrackName
from kvcs.moqt.parameters import Parameters
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import open_connection
from kvcs.testing.network import leftovers, run
from tests.simulation.trees import PORT, Tree

ATTACKERS = 3
CONSUMERS = 3
LAYER_PAUSE = 0.5
"""Seconds from one layer to the next."""


def name_of(tree: Tree, number: int) -> FullTrackName:
    """A Track in the scope that is attacked."""
    scope_id = tree.prefix.scope_id
    return FullTrackName((b"kvcs-1", scope_id, bytes(32), bytes(32), bytes(16)), b"%d" % number)


async def open_and_cancel(tree: Tree, session: Connection, host: str) -> None:
    """Requests that are cancelled as soon as they are made."""
    requester = session.core.requester
    for start in range(0, 240, 30):
        asked = [
            requester.subscribe(name_of(tree, number), Parameters.of(rendezvous_timeout=60_000))
            if number % 2
            else requester.fetch(name_of(tree, number), Parameters())
            for number in range(start, start + 30)
        ]
        await asyncio.sleep(0.01)
        for request_id in asked:
            session.cancel(request_id)
        await asyncio.sleep(0.01)


async def flood_namespaces(tree: Tree, session: Connection, host: str) -> None:
    """Publications that nobody has, announced by the hundred and taken back."""
    requester = session.core.requester
    for start in range(0, 240, 60):
        asked = [
            requester.publish_namespace(
                (b"kvcs-1", tree.prefix.scope_id, bytes(32), bytes(32), b"%016d" % number)
            )
            for number in range(start, start + 60)
        ]
        await asyncio.sleep(0.05)
        for request_id in asked[::2]:
            session.cancel(request_id)
        await asyncio.sleep(0.05)


async def read_slowly(tree: Tree, session: Connection, host: str) -> None:
    """Retrieves over a path that carries next to nothing."""
    tree.network.path(host, "relay").change(rate=2000)
    subscriber = kvcs.Subscriber(session)
    try:
        async with asyncio.timeout(20), subscriber.open(tree.prefix, deadline=20.0) as cache:
            async for _ in cache:
                pass
    except (TimeoutError, kvcs.KvcsError):
        pass  # it gets what it can


Attack = Callable[[Tree, Connection, str], Awaitable[None]]


@pytest.mark.parametrize("attack", [open_and_cancel, flood_namespaces, read_slowly])
def test_consumers_that_behave_get_every_layer_in_time(attack: Attack) -> None:
    async def main() -> None:
        tree = Tree(seed=7)
        await tree.relay("relay")
        over = asyncio.Event()
        sessions: list[Connection] = []
        for number in range(ATTACKERS):
            with tree.network.host(f"attacker{number}"):
                sessions.append(await open_connection(f"moqt://relay:{PORT}"))

        async def attacking(number: int) -> None:
            host = f"attacker{number}"
            with tree.network.host(host):
                try:
                    await attack(tree, sessions[number], host)
                except (ConnectionClosed, UsageError):
                    pass  # the relay, or its own limits, had enough of it

        async with asyncio.TaskGroup() as group:
            producing = group.create_task(tree.produce("relay", over, LAYER_PAUSE))
            attacks = [group.create_task(attacking(number)) for number in range(ATTACKERS)]
            reports = await asyncio.gather(
                *(tree.consume(f"consumer{number}", ["relay"]) for number in range(CONSUMERS))
            )
            await asyncio.gather(*attacks)
            over.set()
            await producing
        assert all(report.duplicates == 0 for report in reports)
        assert len({report.objects for report in reports}) == 1
        stats = tree.relays["relay"].stats
        assert stats.malformed == 0 and stats.sessions_refused == 0
        for session in sessions:
            await session.close()
        await tree.close()
        await asyncio.sleep(60)
        assert leftovers(tree.network) == []

    run(main())

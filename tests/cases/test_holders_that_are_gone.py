"""Publications whose producer has left, died or stopped are not listed for long (case 17)."""

from __future__ import annotations

import asyncio

import pytest

import kvcs
from kvcs.errors import CacheIncomplete, PublicationError, PublicationNotFound
from kvcs.testing.network import leftovers, run
from tests.builders import put, same
from tests.simulation.trees import PORT, RECONNECT, Tree

IDLE = 30.0
"""Idle time-out of QUIC, seconds."""

PATIENT = kvcs.Reconnect(initial=10.0, deadline=None, max_pause=0.5)


async def _hold(tree: Tree, held: asyncio.Event, leave: asyncio.Event) -> None:
    """Publish all but the last layer at the upper relay, and stay."""
    with tree.network.host("producer"):
        async with kvcs.connect(f"moqt://upper:{PORT}", reconnect=PATIENT) as session:
            async with kvcs.Publisher(session).publish(tree.prefix) as publication:
                segment = await publication.segment()
                await put(segment, tree.toy, range(3))
                held.set()
                await leave.wait()
                await put(segment, tree.toy, [3])
                segment.finish()


async def _listed(tree: Tree) -> int:
    """How many publications a consumer finds that comes now, below the relay below."""
    with tree.network.host("looker"):
        async with kvcs.connect(f"moqt://lower:{PORT}", reconnect=RECONNECT) as session:
            return len(await kvcs.Subscriber(session).list(tree.prefix))


async def _reader(tree: Tree) -> int:
    """A consumer that has picked it: how many layers it got, or the error."""
    with tree.network.host("reader"):
        async with kvcs.connect(f"moqt://lower:{PORT}", reconnect=RECONNECT) as session:
            async with kvcs.Subscriber(session).open(tree.prefix, deadline=100.0) as cache:
                layers = [layer async for layer in cache]
                assert all(same(layer, tree.toy) for layer in layers)
                return len(layers)


@pytest.mark.parametrize("how", ["withdraws", "is killed", "is paused"])
def test_it_is_listed_no_longer(how: str) -> None:
    async def main() -> None:
        tree = Tree(seed=17)
        await tree.relay("upper")
        await tree.relay("lower", "upper")
        held, leave = asyncio.Event(), asyncio.Event()
        holding = asyncio.create_task(_hold(tree, held, leave))
        await held.wait()
        reading = asyncio.create_task(_reader(tree))
        await asyncio.sleep(1.0)
        assert await _listed(tree) == 1
        path = tree.network.path("producer", "upper")
        if how == "withdraws":
            leave.set()
            await holding
            assert await reading == 4
            await asyncio.sleep(1.0)
        elif how == "is killed":
            path.blackout(1e6)
            await asyncio.sleep(IDLE + 1.0)
        else:
            path.blackout(2 * IDLE)
            await asyncio.sleep(IDLE + 1.0)
        assert await _listed(tree) == 0
        if how == "is killed":
            with pytest.raises((CacheIncomplete, PublicationError, PublicationNotFound)):
                await reading
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
        elif how == "is paused":
            await asyncio.sleep(IDLE + 1.0)
            assert await _listed(tree) == 1  # it has announced again
            leave.set()
            assert await reading == 4
            await holding
        await tree.close()
        await asyncio.sleep(120.0)
        assert leftovers(tree.network) == []

    run(main(), limit=2000.0)

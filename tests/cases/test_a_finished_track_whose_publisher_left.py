"""A publication whose producer has left is served from the relay that has it whole (case 38)."""

from __future__ import annotations

import asyncio

import pytest

import kvcs
from kvcs.errors import KvcsError
from kvcs.testing.network import leftovers, run
from tests.builders import put, same
from tests.simulation.trees import PORT, RECONNECT, SETTINGS, Tree

RETENTION = 60.0


@pytest.mark.parametrize("below", [False, True])
def test_six_consumers_are_served_and_after_its_retention_none(below: bool) -> None:
    """``below``: they come to a relay whose upstream is the one that has it."""

    async def main() -> None:
        tree = Tree(seed=38)
        await tree.relay("upper")
        await tree.relay("lower", "upper")
        with tree.network.host("producer"):
            url = f"moqt://upper:{PORT}"
            async with kvcs.connect(url, reconnect=RECONNECT) as session:
                publishing = kvcs.Publisher(session).publish(tree.prefix, retention=RETENTION)
                async with publishing as publication:
                    segment = await publication.segment()
                    await put(segment, tree.toy)
                    segment.finish()
                    uri = publication.uri(url)
                    await tree.consume("warming", ["upper"])

        async def consume(**how: object) -> list[int]:
            name = "lower" if below else "upper"
            with tree.network.host("consumer"):
                async with kvcs.connect(f"moqt://{name}:{PORT}", reconnect=RECONNECT) as session:
                    opening = kvcs.Subscriber(session, settings=SETTINGS).open(
                        tree.prefix,
                        deadline=20.0,
                        publication=uri,
                        **how,  # type: ignore[arg-type]
                    )
                    async with opening as cache:
                        layers = [layer async for layer in cache]
                    assert all(same(layer, tree.toy) for layer in layers)
                    return [layer.index for layer in layers]

        for _ in range(5):
            assert await consume(retrieve="subscribe") == [0, 1, 2, 3]
        assert await consume(retrieve="fetch", layers=(1, 2)) == [1, 2]
        await asyncio.sleep(RETENTION + 10.0)
        began = asyncio.get_running_loop().time()
        with pytest.raises(KvcsError):
            await consume(retrieve="subscribe")
        assert asyncio.get_running_loop().time() - began < 25.0
        await tree.close()
        await asyncio.sleep(120.0)
        assert leftovers(tree.network) == []

    run(main(), limit=2000.0)

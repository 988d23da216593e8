"""Trees of relays on a virtual network: each Object crosses each link once."""

from __future__ import annotations

import asyncio

import kvcs
from kvcs.testing.network import leftovers, run
from tests.simulation.trees import Tree

OBJECTS = 24
"""Objects of the toy publication with a payload."""


def test_each_object_crosses_each_link_of_a_tree_once() -> None:
    """1 relay at the origin, 4 below it, 4 below each of these, and 4 consumers at each of the 16;
    half of them are there before the publication, half come in the middle of it."""

    async def main() -> None:
        tree = Tree(seed=1416)
        await tree.relay("root")
        leaves: list[str] = []
        for site in range(4):
            await tree.relay(f"site{site}", "root")
            for rack in range(4):
                leaves.append(f"rack{site}{rack}")
                await tree.relay(leaves[-1], f"site{site}")
        over = asyncio.Event()
        early = [
            asyncio.create_task(tree.consume(f"early-{leaf}-{number}", [leaf]))
            for leaf in leaves
            for number in range(2)
        ]
        producing = asyncio.create_task(tree.produce("root", over, pause=0.1))
        await asyncio.sleep(0.2)
        late = [
            asyncio.create_task(tree.consume(f"late-{leaf}-{number}", [leaf]))
            for leaf in leaves
            for number in range(2)
        ]
        reports = await asyncio.gather(*early, *late)
        over.set()
        await producing
        check_reports(reports, 64)
        # The origin was asked once for each track, whatever the number of consumers.
        for name in (b"k.raw.s0", b"v.raw.s0", b"manifest"):
            assert tree.asked["SubscribeReceived", name] == 1
        assert not tree.asked["FetchReceived", b"k.raw.s0"]
        assert not tree.asked["FetchReceived", b"v.raw.s0"]
        versions = tree.relays["root"].stats.objects_in - OBJECTS
        assert 0 < versions < OBJECTS // 2
        for name, relay in tree.relays.items():
            stats = relay.stats
            # Each Object came once to each relay; a version of the manifest by FETCH and live.
            assert OBJECTS < stats.objects_in <= OBJECTS + 2 * versions, name
        await tree.close()
        await asyncio.sleep(60.0)
        assert leftovers(tree.network) == []

    run(main())


def check_reports(reports: list[kvcs.CacheReport], consumers: int) -> None:
    """Each consumer has got each Object once."""
    assert len(reports) == consumers
    assert all((one.objects, one.duplicates) == (OBJECTS, 0) for one in reports)

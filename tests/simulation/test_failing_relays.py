"""Relays, producers and consumers of chains that die at any moment, on a virtual network."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

import kvcs
from kvcs.errors import KvcsError
from kvcs.testing.network import Conditions, leftovers, run
from tests.simulation.trees import DEADLINE, PORT, Tree

QUICK_SEEDS = range(8)
ALL_SEEDS = range(8, 200)
BATCH = 16
"""Seeds of one slow test: a runner's time-out would hit whatever run is under way."""

LATE = 5.0
"""Seconds behind its deadline by which a retrieval must have ended."""

VICTIMS = ("upper0", "upper1", "lower0", "lower1", "producer", "consumer0")


def victim_of(seed: int) -> str:
    """What dies in the run of a seed."""
    return Random(f"victim {seed}").choice(VICTIMS)


async def _live(seed: int) -> str:
    """One run: two relays that have the publication, two below both, four consumers of both."""
    chance = Random(seed)
    conditions = Conditions(
        delay=chance.uniform(0.001, 0.03), jitter=0.005, loss=chance.choice([0.0, 0.0, 0.02])
    )
    tree = Tree(seed=seed, conditions=conditions)
    for name in ("upper0", "upper1"):
        await tree.relay(name)
    for number in range(2):
        first, second = ("upper0", "upper1") if number == 0 else ("upper1", "upper0")
        await tree.relay(f"lower{number}", first, second)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    producing = asyncio.create_task(_produce(tree, over, chance.uniform(0.0, 0.2)))
    ends: dict[int, str] = {}

    async def consume(number: int) -> None:
        names = ["lower0", "lower1"] if number % 2 else ["lower1", "lower0"]
        began = loop.time()
        try:
            await tree.consume(f"consumer{number}", names)
            ends[number] = "complete"
        except KvcsError as exc:
            ends[number] = type(exc).__name__
        assert loop.time() - began < DEADLINE + RECONNECTING + LATE, f"consumer {number} hung"

    consuming = [asyncio.create_task(consume(number)) for number in range(4)]
    await tree.all_connected(len(consuming) + 1)
    await asyncio.sleep(chance.uniform(0.0, 1.0))
    victim = victim_of(seed)
    if victim in tree.relays:
        await tree.kill(victim)
    elif victim == "producer":
        producing.cancel()
    else:
        consuming[0].cancel()
    results = await asyncio.gather(*consuming, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
    over.set()
    await asyncio.gather(producing, return_exceptions=True)
    if victim != "producer":
        wanted = range(1, 4) if victim == "consumer0" else range(4)
        lacking = {number: ends.get(number) for number in wanted if ends[number] != "complete"}
        assert not lacking, f"{victim} was killed: {lacking}"
    await tree.close()
    await asyncio.sleep(90.0)
    assert leftovers(tree.network) == []
    return victim


RECONNECTING = 20.0
"""Seconds that opening both sessions may take before the retrieval begins."""


async def _produce(tree: Tree, over: asyncio.Event, pause: float) -> None:
    """Publish at both upper relays, over sessions that come back."""
    with tree.network.host("producer"):
        policy = kvcs.Reconnect(initial=10.0, deadline=None, max_pause=0.5)
        async with (
            kvcs.connect(f"moqt://upper0:{PORT}", reconnect=policy) as one,
            kvcs.connect(f"moqt://upper1:{PORT}", reconnect=policy) as two,
        ):
            tree.note_connected()
            async with kvcs.Publisher(one, two).publish(tree.prefix) as publication:
                await tree.put_all(publication, pause)
                await over.wait()


@pytest.mark.parametrize("seed", QUICK_SEEDS)
def test_whatever_dies_nothing_is_wrong(seed: int) -> None:
    run(_live(seed), limit=600.0)


def test_every_kind_of_victim_is_drawn() -> None:
    assert {victim_of(seed) for seed in ALL_SEEDS} == set(VICTIMS)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(ALL_SEEDS.start, ALL_SEEDS.stop, BATCH))
def test_whatever_dies_nothing_is_wrong_in_many_runs(first: int) -> None:
    for seed in range(first, min(first + BATCH, ALL_SEEDS.stop)):
        try:
            assert run(_live(seed), limit=600.0) == victim_of(seed)
        except Exception as exc:
            raise AssertionError(f"seed {seed}") from exc

"""When one layer fails, whoever waits for a later one is told at once, and nobody hangs."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

import kvcs
from kvcs.moqt.errors import SessionCode
from tests.builders import BRIEF, QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import joined, serving
from tests.loopback.retrieving import meeting
from tests.virtual import virtual

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.parametrize("whose", ["publisher", "consumer"])
async def test_layers_that_came_succeed_and_all_others_fail_together(
    files: PemFiles, whose: str
) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    loop = asyncio.get_running_loop()
    async with serving(files) as server, joined(server, files) as client:
        with pytest.raises(kvcs.UsageError, match="2 of 4"):
            async with kvcs.Publisher(server).publish(prefix) as publication:
                segment = await publication.segment()
                async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                    tasks = [asyncio.create_task(cache.layer(index)) for index in range(4)]
                    woken: dict[int, float] = {}

                    def note(index: int, task: asyncio.Task[kvcs.Layer]) -> None:
                        woken[index] = loop.time()

                    for index, task in enumerate(tasks):
                        task.add_done_callback(partial(note, index))
                    await put(segment, toy, range(2))
                    assert all([same(await task, toy) for task in tasks[:2]])
                    if whose == "publisher":
                        await server.close(SessionCode.INTERNAL_ERROR, "a fault")
                    else:
                        await client.close(SessionCode.INTERNAL_ERROR, "a fault")
                    results = await asyncio.gather(*tasks, return_exceptions=True)
                    for failure in results[2:]:
                        assert isinstance(failure, kvcs.CacheIncomplete)
                        assert isinstance(failure.__cause__, kvcs.ConnectionClosed)
                        assert "a fault" in str(failure)
                        assert {run.layer for run in failure.missing} == {2, 3}
                    assert abs(woken[2] - woken[3]) < 20.0  # the deadline is 50 s
                    # What was verified stays, what was not fails at once from now on.
                    assert same(await cache.layer(1), toy)
                    with pytest.raises(kvcs.CacheIncomplete):
                        await cache.layer(2)
                    with pytest.raises(kvcs.CacheIncomplete):
                        await cache.complete()


@virtual
async def test_one_lost_object_does_not_keep_the_other_layers() -> None:
    """A waiter for a good layer is not held up by a bad one before it."""
    toy, prefix = toy_publication(), toy_prefix()
    async with meeting() as (server, client):
        async with kvcs.Publisher(server).publish(prefix) as publication:
            segment = await publication.segment()
            await put(segment, toy, [0])
            k, v = toy.k[1].copy(), toy.v[1].copy()
            await segment.put(1, k, v, lend=True)
            k[5] += 1  # the promise of lend is broken: one object of layer 1 is bad for good
            await put(segment, toy, [2, 3])
            async with kvcs.Subscriber(client, settings=BRIEF).open(prefix) as cache:
                results = await asyncio.gather(
                    *(cache.layer(index) for index in range(4)), return_exceptions=True
                )
    failure = results.pop(1)
    assert isinstance(failure, kvcs.CacheIncomplete)
    assert [str(run) for run in failure.missing] == ["k layer 1 blocks 1-1 (tokens 4-7)"]
    assert all(isinstance(layer, kvcs.Layer) and same(layer, toy) for layer in results)

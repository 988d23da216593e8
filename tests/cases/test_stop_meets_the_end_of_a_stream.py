"""Consumers that cancel at the very instant at which the publisher ends its streams."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

import kvcs
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import joined, serving

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SESSIONS = 4
JITTER = 0.005
"""Seconds around the end in which each one cancels."""


@pytest.mark.parametrize(
    ("consumers", "seed"),
    [(40, 1), (40, 2), pytest.param(200, 3, marks=pytest.mark.slow)],
)
async def test_the_session_survives_and_the_others_finish(
    files: PemFiles, consumers: int, seed: int
) -> None:
    rng, loop = random.Random(seed), asyncio.get_running_loop()
    toy, prefix = toy_publication(), toy_prefix()
    opened, all_opened = 0, asyncio.Event()

    async def consume(session: kvcs.Connection) -> bool:
        nonlocal opened
        async with kvcs.Subscriber(session, settings=QUICK).open(prefix) as cache:
            opened += 1
            if opened == consumers + SESSIONS:
                all_opened.set()
            return all([same(layer, toy) async for layer in cache])

    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(files))
        sessions = [await stack.enter_async_context(joined(server, files)) for _ in range(SESSIONS)]
        publishing = kvcs.Publisher(server).publish(prefix)
        publication = await stack.enter_async_context(publishing)
        segment = await publication.segment()
        staying = [asyncio.create_task(consume(session)) for session in sessions]
        leaving = [
            asyncio.create_task(consume(sessions[index % SESSIONS])) for index in range(consumers)
        ]
        await all_opened.wait()
        await put(segment, toy, range(toy.descriptor.layers - 1))
        ending = loop.time() + 2 * JITTER
        for task in leaving:
            loop.call_at(ending + rng.uniform(-JITTER, JITTER), task.cancel)
        # The last layer ends every stream of the publication, in the middle of the cancelling.
        finishing = loop.create_future()
        loop.call_at(ending, finishing.set_result, None)
        await finishing
        await put(segment, toy, [toy.descriptor.layers - 1])
        segment.finish()
        for outcome in await asyncio.gather(*leaving, return_exceptions=True):
            assert outcome is True or isinstance(outcome, asyncio.CancelledError)
        assert await asyncio.gather(*staying) == [True] * SESSIONS
        assert all(session.is_open for session in (*sessions, *server.connections))

"""A relay with two upstreams, one of which dies or goes away, over real sockets."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

import kvcs
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.test_relay_chain import OBJECTS, SAFETY, relaying

SETTINGS = replace(QUICK, stall=SAFETY, quiet=SAFETY)
"""However long the change takes, nothing is asked for again because of it."""

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.parametrize("at_once", [True, False], ids=["dies", "goes away"])
async def test_consumers_of_the_relay_below_notice_nothing(files: PemFiles, at_once: bool) -> None:
    toy = toy_publication()
    async with AsyncExitStack() as stack:
        uppers = [await stack.enter_async_context(relaying(files)) for _ in range(2)]
        lower = await stack.enter_async_context(relaying(files, *(one.url for one in uppers)))
        links = [
            await stack.enter_async_context(kvcs.connect(one.url, ca=files.ca)) for one in uppers
        ]
        publication = await stack.enter_async_context(kvcs.Publisher(*links).publish(toy_prefix()))
        segment = await publication.segment()
        session = await stack.enter_async_context(kvcs.connect(lower.url, ca=files.ca))
        subscriber = kvcs.Subscriber(session, settings=SETTINGS)
        cache = await stack.enter_async_context(subscriber.open(toy_prefix(), deadline=SAFETY))
        arriving = aiter(cache)
        await put(segment, toy, [0])
        layers = [await anext(arriving)]
        await put(segment, toy, [1])
        layers.append(await anext(arriving))
        asked = lower.stats.subscribes
        serving = next(one for one in uppers if one.stats.subscribes)
        closing = asyncio.create_task(serving.close(at_once=at_once))
        await put(segment, toy, [2])
        layers.append(await anext(arriving))
        await closing
        await put(segment, toy, [3])
        segment.finish()
        layers += [layer async for layer in arriving]
        assert [layer.index for layer in layers] == list(range(4))
        assert all(same(layer, toy) for layer in layers)
        report = cache.report
        assert (report.objects, report.duplicates, report.moves) == (OBJECTS, 0, 0)
        stats = lower.stats
        assert stats.failovers >= 1 and stats.failovers_failed == 0
        # Nobody has asked for anything again: these are the same subscriptions.
        assert (stats.subscribes, stats.fetches) == (asked, 0)

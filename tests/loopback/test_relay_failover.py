"""A relay with two upstreams, one of which dies or goes away, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import structlog

import kvcs
from kvcs.relay.stats import UpstreamStats
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.test_relay_chain import OBJECTS, SAFETY, relaying
from tests.ports import closed_port

SETTINGS = replace(QUICK, stall=SAFETY, quiet=SAFETY)
"""However long the change takes, nothing is asked for again because of it."""

LOOK = 0.02
"""Seconds from one look to the next: no turn of the loop is used up by looking alone."""

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


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so; looked at now and then, since no event tells it."""
    loop, met = asyncio.get_running_loop(), asyncio.Event()

    def look() -> None:
        if condition():
            met.set()
        elif not met.is_set():
            loop.call_later(LOOK, look)

    look()
    try:
        async with asyncio.timeout(SAFETY):
            await met.wait()
    finally:
        met.set()


async def test_the_status_tells_how_each_upstream_is(files: PemFiles) -> None:
    with closed_port() as nobody:
        async with relaying(files) as upper:
            uris = (upper.url, f"moqt://127.0.0.1:{nobody}")
            async with relaying(files, *uris) as lower:

                def upstream(preference: int) -> UpstreamStats:
                    return lower.status().upstreams[preference]

                await until(lambda: upstream(0).state == "open" and upstream(1).retries > 0)
                assert [each.preference for each in lower.status().upstreams] == [0, 1]
                assert upstream(0).upstream == upper.url.removeprefix("moqt://")
                assert (upstream(0).sessions, upstream(0).requests) == (1, 0)
                assert (upstream(1).state, upstream(1).sessions) == ("opening", 0)
                async with kvcs.connect(lower.url, ca=files.ca) as session:
                    with pytest.raises(kvcs.PublicationNotFound):
                        async with kvcs.Subscriber(session).open(toy_prefix(), wait=0.0):
                            pass
                asked = upstream(0).requests
                assert asked > 0
                await upper.close(at_once=True)
                await until(lambda: upstream(0).state == "opening")
                assert upstream(0).requests == asked


async def test_a_session_that_is_over_is_one_line_with_the_facts(files: PemFiles) -> None:
    with structlog.testing.capture_logs() as lines:
        async with relaying(files) as upper, relaying(files, upper.url) as lower:
            await until(lambda: lower.status().upstreams[0].state == "open")
            async with kvcs.connect(lower.url, ca=files.ca) as session:
                with pytest.raises(kvcs.PublicationNotFound):
                    async with kvcs.Subscriber(session).open(toy_prefix(), wait=0.0):
                        pass
    ended = [line for line in lines if line["event"] == "session_ended"]
    # The consumer's session at the lower relay; that of the two relays, at either.
    assert sorted(line["upstream"] is None for line in ended) == [False, True, True]
    for line in ended:
        assert "127.0.0.1:" in line["peer"]
        assert line["seconds"] > 0 and line["code"] == 0
        assert line["octets_sent"] > 0 and line["octets_received"] > 0
    assert any(line["requests"] > 0 for line in ended)

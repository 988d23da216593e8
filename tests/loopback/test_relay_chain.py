"""Chains of relays over real sockets: `RelaySettings.upstreams`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

import kvcs
from kvcs.errors import UsageError
from kvcs.moqt.settings import SessionSettings
from kvcs.relay.admin import families
from kvcs.relay.server import Relay, RelaySettings
from tests.builders import put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.ports import free_port

SAFETY = 40.0
OBJECTS = 24
"""Objects of the toy publication with a payload."""

FAST = kvcs.Reconnect(max_pause=0.2)

PATIENT = kvcs.SubscriberSettings(least_recovery=30.0, quiet=20.0)
"""Takes nothing for lost because the machine is busy."""


@asynccontextmanager
async def relaying(files: PemFiles, *upstreams: str, port: int = 0) -> AsyncIterator[Relay]:
    settings = RelaySettings(
        cert=files.cert,
        key=files.key,
        port=port,
        allow_anyone=True,
        upstreams=upstreams,
        ca=files.ca,
        reconnect=FAST,
        session=SessionSettings(done_delay=0.05),
        goaway_timeout=0.5,
    )
    async with Relay(settings) as relay:
        yield relay


async def consume(url: str, files: PemFiles) -> kvcs.CacheReport:
    async with kvcs.connect(url, ca=files.ca) as session:
        subscriber = kvcs.Subscriber(session, settings=PATIENT)
        async with subscriber.open(toy_prefix(), deadline=SAFETY) as cache:
            assert all([same(layer, toy_publication()) async for layer in cache])
            return cache.report


@asynccontextmanager
async def producing(url: str, files: PemFiles) -> AsyncIterator[None]:
    async with kvcs.connect(url, ca=files.ca) as session:
        async with kvcs.Publisher(session).publish(toy_prefix()) as publication:
            segment = await publication.segment()
            await put(segment, toy_publication())
            segment.finish()
            yield


def test_upstreams_are_checked(files: PemFiles) -> None:
    with pytest.raises(UsageError, match="moqt"):
        RelaySettings(cert=files.cert, key=files.key, upstreams=("https://relay.example",))
    with pytest.raises(UsageError, match="upstreams"):
        RelaySettings(cert=files.cert, key=files.key, upstreams=("moqt://relay.example",) * 17)


async def test_a_cache_crosses_three_relays_once(
    files: PemFiles, nothing_left_behind: None
) -> None:
    async with AsyncExitStack() as stack:
        relays = [await stack.enter_async_context(relaying(files))]
        for _ in range(2):
            upstream = relays[-1].url
            relays.append(await stack.enter_async_context(relaying(files, upstream)))
        await stack.enter_async_context(producing(relays[0].url, files))
        reports = await asyncio.gather(*(consume(relays[-1].url, files) for _ in range(3)))
        assert all(report.duplicates == 0 for report in reports)
        counts = {relay.stats.objects_in for relay in relays}
        assert relays[2].stats.upstream_subscriptions == relays[0].stats.upstream_subscriptions
        assert max(counts) - min(counts) <= 8, counts  # versions of the manifest


def metrics_of(relay: Relay) -> dict[str, float]:
    """What the relay's `/metrics` says."""
    return {
        sample.name: sample.value
        for family in families(relay.status(), "")
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("sites", "racks"),
    [(2, 2), pytest.param(4, 4, marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
    ids=["7", "21"],
)
async def test_each_object_crosses_each_link_of_a_tree_once(
    files: PemFiles, nothing_left_behind: None, sites: int, racks: int
) -> None:
    """1 + 2 + 4 relays, or 1 + 4 + 16; two consumers at each of the last, one of them early."""
    async with AsyncExitStack() as stack:
        root = await stack.enter_async_context(relaying(files))
        middle = [await stack.enter_async_context(relaying(files, root.url)) for _ in range(sites)]
        leaves = [
            await stack.enter_async_context(relaying(files, site.url))
            for site in middle
            for _ in range(racks)
        ]
        await stack.enter_async_context(producing(root.url, files))
        reports = await asyncio.gather(*(consume(leaf.url, files) for leaf in leaves))
        # Who comes later gets all of it from the last relay's cache.
        reports += await asyncio.gather(*(consume(leaf.url, files) for leaf in leaves))
        assert all((one.objects, one.duplicates) == (OBJECTS, 0) for one in reports)
        received = metrics_of(root)["kvcs_relay_objects_received_total"]
        versions = received - OBJECTS  # of the manifest
        assert 0 < versions < OBJECTS // 2
        for relay, readers in [(root, sites), *((site, racks) for site in middle)]:
            sent = metrics_of(relay)["kvcs_relay_objects_sent_total"]
            assert readers * OBJECTS < sent <= readers * (OBJECTS + 2 * versions)
        for relay in (*middle, *leaves):
            # A version of the manifest may come by FETCH and live; Objects of data do not.
            received = metrics_of(relay)["kvcs_relay_objects_received_total"]
            assert OBJECTS < received <= OBJECTS + 2 * versions
        for leaf in leaves:
            sent = metrics_of(leaf)["kvcs_relay_objects_sent_total"]
            assert 2 * OBJECTS < sent <= 2 * (OBJECTS + 2 * versions)


async def test_a_relay_starts_before_its_upstream(
    files: PemFiles, nothing_left_behind: None
) -> None:
    port = free_port()
    async with relaying(files, f"moqt://127.0.0.1:{port}") as lower:
        waiting = asyncio.create_task(consume(lower.url, files))
        async with relaying(files, port=port) as upper, producing(upper.url, files):
            await waiting


async def test_a_publisher_that_listens_is_an_upstream(
    files: PemFiles, nothing_left_behind: None
) -> None:
    async with kvcs.serve("127.0.0.1", 0, cert=files.cert, key=files.key) as server:
        async with kvcs.Publisher(server).publish(toy_prefix()) as publication:
            segment = await publication.segment()
            await put(segment, toy_publication())
            segment.finish()
            async with relaying(files, server.url) as relay:
                await consume(relay.url, files)


async def test_two_relays_are_each_others_upstream(
    files: PemFiles, nothing_left_behind: None
) -> None:
    port = free_port()
    async with relaying(files, f"moqt://127.0.0.1:{port}") as one:
        async with relaying(files, one.url, port=port) as two:
            async with producing(one.url, files):
                await asyncio.gather(*(consume(relay.url, files) for relay in (one, two)))

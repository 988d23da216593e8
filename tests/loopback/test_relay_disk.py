"""A relay with a folder stops, and the next one serves what is in it, without the producer."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import kvcs
from kvcs.errors import ConnectionFailed
from kvcs.relay.settings import RelayLimits
from kvcs.subscriber import Subscriber
from tests.builders import Toy, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.command import Process
from tests.ports import free_port


@asynccontextmanager
async def relaying(files: PemFiles, folder: Path, port: int = 0) -> AsyncIterator[kvcs.Relay]:
    settings = kvcs.RelaySettings(
        cert=files.cert,
        key=files.key,
        port=port,
        allow_anyone=True,
        cache_dir=folder,
        # It hears of every end, however slow the machine is.
        limits=RelayLimits(upstream_linger=120),
    )
    async with kvcs.Relay(settings) as relay:
        yield relay


async def carry(
    relay: kvcs.Relay, files: PemFiles, toy: Toy, prefix: kvcs.Prefix
) -> tuple[bytes, ...]:
    """Let a publication cross the relay, and its producer leave; returns its namespace."""
    async with (
        kvcs.connect(relay.url, ca=files.ca) as producer,
        kvcs.connect(relay.url, ca=files.ca) as consumer,
    ):
        async with kvcs.Publisher(producer).publish(prefix) as publication:
            namespace = publication.namespace
            segment = await publication.segment()
            await put(segment, toy)
            async with Subscriber(consumer).open(prefix, deadline=30) as cache:
                await cache.complete()
        gone = watched_ends(relay)
    async with asyncio.timeout(60):
        while relay.stats.sessions:
            await gone.wait()
            gone.clear()
    return namespace


def watched_ends(relay: kvcs.Relay) -> asyncio.Event:
    """Set whenever the relay has heard that a session is over, from now on."""
    ended, core = asyncio.Event(), relay._core
    original = core.session_closed

    def closed(*event: Any) -> None:
        original(*event)
        ended.set()

    core.session_closed = closed  # type: ignore[method-assign]
    return ended


async def test_a_finished_publication_outlives_its_relay(files: PemFiles, tmp_path: Path) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with relaying(files, tmp_path) as relay:
        namespace = await carry(relay, files, toy, prefix)
    assert relay.stats.disk_written > 0
    async with (
        relaying(files, tmp_path) as relay,
        kvcs.connect(relay.url, ca=files.ca) as consumer,
    ):
        url = relay.url
        uri = kvcs.kv.holder_uri(url, kvcs.kv.tracks.PublicationNamespace.parse(namespace))
        async with Subscriber(consumer).open(prefix, publication=uri, deadline=30) as cache:
            async for layer in cache:
                assert same(layer, toy)
        stats = relay.stats
        assert (stats.octets_in, stats.disk_bad) == (0, 0)
        assert stats.disk_hits > 0


async def test_a_relay_whose_address_is_taken_leaves_no_thread(
    files: PemFiles, tmp_path: Path
) -> None:
    async with relaying(files, tmp_path / "one") as relay:
        with pytest.raises(ConnectionFailed):
            async with relaying(files, tmp_path / "two", relay.port):
                raise AssertionError("it cannot listen there")


async def test_a_search_finds_what_lies_whole_in_the_folder(
    files: PemFiles, tmp_path: Path
) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with relaying(files, tmp_path) as relay:
        await carry(relay, files, toy, prefix)
    async with (
        relaying(files, tmp_path) as relay,
        kvcs.connect(relay.url, ca=files.ca) as consumer,
    ):
        async with Subscriber(consumer).open(prefix, deadline=30) as cache:
            assert all([same(layer, toy) async for layer in cache])
        assert relay.stats.octets_in == 0


@pytest.mark.slow
async def test_it_is_found_also_behind_a_relay_that_was_killed(
    files: PemFiles, tmp_path: Path
) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    folder = tmp_path / "cache"
    async with relaying(files, folder) as relay:
        await carry(relay, files, toy, prefix)
    options = ("--cert", files.cert, "--key", files.key, "--allow-anyone", "--cache-dir", folder)
    for killed in (True, False):
        port = free_port()
        command = Process("relay", "--bind", f"127.0.0.1:{port}", *options, "--lines")
        with command as process:
            await asyncio.to_thread(process.event, "listening")
            url = f"moqt://127.0.0.1:{port}"
            async with kvcs.connect(url, ca=files.ca) as consumer:
                async with Subscriber(consumer).open(prefix, deadline=30) as cache:
                    assert all([same(layer, toy) async for layer in cache])
            if killed:
                await asyncio.to_thread(process.stop, signal.SIGKILL)

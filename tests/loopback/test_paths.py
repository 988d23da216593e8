"""Sizes and figures of paths as users see them: connect, serve, a relay; pinned and found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import kvcs
from kvcs.quic.aioquic_backend.paths import largest_to_take
from tests.builders import put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import HOST

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def until(connection: kvcs.Connection, condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds; it is looked at after each input of the session."""
    async with asyncio.timeout(20):
        while not condition():
            await connection.progressed()


@pytest.mark.parametrize("pinned", [None, 1200, 8952])
async def test_both_directions_use_what_was_pinned_or_found(
    files: PemFiles, pinned: int | None
) -> None:
    async with (
        kvcs.serve(HOST, 0, cert=files.cert, key=files.key, datagram_size=pinned) as server,
        kvcs.connect(server.url, ca=files.ca, datagram_size=pinned) as session,
    ):
        [accepted] = server.connections
        used = pinned or largest_to_take(session.stats().receive_buffer)
        await until(session, lambda: session.stats().datagram_size == used)
        await until(accepted, lambda: accepted.stats().datagram_size == used)
        stats = session.stats()
        assert isinstance(stats, kvcs.TransportStats)
        assert stats.rtt is not None and stats.smallest_rtt is not None
        assert 0 < stats.smallest_rtt < 20 and 0 < stats.rtt < 20
        assert stats.octets_sent > 1200 and stats.octets_received > 1200
        assert stats.congestion_window > 0 and stats.octets_in_flight >= 0
        assert stats.receive_buffer > 0 and stats.send_buffer > 0


async def test_a_pinned_size_goes_before_that_of_the_settings(files: PemFiles) -> None:
    quic = kvcs.QuicSettings(datagram_size=1452)
    async with (
        kvcs.serve(HOST, 0, cert=files.cert, key=files.key, quic=quic) as server,
        kvcs.connect(server.url, ca=files.ca, quic=quic, datagram_size=8952) as session,
    ):
        [accepted] = server.connections
        await until(session, lambda: session.stats().datagram_size == 8952)
        await until(accepted, lambda: accepted.stats().datagram_size == 1452)


async def test_a_size_that_no_packet_can_have_is_refused(files: PemFiles) -> None:
    with pytest.raises(kvcs.UsageError, match="datagram_size"):
        async with kvcs.connect(f"moqt://{HOST}:1", ca=files.ca, datagram_size=64_001):
            raise AssertionError("connected")


async def test_a_relay_tells_of_each_path(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    settings = kvcs.RelaySettings(
        cert=files.cert,
        key=files.key,
        port=0,
        allow_anyone=True,
        quic=kvcs.QuicSettings(datagram_size=1200),
    )
    async with kvcs.Relay(settings) as relay:
        assert relay.transports == []
        async with (
            kvcs.connect(relay.url, ca=files.ca) as producing,
            kvcs.connect(relay.url, ca=files.ca, datagram_size=1452) as consuming,
            kvcs.Publisher(producing).publish(prefix) as publication,
            kvcs.Subscriber(consuming).open(prefix) as cache,
        ):
            await put(await publication.segment(), toy)
            assert all([same(layer, toy) async for layer in cache])
            (_, first), (_, second) = relay.transports
            largest = largest_to_take(first.receive_buffer)
            assert first.datagram_size == second.datagram_size == 1200
            assert first.octets_received > 0 and second.octets_sent > 0
            await until(producing, lambda: producing.stats().datagram_size == largest)
            await until(consuming, lambda: consuming.stats().datagram_size == 1452)

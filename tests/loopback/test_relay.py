"""The relay over real sockets: publishers and consumers that are real sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvcs.errors import ConnectionFailed, RequestError, UsageError
from kvcs.kv import UNPINNED, Descriptor, Prefix, Scope
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.events import Event, GoawayReceived, SessionClosed, SessionEstablished
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName
from kvcs.moqt.parameters import Parameters
from kvcs.publisher import Publisher
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import connect, open_connection
from kvcs.relay.server import Relay, RelaySettings
from kvcs.relay.settings import RelayLimits
from kvcs.subscriber import Subscriber
from tests.certificates import PemFiles

LAYERS, BLOCKS = 6, 12
DESCRIPTOR = Descriptor(
    model="toy",
    weights=UNPINNED,
    layers=LAYERS,
    kv_heads=2,
    head_dim=32,
    dtype="float16",
    block_tokens=16,
)
PREFIX = Prefix(Scope(key=bytes(range(32))), DESCRIPTOR, list(range(16 * BLOCKS)))


def arrays() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(7)
    shape = (16 * BLOCKS, 2, 32)
    return [
        (
            rng.standard_normal(shape).astype(np.float16),
            rng.standard_normal(shape).astype(np.float16),
        )
        for _ in range(LAYERS)
    ]


@asynccontextmanager
async def relaying(files: PemFiles, **settings: object) -> AsyncIterator[Relay]:
    chosen = RelaySettings(
        cert=files.cert,
        key=files.key,
        port=0,
        allow_anyone=True,
        **settings,  # type: ignore[arg-type]
    )
    async with Relay(chosen) as relay:
        yield relay


async def consume(
    relay: Relay, files: PemFiles, wanted: list[tuple[np.ndarray, np.ndarray]]
) -> None:
    async with connect(relay.url, ca=files.ca) as session:
        async with Subscriber(session).open(PREFIX, deadline=20) as cache:
            seen = 0
            async for layer in cache:
                assert np.array_equal(layer.k, wanted[layer.index][0])
                assert np.array_equal(layer.v, wanted[layer.index][1])
                seen += 1
            assert seen == LAYERS


def test_a_relay_without_authorization_says_what_it_needs(files: PemFiles) -> None:
    with pytest.raises(UsageError, match="--allow-anyone"):
        Relay(RelaySettings(cert=files.cert, key=files.key))


@pytest.mark.parametrize(
    ("name", "value"), [("port", 70_000), ("max_sessions", 0), ("goaway_timeout", -1.0)]
)
def test_settings_are_checked(files: PemFiles, name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        RelaySettings(cert=files.cert, key=files.key, **{name: value})  # type: ignore[arg-type]


async def test_consumers_before_during_and_after_get_every_layer(
    files: PemFiles, nothing_left_behind: None
) -> None:
    layers = arrays()
    async with relaying(files) as relay:
        async with connect(relay.url, ca=files.ca) as session:
            async with Publisher(session).publish(PREFIX) as publication:
                early = asyncio.create_task(consume(relay, files, layers))
                segment = await publication.segment(blocks=BLOCKS)
                middle: asyncio.Task[None] | None = None
                for index, (k, v) in enumerate(layers):
                    await segment.put(index, k, v)
                    if index == LAYERS // 2:
                        middle = asyncio.create_task(consume(relay, files, layers))
                segment.finish()
                await early
                assert middle is not None
                await middle
                await consume(relay, files, layers)
        stats = relay.stats
        data = LAYERS * BLOCKS * 2
        assert data <= stats.objects_in < 2 * data  # each Object came from the publisher once
        assert stats.objects_out >= 3 * data
        assert stats.sessions_total == 4
        assert stats.malformed == stats.too_large == 0


async def test_sessions_are_told_before_the_relay_stops(
    files: PemFiles, nothing_left_behind: None
) -> None:
    seen: list[Event] = []
    async with relaying(files, goaway_timeout=0.2) as relay:
        connection = await open_connection(
            relay.url, ca=files.ca, observer=lambda _, event: seen.append(event)
        )
        waiting = asyncio.create_task(relay.closed())
        await relay.close()
        await waiting
        await relay.close()  # quiet the second time
    await connection.close()
    kinds = [type(event) for event in seen]
    assert kinds == [SessionEstablished, GoawayReceived, SessionClosed]


async def test_an_error_in_the_context_closes_at_once(
    files: PemFiles, nothing_left_behind: None
) -> None:
    began = asyncio.get_running_loop().time()
    with pytest.raises(ZeroDivisionError):
        async with relaying(files, goaway_timeout=30.0) as relay:
            connection = await open_connection(relay.url, ca=files.ca)
            raise ZeroDivisionError
    await connection.close()
    assert asyncio.get_running_loop().time() - began < 20


async def test_who_waits_for_the_end_goes_on_where_closing_was_cancelled(
    files: PemFiles, nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with relaying(files) as relay:
        close = relay._server.close

        async def cancelled() -> None:
            await close()
            raise asyncio.CancelledError

        monkeypatch.setattr(relay._server, "close", cancelled)
        with pytest.raises(asyncio.CancelledError):
            await relay.close()
        async with asyncio.timeout(20):
            await relay.closed()


async def test_a_request_for_nothing_is_refused(files: PemFiles, nothing_left_behind: None) -> None:
    name = FullTrackName((b"free", b"nothing"), b"track")
    async with relaying(files, limits=RelayLimits(max_rendezvous=0.1)) as relay:
        async with connect(relay.url, ca=files.ca) as session:
            assert await refused(session, name) == RequestCode.DOES_NOT_EXIST
            assert await refused(session, name, rendezvous_timeout=5000) == RequestCode.TIMEOUT


async def refused(session: Connection, name: FullTrackName, **parameters: int) -> int:
    asked = Parameters.of(location_filter=LocationFilter.next_object(), **parameters)
    request_id = session.core.requester.subscribe(name, asked)
    with pytest.raises(RequestError) as caught:
        await session.reply(request_id)
    return caught.value.code


async def test_sessions_are_limited(files: PemFiles, nothing_left_behind: None) -> None:
    async with relaying(files, max_sessions=1) as relay:
        async with connect(relay.url, ca=files.ca):
            with pytest.raises(ConnectionFailed):
                async with connect(relay.url, ca=files.ca, reconnect=None):
                    pass
            assert relay.stats.sessions == 1

"""After hours of idling everything works at the first try (case 34)."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

import kvcs
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.moving import SAFETY, SOON, over, relay_settings, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

IDLE = 0.5
"""Seconds after which the transport gives up a connection without a sound."""


@pytest.mark.parametrize("keep_alive", [True, False])
async def test_publish_and_subscribe_work_at_the_first_try(
    files: PemFiles, keep_alive: bool
) -> None:
    quic = kvcs.QuicSettings(idle_timeout=IDLE, ping_interval=IDLE / 10 if keep_alive else None)
    toy, prefix = toy_publication(), toy_prefix()
    async with (
        kvcs.Relay(relay_settings(files, quic=quic)) as relay,
        kvcs.connect(relay.url, ca=files.ca, quic=quic, reconnect=SOON) as producer,
        kvcs.connect(relay.url, ca=files.ca, quic=quic, reconnect=SOON) as consumer,
    ):
        if keep_alive:
            with suppress(TimeoutError):
                async with asyncio.timeout(3 * IDLE):
                    await asyncio.gather(over(producer), over(consumer))
            assert producer.newest is producer and consumer.newest is consumer
        else:
            # Both hops are given up, and found again before anybody needs them.
            await asyncio.gather(over(producer), over(consumer))
            for session in (producer, consumer):
                await until(session, lambda session=session: session.newest.is_usable)  # type: ignore[misc]
        async with kvcs.Publisher(producer).publish(prefix) as publication:
            await put(await publication.segment(), toy)
            subscriber = kvcs.Subscriber(consumer, settings=QUICK)
            async with subscriber.open(prefix, deadline=SAFETY) as cache:
                assert all([same(layer, toy) async for layer in cache])

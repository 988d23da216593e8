"""After hours of idling everything works at the first try (case 34)."""

from __future__ import annotations

import asyncio

import pytest

import kvcs
from kvcs.testing.network import Network, leftovers, run
from tests.builders import put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.moving import SAFETY, SOON, over, relay_settings, until

LONG = 1200.0
"""Virtual seconds: forty time-outs."""

SETTINGS = kvcs.SubscriberSettings(least_recovery=SAFETY)


async def exchange(producer: kvcs.Connection, consumer: kvcs.Connection) -> None:
    """Publish and retrieve, with no second try of anything."""
    toy, prefix = toy_publication(), toy_prefix()
    async with kvcs.Publisher(producer).publish(prefix) as publication:
        await put(await publication.segment(), toy)
        subscriber = kvcs.Subscriber(consumer, settings=SETTINGS)
        async with subscriber.open(prefix, deadline=SAFETY) as cache:
            assert all([same(layer, toy) async for layer in cache])


@pytest.mark.parametrize("keep_alive", [True, False])
def test_long_idling_on_both_hops(keep_alive: bool) -> None:
    """On virtual time; without keep-alive each session is given up every 30 s, and opened again."""
    quic = kvcs.QuicSettings(idle_timeout=30.0, ping_interval=10.0 if keep_alive else None)

    async def main() -> None:
        network = Network(seed=34)
        with network.host("relay"):
            settings = kvcs.RelaySettings(
                cert="unused",
                key="unused",
                host=network.host("relay").address,
                allow_anyone=True,
                quic=quic,
            )
            relay = kvcs.Relay(settings)
            await relay.__aenter__()
        with network.host("producer"):
            producing = kvcs.connect("moqt://relay:4433", quic=quic)
            producer = await producing.__aenter__()
        with network.host("consumer"):
            consuming = kvcs.connect("moqt://relay:4433", quic=quic)
            consumer = await consuming.__aenter__()
        await asyncio.sleep(LONG)
        assert producer.is_open is consumer.is_open is keep_alive
        await exchange(producer, consumer)
        for session in (consuming, producing):
            await session.__aexit__(None, None, None)
        await relay.close()
        await asyncio.sleep(60.0)
        assert leftovers(network) == []

    run(main(), limit=2 * LONG)


async def test_sessions_that_the_transport_gave_up_are_there_again(
    files: PemFiles, nothing_left_behind: None
) -> None:
    """The same over real sockets, once."""
    quic = kvcs.QuicSettings(idle_timeout=2.0, ping_interval=None)
    async with (
        kvcs.Relay(relay_settings(files, quic=quic)) as relay,
        kvcs.connect(relay.url, ca=files.ca, quic=quic, reconnect=SOON) as producer,
        kvcs.connect(relay.url, ca=files.ca, quic=quic, reconnect=SOON) as consumer,
    ):
        await asyncio.gather(over(producer), over(consumer))
        for session in (producer, consumer):
            await until(session, lambda session=session: session.newest.is_usable)  # type: ignore[misc]
        await exchange(producer, consumer)

"""Tokens over hours of virtual time: renewed, run out, not to be had, after a lost session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import kvcs
from kvcs.keyfiles import save_key_ring
from kvcs.quic import tokens as tokens_module
from kvcs.testing.network import Network, leftovers, run
from kvcs.trust import CONSUMER, PRODUCER, KeyRing, KeyUse, SigningKey, issue, scope_rule
from tests.builders import put, same, toy_prefix, toy_publication

BASE = 1_000_000_000
"""Unix seconds at the start of virtual time."""

PREFIX, TOY = toy_prefix(), toy_publication()
LAYERS = TOY.descriptor.layers
ISSUER = SigningKey.generate(use=KeyUse.TOKEN, name="issuer", scope_id=PREFIX.scope_id)
URL = "moqt://relay:4433"


@dataclass
class Source:
    """What a client gets its tokens from."""

    lifetime: int = 60
    given: list[float] = field(default_factory=list)
    """When, in virtual seconds."""
    broken: bool = False

    async def __call__(self) -> bytes:
        await asyncio.sleep(0.1)
        if self.broken:
            raise OSError("the issuer is down")
        self.given.append(asyncio.get_running_loop().time())
        return self.token()

    def token(self) -> bytes:
        return issue(
            ISSUER,
            audience=["relay.example"],
            rules=[scope_rule(PREFIX.scope_id, PRODUCER | CONSUMER)],
            issued_at=int(time.time()),
            lifetime=self.lifetime,
            token_id=len(self.given).to_bytes(8, "big"),
        )


@dataclass
class World:
    """A guarded relay on a virtual network."""

    network: Network
    relay: kvcs.Relay

    @property
    def permits_ended(self) -> int:
        return self.relay.stats.permits_ended


@pytest.fixture
def simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[World], Coroutine[Any, Any, None]]], None]:
    """Runs a scenario with a guarded relay, with Unix time in step with virtual time."""
    ring = tmp_path / "issuers"
    save_key_ring(ring, KeyRing([ISSUER.public], use=KeyUse.TOKEN))

    async def main(scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(time, "time", lambda: BASE + loop.time())
        network = Network(seed=1)
        host = network.host("relay")
        settings = kvcs.RelaySettings(
            cert="unused",
            key="unused",
            host=host.address,
            issuers=ring,
            audience=("relay.example",),
            token_skew=5.0,
            issuers_interval=300.0,
        )
        with host:
            relay = kvcs.Relay(settings)
            await relay.__aenter__()
        try:
            await scenario(World(network, relay))
        finally:
            await relay.close()
        await asyncio.sleep(60)
        assert leftovers(network) == []

    return lambda scenario: run(main(scenario), limit=7200.0)


async def publish_slowly(world: World, source: Any, pause: float, done: asyncio.Event) -> None:
    """Publish a layer, again and again after a pause, then stay until all is read."""
    with world.network.host("producer"):
        async with kvcs.connect(URL, token=source) as session:
            async with kvcs.Publisher(session).publish(PREFIX) as publication:
                segment = await publication.segment()
                for layer in range(LAYERS):
                    await put(segment, TOY, [layer])
                    await asyncio.sleep(pause)
                await done.wait()


async def read(world: World, source: Any, deadline: float) -> int:
    """Retrieve the toy as it is produced; how many layers were right."""
    with world.network.host("consumer"):
        async with kvcs.connect(URL, token=source) as session:
            async with kvcs.Subscriber(session).open(PREFIX, deadline=deadline) as cache:
                return sum([same(layer, TOY) async for layer in cache])


def test_a_production_of_ten_minutes_on_tokens_of_one(simulated: Any) -> None:
    producer, consumer = Source(), Source()

    async def scenario(world: World) -> None:
        done = asyncio.Event()
        task = asyncio.create_task(publish_slowly(world, producer, 150.0, done))
        assert await read(world, consumer, 900.0) == LAYERS
        done.set()
        await task
        assert world.permits_ended == 0

    simulated(scenario)
    for source in (producer, consumer):
        # Each was replaced when a fifth of its life was left, no earlier and no later.
        gaps = [
            after - before for before, after in zip(source.given, source.given[1:], strict=False)
        ]
        assert len(gaps) >= 7
        assert all(46 <= gap <= 50 for gap in gaps)


def test_a_fixed_token_works_until_it_expires(simulated: Any) -> None:
    producer = Source(lifetime=3600)

    async def scenario(world: World) -> None:
        done = asyncio.Event()
        task = asyncio.create_task(publish_slowly(world, producer, 50.0, done))
        started = asyncio.get_running_loop().time()
        with pytest.raises(kvcs.CacheIncomplete) as caught:
            await read(world, Source(lifetime=60).token(), 900.0)
        took = asyncio.get_running_loop().time() - started
        assert 60 < took < 75, "the tolerance of clocks, and the time for recovery"
        assert caught.value.missing
        done.set()
        await task
        assert world.permits_ended > 0

    simulated(scenario)


def test_an_issuer_that_is_down_for_a_while(simulated: Any) -> None:
    producer, consumer = Source(lifetime=3600), Source()

    async def scenario(world: World) -> None:
        done = asyncio.Event()
        task = asyncio.create_task(publish_slowly(world, producer, 50.0, done))
        reader = asyncio.create_task(read(world, consumer, 900.0))
        await asyncio.sleep(40)
        consumer.broken = True
        await asyncio.sleep(15)  # the first tries fail, the token is still good
        consumer.broken = False
        assert await reader == LAYERS
        done.set()
        await task
        assert world.permits_ended == 0

    simulated(scenario)


def test_a_source_without_a_later_token_is_asked_again_in_time(
    simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_module, "RETRY_SECONDS", 2.0)
    source = Source(lifetime=60)
    asked: list[float] = []

    async def scenario(world: World) -> None:
        same_token = source.token()

        def stale() -> bytes:
            asked.append(asyncio.get_running_loop().time())
            return same_token

        with world.network.host("consumer"):
            async with kvcs.connect(URL, token=stale) as session:
                await asyncio.sleep(100)
                assert session.is_open, "an expired token ends requests, not the session"

    simulated(scenario)
    assert len(asked) <= 1 + 60 / 2.0


def test_a_session_that_comes_back_shows_a_fresh_token(simulated: Any) -> None:
    source = Source(lifetime=600)

    async def scenario(world: World) -> None:
        with world.network.host("consumer"):
            async with kvcs.connect(URL, token=source) as session:
                await asyncio.sleep(10)
                assert len(source.given) == 1
                assert session.link is not None
                again = asyncio.Event()
                session.link.on_change(lambda: again.set() if session.newest.is_open else None)
                for end in world.network.sessions:
                    end.transport.close(0x1, "killed")
                await again.wait()
                assert session.newest is not session
                assert len(source.given) == 2
                follower = await session.link.session()
                assert await kvcs.Subscriber(follower).list(PREFIX) == []

    simulated(scenario)


def test_a_server_shows_fresh_tokens_too(simulated: Any) -> None:
    source = Source()

    async def scenario(world: World) -> None:
        host = world.network.host("server")
        with host:
            async with kvcs.serve(host.address, 4433, cert="c", key="k", token=source):
                await asyncio.sleep(130)
                with world.network.host("consumer"):
                    async with kvcs.connect("moqt://server:4433") as session:
                        assert session.is_open
        assert len(source.given) == 3
        await asyncio.sleep(200)
        assert len(source.given) == 3, "it is renewed no longer"

    simulated(scenario)


def test_a_server_that_cannot_listen_asks_for_no_more_tokens(simulated: Any) -> None:
    source = Source()

    async def scenario(world: World) -> None:
        host = world.network.host("relay")  # where the relay has the port
        with host, pytest.raises(kvcs.ConnectionFailed, match="cannot listen"):
            async with kvcs.serve(host.address, 4433, cert="c", key="k", token=source):
                raise AssertionError("it listens")
        await asyncio.sleep(200)
        assert len(source.given) == 1

    simulated(scenario)

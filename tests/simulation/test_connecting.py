"""How connections come to be and come back, at exact times."""

from __future__ import annotations

import asyncio

import pytest

import kvcs
from kvcs.testing.network import Network, leftovers, run


async def connected_after(network: Network, seconds: float, initial: float) -> float:
    """Connect to a server that starts after so many seconds; returns when the session was there."""

    async def listen_later() -> None:
        await asyncio.sleep(seconds)
        with network.host("server"):
            async with kvcs.serve("server", 4433, cert="unused", key="unused"):
                await done.wait()

    done = asyncio.Event()
    serving = asyncio.create_task(listen_later())
    try:
        async with kvcs.connect("moqt://server:4433", reconnect=kvcs.Reconnect(initial=initial)):
            return network.now
    finally:
        done.set()
        if network.now < seconds:
            serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.parametrize("seed", range(10))
def test_a_server_is_waited_for_to_the_end_of_the_time(seed: int) -> None:
    async def main() -> None:
        network = Network(seed)
        network.host("server")
        assert 2.9 <= await connected_after(network, 2.9, initial=3.0) < 3.2
        await asyncio.sleep(5)
        assert leftovers(network) == []

    run(main())


@pytest.mark.parametrize("seed", range(5))
def test_a_server_that_comes_too_late_is_not_waited_for(seed: int) -> None:
    async def main() -> None:
        network = Network(seed)
        network.host("server")
        with pytest.raises(kvcs.ConnectionFailed, match="nothing listens"):
            await connected_after(network, 3.5, initial=3.0)
        assert 3.0 <= network.now < 3.2

    run(main())


def test_no_time_at_all_is_one_try() -> None:
    async def main() -> None:
        network = Network()
        network.host("server")
        with pytest.raises(kvcs.ConnectionFailed, match="nothing listens"):
            await connected_after(network, 1.0, initial=0.0)
        assert network.now < 0.1

    run(main())

"""The relay that a scenario goes through, the peer's or ours, by name."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvcs.relay.server import Relay, RelaySettings
from tests.interop.scenario import Stage

PEERS = "peer's"
OURS = "ours"
DIRECT = "direct"
"""No relay: the publisher listens itself."""

STREAM_RING_CAP = ("--stream-ring-cap", str(8 << 20))
"""Without it the peer's relay stalls at an object of 1 MiB, which a real manifest may reach."""


@asynccontextmanager
async def relay(stage: Stage, whose: str) -> AsyncIterator[str]:
    """Run a relay and give its URL."""
    if whose == PEERS:
        yield await stage.peer_relay(options=STREAM_RING_CAP)
        return
    settings = RelaySettings(
        cert=stage.pem.cert,
        key=stage.pem.key,
        port=stage.port(),
        allow_anyone=True,
        goaway_timeout=0.0,  # the peer does not obey GOAWAY
    )
    async with Relay(settings) as ours:
        yield ours.url


@asynccontextmanager
async def way(stage: Stage, via: str) -> AsyncIterator[str | None]:
    """Give the URL of the relay in between, or None where there is none."""
    if via == DIRECT:
        yield None
        return
    async with relay(stage, via) as url:
        yield url

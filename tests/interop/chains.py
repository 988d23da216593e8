"""Scenarios of a chain of two relays, one of them the peer's: our publisher, our consumer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from kvcs.relay.server import Relay, RelaySettings
from tests.interop import publications
from tests.interop.ours import Seen, producing, retrieve
from tests.interop.publications import Source
from tests.interop.relays import PEERS, STREAM_RING_CAP
from tests.interop.scenario import Stage
from tests.interop.steps import perform


@asynccontextmanager
async def _ours(stage: Stage, *upstreams: str) -> AsyncIterator[str]:
    settings = RelaySettings(
        cert=stage.pem.cert,
        key=stage.pem.key,
        port=stage.port(),
        allow_anyone=True,
        upstreams=upstreams,
        ca=stage.pem.ca,
        goaway_timeout=0.0,  # the peer does not obey GOAWAY
    )
    async with Relay(settings) as relay:
        yield relay.url


@asynccontextmanager
async def chain(stage: Stage, upper: str) -> AsyncIterator[tuple[str, str]]:
    """Run two relays, give the URL of the producer's and that of the consumers'.

    Args:
        upper: whose relay the producer is at; the other one is the consumers'.
    """
    if upper == PEERS:
        theirs = await stage.peer_relay(options=STREAM_RING_CAP)
        async with _ours(stage, theirs) as ours:
            yield theirs, ours
    else:
        async with _ours(stage) as ours:
            yield ours, await stage.peer_relay(upstream=f"{ours}/", options=STREAM_RING_CAP)


async def while_produced(stage: Stage, urls: tuple[str, str], source: Source) -> Seen:
    """A consumer from the start, by the publication's name: the peer's relay names none.

    Each layer is put when the consumer has the one before.
    """
    first, last = urls
    async with producing(stage, first, source) as production:

        async def next_layer(index: int) -> None:
            await production.put(min(index + 2, len(source.layers)))

        uri = production.publication.uri(last)
        return await retrieve(stage, last, source, next_layer, publication=uri)


async def afterwards(stage: Stage, urls: tuple[str, str], source: Source) -> Seen:
    """Two consumers after the end, and a FETCH of some layers."""
    first, last = urls
    async with producing(stage, first, source) as production:
        await production.put_all()
        uri = production.publication.uri(last)
        late = await retrieve(stage, last, source, publication=uri)
        again = await retrieve(stage, last, source, publication=uri)
        fetched = await retrieve(stage, last, source, publication=uri, layers=(1, 3))
    return {"late": late, "again": again, "fetched": fetched}


STEPS = (while_produced, afterwards)


async def everything(stage: Stage, upper: str) -> Seen:
    """Run every step through one chain."""
    async with chain(stage, upper) as urls:
        return await perform(
            stage,
            {
                step.__name__: partial(step, stage, urls, publications.small(number))
                for number, step in enumerate(STEPS)
            },
        )

"""Scenarios in which our subscriber reads the peer's publisher, directly or through a relay.

What the peer publishes is a publication of ours that was saved: its manifest versions and its
data Objects as files.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import kvcs
from kvcs.kv import PublicationNamespace
from tests.interop import objects, peer, publications
from tests.interop.ours import OnLayer, Production, Seen, retrieve
from tests.interop.processes import Process
from tests.interop.publications import Source
from tests.interop.relays import way
from tests.interop.scenario import Stage
from tests.interop.steps import perform

DATA = ("k.raw.s0", "v.raw.s0")

FETCHED_LAYERS = (2, 4)
FETCHED_BLOCKS = 3

GONE_DEADLINE_SECONDS = 8.0
"""Of a retrieval whose publisher goes away for good: so long it is waited for."""

IMPATIENT = kvcs.SubscriberSettings(least_recovery=2.0)
"""Gives up soon what nobody has."""


class Serving:
    """One publication that the peer serves and we read.

    Args:
        url: of the relay; None where the peer listens itself.
    """

    def __init__(self, stage: Stage, url: str | None, source: Source) -> None:
        self.stage = stage
        self.source = source
        self._relay = url

    async def save(self) -> tuple[PublicationNamespace, Path]:
        """Publish to nobody and write all Objects, manifest included, as an object tree."""
        pem = self.stage.pem
        async with kvcs.serve("127.0.0.1", 0, cert=pem.cert, key=pem.key) as server:
            async with kvcs.Publisher(server).publish(self.source.prefix) as publication:
                production = Production(self.source, publication)
                await production.put_all()
        directory = self.stage.directory / publication.publication_id.hex()
        objects.write_tree(directory, production.tree())
        return PublicationNamespace.parse(publication.namespace), directory

    @asynccontextmanager
    async def offering(self) -> AsyncIterator[tuple[str, Process]]:
        """Start the peer's publisher, and give the URL at which a subscriber finds it."""
        namespace, tree = await self.save()
        stage = self.stage
        if self._relay is None:
            port, pem = stage.port(), stage.pem
            url = f"moqt://127.0.0.1:{port}"
            spec = peer.serve(
                url, certificate=pem.cert, key=pem.key, namespace=namespace.fields, source=tree
            )
            publisher = await stage.start(spec)
            await publisher.wait_event("listening")
            await stage.bound(port)
        else:
            url, ca = self._relay, stage.pem.ca
            spec = peer.publish(url, ca=ca, namespace=namespace.fields, source=tree)
            publisher = await stage.start(spec)
            await publisher.wait_event("announced")
        try:
            yield url, publisher
        finally:
            await publisher.stop()

    async def retrieve(self, url: str, on_layer: OnLayer | None = None, **how: Any) -> Seen:
        """Retrieve it, and tell what came."""
        return await retrieve(self.stage, url, self.source, on_layer, **how)


async def live(serving: Serving) -> Seen:
    """We subscribe before the first version of the manifest, and follow to the end."""
    last = len(serving.source.layers) - 1
    async with serving.offering() as (url, publisher):

        async def next_layer(index: int) -> None:
            if index == -1:
                for track in DATA:
                    await publisher.wait_event("subscribed", track=track)
            if index < last - 1:
                await peer.command(publisher, f"publish {index + 1}")
            elif index == last - 1:
                await peer.command(publisher, "end")
                await peer.command(publisher, "done")

        async def first_version() -> None:
            await publisher.wait_event("subscribed", track="manifest")
            await peer.command(publisher, "publish 0")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(first_version())
            retrieving = tasks.create_task(serving.retrieve(url, next_layer))
    return retrieving.result()


async def middle(serving: Serving) -> Seen:
    """We subscribe inside a layer: half of the Objects of one are published."""
    layer, block = len(serving.source.layers) // 2, serving.source.prefix.blocks // 2
    async with serving.offering() as (url, publisher):
        await peer.command(publisher, f"publish {layer} {block}")

        async def the_rest(index: int) -> None:
            if index == layer - 1:
                await peer.command(publisher, "end")
                await peer.command(publisher, "done")

        return await serving.retrieve(url, the_rest)


async def late(serving: Serving) -> Seen:
    """We subscribe when everything is published."""
    async with serving.offering() as (url, publisher):
        await peer.command(publisher, "end")
        return await serving.retrieve(url)


async def fetch(serving: Serving) -> Seen:
    """We FETCH layers a to b of the first blocks."""
    async with serving.offering() as (url, publisher):
        await peer.command(publisher, "end")
        return await serving.retrieve(
            url, layers=FETCHED_LAYERS, blocks=FETCHED_BLOCKS, retrieve="fetch"
        )


async def done_early(serving: Serving) -> Seen:
    """PUBLISH_DONE says in the middle that the tracks have ended."""
    return await _cut_short(serving, lambda publisher: peer.command(publisher, "done"))


async def gone(serving: Serving) -> Seen:
    """The publisher goes away in the middle; it may come back until the deadline."""
    return await _cut_short(serving, Process.stop, deadline=GONE_DEADLINE_SECONDS)


async def _cut_short(
    serving: Serving, end: Callable[[Process], Awaitable[object]], **how: Any
) -> Seen:
    layer = len(serving.source.layers) // 2
    got = []
    async with serving.offering() as (url, publisher):
        await peer.command(publisher, f"publish {layer - 1}")

        async def leave(index: int) -> None:
            if index >= 0:
                got.append(index)
            if index == layer - 1:
                await end(publisher)

        started = asyncio.get_running_loop().time()
        try:
            await serving.retrieve(url, leave, settings=IMPATIENT, **how)
        except (kvcs.CacheIncomplete, kvcs.PublicationAborted) as error:
            seen = {
                "layers": got,
                "error": type(error).__name__,
                "seconds": asyncio.get_running_loop().time() - started,
            }
            if isinstance(error, kvcs.CacheIncomplete):
                seen["tokens"] = error.usable_tokens
                seen["missing"] = sorted({part.layer for part in error.missing})
            return seen
    return {"layers": got, "error": None}


STEPS = (live, middle, late, fetch, done_early, gone)


async def everything(stage: Stage, via: str) -> dict[str, Seen]:
    """Every step, each with a prompt of its own, and each real cache."""
    async with way(stage, via) as url:
        steps = {
            made.__name__: partial(made, Serving(stage, url, publications.small(salt)))
            for salt, made in enumerate(STEPS)
        }
        for name in publications.real_names():
            steps[name] = partial(live, Serving(stage, url, publications.real(name)))
        return await perform(stage, steps)

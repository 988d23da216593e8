"""Scenarios of our publisher and our subscriber with a relay between them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import kvcs
from tests.interop import objects, publications
from tests.interop.publications import Source
from tests.interop.relays import relay
from tests.interop.scenario import Stage
from tests.interop.steps import perform

FETCHED_LAYERS = (1, 3)
FETCHED_BLOCKS = 2
DEADLINE_SECONDS = 20.0
"""Of one retrieval; longer than any needs, shorter than the scenario's own."""

PATIENT = kvcs.SubscriberSettings(least_recovery=DEADLINE_SECONDS, quiet=DEADLINE_SECONDS)
"""What was lost may come as late as all else, and what is slow is not taken for lost."""

Seen = dict[str, Any]
"""What came of one exchange, for a test to look at."""

OnLayer = Callable[[int], Awaitable[None]]


class Production:
    """One publication of ours, layer by layer."""

    def __init__(self, source: Source, publication: kvcs.Publication) -> None:
        self.source = source
        self.publication = publication
        self.manifests: dict[objects.Location, bytes] = {}
        """Every manifest version by its Location."""
        self._segment: kvcs.Segment | None = None
        self._note_manifest()

    async def put(self, until: int) -> None:
        """Put the layers of the current segment up to ``until``, exclusive."""
        if self._segment is None:
            self._segment = await self.publication.segment()
            self._note_manifest()
        segment, size = self._segment, self.source.descriptor.block_tokens
        start = segment.first_block * size
        for layer in range(segment.layers_put, until):
            arrays = [array[start : start + segment.tokens] for array in self.source.layers[layer]]
            await segment.put(layer, *arrays)
            self._note_manifest()

    async def put_all(self) -> None:
        """Put the rest of the publication, all segments."""
        while not self.publication.complete:
            await self.put(len(self.source.layers))
            self._segment = None

    def tree(self) -> Seen:
        """Return every object published, manifest track included, once all is put."""
        first = self.publication.prefix.blocks
        if self._segment is not None and self._segment.number == 0:
            first = self._segment.blocks
        return {"manifest": self.manifests, **publications.expected_tree(self.source, first)}

    def _note_manifest(self) -> None:
        version = self.publication.progress.manifests - 1
        self.manifests.setdefault((version, 0), b"".join(self.publication.writer.parts()))


@asynccontextmanager
async def producing(
    stage: Stage,
    url: str,
    source: Source,
    first_segment_blocks: int | None = None,
    session_settings: kvcs.SessionSettings | None = None,
) -> AsyncIterator[Production]:
    """Publish ``source`` through the relay at ``url`` until the context is left."""
    async with kvcs.connect(url, ca=stage.pem.ca, session=session_settings) as session:
        async with kvcs.Publisher(session).publish(
            source.prefix, first_segment_blocks=first_segment_blocks
        ) as publication:
            yield Production(source, publication)


async def retrieve(
    stage: Stage,
    url: str,
    source: Source,
    on_layer: OnLayer | None = None,
    settings: kvcs.SubscriberSettings = PATIENT,
    **how: Any,
) -> Seen:
    """Retrieve ``source`` from ``url`` and tell what came.

    Args:
        on_layer: awaited with -1 once the publication is open, and with each layer received.
        settings: of the subscriber.
        how: goes to `kvcs.Subscriber.open`.
    """
    layers = []
    async with kvcs.connect(url, ca=stage.pem.ca) as session:
        within = {"deadline": DEADLINE_SECONDS} | how
        opening = kvcs.Subscriber(session, settings=settings).open(source.prefix, **within)
        async with opening as cache:
            if on_layer is not None:
                await on_layer(-1)
            async for layer in cache:
                layers.append(
                    [layer.index, publications.digest(layer.k), publications.digest(layer.v)]
                )
                if on_layer is not None:
                    await on_layer(layer.index)
            report = asdict(cache.report)
    del report["publication"]
    return {"digests": layers, **report}


async def live(stage: Stage, url: str, source: Source) -> Seen:
    """One consumer from the start: each layer is put when it has the one before."""
    async with producing(stage, url, source) as production:

        async def next_layer(index: int) -> None:
            await production.put(min(index + 2, len(source.layers)))

        return await retrieve(stage, url, source, next_layer)


async def chunked(stage: Stage, url: str, source: Source) -> Seen:
    """Two passes, each a segment: a layer is whole with the second."""
    first = source.prefix.blocks // 2
    async with producing(stage, url, source, first) as production:

        async def both(index: int) -> None:
            if index == -1:
                await production.put_all()

        # The Anchor Key is of the first segment, which a consumer of the whole does not ask for.
        uri = production.publication.uri(url)
        return await retrieve(stage, url, source, both, publication=uri)


async def joins(stage: Stage, url: str, source: Source) -> Seen:
    """Consumers that join at the start, in the middle and after the end."""
    middle = len(source.layers) // 2
    async with producing(stage, url, source) as production:
        begun, opened, joined = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def first(index: int) -> None:
            if index == -1:
                opened.set()
            if index == middle - 1:
                begun.set()

        async def second(index: int) -> None:
            if index == middle - 1:
                joined.set()

        async with asyncio.TaskGroup() as tasks:
            start = tasks.create_task(retrieve(stage, url, source, first))
            await opened.wait()
            await production.put(middle)
            await begun.wait()
            join = tasks.create_task(retrieve(stage, url, source, second))
            await joined.wait()
            await production.put_all()
        late = await retrieve(stage, url, source)
    return {"start": start.result(), "middle": join.result(), "late": late}


async def cold_middle(stage: Stage, url: str, source: Source) -> Seen:
    """The relay's first consumer joins when half of the layers are published."""
    middle = len(source.layers) // 2
    async with producing(stage, url, source) as production:
        await production.put(middle)

        async def caught_up(index: int) -> None:
            if index >= middle - 1:
                await production.put(min(index + 2, len(source.layers)))

        return await retrieve(stage, url, source, caught_up)


async def cold_late(stage: Stage, url: str, source: Source) -> Seen:
    """The relay's first consumer comes when all is published; then another, and the relay warm."""
    async with producing(stage, url, source) as production:
        await production.put_all()
        cold = await retrieve(stage, url, source)
        return {"cold": cold, "warm": await retrieve(stage, url, source)}


async def fetch(stage: Stage, url: str, source: Source) -> Seen:
    """FETCH layers a to b of the first blocks, from a cold relay and from a warm one."""
    how: dict[str, Any] = {"layers": FETCHED_LAYERS, "blocks": FETCHED_BLOCKS, "retrieve": "fetch"}
    async with producing(stage, url, source) as production:
        await production.put_all()
        cold = await retrieve(stage, url, source, **how)
        warm = await retrieve(stage, url, source, **how)
        everything = await retrieve(stage, url, source, retrieve="fetch")
    return {"cold": cold, "warm": warm, "everything": everything}


STEPS = (live, chunked, joins, cold_middle, cold_late, fetch)


async def everything(stage: Stage, whose: str) -> dict[str, Seen]:
    """Every step, each with a prompt of its own, and each real cache, through one relay."""
    async with relay(stage, whose) as url:
        steps = {
            made.__name__: partial(made, stage, url, publications.small(salt))
            for salt, made in enumerate(STEPS)
        }
        for name in publications.real_names():
            steps[name] = partial(joins, stage, url, publications.real(name))
        return await perform(stage, steps)

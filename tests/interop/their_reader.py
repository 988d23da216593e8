"""Scenarios in which the peer's subscriber reads our publisher, directly or through a relay."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import kvcs
from tests.interop import objects, peer, publications
from tests.interop.ours import Production, Seen, producing
from tests.interop.processes import Process
from tests.interop.publications import Source
from tests.interop.relays import way
from tests.interop.scenario import Stage
from tests.interop.steps import perform

TRACKS = ["manifest", "k.raw.s0", "v.raw.s0"]
DATA = TRACKS[1:]

FETCHED_LAYERS = (2, 4)
FETCHED_BLOCKS = (1, 3)

UNHURRIED = kvcs.SessionSettings(done_delay=1.5)
"""In the peer's relay a PUBLISH_DONE overtakes what is still on its way of a fill, and the peer's
subscriber then drops all of it and calls the fill clean: it gets time for the largest fill here."""


class Reading:
    """One publication of ours that the peer reads.

    Args:
        url: of the relay; None where our publisher listens itself.
    """

    def __init__(self, stage: Stage, url: str | None, source: Source) -> None:
        self.source = source
        self.stage = stage
        self._relay = url
        self._saved: dict[Process, Path] = {}

    @asynccontextmanager
    async def offering(
        self, settings: kvcs.SessionSettings | None = None
    ) -> AsyncIterator[tuple[str, Production]]:
        """Publish, and give the URL at which a subscriber finds it."""
        stage = self.stage
        if self._relay is not None:
            async with producing(
                stage, self._relay, self.source, session_settings=settings
            ) as production:
                yield self._relay, production
            return
        pem = stage.pem
        async with kvcs.serve("127.0.0.1", stage.port(), cert=pem.cert, key=pem.key) as server:
            async with kvcs.Publisher(server).publish(self.source.prefix) as publication:
                yield server.url, Production(self.source, publication)

    async def subscribe(self, url: str, production: Production) -> Process:
        """Start the peer's subscriber, which finds the publication by its prefix."""
        saved = self._folder(production)
        subscriber = await self.stage.start(
            peer.subscribe(
                url,
                ca=self.stage.pem.ca,
                namespace=production.publication.namespace[:4],
                tracks=TRACKS,
                options=("--discover", "--save", str(saved)),
            )
        )
        self._saved[subscriber] = saved
        for track in TRACKS:
            await subscriber.wait_event("accepted", track=track)
        return subscriber

    async def fetch(self, url: str, production: Production, *options: str) -> Process:
        """Start the peer's subscriber to FETCH some layers."""
        saved = self._folder(production)
        first, last = FETCHED_LAYERS
        groups = ("--start-group", str(first), "--end-group", str(last))
        subscriber = await self.stage.start(
            peer.subscribe(
                url,
                ca=self.stage.pem.ca,
                namespace=production.publication.namespace,
                tracks=DATA,
                mode="fetch",
                options=(*groups, *options, "--save", str(saved)),
            )
        )
        self._saved[subscriber] = saved
        return subscriber

    def _folder(self, production: Production) -> Path:
        name = f"{production.publication.publication_id.hex()}-{len(self._saved)}"
        return self.stage.directory / name

    async def outcome(self, subscriber: Process, production: Production) -> Seen:
        """Wait for the peer's subscriber and tell what it has seen and saved."""
        finished = await subscriber.collect()
        saved = objects.read_tree(self._saved[subscriber])
        manifests = saved.get("manifest", {})
        return {
            "exit": finished.returncode,
            "events": finished.events,
            "saved": {track: objects.digests(payloads) for track, payloads in saved.items()},
            "published": {
                track: objects.digests(payloads) for track, payloads in production.tree().items()
            },
            "manifest": manifests[max(manifests)].decode() if manifests else None,
        }


async def live(reading: Reading) -> Seen:
    """The peer subscribes before the first layer is put, and stays until PUBLISH_DONE."""
    async with reading.offering() as (url, production):
        subscriber = await reading.subscribe(url, production)
        await subscriber.wait_event("fill", track="manifest")
        await production.put_all()
    return await reading.outcome(subscriber, production)


async def middle(reading: Reading) -> Seen:
    """Two subscribers of the peer join one after the other, while layers are put."""
    layers = len(reading.source.layers)
    subscribers = []
    async with reading.offering() as (url, production):
        for until in (layers // 3, 2 * layers // 3):
            await production.put(until)
            subscriber = await reading.subscribe(url, production)
            for track in TRACKS:
                await subscriber.wait_event("fill", track=track)
            subscribers.append(subscriber)
        await production.put_all()
    first, second = [await reading.outcome(each, production) for each in subscribers]
    return {"first": first, "second": second}


async def late(reading: Reading) -> Seen:
    """The peer subscribes when every layer is put."""
    async with reading.offering(UNHURRIED) as (url, production):
        await production.put_all()
        subscriber = await reading.subscribe(url, production)
        for track in TRACKS:
            await subscriber.wait_event("fill", track=track)
    return await reading.outcome(subscriber, production)


async def fetch(reading: Reading) -> Seen:
    """The peer fetches layers, blocks of them, and layers in descending order."""
    first, last = FETCHED_BLOCKS
    seen = {}
    async with reading.offering() as (url, production):
        await production.put_all()
        options = {"blocks": ("--objects", f"{first}-{last}"), "layers": ()}
        for name, words in options.items():
            subscriber = await reading.fetch(url, production, *words)
            seen[name] = await reading.outcome(subscriber, production)
    return seen


async def descending(reading: Reading) -> Seen:
    """The peer fetches the latest layer first."""
    async with reading.offering() as (url, production):
        await production.put_all()
        subscriber = await reading.fetch(url, production, "--descending")
        return await reading.outcome(subscriber, production)


async def absent(reading: Reading) -> Seen:
    """The peer asks for a track that the publication does not have."""
    async with reading.offering() as (url, production):
        stage, namespace = reading.stage, production.publication.namespace
        spec = peer.subscribe(url, ca=stage.pem.ca, namespace=namespace, tracks=["kv.raw.s0"])
        finished = await (await stage.start(spec)).collect()
        await production.put_all()
    return {"exit": finished.returncode, "events": finished.events}


STEPS = (live, middle, late, fetch, descending, absent)


async def everything(stage: Stage, via: str) -> dict[str, Seen]:
    """Every step, each with a prompt of its own, and each real cache."""
    async with way(stage, via) as url:
        steps = {
            made.__name__: partial(made, Reading(stage, url, publications.small(salt)))
            for salt, made in enumerate(STEPS)
        }
        for name in publications.real_names():
            steps[name] = partial(late, Reading(stage, url, publications.real(name)))
        return await perform(stage, steps)

"""The producers of one run: how they publish, and fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from contextvars import ContextVar

import kvcs
from kvcs.fallback.source import StoredManifest
from kvcs.kv.tracks import PublicationNamespace
from kvcs.moqt.names import Location
from tests.simulation.retrievals.content import RING, SIGNER
from tests.simulation.retrievals.means import Saved, tap
from tests.simulation.retrievals.plan import PublicationPlan
from tests.simulation.retrievals.stage import PORT, Stage

drawing: ContextVar[Callable[[int], bytes]] = ContextVar("drawing")
"""Draws Publication IDs of the producer whose task runs."""


class Planned(Exception):
    """The producer fails because the plan says so."""


class Producers:
    """Everybody who publishes.

    Args:
        stage: where they stand.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def play(self, number: int) -> None:
        """Publish what one plan says, and fail or stay as it says."""
        plan = self._stage.plan.publications[number]
        host = self._stage.network.host(plan.name)
        topology = self._stage.plan.topology
        try:
            with host:
                if topology == "none":
                    async with kvcs.serve(
                        host.address, PORT, cert="unused", key="unused"
                    ) as server:
                        await asyncio.sleep(plan.start)
                        await self._publish(number, server)
                        await self._stage.consumed.wait()
                        return
                await asyncio.sleep(plan.start)
                at = self._stage.plan.middles if topology == "parallel" else ("relay",)
                async with AsyncExitStack() as stack:
                    sessions = [
                        await stack.enter_async_context(kvcs.connect(f"moqt://{each}:{PORT}"))
                        for each in at
                    ]
                    await self._publish(number, *sessions)
        finally:
            if not self._stage.announced[number].done():
                self._stage.announced[number].set_result(None)

    async def _publish(self, number: int, *sessions: kvcs.Connection | kvcs.Server) -> None:
        plan = self._stage.plan.publications[number]
        chance = self._stage.network.randomness(f"{plan.name} publishes")

        def publication_id(octets: int) -> bytes:
            drawn = chance.randbytes(octets)
            self._stage.named[drawn] = number
            return drawn

        drawing.set(publication_id)
        settings = kvcs.PublisherSettings(random_octets=publication_id)
        publisher = kvcs.Publisher(*sessions, settings=settings)
        saved = Saved()
        try:
            async with publisher.publish(
                self._stage.context.prefix(plan.blocks),
                first_segment_blocks=plan.passes[0],
                deterministic=plan.deterministic,
                sign=SIGNER if plan.signed else None,
                protect=RING if plan.sealed else None,
                pad_blocks=plan.pad,
                encodings=plan.encodings,
            ) as publication:
                named = PublicationNamespace.parse(publication.namespace)
                self._stage.shelf[named] = saved
                self._stage.announced[number].set_result(named)
                await self._fill(publication, plan, saved)
                if plan.saved:
                    await publication.finish()
                    await publication._manifest.settled()
                    saved.manifest = _last_manifest(publication)
                if plan.end != "withdraw":
                    await self._stage.consumed.wait()
        finally:
            if publisher.held_octets:
                self._stage.problem(f"{plan.name} holds {publisher.held_octets} octets")

    async def _fill(
        self, publication: kvcs.Publication, plan: PublicationPlan, saved: Saved
    ) -> None:
        layers = self._stage.plan.model.layers
        last = layers if plan.end in ("finish", "withdraw") else int(plan.end_after * layers)
        chance = self._stage.network.randomness(f"{plan.name} fills")
        size, first = self._stage.plan.model.block_tokens, 0
        for number, blocks in enumerate(plan.passes):
            segment = await publication.segment(None if number == 0 else blocks)
            damaged = [
                Location(layer, block - first)
                for layer, block in plan.damaged
                if first <= block < first + blocks
            ]
            for place, track in enumerate(segment.tracks):
                tap(track, saved, damaged if place == 0 else [], chance)
            for layer in range(layers):
                if layer == last:
                    await self._end(publication, plan)
                await asyncio.sleep(chance.random() * plan.pause)
                tokens = (first * size, (first + blocks) * size)
                k, v = self._stage.context.tensors(self._variant(plan), layer, *tokens)
                await segment.put(layer, k, None if self._stage.plan.model.latent else v)
            first += blocks

    def _variant(self, plan: PublicationPlan) -> int:
        return self._stage.context.variant(self._stage.plan.publications.index(plan))

    async def _end(self, publication: kvcs.Publication, plan: PublicationPlan) -> None:
        self._stage.network.note(plan.name, plan.end)
        if plan.end == "abort":
            publication.abort("planned")
            raise Planned
        if plan.end == "vanish":
            self._stage.network.host(plan.name).sever()
        if plan.end == "cancel":
            raise asyncio.CancelledError
        raise Planned


def _last_manifest(publication: kvcs.Publication) -> StoredManifest:
    track = publication._manifest.track
    version = max(track.group_ids())
    stored = track.get(Location(version, 0))
    assert stored is not None
    payload = b"".join(map(bytes, stored.views(0, stored.header.payload_length)))
    return StoredManifest(track.name.name, version, payload, bytes(stored.header.properties))

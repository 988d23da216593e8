"""Where blocks come from beside sessions: a source like an HTTP server, and the caller's engine;
and how Objects are spoilt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import kvcs
from kvcs.fallback.source import SourceFailed, StoredBlock, StoredManifest
from kvcs.kv import DataTrack
from kvcs.kv.tracks import PublicationNamespace
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectHeader
from kvcs.moqt.track.store import Track
from kvcs.subscriber.last_means import MissingLayer
from tests.simulation.retrievals.content import ENGINE, Context
from tests.simulation.retrievals.plan import Engine, SourcePlan

IGNORED = (6, 7, 30, 31)
"""Octets of a payload header that nobody looks at: Flags and Reserved."""

Parts = tuple[memoryview, ...]


def spoilt(payload: bytes, random: Random) -> bytes:
    """The payload with one octet changed that matters: in its header as often as in its Data."""
    places = [place for place in range(68) if place not in IGNORED]
    place = random.choice(places) if random.random() < 0.5 else random.randrange(68, len(payload))
    return payload[:place] + bytes([payload[place] ^ 0x55]) + payload[place + 1 :]


@dataclass
class Saved:
    """What the sources have of one publication."""

    objects: dict[tuple[str, Location], tuple[bytes, bytes]] = field(default_factory=dict)
    """Payload and Object properties, by track and Location."""

    manifest: StoredManifest | None = None
    """Its last manifest; until it is there, no source knows the publication."""


def tap(track: Track, saved: Saved, damaged: Sequence[Location], random: Random) -> None:
    """Keep what is published on a Track, and let its store have some of it damaged."""
    publish: Callable[..., None] = track.publish_run

    def tapped(
        objects: Sequence[tuple[ObjectHeader, Parts]], *arguments: Any, **named: Any
    ) -> None:
        run = []
        for header, parts in objects:
            payload = b"".join(parts)
            if payload:
                name = track.name.name.decode()
                saved.objects[name, header.location] = payload, bytes(header.properties)
            if header.location in damaged and payload:
                parts = (memoryview(spoilt(payload, random)),)
            run.append((header, parts))
        publish(tuple(run), *arguments, **named)

    track.publish_run = tapped  # type: ignore[method-assign]


class VirtualSource:
    """A `kvcs.BlockSource` that has what was saved, as one reader sees it."""

    def __init__(
        self, plan: SourcePlan, shelf: dict[PublicationNamespace, Saved], random: Random
    ) -> None:
        self.plan = plan
        self.shelf = shelf
        self.random = random

    async def __aenter__(self) -> VirtualSource:
        return self

    async def __aexit__(self, *_: object) -> None:
        """It holds nothing."""

    async def _asked(self) -> None:
        await asyncio.sleep(self.plan.delay)
        if self.random.random() < self.plan.fails:
            if self.random.random() < 0.2:
                raise ValueError("a foreign error")
            raise SourceFailed("503", 503)

    def _found(self, namespace: PublicationNamespace) -> Saved:
        saved = self.shelf.get(namespace)
        if saved is None or saved.manifest is None:
            raise SourceFailed("404", 404)
        return saved

    async def publications(
        self, scope_id: bytes, compat_id: bytes, anchor_key: bytes
    ) -> list[PublicationNamespace]:
        """Those of one token prefix."""
        await self._asked()
        wanted = (scope_id, compat_id, anchor_key)
        return [
            named
            for named, saved in self.shelf.items()
            if saved.manifest is not None and tuple(named)[:3] == wanted
        ]

    async def manifest(self, namespace: PublicationNamespace, max_octets: int) -> StoredManifest:
        """The last one."""
        await self._asked()
        stored = self._found(namespace).manifest
        assert stored is not None
        return stored

    async def payloads(
        self,
        namespace: PublicationNamespace,
        track: DataTrack,
        layer: int,
        blocks: Sequence[int],
        block_keys: Sequence[bytes],
        max_octets: int,
    ) -> AsyncIterator[StoredBlock]:
        """Blocks, those that are not left out."""
        await self._asked()
        saved = self._found(namespace)
        for block in blocks:
            found = saved.objects.get((str(track), Location(layer, block)))
            if found is None or self.random.random() < self.plan.lacks:
                continue
            payload, properties = found
            if self.random.random() < self.plan.damages:
                payload = spoilt(payload, self.random)
            yield StoredBlock(block, payload, properties)


class CallersEngine:
    """What a caller recomputes with: its own bits, or what goes wrong."""

    def __init__(self, how: Engine, context: Context) -> None:
        self.how = how
        self.context = context
        self.cache: kvcs.Cache | None = None
        self.problems: list[str] = []
        """Blocks that it was asked for, and that did not lack."""

    async def __call__(self, missing: MissingLayer) -> tuple[object, object]:
        self._check(missing)
        if self.how == "slow":
            await asyncio.sleep(0.3)
        elif self.how == "stuck":
            await asyncio.Event().wait()
        elif self.how == "raises":
            raise RuntimeError("out of memory")
        tokens = (missing.first_token, missing.last_token + 1)
        k, v = self.context.tensors(ENGINE, missing.layer, *tokens)
        if self.how == "shape":
            k = k[:, :, :-1]
        elif self.how == "dtype":
            k = k.astype("float32")
        return k, None if self.context.descriptor.latent else v

    def _check(self, missing: MissingLayer) -> None:
        if self.cache is None:
            return
        size = self.context.descriptor.block_tokens
        lacking = {
            block
            for run in self.cache.missing
            if run.layer == missing.layer
            for block in range(run.first_token // size, (run.last_token + 1) // size)
        }
        asked = set(range(missing.first_block, missing.last_block + 1))
        if not asked <= lacking:
            self.problems.append(f"asked to recompute {missing}, of which only {lacking} lacks")

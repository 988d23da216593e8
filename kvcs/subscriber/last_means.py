"""What a retrieval tries where no session brings what lacks: HTTP, then the caller's own engine.

KVCS "Verification and Recovery": the consumer "retrieves the blocks with KVSP over HTTP, or
recomputes the affected tokens".
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvcs.errors import KvcsError, MissingBlocks, ObjectError, PublicationError, UsageError
from kvcs.fallback.source import BlockSource, SourceFailed, StoredBlock, StoredManifest
from kvcs.kv import (
    HEADER_OCTETS,
    Component,
    DataTrack,
    Ledger,
    Manifest,
    Prefix,
    SegmentEntry,
    as_host_array,
    byte_view,
)
from kvcs.kv.protection import sealed_octets
from kvcs.kv.slots import Outcome
from kvcs.kv.tracks import PublicationNamespace
from kvcs.moqt import events
from kvcs.moqt.names import Location, TrackNamespace
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.observe import get_logger
from kvcs.publisher.segment import layer_priority
from kvcs.subscriber.manifests import ManifestFollower
from kvcs.subscriber.others import Others, twins
from kvcs.subscriber.protection import immutable_properties
from kvcs.subscriber.settings import SubscriberSettings

if TYPE_CHECKING:
    from kvcs.subscriber.segments import Replacements

_log = get_logger("kvcs.subscriber")

CONCURRENCY = 8
"""Layers of tracks that are got from a source at a time."""

NOT_OF_A_SESSION = -1
"""Request and stream IDs of what comes another way."""


@dataclass(frozen=True, slots=True)
class MissingLayer:
    """Blocks of one layer that nobody has: what a `Recompute` callback is asked for."""

    layer: int
    """Layer index."""

    first_block: int
    """Absolute index of the first block."""

    last_block: int
    """Absolute index of the last block, inclusive."""

    first_token: int
    """Absolute position of the first token."""

    last_token: int
    """Absolute position of the last token, inclusive."""

    @property
    def tokens(self) -> int:
        """How many tokens that are."""
        return self.last_token - self.first_token + 1


Recompute = Callable[[MissingLayer], Awaitable[tuple[object, object]]]
"""Computes K and V of some tokens of one layer: arrays [tokens, kv_heads, head_dim] of the
descriptor's dtype; V is None where the model has latent attention."""


async def read_stored(follower: ManifestFollower, stored: StoredManifest) -> None:
    """Let a follower read a manifest that came another way than over its session.

    `ManifestFollower.error` tells what is wrong with it.

    Raises:
        NotAuthentic: it does not count here.
    """
    follower.use(stored.name)
    size = len(stored.payload)
    header = ObjectHeader(stored.version, 0, 0, 0, ObjectStatus.NORMAL, stored.properties, size)
    where = (NOT_OF_A_SESSION, NOT_OF_A_SESSION)
    follower.take(events.ObjectStarted(*where, header))
    follower.take(events.ObjectChunk(*where, memoryview(stored.payload)))
    follower.take(events.ObjectEnded(*where))
    await follower.parsed()


_Left = dict[tuple[int, DataTrack], list[int]]
"""Blocks within the segment, ascending, by layer and track."""


class Served(Protocol):
    """What is got or recomputed for: a retrieval, or a segment of another publication."""

    prefix: Prefix
    namespace: TrackNamespace
    finder: Others | None

    @property
    def ledger(self) -> Ledger:
        """What is owed and what is verified."""

    @property
    def manifest(self) -> Manifest:
        """Newest manifest that was applied."""

    @property
    def manifest_is_final(self) -> bool:
        """Whether no newer one is needed."""

    @property
    def follower(self) -> ManifestFollower | None:
        """Reads newer ones; None where none is wanted."""

    @property
    def may_have_twins(self) -> bool:
        """Whether Objects of another publication may stand for those of this one."""

    @property
    def replacements(self) -> Replacements | None:
        """Takes whole segments from other publications; None where that is not done."""

    def entry(self, track: DataTrack) -> SegmentEntry:
        """The segment of a track."""

    def verified(self) -> None:
        """Something is there that was not."""

    def failed(self, error: KvcsError) -> None:
        """The publication contradicts itself."""


class LastMeans:
    """Fetches and recomputes for one retrieval; see `kvcs.fallback.means.LastMeans`.

    Args:
        source: where blocks are got from; None leaves it out.
        recompute: the caller's; None leaves it out.
        settings: bounds.
    """

    def __init__(
        self,
        source: BlockSource | None,
        recompute: Recompute | None,
        settings: SubscriberSettings,
    ) -> None:
        self.fetched = 0
        """Objects that came from the source and count."""
        self.used_recompute = False
        """Whether the caller has recomputed anything."""
        self._source = source
        self._recompute = recompute
        self._settings = settings
        self._served: Served | None = None

    def serve(self, served: Served) -> None:
        """Work for one from now on."""
        self._served = served

    @property
    def can_recompute(self) -> bool:
        """Whether the caller recomputes what nobody has."""
        return self._recompute is not None

    @property
    def _patient(self) -> Served:
        assert self._served is not None  # it serves one before it is used
        return self._served

    async def look_around(self) -> None:
        """Get a newer manifest from the source, if it has one."""
        patient = self._patient
        follower = patient.follower
        if self._source is None or follower is None or patient.manifest_is_final:
            return
        namespace = PublicationNamespace.parse(patient.namespace)
        try:
            async with self._source as source:
                stored = await source.manifest(namespace, self._settings.manifest_limits.octets)
            if stored.version > follower.newest:
                await read_stored(follower, stored)
        except KvcsError as exc:
            _log.info("no_manifest_elsewhere", why=str(exc))

    async def fetch(self, missing: Sequence[MissingBlocks]) -> str | None:
        """Get blocks from the source; what came of it, if some are still missing."""
        if self._source is None or not missing:
            return None
        ours, left = PublicationNamespace.parse(self._patient.namespace), self._by_layer(missing)
        try:
            async with self._source as source:
                failure = await self._fetch_all(source, ours, left)
                for twin in await self._twins(source, ours) if left else ():
                    if left:
                        # What comes meanwhile from elsewhere is dropped as a copy.
                        failure = await self._fetch_all(source, twin, left)
                replacements = self._patient.replacements
                if failure is not None and replacements is not None:
                    segments = sorted({run.segment for run in missing})
                    failure = await replacements.at(source, segments) or failure
        except KvcsError as exc:
            return str(exc)
        return failure

    async def _twins(
        self, source: BlockSource, ours: PublicationNamespace
    ) -> list[PublicationNamespace]:
        patient = self._patient
        if patient.finder is None or not patient.may_have_twins:
            return []
        return twins(patient.manifest, await patient.finder.at(source, ours))

    async def _fetch_all(
        self, source: BlockSource, namespace: PublicationNamespace, left: _Left
    ) -> str | None:
        """Get blocks of one publication, and take those that came from what is left; what came of
        it, if some still are."""
        limit = asyncio.Semaphore(CONCURRENCY)
        ends = await asyncio.gather(
            *(self._fetch(source, namespace, *where, left, limit) for where in list(left))
        )
        contradiction = next((each for each in ends if isinstance(each, PublicationError)), None)
        if contradiction is not None:
            self._patient.failed(contradiction)
        return next((str(each) for each in ends if each is not None), None)

    def _by_layer(self, missing: Sequence[MissingBlocks]) -> _Left:
        """Some missing blocks by layer and track."""
        tracks = {
            (each.segment, each.component.value): each for each in self._patient.ledger.tracks
        }
        found: _Left = {}
        for run in missing:
            track = tracks.get((run.segment, run.component))
            if track is not None:  # else it is of a segment that was not added yet
                blocks = found.setdefault((run.layer, track), [])
                blocks += range(run.first_block, run.last_block + 1)
        return found

    async def _fetch(
        self,
        source: BlockSource,
        namespace: PublicationNamespace,
        layer: int,
        track: DataTrack,
        left: _Left,
        limit: asyncio.Semaphore,
    ) -> KvcsError | None:
        """Blocks of one layer of one track; why they are not all there."""
        patient, blocks = self._patient, left[layer, track]
        first = patient.entry(track).first_block
        keys = patient.prefix.block_keys[first + blocks[0] : first + blocks[-1] + 1]
        named = [keys[block - blocks[0]] for block in blocks]
        longest = sealed_octets(HEADER_OCTETS + self._settings.max_data_octets)
        failure: KvcsError | None = SourceFailed(f"blocks of {track} layer {layer} are not there")
        still = dict.fromkeys(blocks)
        try:
            async with limit:
                async for stored in source.payloads(
                    namespace, track, layer, blocks, named, longest
                ):
                    if stored.block in still and self._take(track, layer, stored):
                        del still[stored.block]
        except KvcsError as exc:  # whichever of ours a source raises: other layers may be there
            failure = exc
        if still:
            left[layer, track] = list(still)
            return failure
        del left[layer, track]
        return None

    def _take(self, track: DataTrack, layer: int, stored: StoredBlock) -> bool:
        """Check one block as an Object of a session is; whether it is there now.

        Raises:
            PublicationError: it contradicts what was verified before.
        """
        ledger = self._patient.ledger
        location, size = Location(layer, stored.block), len(stored.payload)
        try:
            slot: Any
            if ledger.unsealer is None:
                slot = ledger.begin(track, location, size)
            else:
                header = ObjectHeader(*location, 0, 0, ObjectStatus.NORMAL, stored.properties, size)
                slot = ledger.unsealer.begin(
                    track,
                    location,
                    size,
                    priority=layer_priority(layer, ledger.descriptor.layers),
                    immutable=immutable_properties(header),
                )
            if slot is None:
                return False
            slot.write(memoryview(stored.payload))
            if slot.finish() is not Outcome.DUPLICATE:
                self.fetched += 1
        except ObjectError as exc:
            _log.warning("object_rejected", track=str(track), check=exc.check, why=str(exc))
            return False
        self._patient.verified()
        return True

    async def recompute(self, missing: Sequence[MissingBlocks]) -> None:
        """Let the caller recompute blocks, a run of one layer at a time, earlier layers first.

        Raises:
            UsageError: what came back has another shape or dtype; the message names it.
            KvcsError: the callback failed.
        """
        assert self._recompute is not None  # who asks has seen that there is one
        for wanted in runs_of(missing, self._patient.ledger.descriptor.block_tokens):
            try:
                k, v = await self._recompute(wanted)
            except KvcsError:
                raise
            except Exception as exc:
                # Whatever the caller's engine raises, the cache has no more than before.
                raise KvcsError(f"recompute raised {type(exc).__name__}: {exc}") from exc
            self._supply(wanted, k, v)
            self.used_recompute = True
            self._patient.verified()

    def _supply(self, wanted: MissingLayer, k: object, v: object) -> None:
        ledger = self._patient.ledger
        descriptor = ledger.descriptor
        what = f"of layer {wanted.layer}, tokens {wanted.first_token}-{wanted.last_token}"
        shape, dtype = (wanted.tokens, descriptor.kv_heads), descriptor.numpy_dtype
        keys = as_host_array(k, dtype, (*shape, descriptor.head_dim), f"recompute: k {what}")
        if descriptor.latent:
            if v is not None:
                raise UsageError(f"recompute: v {what} must be None: attention is latent")
            values = np.empty((*shape, 0), dtype)
        else:
            values = as_host_array(
                v, dtype, (*shape, descriptor.v_head_dim), f"recompute: v {what}"
            )
        size = descriptor.block_tokens
        for number, block in enumerate(range(wanted.first_block, wanted.last_block + 1)):
            part = slice(number * size, (number + 1) * size)
            sections = {
                Component.K: byte_view(np.ascontiguousarray(keys[part])),
                Component.V: byte_view(np.ascontiguousarray(values[part])),
            }
            ledger.supply(wanted.layer, block, sections)


def runs_of(missing: Sequence[MissingBlocks], block_tokens: int) -> list[MissingLayer]:
    """What lacks of any component, in runs of blocks of one layer."""
    blocks: dict[int, set[int]] = {}
    for run in missing:
        here = blocks.setdefault(run.layer, set())
        here.update(range(run.first_token // block_tokens, (run.last_token + 1) // block_tokens))
    found = []
    for layer in sorted(blocks):
        ordered = sorted(blocks[layer])
        first = ordered[0]
        for block, following in zip(ordered, [*ordered[1:], None], strict=True):
            if following != block + 1:
                tokens = (first * block_tokens, (block + 1) * block_tokens - 1)
                found.append(MissingLayer(layer, first, block, *tokens))
                first = block if following is None else following
    return found

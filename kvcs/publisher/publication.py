"""`Publication`: one production of a prefix's KV cache, and its manifest track."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcs.errors import UsageError
from kvcs.fallback.folder import save_tracks
from kvcs.kv import RAW, ManifestCadence, ManifestWriter, Prefix, check_signing_key, holder_uri
from kvcs.kv.protection import ProtectionKey, Sealer
from kvcs.kv.tracks import PUBLICATION_ID_OCTETS, DataTrack, PublicationNamespace
from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.names import FullTrackName, TrackNamespace, namespace_text
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.track.store import Track
from kvcs.observe import get_logger, metrics
from kvcs.publisher.announcing import announce
from kvcs.publisher.encodings import check_encodings
from kvcs.publisher.followers import Followers
from kvcs.publisher.manifest_track import ManifestTrack
from kvcs.publisher.memory import LayerMemory
from kvcs.publisher.passes import Passes, extended
from kvcs.publisher.segment import Segment
from kvcs.quic.origin import Origin
from kvcs.trust import SigningKey

_log = get_logger("kvcs.publisher")

MAX_REASON = 200
"""Characters of the reason of an abort that go on the wire."""

MAX_LIFETIME = 1e8
"""Seconds, some three years; a longer life is not counted."""


@dataclass(frozen=True, slots=True)
class PublicationProgress:
    """What was published so far."""

    layers: int
    """Layers put, over all segments."""

    objects: int
    """Objects with a payload on data tracks."""

    octets: int
    """Payload octets on data tracks."""

    manifests: int
    """Manifest versions."""


class Publication:
    """One production of the KV cache of a prefix, named by a random Publication ID.

    `Publisher.publish` makes it. The manifest stands before the first Object: it names segment 0
    from the start, and grows as layers complete (KVCS "Manifest Track").
    """

    def __init__(
        self,
        prefix: Prefix,
        origins: Sequence[Origin],
        memory: LayerMemory,
        *,
        retention: float,
        lifetime: float,
        cadence: ManifestCadence,
        max_manifest_octets: int,
        max_data_octets: int,
        first_segment_blocks: int,
        deterministic: bool,
        random_octets: Callable[[int], bytes],
        check_sessions: Callable[[], None],
        sign: SigningKey | None = None,
        protect: ProtectionKey | None = None,
        pad_blocks: int = 0,
        encodings: Sequence[str] = (RAW.name,),
    ) -> None:
        self.prefix = prefix
        self.encodings = check_encodings(encodings)
        """How each segment is encoded; every encoding is complete on its own."""
        # Never what a source repeats where it is sealed: keys and nonces would be the same.
        source = random_octets if protect is None else secrets.token_bytes
        self.publication_id = source(PUBLICATION_ID_OCTETS)
        """Chosen at random for each production (KVCS "Track Namespace")."""
        self.namespace: TrackNamespace = prefix.namespace(self.publication_id, first_segment_blocks)
        """The five Track Namespace Fields."""
        self.aborted: str | None = None
        """Why it was aborted, if it was."""
        self.on_retired: Callable[[], None] | None = None
        """Told once it has ended by itself: its time was over, or its room was needed."""
        self._lifetime = lifetime
        self._expiry: asyncio.TimerHandle | None = None
        self._origins = origins
        self._memory = memory
        self._max_data_octets = max_data_octets
        self._check_sessions = check_sessions
        self._properties = KeyValues.of(
            [(Property.MAX_CACHE_DURATION, max(1, round(retention * 1000)))]
        )
        self._loop = asyncio.get_running_loop()
        self._writer = ManifestWriter(
            prefix.compat,
            layers=prefix.descriptor.layers,
            block_tokens=prefix.descriptor.block_tokens,
            deterministic=deterministic,
            max_octets=max_manifest_octets,
        )
        named = PublicationNamespace.parse(self.namespace)
        if sign is not None:
            check_signing_key(sign, named, time.time())
        self._protect = protect
        self._pad_blocks = pad_blocks
        self._manifest = ManifestTrack(
            self.new_track,
            named,
            self._writer,
            cadence,
            sign,
            self._sealer if self.is_protected else None,
        )
        self._tracks: list[Track] = [self._manifest.track]
        self._charged = 0
        self._closed = False
        self._segments: list[Segment] = []
        self._first_taken = False
        self._unfollowed = asyncio.Event()
        self._manifest.track.on_unfollowed = self._unfollowed.set
        self._followers = Followers(self._manifest.track, len(prefix.descriptor.components))
        self._add_segment(first_segment_blocks)

    # What a producer calls

    async def segment(self, blocks: int | None = None, *, prefix: Prefix | None = None) -> Segment:
        """The next segment, to put layers into.

        The first call gives segment 0, whose blocks name the publication; each later call adds a
        run of whole blocks behind the former ones. Each pass of a chunked prefill is a segment of
        its own, so that Group IDs grow with time in every track (KVCS "Groups").

        Args:
            blocks: whole blocks; by default all that segment 0 has, or that are left.
            prefix: the same tokens and more, where they are known only now: decoded ones, or the
                next turn of a conversation. It takes the place of the publication's prefix.

        Raises:
            UsageError: the prefix has not so many blocks left, or begins with others, the manifest
                has no room for so many, or the publication has ended.
            ConnectionClosed: every session has ended.
        """
        self.check_open()
        longer = self.prefix if prefix is None else extended(self.prefix, prefix)
        if not self._first_taken:
            first = self._segments[0]
            if blocks is not None and blocks != first.blocks:
                raise UsageError(
                    f"segment 0 has {first.blocks} blocks, not {blocks}: its last block names the"
                    " publication; say first_segment_blocks to publish()"
                )
            self._first_taken = True
            self.prefix = longer
            return first
        left = longer.blocks - self._writer.blocks
        wanted = left if blocks is None else blocks
        if not 1 <= wanted <= left:
            raise UsageError(
                f"a segment of {wanted} blocks does not fit: {left} of the prefix's"
                f" {longer.blocks} blocks are left"
            )
        self.prefix = longer
        return self._add_segment(wanted)

    def passes(self) -> Passes:
        """Take the layers of a chunked prefill, whatever the lengths of its chunks.

        Each pass is a segment of the whole blocks that it completes. Use it in place of `segment`,
        from the beginning.

        Raises:
            UsageError: a segment was taken already, or the publication has ended.
        """
        self.check_open()
        if self._first_taken:
            raise UsageError("a segment was taken already; passes begin with segment 0")
        return Passes(self, self._segments[0].blocks)

    async def finish(self) -> None:
        """Check that every segment is complete; the publication is served until it is closed.

        Raises:
            UsageError: a segment lacks layers; the message says which.
        """
        for segment in self._segments:
            segment.finish()

    async def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the publication, whole, below a folder that `kvcs serve-http` serves.

        It is not seen there before it is whole. What is written are the very payloads that
        subscribers get: sealed where the publication is.

        Args:
            folder: the folder of all publications; it is made if need be.

        Returns:
            The publication's own folder.

        Raises:
            UsageError: layers lack, or it was closed already.
            FileError: it cannot be written, or is there already.

        It writes in a thread; cancelling waits for nothing and leaves nothing that is seen half
        made.
        """
        await self.finish()
        await self._manifest.settled()
        data = {
            name: track
            for segment in self._segments
            for name, track in zip(segment.track_names, segment.tracks, strict=True)
        }
        where = await asyncio.to_thread(
            save_tracks,
            folder,
            self.namespace,
            self._manifest.track,
            data,
            segments=[segment.blocks for segment in self._segments],
            block_keys=self.prefix.block_keys[: self._writer.blocks],
            layers=self.prefix.descriptor.layers,
        )
        _log.info("publication_saved", publication=self.publication_id.hex())
        return where

    def abort(self, reason: str) -> None:
        """Give the publication up: subscribers are told, nothing of it is completed any more.

        PUBLISH_DONE carries INTERNAL_ERROR and the reason, open streams are reset and the
        namespace is withdrawn. Quiet once the publication has ended.

        Args:
            reason: goes to every subscriber and to relays in the clear.
        """
        if self._closed:
            return
        self.aborted = reason
        metrics.publications.add(state="aborted")
        self._end(PublishDoneCode.INTERNAL_ERROR, reason[:MAX_REASON], abandoned=True)
        _log.info("publication_aborted", publication=self.publication_id.hex(), reason=reason)

    # Facts

    @property
    def complete(self) -> bool:
        """Whether every block of the prefix is in a segment, and every segment has every layer."""
        whole = self._writer.blocks == self.prefix.blocks
        return whole and all(segment.complete for segment in self._segments)

    @property
    def progress(self) -> PublicationProgress:
        """What was published so far."""
        return PublicationProgress(
            sum(segment.layers_put for segment in self._segments),
            sum(segment.objects for segment in self._segments),
            sum(segment.octets for segment in self._segments),
            self._manifest.versions,
        )

    def uri(self, url: str) -> str:
        """Holder URI of this publication at ``url``: what an index would store.

        Raises:
            UsageError: ``url`` is not a ``moqt://`` URL without fragment.
        """
        return holder_uri(url, PublicationNamespace.parse(self.namespace))

    # What the Publisher calls

    async def announce(self, waits: Sequence[bool], seconds: float) -> None:
        """Offer the tracks on every session, then PUBLISH_NAMESPACE the five fields.

        Args:
            waits: for each origin, whether its peers' answer is waited for.
            seconds: longest such wait.

        Raises:
            RequestError: all of them refused or were silent, and the others are no sessions any
                more.
            ConnectionClosed: there is no session any more.
        """
        for origin in self._origins:
            for track in self._tracks:
                origin.add_track(track)
        await announce(self._origins, self.namespace, waits, seconds)
        metrics.publications.add(state="announced")
        _log.info(
            "publication_announced",
            publication=self.publication_id.hex(),
            namespace=namespace_text(self.namespace),
            blocks=self.prefix.blocks,
        )

    async def close(self, drain: float) -> None:
        """End a complete publication: no new segments, PUBLISH_DONE, withdrawal.

        Args:
            drain: seconds to wait for subscribers to get what they have asked for.

        Raises:
            UsageError: a segment lacks layers; then it is aborted.
        """
        if self._closed:
            return
        try:
            await self.finish()
        except UsageError:
            self.abort("the producer left before every layer was published")
            raise
        await self._manifest.settled()
        await self._followers.requests_under_way(drain)
        metrics.publications.add(state="closed")
        self._end(PublishDoneCode.TRACK_ENDED, "")
        try:
            async with asyncio.timeout(drain):
                while any(track.followed for track in self._tracks):
                    self._unfollowed.clear()
                    await self._unfollowed.wait()
        except TimeoutError:
            _log.warning("drain_ended", publication=self.publication_id.hex(), seconds=drain)

    def retire(self, reason: str = "retired to make room") -> None:
        """End and free a complete publication: to make room for another, or after its time.

        Args:
            reason: goes to subscribers.
        """
        _log.info("publication_retired", publication=self.publication_id.hex(), reason=reason)
        metrics.publications.add(state="retired")
        self._end(PublishDoneCode.EXPIRED, reason)
        self.release()
        if self.on_retired is not None:
            self.on_retired()

    def release(self) -> None:
        """Serve it no longer and give its memory back."""
        for track in self._tracks:
            for origin in self._origins:
                origin.remove_track(track.name)
            track.clear()
        self._memory.budget.release(self._charged)
        self._charged = 0

    @property
    def held_octets(self) -> int:
        """Octets of the budget that are given back when it is released."""
        return self._charged

    # What its segments call

    def check_open(self) -> None:
        """Check that Objects can be published and that somebody may get them.

        Raises:
            UsageError: it has ended.
            ConnectionClosed: every session has ended.
        """
        if self._closed:
            why = "" if self.aborted is None else f": {self.aborted}"
            raise UsageError(f"the publication has ended{why}")
        self._check_sessions()

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return not self._closed

    @property
    def now(self) -> float:
        """The loop's clock, seconds."""
        return self._loop.time()

    @property
    def writer(self) -> ManifestWriter:
        """The manifest as it grows."""
        return self._writer

    @property
    def is_protected(self) -> bool:
        """Whether its Objects are sealed."""
        return self._protect is not None

    def padding(self, blocks: int) -> int:
        """Blocks of zeros behind so many real ones."""
        return -blocks % self._pad_blocks if self._pad_blocks else 0

    def data_sealer(self, track: DataTrack) -> Sealer:
        """What seals the Objects of a data track, for the whole publication."""
        return self._sealer(track.name)

    @property
    def memory(self) -> LayerMemory:
        """Where copies of tensors lie."""
        return self._memory

    @property
    def max_data_octets(self) -> int:
        """Largest Data of one Object."""
        return self._max_data_octets

    def charge(self, octets: int) -> None:
        """Note octets of the budget that are given back when the publication is released.

        Raises:
            UsageError: the publication has ended meanwhile.
            ConnectionClosed: every session has.
        """
        self.check_open()
        self._charged += octets

    def new_track(self, name: bytes) -> Track:
        """A Track of this publication, with its Track Properties."""
        return Track(
            FullTrackName(self.namespace, name), authoritative=True, properties=self._properties
        )

    def layer_completed(self, segment: Segment, done: Callable[[], None]) -> None:
        """Publish a manifest version if one is due.

        Args:
            segment: whose layer it is.
            done: called once that is published, where the segment is complete.
        """
        listed, completed = segment.layers_in_manifest, segment.layers_put
        if segment.complete:
            self._publish_manifest(done)
            self._live_on()
        elif self._manifest.due(completed=completed, listed=listed, now=self.now):
            self._publish_manifest()

    # Inner workings

    def _sealer(self, name: bytes) -> Sealer:
        assert self._protect is not None  # who asks has seen that it is protected
        return Sealer(self._protect, FullTrackName(self.namespace, name))

    def _live_on(self) -> None:
        """Count its time from now on if it is complete, else not."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self.complete and not self._closed and self._lifetime <= MAX_LIFETIME:
            self._expiry = self._loop.call_later(
                self._lifetime, self.retire, "its retention has passed"
            )

    def _add_segment(self, blocks: int) -> Segment:
        segment = Segment(self, len(self._segments), self._writer.blocks, blocks)
        self._writer.add_segment(
            blocks,
            self.prefix.block_keys_digest(segment.first_block, blocks),
            segment.track_names,
            whole=True,
            padding_blocks=segment.padding_blocks if self._pad_blocks else None,
        )
        self._segments.append(segment)
        for track in segment.tracks:
            track.on_unfollowed = self._unfollowed.set
            if segment.number == 0:
                self._followers.watch(track)
            self._tracks.append(track)
            if len(self._segments) > 1:
                for origin in self._origins:
                    origin.add_track(track)
        self._publish_manifest()
        self._live_on()
        return segment

    def _publish_manifest(self, done: Callable[[], None] = lambda: None) -> None:
        """One more version, which lists every layer that is complete."""
        self._manifest.publish(self.now, done)
        for segment in self._segments:
            segment.layers_in_manifest = segment.layers_put

    def _end(self, status: int, reason: str, *, abandoned: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        self._live_on()
        self._manifest.stop()
        for track in self._tracks:
            track.end(status, reason, abandoned=abandoned)
        for origin in self._origins:
            origin.remove_namespace(self.namespace)

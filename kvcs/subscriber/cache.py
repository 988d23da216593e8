"""`Cache`: one opened publication; hands out verified layers as they become whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvcs.errors import (
    CacheIncomplete,
    ConnectionClosed,
    KvcsError,
    MissingBlocks,
    PublicationAborted,
    PublicationError,
    RequestError,
    UsageError,
)
from kvcs.kv import DataTrack, LayerTensors, Ledger, Manifest, Prefix, SegmentEntry, lookup
from kvcs.kv.tracks import PublicationNamespace
from kvcs.moqt.names import Location, TrackNamespace
from kvcs.observe import get_logger
from kvcs.quic.connection import Connection
from kvcs.recovery import EVERYTHING, Recovery, Span
from kvcs.subscriber.layers import Layers
from kvcs.subscriber.manifests import ManifestFollower
from kvcs.subscriber.passage import Passage
from kvcs.subscriber.receiver import TrackReceiver
from kvcs.subscriber.reception import Reception
from kvcs.subscriber.reception import Retrieve as Retrieve
from kvcs.subscriber.report import CacheProgress, CacheReport
from kvcs.subscriber.requests import choose_tracks
from kvcs.subscriber.routes import Routes
from kvcs.subscriber.settings import SubscriberSettings
from kvcs.subscriber.silence import Silence

_log = get_logger("kvcs.subscriber")


class Cache:
    """An opened publication of a prefix; `Subscriber.open` gives it.

        async for layer in cache:            # verified, in order, as each becomes whole
            attend(layer.index, layer.k, layer.v)

    Iterating ends once every selected layer was handed out and the newest manifest has confirmed
    all of them; it raises what `layer` and `complete` raise.

    Attributes:
        prefix: the consumer's prefix.
        namespace: Track Namespace of the publication.
    """

    def __init__(
        self,
        follower: ManifestFollower,
        routes: Routes,
        prefix: Prefix,
        ledger: Ledger,
        settings: SubscriberSettings,
        *,
        retrieve: Retrieve,
        opened_at: float,
        deadline_at: float,
    ) -> None:
        self.prefix = prefix
        self.namespace: TrackNamespace = follower.namespace
        self._settings = settings
        self._selective = (
            ledger.blocks < prefix.blocks or len(ledger.layers) < prefix.descriptor.layers
        )
        self._ledger = ledger
        self._loop = asyncio.get_running_loop()
        self._opened_at = opened_at
        self._manifest_at = self._loop.time()
        self._first_at: float | None = None
        self._last_at: float | None = None
        self._error: KvcsError | None = None
        self._error_is_final = False
        self._closed = False
        self._waiters: dict[int, list[asyncio.Future[LayerTensors]]] = {}
        self._completion: asyncio.Future[None] = self._loop.create_future()
        self._recovery = Recovery(self, settings)
        self._passage = Passage(
            self, routes, follower, settings, retrieve=retrieve, selective=self._selective
        )
        self._end, self._quiet = self._listeners()
        self._deadline = self._loop.call_at(deadline_at, self._deadline_passed)
        self._deadline_seconds = deadline_at - opened_at

    # What a consumer calls

    async def layer(self, index: int) -> LayerTensors:
        """Wait for one layer.

        Returns:
            Its tensors, [tokens, kv_heads, head_dim] of the descriptor's dtype, read-only.

        Raises:
            UsageError: the layer was not selected.
            CacheIncomplete: it did not become whole before the deadline, recovery failed, the
                session ended or the peer allows it no longer (`__cause__` says why), or the cache
                was closed.
            PublicationAborted: the producer gave the publication up.
            PublicationError: the publication contradicts itself.

        A layer that is whole is returned whatever happened to others, unless the publication
        contradicted itself.
        """
        if index not in self._ledger.layers:
            first, last = self._ledger.layers[0], self._ledger.layers[-1]
            raise UsageError(f"layer {index} was not selected; layers {first}..{last} are")
        if self._error is not None and self._error_is_final:
            raise self._error
        if self._ledger.is_ready(index):
            return self._ledger.layer(index)
        if self._error is not None:
            raise self._error
        future: asyncio.Future[LayerTensors] = self._loop.create_future()
        waiters = self._waiters.setdefault(index, [])
        waiters.append(future)
        try:
            return await future
        finally:
            if future in waiters:
                waiters.remove(future)

    def __aiter__(self) -> AsyncIterator[LayerTensors]:
        """Every selected layer, in order, each as soon as it is whole; then `complete`."""
        return Layers(self.layers, self)

    async def complete(self) -> None:
        """Wait until every selected layer is whole and the manifest says that its segments are.

        Raises:
            KvcsError: as `layer`.
        """
        self._check_completion()
        await asyncio.shield(self._completion)

    # Facts

    @property
    def manifest(self) -> Manifest:
        """Newest manifest that was applied."""
        manifest = self._ledger.manifest
        assert manifest is not None  # `start` has applied the first one
        return manifest

    @property
    def layers(self) -> tuple[int, ...]:
        """Selected layers, ascending."""
        return tuple(self._ledger.layers)

    @property
    def blocks(self) -> int:
        """Selected blocks, from the start of the context."""
        return self._ledger.blocks

    @property
    def usable_tokens(self) -> int:
        """Tokens from the start that are verified in every selected layer."""
        return self._ledger.usable_tokens()

    @property
    def missing(self) -> tuple[MissingBlocks, ...]:
        """What lacks now, in runs of blocks, by segment, layer and component."""
        return self._ledger.missing()

    @property
    def progress(self) -> CacheProgress:
        """How far the retrieval is."""
        ledger = self._ledger
        per_layer = sum(
            self._reception.blocks_wanted(self.manifest.segments[track.segment])
            for track in ledger.tracks
        )
        return CacheProgress(
            sum(1 for index in ledger.layers if ledger.is_ready(index)),
            len(ledger.layers),
            ledger.counters.verified,
            per_layer * len(ledger.layers),
            ledger.counters.octets,
        )

    @property
    def report(self) -> CacheReport:
        """What the retrieval was, so far."""
        ledger, counters = self._ledger, self._ledger.counters
        tracks, follower = ledger.tracks, self._passage.leg.follower

        def since(when: float | None) -> float | None:
            return None if when is None else when - self._opened_at

        return CacheReport(
            publication=PublicationNamespace.parse(self.namespace),
            tracks=tuple(str(track) for track in tracks),
            lossless=all(lookup(track.codec).lossless for track in tracks),
            tokens=ledger.usable_tokens(),
            layers=sum(1 for index in ledger.layers if ledger.is_ready(index)),
            objects=counters.verified,
            octets=counters.octets,
            tensor_octets=counters.verified_octets,
            duplicates=counters.duplicates,
            rejected=dict(counters.rejected),
            signed_by=None if follower.signed is None else follower.signed.kid,
            manifest_versions=follower.versions,
            refetches=self._recovery.fetches,
            moves=self._passage.moves,
            open_seconds=self._manifest_at - self._opened_at,
            first_layer_seconds=since(self._first_at),
            last_layer_seconds=since(self._last_at),
        )

    # What the Subscriber calls

    def start(self) -> None:
        """Ask for the data tracks of every segment that the manifest names.

        Raises:
            PublicationError: the manifest covers nothing of the prefix, or has no track that can
                be read here.
        """
        follower = self._passage.leg.follower
        manifest = follower.manifest
        assert manifest is not None
        follower.on_manifest = self._apply
        if not manifest.covering(self.prefix):
            raise PublicationError("the publication has no segment of this prefix")
        self._apply(manifest)
        self._passage.start()

    def close(self) -> None:
        """Cancel every request; waiters get what went wrong, or that the cache was closed."""
        if self._closed:
            return
        self._closed = True
        self._recovery.stop()
        self._passage.close()
        self._end.stop()
        self._quiet.stop()
        self._deadline.cancel()
        if self._error is None:
            self._error = self._incomplete("the cache was closed")
        self._release_waiters(self._error)
        self._log_end()

    # Traveller: what its legs tell

    def verified(self) -> None:
        """An Object was verified; hand out layers that are whole now."""
        ready = self._ledger.take_ready()
        for index in ready:
            now = self._loop.time()
            if self._first_at is None:
                self._first_at = now
            self._last_at = now
            tensors = self._ledger.layer(index)
            for future in self._waiters.pop(index, ()):
                if not future.done():
                    future.set_result(tensors)
        if ready:  # it costs as much as there are layers: not for every Object
            self._check_completion()

    def lost(self, track: DataTrack, span: Span, reason: str) -> None:
        """Objects are owed again: fetch them."""
        if not self._closed and self._error is None and not self._passage.moving:
            self._recovery.lost(track, span, reason)

    def dropped(self, track: DataTrack, reason: str) -> None:
        """The peer serves a subscription no longer: make another, if more is to be published."""
        if not self._closed and self._error is None:
            self._reception.dropped(track, self.entry(track), self.first_missing(track), reason)

    def track_changed(self, track: DataTrack) -> None:
        """Less comes of itself on a track than before: look what lacks."""
        self._end.listen()

    def failed(self, error: KvcsError) -> None:
        """The retrieval cannot go on: every waiter is told, now."""
        if self._error is not None or self._closed or self._is_complete():
            return
        if isinstance(error, ConnectionClosed | RequestError):
            incomplete = self._incomplete(str(error))
            incomplete.__cause__ = error
            error = incomplete
        self._error = error
        # After a contradiction nothing of the publication may be used any more.
        self._error_is_final = isinstance(error, PublicationError) and not isinstance(
            error, PublicationAborted
        )
        self._recovery.stop()
        self._passage.settled()
        self._release_waiters(error)

    def manifest_ended(self) -> None:
        """No newer manifest comes."""
        self._end.listen()

    def between(self) -> None:
        """The next session will be asked for all that lacks."""
        self._recovery.forget()

    def moved(self) -> None:
        """Another session serves the cache now, and was asked for all that lacks."""
        self._recovery.forget()
        self._end.stop()
        self._quiet.stop()
        self._end, self._quiet = self._listeners()
        self._end.listen()
        self._quiet.listen()

    @property
    def is_over(self) -> bool:
        """Whether nothing more is wanted: all is there, it failed, or it was closed."""
        return self._closed or self._error is not None or self._is_complete()

    @property
    def manifest_is_final(self) -> bool:
        """Whether the newest manifest covers all that is wanted, and is complete."""
        return self.manifest.complete and self._ledger.covered == self._ledger.blocks

    def entry(self, track: DataTrack) -> SegmentEntry:
        """The segment of a track, as the newest manifest has it."""
        return self.manifest.segments[track.segment]

    def first_missing(self, track: DataTrack) -> Location | None:
        """The first Location of a track that is not there; None where all of it is."""
        return self._recovery.first_missing(track)

    # What Recovery calls

    @property
    def connection(self) -> Connection:
        """The session that serves the cache, or did last."""
        return self._passage.leg.connection

    @property
    def ledger(self) -> Ledger:
        """What is owed and what is verified."""
        return self._ledger

    @property
    def sources(self) -> list[Connection]:
        """Sessions that may have what lacks; the one that serves the cache is the first."""
        return self._passage.sources

    def receiver(self, track: DataTrack, connection: Connection) -> TrackReceiver:
        """Receiver of a data track for a FETCH over one of the sources."""
        return self._passage.receiver(track, connection)

    def comes_of_itself(self, track: DataTrack) -> bool:
        """Whether Objects of a track that were not published yet will come unasked."""
        return self._reception.comes_of_itself(track, self.manifest)

    def recovered(self) -> None:
        """What was lost is there: look whether that was all."""
        self._end.listen()

    def recovery_failed(self, reason: str) -> None:
        """Recovery used its time up."""
        self.failed(self._incomplete(reason))

    # Inner workings

    @property
    def _reception(self) -> Reception:
        return self._passage.leg.reception

    def _listeners(self) -> tuple[Silence, Silence]:
        """What notices that nothing more comes, and that what is listed does not."""
        settings, reception = self._settings, self._reception
        return (
            Silence(reception, settings.stall, self._nothing_more, self._at_end),
            Silence(reception, settings.quiet, self._lacks_listed, self._at_quiet),
        )

    def _apply(self, manifest: Manifest) -> None:
        try:
            self._ledger.apply_manifest(manifest)
            for entry in manifest.covering(self.prefix)[len(self._segments()) :]:
                if self._ledger.covered >= self._ledger.blocks:
                    break
                tracks = choose_tracks(entry)
                self._ledger.add_segment(tracks, entry.blocks)
                self._passage.begin(tracks, entry)
        except PublicationError as exc:
            self.failed(exc)
            raise
        self.verified()
        self._check_completion()
        self._end.listen()
        self._quiet.listen()

    def _segments(self) -> set[int]:
        return {track.segment for track in self._ledger.tracks}

    def _is_complete(self) -> bool:
        return self._ledger.complete or (
            # A selection of a segment that is still produced can be whole before its manifest is.
            self._selective and self._ledger.whole and self._all_listed()
        )

    def _all_listed(self) -> bool:
        last = self._ledger.layers[-1]
        segments = self._segments()
        return all(
            entry.layers_listed() > last
            for entry in self.manifest.segments
            if entry.segment in segments
        )

    def _check_completion(self) -> None:
        if self._completion.done():
            return
        if self._error is not None:
            self._completion.set_exception(self._error)
            self._completion.exception()  # retrieved: nobody has to wait for it
        elif self._is_complete():
            self._completion.set_result(None)
            self._recovery.stop()
            self._passage.settled()
            self._deadline.cancel()

    def _nothing_more(self) -> bool:
        """Whether something lacks, and nothing more comes of itself: no Object, no segment."""
        if self.is_over or self._passage.moving:
            return False
        if self._ledger.covered < self._ledger.blocks and not self._passage.leg.follower.ended:
            return False
        return not self._reception.anything_comes(self.manifest)

    def _at_end(self) -> None:
        """Everything has ended, and a short silence has passed: what lacks is lost."""
        for track in self._ledger.tracks:
            self.lost(track, EVERYTHING, "the track ended before every object came")
        covered, blocks = self._ledger.covered, self._ledger.blocks
        if covered < blocks:
            self._recovery.bound(f"the publication ended with {covered} of {blocks} blocks")
        elif self._ledger.whole:
            self._recovery.bound("no manifest called the segments complete")

    def _lacks_listed(self) -> bool:
        """Whether Objects lack that the newest manifest lists: they have been published."""
        return not (self.is_over or self._passage.moving) and any(
            self._recovery.lacks(track, span)
            for track, span in self._reception.listed(self.manifest)
        )

    def _at_quiet(self) -> None:
        """What was published does not come, and no stream has said why: one that is reset before
        its first octet arrives cannot be told from one that was never opened."""
        for track, span in self._reception.listed(self.manifest):
            self._recovery.doubted(track, span, "listed objects did not come")
        self._quiet.listen()

    def _incomplete(self, reason: str) -> CacheIncomplete:
        return CacheIncomplete(reason, self.missing, self.usable_tokens)

    def _deadline_passed(self) -> None:
        self.failed(self._incomplete(f"the deadline of {self._deadline_seconds:g} s passed"))

    def _release_waiters(self, error: KvcsError) -> None:
        waiters, self._waiters = self._waiters, {}
        for futures in waiters.values():
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        if not self._completion.done():
            self._completion.set_exception(error)
            self._completion.exception()

    def _log_end(self) -> None:
        report = self.report
        _log.info(
            "retrieval_ended",
            publication=report.publication.publication_id.hex(),
            outcome="complete" if self._is_complete() else "incomplete",
            error=None if self._error is None else str(self._error),
            tokens=report.tokens,
            layers=report.layers,
            objects=report.objects,
            octets=report.octets,
            duplicates=report.duplicates,
            rejected=report.rejected,
            refetches=report.refetches,
            first_layer_seconds=report.first_layer_seconds,
            last_layer_seconds=report.last_layer_seconds,
        )

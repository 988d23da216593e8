"""`Retrieval`: receives one publication for those who read it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvcs.errors import (
    CacheIncomplete,
    ConnectionClosed,
    KvcsError,
    PublicationAborted,
    PublicationError,
    RequestError,
    UsageError,
)
from kvcs.kv import DataTrack, LayerTensors, Ledger, Manifest, Prefix, SegmentEntry
from kvcs.moqt.intervals import EVERYTHING, Span
from kvcs.moqt.names import Location, TrackNamespace
from kvcs.quic.connection import Connection
from kvcs.recovery import Recovery
from kvcs.subscriber.alone import Alone
from kvcs.subscriber.facts import log_end
from kvcs.subscriber.last_means import LastMeans
from kvcs.subscriber.manifests import ManifestFollower
from kvcs.subscriber.others import Others, twins
from kvcs.subscriber.passage import Passage
from kvcs.subscriber.readers import Readers
from kvcs.subscriber.receiver import TrackReceiver
from kvcs.subscriber.reception import Reception, Retrieve
from kvcs.subscriber.requests import DEFAULT_CHOICE, Choice, choose_tracks
from kvcs.subscriber.rivals import Rivals
from kvcs.subscriber.routes import Routes
from kvcs.subscriber.segments import Replacements
from kvcs.subscriber.settings import SubscriberSettings
from kvcs.subscriber.silence import Silence


class Retrieval:
    """Receives one publication of a prefix, for one reader or several in this process.

    Attributes:
        prefix: the consumer's prefix.
        namespace: Track Namespace of the publication.
        finder: finds other publications of the prefix; None leaves that out.
        replacements: takes whole segments from them.
        rivals: looks at them while too little comes of this one.
        readers: who waits for what, and needs it still.
        deadline_at: when it fails, in the loop's clock.
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
        exact: bool = True,
        last_means: LastMeans | None = None,
        others: Others | None = None,
        choice: Choice = DEFAULT_CHOICE,
        whole: bool = False,
    ) -> None:
        self.prefix = prefix
        self.finder = others
        self.namespace: TrackNamespace = follower.namespace
        self._settings = settings
        self._selective = (
            ledger.blocks < prefix.blocks or len(ledger.layers) < prefix.descriptor.layers
        )
        self._ledger = ledger
        self._loop = asyncio.get_running_loop()
        self.opened_at = opened_at
        self.deadline_at = deadline_at
        self.manifest_at = self._loop.time()
        self.first_at: float | None = None
        self.last_at: float | None = None
        self._error: KvcsError | None = None
        self._error_is_final = False
        self._closed = False
        self.readers = Readers(ledger)
        self._choice = choice
        self._together = whole
        """Whether no layer is handed out before all are there."""
        self._exact = exact
        """Whether just the selected blocks are wanted, not as many as there are."""
        self._append: asyncio.TimerHandle | None = None
        self.replacements = Replacements(self, others, choice, settings)
        self._recovery = Recovery(self, settings)
        self.rivals = Rivals(self, self._recovery, settings)
        self._alone = Alone(self, self._recovery, last_means, settings)
        self._passage = Passage(
            self, routes, follower, settings, retrieve=retrieve, selective=self._selective
        )
        self._end, self._quiet = self._listeners()
        self._deadline = self._loop.call_at(deadline_at, self._deadline_passed)
        self._deadline_seconds = deadline_at - opened_at

    # What its readers call

    def ready(self, index: int) -> LayerTensors | None:
        """A layer's tensors, read-only; None where it is not whole yet.

        Raises:
            UsageError: the layer was not selected.
            KvcsError: it will never be whole.
        """
        if index not in self._ledger.layers:
            first, last = self._ledger.layers[0], self._ledger.layers[-1]
            raise UsageError(f"layer {index} was not selected; layers {first}..{last} are")
        if self._error is not None and self._error_is_final:
            raise self._error
        if self._may_hand_out() and self._ledger.is_ready(index):
            return self.readers.hand_out(self._ledger.layer(index))
        if self._error is not None:
            raise self._error
        return None

    def extend(self, deadline_at: float) -> None:
        """Another reader has more time; the time of the most patient one counts."""
        if deadline_at <= self.deadline_at or self.is_over:
            return
        self._deadline_seconds += deadline_at - self.deadline_at
        self.deadline_at = deadline_at
        self._deadline.cancel()
        self._deadline = self._loop.call_at(deadline_at, self._deadline_passed)

    @property
    def failed_or_closed(self) -> bool:
        """Whether a new reader would get nothing of it."""
        return self._closed or self._error is not None

    def incomplete(self, reason: str, cause: KvcsError | None = None) -> CacheIncomplete:
        """What a reader gets that waits no longer."""
        error = CacheIncomplete(reason, self._ledger.missing(), self._ledger.usable_tokens())
        error.__cause__ = cause
        return error

    @property
    def manifest(self) -> Manifest:
        """Newest manifest that was applied."""
        manifest = self._ledger.manifest
        assert manifest is not None  # `start` has applied the first one
        return manifest

    @property
    def passage(self) -> Passage:
        """The sessions that it has gone over."""
        return self._passage

    @property
    def follower(self) -> ManifestFollower:
        """Follows the manifest."""
        return self._passage.leg.follower

    @property
    def seconds(self) -> float:
        """Since it was opened."""
        return self._loop.time() - self.opened_at

    @property
    def fetched_elsewhere(self) -> int:
        """Objects that came another way than over sessions."""
        return self._alone.fetched + self.replacements.fetched

    @property
    def refetches(self) -> int:
        """FETCHes made in recovery."""
        return self._recovery.fetches + self.replacements.fetches

    @property
    def from_other_publications(self) -> int:
        """Objects that other publications brought."""
        return self._recovery.of_twins

    # What the Subscriber calls

    def start(self) -> None:
        """Ask for the data tracks of every segment that the manifest names.

        Raises:
            PublicationError: the manifest covers nothing of the prefix, or has no track that can
                be read here.
        """
        follower = self.follower
        manifest = follower.manifest
        assert manifest is not None
        follower.on_manifest = self._apply
        if not follower.covering(manifest):
            raise PublicationError("the publication has no segment of this prefix")
        self._apply(manifest, at_once=True)
        self._passage.start()
        self.rivals.start()

    def close(self) -> None:
        """Cancel every request; waiters get what went wrong, or that the cache was closed."""
        if self._closed:
            return
        self._closed = True
        self._ask_no_more()
        self._passage.close()
        self._hurry()
        if self._error is None:
            self._error = self.incomplete("the cache was closed")
        self.readers.release(self._error)
        log_end(self, self._is_complete(), self._error)

    # Traveller: what its legs tell

    def verified(self) -> None:
        """Objects were verified; hand out layers that are whole now."""
        if ready := self._ledger.take_ready():
            self.last_at = self._loop.time()
            if self.first_at is None:
                self.first_at = self.last_at
            if self._may_hand_out():
                self._hand_out(ready)
        if excess := self.readers.kept.excess(self._settings.held_octets):
            self.failed(self.incomplete(str(excess), excess))
            self._loop.call_soon(self._passage.close)  # what comes would take yet more
        if ready:  # it costs as much as there are layers: not for every Object
            self._check_completion()

    def lost(self, track: DataTrack, span: Span, reason: str, *, late: bool = False) -> None:
        """Objects are owed again: fetch them."""
        if not self._closed and self._error is None and not self._passage.moving:
            (self._recovery.late if late else self._recovery.lost)(track, span, reason)

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
        if self._alone.takes_over(error):
            return
        if isinstance(error, ConnectionClosed | RequestError):
            error = self.incomplete(str(error), error)
        self._error = error
        # After a contradiction nothing of the publication may be used any more.
        self._error_is_final = isinstance(error, PublicationError) and not isinstance(
            error, PublicationAborted
        )
        self._ask_no_more()
        self.readers.release(error)
        self.rivals.blame(error)

    def manifest_ended(self) -> None:
        """No newer manifest comes."""
        self._end.listen()

    def between(self) -> None:
        """The next session will be asked for all that lacks."""
        self._recovery.forget()
        self._alone.wait()

    def moved(self) -> None:
        """Another session serves the cache now, and was asked for all that lacks."""
        self._alone.stop()
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

    def receiver(
        self, track: DataTrack, connection: Connection, *, beside: bool = False
    ) -> TrackReceiver:
        """Receiver of a data track for a FETCH over one of the sources."""
        return self._passage.receiver(track, connection, beside=beside)

    async def twins(self, connection: Connection) -> list[TrackNamespace]:
        """Other publications there whose Objects are the very same octets."""
        if not self.may_have_twins or self.finder is None:
            return []
        others = await self.finder.over(connection, self.namespace)
        return [each.fields for each in twins(self.manifest, others)]

    @property
    def may_have_twins(self) -> bool:
        """Whether Objects of another publication may stand for those of this one."""
        # Sealed payloads open under their own publication's name alone.
        return self.manifest.deterministic and self._ledger.unsealer is None

    @property
    def handed_out(self) -> bool:
        """Whether anything was given to a reader, or may be given at once."""
        return self.readers.handed_out or self.readers.kept.too_late or self.is_over

    def comes_of_itself(self, track: DataTrack) -> bool:
        """Whether Objects of a track that were not published yet will come unasked."""
        return self._reception.comes_of_itself(track, self.manifest)

    @property
    def last_means(self) -> LastMeans | None:
        """What is left where no session brings it."""
        return self._alone.means

    def recovered(self) -> None:
        """What was lost is there: look whether that was all."""
        self._check_completion()
        self._end.listen()

    def recovery_failed(self, reason: str, cause: KvcsError | None = None) -> None:
        """Recovery used its time up, or nothing is left to try."""
        self.failed(self.incomplete(reason, cause))

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

    def _apply(self, manifest: Manifest, *, at_once: bool = False) -> None:
        follower = self._passage.leg.follower
        try:
            self._ledger.apply_manifest(manifest)
            for entry in follower.covering(manifest)[len(self._segments()) :]:
                if self._ledger.covered >= self._ledger.blocks:
                    break
                tracks = choose_tracks(entry, self._choice)
                self._ledger.add_segment(tracks, entry.blocks)
                self._passage.begin(tracks, entry)
        except PublicationError as exc:
            self.failed(exc)
            raise
        self._settle(manifest, follower.is_final, at_once)
        self.verified()
        self._check_completion()
        self._end.listen()
        self._quiet.listen()

    def _settle(self, manifest: Manifest, final: bool, at_once: bool) -> None:
        """Want what the publication covers of the prefix, where it will cover no more."""
        self._hurry()
        ledger = self._ledger
        if self.readers.settled.done() or self._error is not None:
            return
        if ledger.covered == ledger.blocks:
            self.readers.settled.set_result(ledger.blocks * ledger.descriptor.block_tokens)
        elif self._exact or not ledger.covered:
            return
        elif final or (at_once and manifest.complete):
            self._want_covered()
        elif manifest.complete:
            # The next pass of a chunked prefill may be about to begin.
            self._append = self._loop.call_later(self._settings.append, self._want_covered)

    def _want_covered(self) -> None:
        if self.readers.settled.done():
            return
        self._ledger.want_covered()
        self.readers.settled.set_result(self._ledger.blocks * self._ledger.descriptor.block_tokens)
        self.verified()
        self._check_completion()
        self._end.listen()

    def _hurry(self) -> None:
        """Wait no longer for the publication to add a segment."""
        if self._append is not None:
            self._append.cancel()
            self._append = None

    def _segments(self) -> set[int]:
        return {track.segment for track in self._ledger.tracks}

    def _is_complete(self) -> bool:
        if self._ledger.complete:
            return True
        if self._alone.has_recomputed and self._ledger.whole:
            return True  # what the producer never finished, the caller has
        # A selection of a segment that is still produced can be whole before its manifest is.
        return self._selective and self._ledger.whole and self._all_listed()

    def _all_listed(self) -> bool:
        last = self._ledger.layers[-1]
        ours = self._segments() - self._ledger.replaced.keys()
        return all(
            entry.layers_listed() > last
            for entry in self.manifest.segments
            if entry.segment in ours
        )

    def _may_hand_out(self) -> bool:
        return not self._together or self._error is not None or self._is_complete()

    def _hand_out(self, layers: Iterable[int]) -> None:
        """Give layers that are whole to those who wait for them."""
        for index in sorted(set(layers) & set(self.readers.waited_for)):
            self.readers.hand_out(self._ledger.layer(index))

    def _check_completion(self) -> None:
        if self.readers.completion.done():
            return
        if self._error is not None:
            self.readers.completion.set_exception(self._error)
            self.readers.completion.exception()  # retrieved: nobody has to wait for it
        elif self._is_complete():
            self.readers.completion.set_result(None)
            self._ask_no_more()
            self._hand_out(self.readers.waited_for)

    def _ask_no_more(self) -> None:
        for each in (self._recovery, self.rivals, self._alone, self._end, self._quiet):
            each.stop()
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
        if 0 < covered < blocks and not self._exact:
            self._want_covered()
        elif covered < blocks:
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

    def _deadline_passed(self) -> None:
        self.failed(self.incomplete(f"the deadline of {self._deadline_seconds:g} s passed"))

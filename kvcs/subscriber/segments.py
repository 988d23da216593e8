"""Whole segments of another publication in place of ours (KVCS "Verification and Recovery").

Two computations of one prefix need not have the same bits, so Objects of two publications are never
combined in one segment: a segment is taken from another publication in all its layers and
components, or not at all, and only while nothing of it was handed out. It is gathered aside, held
to its own publication's manifest, and takes the place of ours when the last Object is verified.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcs.errors import KvcsError, PublicationError, RequestError, UsageError
from kvcs.fallback.source import BlockSource
from kvcs.kv import DataTrack, Ledger, Manifest, Prefix, SegmentEntry
from kvcs.kv.tracks import PublicationNamespace
from kvcs.moqt.intervals import Span
from kvcs.moqt.names import TrackNamespace
from kvcs.observe import get_logger
from kvcs.quic.connection import Connection
from kvcs.recovery.listening import Listening
from kvcs.subscriber.manifests import ManifestFollower
from kvcs.subscriber.others import Other, Others, are_twins, same_segment
from kvcs.subscriber.reception import Reception
from kvcs.subscriber.requests import Choice, choose_tracks
from kvcs.subscriber.settings import SubscriberSettings

if TYPE_CHECKING:
    from kvcs.subscriber.retrieval import Retrieval

_log = get_logger("kvcs.subscriber")

MAX_REMEMBERED = 64
"""Publications that are remembered as of no use."""


class Gathered:
    """One segment of another publication, as far as it has come: in a ledger of its own.

    Args:
        other: the publication.
        number: the segment.
        ledger: takes its Objects, and has its manifest.
        prefix: the consumer's own.
        subscriber_priority: SUBSCRIBER_PRIORITY of its fetches.
    """

    finder: Others | None = None
    """It is not mended from yet other publications."""
    replacements: Replacements | None = None
    follower: ManifestFollower | None = None
    """Its manifest calls the segment complete: no newer one is needed."""
    manifest_is_final = True
    may_have_twins = False

    def __init__(
        self, other: Other, number: int, ledger: Ledger, prefix: Prefix, subscriber_priority: int
    ) -> None:
        self.other = other
        self.number = number
        self.ledger = ledger
        self.prefix = prefix
        self.namespace: TrackNamespace = other.namespace.fields
        self.manifest: Manifest = other.manifest
        self.error: KvcsError | None = None
        """Why the publication is of no use, if that is so."""
        self._priority = subscriber_priority

    @property
    def tracks(self) -> list[DataTrack]:
        """The tracks that it is taken from."""
        return [track for track in self.ledger.tracks if track.segment == self.number]

    @property
    def is_whole(self) -> bool:
        """Whether every Object of it is verified, and may be used."""
        return self.error is None and self.ledger.has_segment(self.number)

    def entry(self, track: DataTrack) -> SegmentEntry:
        """The segment of a track."""
        return self.manifest.segments[track.segment]

    def verified(self) -> None:
        """An Object was verified; that of one more says nothing yet."""

    def failed(self, error: KvcsError) -> None:
        """The publication contradicts itself: it is of no use."""
        self.error = self.error or error

    async def fetch(self, connection: Connection, listening: Listening) -> bool:
        """Ask one session once for all that lacks; returns when it has answered all.

        What has come when it is cancelled stays.

        Args:
            connection: the session.
            listening: how long nothing may come.

        Returns:
            Whether all was answered, in the one way or the other.

        Raises:
            UsageError: the session takes no more requests.
        """
        ends = _Ends(self, self.tracks)
        reception = Reception(
            connection,
            self.namespace,
            self.ledger,
            ends,
            subscriber_priority=self._priority,
            retrieve="fetch",
            selective=False,
        )
        try:
            for track in self.tracks:
                first = next(
                    (first for first, _ in self.ledger.lacking(track, self.ledger.layers)), None
                )
                if first is None:
                    ends.track_changed(track)
                else:
                    answered = ends.answered(track)
                    reception.resume(track, self.entry(track), first, 0.0, answered)
            return await listening.to(ends.all.wait(), lambda: reception.octets)
        finally:
            reception.cancel()

    async def fetch_from(self, source: BlockSource, settings: SubscriberSettings) -> int:
        """Ask a place that is no session once for all that lacks; how many Objects came."""
        # Here, because a retrieval that needs none of this imports none of it.
        from kvcs.subscriber.last_means import LastMeans

        means = LastMeans(source, None, settings)
        means.serve(self)
        await means.fetch([run for run in self.ledger.missing() if run.segment == self.number])
        return means.fetched


class _Ends:
    """A `kvcs.subscriber.receiver.Taker` that waits for the end of every track's FETCH."""

    def __init__(self, gathered: Gathered, tracks: Sequence[DataTrack]) -> None:
        self.all = asyncio.Event()
        """Set once every FETCH has ended, or nothing more counts."""
        self._gathered = gathered
        self._left = set(tracks)

    def answered(self, track: DataTrack) -> _Answer:
        """What is told the answer to one track's FETCH."""
        return _Answer(self, track)

    def verified(self) -> None:
        """One more Object is there."""

    def lost(self, track: DataTrack, span: Span, reason: str, *, late: bool = False) -> None:
        """It is asked for in the next round, if there is one."""

    def dropped(self, track: DataTrack, reason: str) -> None:
        """Nothing is subscribed to."""

    def sent_away(self, uri: str) -> None:
        """A FETCH is not worth a move."""

    def refused(self, track: DataTrack, error: RequestError) -> bool:
        """Nothing is subscribed to."""
        return False

    def track_changed(self, track: DataTrack) -> None:
        """The FETCH of a track has ended."""
        self._left.discard(track)
        if not self._left:
            self.all.set()

    def failed(self, error: KvcsError) -> None:
        """The publication contradicts itself, or the session has ended."""
        if isinstance(error, PublicationError):
            self._gathered.failed(error)
        self.all.set()


class _Answer:
    """Told the answer to one FETCH: a refusal ends it."""

    def __init__(self, ends: _Ends, track: DataTrack) -> None:
        self._ends = ends
        self._track = track

    def __call__(self, error: RequestError | None) -> None:
        if error is not None:
            self._ends.track_changed(self._track)


class Replacements:
    """Takes whole segments from other publications for one retrieval.

    Args:
        retrieval: the retrieval.
        others: looks for them; None leaves that out.
        choice: encodings that are taken.
        settings: bounds and waits.
    """

    def __init__(
        self,
        retrieval: Retrieval,
        others: Others | None,
        choice: Choice,
        settings: SubscriberSettings,
    ) -> None:
        self.taken: dict[int, PublicationNamespace] = {}
        """Segments that were taken, and from which publication."""
        self.fetches = 0
        """FETCHes made of other publications."""
        self.fetched = 0
        """Objects of other publications that came another way than over sessions."""
        self._retrieval = retrieval
        self._others = others
        self._choice = choice
        self._settings = settings
        self._one_by_one = asyncio.Lock()
        self._listening = Listening(settings.quiet)
        self._gathered: Gathered | None = None
        """The one that was begun last; what it has is not asked for again."""
        self._of_no_use: deque[PublicationNamespace] = deque(maxlen=MAX_REMEMBERED)

    async def over(
        self, connection: Connection, segments: Sequence[int], seconds: float
    ) -> str | None:
        """Take segments that lack something from what a session leads to.

        Args:
            connection: the session.
            segments: their numbers.
            seconds: how long that may take.

        Returns:
            Why not all of them, if anything is to be told.
        """
        wanted = self._wanted(segments)
        if not wanted or self._others is None or not connection.is_open:
            return None
        ours, tried = self._retrieval.namespace, False
        try:
            async with asyncio.timeout(seconds), self._one_by_one:
                for other in await self._others.over(connection, ours):
                    for number in wanted:
                        gathered = self._gather(self._others, other, number)
                        if gathered is not None:
                            tried = True
                            self.fetches += len(gathered.tracks)
                            answered = await gathered.fetch(connection, self._listening)
                            self._take(gathered)
                            if not answered:
                                _log.info("other_publication_silent", segment=number)
                                break  # neither will it bring the others
        except TimeoutError:
            return f"another publication did not come whole within {seconds:g} s"
        except UsageError as exc:
            return str(exc)
        return self._told(wanted) if tried else None

    async def at(self, source: BlockSource, segments: Sequence[int]) -> str | None:
        """Take segments that lack something from what another place has; it was entered.

        Args:
            source: the place.
            segments: their numbers.

        Returns:
            Why not all of them, if anything is to be told.

        Raises:
            SourceFailed: it cannot be asked.
        """
        wanted = self._wanted(segments)
        if not wanted or self._others is None:
            return None
        ours, tried = PublicationNamespace.parse(self._retrieval.namespace), False
        for other in await self._others.at(source, ours):
            for number in wanted:
                gathered = self._gather(self._others, other, number)
                if gathered is not None:
                    tried = True
                    self.fetched += await gathered.fetch_from(source, self._settings)
                    self._take(gathered)
        return self._told(wanted) if tried else None

    @property
    def may_still_come(self) -> bool:
        """Whether another publication is still produced that what lacks may come from."""
        return self._retrieval.rivals.promise

    def may_be_of_use(self, other: Other) -> bool:
        """Whether segments of a publication may stand in the place of ours."""
        if self._retrieval.ledger.signed and not other.is_signed:
            return False  # who publishes must not choose whether it is verified
        return other.namespace not in self._of_no_use

    def confirm(self) -> None:
        """Complete segments that are here and that our manifest does not call complete, where that
        of a publication with the very same Objects does, and lists them."""
        retrieval = self._retrieval
        if self._others is None or not retrieval.may_have_twins:
            return
        for other in filter(self.may_be_of_use, self._others.known()):
            if not are_twins(retrieval.manifest, other.manifest):
                continue
            for number in {track.segment for track in retrieval.ledger.tracks}:
                ours, theirs = retrieval.manifest.segments[number], other.manifest.segments[number]
                if ours.complete or not theirs.complete or number in retrieval.ledger.replaced:
                    continue
                if retrieval.ledger.confirm(number, theirs.object_digests):
                    self.taken[number] = other.namespace
                    retrieval.verified()
                    retrieval.recovered()

    def _wanted(self, segments: Sequence[int]) -> list[int]:
        """Those of some segments that may be taken: something lacks, and nothing was handed out."""
        if self._retrieval.handed_out:
            return []
        ledger = self._retrieval.ledger
        return [number for number in segments if not ledger.has_segment(number)]

    def _gather(self, others: Others, other: Other, number: int) -> Gathered | None:
        """What a segment of another publication is gathered in; None where it is of no use."""
        if not self._wanted([number]) or not self.may_be_of_use(other):
            return None
        ours = self._retrieval.ledger
        if not same_segment(self._retrieval.manifest, other.manifest, number):
            return None
        begun = self._gathered
        if begun is not None and (begun.other.namespace, begun.number) == (other.namespace, number):
            return begun
        entries = other.manifest.segments[: number + 1]
        first, last = ours.layers[0], ours.layers[-1]
        ledger = Ledger(
            ours.descriptor,
            blocks=min(ours.blocks, sum(entry.blocks for entry in entries)),
            layers=(first, last),
            signed=other.is_signed,
            max_data_octets=self._settings.max_data_octets,
        )
        try:
            ledger.apply_manifest(other.manifest)
            for entry in entries:
                ledger.add_segment(choose_tracks(entry, self._choice), entry.blocks)
        except (PublicationError, UsageError) as exc:
            _log.info("other_publication_not_used", why=str(exc))
            return None
        ledger.unsealer = others.protection.unsealer(
            ledger, other.namespace.fields, self._settings.max_data_octets
        )
        self._gathered = Gathered(
            other, number, ledger, self._retrieval.prefix, self._settings.subscriber_priority
        )
        return self._gathered

    def _take(self, gathered: Gathered) -> None:
        """Put a segment in the place of ours, if all of it is there and ours may still go."""
        if gathered.error is not None:
            _log.warning("other_publication_not_used", why=str(gathered.error))
            self._of_no_use.append(gathered.other.namespace)
            self._gathered = None
        elif gathered.is_whole and self._wanted([gathered.number]):
            self._gathered = None
            self.taken[gathered.number] = gathered.other.namespace
            self._retrieval.ledger.take_segment(gathered.number, gathered.ledger)
            _log.info("segment_of_another_publication", segment=gathered.number)
            self._retrieval.verified()

    def _told(self, wanted: Sequence[int]) -> str | None:
        if not self._wanted(wanted):
            return None
        return "no other publication brought all of a segment that lacks something"

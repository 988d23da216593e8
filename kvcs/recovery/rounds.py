"""What is missing is asked for in rounds: every session, every other place, then the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import WeakSet

from kvcs.errors import KvcsError, MissingBlocks, UsageError
from kvcs.fallback.means import LastMeans, clipped
from kvcs.kv import DataTrack
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.intervals import EVERYTHING, LocationSet, Span, following
from kvcs.moqt.messages import FetchOk, RequestError, retry_after_ms
from kvcs.moqt.names import FullTrackName, GroupOrder, Location, TrackNamespace
from kvcs.moqt.parameters import Parameters
from kvcs.observe import get_logger
from kvcs.quic.chance import new_chance
from kvcs.quic.connection import Connection
from kvcs.quic.reconnect import retry_seconds
from kvcs.quic.together import all_of
from kvcs.recovery.headway import Headway, missing
from kvcs.recovery.listening import Listening
from kvcs.recovery.patient import Patient, RecoverySettings

_log = get_logger("kvcs.recovery")

MAX_PAUSE_DOUBLINGS = 4
"""The pause between tries doubles up to 16 times the first one."""

SESSIONS_SHARE = 0.5
"""Part of the time for recovery that sessions have, where there are other means behind them."""

ROUNDS_BEFORE_RECOMPUTING = 2
"""Times that every session and every other place is asked before the caller recomputes."""

MAX_SHARE_DOUBLINGS = 6
"""The time that one of several sessions has for an answer doubles up to 64 times the first one."""

MAX_FETCHES = 8
"""FETCHes of one retrieval that run at a time; a publisher takes 16 of one subscriber."""


class _Run(NamedTuple):
    """Lost Objects of one track that one FETCH asks for."""

    track: DataTrack
    first: Location
    last: Location


class Recovery:
    """Fetches again what was lost, until it is there or the time for it is up.

    The session that serves the retrieval is asked first; where that does not bring it, the others
    take turns with it.

    Args:
        patient: the retrieval.
        settings: its numbers.
    """

    def __init__(self, patient: Patient, settings: RecoverySettings) -> None:
        self.fetches = 0
        """FETCHes made so far."""
        self.of_twins = 0
        """Objects that other publications brought."""
        self._patient = patient
        self._settings = settings
        self._lost: dict[DataTrack, LocationSet] = {}
        self._reason = ""
        self._failure = ""
        """Why the last FETCH failed."""
        self._bound = ""
        self._retry_at = 0.0
        self._one_group: WeakSet[Connection] = WeakSet()
        """Sessions whose peer takes FETCHes of one Group alone."""
        self._alone = False
        """Whether no session is asked any more."""
        self._recomputing = False
        self._chance = new_chance()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._late = False
        """Whether something was given up for being slow, and was not asked for again yet."""
        self._headway = Headway(patient)
        self._listening = Listening(settings.quiet)
        self._octets_of_twins = 0
        """Payload octets that other publications brought."""
        self._more = asyncio.Event()

    def lost(self, track: DataTrack, span: Span, reason: str) -> None:
        """What is missing of a span of a track does not come of itself; nothing if it is all there.

        Args:
            track: the data track.
            span: where Objects were lost; those that are there are not asked for again.
            reason: why, for people.
        """
        if self.doubted(track, span, reason):
            self._arm()

    def doubted(self, track: DataTrack, span: Span, reason: str) -> bool:
        """What is missing of a span may still come of itself: ask for it, without a bound.

        Returns:
            Whether anything is missing.
        """
        if not self.lacks(track, span):
            return False
        places = self._lost.setdefault(track, LocationSet())
        if places.first_outside(*span) is not None:
            # What fails again waits for its next try; what is new does not.
            places.add(*span)
            self._more.set()
        self._reason = reason
        if self._task is None:
            _log.info("recovery_started", reason=reason, track=str(track), first=span.first)
            self._task = asyncio.get_running_loop().create_task(self._run())
        return True

    def late(self, track: DataTrack, span: Span, reason: str) -> None:
        """What is missing of a span is there, and was given up because we took it too slowly: the
        time for recovery begins once it was asked for and did not come."""
        if self.doubted(track, span, reason):
            self._late = True

    def lacks(self, track: DataTrack, span: Span) -> bool:
        """Whether anything of a span of a track is missing."""
        return next(missing(self._patient.ledger, track, span), None) is not None

    def first_missing(self, track: DataTrack) -> Location | None:
        """The first Location of a track that is not there; None where all of it is."""
        return next((first for first, _ in missing(self._patient.ledger, track, EVERYTHING)), None)

    def bound(self, reason: str) -> None:
        """Nothing can be fetched, yet something lacks: wait no longer than for what was lost."""
        self._bound = reason
        self._arm()

    def go_alone(self, tracks: Iterable[DataTrack], reason: str, *, bounded: bool) -> None:
        """No session brings anything: all that is missing is lost, and asked for elsewhere.

        Args:
            tracks: the selected tracks.
            reason: why, for people.
            bounded: whether the time for recovery counts; else the retrieval's deadline alone.
        """
        self.stop()
        self._alone = True
        self._reason = reason
        for track in tracks:
            self._lost.setdefault(track, LocationSet()).add(*EVERYTHING)
        if bounded:
            self._arm()
        _log.info("recovery_without_sessions", reason=reason)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def forget(self) -> None:
        """What lacks is asked for in another way: forget what was lost, and what was tried."""
        self.stop()
        self._alone = self._late = False
        self._lost.clear()
        self._failure = self._bound = ""

    def stop(self) -> None:
        """End: it is all there, or nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _arm(self) -> None:
        if self._timer is None:
            ledger = self._patient.ledger
            tokens = ledger.blocks * ledger.descriptor.block_tokens
            seconds = self._settings.recovery(tokens)
            self._headway.begin(self._runs())
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expired, seconds)

    def _expired(self, seconds: float) -> None:
        self._timer = None
        means = self._patient.last_means
        if means is not None and means.can_recompute and self._runs():
            # What was bounded by the time that recomputing takes: now it is due.
            if not self._recomputing:
                self.stop()
                self._task = asyncio.get_running_loop().create_task(self._overdue(means))
            return
        if self._headway.suffices(self._runs(), seconds) or self._others_may_bring_it():
            self._arm()
            return
        reason = self._bound or self._reason
        if self._failure and self._failure != reason:
            reason += f"; last try: {self._failure}"
        self._patient.recovery_failed(f"recovery ended after {seconds:g} s ({reason})")

    def _others_may_bring_it(self) -> bool:
        return not self._alone and self._patient.replacements.may_still_come

    async def from_others(self, source: Connection) -> None:
        """Ask one session for all that lacks, lost or not, of other publications: single Objects of
        those that have the very same, and whole segments of others. One of which nothing comes
        makes room for the next."""
        patient = self._patient
        # A segment that is added from here on was not compared with a twin's.
        compared = patient.ledger.tracks
        for twin in await patient.twins(source):
            everything = [
                _Run(track, *run)
                for track in compared
                for run in missing(patient.ledger, track, EVERYTHING)
            ]
            asked = self._fetch_all(everything, source, twin)
            if not await self._listening.to(asked, lambda: self._octets_of_twins):
                _log.info("other_publication_silent")
        if segments := sorted({run.segment for run in patient.ledger.missing()}):
            left = patient.deadline_at - asyncio.get_running_loop().time()
            await patient.replacements.over(source, segments, left)
        patient.replacements.confirm()

    async def _run(self) -> None:
        tries = 0
        means = self._patient.last_means
        if self._alone and means is not None:
            await means.look_around()
        while True:
            self._more.clear()
            if not self._runs():
                self._settle()
                tries = 0
                await self._more.wait()
                continue
            sources = [] if self._alone else self._patient.sources
            if sources:
                source = sources[tries % len(sources)]
                learnt = source not in self._one_group
                await self._ask(source, self._patience(len(sources), tries))
                if learnt and source in self._one_group:
                    continue  # it is asked at once in the way that it takes
            tries += 1
            if self._late and tries >= len(sources) and self._runs():
                self._late = False
                self._arm()
            if sources and tries >= len(sources) and self._runs():
                # A segment that is added from here on was not compared with a twin's.
                compared = self._patient.ledger.tracks
                for twin in await self._patient.twins(source):
                    await self._ask(source, self._share(len(sources)), twin, compared)
                if segments := sorted({run.track.segment for run in self._runs()}):
                    share = self._share(len(sources))
                    told = await self._patient.replacements.over(source, segments, share)
                    self._failure = told or self._failure
            if means is not None and tries >= len(sources) and self._runs():
                self._failure = await means.fetch(self._lost_blocks()) or self._failure
                enough = not sources or tries >= ROUNDS_BEFORE_RECOMPUTING * len(sources)
                if self._runs() and means.can_recompute and enough:
                    await self._recompute(means)
            if self._runs():
                await self._pause(tries - 1)

    async def _ask(
        self,
        source: Connection,
        seconds: float | None,
        twin: TrackNamespace | None = None,
        tracks: Sequence[DataTrack] | None = None,
    ) -> None:
        """Ask one session for all that was lost, of some tracks or of all, in its share of the
        time."""
        runs = [run for run in self._runs() if tracks is None or run.track in tracks]
        if source in self._one_group:
            runs = self._by_group(runs)
        try:
            async with asyncio.timeout(seconds):
                await self._fetch_all(runs, source, twin)
        except TimeoutError:
            self._failure = f"{source.peer} did not answer within {seconds:g} s"

    def _patience(self, sources: int, tries: int) -> float | None:
        """Seconds that a session has for what it is asked, so that a slow one does not keep us from
        the others; each round twice as many, for where all of them are slow."""
        if self._patient.last_means is not None:
            return self._share(sources)
        if sources == 1:
            return None
        doublings = min(tries // sources, MAX_SHARE_DOUBLINGS)
        return self._share(sources) * float(2**doublings)

    def _share(self, sources: int) -> float:
        """Seconds that one session has, so that the last means still have their turn."""
        ledger = self._patient.ledger
        tokens = ledger.blocks * ledger.descriptor.block_tokens
        return self._settings.recovery(tokens) * SESSIONS_SHARE / sources

    async def _recompute(self, means: LastMeans) -> None:
        """Let the caller recompute what was lost: the last thing to try, under the deadline."""
        self._recomputing = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            await means.recompute(self._lost_blocks())
        except KvcsError as exc:
            self._patient.recovery_failed(f"recomputing failed ({exc})", exc)
            return
        finally:
            self._recomputing = False
        if not self._runs():
            self._settle()

    async def _overdue(self, means: LastMeans) -> None:
        await self._recompute(means)
        await self._run()

    def _lost_blocks(self) -> list[MissingBlocks]:
        """What was lost and is still missing, in runs of one layer, earlier layers first."""
        ledger = self._patient.ledger
        size = ledger.descriptor.block_tokens
        lost = {(track.segment, track.component.value): at for track, at in self._lost.items()}
        found: list[MissingBlocks] = []
        for run in ledger.missing():
            places = lost.get((run.segment, run.component))
            if places is not None:
                found += clipped(run, places, size)
        return sorted(found, key=lambda run: (run.layer, run.segment, run.first_block))

    def _note_retry(self, error: RequestError) -> None:
        """A FETCH was refused: it may say when it may be repeated (MOQT §9.4)."""
        wait = retry_after_ms(error)
        if wait is not None:
            now = asyncio.get_running_loop().time()
            self._retry_at = max(self._retry_at, now + retry_seconds(wait, self._chance))

    async def _pause(self, tries: int) -> None:
        """Wait before the next try, or until more is lost; in any case for a Retry Interval."""
        asked = self._retry_at - asyncio.get_running_loop().time()
        if asked > 0:
            await asyncio.sleep(asked)
            return
        seconds = self._settings.retry_pause * 2 ** min(tries, MAX_PAUSE_DOUBLINGS)
        try:
            async with asyncio.timeout(seconds):
                await self._more.wait()
        except TimeoutError:
            pass

    def _settle(self) -> None:
        """What was lost is there: the time counts anew from the next loss."""
        self._lost.clear()
        self._failure = ""
        self._late = False
        if self._timer is not None and not self._bound and not self._alone:
            self._timer.cancel()
            self._timer = None
        self._patient.recovered()

    # What to ask for

    def _runs(self) -> list[_Run]:
        """Lost Objects in runs that one FETCH brings with nothing beside."""
        runs: list[_Run] = []
        for track, places in self._lost.items():
            here: list[_Run] = []
            for start, end in places.ranges():
                for first, last in missing(self._patient.ledger, track, Span(start, end)):
                    if here and self._adjoin(track, here[-1].last, first):
                        here[-1] = here[-1]._replace(last=last)
                    else:
                        here.append(_Run(track, first, last))
            runs += here
        # Earlier layers first: a consumer needs them first.
        return sorted(runs, key=lambda run: run.first)

    @staticmethod
    def _by_group(runs: list[_Run]) -> list[_Run]:
        """The same in runs of one Group each, for a peer that takes no others."""
        found = []
        for run in runs:
            for group in range(run.first.group, run.last.group + 1):
                whole = Span.of_group(group)
                first, last = max(run.first, whole.first), min(run.last, whole.last)
                found.append(_Run(run.track, first, last))
        return sorted(found, key=lambda run: run.first)

    def _adjoin(self, track: DataTrack, last: Location, first: Location) -> bool:
        """Whether nothing but status Objects lies between two Locations."""
        if first == following(last):
            return True
        manifest = self._patient.ledger.manifest
        if manifest is None or first != Location(last.group + 1, 0):
            return False
        return last.object == manifest.segments[track.segment].blocks - 1

    def _shown(self, track: DataTrack, last: Location) -> Location:
        """Where a FETCH ends that has to bring an Object as its last one.

        Behind the last real block it goes on to the end of the padding: a relay that has lost
        something would see how many blocks are real (KVCS "Privacy Considerations").
        """
        manifest = self._patient.ledger.manifest
        if manifest is None or track.segment >= len(manifest.segments):
            return last
        entry = manifest.segments[track.segment]
        if not entry.padding_blocks or last.object != entry.blocks - 1:
            return last
        return Location(last.group, last.object + entry.padding_blocks)

    # Asking

    async def _fetch_all(
        self, runs: Sequence[_Run], source: Connection, twin: TrackNamespace | None
    ) -> None:
        """FETCHes of runs over one session, some at a time; returns when all have ended."""
        for start in range(0, len(runs), MAX_FETCHES):
            now = runs[start : start + MAX_FETCHES]
            await all_of([self._fetch(run, source, twin) for run in now])

    async def _fetch(self, run: _Run, connection: Connection, twin: TrackNamespace | None) -> None:
        """One FETCH of a run over one session; returns when it has ended."""
        ours = connection is self._patient.connection and twin is None
        if not connection.is_open:
            return
        name = FullTrackName(twin or self._patient.namespace, run.track.name)
        parameters = Parameters.of(
            subscriber_priority=self._settings.subscriber_priority,
            group_order=GroupOrder.ASCENDING,
            location_filter=LocationFilter.between(run.first, self._shown(run.track, run.last)),
        )
        try:
            request_id = connection.core.requester.fetch(name, parameters)
        except UsageError as exc:
            _log.warning("recovery_fetch_not_made", reason=str(exc))
            return
        self.fetches += 1
        done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        receiver = self._patient.receiver(run.track, connection, beside=twin is not None)
        published: Location | None = run.last
        """Largest Location of the track when we asked; None where it lies before the run."""

        def ended(failure: str | None) -> None:
            if not done.done():
                done.set_result(failure)

        def take(event: events.Event) -> None:
            nonlocal published
            if isinstance(event, events.RequestAccepted) and isinstance(event.reply, FetchOk):
                published = event.reply.end_location
            elif isinstance(event, events.RequestRefused):
                code = event.error.error_code
                if code == RequestCode.INVALID_RANGE:
                    published = None
                elif code == RequestCode.NOT_SUPPORTED and run.first.group < run.last.group:
                    self._one_group.add(connection)
                self._note_retry(event.error)
            before = receiver.octets
            receiver.take(event, ended)
            came = receiver.octets - before
            self._headway.came += came
            if twin is not None:
                self._octets_of_twins += came

        connection.handle(request_id, take)
        try:
            failure = await done
        finally:
            connection.cancel(request_id)
            if not ours:
                receiver.drop()
            if twin is not None:
                self.of_twins += receiver.taken
        if failure is not None:
            self._failure = failure
        if ours and self._patient.comes_of_itself(run.track):
            # What was not published when we asked is not lost: it comes of itself.
            behind = run.first if published is None else following(published)
            if behind is not None:
                self._lost[run.track].remove(max(behind, run.first), run.last)

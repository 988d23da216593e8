"""What is missing of a retrieval and from where it can still come, under one deadline.

KVCS "Verification and Recovery": lost Objects are fetched again; recovery is bounded by the time
that recomputation would take, and it counts from the first known loss.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvcs.errors import MissingBlocks, UsageError
from kvcs.kv import DataTrack, Ledger
from kvcs.moqt import events
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName, GroupOrder, Location, TrackNamespace
from kvcs.moqt.parameters import Parameters
from kvcs.observe import get_logger
from kvcs.quic.connection import Connection

_log = get_logger("kvcs.recovery")

MAX_PAUSE_DOUBLINGS = 4
"""The pause between tries doubles up to 16 times the first one."""


class RecoverySettings(Protocol):
    """The numbers that recovery goes by."""

    @property
    def retry_pause(self) -> float:
        """Seconds before the second try."""

    @property
    def subscriber_priority(self) -> int:
        """SUBSCRIBER_PRIORITY of its fetches."""

    def recovery(self, tokens: int) -> float:
        """Seconds from the first known loss to the end of trying."""


class Receiver(Protocol):
    """Takes the events of a FETCH of one data track."""

    def take(self, event: events.Event, on_fetch_end: FetchEnd | None = None) -> None:
        """One event; ``on_fetch_end`` is told how the FETCH's stream ended."""


class FetchEnd(Protocol):
    """Told whether a FETCH delivered all that it could."""

    def __call__(self, whole: bool, /) -> None: ...


class Patient(Protocol):
    """The retrieval that recovery works for."""

    namespace: TrackNamespace

    @property
    def connection(self) -> Connection:
        """The session that serves it."""

    @property
    def ledger(self) -> Ledger:
        """What is owed and what is verified."""

    def receiver(self, track: DataTrack) -> Receiver:
        """Receiver of a data track."""

    def everything_ended(self) -> bool:
        """Whether nothing more comes of itself."""

    def recovery_failed(self, reason: str) -> None:
        """The time is up."""


class Recovery:
    """Fetches again what was lost, until it is there or the time for it is up.

    Args:
        patient: the retrieval.
        settings: its numbers.
    """

    def __init__(self, patient: Patient, settings: RecoverySettings) -> None:
        self.fetches = 0
        """FETCHes made so far."""
        self._patient = patient
        self._settings = settings
        self._lost: dict[tuple[DataTrack, int | None], str] = {}
        self._reason = ""
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._requests: set[int] = set()
        self._more = asyncio.Event()

    def lost(self, track: DataTrack, layer: int | None, reason: str) -> None:
        """Objects of a layer of a track are owed again, or of all its layers where None."""
        self._lost[track, layer] = reason
        self._reason = reason
        self._more.set()
        self._arm()
        if self._task is None:
            _log.info("recovery_started", reason=reason, track=str(track), layer=layer)
            self._task = asyncio.get_running_loop().create_task(self._run())

    def manifest_missing(self) -> None:
        """Every Object is there, but no manifest has confirmed the last ones: wait, bounded."""
        self._reason = "the manifest never called the segment complete"
        self._arm()

    def stop(self) -> None:
        """End: it is all there, or nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            self._task.cancel()
            self._task = None
        for request_id in list(self._requests):
            self._patient.connection.cancel(request_id)
        self._requests.clear()

    def _arm(self) -> None:
        if self._timer is None:
            ledger = self._patient.ledger
            tokens = ledger.blocks * ledger.descriptor.block_tokens
            seconds = self._settings.recovery(tokens)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expired, seconds)

    def _expired(self, seconds: float) -> None:
        self._timer = None
        self._patient.recovery_failed(
            f"recovery ended after {seconds:g} s ({self._reason or 'objects were lost'})"
        )

    async def _run(self) -> None:
        tries = 0
        while True:
            self._more.clear()
            runs = self._runs()
            if not runs:
                self._settle()
                tries = 0
                await self._more.wait()
                continue
            for track, first, last in runs:
                await self._fetch(track, first, last)
            tries += 1
            pause = self._settings.retry_pause * 2 ** min(tries - 1, MAX_PAUSE_DOUBLINGS)
            if self._runs():
                await asyncio.sleep(pause)

    def _settle(self) -> None:
        """What was lost is there: the time counts anew from the next loss."""
        self._lost.clear()
        if self._timer is not None and self._patient.ledger.manifest is not None:
            self._timer.cancel()
            self._timer = None

    def _runs(self) -> list[tuple[DataTrack, Location, Location]]:
        """Lost Objects as Locations from..to, by track and run of layers."""
        ended = self._patient.everything_ended()
        by_track: dict[DataTrack, list[MissingBlocks]] = {}
        ledger = self._patient.ledger
        tracks = {(track.segment, track.component.value): track for track in ledger.tracks}
        for missing in ledger.missing():
            track = tracks.get((missing.segment, missing.component))
            if track is not None and (ended or self._is_lost(track, missing.layer)):
                by_track.setdefault(track, []).append(missing)
        runs = []
        for track, parts in by_track.items():
            first = parts[0]
            previous = first
            for part in [*parts[1:], None]:
                if part is not None and part.layer - previous.layer <= 1:
                    previous = part
                    continue
                runs.append(
                    (
                        track,
                        Location(first.layer, first.first_block),
                        Location(previous.layer, previous.last_block),
                    )
                )
                if part is not None:
                    first = previous = part
        return runs

    def _is_lost(self, track: DataTrack, layer: int) -> bool:
        return (track, layer) in self._lost or (track, None) in self._lost

    async def _fetch(self, track: DataTrack, first: Location, last: Location) -> None:
        """One FETCH from ``first`` to ``last``, both inclusive; returns when it has ended."""
        connection = self._patient.connection
        if not connection.is_open:
            return
        name = FullTrackName(self._patient.namespace, track.name)
        parameters = Parameters.of(
            subscriber_priority=self._settings.subscriber_priority,
            group_order=GroupOrder.ASCENDING,
            location_filter=LocationFilter.absolute_range(
                first.group, first.object, last.group, last.object
            ),
        )
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        try:
            request_id = connection.core.requester.fetch(name, parameters)
        except UsageError as exc:
            _log.warning("recovery_fetch_not_made", reason=str(exc))
            return
        self.fetches += 1
        self._requests.add(request_id)

        def ended(whole: bool, /) -> None:
            if not done.done():
                done.set_result(whole)

        receiver = self._patient.receiver(track)
        connection.handle(request_id, lambda event: receiver.take(event, ended))
        try:
            await done
        finally:
            self._requests.discard(request_id)
            connection.cancel(request_id)

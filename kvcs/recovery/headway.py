"""Whether what was lost keeps coming, so that recovery may go on beyond its time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence

from kvcs.kv import DataTrack, Ledger
from kvcs.moqt.intervals import Span
from kvcs.moqt.names import Location
from kvcs.observe import get_logger
from kvcs.recovery.patient import Patient

_log = get_logger("kvcs.recovery")

HOPE = 4.0
"""Recovery goes on beyond its time where so many times the rate seen would do by the deadline: a
slow path may become faster, but not by any amount."""


def may_come(owed: int, gained: int, seconds: float, left: float) -> bool:
    """Whether what is owed may come in the time that is left.

    Args:
        owed: octets that lack.
        gained: octets that came lately.
        seconds: in which these came.
        left: seconds that are left.
    """
    return owed * seconds < gained * HOPE * left


Runs = Sequence[tuple[DataTrack, Location, Location]]
"""First and last Locations of what was lost; those between that are there do not count."""


def missing(ledger: Ledger, track: DataTrack, span: Span) -> Iterator[tuple[Location, Location]]:
    """Missing Objects of a track within a span, in runs of one layer, ascending."""
    layers = range(span.first.group, min(span.last.group + 1, ledger.layers.stop))
    for first, last in ledger.lacking(track, layers):
        first, last = max(first, span.first), min(last, span.last)
        if first <= last:
            yield first, last


class Headway:
    """Looks, when the time for recovery is up, at what has come of what was lost.

    A consumer behind a slow path gets what it asks for, only later than others would; so the time
    for recovery is that in which something has to come, and the deadline stays.

    Args:
        patient: the retrieval.
    """

    def __init__(self, patient: Patient) -> None:
        self.came = 0
        """Payload octets that FETCHes have brought since `begin`."""
        self._patient = patient
        self._lost: Runs = ()
        self._owed = 0
        self._rejected = 0

    def begin(self, lost: Runs) -> None:
        """The time begins, with so much that was lost."""
        self._lost, self._owed = lost, self._octets(lost)
        self.came, self._rejected = 0, self._rejections()

    def suffices(self, lost: Runs, seconds: float) -> bool:
        """Whether what was lost by now may come by the deadline.

        Args:
            lost: all that was lost and still lacks.
            seconds: since `begin`.
        """
        gained = self._owed - self._octets(self._lost)
        if not gained and self._rejections() == self._rejected:
            gained = self.came  # of Objects that are on their way
        left = self._patient.deadline_at - asyncio.get_running_loop().time()
        if not may_come(self._octets(lost), gained, seconds, left):
            return False
        _log.info("recovery_goes_on", octets=gained, seconds=seconds)
        return True

    def _octets(self, runs: Iterable[tuple[DataTrack, Location, Location]]) -> int:
        """Octets of what is missing in some runs."""
        ledger = self._patient.ledger
        return sum(
            ledger.lane(track).layout.octets * (end.object - start.object + 1)
            for track, first, last in runs
            for start, end in missing(ledger, track, Span(first, last))
        )

    def _rejections(self) -> int:
        return sum(self._patient.ledger.counters.rejected.values())

"""What recovery needs of the retrieval that it works for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvcs.errors import KvcsError
from kvcs.fallback.means import LastMeans
from kvcs.kv import DataTrack, Ledger
from kvcs.moqt import events
from kvcs.moqt.names import TrackNamespace
from kvcs.quic.connection import Connection


class RecoverySettings(Protocol):
    """The numbers that recovery goes by."""

    @property
    def retry_pause(self) -> float:
        """Seconds before the second try."""

    @property
    def quiet(self) -> float:
        """Seconds of silence after which another publication is given up, at first."""

    @property
    def subscriber_priority(self) -> int:
        """SUBSCRIBER_PRIORITY of its fetches."""

    def recovery(self, tokens: int) -> float:
        """Seconds from the first known loss to the end of trying."""


FetchEnd = Callable[[str | None], None]
"""Told once how a FETCH ended: None where its stream had its FIN, else what went wrong."""


class Receiver(Protocol):
    """Takes the events of a FETCH of one data track."""

    octets: int
    """Payload octets so far."""

    taken: int
    """Objects that it brought."""

    def drop(self) -> None:
        """Give up what is on its way."""

    def take(self, event: events.Event, on_fetch_end: FetchEnd | None = None) -> None:
        """One event; ``on_fetch_end`` is told how the FETCH's stream ended."""


class Replacer(Protocol):
    """Takes whole segments from another publication, where that may be."""

    async def over(
        self, connection: Connection, segments: Sequence[int], seconds: float
    ) -> str | None:
        """Take segments that lack something; why not all of them, if anything is to be told.

        Args:
            connection: the session that is asked.
            segments: their numbers.
            seconds: how long that may take.
        """

    def confirm(self) -> None:
        """Complete segments that are here by the word of a publication with the very same."""

    @property
    def may_still_come(self) -> bool:
        """Whether another publication is still produced that what lacks may come from."""


class Patient(Protocol):
    """The retrieval that recovery works for."""

    namespace: TrackNamespace
    deadline_at: float
    """When it fails in any case, in the loop's clock."""

    @property
    def connection(self) -> Connection:
        """The session that serves it."""

    @property
    def sources(self) -> list[Connection]:
        """Sessions that may have what lacks; the one that serves it is the first."""

    @property
    def ledger(self) -> Ledger:
        """What is owed and what is verified."""

    def receiver(
        self, track: DataTrack, connection: Connection, *, beside: bool = False
    ) -> Receiver:
        """Receiver of a data track for a FETCH over one of the sources.

        Args:
            track: the data track.
            connection: the source.
            beside: whether it is a FETCH of another publication.
        """

    async def twins(self, connection: Connection) -> list[TrackNamespace]:
        """Other publications there whose Objects are the very same octets."""

    @property
    def replacements(self) -> Replacer:
        """Takes whole segments from publications whose Objects are others."""

    def comes_of_itself(self, track: DataTrack) -> bool:
        """Whether Objects of a track that were not published yet will come unasked."""

    @property
    def last_means(self) -> LastMeans | None:
        """What is left where no session brings it."""

    def recovered(self) -> None:
        """All that was lost is there."""

    def recovery_failed(self, reason: str, cause: KvcsError | None = None) -> None:
        """The time is up, or nothing is left to try."""

"""When a retrieval goes on without a session."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvcs.errors import ConnectionClosed, KvcsError, PublicationAborted, RequestError
from kvcs.recovery import SESSIONS_SHARE, Recovery
from kvcs.subscriber.last_means import LastMeans
from kvcs.subscriber.settings import SubscriberSettings

if TYPE_CHECKING:
    from kvcs.subscriber.retrieval import Retrieval


class Alone:
    """Decides when one retrieval asks elsewhere for all that lacks.

    Args:
        retrieval: the retrieval.
        recovery: its recovery.
        means: what is left without sessions; None where nothing is.
        settings: waits.
    """

    def __init__(
        self,
        retrieval: Retrieval,
        recovery: Recovery,
        means: LastMeans | None,
        settings: SubscriberSettings,
    ) -> None:
        self.means = means
        """What is left without sessions."""
        self._retrieval = retrieval
        self._recovery = recovery
        self._settings = settings
        self._for_good = False
        self._timer: asyncio.TimerHandle | None = None
        if means is not None:
            means.serve(retrieval)

    @property
    def fetched(self) -> int:
        """Objects that came another way than over sessions."""
        return 0 if self.means is None else self.means.fetched

    @property
    def has_recomputed(self) -> bool:
        """Whether the caller has recomputed anything."""
        return self.means is not None and self.means.used_recompute

    def wait(self) -> None:
        """The session is lost, and another one may come: in its share of the time, or too late."""
        if self.means is None or self._timer is not None:
            return
        ledger = self._retrieval.ledger
        seconds = self._settings.recovery(ledger.blocks * ledger.descriptor.block_tokens)
        self._timer = asyncio.get_running_loop().call_later(
            seconds * SESSIONS_SHARE, self._nothing_came
        )

    def stop(self) -> None:
        """Another session has come, or nothing is wanted any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def takes_over(self, error: KvcsError) -> bool:
        """Whether what no session brings any more can be got, or computed, without."""
        if self.means is None:
            return False
        if isinstance(error, PublicationAborted):
            # What its producer has given up is nowhere else.
            if not self.means.can_recompute:
                return False
        elif not isinstance(error, ConnectionClosed | RequestError):
            return False
        if self._for_good:
            return True
        self._for_good = True
        self.stop()
        self._retrieval.passage.close()
        self._recovery.go_alone(self._retrieval.ledger.tracks, str(error), bounded=True)
        return True

    def _nothing_came(self) -> None:
        self._timer = None
        retrieval = self._retrieval
        if not retrieval.is_over and retrieval.passage.moving:
            # Bounded by the deadline alone: a session may come yet.
            tracks, reason = retrieval.ledger.tracks, "no session came in time"
            self._recovery.go_alone(tracks, reason, bounded=False)

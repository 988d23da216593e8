"""While nothing comes of a publication, or too little, others of the same prefix are looked at.

A publication may be broken, and say so or not: its producer stands still, or dribbles, or leaves
out what its manifest lists. Another one that was still produced when ours was chosen may be whole
before the deadline. What may be taken from it is what KVCS "Verification and Recovery" allows:
single Objects where both are deterministic, else whole segments while nothing was handed out.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvcs.errors import ConnectionClosed, KvcsError, StoreFull
from kvcs.quic.connection import Connection
from kvcs.quic.namespaces import NamespaceWatch
from kvcs.recovery import Recovery, may_come
from kvcs.subscriber.others import Other, are_twins, same_tokens
from kvcs.subscriber.settings import SubscriberSettings

if TYPE_CHECKING:
    from kvcs.subscriber.retrieval import Retrieval


class Rivals:
    """Other publications that one retrieval may yet be completed from.

    Args:
        retrieval: the retrieval.
        recovery: its recovery.
        settings: `quiet` is how long nothing comes, or too little, before others are looked at, and
            from one look to the next.
    """

    def __init__(
        self, retrieval: Retrieval, recovery: Recovery, settings: SubscriberSettings
    ) -> None:
        self._retrieval = retrieval
        self._recovery = recovery
        self._quiet = settings.quiet
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._seen: int | None = None
        """Tensor octets that were here at the last look."""
        self._watches: dict[Connection, NamespaceWatch] = {}

    def start(self) -> None:
        """Look from now on, from time to time."""
        if self._retrieval.finder is not None and not self._retrieval.is_over:
            self._timer = asyncio.get_running_loop().call_later(self._quiet, self._passed)

    def stop(self) -> None:
        """Nothing more is wanted."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            self._task.cancel()
            self._task = None
        for connection, watch in self._watches.items():
            connection.namespaces.release(watch)
        self._watches.clear()

    @property
    def promise(self) -> bool:
        """Whether one is still produced, as far as is known, that may complete ours in time; also
        while it is being looked which there are."""
        finder = self._retrieval.finder
        if finder is None or not self._may_take():
            return False
        return finder.looking or any(map(self._is_promising, finder.known()))

    def blame(self, error: KvcsError) -> None:
        """The retrieval has failed: the next one takes others first, if the publication is why."""
        retrieval = self._retrieval
        if retrieval.finder is None or isinstance(error.__cause__, ConnectionClosed | StoreFull):
            return  # the session is why, or that nobody drops layers
        if asyncio.get_running_loop().time() < retrieval.deadline_at:  # else the path may be slow
            retrieval.finder.let_down(retrieval.namespace)

    def _may_take(self) -> bool:
        return not self._retrieval.handed_out or self._retrieval.may_have_twins

    def _is_promising(self, other: Other) -> bool:
        retrieval = self._retrieval
        ours, theirs = retrieval.manifest, other.manifest
        lacking = {run.segment for run in retrieval.ledger.missing()}
        growing = [
            number
            for number in lacking
            if same_tokens(ours, theirs, number) and not theirs.segments[number].complete
        ]
        if not growing:
            return False
        if retrieval.may_have_twins and are_twins(ours, theirs):
            return True
        return not retrieval.handed_out and retrieval.replacements.may_be_of_use(other)

    # Inner workings

    def _passed(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._quiet, self._passed)
        retrieval = self._retrieval
        if self._comes_in_time() or self._task is not None:
            return
        if not retrieval.passage.moving and self._may_take():
            self._task = asyncio.get_running_loop().create_task(self._look())

    def _comes_in_time(self) -> bool:
        """Whether what has come since the last look is enough to end by the deadline: the rate seen
        may grow, by as much as recovery hopes for."""
        retrieval, ledger = self._retrieval, self._retrieval.ledger
        before, self._seen = self._seen, ledger.octets_here
        if before is None:
            return True
        each_layer = sum(ledger.lane(track).octets for track in ledger.tracks)
        owed = each_layer * len(ledger.layers) - self._seen
        left = retrieval.deadline_at - asyncio.get_running_loop().time()
        return may_come(owed, self._seen - before, self._quiet, left)

    async def _look(self) -> None:
        try:
            for source in self._retrieval.sources:
                # It may be over, and this one cancelled, without a wait in between.
                if not self._retrieval.is_over and self._has_others(source):
                    await self._recovery.from_others(source)
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    def _has_others(self, source: Connection) -> bool:
        """Whether a session announces any: then their manifests are worth a look."""
        namespace = self._retrieval.namespace
        watch = self._watches.get(source)
        if watch is None or watch.error is not None:
            watch = self._watches[source] = source.namespaces.watch(namespace[:-1])
        return any(each != namespace for each in watch.namespaces)

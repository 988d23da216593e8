"""The consumers' hosts of one run: their sessions, and the readers on them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import kvcs
from tests.simulation.retrievals.content import KEYS, RING, STRANGE_KEYS
from tests.simulation.retrievals.means import VirtualSource
from tests.simulation.retrievals.plan import ReaderPlan
from tests.simulation.retrievals.retrieving import Retrieving
from tests.simulation.retrievals.stage import PORT, Stage


class Consumers:
    """Everybody who retrieves.

    Args:
        stage: where they stand.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def play(self, name: str) -> None:
        """All retrievals of a host, over its own sessions."""
        with self._stage.network.host(name):
            async with AsyncExitStack() as stack:
                sessions: dict[int, kvcs.Connection] = {}
                failure: kvcs.KvcsError | None = None
                for middle, listens in enumerate(self._stage.plan.middles):
                    url = f"moqt://{listens}:{PORT}"
                    try:
                        sessions[middle] = await stack.enter_async_context(kvcs.connect(url))
                    except kvcs.KvcsError as exc:
                        failure = exc
                readers: dict[int, kvcs.Subscriber | kvcs.KvcsError] = {}
                for number, each in enumerate(self._stage.plan.readers):
                    if each.host == name:
                        readers[number] = self._reader(number, each, sessions, failure)
                await asyncio.gather(
                    *(
                        Retrieving(self._stage, each).account_for(readers[each.reader])
                        for each in self._stage.plan.retrievals
                        if each.reader in readers
                    )
                )

    def _reader(
        self,
        number: int,
        plan: ReaderPlan,
        sessions: dict[int, kvcs.Connection],
        failure: kvcs.KvcsError | None,
    ) -> kvcs.Subscriber | kvcs.KvcsError:
        source = None
        if plan.source is not None:
            chance = self._stage.network.randomness(f"source {number}")
            source = VirtualSource(plan.source, self._stage.shelf, chance)
        at = [sessions[each] for each in plan.middles if each in sessions]
        if not plan.sessions:
            at = []
        if not at and source is None:
            assert failure is not None  # it has a session, or it says why not
            return failure
        keys = (STRANGE_KEYS if plan.strange else KEYS) if plan.verifies else None
        return kvcs.Subscriber(
            *at,
            settings=kvcs.SubscriberSettings(least_recovery=plan.recovery),
            keys=keys,
            require_signed=plan.required,
            protection=RING if plan.opens else None,
            fallback=source,
        )

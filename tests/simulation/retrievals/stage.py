"""What everybody in one run shares."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Final

from kvcs.kv.tracks import PublicationNamespace
from kvcs.testing.network import Network, Trace
from tests.simulation.retrievals.content import Context
from tests.simulation.retrievals.means import Saved
from tests.simulation.retrievals.outcome import Outcome
from tests.simulation.retrievals.plan import RetrievalsPlan

PORT: Final = 4433
"""Where relays and servers listen."""


class Stage:
    """The network of one run, what is published on it, and what comes of it. Made in its loop.

    Args:
        plan: the plan.
        outcome: takes what comes of it.
        trace: where the events go.
    """

    def __init__(self, plan: RetrievalsPlan, outcome: Outcome, trace: Trace) -> None:
        self.plan = plan
        self.outcome = outcome
        self.context = Context(plan)
        self.random = Random(f"world {plan.seed}")
        self.shelf: dict[PublicationNamespace, Saved] = {}
        """What the sources have."""
        self.named: dict[bytes, int] = {}
        """Which publication has a Publication ID."""
        self.network = Network(plan.seed, trace=trace)
        for name, conditions in plan.conditions.items():
            for middle in plan.middles:
                if name != middle:
                    self.network.connect(name, middle, conditions)
        loop = asyncio.get_running_loop()
        self.announced: list[asyncio.Future[PublicationNamespace | None]] = [
            loop.create_future() for _ in plan.publications
        ]
        """The name of each publication; None where it never got one."""
        self.consumed = asyncio.Event()
        """Set once every consumer has left."""

    def problem(self, text: str) -> None:
        """A rule was broken that has no list of its own."""
        self.outcome.problems.append(text)

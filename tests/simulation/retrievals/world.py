"""Runs many retrievals on one virtual network, and holds each to what must always be true."""

from __future__ import annotations

import asyncio
from typing import Final
from unittest import mock

import kvcs
from kvcs.testing.network import Trace, VirtualTimeError, leftovers, run
from tests.simulation.faults import strike, text_of
from tests.simulation.retrievals.consumers import Consumers
from tests.simulation.retrievals.content import with_codec
from tests.simulation.retrievals.outcome import Outcome
from tests.simulation.retrievals.plan import RetrievalsPlan
from tests.simulation.retrievals.producers import Planned, Producers, drawing
from tests.simulation.retrievals.relays import Relays
from tests.simulation.retrievals.stage import Stage

LIMIT: Final = 3600.0
"""Virtual seconds of a whole run."""

SETTLE: Final = 12.0
"""Seconds after the end in which every packet under way has arrived."""


def simulate(plan: RetrievalsPlan, trace: Trace | None = None) -> Outcome:
    """Run a plan.

    Args:
        plan: the plan.
        trace: where the events go.
    """
    outcome = Outcome(plan)
    trace = Trace() if trace is None else trace
    with_codec()
    try:
        # What is sealed gets its Publication ID from here, whatever the settings say.
        with mock.patch("kvcs.publisher.publication.secrets") as secrets:
            secrets.token_bytes = lambda octets: drawing.get()(octets)
            run(_main(plan, outcome, trace), limit=LIMIT)
    except VirtualTimeError as exc:
        outcome.hangs.append(str(exc))
    except Exception as exc:
        outcome.problems.append(f"the run failed: {text_of(exc)}")
    outcome.digest, outcome.events = trace.digest, trace.events
    return outcome


async def _main(plan: RetrievalsPlan, outcome: Outcome, trace: Trace) -> None:
    stage = Stage(plan, outcome, trace)
    relays = Relays(stage)
    async with relays.running():
        await _play(stage, relays)
    await asyncio.sleep(SETTLE)
    outcome.problems += leftovers(stage.network)


async def _play(stage: Stage, relays: Relays) -> None:
    """Everybody at once; the producers may leave once the consumers have."""
    plan, producers, consumers = stage.plan, Producers(stage), Consumers(stage)
    publishing = [
        asyncio.create_task(producers.play(number), name=each.name)
        for number, each in enumerate(plan.publications)
    ]
    faults = [
        asyncio.create_task(strike(stage.network, each, plan.middles, relays.restart_any))
        for each in plan.faults
    ]
    if plan.rot is not None:
        faults.append(asyncio.create_task(relays.rot(plan.rot)))
    for failed in await asyncio.gather(
        *(consumers.play(name) for name in plan.hosts), return_exceptions=True
    ):
        if isinstance(failed, BaseException):
            stage.problem(f"a consumer's host ended with {text_of(failed)}")
    stage.consumed.set()
    for failed in await asyncio.gather(*faults, return_exceptions=True):
        if isinstance(failed, BaseException):
            stage.problem(f"a fault ended with {text_of(failed)}")
    ends = await asyncio.gather(*publishing, return_exceptions=True)
    for each, ended in zip(plan.publications, ends, strict=True):
        if isinstance(ended, BaseException) and not isinstance(
            ended, kvcs.KvcsError | asyncio.CancelledError | Planned
        ):
            stage.problem(f"{each.name} ended with {text_of(ended)}")

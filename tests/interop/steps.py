"""Several steps of one scenario: they share a driver and a relay, and each fails for itself.

To start a driver and a relay takes longer than most exchanges that are worth a test.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tests.interop.scenario import Stage

AT_A_TIME = 2
"""Steps that run side by side: much of each is waiting."""

FAILED = "failed"

Step = Callable[[], Awaitable[dict[str, Any]]]


async def perform(stage: Stage, steps: Mapping[str, Step]) -> dict[str, dict[str, Any]]:
    """Run ``steps``, a few at a time; one that raises leaves its reason in place of a result."""
    results = {}
    free = asyncio.Semaphore(AT_A_TIME)

    async def run(name: str, step: Step) -> None:
        async with free:
            try:
                results[name] = await step()
            except Exception:
                results[name] = {FAILED: f"{traceback.format_exc()}\n{stage.transcript()}"}

    async with asyncio.TaskGroup() as tasks:
        for name, step in steps.items():
            tasks.create_task(run(name, step))
    return results


def result(results: Mapping[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return what the step ``name`` returned.

    Raises:
        AssertionError: If it raised; the text says what, and what each program said.
    """
    seen = results[name]
    assert FAILED not in seen, seen[FAILED]
    return seen

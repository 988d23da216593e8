"""Several steps of one scenario: they share a driver and a relay, and each fails for itself.

To start a driver and a relay takes longer than most exchanges that are worth a test.
"""

import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tests.interop.scenario import Stage

FAILED = "failed"


async def perform(
    stage: Stage, steps: Mapping[str, Callable[[], Awaitable[dict[str, Any]]]]
) -> dict[str, dict[str, Any]]:
    """Run ``steps`` one after the other; one that raises leaves its reason in place of a result."""
    results = {}
    for name, step in steps.items():
        try:
            results[name] = await step()
        except Exception:
            results[name] = {FAILED: f"{traceback.format_exc()}\n{stage.transcript()}"}
    return results


def result(results: Mapping[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return what the step ``name`` returned.

    Raises:
        AssertionError: If it raised; the text says what, and what each program said.
    """
    seen = results[name]
    assert FAILED not in seen, seen[FAILED]
    return seen

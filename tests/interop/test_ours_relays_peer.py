"""The peer's interop client against our relay: it must pass every case."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.interop import relays, their_client
from tests.interop.steps import result

Run = Callable[..., Any]
Results = dict[str, dict[str, Any]]

REQUIRED = (
    "setup-only",
    "announce-only",
    "publish-namespace-done",
    "subscribe-error",
    "rendezvous-timeout",
    "announce-subscribe",
    "subscribe-before-announce",
    "data-subgroup-basic",
    "subscribe-namespace-lifecycle",
    "namespace-discovery",
    "publish-track-only",
    "publish-track-subscribe",
    "fetch",
    "join",
)


@pytest.fixture(scope="module")
def seen(run: Run) -> Results:
    """What came of every case."""
    results: Results = run(their_client.interop_client, whose=relays.OURS, cases=list(REQUIRED))
    return results


@pytest.mark.parametrize("case", REQUIRED)
def test_its_client_passes(seen: Results, case: str) -> None:
    got = result(seen, case)
    assert got["passed"], got["message"]
    assert got["exit"] == 0

"""The peer's interop client against our relay: it must pass what needs no PUBLISH."""

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
    "fetch",
    "join",
)

PUBLISHING = "publish-track-only"
"""Its three other cases begin with PUBLISH, which our relay refuses: KVCS has no use for it."""

NOT_SUPPORTED = "code=3 "


@pytest.fixture(scope="module")
def seen(run: Run) -> Results:
    """What came of every case."""
    cases = [*REQUIRED, PUBLISHING]
    results: Results = run(their_client.interop_client, whose=relays.OURS, cases=cases)
    return results


@pytest.mark.parametrize("case", REQUIRED)
def test_its_client_passes(seen: Results, case: str) -> None:
    got = result(seen, case)
    assert got["passed"], got["message"]
    assert got["exit"] == 0


def test_its_publish_is_refused_as_not_supported(seen: Results) -> None:
    assert NOT_SUPPORTED in result(seen, PUBLISHING)["message"]

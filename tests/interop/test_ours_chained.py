"""Chains in which the peer's relay is one of two hops: every layer bit-exact, on either side."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.interop import chains, publications, relays
from tests.interop.steps import result

Run = Callable[..., Any]
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=[relays.PEERS, relays.OURS])
def seen(run: Run, request: pytest.FixtureRequest) -> Results:
    """What came of every step; the producer is at the relay of the one who is named."""
    results: Results = run(chains.everything, upper=request.param)
    return results


def check(got: dict[str, Any], number: int, layers: range | None = None) -> None:
    """Hold a retrieval to what was published."""
    source = publications.small(number)
    assert got["digests"] == publications.expected_layers(source, layers)
    assert got["rejected"] == {}
    # The peer's relay sends the current group twice to the first who joins.
    assert got["duplicates"] <= 2 * source.prefix.blocks


def test_layers_come_while_they_are_produced(seen: Results) -> None:
    check(result(seen, "while_produced"), 0)


def test_consumers_come_after_the_end(seen: Results) -> None:
    got = result(seen, "afterwards")
    check(got["late"], 1)
    check(got["again"], 1)


def test_some_layers_are_fetched(seen: Results) -> None:
    check(result(seen, "afterwards")["fetched"], 1, range(1, 4))

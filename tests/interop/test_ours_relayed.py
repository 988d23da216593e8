"""Our publisher and our subscriber through a relay: every layer bit-exact, each object once."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.interop import ours, publications, relays
from tests.interop.publications import Source
from tests.interop.steps import result

Run = Callable[..., Any]
Results = dict[str, dict[str, Any]]

RELAYS = [relays.PEERS, relays.OURS]


@pytest.fixture(scope="module", params=RELAYS)
def whose(request: pytest.FixtureRequest) -> str:
    """Whose relay is in between."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def seen(run: Run, whose: str) -> Results:
    """What came of every step."""
    results: Results = run(ours.everything, whose=whose)
    return results


def source(step: Callable[..., Any]) -> Source:
    """What a step has published."""
    return publications.small(ours.STEPS.index(step))


def check(seen: dict[str, Any], source: Source, *, twice: bool = False) -> None:
    """Hold a whole retrieval to what was published.

    Args:
        twice: the current group may come twice, as it does through a cold relay of the peer.
    """
    assert seen["digests"] == publications.expected_layers(source)
    assert seen["objects"] == source.objects
    assert seen["rejected"] == {}
    assert seen["refetches"] == 0
    assert seen["duplicates"] <= (2 * source.prefix.blocks if twice else 0), seen


def test_layers_come_while_they_are_produced(seen: Results, whose: str) -> None:
    check(result(seen, "live"), source(ours.live), twice=whose == relays.PEERS)


def test_passes_of_a_chunked_prefill_meet_in_each_layer(seen: Results, whose: str) -> None:
    got = result(seen, "chunked")
    assert got["tracks"] == ["k.raw.s0", "v.raw.s0", "k.raw.s1", "v.raw.s1"]
    check(got, source(ours.chunked), twice=whose == relays.PEERS)


def test_three_consumers_join_whenever_they_like(seen: Results, whose: str) -> None:
    got = result(seen, "joins")
    check(got["start"], source(ours.joins), twice=whose == relays.PEERS)
    check(got["middle"], source(ours.joins))
    check(got["late"], source(ours.joins))


def test_a_cold_relay_is_joined_in_the_middle(seen: Results, whose: str) -> None:
    check(result(seen, "cold_middle"), source(ours.cold_middle), twice=whose == relays.PEERS)


def test_a_consumer_comes_after_the_end(seen: Results, whose: str) -> None:
    got = result(seen, "cold_late")
    check(got["cold"], source(ours.cold_late), twice=whose == relays.PEERS)
    check(got["warm"], source(ours.cold_late))


def test_layers_and_blocks_are_fetched_alone(seen: Results, whose: str) -> None:
    published = source(ours.fetch)
    first, last = ours.FETCHED_LAYERS
    layers, blocks = range(first, last + 1), ours.FETCHED_BLOCKS
    payloads = publications.expected_tree(published)
    octets = sum(
        len(payloads[track][layer, block])
        for track in payloads
        for layer in layers
        for block in range(blocks)
    )
    for which in ("cold", "warm"):
        got = result(seen, "fetch")[which]
        assert got["digests"] == publications.expected_layers(published, layers, blocks)
        assert got["objects"] == 2 * len(layers) * blocks
        assert got["octets"] == octets, "the relay must apply OBJECTID_FILTER"
        assert got["duplicates"] == got["refetches"] == 0
    check(result(seen, "fetch")["everything"], published)


@pytest.mark.parametrize("name", publications.real_names())
def test_a_real_cache_reaches_three_consumers(seen: Results, whose: str, name: str) -> None:
    got, cache = result(seen, name), publications.real(name)
    check(got["start"], cache, twice=whose == relays.PEERS)
    check(got["middle"], cache)
    check(got["late"], cache)

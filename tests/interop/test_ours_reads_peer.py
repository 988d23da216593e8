"""Our subscriber reads the peer's publisher: every layer bit-exact, or a typed error in time."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.interop import publications, relays, their_publisher
from tests.interop.publications import Source
from tests.interop.steps import result

Run = Callable[..., Any]
Results = dict[str, dict[str, Any]]

VIAS = [relays.DIRECT, relays.PEERS, relays.OURS]
BOUND_SECONDS = 15.0
"""For recovery to give up, on a busy machine; below the deadline of the retrieval."""


@pytest.fixture(scope="module", params=VIAS)
def via(request: pytest.FixtureRequest) -> str:
    """What is between the peer's publisher and us."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def seen(run: Run, via: str) -> Results:
    """What came of every step."""
    results: Results = run(their_publisher.everything, via=via)
    return results


def source(step: Callable[..., Any]) -> Source:
    """What a step has published."""
    return publications.small(their_publisher.STEPS.index(step))


def check(seen: dict[str, Any], source: Source, via: str) -> None:
    """Hold a whole retrieval to what was published."""
    assert seen["digests"] == publications.expected_layers(source)
    assert seen["objects"] == source.objects
    assert seen["rejected"] == {}
    assert seen["refetches"] == 0
    # A cold join through the peer's relay brings the current group twice.
    assert seen["duplicates"] <= (2 * source.prefix.blocks if via == relays.PEERS else 0), seen


def test_we_follow_its_production_from_the_start(seen: Results, via: str) -> None:
    got = result(seen, "live")
    check(got, source(their_publisher.live), via)
    assert got["manifest_versions"] > 1


def test_we_join_inside_a_layer(seen: Results, via: str) -> None:
    check(result(seen, "middle"), source(their_publisher.middle), via)


def test_we_come_after_the_end(seen: Results, via: str) -> None:
    check(result(seen, "late"), source(their_publisher.late), via)


def test_we_fetch_layers_and_blocks(seen: Results) -> None:
    got = result(seen, "fetch")
    published = source(their_publisher.fetch)
    first, last = their_publisher.FETCHED_LAYERS
    layers, blocks = range(first, last + 1), their_publisher.FETCHED_BLOCKS
    assert got["digests"] == publications.expected_layers(published, layers, blocks)
    assert got["objects"] == 2 * len(layers) * blocks
    assert got["duplicates"] == got["refetches"] == 0
    # Blocks that were not wanted were not sent: both the peer's publisher and its relay filter.
    payloads = publications.expected_tree(published)
    wanted = [(layer, block) for layer in layers for block in range(blocks)]
    assert got["octets"] == sum(len(payloads[track][at]) for track in payloads for at in wanted)


def test_tracks_that_end_too_early_are_told_in_time(seen: Results) -> None:
    got = result(seen, "done_early")
    half = publications.LAYERS // 2
    assert got["layers"] == list(range(half))
    assert got["error"] == "CacheIncomplete"
    assert got["missing"] == list(range(half, publications.LAYERS))
    assert got["tokens"] == 0
    assert got["seconds"] < BOUND_SECONDS


def test_a_publisher_that_goes_away_is_told_by_the_deadline(seen: Results, via: str) -> None:
    got = result(seen, "gone")
    assert got["layers"] == list(range(publications.LAYERS // 2))
    assert got["error"] == "CacheIncomplete"
    # The peer's relay calls it the end of the track. A publisher that is lost may come back.
    bound = BOUND_SECONDS + (0 if via == relays.PEERS else their_publisher.GONE_DEADLINE_SECONDS)
    assert got["seconds"] < bound


@pytest.mark.parametrize("name", publications.real_names())
def test_we_read_a_real_cache(seen: Results, via: str, name: str) -> None:
    check(result(seen, name), publications.real(name), via)

"""Our session with a relay: SETUP, announce, discover, subscribe with a fill, receive, fetch."""

from collections.abc import Callable
from typing import Any

import pytest

from kvcs.moqt.names import Location
from kvcs.testing.tracks import payload
from tests.interop import relays, smoke
from tests.interop.alone import NAMESPACE

Run = Callable[..., Any]

PUBLISHED = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
DOES_NOT_EXIST, TRACK_ENDED = 0x10, 0x2
NO_APPLICATION_PROTOCOL = 0x178
"""TLS alert 120, as QUIC closes a connection with it."""


@pytest.fixture(scope="module", params=[relays.PEERS, relays.OURS])
def whose(request: pytest.FixtureRequest) -> str:
    """Whose relay is in between."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def seen(run: Run, whose: str) -> dict[str, Any]:
    """What we saw through it."""
    results: dict[str, Any] = run(smoke.exchange, whose=whose)
    return results


def expected(places: list[tuple[int, int]]) -> list[list[object]]:
    """``[group, object, priority, payload]`` of these Objects."""
    return [
        [group, number, smoke.PRIORITY, payload(Location(group, number), smoke.SIZE).hex()]
        for group, number in places
    ]


def test_setup_tells_that_range_filters_may_be_used(seen: dict[str, Any]) -> None:
    assert seen["filter ranges"] >= 1


def test_an_announced_namespace_is_discovered(seen: dict[str, Any]) -> None:
    assert seen["announced"] == [[field.hex() for field in NAMESPACE]]


def test_a_track_that_does_not_exist_is_refused(seen: dict[str, Any]) -> None:
    assert seen["refused"] == DOES_NOT_EXIST


def test_fill_and_subscription_bring_every_object(seen: dict[str, Any]) -> None:
    got = seen["subscription"]
    assert got["largest"] == [1, 0]
    assert got["objects"] == expected(PUBLISHED)
    assert got["properties"] == smoke.CACHE_MS
    assert got["ended"] == TRACK_ENDED


def test_track_status_tells_the_largest_object(seen: dict[str, Any], whose: str) -> None:
    assert seen.get("status") == ([3, 0] if whose == relays.OURS else None)


def test_a_fetch_brings_what_its_filters_let_pass_in_order(seen: dict[str, Any]) -> None:
    got = seen["fetch"]
    wanted = [(group, number) for group, number in PUBLISHED if number >= 1]
    assert got["order"] == [list(at) for at in wanted]
    assert got["objects"] == expected(wanted)
    assert tuple(got["end"]) >= PUBLISHED[-1]


def test_neither_session_was_closed(seen: dict[str, Any]) -> None:
    assert seen["open"] == [True, True]


def test_another_draft_is_refused_in_the_handshake(run: Run) -> None:
    seen = run(smoke.other_draft)
    assert "does not speak moqt-22" in seen["ours"]
    assert f"error_code={NO_APPLICATION_PROTOCOL}" in seen["theirs"]

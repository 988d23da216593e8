"""The peer agrees with itself. If it does not, the environment is broken, and not our code."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.interop import alone, objects

Run = Callable[..., Any]

CASES = {
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
}


def expected(groups: range = range(alone.GROUPS)) -> dict[str, list[list[object]]]:
    tree = objects.known_tree(
        alone.TRACKS, groups=alone.GROUPS, objects=alone.OBJECTS, size=alone.SIZE
    )
    return {
        track: objects.digests({at: data for at, data in payloads.items() if at[0] in groups})
        for track, payloads in tree.items()
    }


def received(seen: dict[str, Any], via: str) -> list[tuple[str, int, int]]:
    return sorted(
        (said["track"], said["group"], said["object"])
        for said in seen["events"]
        if said["event"] == "object" and said["via"] == via and said["status"] == 0
    )


def test_its_client_passes_every_case_with_its_relay(run: Run) -> None:
    seen = run(alone.interop_client)
    assert seen["cases"] == dict.fromkeys(CASES, True), seen["messages"]
    assert seen["exit"] == 0


@pytest.mark.parametrize("case", ["fetch", "join"])
def test_its_client_passes_the_cases_that_must_be_named(run: Run, case: str) -> None:
    seen = run(alone.interop_client, case=case)
    assert seen["cases"] == {case: True}, seen["messages"]


def test_a_live_subscriber_gets_every_object_from_the_subscription(run: Run) -> None:
    seen = run(alone.live)
    assert seen["saved"] == expected()
    assert received(seen, "fill") == []
    assert seen["exit"] == 0


def test_a_late_subscriber_gets_the_past_from_the_fill_and_the_rest_live(run: Run) -> None:
    seen = run(alone.join)
    assert seen["saved"] == expected()
    past = {(track, g, o) for track in alone.TRACKS for g in (0, 1) for o in range(3 - g)}
    assert past <= set(received(seen, "fill"))
    assert seen["exit"] == 0


def test_a_fetch_brings_exactly_the_groups_asked_for(run: Run) -> None:
    seen = run(alone.fetch)
    assert seen["saved"] == expected(range(1, 3))
    assert seen["exit"] == 0

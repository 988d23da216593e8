"""Our client does with a relay what the peer's interop client does, case by case."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.interop import our_cases, relays
from tests.interop.our_cases import GROUPS, OBJECTS, PRIORITY
from tests.interop.steps import result

Run = Callable[..., Any]
Results = dict[str, dict[str, Any]]

DOES_NOT_EXIST, TIMEOUT, TRACK_ENDED = 0x10, 0x2, 0x2
ALL = [[group, number, PRIORITY] for group in range(GROUPS) for number in range(OBJECTS)]


@pytest.fixture(scope="module", params=[relays.PEERS, relays.OURS])
def seen(run: Run, request: pytest.FixtureRequest) -> Results:
    """What came of every case."""
    results: Results = run(our_cases.everything, whose=request.param)
    return results


EXPECTED: dict[str, dict[str, Any]] = {
    "setup_only": {"options": True},
    "announce_only": {"ok": True},
    "publish_namespace_done": {"open": True},
    "subscribe_error": {"code": DOES_NOT_EXIST},
    "rendezvous_timeout": {"code": TIMEOUT},
    "announce_subscribe": {"ok": True},
    "data_subgroup_basic": {"ended": TRACK_ENDED, "objects": ALL},
    "subscribe_namespace_lifecycle": {
        "told": [["NamespaceAnnounced", 0], ["NamespaceWithdrawn", 0]]
    },
    "namespace_discovery": {"track": True, "ended": TRACK_ENDED},
    "publish_track_only": {"ok": True, "open": True},
    "publish_track_subscribe": {"ended": TRACK_ENDED, "objects": ALL},
    "fetch": {"ok": True, "objects": ALL[:OBJECTS]},
    "join": {"ended": TRACK_ENDED, "objects": ALL},
}


@pytest.mark.parametrize("case", EXPECTED)
def test_case(seen: Results, case: str) -> None:
    assert result(seen, case) == EXPECTED[case]


def test_a_subscribe_before_the_announcement_waits_or_is_refused(seen: Results) -> None:
    assert result(seen, "subscribe_before_announce")["code"] in (None, DOES_NOT_EXIST, TIMEOUT)


def test_every_case_has_its_mirror() -> None:
    names = {case.__name__ for case in our_cases.CASES}
    assert names == {*EXPECTED, "subscribe_before_announce"}
    assert len(names) == 14

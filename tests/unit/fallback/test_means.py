"""Which blocks are asked for elsewhere, and in which runs they are recomputed."""

from __future__ import annotations

from kvcs.errors import MissingBlocks
from kvcs.fallback.means import clipped
from kvcs.moqt.intervals import FIRST, LAST, LocationSet
from kvcs.moqt.names import Location
from kvcs.subscriber.last_means import MissingLayer, runs_of


def run(component: str, layer: int, first: int, last: int, *, offset: int = 0) -> MissingBlocks:
    """Blocks of 4 tokens in a segment that begins at block ``offset``."""
    tokens = ((offset + first) * 4, (offset + last + 1) * 4 - 1)
    return MissingBlocks(int(offset > 0), component, layer, first, last, *tokens)


def places(*ranges: tuple[Location, Location]) -> LocationSet:
    found = LocationSet()
    for first, last in ranges:
        found.add(first, last)
    return found


def test_only_what_was_lost_is_asked_for() -> None:
    missing = run("k", 2, 1, 6, offset=10)
    everything = places((FIRST, LAST))
    assert list(clipped(missing, everything, 4)) == [missing]
    some = places((Location(2, 0), Location(2, 2)), (Location(2, 5), Location(2, 5)))
    assert list(clipped(missing, some, 4)) == [
        run("k", 2, 1, 2, offset=10),
        run("k", 2, 5, 5, offset=10),
    ]
    assert list(clipped(missing, places((FIRST, Location(1, 99))), 4)) == []


def test_what_lacks_of_k_or_v_is_one_run_of_a_layer() -> None:
    missing = [run("v", 3, 0, 0), run("k", 1, 2, 3), run("v", 1, 3, 4), run("v", 1, 6, 6)]
    assert runs_of(missing, 4) == [
        MissingLayer(1, 2, 4, 8, 19),
        MissingLayer(1, 6, 6, 24, 27),
        MissingLayer(3, 0, 0, 0, 3),
    ]
    assert runs_of(missing, 4)[0].tokens == 12


def test_runs_go_on_over_the_border_of_segments() -> None:
    missing = [run("k", 0, 1, 1), run("k", 0, 0, 1, offset=2)]
    assert runs_of(missing, 4) == [MissingLayer(0, 1, 3, 4, 15)]

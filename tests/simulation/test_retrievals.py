"""Retrievals by the hundred, many on each network: whatever happens, each ends complete with the
right tensors, or says exactly what is missing, or is refused with a typed error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache

import pytest

from tests.simulation.retrievals.outcome import Outcome
from tests.simulation.retrievals.plan import draw
from tests.simulation.retrievals.tally import Tally
from tests.simulation.retrievals.world import simulate

RETRIEVALS = int(os.environ.get("KVCS_RETRIEVALS", "200"))
"""How many there are at least; ``scripts/simulate --retrievals 5000`` plays them all."""


def seeds_of(retrievals: int) -> list[int]:
    """Seeds of runs that have so many retrievals together."""
    found: list[int] = []
    while retrievals > 0:
        retrievals -= len(draw(len(found)).retrievals)
        found.append(len(found))
    return found


@cache
def played(seed: int) -> Outcome:
    """The run of a seed."""
    return simulate(draw(seed))


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """The sum of what came of them; it is printed in the end."""
    tally = Tally()
    yield tally
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("", *tally.lines(), sep="\n")


@pytest.mark.parametrize("seed", seeds_of(RETRIEVALS))
def test_every_retrieval_keeps_every_rule(seed: int, tally: Tally) -> None:
    outcome = played(seed)
    tally.add(outcome)
    assert outcome.broken == [], f"again: scripts/simulate --retrievals 1 --seed {seed}"
    assert set(outcome.ends) == {each.name for each in outcome.plan.retrievals}


@pytest.mark.parametrize("seed", [0, 2, 5])
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    one, other = played(seed), simulate(draw(seed))
    assert one.events > 100
    assert (one.digest, one.ends) == (other.digest, other.ends)


def test_plans_have_everything_in_them() -> None:
    plans = [draw(seed) for seed in range(300)]
    publications = [each for plan in plans for each in plan.publications]
    readers = [each for plan in plans for each in plan.readers]
    assert {plan.topology for plan in plans} == {"none", "one", "chain", "parallel"}
    ends = {"finish", "withdraw", "abort", "raise", "cancel", "vanish"}
    assert {each.end for each in publications} == ends
    assert {each.encodings for each in publications} >= {("raw",), ("squeeze",), ("raw", "kv.raw")}
    for what in ("deterministic", "signed", "sealed", "pad", "damaged", "saved"):
        assert {bool(getattr(each, what)) for each in publications} == {False, True}, what
    assert any(len(each.passes) > 1 for each in publications)
    for what in ("verifies", "strange", "required", "opens", "source", "sessions"):
        assert {bool(getattr(each, what)) for each in readers} == {False, True}, what
    assert sum(len(plan.retrievals) for plan in plans) > 4000

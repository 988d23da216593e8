"""Whole sessions by the hundred: every seed keeps every rule, and is the same run each time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcs.testing.network import Credentials
from tests.simulation.plan import draw
from tests.simulation.world import Outcome, credentials_in, simulate

ROOT = Path(__file__).resolve().parents[2]

RUNS = int(os.environ.get("KVCS_RUNS", "60"))
"""How many seeds are run; ``scripts/simulate --runs 2000`` runs them all."""

BATCH = 10
"""Seeds of one test: one of them is on aioquic."""


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return credentials_in(str(tmp_path_factory.mktemp("certificates")))


def simulated(seed: int, credentials: Credentials) -> Outcome:
    plan = draw(seed)
    return simulate(plan, credentials if plan.quic == "aioquic" else None)


@pytest.mark.parametrize("first", range(0, RUNS, BATCH))
def test_every_seed_keeps_every_rule(first: int, credentials: Credentials) -> None:
    broken = {}
    for seed in range(first, min(first + BATCH, RUNS)):
        problems = simulated(seed, credentials).problems
        if problems:
            broken[f"scripts/simulate --runs 1 --seed {seed}"] = problems
    assert broken == {}


@pytest.mark.parametrize("seed", [3, 12, 19, 59])
def test_the_same_seed_is_the_same_run(seed: int, credentials: Credentials) -> None:
    one, other = simulated(seed, credentials), simulated(seed, credentials)
    assert one.packets > 20
    assert (one.digest, one.ends, one.seconds) == (other.digest, other.ends, other.seconds)


def test_another_seed_is_another_run(credentials: Credentials) -> None:
    assert simulated(3, credentials).digest != simulated(4, credentials).digest


@pytest.mark.timeout(300)
def test_a_seed_is_the_same_run_in_every_process(credentials: Credentials) -> None:
    seeds = (5, 9)
    program = (
        "from tempfile import TemporaryDirectory\n"
        "from tests.simulation.plan import draw\n"
        "from tests.simulation.world import credentials_in, simulate\n"
        "with TemporaryDirectory() as folder:\n"
        "    files = credentials_in(folder)\n"
        f"    for seed in {seeds}:\n"
        "        plan = draw(seed)\n"
        "        print(simulate(plan, files if plan.quic == 'aioquic' else None).digest)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [simulated(seed, credentials).digest for seed in seeds]

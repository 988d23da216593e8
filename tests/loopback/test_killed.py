"""Kill -9 of relays, producers and consumers at random moments, in processes of their own."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.certificates import PemFiles
from tests.loopback.killing import VICTIMS, Cast, trial

KILLS = int(os.environ.get("KVCS_KILLS", "20"))
"""Trials; each seed is another one."""

BATCH = 10
"""Trials with the same processes, but for those that are killed."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, KILLS, BATCH))
def test_whoever_is_killed_nothing_is_wrong_and_nothing_hangs(files: PemFiles, first: int) -> None:
    killed: Counter[str] = Counter()
    with Cast(files) as cast:
        for seed in range(first, min(first + BATCH, KILLS)):
            try:
                victim, ends = trial(cast, seed)
            except AssertionError as exc:
                raise AssertionError(f"seed {seed}") from exc
            killed[victim] += 1
            print(f"seed {seed}: {victim}, {Counter(ends)}")
    assert set(killed) <= set(VICTIMS)

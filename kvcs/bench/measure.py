"""Runs groups: every round runs every case once, and begins with another one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvcs.bench.children import ChildFailed, Unavailable
from kvcs.bench.figures import Samples, rate_mb
from kvcs.bench.machine import facts
from kvcs.bench.plan import Group, Scale, in_turn
from kvcs.bench.result import Result
from kvcs.bench.transfer import Certificates
from kvcs.cli.certs import make_certificates

LOOPBACK: Final = "127.0.0.1"

Say = Callable[[str], None]


async def measure(groups: Sequence[Group], scale: Scale, say: Say) -> Result:
    """Measure every group.

    Args:
        groups: what to measure.
        scale: how much; its rounds go before those of the groups.
        say: is told how far it is.

    Raises:
        ChildFailed: a case failed, or took far too long; the message names it.
    """
    begun = time.monotonic()
    before = facts()
    result = Result(list(groups))
    with tempfile.TemporaryDirectory(prefix="kvcs-bench-") as folder:
        make_certificates(Path(folder) / "certs", (LOOPBACK,))
        certificates = Certificates(Path(folder) / "certs")
        for group in groups:
            samples = await _measure(group, group.rounds_of(scale), certificates, result, say)
            result.samples.update(samples)
    result.facts = {
        **before,
        "short": scale.short,
        "rounds": {group.name: group.rounds_of(scale) for group in groups},
        "seconds": round(time.monotonic() - begun),
    }
    return result


async def _measure(
    group: Group, rounds: int, certificates: Certificates, result: Result, say: Say
) -> Samples:
    samples: Samples = {}
    for number in range(rounds):
        for case in in_turn(group.cases, number):
            if case.name in result.skipped:
                continue
            where = f"{group.name}, round {number + 1}/{rounds}: {case.name}"
            try:
                sample = await case.run(certificates, number)
            except Unavailable as exc:
                result.skipped[case.name] = str(exc)
                say(f"{where}: skipped: {exc}")
                continue
            except ChildFailed as exc:
                raise ChildFailed(f"{case.name}: {exc}") from exc
            samples.setdefault(case.name, []).append(sample)
            say(f"{where}: {rate_mb([sample]).median:.1f} MB/s")
    return {case.name: samples[case.name] for case in group.cases if case.name in samples}

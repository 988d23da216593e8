"""Runs many seeds and prints the sum: ``python -m tests.simulation --runs 2000 --seed 0``.

With ``--retrievals 5000`` it plays runs of many retrievals each, until there were so many.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from tempfile import TemporaryDirectory

from kvcs.testing.network import Trace
from tests.simulation.plan import draw
from tests.simulation.retrievals import plan as retrievals_plan
from tests.simulation.retrievals import world as retrievals_world
from tests.simulation.retrievals.tally import Tally
from tests.simulation.world import Outcome, credentials_in, simulate


def main() -> int:
    """Run them; 1 when a run broke a rule."""
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--runs", type=int, default=2000, help="how many (2000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first (0)")
    parser.add_argument("--retrievals", type=int, help="play runs that hold so many instead")
    parser.add_argument("--quic", choices=["model", "aioquic"], help="carry all runs over this")
    parser.add_argument("--trace", action="store_true", help="print every event of each run")
    arguments = parser.parse_args()
    if arguments.retrievals is not None:
        return _retrieve(arguments.retrievals, arguments.seed, trace=arguments.trace)
    totals: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    took = {"model": 0.0, "aioquic": 0.0}
    runs = {"model": 0, "aioquic": 0}
    failed = 0
    with TemporaryDirectory() as folder:
        files = credentials_in(folder)
        for seed in range(arguments.seed, arguments.seed + arguments.runs):
            plan = draw(seed, arguments.quic)
            started = time.perf_counter()
            trace = Trace(keep=arguments.trace)
            outcome = simulate(plan, files if plan.quic == "aioquic" else None, trace)
            took[plan.quic] += time.perf_counter() - started
            runs[plan.quic] += 1
            ends.update(outcome.ends.values())
            totals.update(
                events=outcome.packets,
                objects=outcome.objects,
                duplicates=outcome.duplicates,
                refetches=outcome.refetches,
                virtual_seconds=round(outcome.seconds),
            )
            for line in trace.lines:
                print(line)
            if outcome.problems:
                failed += 1
                _report(outcome, arguments.quic)
    for quic, count in runs.items():
        if count:
            print(f"{quic}: {count} runs in {took[quic]:.1f} s, {count / took[quic]:.1f} a second")
    print("consumers:", ", ".join(f"{count} {end}" for end, count in ends.most_common()))
    print("sums:", ", ".join(f"{count} {name}" for name, count in totals.items()))
    print(f"{sum(runs.values())} runs, {failed} broke a rule")
    return 1 if failed else 0


def _retrieve(retrievals: int, seed: int, *, trace: bool) -> int:
    tally, started = Tally(), time.perf_counter()
    while tally.retrievals < retrievals:
        events = Trace(keep=trace)
        outcome = retrievals_world.simulate(retrievals_plan.draw(seed), events)
        tally.add(outcome)
        for line in events.lines:
            print(line)
        if outcome.broken:
            print(f"seed {seed} ({outcome.plan.topology}):")
            for problem in outcome.broken[:12]:
                print(f"    {problem[:600]}")
            print(f"    again: scripts/simulate --retrievals 1 --seed {seed}", flush=True)
        seed += 1
    print(*tally.lines(), sep="\n")
    print(f"in {time.perf_counter() - started:.1f} s")
    return 1 if tally.broken.total() else 0


def _report(outcome: Outcome, quic: str | None) -> None:
    plan = outcome.plan
    print(f"seed {plan.seed} ({plan.quic}, {plan.topology}):")
    for problem in outcome.problems[:12]:
        print(f"    {problem[:600]}")
    option = f" --quic {quic}" if quic else ""
    print(f"    again: scripts/simulate --runs 1 --seed {plan.seed}{option}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

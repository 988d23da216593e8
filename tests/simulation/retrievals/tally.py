"""The sum over many runs."""

from __future__ import annotations

from collections import Counter

from tests.simulation.retrievals.outcome import Outcome


class Tally:
    """How retrievals ended, over all runs."""

    def __init__(self) -> None:
        self.runs = 0
        self.ends: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self.objects = 0

    @property
    def retrievals(self) -> int:
        """How many there were."""
        return self.ends.total()

    def add(self, outcome: Outcome) -> None:
        """Count one run."""
        self.runs += 1
        self.objects += outcome.objects
        self.ends.update(outcome.ends.values())
        self.broken.update(
            {
                "wrong tensors": len(outcome.wrong),
                "hangs": len(outcome.hangs),
                "false completes": len(outcome.false),
                "inexact lists": len(outcome.lists),
                "other broken rules": len(outcome.problems),
            }
        )

    def lines(self) -> list[str]:
        """It, for people."""
        found = [
            f"{self.retrievals} retrievals in {self.runs} runs, {self.objects} Objects verified"
        ]
        for kind in ("complete", "incomplete", "refused"):
            ends = {end: count for end, count in self.ends.items() if end.startswith(kind)}
            names = ", ".join(
                f"{count} {end.removeprefix(kind + ': ')}"
                for end, count in sorted(ends.items(), key=lambda each: -each[1])
            )
            found.append(f"  {sum(ends.values())} {kind}" + (f" ({names})" if ends else ""))
        others = {
            end: count
            for end, count in self.ends.items()
            if not end.startswith(("complete", "incomplete", "refused"))
        }
        found.append("  others: " + ", ".join(f"{n} {end}" for end, n in others.items()))
        found.append("  " + ", ".join(f"{name} {count}" for name, count in self.broken.items()))
        return found

"""What was measured: as one JSON object of named ratios and figures, and as tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvcs.bench.figures import Ratio, Samples, Spread, figures
from kvcs.bench.plan import Group
from kvcs.bench.targets import TARGETS, Reached

DIGITS = 3
"""Of ratios in JSON."""


@dataclass(slots=True)
class Result:
    """Samples of some groups."""

    groups: list[Group]
    samples: Samples = field(default_factory=dict)
    """Of every case that was measured."""

    skipped: dict[str, str] = field(default_factory=dict)
    """Cases that could not be measured here, with the reason."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Of the machine, the software and the run."""

    def ratios(self) -> dict[str, Spread]:
        """Every ratio that the samples give, by name."""
        return {ratio.name: spread for _, ratio, spread in self.ratios_by_group()}

    def ratios_by_group(self) -> Iterator[tuple[Group, Ratio, Spread]]:
        """The same with the group that each belongs to."""
        for group in self.groups:
            for ratio in group.ratios:
                spread = ratio.of(self.samples)
                if spread is not None:
                    yield group, ratio, spread

    def reached(self) -> list[Reached]:
        """What was reached of each target whose ratio was measured."""
        spreads = self.ratios()
        found = [(target, target.spread(spreads)) for target in TARGETS]
        return [Reached(target, spread) for target, spread in found if spread is not None]

    def document(self) -> dict[str, Any]:
        """As JSON: ratios by name, their ranges, figures by case, targets, and facts."""
        spreads = self.ratios()
        return {
            "ratios": {name: round(spread.median, DIGITS) for name, spread in spreads.items()},
            "ranges": {
                name: [round(spread.least, DIGITS), round(spread.most, DIGITS)]
                for name, spread in spreads.items()
            },
            "targets": {each.target.name: each.to_json() for each in self.reached()},
            "figures": {name: figures(samples) for name, samples in self.samples.items()},
            "skipped": dict(self.skipped),
            "facts": self.facts,
        }

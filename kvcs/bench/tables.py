"""The result for people: Markdown, ratios first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kvcs.bench.figures import Sample, cpu_per_gb, peak_mb, rate_mb
from kvcs.bench.groups import GROUPS
from kvcs.bench.plan import Group
from kvcs.bench.result import Result
from kvcs.bench.targets import Reached

ROLES: Final = ("sender", "relay", "receiver")

TIMES: Final = (
    "first_layer_ms",
    "all_layers_ms",
    "first_layer_behind_ms",
    "median_layer_behind_ms",
)
"""What is shown of the times of layers."""


def report(result: Result) -> str:
    """Targets, ratios, figures, what was skipped, and what it was measured on."""
    parts = []
    reached = result.reached()
    if reached:
        parts.append(targets_table(reached))
    for group in result.groups:
        parts += group_tables(group, result)
    if result.skipped:
        parts.append("\n".join(f"skipped {name}: {why}" for name, why in result.skipped.items()))
    parts.append(", ".join(f"{name}: {_fact(value)}" for name, value in result.facts.items()))
    return "\n\n".join(parts)


def targets_table(reached: Sequence[Reached]) -> str:
    """What was reached of each target."""
    rows = [
        (
            each.target.name,
            f"{'<=' if each.target.at_most else '>='} {each.target.bound:g}",
            each.spread.text(2),
            "reached" if each.holds else "MISSED",
        )
        for each in reached
    ]
    return table(("target", "bound", "median [min-max]", "verdict"), rows)


def group_tables(group: Group, result: Result) -> list[str]:
    """Ratios of one group, then its figures."""
    parts = []
    ratios = [
        (_words(ratio.name), spread.text(2))
        for owner, ratio, spread in result.ratios_by_group()
        if owner is group
    ]
    if ratios:
        parts.append(table((f"{group.name}: ratios", "median [min-max]"), ratios))
    cases = [case for case in group.cases if case.name in result.samples]
    if cases:
        columns = (f"{group.name}: figures", "MB/s", "CPU s/GB", "peak MB", "layers, ms")
        rows = [_figures(case.label, result.samples[case.name]) for case in cases]
        keep = [n for n in range(len(columns)) if n < 2 or any(row[n] != "-" for row in rows)]
        parts.append(table([columns[n] for n in keep], [[row[n] for n in keep] for row in rows]))
    return parts


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def listing() -> list[Mapping[str, Any]]:
    """Every group, for ``--list``."""
    from kvcs.bench.plan import Scale

    return [
        {
            "group": name,
            "seconds": entry.seconds,
            "short_seconds": entry.short_seconds,
            "about": entry.make(Scale()).about,
        }
        for name, entry in GROUPS.items()
    ]


def _figures(label: str, samples: Sequence[Sample]) -> list[str]:
    """Cells of one case; roles are sender, relay and receiver, in this order."""
    roles = [role for role in ROLES if role in samples[0].processes]
    cpu = ", ".join(f"{cpu_per_gb(samples, role).median:.1f}" for role in roles)
    peak = ", ".join(f"{peak_mb(samples, role).median:.0f}" for role in roles)
    values = samples[0].values
    times = ", ".join(
        f"{name.removesuffix('_ms').replace('_', ' ')} {values[name]:.1f}"
        for name in TIMES
        if name in values
    )
    return [label, rate_mb(samples).text(1), cpu or "-", peak or "-", times or "-"]


def _fact(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={each}" for name, each in value.items())
    return str(value)


def _words(name: str) -> str:
    return name.replace("_over_", " / ").replace("_", " ")

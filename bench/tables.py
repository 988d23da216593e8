"""The result for people: Markdown, ratios first."""

from __future__ import annotations

from typing import Any, Final

from bench.figures import Samples, cpu_per_gb, peak_mb, rate_mb, ratios

ROLES: Final = ("sender", "relay", "receiver")

LABELS: Final = {
    "raw": "raw QUIC, same backend and settings",
    "direct": "kvcs, producer to consumer",
    "relay": "kvcs, producer to relay to consumer",
    "stock": "stock aioquic.asyncio",
}


def report(samples: Samples, facts: dict[str, Any]) -> str:
    """Ratios, figures, and what they were measured on."""
    lines = ["| goodput, times as fast | median [min-max] |", "|---|---|"]
    for name, spread in ratios(samples).items():
        lines.append(f"| {_words(name)} | {spread.text(2)} |")
    lines += [
        "",
        "| Objects | what | MB/s | CPU s/GB: sender, relay, receiver"
        " | peak MB: sender, relay, receiver |",
        "|---|---|---|---|---|",
    ]
    for (row, size), values in samples.items():
        cpu, peak = [], []
        for role in ROLES:
            if role in values[0].processes:
                cpu.append(f"{cpu_per_gb(values, role).median:.1f}")
                peak.append(f"{peak_mb(values, role).median:.0f}")
            else:
                cpu.append("-")
                peak.append("-")
        cells = (
            size.replace("KiB", " KiB") or "-",
            LABELS[row],
            rate_mb(values).text(1),
            ", ".join(cpu),
            ", ".join(peak),
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", ", ".join(f"{name}: {value}" for name, value in facts.items())]
    return "\n".join(lines)


def _words(name: str) -> str:
    return name.replace("_over_", " / ").replace("KiB", " KiB").replace("_", " ")

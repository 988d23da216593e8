"""The arithmetic: samples of single runs, their medians and extremes, and ratios within a round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

MB: Final = 1_000_000
GB: Final = 1_000_000_000

RATIOS: Final = (
    ("direct", "raw"),
    ("relay", "raw"),
    ("relay", "direct"),
    ("direct", "stock"),
    ("raw", "stock"),
)
"""Rows that are compared, each with what it is held against."""


@dataclass(frozen=True, slots=True)
class Process:
    """What one process took for one transfer."""

    cpu_seconds: float
    """User and system time between the start and the last octet."""

    peak_octets: int
    """Largest resident memory of its whole life."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One transfer."""

    octets: int
    """Object data that the receiver confirmed."""

    seconds: float
    """From the sender's start to the receiver's last octet."""

    processes: dict[str, Process]
    """By role: sender, relay, receiver."""

    objects_verified: int = 0
    """Objects whose digest the receiver has checked; 0 where there are no Objects."""

    digests_match: bool | None = None
    """Whether all tensors together have the sender's SHA-256; None where there are none."""

    @property
    def rate(self) -> float:
        """Octets per second."""
        return self.octets / self.seconds


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest of some measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        ordered = sorted(values)
        return cls(median(ordered), ordered[0], ordered[-1])

    def to_json(self, digits: int) -> dict[str, float]:
        """Rounded."""
        return {
            "median": round(self.median, digits),
            "min": round(self.least, digits),
            "max": round(self.most, digits),
        }

    def text(self, digits: int) -> str:
        """For people: median [min-max]."""
        return f"{self.median:.{digits}f} [{self.least:.{digits}f}-{self.most:.{digits}f}]"


Samples = dict[tuple[str, str], list[Sample]]
"""By row and size of Objects, one sample a round; the size is empty where a row has none."""


def named(row: str, size: str) -> str:
    """Name of a row's figures."""
    return f"{row}_{size}" if size else row


def ratio(samples: Sequence[Sample], others: Sequence[Sample]) -> Spread:
    """How many times as fast, round by round: both ran within a minute of each other."""
    return Spread.of(a.rate / b.rate for a, b in zip(samples, others, strict=True))


def ratios(samples: Samples) -> dict[str, Spread]:
    """Every ratio that the samples give, by name."""
    found: dict[str, Spread] = {}
    for row, other in RATIOS:
        for (measured, size), values in samples.items():
            against = samples.get((other, size), samples.get((other, "")))
            if measured == row and against is not None:
                found[f"{named(row, size)}_over_{other}"] = ratio(values, against)
    return found


def figures(samples: Samples) -> dict[str, dict[str, Any]]:
    """Every row's absolute figures, by name."""
    return {named(*key): _figures(values) for key, values in samples.items()}


def cpu_per_gb(samples: Sequence[Sample], role: str) -> Spread:
    """CPU seconds of one process for 10^9 octets of Object data."""
    return Spread.of(each.processes[role].cpu_seconds * GB / each.octets for each in samples)


def peak_mb(samples: Sequence[Sample], role: str) -> Spread:
    """Largest resident memory of one process, in 10^6 octets."""
    return Spread.of(each.processes[role].peak_octets / MB for each in samples)


def rate_mb(samples: Sequence[Sample]) -> Spread:
    """Object data per second, in 10^6 octets."""
    return Spread.of(each.rate / MB for each in samples)


def _figures(samples: Sequence[Sample]) -> dict[str, Any]:
    roles = list(samples[0].processes)
    first = samples[0]
    found: dict[str, Any] = {
        "mb_per_s": rate_mb(samples).to_json(1),
        "cpu_s_per_gb": {role: cpu_per_gb(samples, role).to_json(2) for role in roles},
        "peak_mb": {role: peak_mb(samples, role).to_json(0) for role in roles},
        "octets_confirmed": min(each.octets for each in samples),
    }
    if first.digests_match is not None:
        found["objects_verified"] = min(each.objects_verified for each in samples)
        found["digests_match"] = all(each.digests_match for each in samples)
    return found


def document(samples: Samples, facts: dict[str, Any]) -> dict[str, Any]:
    """The result as JSON: ratios by name, their ranges, figures, and what they were measured on."""
    spreads = ratios(samples)
    return {
        "ratios": {name: round(spread.median, 3) for name, spread in spreads.items()},
        "ranges": {
            name: [round(spread.least, 3), round(spread.most, 3)]
            for name, spread in spreads.items()
        },
        "figures": figures(samples),
        "facts": facts,
    }

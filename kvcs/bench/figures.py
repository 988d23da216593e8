"""The arithmetic: samples of single runs, their medians and extremes, and ratios within a round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

MB: Final = 1_000_000
GB: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Process:
    """What one process took for one transfer; of several alike, all of them together."""

    cpu_seconds: float
    """User and system time between the start and the last octet."""

    peak_octets: int
    """Largest resident memory of its whole life; of several alike, the largest."""

    before_octets: int = 0
    """Its resident memory when the transfer began: imports, and arrays that an engine holds."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One transfer."""

    octets: int
    """Object data that the receivers confirmed, of all of them together."""

    seconds: float
    """From the sender's start to the last receiver's last octet."""

    processes: Mapping[str, Process]
    """By role: sender, relay, receiver."""

    objects: int = 0
    """Objects of each receiver, verified where the stack has digests."""

    digests_match: bool | None = None
    """Whether all tensors together have the sender's SHA-256; None where it was not computed."""

    values: Mapping[str, float] = field(default_factory=dict)
    """What else was measured, by name; units are in the names."""

    behind_ms: Sequence[float] = ()
    """For each layer, from the moment it was computed to the moment it was verified."""

    @property
    def rate(self) -> float:
        """Octets per second."""
        return self.octets / self.seconds

    def measure(self, metric: str) -> float:
        """One number of it: ``rate``, ``seconds``, or one of `values`.

        ``cpu:ROLE`` is CPU seconds for 10^9 octets, and ``cpu`` that of all processes together,
        which other programs on the machine disturb least; ``memory:ROLE`` is the peak of resident
        memory less what it was before, divided by the octets of one receiver.

        Raises:
            KeyError: there is no such number.
        """
        kind, _, role = metric.partition(":")
        if metric == "rate":
            return self.rate
        if metric == "seconds":
            return self.seconds
        if metric == "cpu":
            return sum(each.cpu_seconds for each in self.processes.values()) * GB / self.octets
        if kind == "cpu":
            return self.processes[role].cpu_seconds * GB / self.octets
        if kind == "memory":
            process = self.processes[role]
            return max(0, process.peak_octets - process.before_octets) / self.octets
        return self.values[metric]


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


Samples = dict[str, list[Sample]]
"""By case, one sample a round."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A named quotient: of two cases round by round, or a number of one case that is one itself."""

    name: str
    """Its name in the result."""

    case: str
    """Case above the line."""

    over: str | None = None
    """Case below the line; None where ``metric`` is a quotient already."""

    metric: str = "rate"
    """What is compared, see `Sample.measure`."""

    def of(self, samples: Samples) -> Spread | None:
        """Its spread; None where a case was not measured.

        Raises:
            ValueError: the cases have not the same number of rounds.
        """
        above = samples.get(self.case)
        if not above:
            return None
        if self.over is None:
            return Spread.of(each.measure(self.metric) for each in above)
        below = samples.get(self.over)
        if not below:
            return None
        pairs = zip(above, below, strict=True)
        return Spread.of(a.measure(self.metric) / b.measure(self.metric) for a, b in pairs)


def figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Absolute figures of one case."""
    first = samples[0]
    found: dict[str, Any] = {"mb_per_s": rate_mb(samples).to_json(1)}
    if first.processes:
        roles = list(first.processes)
        found["cpu_s_per_gb"] = {role: cpu_per_gb(samples, role).to_json(2) for role in roles}
        found["peak_mb"] = {role: peak_mb(samples, role).to_json(0) for role in roles}
    found["octets_confirmed"] = min(each.octets for each in samples)
    if first.objects:
        found["objects"] = min(each.objects for each in samples)
    if first.digests_match is not None:
        found["digests_match"] = all(each.digests_match for each in samples)
    for name in first.values:
        found[name] = Spread.of(each.values[name] for each in samples).to_json(4)
    if first.behind_ms:
        layers = zip(*(each.behind_ms for each in samples), strict=True)
        found["layers_behind_ms"] = [round(median(times), 1) for times in layers]
    return found


def cpu_per_gb(samples: Sequence[Sample], role: str) -> Spread:
    """CPU seconds of one process for 10^9 octets of Object data."""
    return Spread.of(each.measure(f"cpu:{role}") for each in samples)


def peak_mb(samples: Sequence[Sample], role: str) -> Spread:
    """Largest resident memory of one process, in 10^6 octets."""
    return Spread.of(each.processes[role].peak_octets / MB for each in samples)


def rate_mb(samples: Sequence[Sample]) -> Spread:
    """Object data per second, in 10^6 octets."""
    return Spread.of(each.rate / MB for each in samples)

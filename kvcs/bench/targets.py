"""What kvcs is to reach, as ratios, and the floors below which a change has made it worse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvcs.bench.figures import Spread
from kvcs.bench.workload import LAYERS

LARGEST: Final = 64_000
"""Largest datagram of the backend; a test compares it with the backend's."""


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio and its bound."""

    name: str
    """What it says, for people."""

    ratios: tuple[str, ...]
    """Names of the ratio; the first one that was measured counts."""

    bound: float
    """To be reached at least; at most where ``at_most``."""

    group: str
    """Group that measures it."""

    at_most: bool = False

    def spread(self, spreads: Mapping[str, Spread]) -> Spread | None:
        """What was measured, if it was."""
        return next((spreads[name] for name in self.ratios if name in spreads), None)

    def holds(self, spread: Spread) -> bool:
        """Whether the median keeps the bound."""
        return spread.median <= self.bound if self.at_most else spread.median >= self.bound


@dataclass(frozen=True, slots=True)
class Reached:
    """A target and what was measured."""

    target: Target
    spread: Spread

    @property
    def holds(self) -> bool:
        """Whether it was reached."""
        return self.target.holds(self.spread)

    def to_json(self) -> dict[str, Any]:
        """Bound, what was measured, and whether that is enough."""
        kind = "at_most" if self.target.at_most else "at_least"
        return {kind: self.target.bound, **self.spread.to_json(3), "reached": self.holds}


def _least(name: str, bound: float, group: str, *ratios: str) -> Target:
    return Target(name, ratios, bound, group)


def _most(name: str, bound: float, group: str, *ratios: str) -> Target:
    return Target(name, ratios, bound, group, at_most=True)


TARGETS: Final = (
    _least("direct / raw, 1200 B datagrams", 0.90, "datagrams", "direct_1200B_over_raw"),
    _least("direct / raw, largest datagrams", 0.75, "datagrams", f"direct_{LARGEST}B_over_raw"),
    _least("direct / stock, 1452 B datagrams", 1.8, "datagrams", "direct_1452B_over_stock"),
    _least("direct / aiomoqt", 1.8, "aiomoqt", "kvcs_direct_32KiB_over_aiomoqt"),
    _least("one relay / aiomoqt's relay", 1.5, "aiomoqt", "kvcs_relay_32KiB_over_aiomoqt"),
    _least("one relay / direct", 0.50, "goodput", "relay_32KiB_over_direct"),
    _least("32 KiB objects / 1 MiB objects", 0.85, "goodput", "direct_32KiB_over_direct_1MiB"),
    _least("160 streams / 1 stream", 0.85, "streams", "direct_160streams_over_1"),
    _least("signed / plain", 0.90, "protection", "signed_32KiB_over_plain"),
    _least("sealed / plain", 0.85, "protection", "sealed_32KiB_over_plain"),
    _most(
        f"first layer / all {LAYERS} layers, queued",
        round(1 / LAYERS + 0.05, 4),
        "layers",
        "queued_direct_first_over_all_layers",
    ),
    _most(
        "memory of a consumer / cache",
        1.15,
        "memory",
        "memory_consumer_1GiB_over_cache",
        "memory_consumer_128MiB_over_cache",
    ),
    _most(
        "memory of a publisher that copies / cache",
        1.15,
        "memory",
        "memory_copying_1GiB_over_cache",
        "memory_copying_128MiB_over_cache",
    ),
    _most(
        "memory of a publisher that lends / cache",
        0.15,
        "memory",
        "memory_lending_1GiB_over_cache",
        "memory_lending_128MiB_over_cache",
    ),
    _most(
        "growth of a relay's memory / its cache", 0.10, "churn", "relay_memory_growth_over_cache"
    ),
)
"""What a full run on a quiet machine is held to."""

TARGET_GROUPS: Final = tuple(dict.fromkeys(target.group for target in TARGETS))
"""Groups that measure a target."""

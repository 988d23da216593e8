"""Counters and histograms of this library, for Prometheus or whoever else asks.

They are counted whether or not anybody looks: an application that wants them registers `metrics`
with a registry of prometheus-client (extra ``metrics``), or reads `Metrics.values`. Labels hold
what the code names (a component, a codec, a check), never a namespace, a key, a model or anything
that comes from a prompt: their number is bounded, and they tell nothing of the content.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcs.errors import UsageError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends of the buckets that times are counted in."""

MAX_LABEL_SETS = 256
"""Label sets of one metric; what comes beyond is counted under ``other``."""

OTHER = "other"


@dataclass(slots=True)
class _Spread:
    """What a histogram holds of one label set."""

    buckets: list[int]
    total: float = 0.0


class _Family:
    """One metric with its label sets."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        self.name, self.text, self.labels = name, text, labels

    def key(
        self, given: Mapping[str, str], held: Mapping[tuple[str, ...], object]
    ) -> tuple[str, ...]:
        """Values of the labels, or `OTHER` for each where there are too many sets."""
        if tuple(given) != self.labels:
            raise UsageError(f"{self.name} has the labels {self.labels}, not {tuple(given)}")
        key = tuple(given.values())
        if key not in held and len(held) >= MAX_LABEL_SETS:
            return (OTHER,) * len(self.labels)
        return key


class Counter(_Family):
    """A number that only grows; Prometheus sees it with ``_total`` behind its name."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...], lock: threading.Lock) -> None:
        super().__init__(name, text, labels)
        self._lock = lock
        self.values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, amount: float = 1, **labels: str) -> None:
        """Count ``amount`` more.

        Raises:
            UsageError: these are not its labels, or the amount is negative.
        """
        if amount < 0:
            raise UsageError(f"{self.name} only grows")
        with self._lock:
            key = self.key(labels, self.values)
            self.values[key] = self.values.get(key, 0.0) + amount


class Histogram(_Family):
    """Times, counted in buckets."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...], lock: threading.Lock) -> None:
        super().__init__(name, text, labels)
        self._lock = lock
        self.spreads: dict[tuple[str, ...], _Spread] = {}

    def observe(self, seconds: float, **labels: str) -> None:
        """Count one time.

        Raises:
            UsageError: these are not its labels.
        """
        with self._lock:
            key = self.key(labels, self.spreads)
            spread = self.spreads.get(key)
            if spread is None:
                spread = self.spreads[key] = _Spread([0] * (len(SECONDS) + 1))
            spread.buckets[bisect_left(SECONDS, seconds)] += 1
            spread.total += seconds


class Metrics:
    """All metrics of the publishers and subscribers of one process; a collector for Prometheus.

    ::

        from prometheus_client import REGISTRY
        REGISTRY.register(kvcs.observe.metrics)

    It may be used from any thread. What a retrieval was is counted when it ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: list[Counter | Histogram] = []
        counter, histogram = self._counter, self._histogram
        self.objects_published = counter(
            "kvcs_objects_published", "Objects given to the store.", "component", "codec"
        )
        self.bytes_published = counter("kvcs_bytes_published", "Their payload octets.")
        self.publications = counter("kvcs_publications", "What became of publications.", "state")
        self.objects_verified = counter("kvcs_objects_verified", "Objects that passed every check.")
        self.bytes_received = counter("kvcs_bytes_received", "Payload octets of retrievals.")
        self.objects_rejected = counter(
            "kvcs_objects_rejected", "Objects that failed a check.", "reason"
        )
        self.objects_duplicate = counter(
            "kvcs_objects_duplicate", "Objects that came again and were dropped."
        )
        self.manifest_versions = counter("kvcs_manifest_versions", "Manifest versions read.")
        self.requests_unauthorized = counter(
            "kvcs_requests_unauthorized",
            "Requests that no token allowed, to a publisher that listens.",
            "request",
            "code",
        )
        self.recovery = counter("kvcs_recovery", "Steps to get what was missing.", "action")
        self.first_layer_seconds = histogram(
            "kvcs_first_layer_seconds", "From open to the first whole layer."
        )
        self.retrieval_seconds = histogram(
            "kvcs_retrieval_seconds", "From open to the end of a retrieval.", "outcome"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        family = Counter(name, text, labels, self._lock)
        self._families.append(family)
        return family

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        family = Histogram(name, text, labels, self._lock)
        self._families.append(family)
        return family

    def published(self, component: str, codec: str, objects: int, octets: int) -> None:
        """A layer's Objects of one track were given to the store."""
        self.objects_published.add(objects, component=component, codec=codec)
        self.bytes_published.add(octets)

    def retrieved(
        self,
        *,
        outcome: str,
        seconds: float,
        objects: int,
        octets: int,
        duplicates: int,
        rejected: Mapping[str, int],
        refetches: int,
        moves: int,
        manifest_versions: int,
        first_layer_seconds: float | None,
    ) -> None:
        """A retrieval has ended.

        Args:
            outcome: ``complete``, ``partial`` (something of it was usable) or ``failed``.
            seconds: from open to its end.
            objects: Objects verified.
            octets: payload octets received.
            duplicates: Objects that came again.
            rejected: Objects that failed, by check.
            refetches: FETCHes made in recovery.
            moves: times that it went on over another session.
            manifest_versions: versions read.
            first_layer_seconds: from open to the first whole layer; None without one.
        """
        self.objects_verified.add(objects)
        self.bytes_received.add(octets)
        self.objects_duplicate.add(duplicates)
        for reason, count in rejected.items():
            self.objects_rejected.add(count, reason=reason)
        self.recovery.add(refetches, action="fetch")
        self.recovery.add(moves, action="move")
        self.manifest_versions.add(manifest_versions)
        self.retrieval_seconds.observe(seconds, outcome=outcome)
        if first_layer_seconds is not None:
            self.first_layer_seconds.observe(first_layer_seconds)

    def values(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Values of now by metric and label values; of a histogram, how many were counted."""
        with self._lock:
            return {
                family.name: (
                    {key: float(sum(each.buckets)) for key, each in family.spreads.items()}
                    if isinstance(family, Histogram)
                    else dict(family.values)
                )
                for family in self._families
            }

    def collect(self) -> Iterator[Metric]:
        """The metrics in the form of prometheus-client, which calls this at each scrape.

        Raises:
            ImportError: prometheus-client is not installed (extra ``metrics``).
        """
        from prometheus_client import metrics_core as core

        with self._lock:
            made: list[Metric] = []
            for family in self._families:
                if isinstance(family, Histogram):
                    spread = core.HistogramMetricFamily(
                        family.name, family.text, labels=family.labels
                    )
                    for key, held in family.spreads.items():
                        spread.add_metric(key, _cumulative(held.buckets), held.total)
                    made.append(spread)
                    continue
                shown = core.CounterMetricFamily(family.name, family.text, labels=family.labels)
                for key, value in family.values.items():
                    shown.add_metric(key, value)
                made.append(shown)
        yield from made


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    """Buckets as Prometheus wants them: each counts what the smaller ones do, too."""
    ends = [*(str(end) for end in SECONDS), "+Inf"]
    total, buckets = 0.0, []
    for end, count in zip(ends, counts, strict=True):
        total += count
        buckets.append((end, total))
    return buckets


metrics = Metrics()
"""Those of this process."""

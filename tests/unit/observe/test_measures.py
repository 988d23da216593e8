"""Metrics of publishers and subscribers: what is counted, and what Prometheus sees of it."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvcs.errors import UsageError
from kvcs.observe import Metrics
from kvcs.observe.measures import MAX_LABEL_SETS, OTHER


def retrieved(metrics: Metrics, **changed: object) -> None:
    facts: dict[str, object] = {
        "outcome": "complete",
        "seconds": 0.2,
        "objects": 8,
        "octets": 4096,
        "duplicates": 1,
        "rejected": {"digest": 2},
        "refetches": 3,
        "moves": 0,
        "manifest_versions": 4,
        "first_layer_seconds": 0.03,
    }
    metrics.retrieved(**(facts | changed))  # type: ignore[arg-type]


def test_prometheus_sees_the_names_that_the_documents_say() -> None:
    metrics, registry = Metrics(), CollectorRegistry()
    registry.register(metrics)
    metrics.published("k", "raw", 3, 300)
    retrieved(metrics)
    text = generate_latest(registry).decode()
    assert 'kvcs_objects_published_total{codec="raw",component="k"} 3.0' in text
    assert "kvcs_bytes_published_total 300.0" in text
    assert 'kvcs_objects_rejected_total{reason="digest"} 2.0' in text
    assert 'kvcs_recovery_total{action="fetch"} 3.0' in text
    assert 'kvcs_retrieval_seconds_count{outcome="complete"} 1.0' in text
    assert 'kvcs_retrieval_seconds_bucket{le="0.25",outcome="complete"} 1.0' in text
    assert 'kvcs_retrieval_seconds_bucket{le="0.1",outcome="complete"} 0.0' in text
    assert "kvcs_first_layer_seconds_sum 0.03" in text


def test_a_retrieval_without_a_layer_has_no_time_of_its_first() -> None:
    metrics = Metrics()
    retrieved(metrics, outcome="failed", first_layer_seconds=None)
    assert metrics.values()["kvcs_first_layer_seconds"] == {}
    assert metrics.values()["kvcs_retrieval_seconds"] == {("failed",): 1.0}


def test_the_number_of_label_sets_is_bounded() -> None:
    metrics = Metrics()
    for number in range(MAX_LABEL_SETS + 10):
        metrics.objects_rejected.add(reason=f"r{number}")
    held = metrics.values()["kvcs_objects_rejected"]
    assert len(held) == MAX_LABEL_SETS + 1
    assert held[OTHER,] == 10


def test_wrong_labels_and_steps_back_are_told() -> None:
    metrics = Metrics()
    with pytest.raises(UsageError, match="labels"):
        metrics.objects_rejected.add(namespace="x")
    with pytest.raises(UsageError, match="only grows"):
        metrics.bytes_received.add(-1)

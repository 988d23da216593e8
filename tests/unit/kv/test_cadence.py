"""When the next manifest version is due."""

from __future__ import annotations

from typing import Any

import pytest

from kvcs.errors import UsageError
from kvcs.kv import ManifestCadence


def versions(cadence: ManifestCadence, layers: int, **sizes: int) -> list[int]:
    """Counts of completed layers after which a version is made, one layer at a time."""
    made: list[int] = []
    for completed in range(1, layers + 1):
        if cadence.due(layers_completed=completed, layers_listed=made[-1] if made else 0, **sizes):
            made.append(completed)
    return made


def test_default_is_dense_first_and_then_every_eight() -> None:
    assert versions(ManifestCadence(), 33) == [1, 2, 4, 8, 16, 24, 32]


def test_settings() -> None:
    assert versions(ManifestCadence(first_layers=()), 20) == [8, 16]
    assert versions(ManifestCadence(first_layers=(3,), every_layers=4), 9) == [3, 4, 8]
    assert versions(ManifestCadence(every_layers=1), 3) == [1, 2, 3]


def test_octets_hold_back_early_versions_but_never_the_regular_ones() -> None:
    cadence = ManifestCadence(max_total_octets=100)
    assert versions(cadence, 17, next_octets=50, total_octets=50) == [1, 2, 4, 8, 16]
    assert versions(cadence, 17, next_octets=51, total_octets=50) == [8, 16]


def test_a_jump_over_a_milestone_is_due() -> None:
    due = ManifestCadence().due
    assert due(layers_completed=3, layers_listed=1)
    assert due(layers_completed=80, layers_listed=71)
    assert not due(layers_completed=79, layers_listed=72)
    assert not due(layers_completed=8, layers_listed=8)
    assert not due(layers_completed=0, layers_listed=0)


def test_time_makes_a_version_due_only_when_there_is_something_new() -> None:
    due = ManifestCadence(every_seconds=0.5).due
    assert not due(layers_completed=9, layers_listed=8, seconds_since_last=0.4)
    assert due(layers_completed=9, layers_listed=8, seconds_since_last=0.5)
    assert not due(layers_completed=8, layers_listed=8, seconds_since_last=9.0)
    assert not ManifestCadence().due(layers_completed=9, layers_listed=8, seconds_since_last=9.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"every_layers": 0},
        {"first_layers": (0, 1)},
        {"every_seconds": 0.0},
        {"every_seconds": float("nan")},
        {"max_total_octets": -1},
    ],
)
def test_settings_out_of_bounds(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ManifestCadence(**settings)


def test_signed_versions_come_soon_while_they_are_small() -> None:
    due = ManifestCadence.for_signing().due
    assert due(layers_completed=9, layers_listed=8, seconds_since_last=0.25)
    assert not due(layers_completed=9, layers_listed=8, seconds_since_last=0.2)
    large = 64 * 2**20
    assert not due(
        layers_completed=9,
        layers_listed=8,
        seconds_since_last=9.0,
        next_octets=1,
        total_octets=large,
    )
    assert due(layers_completed=16, layers_listed=8, next_octets=1, total_octets=large)

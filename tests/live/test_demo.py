"""`scripts/live.py` as a user runs it: four processes, a real model, and what can go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600.0
"""Longest run of four processes that each load a model, on a machine that does other things too."""

pytestmark = pytest.mark.timeout(SECONDS + 60)


def live(*arguments: str, code: int) -> dict[str, Any]:
    """Run the demonstration and return what it printed as JSON."""
    result = _run(*arguments, "--json")
    assert result.returncode == code, result.stderr + result.stdout
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "live.py", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_the_consumer_decodes_the_producers_text() -> None:
    result = live(code=0)
    assert result["answers_compared"] == ["consumer", "late", "producer", "recompute"]
    assert result["same"]
    # The name stands in the whole blocks only: whoever says it has read the streamed cache.
    assert "Gudrun" in result["consumer"]["text"]
    assert result["consumer"]["how"] == result["late"]["how"] == "streamed"
    rows = result["timeline"]
    assert [row["layer"] for row in rows] == list(range(30))
    for row in rows:
        assert row["computed_ms"] <= row["verified_ms"] <= row["in_use_ms"] + 1000
    # Layers were in use long before the producer had computed the last one.
    assert rows[10]["in_use_ms"] < rows[-1]["computed_ms"]
    assert result["late"]["first_token_seconds"] < result["recompute"]["first_token_seconds"]


def test_a_producer_that_is_killed_costs_the_deadline_and_no_answer() -> None:
    result = live("--fault", "producer-killed", "--deadline", "12", code=3)
    assert result["producer"]["killed"]
    assert result["consumer"]["how"] == "recomputed"
    assert result["consumer"]["error"] in ("CacheIncomplete", "PublicationAborted")
    assert "Gudrun" in result["consumer"]["text"]
    assert result["same"]


def test_a_consumer_that_is_killed_and_started_again_streams() -> None:
    result = live("--fault", "consumer-killed", "--answer-tokens", "12", code=0)
    assert result["consumer"]["restarted"]
    assert result["consumer"]["how"] == "streamed"
    assert result["answers_compared"] == ["consumer", "producer", "recompute"]
    assert result["same"]


def test_a_model_of_another_geometry_recomputes() -> None:
    result = live("--fault", "other-model", "--answer-tokens", "4", code=3)
    assert result["consumer"]["error"] == "DescriptorMismatch"
    assert "layers: ours 29, theirs 30" in result["consumer"]["reason"]
    assert result["consumer"]["how"] == "recomputed"
    assert result["answers_compared"] == ["consumer", "recompute"]
    assert result["same"]


def test_a_prompt_shorter_than_a_block_is_answered_without_a_cache() -> None:
    result = live("--prompt", "Hi", "--answer-tokens", "8", code=3)
    assert (result["blocks"], result["tokens_left_over"]) == (0, 15)
    for side in ("producer", "consumer"):
        assert result[side]["error"] == "UsageError"
        assert "15 tokens is shorter than one block of 16" in result[side]["reason"]
    assert result["answers_compared"] == ["consumer", "producer", "recompute"]
    assert result["same"]


def test_a_wrong_option_is_refused() -> None:
    result = _run("--fault", "earthquake")
    assert result.returncode == 2
    assert "producer-killed" in result.stderr

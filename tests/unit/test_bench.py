"""The bench: its arithmetic, the names in its result, and that it runs."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import FULL, SHORT, in_turn, transfers
from bench.children import ChildFailed, child
from bench.figures import Process, Sample, Samples, Spread, document, ratios
from bench.rows import ROWS, sample
from bench.tables import LABELS, report
from bench.workload import KIB, MIB, Workload

ROOT = Path(__file__).resolve().parents[2]
RUN_SECONDS = 240

RATIO_NAMES = {
    "direct_32KiB_over_raw",
    "direct_256KiB_over_raw",
    "relay_32KiB_over_raw",
    "relay_256KiB_over_raw",
    "relay_32KiB_over_direct",
    "relay_256KiB_over_direct",
    "direct_32KiB_over_stock",
    "direct_256KiB_over_stock",
    "raw_32KiB_over_stock",
    "raw_256KiB_over_stock",
}
FIGURE_NAMES = {
    "raw_32KiB",
    "raw_256KiB",
    "direct_32KiB",
    "direct_256KiB",
    "relay_32KiB",
    "relay_256KiB",
    "stock",
}


def taken(seconds: float, *, cpu: float = 0.5, octets: int = 10_000_000) -> Sample:
    """A sample of a transfer."""
    processes = {
        "sender": Process(cpu, 50_000_000),
        "receiver": Process(2 * cpu, 70_000_000),
    }
    return Sample(octets, seconds, processes)


def every_row() -> Samples:
    """Two rounds of every row, with the slowest in the second."""
    return {(row, size): [taken(1.0), taken(2.0)] for row, size, _ in transfers(SHORT)}


def readings(workload: Workload) -> dict[str, dict[str, Any]]:
    """What the processes of a good transfer say."""
    usage = {"cpu_seconds": 1.0, "peak_octets": 1}
    return {
        "receiver": {
            "octets": workload.octets,
            "objects": workload.objects,
            "digest": "aa",
            "at": 12.0,
            **usage,
        },
        "relay": {"started_at": 9.0, **usage},
        "sender": {"digest": "aa", "started_at": 10.0, "at": 13.0, **usage},
    }


# Workloads


@pytest.mark.parametrize("plan", [FULL, SHORT])
def test_workloads_have_the_sizes_that_they_are_named_by(plan: Any) -> None:
    sizes = {size: load for row, size, load in transfers(plan) if row == "raw"}
    assert {size: load.data_octets for size, load in sizes.items()} == {
        "32KiB": 32 * KIB,
        "256KiB": 256 * KIB,
    }
    assert {load.octets for load in sizes.values()} == {plan.octets}
    assert {load.block_tokens for load in sizes.values()} == {16, 128}
    for load in sizes.values():
        assert load.streams * load.stream_octets == load.objects * load.data_octets == plan.octets


@pytest.mark.parametrize(("size", "total"), [(32 * KIB, 3 * MIB), (3000, 3000 * 64), (KIB, 0)])
def test_sizes_that_do_not_come_out_even_are_refused(size: int, total: int) -> None:
    with pytest.raises(ValueError, match="do not divide"):
        Workload.of(size, total)


def test_each_round_has_every_row_and_begins_with_another() -> None:
    rows = [row for row, _, _ in transfers(SHORT)]
    rounds = [in_turn(rows, number) for number in range(len(rows))]
    assert set(rows) == set(ROWS) == set(LABELS)
    assert all(sorted(each) == sorted(rows) for each in rounds)
    assert [each[0] for each in rounds] == rows


# Arithmetic


def test_a_spread_has_the_median_and_the_extremes() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)
    assert Spread.of([4.0]).text(1) == "4.0 [4.0-4.0]"


def test_a_rate_counts_confirmed_octets() -> None:
    assert taken(4.0, octets=8_000_000).rate == 2_000_000


def test_ratios_compare_within_a_round() -> None:
    samples = {
        ("raw", "32KiB"): [taken(1.0), taken(4.0), taken(2.0)],
        ("direct", "32KiB"): [taken(2.0), taken(4.0), taken(5.0)],
        ("stock", ""): [taken(10.0), taken(10.0), taken(10.0)],
    }
    found = ratios(samples)
    assert found["direct_32KiB_over_raw"] == Spread(0.5, 0.4, 1.0)
    assert found["direct_32KiB_over_stock"] == Spread(2.5, 2.0, 5.0)
    assert "direct_32KiB_over_direct" not in found


def test_rounds_that_do_not_pair_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratios({("raw", "32KiB"): [taken(1.0)], ("direct", "32KiB"): [taken(1.0), taken(1.0)]})


def test_cpu_is_counted_for_each_gigabyte() -> None:
    figures = document({("raw", "32KiB"): [taken(1.0, cpu=0.02)]}, {})["figures"]["raw_32KiB"]
    assert figures["cpu_s_per_gb"]["sender"]["median"] == 2.0
    assert figures["cpu_s_per_gb"]["receiver"]["median"] == 4.0
    assert figures["peak_mb"]["receiver"] == {"median": 70.0, "min": 70.0, "max": 70.0}
    assert figures["mb_per_s"]["median"] == 10.0


# The result


def test_the_document_has_every_name() -> None:
    found = document(every_row(), {"cores": 2})
    assert list(found) == ["ratios", "ranges", "figures", "facts"]
    assert set(found["ratios"]) == set(found["ranges"]) == RATIO_NAMES
    assert set(found["figures"]) == FIGURE_NAMES
    assert found["facts"] == {"cores": 2}
    assert json.loads(json.dumps(found)) == found


def test_the_table_has_ratios_first() -> None:
    text = report(every_row(), {"cores": 2})
    lines = text.splitlines()
    assert lines[2] == "| direct 32 KiB / raw | 1.00 [1.00-1.00] |"
    assert lines[-1] == "cores: 2"
    assert text.index("direct 32 KiB / raw") < text.index("MB/s")
    assert all(label in text for label in LABELS.values())


def test_a_sample_joins_what_the_processes_said() -> None:
    workload = Workload.of(32 * KIB, 4 * MIB)
    joined = sample(workload, readings(workload))
    assert joined.seconds == 2.0
    assert list(joined.processes) == ["sender", "relay", "receiver"]
    assert (joined.octets, joined.objects_verified) == (4 * MIB, 128)
    assert joined.digests_match is True


@pytest.mark.parametrize(("name", "value"), [("octets", 1), ("objects", 127), ("digest", "bb")])
def test_what_is_not_confirmed_is_no_sample(name: str, value: object) -> None:
    workload = Workload.of(32 * KIB, 4 * MIB)
    said = readings(workload)
    said["receiver"][name] = value
    with pytest.raises(ChildFailed):
        sample(workload, said)


# Processes


async def test_a_process_that_fails_is_told_with_its_complaint() -> None:
    with pytest.raises(ChildFailed, match="no such role"):
        async with child("no such role", {}) as process:
            await process.event("ready")


async def test_a_process_ends_with_what_needed_it() -> None:
    workload = Workload.of(32 * KIB, 4 * MIB)
    with pytest.raises(ZeroDivisionError):
        async with child("consumer", {"workload": workload.to_json()}) as process:
            raise ZeroDivisionError
    assert process.process.returncode is not None


@pytest.mark.slow
@pytest.mark.timeout(RUN_SECONDS)
async def test_a_short_run_gives_every_name() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench",
        "--short",
        "--json",
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, progress = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, progress.decode()
    found = json.loads(output)
    assert set(found["ratios"]) == RATIO_NAMES
    assert all(value > 0 for value in found["ratios"].values())
    assert set(found["figures"]) == FIGURE_NAMES
    for name, figures in found["figures"].items():
        assert figures["octets_confirmed"] in (SHORT.octets, SHORT.stock_octets)
        assert figures.get("digests_match", True) is True
        roles = {"sender", "receiver"} | ({"relay"} if name.startswith("relay") else set())
        assert set(figures["cpu_s_per_gb"]) == set(figures["peak_mb"]) == roles

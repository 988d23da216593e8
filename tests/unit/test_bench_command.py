"""`kvcs bench` as it is typed: every command of docs/bench.md, files, mistakes, the check."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench import __main__ as checkout
from kvcs.bench.figures import Process, Sample
from kvcs.bench.groups import GROUPS
from kvcs.bench.plan import Group, Scale
from kvcs.bench.result import Result
from kvcs.bench.targets import TARGET_GROUPS
from kvcs.cli import main
from kvcs.cli.failures import ExitCode
from tests.command import Process as Command
from tests.command import Run, logging_as_before, run

__all__ = ["logging_as_before", "run"]

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
MEASURE_SECONDS = 240


def commands(marker: str) -> list[list[str]]:
    """Arguments behind ``kvcs bench`` in the blocks of docs/bench.md with this marker."""
    blocks = re.findall(rf"<!-- {marker} -->\n```sh\n(.*?)```", DOCUMENT, re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    assert all(line[:2] == ["kvcs", "bench"] for line in lines)
    return [line[2:] for line in lines]


class Measured:
    """Stands for measuring: every case takes a second, and what it was asked is kept."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], Scale]] = []
        self.first_share: list[float] = []
        """What the check sees as first / all layers, one for each time."""

    async def __call__(
        self, groups: Sequence[Group], scale: Scale, say: Callable[[str], None]
    ) -> Result:
        self.asked.append(([group.name for group in groups], scale))
        say("a step")
        share = self.first_share.pop(0) if self.first_share else 0.05
        processes = {role: Process(0.1, 1000) for role in ("sender", "receiver")}
        values = {
            "first_over_all_layers": share,
            "all_layers_over_computing": 1.0,
            "relay_memory_growth_over_cache": 0.0,
        }
        sample = Sample(10_000_000, 1.0, processes, values=values)
        names = [case.name for group in groups for case in group.cases]
        return Result(list(groups), {name: [sample] for name in names}, facts={"cores": 2})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    stand_in = Measured()
    monkeypatch.setattr("kvcs.bench.measure.measure", stand_in)
    return stand_in


def test_the_document_has_commands_and_no_block_without_a_marker() -> None:
    assert len(commands("runs")) == 12 and len(commands("measures")) == 1
    assert DOCUMENT.count("```sh") == len(
        re.findall(r"<!-- (?:runs|measures) -->\n```sh", DOCUMENT)
    )


@pytest.mark.parametrize("arguments", commands("runs"), ids=" ".join)
def test_every_command_of_the_document_runs(
    run: Run,
    measured: Measured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    ran = run("bench", *arguments)
    assert ran.code == 0, ran.err
    assert ran.out
    assert bool(measured.asked) == ("--list" not in arguments)
    if "--json" in arguments:
        assert ran.json()["ratios"]["direct_32KiB_over_raw"] == 1.0
    for option in ("--out", "--plot"):
        if option in arguments:
            assert (tmp_path / arguments[arguments.index(option) + 1]).stat().st_size > 0


@pytest.mark.slow
@pytest.mark.timeout(MEASURE_SECONDS)
@pytest.mark.parametrize("arguments", commands("measures"), ids=" ".join)
def test_a_command_of_the_document_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with Command("bench", *arguments) as process:
        ran = process.end()
    assert ran.code == 0, ran.err
    assert "| objects: ratios | median [min-max] |" in ran.out
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["ratios"]["direct_6400objects_over_640"] > 0
    assert found["figures"]["direct_6400objects"]["objects"] == 6400
    assert found["facts"]["rounds"] == {"objects": 1}


def test_the_document_names_every_group_and_target() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", DOCUMENT, re.MULTILINE)
    assert rows == list(GROUPS)


def test_options_reach_what_is_measured(run: Run, measured: Measured) -> None:
    run("bench", "--only", "layers, memory", "--rounds", "4", "--compute-ms", "7.5", "--short")
    run("bench", "--targets")
    [(names, scale), (targeted, _)] = measured.asked
    assert names == ["layers", "memory"]
    assert scale == Scale(short=True, rounds=4, compute_ms=7.5)
    assert targeted == [name for name in GROUPS if name in TARGET_GROUPS]


def test_in_a_checkout_python_runs_it_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--list"])
    assert checkout.run() == 0
    ours = capsys.readouterr().out
    assert main(["bench", "--list"]) == 0
    assert ours == capsys.readouterr().out
    assert "goodput" in ours


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--only", "speed"], "no group 'speed'"),
        (["--only", "goodput", "--targets"], "either --only or --targets"),
        (["--check", "--only", "goodput"], "leave --only and --targets out"),
        (["--out", "nowhere/bench.json"], "nowhere is not a folder"),
        (["--rounds", "0"], "--rounds"),
        (["--compute-ms", "nan"], "not a number"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    run: Run,
    measured: Measured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run("bench", *arguments)
    assert ran.code == ExitCode.REFUSED
    assert complaint in ran.line()
    assert measured.asked == []


def test_the_check_passes_when_every_floor_holds(run: Run, measured: Measured) -> None:
    ran = run("bench", "--check")
    assert ran.code == 0, ran.err
    assert [names for names, _ in measured.asked] == [["check"]]


def test_the_check_measures_once_more_before_it_fails(run: Run, measured: Measured) -> None:
    measured.first_share = [0.9, 0.05]
    ran = run("bench", "--check")
    assert ran.code == 0
    assert "check_first_over_all_layers is 0.90, to be at most 0.6; once more" in ran.err
    measured.first_share = [0.9, 0.9]
    ran = run("bench", "--check")
    assert ran.code == ExitCode.REFUSED
    assert "worse than any noise explains: check_first_over_all_layers" in ran.err
    assert len(measured.asked) == 4

"""`kvcs plan`: an estimate from a file or a descriptor, in units that people write."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.command import ROOT, Run

PAGE = (ROOT / "docs" / "reuse.md").read_text(encoding="utf-8")
DATA = Path(__file__).resolve().parents[2] / "data" / "smollm2-135m.safetensors"
FIGURES = ("--link", "1Gbit/s", "--prefill", "300")


def test_a_file_names_model_and_prompt(run: Run) -> None:
    ran = run("plan", "--like", DATA, *FIGURES)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("better")
    document = run("plan", "--like", DATA, *FIGURES, "--json").json()
    assert document["fetch"] is True and document["speedup"] > 1
    assert 0 < document["reused_tokens"] <= document["tokens"]


def test_a_descriptor_names_the_model_alone(run: Run, tmp_path: Path) -> None:
    descriptor = tmp_path / "descriptor.json"
    told = run("inspect", DATA, "--json").json()["descriptor"]
    descriptor.write_text(json.dumps(told), encoding="utf-8")
    ran = run("plan", "--descriptor", descriptor, "--tokens", "4096", *FIGURES, "--json")
    assert ran.json()["tokens"] == 4096
    ran = run("plan", "--descriptor", descriptor, *FIGURES)
    assert ran.code == 2 and "--tokens N" in ran.line()


def test_what_no_link_helps_is_null_in_json(run: Run) -> None:
    ran = run("plan", "--like", DATA, "--link", "1kbit/s", "--prefill", "1e9", "--json")
    document = ran.json()
    assert document["fetch"] is False
    assert document["break_even_rate"] is None and document["break_even_tokens"] is None
    ran = run("plan", "--like", DATA, "--link", "1kbit/s", "--prefill", "1e9")
    assert "on no link; on this link for no prompt" in ran.out


@pytest.mark.parametrize(
    ("link", "octets"), [("8kbit/s", 1e3), ("2.5 MB/s", 2.5e6), ("1Tbit/s", 1.25e11), ("9B/s", 9)]
)
def test_rates_are_bits_or_octets(link: str, octets: float) -> None:
    from kvcs.cli.plan import rate

    assert rate(link) == octets


@pytest.mark.parametrize("link", ["1bit", "fast", "-1Gbit/s", "1gbit/s", ""])
def test_a_rate_without_a_unit_is_refused(run: Run, link: str) -> None:
    ran = run("plan", "--like", DATA, "--link", link, "--prefill", "300")
    assert ran.code == 2 and "rate such as 10Gbit/s" in ran.line()


@pytest.mark.parametrize(
    ("octets", "text"),
    [(1.25e9, "10.00 Gbit/s"), (125e3, "1.00 Mbit/s"), (200, "1.60 kbit/s"), (1, "8 bit/s")],
)
def test_rates_are_shown_in_bits(octets: float, text: str) -> None:
    from kvcs.cli.plan import rate_text

    assert rate_text(octets) == text


def test_without_a_model_there_is_no_plan(run: Run) -> None:
    ran = run("plan", *FIGURES)
    assert ran.code == 2 and "--like FILE" in ran.line()


def test_the_page_as_a_user_types_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(DATA, "cache.safetensors")
    told = run("inspect", DATA, "--json").json()["descriptor"]
    Path("descriptor.json").write_text(json.dumps(told), encoding="utf-8")
    [block] = re.findall(r"<!-- runs: plan -->\n```sh\n(.*?)```", PAGE, re.DOTALL)
    by_file, by_descriptor = (shlex.split(line) for line in block.splitlines())
    assert by_file[0] == by_descriptor[0] == "kvcs"
    ran = run(*by_file[1:])
    assert (ran.code, ran.err) == (0, "")
    # Every figure of the table is among what is printed.
    rows = re.findall(r"^\| ([a-z ]+) \|", PAGE.split("## What is asked")[0], re.MULTILINE)
    labels = {line.split("  ")[0] for line in ran.out.splitlines()}
    assert {"limited by", "fetching pays", "block tokens"} <= set(rows) & labels
    ran = run(*by_descriptor[1:])
    assert ran.json()["tokens"] == 32768

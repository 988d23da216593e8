"""docs/operations.md: its commands run as they stand, but for ports."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from pathlib import Path

import pytest

from tests.cli.conftest import Place
from tests.command import ROOT, Process, Run

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.strip().splitlines()
]
ADMIN = "http://127.0.0.1:9090"


@pytest.fixture
def here(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the page names."""
    for name, file in (("cert.pem", place.pem.cert), ("key.pem", place.pem.key)):
        (tmp_path / name).write_bytes(Path(file).read_bytes())
    [settings] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "kvcs.toml").write_text(settings)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def relay_words() -> list[str]:
    """The relay's command, on free ports."""
    [line] = [line for line in COMMANDS if line.startswith("kvcs relay --bind")]
    words = shlex.split(line)[1:]
    words[words.index("--bind") + 1] = "127.0.0.1:0"
    words[words.index("--admin") + 1] = "0"
    return [*words, "--lines"]


def test_every_command_runs(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(COMMANDS) == 9
    with Process(*relay_words()) as relay:
        admin = relay.event("listening")["admin"]
        for line in COMMANDS:
            words = shlex.split(line.replace(ADMIN, admin))
            if words[:3] == ["kvcs", "relay", "--bind"]:
                continue  # it runs
            if words[0] == "curl":
                with urllib.request.urlopen(words[-1], timeout=20) as answer:
                    assert answer.status == 200
                continue
            with monkeypatch.context() as variables:
                while "=" in words[0]:
                    variables.setenv(*words.pop(0).split("=", 1))
                ran = run(*words[1:])
            assert ran.code == 0, (line, ran.err)
            if "KVCS_RELAY_CACHE_MIB" in line:
                [row] = [row for row in json.loads(ran.out) if row["key"] == "cache-mib"]
                assert (row["value"], row["origin"]) == (32, "$KVCS_RELAY_CACHE_MIB")
            if "KVCS_RELAY_LIMIT" in line:
                [row] = [row for row in json.loads(ran.out) if row["key"] == "limit"]
                assert row["value"] == ["max_lag_seconds=20", "scope_fetches=200"]


def test_every_metric_of_the_page_is_there(here: Path) -> None:
    # Upstreams are labels: with one, reached or not, each of their metrics has a value.
    with Process(*relay_words(), "--upstream", "moqt://127.0.0.1:9") as relay:
        admin = relay.event("listening")["admin"]
        with urllib.request.urlopen(f"{admin}/metrics", timeout=20) as answer:
            text = answer.read().decode()
    named = set(re.findall(r"`(kvcs_\w+)`", PAGE))
    assert len(named) > 10
    assert named <= set(re.findall(r"^(kvcs_\w+)[ {]", text, re.MULTILINE))

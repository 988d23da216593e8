"""docs/security.md as a user types it: every command of it, in order."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import kvcs
from tests.cli.conftest import Place
from tests.command import Process, Run
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
READY = {"relay": "relay listening", "publish": "announced"}
"""What a command that stays says once others can go on."""


def commands() -> Iterator[list[str]]:
    """Words of each command in the guide's shell blocks."""
    for block in re.findall(r"^```sh\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            yield shlex.split(line)


def test_the_guide(place: Place, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(place.cache, "cache.safetensors")
    done: list[str] = []
    ports: dict[str, str] = {}

    def free(found: re.Match[str]) -> str:
        return ports.setdefault(found[0], f"127.0.0.1:{free_port()}")

    with ExitStack() as stack:
        for words in commands():
            assert words[0] == "kvcs"
            words = [re.sub(r"127\.0\.0\.1:443\d", free, word) for word in words[1:]]
            done.append(words[0])
            if words[-1] == "&":
                stack.enter_context(Process(*words[:-1])).says(READY[words[0]])
                continue
            result = run(*words)
            if words[0] == "doctor":  # the machine may be weak; what the guide has made is not
                checks = {found["check"] for found in result.json()}
                assert checks <= {"socket_buffers", "no_uvloop"}
                assert result.code == (2 if "socket_buffers" in checks else 0)
                continue
            assert result.code == 0, (words, result.err)
            if words[0] == "subscribe":
                assert "protected" in result.out and "signed by" in result.out
    assert (done.count("keygen"), done.count("relay")) == (4, 2)
    assert {"relay", "publish", "subscribe", "doctor"} <= set(done)
    got, meant = (kvcs.load_kv_file(name) for name in ("copy.safetensors", "cache.safetensors"))
    assert (got.layers[0].k == meant.layers[0].k[: got.tokens]).all()
    assert len(kvcs.load_protection_ring("protect.keys")) == 2


def test_tests_that_the_table_names_exist() -> None:
    """A row that names no test shows nothing."""
    table = GUIDE.split("## Who tries what")[1].split("## Looking at")[0]
    named = set(re.findall(r"`(test_\w+)`", table))
    paths = set(re.findall(r"`(tests/[\w/]+\.py)`", table))
    written = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "cases").glob("test_*.py")
    )
    assert {name for name in named if f"def {name}(" not in written} == set()
    assert {path for path in paths if not (ROOT / path).is_file()} == set()
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    assert all(re.search(r"`(?:test_\w+|tests/[\w/]+\.py)`", row) for row in rows)

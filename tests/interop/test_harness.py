"""The harness itself: it finds what it needs, says what went wrong, and leaves nothing behind."""

import contextlib
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop import alone, broken, isolation, peer, scenario
from tests.interop.scenario import ScenarioFailed

Run = Callable[..., Any]

GONE_SECONDS = 20.0
"""For the kernel to kill what is left in a namespace whose first process was killed."""


# --- where a scenario runs ------------------------------------------------------------------


def test_a_scenario_sees_only_loopback(run: Run) -> None:
    seen = run(broken.surroundings)
    assert seen["interfaces"] == ["lo"]
    assert seen["pid"] == 1
    assert not Path(seen["folder"]).exists()


def test_loopback_is_not_touched_where_another_interface_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setattr(isolation, "_flags", lambda handle, name: 1)
    with pytest.raises(RuntimeError, match="eth0 is up"):
        isolation.bring_up_loopback()


def test_a_machine_without_unshare_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    isolation.prefix.cache_clear()
    with pytest.raises(isolation.IsolationUnavailable, match="no unshare"):
        isolation.prefix()
    isolation.prefix.cache_clear()


# --- what goes wrong ------------------------------------------------------------------------


def all_gone(words: str) -> bool:
    """Tell whether no process of this machine has ``words`` on its command line, or soon none."""
    deadline = time.monotonic() + GONE_SECONDS
    while time.monotonic() < deadline:
        if not any(words.encode() in line for line in _command_lines()):
            return True
    return False


def _command_lines() -> Iterator[bytes]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            yield (folder / "cmdline").read_bytes()


@pytest.mark.parametrize(
    ("which", "seconds", "reason"),
    [
        (broken.refused, 30.0, "the scenario went wrong"),
        (broken.silent, 30.0, "waiting program did not say /no such line/ in 0.2 s"),
        (broken.endless, 6.0, "TimeoutError"),
    ],
)
def test_a_failed_scenario_says_why_and_leaves_no_process(
    run: Run, which: scenario.Scenario, seconds: float, reason: str
) -> None:
    words = secrets.token_hex(16)
    with pytest.raises(ScenarioFailed) as caught:
        run(which, seconds=seconds, words=words)
    assert reason in str(caught.value)
    assert f"stdout: {words}" in str(caught.value)
    assert all_gone(words)


def test_a_driver_that_hangs_is_killed_with_all_it_started(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = secrets.token_hex(16)
    monkeypatch.setattr(scenario, "DRIVER_GRACE_SECONDS", 2.0)
    with pytest.raises(ScenarioFailed, match="the driver did not end"):
        run(broken.stuck, seconds=1.0, words=words)
    assert all_gone(words)


def test_a_program_that_ended_is_not_waited_for(run: Run) -> None:
    with pytest.raises(ScenarioFailed, match="short ended without") as caught:
        run(broken.ended)
    assert "stdout: last words" in str(caught.value)


def test_the_peer_verifies_certificates(run: Run) -> None:
    seen = run(alone.wrong_ca)
    assert seen["exit"] == 2
    assert [said["event"] for said in seen["events"]] == ["failed"]


# --- skips in CI ----------------------------------------------------------------------------

SKIPS = """
import pytest

def test_skipped():
    pytest.skip("no peer here")
"""

SKIPS_WHOLE = """
import pytest

pytest.skip("no peer here", allow_module_level=True)
"""


@pytest.mark.parametrize("text", [SKIPS, SKIPS_WHOLE])
@pytest.mark.parametrize(("ci", "fails"), [("true", True), ("", False)])
def test_a_skip_is_a_failure_in_ci_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, ci: str, fails: bool
) -> None:
    monkeypatch.setenv("CI", ci)
    conftest = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
    (tmp_path / "conftest.py").write_text(conftest, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ("may not be skipped in CI" in ran.stdout) is fails, ran.stdout
    assert "no peer here" in ran.stdout or not fails
    # Without a failure: 0, or 5 where nothing is left to run.
    assert (ran.returncode in (1, 2)) is fails


# --- where the peer is installed ------------------------------------------------------------


def fake_python(path: Path, *, version: str | None) -> None:
    """Write a program that answers like a Python of ``version``, or fails like a shim."""
    path.parent.mkdir(parents=True, exist_ok=True)
    answer = "exit 127" if version is None else f"echo '{version}'; echo '{path}'"
    path.write_text(f"#!/bin/sh\n{answer}\n", encoding="utf-8")
    path.chmod(0o755)


def test_the_oldest_python_that_answers_is_taken(tmp_path: Path) -> None:
    shims, real = tmp_path / "shims", tmp_path / "real"
    fake_python(shims / "python3.12", version=None)
    fake_python(shims / "python3", version="3 11 7")
    fake_python(real / "python3.14", version="3 14 0")
    fake_python(tmp_path / "pyenv" / "versions" / "3.13.1" / "bin" / "python", version="3 13 1")
    environ = {"PATH": f"{shims}:{real}", "PYENV_ROOT": str(tmp_path / "pyenv")}
    assert peer.find_python(environ) == tmp_path / "pyenv/versions/3.13.1/bin/python"
    assert peer.find_python({"PATH": environ["PATH"]}) == real / "python3.14"
    with pytest.raises(peer.PeerUnavailable, match="PYTHON312"):
        peer.find_python({"PATH": str(shims), "HOME": str(tmp_path)})


def test_a_python_that_is_named_is_the_only_one_tried(tmp_path: Path) -> None:
    fake_python(tmp_path / "good" / "python3.12", version="3 12 4")
    fake_python(tmp_path / "old" / "python3", version="3 11 7")
    environ = {"PATH": str(tmp_path / "good"), "PYTHON312": str(tmp_path / "old" / "python3")}
    with pytest.raises(peer.PeerUnavailable, match=r"not a Python 3\.12"):
        peer.find_python(environ)


def test_an_environment_of_other_versions_is_not_used(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert peer.installed_python().exists()
    monkeypatch.setattr(peer, "REQUIREMENTS", ("aiomoqt==0.0.1",))
    with pytest.raises(peer.PeerUnavailable, match="not installed"):
        peer.installed_python()
    monkeypatch.undo()
    monkeypatch.setattr(peer, "ENVIRONMENT", tmp_path / "nowhere")
    with pytest.raises(peer.PeerUnavailable, match="not installed"):
        peer.installed_python()


# --- what its client reports ----------------------------------------------------------------

REPORT = """\
noise before
  [PASS] one
TAP version 14
# date: 2026-01-01T00:00:00Z
1..3
ok 1 - one
  ---
  duration_ms: 5
  message: "went \\"well\\""
  ...
not ok 2 - two
  ---
  message: "did not"
  ...
ok 3 - three # SKIP Unknown test case
"""


def test_a_report_is_read_by_case() -> None:
    assert peer.parse_tap(REPORT) == {
        "one": peer.TapCase("one", True, 'went "well"'),
        "two": peer.TapCase("two", False, "did not"),
        "three": peer.TapCase("three", False, "Unknown test case"),
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (REPORT.replace("1..3", "1..4"), "plans 4 cases and has 3"),
        (REPORT.replace("1..3\n", ""), "plans None cases"),
        ("ok 1 - one\n", "no line 'TAP version 14'"),
    ],
)
def test_a_report_cut_short_is_an_error(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        peer.parse_tap(text)

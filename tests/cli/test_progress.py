"""Progress on a terminal: bars on standard error alone, standard output stays clean."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvcs
from kvcs.cli import demo
from kvcs.cli.output import Output
from tests.cli.conftest import LAYERS, Place, RunningRelay, make_cache
from tests.command import Process, Ran

ESCAPE = "\x1b["


class Terminal:
    """A pseudo-terminal whose screen is read as it is written."""

    def __init__(self) -> None:
        self._master, self.end = pty.openpty()
        self._shown = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                octets = os.read(self._master, 65536)
            except OSError:  # Linux says so when the last writer is gone
                return
            if not octets:
                return
            self._shown += octets

    def text(self) -> str:
        """All that was shown; call it once, when the process has ended."""
        os.close(self.end)
        self._reader.join()
        os.close(self._master)
        return self._shown.decode()


@contextmanager
def on_a_terminal(*arguments: object) -> Iterator[tuple[Process, Terminal]]:
    """A command whose standard error is a terminal, and whose standard output is a pipe."""
    terminal = Terminal()
    environment = {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": ""}
    with Process(*arguments, stderr=terminal.end, environment=environment) as process:
        yield process, terminal


def shown(*arguments: object) -> tuple[Ran, str]:
    """Run a command to its end on a terminal; also what the terminal showed."""
    with on_a_terminal(*arguments) as (process, terminal):
        ran = process.end()
        return ran, terminal.text()


def test_hashing_a_file_shows_a_bar(place: Place) -> None:
    ran, text = shown("inspect", place.cache)
    assert ran.code == 0
    assert "hashing" in text and f"{LAYERS}/{LAYERS}" in text
    assert ESCAPE in text
    assert "k.raw.s0" in ran.out
    assert ESCAPE not in ran.out and "hashing" not in ran.out


def test_both_ends_show_how_far_they_are(place: Place, relay: RunningRelay, tmp_path: Path) -> None:
    there = ("--relay", relay.url, *place.member)
    cache = make_cache(tmp_path / "cache.safetensors", seed=11)
    out = tmp_path / "out.safetensors"
    with on_a_terminal("publish", cache, *there, "--pace", "0.05", "--lines") as (producer, screen):
        got, text = shown("subscribe", *there, "--like", cache, "--out", out)
        producer.event("published")
        producer.stop()
        published = screen.text()
    assert got.code == 0
    assert "layers verified" in text and f"{LAYERS}/{LAYERS}" in text
    assert "layers published" in published
    for line in got.out.splitlines():
        assert re.fullmatch(r"[a-z ]+  \S.*", line), "facts and nothing else"
    assert ESCAPE not in got.out
    assert kvcs.load_kv_file(out).layers.keys() == set(range(LAYERS))


async def test_the_demo_shows_two_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    timeline = demo.Timeline()
    with demo._bars(Output(), LAYERS, timeline):
        timeline.published |= dict.fromkeys(range(LAYERS), 0.0)
        timeline.verified |= dict.fromkeys(range(2), 0.0)
    screen = terminal.getvalue()
    assert re.search(rf"published by the producer .*{LAYERS}/{LAYERS}", screen)
    assert re.search(rf"verified by the consumer .*2/{LAYERS}", screen)
    assert ESCAPE in screen
    assert capsys.readouterr().out == ""
    with demo._bars(Output(as_json=True), LAYERS, timeline):
        timeline.verified[2] = 0.0
    assert terminal.getvalue() == screen, "JSON is for programs"


class FakeTerminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True

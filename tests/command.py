"""The `kvcs` command for tests: in the test's own process, or as a process of its own."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import pytest
import structlog

from kvcs.cli import main

ROOT = Path(__file__).resolve().parents[1]

WAIT = 90.0
"""Longest wait for a process to say something, seconds."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run of the command left behind."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The document on standard output."""
        return json.loads(self.out)

    def lines(self) -> list[dict[str, Any]]:
        """The events on standard output."""
        return [json.loads(line) for line in self.out.splitlines()]

    def line(self) -> str:
        """The one line on standard error."""
        [line] = self.err.splitlines()
        return line


def said(err: str) -> str:
    """What a command said on standard error, but for the note that depends on the machine.

    Most kernels give a socket smaller buffers than it asks for, and the command says so.
    """
    lines = err.splitlines(keepends=True)
    return "".join(line for line in lines if "socket_buffers_small" not in line)


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in the test's process."""

    def run(*arguments: object) -> Ran:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, said(captured.err))

    return run


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """The command configures logging for its process; other tests must not notice."""
    loggers = [logging.getLogger(name) for name in ("kvcs", "quic")]
    before = [(log, log.handlers[:], log.propagate, log.level) for log in loggers]
    config = structlog.get_config() if structlog.is_configured() else None
    yield
    for log, handlers, propagate, level in before:
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)
    structlog.reset_defaults() if config is None else structlog.configure(**config)


class Process:
    """A `kvcs` command, or another program of this checkout, as a process of its own.

    Leaving its context kills it if it still runs. Every wait is bounded by the test's time-out.

    Args:
        arguments: what stands behind the program.
        program: what is run; the command by default.
        stderr: where its standard error goes; kept for `Ran` by default.
        environment: changes to the environment.
    """

    def __init__(
        self,
        *arguments: object,
        program: tuple[str, ...] = ("-m", "kvcs"),
        stderr: int | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._out = b""
        self._err = b""
        self._more = threading.Condition()
        variables = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
        # Uncompiled, every process would compile a thousand modules again.
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        self._process = subprocess.Popen(
            [sys.executable, *program, *map(str, arguments)],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if stderr is None else stderr,
            # A test run in the background ignores SIGINT, and so would whom it starts.
            preexec_fn=_listen_to_sigint,
        )
        # Read beside everything else: a full pipe would stop the process.
        self._reader = threading.Thread(target=self._read_stderr, args=(self._process.stderr,))
        self._reader.start()

    def _read_stderr(self, stream: IO[bytes] | None) -> None:
        while stream is not None and (octets := os.read(stream.fileno(), 65536)):
            with self._more:
                self._err += octets
                self._more.notify_all()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.end()
        if self._process.stderr is not None:
            self._process.stderr.close()

    @property
    def pid(self) -> int:
        """Its process ID."""
        return self._process.pid

    def event(self, name: str) -> dict[str, Any]:
        """The next event of that name among its ``--lines``."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._out += line
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event
        raise AssertionError(f"no {name} before the end: {self.end()}")

    def says(self, text: str) -> None:
        """Wait until it has said something on standard error."""
        with self._more:
            assert self._more.wait_for(lambda: text.encode() in self._err, WAIT), self._err

    def close_stdout(self) -> None:
        """Read no more of its standard output."""
        assert self._process.stdout is not None
        self._process.stdout.close()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[Ran, float]:
        """Send it a signal and wait until it has ended; also the seconds that this took."""
        began = time.monotonic()
        self.send(number)
        return self.end(), time.monotonic() - began

    def end(self) -> Ran:
        """Wait until it has ended."""
        assert self._process.stdout is not None
        if not self._process.stdout.closed:
            self._out += self._process.stdout.read()
            self._process.stdout.close()
        code = self._process.wait()
        self._reader.join()
        return Ran(code, self._out.decode(), said(self._err.decode()))


def _listen_to_sigint() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def came_once(document: dict[str, Any]) -> bool:
    """Whether each Object of a retrieval came once, but for what it asked for again: on a machine
    that stands still for seconds, what is late looks like what is lost."""
    return document["duplicates"] == 0 or document["refetches"] > 0

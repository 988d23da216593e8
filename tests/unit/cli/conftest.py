"""Runs the command in the test's process and gives back what a shell would see."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import structlog

from kvcs.cli import main


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run of the command left behind."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The document on standard output."""
        return json.loads(self.out)

    def line(self) -> str:
        """The one line on standard error."""
        [line] = self.err.splitlines()
        return line


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> Ran:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

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

"""The event loop of the commands: uvloop where it is, asyncio's where asked for."""

from __future__ import annotations

import asyncio
import sys

import pytest

from kvcs.cli.frame import run_async
from kvcs.cli.loops import VARIABLE, loop_factory
from kvcs.errors import UsageError


def loop_of_a_command() -> str:
    """Module of the loop that a command runs on."""
    found: list[str] = []

    async def body() -> None:
        found.append(type(asyncio.get_running_loop()).__module__)

    run_async(body())
    return found[0].split(".")[0]


def test_asyncio_is_taken_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "asyncio")
    assert loop_factory() is None
    assert loop_of_a_command() == "asyncio"


@pytest.mark.parametrize("wanted", ["", "auto", "uvloop"])
def test_uvloop_is_taken_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    pytest.importorskip("uvloop")
    monkeypatch.setenv(VARIABLE, wanted)
    assert loop_of_a_command() == "uvloop"


def test_without_uvloop_asyncio_is_taken_unless_uvloop_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert loop_of_a_command() == "asyncio"
    monkeypatch.setenv(VARIABLE, "uvloop")
    with pytest.raises(UsageError, match="not installed"):
        loop_of_a_command()


def test_an_unknown_loop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "twisted")
    with pytest.raises(UsageError, match="asyncio, uvloop or auto"):
        loop_of_a_command()

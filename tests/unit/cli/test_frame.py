"""What commands share: output, logging, and running asynchronous ones to their end."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import os
import signal
import sys
from contextvars import copy_context
from pathlib import Path
from typing import Annotated

import pytest
import structlog
import typer

from kvcs.cli import logs, main
from kvcs.cli.frame import OWN_PROCESS, command, run_async
from kvcs.cli.output import Output, octets_text, shown
from kvcs.observe import get_logger


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def call(app: typer.Typer, *arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        app(args=list(arguments), prog_name="test")
    return int(caught.value.code or 0)


def test_a_command_gets_its_own_and_the_shared_options() -> None:
    app = typer.Typer()
    seen: list[object] = []

    @command(app, "go")
    def go(
        output: Output,
        path: Annotated[Path, typer.Argument()],
        count: Annotated[int, typer.Option("--count")] = 3,
    ) -> None:
        """Go there."""
        seen.extend((output.as_json, path, count))

    assert call(app, "here", "--json", "--log-level", "debug") == 0
    assert seen == [True, Path("here"), 3]
    assert logging.getLogger("kvcs").level == logging.DEBUG
    assert call(app, "here", "--log-level", "loud") == 2


def test_an_async_command_runs_to_its_end() -> None:
    app = typer.Typer()
    ended: list[str] = []

    @command(app, "go")
    async def go(output: Output) -> None:
        """Go there."""
        await asyncio.sleep(0)
        ended.append("yes")

    assert call(app) == 0
    assert ended == ["yes"]


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, typer.Exit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_ends_a_command_through_its_contexts(
    number: signal.Signals, expected: type[BaseException]
) -> None:
    ended: list[str] = []
    # A shell that starts a job in the background has it ignore SIGINT.
    interrupted = signal.signal(signal.SIGINT, signal.default_int_handler)

    async def body() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append("withdrawn")

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(expected) as caught:
            run_async(body())
    finally:
        signal.signal(signal.SIGINT, interrupted)
    assert ended == ["withdrawn"]
    if isinstance(caught.value, typer.Exit):
        assert caught.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_was_imported_leaves_garbage_collection_in_a_process_of_the_commands_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(OWN_PROCESS.get()))
    monkeypatch.setattr(sys, "argv", ["kvcs", "--version"])

    async def body() -> None:
        pass

    def as_called(*arguments: list[str]) -> None:
        assert main(*arguments) == 0
        run_async(body())

    copy_context().run(as_called, ["--version"])  # a program calls it, whose objects these are
    assert frozen == []
    copy_context().run(as_called)
    assert frozen == [True]


def test_a_cancellation_of_another_cause_is_not_hidden() -> None:
    async def body() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_async(body())


def test_values_are_one_printable_line() -> None:
    assert shown("a\tb\r\n\x07\x1b[0m\u2066é") == "a\\tb\\r\\n\\x07\\x1b[0m\\u2066é"
    assert shown(Path("x y")) == "x y"


def test_octets_for_people() -> None:
    assert [octets_text(n) for n in (0, 1023, 1024, 3_991_904, 5 * 2**40, 2**60)] == [
        "0 octets",
        "1023 octets",
        "1.0 KiB",
        "3.8 MiB",
        "5.0 TiB",
        "1048576.0 TiB",
    ]


ROWS = [{"name": "a", "size": 5, "more": 1}, {"name": "long\nname", "size": None}]


def test_labels_are_trusted_no_more_than_values(capsys: pytest.CaptureFixture[str]) -> None:
    Output().result({}, [("extra \x1b[2J", "a"), ("b", 1)])
    assert capsys.readouterr().out == "extra \\x1b[2J  a\nb              1\n"
    Output(as_json=True).result({"\x9b2J": "\u202e"}, [])
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out) == {"\x9b2J": "\u202e"}


def test_people_read_yes_no_and_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"verified": True, "expired": False, "expires": None}
    Output().result(facts, list(facts.items()))
    assert capsys.readouterr().out == "verified  yes\nexpired   no\nexpires   -\n"
    Output(as_json=True).result(facts, [])
    assert json.loads(capsys.readouterr().out) == facts


def test_a_table_in_its_three_forms(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Output(as_json=True).table(("name", "size"), ROWS)
    assert json.loads(capsys.readouterr().out) == ROWS
    Output().table(("name", "size"), ROWS)
    assert capsys.readouterr().out == "name\tsize\na\t5\nlong\\nname\t-\n"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    Output().table(("name", "size"), ROWS)
    assert terminal.getvalue() == "name        size\na           5\nlong\\nname  -\n"


def test_progress_is_for_terminals_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for output in (Output(), Output(as_json=True)):
        with output.progress("working", 2) as step:
            step.advance()
    assert capsys.readouterr() == ("", "")

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Output().progress("wor[red]king", 4, octets=True) as step:
        step.advance(4)
    assert "wor[red]king" in terminal.getvalue()
    assert capsys.readouterr().out == ""
    quiet = terminal.getvalue()
    with Output(as_json=True).progress("working", 1) as step:
        step.advance()
    assert terminal.getvalue() == quiet


def test_a_note_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).note("mind\x1b this")
    assert capsys.readouterr() == ("", "kvcs: mind\\x1b this\n")


def test_events_are_shown_from_their_level_on(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(logs.LogLevel.INFO)
    log = get_logger("kvcs.test")
    log.debug("hidden")
    log.info("connected", host="relay.example")
    structlog.get_logger("kvcs.test").warning("closed")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hidden" not in captured.err
    assert "connected" in captured.err and "host=relay.example" in captured.err
    assert "closed" in captured.err
    assert "\x1b" not in captured.err, "no colours where nobody sees them"


def test_nothing_that_a_peer_says_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(logs.LogLevel.INFO)
    logging.getLogger("quic").error("closed: \x1b[2J\nforged line")
    try:
        raise ValueError("a reason \x1b]0;title\x07")
    except ValueError as exc:
        get_logger("kvcs.test").error("failed", exc_info=exc, reason="\x9b31m\u202e")
    shown = capsys.readouterr().err
    assert "closed: \\x1b[2J\\nforged line" in shown
    assert "a reason \\x1b]0;title\\x07" in shown
    assert all(char.isprintable() for line in shown.split("\n") for char in line)


def test_events_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(logs.LogLevel.INFO, as_json=True)
    get_logger("kvcs.test").info("connected", port=4433)
    [line] = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert (event["event"], event["port"], event["level"]) == ("connected", 4433, "info")
    assert event["logger"] == "kvcs.test"


def test_the_quic_library_is_quiet_below_debug(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(logs.LogLevel.INFO)
    logging.getLogger("quic").warning("chatter")
    assert capsys.readouterr().err == ""
    logs.configure(logs.LogLevel.DEBUG)
    logging.getLogger("quic").debug("chatter")
    assert capsys.readouterr().err.count("chatter") == 1

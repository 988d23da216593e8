"""Failures are one line and an exit code; a traceback is for who asks."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcs.cli import app as cli_app
from kvcs.cli import main
from kvcs.cli.failures import ExitCode, exit_code, report
from kvcs.errors import (
    CacheIncomplete,
    CertificateError,
    ConnectionClosed,
    ConnectionFailed,
    FileError,
    MissingBlocks,
    PublicationNotFound,
    RequestError,
    StoreFull,
    UsageError,
)

Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (FileError("x"), 2),
        (ConnectionFailed("x"), 2),
        (CertificateError("x"), 2),
        (ConnectionClosed("x"), 2),
        (RequestError("x"), 2),
        (PublicationNotFound("x"), 2),
        (StoreFull("x"), 2),
        (CacheIncomplete("x"), 3),
        (ValueError("x"), 1),
        (OSError("x"), 1),
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (ExceptionGroup("tasks", [CacheIncomplete("x")]), 3),
        (ExceptionGroup("tasks", [CacheIncomplete("x"), RequestError("y")]), 2),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [UsageError("x"), KeyError(1)])]), 1),
    ],
)
def test_exit_codes(error: Exception, code: int) -> None:
    assert exit_code(error) == code
    stream = io.StringIO()
    assert report(error, stream) == code
    assert len(stream.getvalue().splitlines()) == 1


def line(error: Exception) -> str:
    stream = io.StringIO()
    report(error, stream)
    return stream.getvalue()


def test_the_line_is_the_message() -> None:
    assert line(UsageError("no such thing")) == "kvcs: no such thing\n"
    missing = MissingBlocks(0, "k", 3, 4, 9, 64, 159)
    assert line(CacheIncomplete("deadline", (missing,), 64)) == (
        "kvcs: cache incomplete: deadline; missing k layer 3 blocks 4-9 (tokens 64-159);"
        " 64 tokens are usable in every layer\n"
    )


def test_what_a_peer_says_cannot_steer_the_terminal() -> None:
    assert line(ConnectionFailed("bad\n\x1b[31mred\u202e")) == "kvcs: bad\\n\\x1b[31mred\\u202e\n"


def test_a_refusal_says_that_it_is_one_and_why() -> None:
    assert line(RequestError("not\nhere", 0x10)) == (
        "kvcs: refused: not\\nhere (DOES_NOT_EXIST, 0x10)\n"
    )
    assert line(RequestError("", 0x7777)) == "kvcs: refused: no reason given (code 0x7777)\n"


@pytest.mark.parametrize("code", [0x1, 0x4, 0x5])
def test_a_refusal_for_want_of_a_token_says_how_one_is_passed(code: int) -> None:
    text = line(RequestError("no", code))
    assert text.startswith("kvcs: refused: no (") and text.count("\n") == 1
    assert "--token-file" in text and "kvcs token show" in text


@pytest.mark.parametrize(
    ("code", "advised"), [(0x2, True), (0x16, True), (0x18, True), (0x3, False)]
)
def test_a_session_that_a_token_ended_says_how_one_is_passed(code: int, advised: bool) -> None:
    text = line(ConnectionClosed("it has expired", code=code, by_peer=True))
    assert "it has expired" in text and text.count("\n") == 1
    assert ("--token-file" in text) is advised
    assert "--token-file" not in line(ConnectionClosed("bye", code=code))


def test_our_own_fault_says_what_and_where_to_look() -> None:
    assert line(ZeroDivisionError("division by zero")) == (
        "kvcs: internal error: ZeroDivisionError: division by zero (KVCS_DEBUG=1 shows where)\n"
    )
    assert line(UsageError()) == "kvcs: UsageError\n"


def test_of_several_the_worst_is_named() -> None:
    group = ExceptionGroup("tasks", [CacheIncomplete("late"), RequestError("refused"), KeyError(1)])
    assert line(group).startswith("kvcs: internal error: KeyError: 1")
    assert line(group).endswith("(and 2 more)\n")


def test_a_traceback_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in line(UsageError("x"))
    monkeypatch.setenv("KVCS_DEBUG", "1")
    assert "Traceback" not in line(UsageError("x")).splitlines()[-1]
    try:
        raise UsageError("deep")
    except UsageError as exc:
        text = line(exc)
    assert "Traceback" in text
    assert text.splitlines()[-1] == "kvcs: deep"


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (UsageError("x"), 2), (CacheIncomplete("x"), 3), (KeyError(), 1)],
)
def test_main_returns_the_code(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("kvcs.cli.keygen.write_file", fail)
    ran = run("keygen", "--out", tmp_path / "x")
    assert ran.code == code
    assert ran.out == ""
    assert "Traceback" not in ran.err


def test_an_interrupt_while_the_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "kvcs.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "kvcs.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert main(["--help"]) == ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    ("arguments", "says", "helps"),
    [
        (["keygen"], "Missing option '--out'", "kvcs keygen --help"),
        (["keygen", "--wrong"], "No such option: --wrong", "kvcs keygen --help"),
        (["nonsense"], "No such command 'nonsense'", "kvcs --help"),
        (["inspect"], "Missing argument", "kvcs inspect --help"),
        (["token"], "Missing command", "kvcs token --help"),
        (["config"], "Missing command", "kvcs config --help"),
        (["inspect", "a", "b"], "unexpected extra argument", "kvcs inspect --help"),
        (["certs", "--out", "x", "--days", "0"], "'--days'", "kvcs certs --help"),
        (["certs", "--out", "x", "--log-level", "loud"], "'loud'", "kvcs certs --help"),
    ],
)
def test_a_wrong_use_is_one_line_with_a_hint(
    run: Run, arguments: list[str], says: str, helps: str
) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.line()
    assert ran.line().endswith(f"; {helps} shows what can be said")


def test_wrong_use_is_two_and_help_is_nothing_wrong(run: Run) -> None:
    assert run("keygen").code == 2
    assert run("keygen", "--wrong").code == 2
    assert run("nonsense").code == 2
    assert run("--help").code == 0
    assert run().out == run("--help").out, "nothing said asks for help"
    assert run("inspect", "--help").code == 0
    version = run("--version")
    assert (version.code, version.out) == (0, "kvcs 0.1.0\n")


def test_every_command_has_the_shared_options(run: Run) -> None:
    for command in cli_app.COMMANDS.keys() - {"token", "config"}:
        help_text = run(command, "--help").out
        assert "--json" in help_text
        assert "--log-level" in help_text
    assert ExitCode.OK == 0

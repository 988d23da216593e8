"""What a failure looks like: one line on standard error and an exit code.

The traceback is for those who ask for it with ``KVCS_DEBUG=1``.
"""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Iterator
from enum import IntEnum
from typing import TextIO

import typer

from kvcs.cli.output import shown
from kvcs.errors import CacheIncomplete, ConnectionClosed, KvcsError, RequestError

_TOKEN_ADVICE = (
    "; pass with --token-file a token for this scope, role and server:"
    " `kvcs token show` says what one allows"
)


class ExitCode(IntEnum):
    """What the command tells its caller."""

    OK = 0
    """It did what was asked."""

    FAULT = 1
    """A fault of kvcs itself."""

    REFUSED = 2
    """Bad input, unreachable, not found, or refused by the other side."""

    INCOMPLETE = 3
    """The cache did not become whole in time."""

    INTERRUPTED = 130
    """Ctrl-C."""

    TERMINATED = 143
    """SIGTERM."""


def exit_code(error: BaseException) -> ExitCode:
    """Exit code that tells `error` apart; of a group, that of its worst member.

    Everything that kvcs raises on purpose is about its input or the other side; what else comes
    out is a fault of our own, and hides the others.
    """
    codes = {_exit_code(leaf) for leaf in _leaves(error)}
    return min(codes, default=ExitCode.FAULT)


def _exit_code(error: BaseException) -> ExitCode:
    if isinstance(error, CacheIncomplete):
        return ExitCode.INCOMPLETE
    on_purpose = isinstance(error, KvcsError | typer.TyperException)
    return ExitCode.REFUSED if on_purpose or _is_full(error) else ExitCode.FAULT


def _is_full(error: BaseException) -> bool:
    """Whether there is no room, for what is printed above all: files that were named say it."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _leaves(member)
    else:
        yield error


def report(error: BaseException, stream: TextIO) -> ExitCode:
    """Write one line about `error` and return its exit code.

    Args:
        error: what a command raised, or a group of such from its tasks.
        stream: where the line goes; standard error.
    """
    code = exit_code(error)
    if os.environ.get("KVCS_DEBUG") == "1":
        traceback.print_exception(error, file=stream)
    leaves = list(_leaves(error))
    worst = next(leaf for leaf in leaves if _exit_code(leaf) == code)
    text = _text(worst)
    if code is ExitCode.FAULT:
        text = f"internal error: {type(worst).__name__}: {worst} (KVCS_DEBUG=1 shows where)"
    if len(leaves) > 1:
        text += f" (and {len(leaves) - 1} more)"
    print(f"kvcs: {shown(text)}", file=stream)
    return code


def _text(error: BaseException) -> str:
    """What to say about an error that is no fault of ours."""
    if isinstance(error, RequestError):
        return _refusal(error)
    if isinstance(error, ConnectionClosed) and error.by_peer:
        return str(error) + (_TOKEN_ADVICE if _closed_over_tokens(error.code) else "")
    if isinstance(error, typer.TyperException):
        # Choices and the like come on lines of their own.
        text = " ".join(error.format_message().split()).rstrip(".")
        context = getattr(error, "ctx", None)
        where = "kvcs" if context is None else context.command_path
        return f"{text}; {where} --help shows what can be said"
    if isinstance(error, OSError):
        return f"{error.strerror}: not all of the output was written"
    return str(error) or type(error).__name__


# The codes are imported where they are needed: every command loads this module, and what never
# fails, such as --help, needs no session.


def _refusal(error: RequestError) -> str:
    from kvcs.moqt.errors import RequestCode

    about_tokens = error.code in (
        RequestCode.UNAUTHORIZED,
        RequestCode.MALFORMED_AUTH_TOKEN,
        RequestCode.EXPIRED_AUTH_TOKEN,
    )
    try:
        code = f"{RequestCode(error.code).name}, {error.code:#x}"
    except ValueError:
        code = f"code {error.code:#x}"
    text = f"refused: {error.reason or 'no reason given'} ({code})"
    return text + _TOKEN_ADVICE if about_tokens else text


def _closed_over_tokens(code: int | None) -> bool:
    from kvcs.moqt.errors import SessionCode

    return code in (
        SessionCode.UNAUTHORIZED,
        SessionCode.MALFORMED_AUTH_TOKEN,
        SessionCode.EXPIRED_AUTH_TOKEN,
    )

"""All commands together, and `main`, which turns what they raise into exit codes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

import kvcs
from kvcs.cli import (
    bench,
    certs,
    config,
    demo,
    doctor,
    inspect,
    keygen,
    keys,
    listing,
    plan,
    publish,
    relay,
    retrieve,
    serve_http,
    token,
)
from kvcs.cli.failures import ExitCode, report

app = typer.Typer(
    name="kvcs",
    help="KV caches of language models over Media over QUIC Transport.",
    epilog="Exit codes: 0; 1 a fault of kvcs; 2 bad input, unreachable, not found or refused;"
    " 3 the cache stayed incomplete; 130 Ctrl-C; 143 SIGTERM.",
    pretty_exceptions_enable=False,
    # A framed help cuts long options off on narrow terminals.
    rich_markup_mode=None,
)

GROUPS = (
    keygen,
    keys,
    token,
    certs,
    inspect,
    relay,
    publish,
    retrieve,
    serve_http,
    listing,
    plan,
    demo,
    bench,
    doctor,
    config,
)
for group in GROUPS:
    group.register(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvcs {kvcs.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Options from a TOML file; $KVCS_CONFIG_FILE may name one instead.",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Say the version."),
    ] = False,
) -> None:
    # Typer shows its docstring in place of the help given above, so there is none.
    assert isinstance(ctx.command, TyperGroup)
    settings = config.load(ctx.command, config_file, os.environ)
    ctx.obj, ctx.default_map = settings, settings.values


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: what stands behind `kvcs`; those of the process by default. Without any, help is
            shown.

    Returns:
        The exit code: 0, or a value of `ExitCode`.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a model's name is no reason to fail.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # Typer would print a wrong use in a frame of several lines, and end the process.
        code = app(args=given or ["--help"], prog_name="kvcs", standalone_mode=False)
    except SystemExit as exc:
        # Whoever reads our output has closed it, or a shell asked for completions.
        return int(exc.code or 0)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as exc:
        return report(exc, sys.stderr)
    return int(code or ExitCode.OK)

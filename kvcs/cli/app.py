"""All commands together, and `main`, which turns what they raise into exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import kvcs
from kvcs.cli import certs, demo, inspect, keygen, listing, publish, relay, retrieve
from kvcs.cli.failures import ExitCode, report

app = typer.Typer(
    name="kvcs",
    help="KV caches of language models over Media over QUIC Transport.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

for group in (keygen, certs, inspect, relay, publish, retrieve, listing, demo):
    group.register(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvcs {kvcs.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Say the version."),
    ] = False,
) -> None:
    # Typer shows its docstring in place of the help given above, so there is none.
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: what stands behind `kvcs`; those of the process by default.

    Returns:
        The exit code: 0, or a value of `ExitCode`.
    """
    try:
        app(args=arguments, prog_name="kvcs")
    except SystemExit as exc:
        # Typer ends every run, good ones too, by raising this; its code is never a text.
        return int(exc.code or 0)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as exc:
        return report(exc, sys.stderr)
    return ExitCode.OK

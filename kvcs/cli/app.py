"""All commands together, and `main`, which turns what they raise into exit codes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

import kvcs
from kvcs.cli import config
from kvcs.cli.failures import ExitCode, report
from kvcs.cli.frame import OWN_PROCESS

COMMANDS = {
    "keygen": ("keygen", "Make keys: a scope's, a producer's or an issuer's."),
    "keys": ("keys", "Show a key ring, after adding keys or taking some out."),
    "certs": ("certs", "Make certificates for development."),
    "inspect": ("inspect", "Show a KV cache file, or a publication's manifest."),
    "relay": ("relay", "Run a relay until interrupted."),
    "publish": ("publish", "Publish a KV cache file and serve it until interrupted."),
    "subscribe": ("retrieve", "Follow a publication, live or not, and write its KV cache."),
    "fetch": ("retrieve", "Fetch layers and blocks of what is published already."),
    "serve-http": ("serve_http", "Serve saved publications over HTTP until interrupted."),
    "ls": ("listing", "List the publications of a scope, or of one prefix."),
    "plan": ("plan", "Say whether a KV cache is better fetched or computed anew."),
    "demo": ("demo", "Stream a KV cache through a relay and compare both ends."),
    "bench": ("bench", "Measure kvcs beside raw QUIC and beside others."),
    "doctor": ("doctor", "Look for weak settings, of one command or in general."),
    "token": ("token", "Make authorization tokens, and show what one allows."),
    "config": ("config", "Options from a file and from the environment."),
}
"""The commands in the order of the help: the module in this room that registers each, and what the
help says of it, which is the first sentence of its docstring. A test compares the two."""


class _Commands(TyperGroup):
    """The commands, whose modules are imported when they are used.

    Most of a command's start is importing what it works with, and no command needs the others'.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name, None where there is none."""
        # One that is not there is compared with all, in case that it is misspelt.
        for name in (cmd_name,) if cmd_name in COMMANDS else COMMANDS:
            if name not in self.commands:
                module, _ = COMMANDS[name]
                part = typer.Typer(rich_markup_mode=None)
                import_module(f"kvcs.cli.{module}").register(part)
                self.commands.update(get_group(part).commands)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write what the help says of them, for which none has to be imported."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, says) for name, (_, says) in COMMANDS.items()])


app = typer.Typer(
    name="kvcs",
    cls=_Commands,
    help="KV caches of language models over Media over QUIC Transport.",
    epilog="Exit codes: 0; 1 a fault of kvcs; 2 bad input, unreachable, not found or refused;"
    " 3 the cache stayed incomplete; 130 Ctrl-C; 143 SIGTERM.",
    pretty_exceptions_enable=False,
    # A framed help cuts long options off on narrow terminals.
    rich_markup_mode=None,
)


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
        arguments: what stands behind `kvcs`; those of the process by default, which is then the
            command's own. Without any, help is shown.

    Returns:
        The exit code: 0, or a value of `ExitCode`.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    OWN_PROCESS.set(arguments is None)
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

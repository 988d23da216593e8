"""`kvcs doctor`: what is weak in the settings and on this machine."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, cast

import typer

from kvcs.cli.checks import Chosen, Finding, findings, machine
from kvcs.cli.config import Settings, commands, said
from kvcs.cli.failures import ExitCode
from kvcs.cli.frame import command
from kvcs.cli.output import Output
from kvcs.errors import UsageError

COLUMNS = ("level", "check", "subject", "problem", "advice")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    # Options of the other command are left in its words, in their order.
    @command(app, "doctor", context_settings={"ignore_unknown_options": True})
    def doctor(
        output: Output,
        ctx: typer.Context,
        words: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="[COMMAND] [OPTIONS]", help="A command as it would be run, to look at."
            ),
        ] = None,
    ) -> None:
        """Look for weak settings, of one command or in general.

        Behind it may stand a command with its options: kvcs doctor relay --cert cert.pem
        --allow-anyone. What the configuration file and the environment say for all commands is
        looked at, and the machine, too. It changes nothing and connects to nobody. Notes say what
        could be better. The exit code is 2 where something is weak, else 0.
        """
        root = cast(typer.Context, ctx.find_root())
        now = time.time()
        found: dict[Finding, None] = {}
        for table in _chosen(root, words or []):
            found |= dict.fromkeys(findings(table, now))
        found |= dict.fromkeys(machine())
        weak = any(each.level == "weak" for each in found)
        if output.as_json or found:
            output.table(COLUMNS, [asdict(each) for each in found])
        else:
            output.result({}, [("weak settings", "none")])
        if weak:
            raise typer.Exit(ExitCode.REFUSED)


def _chosen(root: typer.Context, words: list[str]) -> list[Chosen]:
    """What each command is run with that somebody has said something of.

    Args:
        root: context of `kvcs`, with the settings of the file and of the environment.
        words: a command and its options; none.

    Raises:
        UsageError: they begin with no command.
        typer.TyperException: the command has no such option, or a value does not fit it.
    """
    settings = root.obj if isinstance(root.obj, Settings) else Settings()
    tables = settings.by_command()
    if words:
        known = commands(cast(typer.core.TyperGroup, root.command))
        name = next((each for each in known if tuple(words[: len(each)]) == each), None)
        if name is None and words[0].startswith("-"):
            raise UsageError("options go behind a command: kvcs doctor relay --allow-anyone")
        if name is None:
            raise UsageError(f"there is no command {words[0]!r}")
        inner = typer.Context(known[name], parent=root, info_name=name[-1])
        tables[name] = tables.get(name, {}) | said(inner, words[len(name) :])
    return [Chosen.of(" ".join(name), values) for name, values in tables.items()]

"""`kvcs bench`: how fast kvcs is beside raw QUIC and others, on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvcs.cli.frame import command
from kvcs.cli.options import seconds
from kvcs.cli.output import Output
from kvcs.errors import FileError, KvcsError, UsageError

MAX_ROUNDS = 100
MAX_PUBLICATIONS = 1_000_000


class BenchFailed(KvcsError):
    """A ratio fell below its floor, twice."""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "bench")
    async def bench(
        output: Output,
        only: Annotated[
            str | None,
            typer.Option("--only", metavar="NAME[,NAME]", help="Groups to run; all by default."),
        ] = None,
        show: Annotated[
            bool, typer.Option("--list", help="List the groups and how long they take.")
        ] = False,
        short: Annotated[
            bool,
            typer.Option("--short", help="Less data; without --only the goodput alone, 30 s."),
        ] = False,
        rounds: Annotated[
            int | None,
            typer.Option("--rounds", min=1, max=MAX_ROUNDS, help="How often each case runs."),
        ] = None,
        compute: Annotated[
            float,
            typer.Option(
                "--compute-ms",
                parser=seconds,
                metavar="MS",
                help="Computing before each layer, where overlap is measured.",
            ),
        ] = 20.0,
        publications: Annotated[
            int,
            typer.Option(
                "--publications",
                metavar="N",
                min=20,
                max=MAX_PUBLICATIONS,
                help="Through a relay, where its memory is watched.",
            ),
        ] = 2000,
        targets: Annotated[
            bool, typer.Option("--targets", help="Run what a target is set for, and no more.")
        ] = False,
        check: Annotated[
            bool,
            typer.Option("--check", help="A minute or two; fails if a ratio is far too low."),
        ] = False,
        out: Annotated[
            Path | None,
            typer.Option("--out", metavar="FILE", help="Also write the result there, as JSON."),
        ] = None,
        plot: Annotated[
            Path | None,
            typer.Option("--plot", metavar="FILE", help="Draw the ratios: .png, .svg or .pdf."),
        ] = None,
    ) -> None:
        """Measure kvcs beside raw QUIC and beside others.

        Everything runs on loopback, in processes of its own that take turns. Compare only what one
        run measured, and read the ratios first.
        """
        # The bench brings modules that no other command needs.
        from kvcs.bench import check as floors
        from kvcs.bench.groups import chosen
        from kvcs.bench.measure import measure
        from kvcs.bench.plan import Scale
        from kvcs.bench.plot import check_plot, draw
        from kvcs.bench.tables import listing, report
        from kvcs.bench.targets import TARGET_GROUPS

        if show:
            output.table(("group", "seconds", "short_seconds", "about"), listing())
            return
        if check and (only or targets):
            raise UsageError("--check measures what it needs: leave --only and --targets out")
        if only and targets:
            raise UsageError("say either --only or --targets")
        if out is not None:
            _check_folder(out)
        if plot is not None:
            check_plot(plot)
        scale = Scale(short, rounds, compute, publications)
        names = _names(only) if only else (TARGET_GROUPS if targets else ())
        groups = [floors.group()] if check else chosen(names, scale)
        result = await measure(groups, scale, output.note)
        broken = floors.broken(result.ratios()) if check else ()
        if broken:
            output.note(f"{'; '.join(broken)}; once more")
            result = await measure(groups, scale, output.note)
            broken = floors.broken(result.ratios())
        document = json.dumps(result.document(), indent=2)
        if out is not None:
            _write(out, document)
        if plot is not None:
            draw(result, plot)
        print(document if output.as_json else report(result))
        if broken:
            raise BenchFailed(f"worse than any noise explains: {'; '.join(broken)}")


def _names(text: str) -> Sequence[str]:
    """Group names between commas."""
    return [name.strip() for name in text.split(",")]


def _check_folder(out: Path) -> None:
    if not os.path.isdir(out.parent):
        raise FileError(f"{out.parent} is not a folder")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as exc:
        raise FileError(f"{path} cannot be written: {exc.strerror}") from exc

"""What a command prints: its result as text or JSON, and progress for whoever watches.

Standard output carries the result alone: with ``--json`` one JSON document, else lines that a
terminal does not wrap. Notes and progress go to standard error, progress only to a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

Facts = Sequence[tuple[str, object]]
"""Labels and values of a text result, in the order in which they are shown."""


def shown(value: object) -> str:
    """Text of a value for a terminal: one line, with whatever could steer a terminal escaped.

    Model names come from files and reason phrases from peers, so they are not trusted.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in str(value)
    )


def _for_people(value: object) -> str:
    """A fact as people say it: yes, no, and a dash for what there is none of."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return shown(value)


def octets_text(count: int) -> str:
    """Octets for people, for example ``4.3 MiB``."""
    size, units = float(count), ["KiB", "MiB", "GiB", "TiB"]
    if count < 1024:
        return f"{count} octets"
    while (size := size / 1024) >= 1024 and len(units) > 1:
        units.pop(0)
    return f"{size:.1f} {units[0]}"


class Step(Protocol):
    """One thing whose progress is shown."""

    def advance(self, count: int = 1) -> None:
        """Say that `count` more of it is done."""


class _QuietStep:
    """Progress that nobody watches."""

    def advance(self, count: int = 1) -> None:
        """Do nothing."""


class Output:
    """Where one command prints to.

    Args:
        as_json: print the result as JSON.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    def result(self, document: Mapping[str, Any] | Sequence[Any], facts: Facts) -> None:
        """Print the result of the command; call it once.

        Args:
            document: the result as JSON; member names are part of the command's contract.
            facts: the same for people, one line each.
        """
        if self.as_json:
            print(json.dumps(document, indent=2))
            return
        lines = [(shown(label), _for_people(value)) for label, value in facts]
        width = max((len(label) for label, _ in lines), default=0)
        for label, value in lines:
            print(f"{label:<{width}}  {value}".rstrip())

    def table(self, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        """Print rows as the result: JSON, a table on a terminal, else tab-separated lines.

        Args:
            columns: members of each row, in the order in which they are shown.
            rows: one mapping per row; JSON shows members beyond the columns too.
        """
        if self.as_json:
            print(json.dumps(list(rows), indent=2))
            return
        cells = [[_for_people(row.get(column, "")) for column in columns] for row in rows]
        if not sys.stdout.isatty():
            for line in (columns, *cells):
                print("\t".join(line))
            return
        widths = [
            max(len(line[index]) for line in (columns, *cells)) for index in range(len(columns))
        ]
        for line in (columns, *cells):
            pairs = zip(line, widths, strict=True)
            print("  ".join(f"{cell:<{width}}" for cell, width in pairs).rstrip())

    def note(self, text: str) -> None:
        """Tell a person something on the way, for example a warning or what to do next."""
        print(f"kvcs: {shown(text)}", file=sys.stderr)

    @contextmanager
    def progress(self, label: str, total: int, *, octets: bool = False) -> Iterator[Step]:
        """Show how far something is while the context is open.

        Args:
            label: what it is.
            total: how much there is to do.
            octets: whether `total` counts octets, which adds their rate.
        """
        if self.as_json or not sys.stderr.isatty():
            yield _QuietStep()
            return
        # Rich takes a tenth of a second to import, which quiet commands need not pay.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            TextColumn,
            TransferSpeedColumn,
        )

        counts: list[ProgressColumn] = (
            [DownloadColumn(binary_units=True), TransferSpeedColumn()]
            if octets
            else [MofNCompleteColumn()]
        )
        bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *counts,
            console=Console(stderr=True),
            transient=True,
        )
        with bars:
            task = bars.add_task(shown(label), total=total)

            class _Bar:
                def advance(self, count: int = 1) -> None:
                    bars.advance(task, count)

            yield _Bar()

"""Options of the commands that look for shorter prefixes where the whole one is not there."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from kvcs.errors import UsageError
from kvcs.subscriber.settings import MAX_ANCHORS

ProbeOption = Annotated[
    int | None,
    typer.Option(
        "--probe",
        min=0,
        max=MAX_ANCHORS,
        metavar="N",
        help="How many shorter prefixes to look for where the whole one is not there; 8 by default."
        " With 0 the relay does not learn where prompts part.",
    ),
]
AnchorsOption = Annotated[
    str | None,
    typer.Option(
        "--anchors",
        metavar="N,N",
        help="Lengths of these, in blocks; half the prefix, a quarter and so on by default.",
    ),
]


def parse_anchors(text: str | None) -> tuple[int, ...] | None:
    """Read `--anchors`.

    Raises:
        UsageError: it is no list of numbers.
    """
    if text is None:
        return None
    parts = text.split(",")
    if not all(re.fullmatch(r" *[0-9]{1,10} *", part) for part in parts):
        raise UsageError(f"--anchors: expected numbers of blocks such as 64,128, got {text[:40]!r}")
    return tuple(map(int, parts))

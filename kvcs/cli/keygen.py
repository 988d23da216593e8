"""`kvcs keygen`: a new scope key."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from kvcs.cli.files import write_file
from kvcs.cli.frame import command
from kvcs.cli.output import Output
from kvcs.kv import KVCS_SCHEME, Scope

SCOPE_KEY_OCTETS = 32


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "keygen")
    def keygen(
        output: Output,
        out: Annotated[
            Path, typer.Option("--out", metavar="FILE", help="Where to; one that is there stays.")
        ],
    ) -> None:
        """Make a scope key, the secret that members of a scope share.

        It is a file of 64 hex characters that only you can read.
        """
        key = secrets.token_bytes(SCOPE_KEY_OCTETS)
        write_file(out, key.hex().encode("ascii") + b"\n", private=True)
        scope_id = KVCS_SCHEME.scope_id(Scope(key)).hex()
        output.result(
            {"file": str(out), "scope_id": scope_id},
            [("scope key", out), ("scope id", scope_id)],
        )

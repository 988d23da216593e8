"""`kvcs serve-http`: saved publications, for consumers that no relay reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvcs.cli.frame import command
from kvcs.cli.lines import Lines
from kvcs.cli.options import LinesOption, parse_address
from kvcs.cli.output import Output
from kvcs.errors import FileError, UsageError
from kvcs.fallback import HttpServer
from kvcs.keyfiles import RingFile
from kvcs.observe import get_logger
from kvcs.trust import Authority, KeyUse, TokenVerifier

PORT = 8443
"""TCP port where none is given."""

LOOK_SECONDS = 5.0
"""Between looks at the issuers' file."""

WILDCARDS = ("", "0.0.0.0", "::")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "serve-http")
    async def serve_http(
        output: Output,
        folder: Annotated[
            Path, typer.Argument(metavar="DIR", help="What `kvcs publish --save DIR` has written.")
        ],
        bind: Annotated[
            str,
            typer.Option(
                "--bind", metavar="HOST:PORT", help="Where to listen; port 0 takes a free one."
            ),
        ] = f"127.0.0.1:{PORT}",
        cert: Annotated[
            Path | None,
            typer.Option(
                "--cert",
                metavar="FILE",
                help="Certificate chain, PEM; without one only this machine is served.",
            ),
        ] = None,
        key: Annotated[
            Path | None, typer.Option("--key", metavar="FILE", help="Its private key, PEM.")
        ] = None,
        issuers: Annotated[
            Path | None,
            typer.Option(
                "--issuers",
                metavar="FILE",
                help="Key ring of the issuers whose tokens count; read again when it changes.",
            ),
        ] = None,
        audience: Annotated[
            list[str] | None,
            typer.Option(
                "--audience",
                metavar="NAME",
                help="Name of this server in tokens; may be repeated. The host of --bind by"
                " default.",
            ),
        ] = None,
        allow_anyone: Annotated[
            bool, typer.Option("--allow-anyone", help="Serve whoever connects, without tokens.")
        ] = False,
        lines: LinesOption = False,
    ) -> None:
        """Serve saved publications over HTTP until interrupted.

        New ones appear without a restart.
        """
        host, port = parse_address(bind, PORT)
        ring = _issuers(issuers, allow_anyone)
        names = tuple(audience or ()) or (() if host in WILDCARDS else (host,))
        if ring is not None and not names:
            raise UsageError(f"a server on {host!r} needs a name for tokens: --audience NAME")
        authority = None if ring is None else Authority(TokenVerifier(ring.ring, names))
        told = Lines(lines)
        server = HttpServer(
            folder, host=host, port=port, cert=cert, key=key, authority=authority, clock=time.time
        )
        async with server, _following(ring):
            told.event("listening", url=server.url)
            if not lines:
                output.note(f"serving {folder} on {server.url}")
            await asyncio.Event().wait()


def _issuers(path: Path | None, allow_anyone: bool) -> RingFile | None:
    if (path is None) != allow_anyone:
        raise UsageError(
            "say who is served: --issuers FILE for those whose tokens count, or --allow-anyone"
        )
    return None if path is None else RingFile(path, KeyUse.TOKEN)


@asynccontextmanager
async def _following(ring: RingFile | None) -> AsyncIterator[None]:
    """Read the issuers again when their file changes."""

    async def follow(ring: RingFile) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if ring.changed():
                try:
                    ring.reload()
                except FileError as exc:
                    get_logger("kvcs.cli").error("issuers_not_read", reason=str(exc))

    if ring is None:
        yield
        return
    task = asyncio.get_running_loop().create_task(follow(ring))
    try:
        yield
    finally:
        task.cancel()

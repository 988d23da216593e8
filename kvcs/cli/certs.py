"""`kvcs certs`: a development CA, and certificates of servers and clients."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from kvcs.cli.authority import Issued, make_authority, make_client, make_server
from kvcs.cli.files import write_file
from kvcs.cli.frame import command
from kvcs.cli.output import Output
from kvcs.errors import FileError, UsageError

DEFAULT_NAMES = ("localhost", "127.0.0.1", "::1")
MAX_DAYS = 825


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "certs")
    def certs(
        output: Output,
        out: Annotated[
            Path, typer.Option("--out", metavar="FOLDER", help="Where to; made if missing.")
        ],
        names: Annotated[
            list[str] | None,
            typer.Option(
                "--name",
                metavar="NAME",
                help="DNS name or address of the server; repeat it for more.",
            ),
        ] = None,
        server: Annotated[
            str,
            typer.Option(
                "--server",
                metavar="PREFIX",
                help="Prefix of the server's files, for several servers.",
            ),
        ] = "",
        client: Annotated[
            str,
            typer.Option(
                "--client",
                metavar="NAME",
                help="Make a client's certificate of this name instead, for relays that ask for"
                " one: NAME-cert.pem and NAME-key.pem.",
            ),
        ] = "",
        days: Annotated[
            int,
            typer.Option(
                "--days", min=1, max=MAX_DAYS, metavar="DAYS", help="How long they are valid."
            ),
        ] = 90,
        force: Annotated[
            bool,
            typer.Option(
                "--force", help="Replace files that are there, and an authority past use."
            ),
        ] = False,
    ) -> None:
        """Make certificates for development.

        They are ca.pem, cert.pem, key.pem and ca-key.pem. A CA that is in the folder already signs
        the new certificate, so that clients that trust ca.pem trust each server made here, and a
        relay with --client-ca ca.pem each client. Private keys are readable by you alone.
        """
        if client and (names or server):
            raise UsageError(
                "--client makes no server's certificate: leave --name and --server out"
            )
        if client:
            document = make_client_certificate(out, client, days=days, force=force)
            shown = client
        else:
            document = make_certificates(
                out, tuple(names or DEFAULT_NAMES), server=server, days=days, force=force
            )
            shown = ", ".join(names or DEFAULT_NAMES)
        output.result(
            document,
            [
                ("authority", f"{document['ca']} ({document['authority']})"),
                ("its key", f"{document['ca_key']} (sign with it, give it to nobody)"),
                ("certificate", document["cert"]),
                ("its key", document["key"]),
                ("names", shown),
                ("valid until", document["valid_until"]),
            ],
        )


def make_certificates(
    folder: Path, names: tuple[str, ...], *, server: str = "", days: int = 90, force: bool = False
) -> dict[str, str | list[str]]:
    """Write a server's certificate and key, and an authority where there is none yet.

    Args:
        folder: where the files are; made if missing.
        names: DNS names and addresses of the server.
        server: prefix of its file names; empty gives ``cert.pem`` and ``key.pem``.
        days: how long they are valid.
        force: replace the server's files, and an authority that has expired or cannot be read.

    Returns:
        What was written, for `Output.result`.

    Raises:
        UsageError: a name that is none, or a prefix that would leave the folder.
        FileError: a file is there already or cannot be written; nothing is overwritten.
    """
    stem = f"{_plain(server)}-" if server else ""

    def make(authority: Issued, now: datetime) -> Issued:
        return make_server(authority, names, now, days)

    return _make(folder, stem, names, make, days=days, force=force)


def make_client_certificate(
    folder: Path, name: str, *, days: int = 90, force: bool = False
) -> dict[str, str | list[str]]:
    """Write a client's certificate and key, and an authority where there is none yet.

    Args:
        folder: where the files are; made if missing.
        name: of the client, and prefix of its file names.
        days: how long they are valid.
        force: replace the client's files, and an authority that has expired or cannot be read.

    Returns:
        What was written, for `Output.result`.

    Raises:
        UsageError: a name that would leave the folder.
        FileError: a file is there already or cannot be written; nothing is overwritten.
    """

    def make(authority: Issued, now: datetime) -> Issued:
        return make_client(authority, name, now, days)

    return _make(folder, f"{_plain(name)}-", (name,), make, days=days, force=force)


def _plain(prefix: str) -> str:
    if not (prefix[:1] != "." and prefix.replace("-", "").replace(".", "").isalnum()):
        raise UsageError(f"{prefix!r} is not a plain prefix of a file name")
    if prefix == "ca":
        raise UsageError("'ca' is the authority's own prefix")
    return prefix


def _make(
    folder: Path,
    stem: str,
    names: tuple[str, ...],
    make: Callable[[Issued, datetime], Issued],
    *,
    days: int,
    force: bool,
) -> dict[str, str | list[str]]:
    """Write a certificate and its key as files that begin with ``stem``."""
    now = datetime.now(UTC)
    cert, key = folder / f"{stem}cert.pem", folder / f"{stem}key.pem"
    if not force:
        for path in (cert, key):
            if os.path.exists(path):
                raise FileError(f"{path} is there already; --force replaces it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as exc:
        raise FileError(f"{folder}: not a folder") from exc
    except OSError as exc:
        raise FileError(f"{folder}: {exc.strerror or exc}") from exc
    ca, ca_key = folder / "ca.pem", folder / "ca-key.pem"
    authority, state = _read_authority(ca, ca_key, now, force), "kept"
    if authority is None:
        authority, state = make_authority(now, max(days, 365)), "made"
    issued = make(authority, now)
    if state == "made":
        write_file(ca_key, authority.key_pem(), private=True, replace=force)
        write_file(ca, authority.certificate_pem(), private=False, replace=force)
    write_file(key, issued.key_pem(), private=True, replace=force)
    write_file(cert, issued.certificate_pem(), private=False, replace=force)
    return {
        "authority": state,
        "ca": str(ca),
        "ca_key": str(ca_key),
        "cert": str(cert),
        "key": str(key),
        "names": list(names),
        "valid_until": issued.certificate.not_valid_after_utc.isoformat(),
    }


def _read_authority(ca: Path, ca_key: Path, now: datetime, force: bool) -> Issued | None:
    if not os.path.exists(ca) and not os.path.exists(ca_key):
        return None
    try:
        authority = Issued.from_pem(ca.read_bytes(), ca_key.read_bytes())
        if authority.certificate.not_valid_after_utc <= now:
            raise UsageError("it has expired")
    except (OSError, UsageError) as exc:
        if force:
            return None
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise FileError(
            f"{ca} and {ca_key.name} cannot sign ({why}); --force makes a new authority"
        ) from exc
    return authority

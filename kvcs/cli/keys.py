"""`kvcs keys`: what a key ring holds, and keys added to it and taken out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcs.cli.authorities import add_public, key_facts
from kvcs.cli.frame import command
from kvcs.cli.output import Output
from kvcs.errors import FileError, TrustError, UsageError
from kvcs.keyfiles import (
    load_key_ring,
    load_protection_ring,
    save_key_ring,
    save_protection_ring,
)
from kvcs.kv import ProtectionRing
from kvcs.trust import KeyRing, KeyUse, PublicKey, read_key_set

PROTECTION_COLUMNS = ("key_id", "suite", "scope_id", "seals")
COLUMNS = ("kid", "use", "algorithm", "scope_id", "name", "expires", "counts")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "keys")
    def keys(
        output: Output,
        ring: Annotated[
            Path, typer.Argument(metavar="FILE", help="Key ring, or somebody's own key file.")
        ],
        add: Annotated[
            list[Path] | None,
            typer.Option(
                "--add",
                metavar="FILE",
                help="Add the public keys of another ring or key file; may be repeated.",
            ),
        ] = None,
        remove: Annotated[
            list[str] | None,
            typer.Option(
                "--remove", metavar="KID", help="Revoke: take a key out; may be repeated."
            ),
        ] = None,
        receive_only: Annotated[
            list[int] | None,
            typer.Option(
                "--receive-only",
                metavar="KEY-ID",
                help="Protection keys: this one opens and seals no more; may be repeated.",
            ),
        ] = None,
    ) -> None:
        """Show a key ring, after adding keys or taking some out.

        Who uses the ring while it changes goes on: relays read it again, and consumers the next
        time they start. Of protection keys nothing secret is shown, and --remove takes a Key ID.
        """
        protection = _protection(ring)
        if protection is not None:
            _show_protection(output, ring, protection, add, remove, receive_only)
            return
        if receive_only:
            raise UsageError(f"{ring}: --receive-only is for protection keys")
        for path in add or ():
            add_public(ring, public_keys(path))
        if remove:
            _remove(ring, remove)
        now = time.time()
        rows: list[dict[str, Any]] = []
        for key in public_keys(ring):
            try:
                key.check_time(now)
                counts = "yes"
            except TrustError as exc:
                counts = exc.check.replace("_", " ")
            rows.append(key_facts(key) | {"counts": counts})
        output.table(COLUMNS, rows)


def public_keys(path: Path) -> list[PublicKey]:
    """Public keys of a ring, or of a signing key's file.

    Raises:
        FileError: it is neither.
    """
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise FileError(f"{path}: {exc.strerror or exc}") from exc
    try:
        found = read_key_set(data)
    except TrustError as exc:
        raise FileError(f"{path}: {exc}") from None
    return [key if isinstance(key, PublicKey) else key.public for key in found]


def _protection(path: Path) -> ProtectionRing | None:
    """The protection keys in a file; None where it holds something else."""
    try:
        return load_protection_ring(path)
    except FileError:
        return None


def _show_protection(
    output: Output,
    path: Path,
    ring: ProtectionRing,
    add: list[Path] | None,
    remove: list[str] | None,
    receive_only: list[int] | None,
) -> None:
    for other in add or ():
        source = load_protection_ring(other)
        if source.scope_id is not None:
            ring.check_scope(source.scope_id)
        for key in source:
            ring.add(key, send=source.may_send(key.key_id))
    for key_id in receive_only or ():
        ring.set_send(key_id, False)
    for text in remove or ():
        if not text.isdecimal() or not ring.remove(int(text)):
            raise UsageError(f"{path}: there is no key with Key ID {text}")
    if add or remove or receive_only:
        save_protection_ring(path, ring, replace=True)
    newest = max((key.key_id for key in ring if ring.may_send(key.key_id)), default=None)
    rows: list[dict[str, Any]] = [
        {
            "key_id": key.key_id,
            "suite": key.suite.name,
            "scope_id": None if ring.scope_id is None else ring.scope_id.hex(),
            "seals": "yes"
            if key.key_id == newest
            else "no, a newer one does"
            if ring.may_send(key.key_id)
            else "no, it opens only",
        }
        for key in ring
    ]
    output.table(PROTECTION_COLUMNS, rows)


def _remove(path: Path, kids: list[str]) -> None:
    ring: KeyRing = load_key_ring(path, _use(path))
    for text in kids:
        try:
            kid = bytes.fromhex(text)
        except ValueError:
            raise UsageError(f"{text!r} is no key identifier in hex") from None
        if not ring.remove(kid):
            raise UsageError(f"{path}: there is no key {text}")
    save_key_ring(path, ring)


def _use(path: Path) -> KeyUse:
    return public_keys(path)[0].use

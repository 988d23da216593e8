"""`kvcs keygen`: keys of scopes, of their protection, of producers, and of issuers of tokens."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcs.cli.authorities import Scopes, add_public, key_facts
from kvcs.cli.files import write_file
from kvcs.cli.frame import command
from kvcs.cli.output import Output
from kvcs.errors import UsageError
from kvcs.keyfiles import load_protection_ring, save_protection_ring, save_signing_key
from kvcs.kv import KVCS_SCHEME, ProtectionRing, Scope
from kvcs.trust import Algorithm, KeyUse, SigningKey

SCOPE_KEY_OCTETS = 32

DAY = 86_400
"""Seconds."""

ALGORITHMS = {"eddsa": Algorithm.EDDSA, "es256": Algorithm.ES256}
"""Names of the algorithms on the command line."""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "keygen")
    def keygen(
        output: Output,
        out: Annotated[
            Path, typer.Option("--out", metavar="FILE", help="Where to; one that is there stays.")
        ],
        scope: Annotated[
            bool, typer.Option("--scope", help="Make a scope key; so it is by default.")
        ] = False,
        signing: Annotated[
            bool,
            typer.Option("--signing", help="Make a producer's key, which signs manifests."),
        ] = False,
        protection: Annotated[
            bool,
            typer.Option("--protection", help="Make a scope's protection keys, which seal caches."),
        ] = False,
        rotate: Annotated[
            bool,
            typer.Option(
                "--rotate",
                help="With --protection: add a newer key to the file that is there. It seals from"
                " the next publication on.",
            ),
        ] = False,
        issuer: Annotated[
            str | None,
            typer.Option(
                "--issuer", metavar="NAME", help="Make an issuer's key, which signs tokens."
            ),
        ] = None,
        public: Annotated[
            Path | None,
            typer.Option(
                "--public",
                metavar="FILE",
                help="Key ring that gets the public key: with --signing for consumers, with"
                " --issuer for relays.",
            ),
        ] = None,
        scope_key_file: Annotated[
            Path | None,
            typer.Option("--scope-key-file", metavar="FILE", help="Scope that the key speaks for."),
        ] = None,
        scope_id: Annotated[
            str | None,
            typer.Option("--scope-id", metavar="HEX", help="The same, by its Scope ID."),
        ] = None,
        every_scope: Annotated[
            bool, typer.Option("--every-scope", help="The key speaks for every scope.")
        ] = False,
        algorithm: Annotated[
            str,
            typer.Option("--algorithm", metavar="NAME", help="What it signs with: eddsa or es256."),
        ] = "eddsa",
        name: Annotated[
            str | None,
            typer.Option("--name", metavar="NAME", help="With --signing: the producer's name."),
        ] = None,
        days: Annotated[
            int | None,
            typer.Option(
                "--days",
                min=1,
                metavar="DAYS",
                help="How long it counts; without an end by default.",
            ),
        ] = None,
    ) -> None:
        """Make keys: a scope's, a producer's or an issuer's.

        A scope key is the secret that the members of a scope share, a file of 64 hex characters.
        Protection keys are secrets of the same members, in a file of their own, so that relays and
        indexes that know the scope key cannot read caches. What is not a scope key is a
        COSE_KeySet. Only you can read the file.
        """
        if scope + signing + protection + (issuer is not None) > 1:
            raise UsageError(
                "one key at a time: --scope, --signing, --protection, or --issuer NAME"
            )
        if rotate and not protection:
            raise UsageError("--rotate is for --protection")
        if protection:
            if every_scope or any(each is not None for each in (public, name, days)):
                raise UsageError(
                    "protection keys take --scope-key-file or --scope-id, --rotate and --out"
                )
            _protection(output, out, Scopes(scope_key_file, scope_id).read(output), rotate)
            return
        if not signing and issuer is None:
            given = (public, scope_key_file, scope_id, name, days)
            if every_scope or any(each is not None for each in given):
                raise UsageError("a scope key takes no other option than --out")
            _scope_key(output, out)
            return
        if signing == (issuer is not None) or (name is not None and not signing):
            raise UsageError("--name is for --signing; an issuer's name comes with --issuer")
        if algorithm not in ALGORITHMS:
            raise UsageError(f"--algorithm is eddsa or es256, not {algorithm!r}")
        scopes = Scopes(scope_key_file, scope_id).read(output)
        if bool(scopes) == every_scope:
            raise UsageError(
                "say whom the key speaks for: --scope-key-file FILE, --scope-id HEX, or"
                " --every-scope"
            )
        if len(scopes) > 1:
            raise UsageError(f"a key speaks for one scope or for every one, not for {len(scopes)}")
        now = int(time.time())
        key = SigningKey.generate(
            ALGORITHMS[algorithm],
            use=KeyUse.MANIFEST if signing else KeyUse.TOKEN,
            scope_id=scopes[0] if scopes else None,
            name=issuer or name or "",
            not_before=None if days is None else now,
            expires=None if days is None else now + days * DAY,
        )
        save_signing_key(out, key)
        document: dict[str, Any] = {"file": str(out)}
        if public is not None:
            try:
                add_public(public, [key.public])
            except BaseException:
                out.unlink()  # a key that nobody can verify is of no use
                raise
            document["public"] = str(public)
        document |= key_facts(key.public)
        output.result(
            document, [(name.replace("_", " "), value) for name, value in document.items()]
        )


def _protection(output: Output, out: Path, scopes: list[bytes], rotate: bool) -> None:
    if rotate:
        ring = load_protection_ring(out)
        for scope_id in scopes:
            ring.check_scope(scope_id)
    elif len(scopes) == 1:
        ring = ProtectionRing(scope_id=scopes[0])
    else:
        raise UsageError(
            "say whose caches the keys protect: --scope-key-file FILE, or --scope-id HEX"
        )
    key = ring.rotate()
    save_protection_ring(out, ring, replace=rotate)
    document = {
        "file": str(out),
        "scope_id": None if ring.scope_id is None else ring.scope_id.hex(),
        "key_id": key.key_id,
        "keys": len(ring),
    }
    output.result(document, [(name.replace("_", " "), value) for name, value in document.items()])


def _scope_key(output: Output, out: Path) -> None:
    key = secrets.token_bytes(SCOPE_KEY_OCTETS)
    write_file(out, key.hex().encode("ascii") + b"\n", private=True)
    scope_id = KVCS_SCHEME.scope_id(Scope(key)).hex()
    output.result(
        {"file": str(out), "scope_id": scope_id},
        [("scope key", out), ("scope id", scope_id)],
    )

"""`kvcs token`: authorization tokens for relays, made and shown."""

from __future__ import annotations

import base64
import secrets
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcs.cli.authorities import Scopes, read_own_key, when
from kvcs.cli.files import check_apart, write_file
from kvcs.cli.frame import command
from kvcs.cli.options import seconds
from kvcs.cli.output import Output
from kvcs.cli.peers import read_token
from kvcs.errors import FileError, TrustError, UsageError
from kvcs.keyfiles import load_key_ring
from kvcs.trust import (
    CONSUMER,
    PRODUCER,
    Action,
    Claims,
    KeyUse,
    Rule,
    TokenVerifier,
    issue,
    read_claims,
    scope_rule,
)
from kvcs.trust.rights import KVCS_ROOT
from kvcs.trust.tokens import MAX_LIFETIME

ROLES = {"producer": PRODUCER, "consumer": CONSUMER, "both": PRODUCER | CONSUMER}
"""Sets of actions by their names on the command line."""

LIFETIME = 3600.0
"""Seconds for which a token counts unless told otherwise."""

TOKEN_ID_OCTETS = 16


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    group = typer.Typer(
        name="token",
        help="Make authorization tokens, and show what one allows.",
        rich_markup_mode=None,
    )
    app.add_typer(group)

    @command(group, "make")
    def make(
        output: Output,
        issuer_key_file: Annotated[
            Path,
            typer.Option(
                "--issuer-key-file", metavar="FILE", help="Key of `kvcs keygen --issuer`."
            ),
        ],
        audience: Annotated[
            list[str],
            typer.Option(
                "--audience", metavar="NAME", help="Relay that it is for; may be repeated."
            ),
        ],
        out: Annotated[
            Path,
            typer.Option("--out", metavar="FILE", help="Where to; one that is there is replaced."),
        ],
        role: Annotated[
            str,
            typer.Option(
                "--role", metavar="NAME", help="What it allows: producer, consumer or both."
            ),
        ] = "consumer",
        scope_key_file: Annotated[
            Path | None,
            typer.Option("--scope-key-file", metavar="FILE", help="Scope that it is for."),
        ] = None,
        scope_id: Annotated[
            str | None,
            typer.Option(
                "--scope-id",
                metavar="HEX",
                help="The same, by its Scope ID; several are separated by commas.",
            ),
        ] = None,
        lifetime: Annotated[
            float,
            typer.Option(
                "--lifetime", parser=seconds, metavar="SECONDS", help="How long it counts."
            ),
        ] = LIFETIME,
        map_form: Annotated[
            bool,
            typer.Option(
                "--map-form", help="Write the rights as a map, for relays that expect that."
            ),
        ] = False,
    ) -> None:
        """Make a token and write it as base64url text to a file that only you can read.

        Producers and consumers read the file again when the token is about to expire: replace it in
        time. The scope is by default that of the issuer's key.
        """
        check_apart(out, (issuer_key_file, scope_key_file))
        key = read_own_key(issuer_key_file, output)
        if role not in ROLES:
            raise UsageError(f"--role is producer, consumer or both, not {role!r}")
        scopes = Scopes(scope_key_file, scope_id).read(output)
        if not scopes and key.public.scope_id is not None:
            scopes = [key.public.scope_id]
        if not scopes:
            raise UsageError("the key speaks for every scope: name one, --scope-key-file FILE")
        if key.public.scope_id is not None and scopes != [key.public.scope_id]:
            raise UsageError("the key speaks for another scope; no relay would take the token")
        value = issue(
            key,
            audience=audience,
            rules=[scope_rule(each, ROLES[role]) for each in scopes],
            issued_at=int(time.time()),
            lifetime=max(1, round(lifetime)),
            token_id=secrets.token_bytes(TOKEN_ID_OCTETS),
            map_form=map_form,
        )
        text = base64.urlsafe_b64encode(value).rstrip(b"=") + b"\n"
        write_file(out, text, private=True, replace=True)
        if lifetime > MAX_LIFETIME:
            output.note(
                f"relays take no token that counts for more than {MAX_LIFETIME} s unless"
                " they are told to"
            )
        _show(output, {"file": str(out)} | describe(read_claims(value)))

    @command(group, "show")
    def show(
        output: Output,
        token_file: Annotated[Path, typer.Argument(metavar="FILE", help="Token, base64url text.")],
        issuers: Annotated[
            Path | None,
            typer.Option(
                "--issuers", metavar="FILE", help="Verify it as a relay with this ring would."
            ),
        ] = None,
    ) -> None:
        """Show what a token allows, and until when; never the token itself."""
        value = read_token(token_file)
        try:
            claims = read_claims(value)
        except TrustError as exc:
            raise FileError(f"{token_file}: {exc}") from None
        document = {"file": str(token_file)} | describe(claims)
        now = time.time()
        document["expired"] = now >= claims.expires
        if issuers is not None:
            verifier = TokenVerifier(load_key_ring(issuers, KeyUse.TOKEN), claims.audience)
            try:
                verifier.verify(value, now)
                document["verified"] = True
            except TrustError as exc:
                document |= {"verified": False, "refused": exc.check, "reason": str(exc)}
        _show(output, document)


def describe(claims: Claims) -> dict[str, Any]:
    """JSON form of what a token says."""
    return {
        "issuer": claims.issuer,
        "kid": claims.kid.hex(),
        "token_id": claims.token_id.hex(),
        "audience": list(claims.audience),
        "issued_at": when(claims.issued_at),
        "expires": when(claims.expires),
        "allows": [_rule(rule) for rule in claims.rules],
    }


def _rule(rule: Rule) -> dict[str, Any]:
    fields = [
        match.octets.decode() if match.octets == KVCS_ROOT else match.octets.hex()
        for match in rule.namespace
    ]
    known = {int(action): action.name for action in Action}
    return {
        "actions": [known.get(number, str(number)) for number in sorted(rule.actions)],
        "namespace": fields or "any",
    }


def _show(output: Output, document: dict[str, Any]) -> None:
    facts: list[tuple[str, object]] = []
    for name, value in document.items():
        if name == "allows":
            for rule in value:
                where = rule["namespace"]
                place = where if isinstance(where, str) else "/".join(where)
                facts.append(("allows", f"{' '.join(rule['actions'])} below {place}"))
        elif isinstance(value, list):
            facts.append((name, " ".join(value)))
        else:
            facts.append((name.replace("_", " "), value))
    output.result(document, facts)

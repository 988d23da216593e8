"""`kvcs doctor`: what is weak in the settings and on this machine."""

from __future__ import annotations

import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from kvcs.cli.checks import Chosen, Finding, findings, machine
from kvcs.cli.failures import ExitCode
from kvcs.cli.frame import command
from kvcs.cli.options import (
    ClientCaOption,
    ClientCertOption,
    ClientKeyOption,
    DescriptorOption,
    InsecureOption,
    IssuersOption,
    KeysOption,
    LikeOption,
    ProtectKeyOption,
    RequireSignedOption,
    TokenOption,
    UntrustedRelaysOption,
)
from kvcs.cli.output import Output

COLUMNS = ("check", "subject", "problem", "advice")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "doctor")
    def doctor(
        output: Output,
        ctx: typer.Context,
        scope_key_file: Annotated[
            Path | None,
            typer.Option("--scope-key-file", metavar="FILE", help="The members' scope key."),
        ] = None,
        protect_key_file: ProtectKeyOption = None,
        sign_key_file: Annotated[
            Path | None,
            typer.Option(
                "--sign-key-file", metavar="FILE", help="Producer's key, which signs manifests."
            ),
        ] = None,
        keys_file: KeysOption = None,
        require_signed: RequireSignedOption = False,
        token_file: TokenOption = None,
        key: Annotated[
            Path | None,
            typer.Option("--key", metavar="FILE", help="Private key of a certificate, PEM."),
        ] = None,
        cert: Annotated[
            Path | None, typer.Option("--cert", metavar="FILE", help="Certificate chain, PEM.")
        ] = None,
        client_cert: ClientCertOption = None,
        client_key: ClientKeyOption = None,
        client_ca: ClientCaOption = None,
        like: LikeOption = None,
        descriptor: DescriptorOption = None,
        insecure: InsecureOption = False,
        allow_anyone: Annotated[
            bool,
            typer.Option("--allow-anyone", help="A relay is run with this option."),
        ] = False,
        serve: Annotated[
            str | None,
            typer.Option("--serve", metavar="HOST:PORT", help="A publisher listens there."),
        ] = None,
        issuers: IssuersOption = None,
        untrusted_relays: UntrustedRelaysOption = False,
    ) -> None:
        """Look for weak settings: give it the options of a command.

        What the configuration file and the environment say for the other commands is looked at,
        too. It changes nothing and connects to nobody. The exit code is 0 where nothing is weak,
        else 2.
        """
        given = locals()
        own = Chosen(
            **{each.name: given[each.name] for each in fields(Chosen) if each.name != "serve"},
            serve=bool(serve),
        )
        settings = getattr(cast(Any, ctx.find_root()).obj, "values", {})
        tables = [own, *(Chosen.of(name, table) for name, table in settings.items())]
        now = time.time()
        found: dict[Finding, None] = {}
        for table in tables:
            found |= dict.fromkeys(findings(table, now))
        found |= dict.fromkeys(machine())
        if output.as_json or found:
            output.table(COLUMNS, [asdict(each) for each in found])
        else:
            output.result({}, [("weak settings", "none")])
        if found:
            raise typer.Exit(ExitCode.REFUSED)

"""`kvcs ls`: publications of a prefix or of a scope."""

from __future__ import annotations

import typer

from kvcs.cli import files
from kvcs.cli.authorities import read_protection
from kvcs.cli.frame import command
from kvcs.cli.options import (
    CaOption,
    DescriptorOption,
    InsecureOption,
    LikeOption,
    Peer,
    ProtectKeyOption,
    RelayOption,
    ScopeKeyOption,
    TokenOption,
    TokensOption,
    UntrustedRelaysOption,
    read_prefix,
)
from kvcs.cli.output import Output
from kvcs.kv import KVCS_SCHEME, Prefix, holder_uri
from kvcs.subscriber import Subscriber


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "ls")
    async def ls(
        output: Output,
        relay: RelayOption,
        scope_key_file: ScopeKeyOption,
        like: LikeOption = None,
        tokens: TokensOption = None,
        descriptor: DescriptorOption = None,
        ca: CaOption = None,
        token_file: TokenOption = None,
        protect_key_file: ProtectKeyOption = None,
        untrusted_relays: UntrustedRelaysOption = False,
        insecure: InsecureOption = False,
    ) -> None:
        """List the publications of a scope, or of one prefix.

        Nothing of them is read: names alone are shown, whether the publications are protected or
        not.
        """
        ring = read_protection(protect_key_file, output)
        wanted: Prefix | bytes
        if like is None and tokens is None and descriptor is None:
            wanted = KVCS_SCHEME.scope_id(files.read_scope(scope_key_file, output))
        else:
            wanted = read_prefix(output, scope_key_file, like, tokens, descriptor)
        peer = Peer(relay, ca, token_file, insecure, untrusted=untrusted_relays)
        async with peer.connect() as session:
            found = await Subscriber(session, protection=ring).list(wanted)
        rows = [
            {
                "publication": info.namespace.publication_id.hex(),
                "compat_id": info.namespace.compat_id.hex()[:16],
                "anchor_key": info.namespace.anchor_key.hex()[:16],
                "uri": holder_uri(relay, info.namespace),
            }
            for info in found
        ]
        output.table(("publication", "compat_id", "anchor_key", "uri"), rows)

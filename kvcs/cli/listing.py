"""`kvcs ls`: publications of a prefix or of a scope."""

from __future__ import annotations

import asyncio
from typing import Any

import typer

from kvcs.cli import files
from kvcs.cli.authorities import read_protection
from kvcs.cli.frame import command
from kvcs.cli.groups import PeerOptions, PrefixOptions
from kvcs.cli.options import ProtectKeyOption, RelayOption, ScopeKeyOption
from kvcs.cli.output import Output
from kvcs.cli.probing import AnchorsOption, ProbeOption, parse_anchors
from kvcs.kv import KVCS_SCHEME, Prefix, holder_uri
from kvcs.subscriber import PublicationInfo, Subscriber
from kvcs.subscriber.discovery import halved


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "ls")
    async def ls(
        output: Output,
        *,
        relay: RelayOption,
        scope_key_file: ScopeKeyOption,
        prefix: PrefixOptions,
        who: PeerOptions,
        protect_key_file: ProtectKeyOption = None,
        probe: ProbeOption = None,
        anchors: AnchorsOption = None,
    ) -> None:
        """List the publications of a scope, or of one prefix.

        Publications of shorter prefixes are listed, too. Nothing of them is read: names alone are
        shown, whether they are protected or not.
        """
        ring = read_protection(protect_key_file, output)
        lengths = parse_anchors(anchors)
        wanted: Prefix | bytes
        if prefix.given:
            wanted = prefix.read(output, scope_key_file)
        else:
            wanted = KVCS_SCHEME.scope_id(files.read_scope(scope_key_file, output))
        async with who.peer(relay).connect() as session:
            subscriber = Subscriber(session, protection=ring)
            if isinstance(wanted, Prefix):
                found = await _of_prefix(subscriber, wanted, probe, lengths)
            else:
                found = [(info, None) for info in await subscriber.list(wanted)]
        rows: list[dict[str, Any]] = [
            {
                "publication": info.namespace.publication_id.hex(),
                "compat_id": info.namespace.compat_id.hex()[:16],
                "anchor_key": info.namespace.anchor_key.hex()[:16],
                "uri": holder_uri(relay, info.namespace),
            }
            | ({} if usable is None else {"tokens": usable})
            for info, usable in found
        ]
        columns = ("publication", "compat_id", "anchor_key", "uri")
        output.table((*columns, "tokens") if isinstance(wanted, Prefix) else columns, rows)


async def _of_prefix(
    subscriber: Subscriber, prefix: Prefix, probe: int | None, anchors: tuple[int, ...] | None
) -> list[tuple[PublicationInfo, int | None]]:
    """Publications of a prefix and of shorter ones, longest first, and how many tokens they share
    with it at least: those of their first segment.

    Raises:
        UsageError: an anchor is none.
        KvcsError: as `Subscriber.list`.
    """
    count = subscriber.settings.probe if probe is None else probe
    lengths = halved(prefix.blocks, count) if anchors is None else anchors[:count]
    lengths = (prefix.blocks, *sorted(set(lengths) - {prefix.blocks}, reverse=True))
    for each in lengths:
        prefix.anchor_key(each)  # refused here, before anything is asked for
    answers = await asyncio.gather(*(subscriber.list(prefix, blocks=each) for each in lengths))
    size = prefix.descriptor.block_tokens
    return [
        (info, length * size)
        for length, answer in zip(lengths, answers, strict=True)
        for info in answer
    ]

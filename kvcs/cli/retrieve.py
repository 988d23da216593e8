"""`kvcs subscribe` and `kvcs fetch`: a prefix's KV cache into a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcs.cli.authorities import check_untrusted, read_protection
from kvcs.cli.files import check_apart, check_target
from kvcs.cli.frame import command
from kvcs.cli.groups import PrefixOptions, TransferOptions
from kvcs.cli.lines import Lines
from kvcs.cli.options import (
    AnyRelaysOption,
    DeadlineOption,
    KeysOption,
    LinesOption,
    ProtectKeyOption,
    RequireSignedOption,
    ScopeKeyOption,
    WaitOption,
    parse_range,
    seconds,
)
from kvcs.cli.output import Output, octets_text
from kvcs.cli.peers import Peer, connect_all, token_source
from kvcs.cli.probing import AnchorsOption, ProbeOption, parse_anchors
from kvcs.errors import CacheIncomplete, FileError, PublicationAborted, UsageError
from kvcs.fallback import HttpSource
from kvcs.keyfiles import load_key_ring
from kvcs.kv import LayerTensors, Prefix
from kvcs.kv.arrays import byte_view
from kvcs.kvfile import load_kv_file, save_kv_file
from kvcs.subscriber import Cache, Subscriber, SubscriberSettings
from kvcs.subscriber.indices import index_at
from kvcs.subscriber.reception import Retrieve

OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="KV cache file to write.")
]
CompareOption = Annotated[
    Path | None,
    typer.Option(
        "--compare", metavar="FILE", help="Compare with this KV cache file, octet by octet."
    ),
]
PublicationOption = Annotated[
    str | None, typer.Option("--publication", metavar="URI", help="Take this one: a holder URI.")
]

FallbackOption = Annotated[
    str | None,
    typer.Option(
        "--fallback",
        metavar="URL",
        help="Where `kvcs serve-http` is, https://HOST:PORT: for what no relay has, and where none"
        " can be reached.",
    ),
]

IndexOption = Annotated[
    str | None,
    typer.Option(
        "--index",
        metavar="WHERE",
        help="Look there, too, for publications that hold blocks of the prompt: a file or folder"
        " of `publish --index-out`, or https://HOST/PATH. {scope}, {compat} and {anchor} in a URL"
        " stand for these names of the prompt.",
    ),
]

PatienceOption = Annotated[
    float | None,
    typer.Option(
        "--patience",
        parser=seconds,
        metavar="SECONDS",
        help="How long to wait for a relay or a producer that was lost in the middle; up to the"
        " deadline by default.",
    ),
]

WholeOption = Annotated[
    bool,
    typer.Option(
        "--whole",
        help="Take layers only when all are there: what lacks may then come from another"
        " publication, a whole segment at a time.",
    ),
]

LossyOption = Annotated[
    bool, typer.Option("--lossy", help="Take an encoding that loses some bits, too.")
]


@dataclass(frozen=True, slots=True)
class RetrieveOptions:
    """What `subscribe` and `fetch` have in common."""

    fallback: FallbackOption = None
    index: IndexOption = None
    out: OutOption = None
    compare: CompareOption = None
    publication: PublicationOption = None
    probe: ProbeOption = None
    anchors: AnchorsOption = None
    lossy: LossyOption = False
    whole: WholeOption = False
    patience: PatienceOption = None
    keys_file: KeysOption = None
    require_signed: RequireSignedOption = False
    protect_key_file: ProtectKeyOption = None
    deadline: DeadlineOption = None
    lines: LinesOption = False

    def check(self, peers: Sequence[Peer], reads: Sequence[Path | None]) -> None:
        """Look at what does not go together.

        Args:
            peers: whom the command asks.
            reads: files of its other options, which ``out`` must not replace.

        Raises:
            UsageError: something does not, and the message says what.
            FileError: the file to write to cannot be written.
        """
        if not peers and self.fallback is None:
            raise UsageError("say where to look: --relay URL, --fallback URL, or both")
        if self.out is None and self.compare is None:
            raise UsageError("say what to do with the cache: --out FILE, --compare FILE, or both")
        if self.out is not None:
            check_target(self.out)
            index = None if self.index is None else Path(self.index)  # a URL is no file
            ours = (self.compare, self.keys_file, self.protect_key_file, index)
            check_apart(self.out, (*reads, *ours))
        if self.require_signed and self.keys_file is None:
            raise UsageError("--require-signed needs --keys-file FILE: whose signatures count")
        check_untrusted(any(peer.untrusted for peer in peers), self.protect_key_file)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""

    @command(app, "subscribe")
    async def subscribe(
        output: Output,
        *,
        scope_key_file: ScopeKeyOption,
        relay: AnyRelaysOption = None,
        prefix: PrefixOptions,
        who: TransferOptions,
        how: RetrieveOptions,
        wait: WaitOption = None,
    ) -> None:
        """Follow a publication, live or not, and write its KV cache."""
        wanted = prefix.read(output, scope_key_file)
        reads = prefix.files(scope_key_file)
        await _retrieve(output, relay, wanted, who, how, reads, retrieve="subscribe", wait=wait)

    @command(app, "fetch")
    async def fetch(
        output: Output,
        *,
        scope_key_file: ScopeKeyOption,
        relay: AnyRelaysOption = None,
        prefix: PrefixOptions,
        who: TransferOptions,
        how: RetrieveOptions,
        layers: Annotated[
            str | None,
            typer.Option("--layers", metavar="N-N", help="Such as 4-11; all by default."),
        ] = None,
        blocks: Annotated[
            str | None,
            typer.Option("--blocks", metavar="0-N", help="From the start on, such as 0-15."),
        ] = None,
        wait: WaitOption = 0.0,
    ) -> None:
        """Fetch layers and blocks of what is published already."""
        wanted = prefix.read(output, scope_key_file)
        some = parse_range(blocks, "--blocks")
        if some is not None and some[0] != 0:
            raise UsageError("--blocks starts at 0: a later block needs those before it")
        await _retrieve(
            output,
            relay,
            wanted,
            who,
            how,
            prefix.files(scope_key_file),
            retrieve="fetch",
            wait=wait,
            layers=parse_range(layers, "--layers"),
            blocks=None if some is None else some[1] + 1,
        )


async def _retrieve(
    output: Output,
    relays: Sequence[str] | None,
    prefix: Prefix,
    who: TransferOptions,
    how: RetrieveOptions,
    reads: Sequence[Path | None],
    *,
    retrieve: Retrieve,
    wait: float | None,
    layers: tuple[int, int] | None = None,
    blocks: int | None = None,
) -> None:
    peers = who.peers(relays, how.deadline)
    how.check(peers, (*reads, *who.files))
    anchors = parse_anchors(how.anchors)
    ring = read_protection(how.protect_key_file, output)
    expected = None if how.compare is None else load_kv_file(how.compare, partial=True)
    if expected is not None and expected.descriptor != prefix.descriptor:
        differences = "; ".join(prefix.descriptor.differences(expected.descriptor))
        raise FileError(f"{how.compare}: another descriptor: {differences}")
    keys = None if how.keys_file is None else load_key_ring(how.keys_file)
    token, ca, told = token_source(who.token_file), who.ca, Lines(how.lines)
    fallback = None if how.fallback is None else HttpSource(how.fallback, ca=ca, token=token)
    index = None if how.index is None else index_at(how.index, ca=ca, token=token)
    received: dict[int, tuple[Any, Any]] = {}
    differing: list[int] = []
    async with connect_all(peers, can_do_without=fallback is not None) as sessions:
        subscriber = Subscriber(
            *sessions,
            settings=SubscriberSettings(patience=how.patience, held_octets=None),
            keys=keys,
            require_signed=how.require_signed,
            protection=ring,
            fallback=fallback,
            index=index,
        )
        async with subscriber.open(
            prefix,
            deadline=how.deadline,
            wait=wait,
            layers=layers,
            blocks=blocks,
            publication=how.publication,
            probe=how.probe,
            anchors=anchors,
            lossy=how.lossy,
            whole=how.whole,
            retrieve=retrieve,
        ) as cache:
            told.event("opened", layers=len(cache.layers), blocks=cache.blocks)
            try:
                with output.progress("layers verified", len(cache.layers)) as step:
                    async for layer in cache:
                        if how.out is not None:
                            received[layer.index] = (layer.k, layer.v)
                        if expected is not None and not _same(
                            layer, expected.layers.get(layer.index)
                        ):
                            differing.append(layer.index)
                        if how.out is None:
                            cache.drop(layer.index)  # it was compared
                        told.event("layer_verified", layer=layer.index)
                        step.advance()
            except PublicationAborted as exc:
                # What lacks is the same to the caller, whoever failed.
                raise CacheIncomplete(str(exc), cache.missing, cache.usable_tokens) from exc
            document = _document(cache) | {"protected": ring is not None}
    if how.out is not None:
        count = document["tokens"]
        save_kv_file(how.out, prefix.descriptor, prefix.token_ids[:count], received)
        document["file"] = str(how.out)
    if expected is not None:
        document["equal"] = not differing
    _show(output, document, told)
    if expected is not None and differing:
        first = differing[0]
        lacks = "" if first in expected.layers else ", which it lacks"
        raise FileError(
            f"{how.compare}: {len(differing)} of {document['layers']} layers that were received"
            f" differ from it, the first is layer {first}{lacks}"
        )


def _same(layer: LayerTensors, expected: tuple[Any, Any] | None) -> bool:
    """Whether a layer equals the first tokens of the expected one, octet by octet."""
    if expected is None:
        return False
    tokens = len(layer.k)
    pairs = zip((layer.k, layer.v), expected, strict=True)
    return all(byte_view(mine) == byte_view(other[:tokens]) for mine, other in pairs)


def _document(cache: Cache) -> dict[str, Any]:
    report = cache.report
    document = asdict(report)
    document["publication"] = report.publication.publication_id.hex()
    document["segments_from"] = {
        number: other.publication_id.hex() for number, other in report.segments_from.items()
    }
    document["signed_by"] = None if report.signed_by is None else report.signed_by.hex()
    seconds = report.last_layer_seconds
    document["goodput_octets_per_second"] = (
        round(report.tensor_octets / seconds) if seconds else None
    )
    return document


def _show(output: Output, document: dict[str, Any], told: Lines) -> None:
    if told.wanted:
        told.event("retrieved", **document)
        return
    facts: list[tuple[str, object]] = [
        ("publication", document["publication"]),
        ("tracks", " ".join(document["tracks"])),
        ("tokens", document["tokens"]),
        ("layers", document["layers"]),
        ("objects", f"{document['objects']}, {octets_text(document['octets'])}"),
        ("first layer", f"{document['first_layer_seconds']:.3f} s"),
        ("last layer", f"{document['last_layer_seconds']:.3f} s"),
    ]
    if document["tokens"] < document["prefix_tokens"]:
        facts.insert(3, ("to compute", f"{document['prefix_tokens'] - document['tokens']} tokens"))
    for number, other in document["segments_from"].items():
        facts.append((f"segment {number}", f"whole from publication {other}"))
    if document["believed"]:
        facts.append(("believed", "yes: an index says what a segment holds, no hash confirms it"))
    if document["signed_by"] is not None:
        facts.append(("signed by", f"key {document['signed_by']}, verified"))
    if document["protected"]:
        facts.append(("protected", "yes, opened with the scope's keys"))
    if document["duplicates"] or document["rejected"]:
        facts.append(("duplicates", document["duplicates"]))
        facts.append(("rejected", document["rejected"] or 0))
    if "equal" in document:
        facts.append(("equal", "yes, octet by octet" if document["equal"] else "NO"))
    if "file" in document:
        facts.append(("file", document["file"]))
    output.result(document, facts)

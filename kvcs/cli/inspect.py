"""`kvcs inspect`: what a KV cache file holds, or what a publication says of itself."""

from __future__ import annotations

import hashlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcs.cli.authorities import check_untrusted
from kvcs.cli.files import read_scope
from kvcs.cli.frame import command
from kvcs.cli.groups import PeerOptions, PrefixOptions
from kvcs.cli.options import KeysOption, ManifestDeadlineOption, ProtectKeyOption
from kvcs.cli.output import Output, octets_text
from kvcs.cli.prefixes import prefix_of
from kvcs.cli.publications import Wanted, inspect_publication
from kvcs.errors import UsageError
from kvcs.kv import KVCS_SCHEME, RAW, DataTrack, Prefix, byte_view, parse_holder_uri
from kvcs.kvfile import KvFile, load_kv_file
from kvcs.moqt.names import namespace_text


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "inspect")
    def inspect(
        output: Output,
        *,
        target: Annotated[
            str,
            typer.Argument(
                metavar="FILE|URI",
                help="KV cache file (safetensors), or a publication's holder URI; `kvcs ls` shows"
                " them.",
            ),
        ],
        scope_key_file: Annotated[
            Path | None,
            typer.Option(
                "--scope-key-file",
                metavar="FILE",
                help="Scope key: what a file is called in the scope, whether a URI is of it.",
            ),
        ] = None,
        prefix: PrefixOptions,
        who: PeerOptions,
        keys_file: KeysOption = None,
        protect_key_file: ProtectKeyOption = None,
        deadline: ManifestDeadlineOption = None,
    ) -> Coroutine[Any, Any, None] | None:
        """Show a KV cache file, or a publication's manifest.

        Of a file: descriptor, tokens, blocks, identity and digests. The digests are those that a
        manifest lists for codec raw: with --json every one, else one for each track, the SHA-256 of
        all of its digests. Two files with equal lines hold equal blocks. Token ids are not shown.

        Of a publication: what its namespace and its manifest say, and by which key it is signed.
        The options from --like on are for publications; with a prefix, the manifest is held to it,
        and with --keys-file its signature is verified; one that is sealed needs --protect-key-file.
        """
        if target.startswith("moqt:"):
            url, _ = parse_holder_uri(target)
            peer = who.peer(url, deadline)
            check_untrusted(who.untrusted_relays, protect_key_file)
            wanted = Wanted(scope_key_file, prefix)
            return inspect_publication(
                output, target, peer, wanted, deadline, keys_file, protect_key_file
            )
        if prefix.given:
            raise UsageError("a prefix is compared with a publication, moqt://...; this is a file")
        _inspect_file(output, Path(target), scope_key_file)
        return None


def _inspect_file(output: Output, file: Path, scope_key_file: Path | None) -> None:
    opened = load_kv_file(file, partial=True)
    document = describe(opened, object_digests(opened, output))
    if scope_key_file is not None:
        scope = read_scope(scope_key_file, output)
        document |= _identity(prefix_of(opened, scope))
    output.result(document, _facts(opened, document))


def describe(file: KvFile, digests: dict[str, list[list[str]]]) -> dict[str, Any]:
    """JSON form of a KV cache file.

    Args:
        file: an opened file.
        digests: its object digests.
    """
    descriptor = file.descriptor
    return {
        "file": str(file.path),
        "descriptor": descriptor.to_json(),
        "compat_id": KVCS_SCHEME.compat_id(KVCS_SCHEME.compat(descriptor)).hex(),
        "tokens": file.tokens,
        "blocks": file.blocks,
        "tokens_left_over": file.tokens - file.blocks * descriptor.block_tokens,
        "complete": file.is_complete,
        "layers": list(file.layers),
        "octets": sum(layer.k.nbytes + layer.v.nbytes for layer in file.layers.values()),
        "object_digests": digests,
    }


def object_digests(file: KvFile, output: Output) -> dict[str, list[list[str]]]:
    """Digests of a file's blocks as a manifest lists them (KVCS "Manifest Track").

    Args:
        file: an opened file; every whole block of it is read.
        output: shows the progress.

    Returns:
        By Track Name in segment 0 and codec raw: for each layer that the file holds, in order, the
        hex Data Digest of each block.
    """
    descriptor = file.descriptor
    tracks = {part: str(DataTrack(part, RAW.name, 0)) for part in descriptor.components}
    digests: dict[str, list[list[str]]] = {name: [] for name in tracks.values()}
    width = descriptor.block_tokens
    with output.progress("hashing", len(file.layers)) as step:
        for layer in file.layers.values():
            sections = {"k": (layer.k,), "v": (layer.v,), "kv": (layer.k, layer.v)}
            for component, name in tracks.items():
                group = []
                for start in range(0, file.blocks * width, width):
                    digest = hashlib.sha256()
                    for section in sections[component]:
                        digest.update(byte_view(section[start : start + width]))
                    group.append(digest.hexdigest())
                digests[name].append(group)
            step.advance()
    return digests


def _identity(prefix: Prefix) -> dict[str, Any]:
    return {
        "scheme": prefix.scheme.name,
        "scope_id": prefix.scope_id.hex(),
        "anchor_key": prefix.anchor_key().hex(),
        "block_keys": [key.hex() for key in prefix.block_keys],
        "namespace_prefix": namespace_text(prefix.namespace_prefix()),
    }


def _facts(file: KvFile, document: dict[str, Any]) -> list[tuple[str, object]]:
    descriptor = document["descriptor"]
    facts: list[tuple[str, object]] = [("file", document["file"])]
    for name, value in descriptor.items():
        if name != "extra":
            facts.append((name.replace("_", " "), "UNPINNED" if value is None else value))
    facts += [(f"extra {name}", value) for name, value in descriptor["extra"].items()]
    held = document["layers"]
    if not document["complete"]:
        facts.append(("layers held", _runs(held)))
    left_over = document["tokens_left_over"]
    facts += [
        ("tokens", document["tokens"]),
        ("blocks", f"{document['blocks']} ({left_over} tokens left over)"),
        ("size", octets_text(document["octets"])),
        ("compat id", document["compat_id"]),
    ]
    for name in ("scheme", "scope_id", "anchor_key", "namespace_prefix"):
        if name in document:
            facts.append((name.replace("_", " "), document[name]))
    for track, groups in document["object_digests"].items():
        digests = [bytes.fromhex(digest) for group in groups for digest in group]
        summary = hashlib.sha256(b"".join(digests)).hexdigest()
        facts.append((track, f"{len(digests)} objects, sha256 of their digests {summary}"))
    return facts


def _runs(layers: list[int]) -> str:
    """Layers as runs, for example ``0-3, 7``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)

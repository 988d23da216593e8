"""What a publication's manifest says, for `kvcs inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcs.cli.authorities import read_protection
from kvcs.cli.files import read_scope
from kvcs.cli.groups import PrefixOptions
from kvcs.cli.output import Output, octets_text
from kvcs.cli.peers import Peer
from kvcs.errors import UsageError
from kvcs.keyfiles import load_key_ring
from kvcs.kv import (
    KVCS_SCHEME,
    Descriptor,
    Manifest,
    Prefix,
    PublicationNamespace,
    Scope,
    parse_holder_uri,
)
from kvcs.subscriber import ManifestFacts, Subscriber

MANIFEST_SECONDS = 10.0
"""Longest wait for a manifest unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user knows of a publication, to compare it with."""

    scope_key_file: Path | None
    prefix: PrefixOptions

    def read(self, output: Output) -> tuple[Scope | None, Prefix | None]:
        """The scope and the prefix that the files hold.

        Raises:
            UsageError: a prefix without a scope key, or what `read_prefix` raises.
        """
        if self.scope_key_file is None:
            if self.prefix.given:
                raise UsageError("a prefix has a name only in a scope: add --scope-key-file FILE")
            return None, None
        if not self.prefix.given:
            return read_scope(self.scope_key_file, output), None
        prefix = self.prefix.read(output, self.scope_key_file)
        return prefix.scope, prefix


async def inspect_publication(
    output: Output,
    uri: str,
    peer: Peer,
    wanted: Wanted,
    deadline: float | None,
    keys_file: Path | None = None,
    protect_key_file: Path | None = None,
) -> None:
    """Read a publication's manifest and print what it says.

    Args:
        output: where to print.
        uri: its holder URI.
        peer: whom to ask; `peer.url` is the holder's.
        wanted: what to compare it with.
        deadline: seconds to wait for the manifest.
        keys_file: producers' keys, to verify a signed manifest with.
        protect_key_file: protection keys of the scope, to open a sealed one with.

    Raises:
        KvcsError: it cannot be had, or is not what is wanted.
    """
    _, namespace = parse_holder_uri(uri)
    scope, prefix = wanted.read(output)
    if prefix is not None and prefix.scope_id != namespace.scope_id:
        raise UsageError(
            f"the publication is of scope {namespace.scope_id.hex()}, the scope key of"
            f" {prefix.scope_id.hex()}"
        )
    keys = None if keys_file is None else load_key_ring(keys_file)
    ring = read_protection(protect_key_file, output)
    async with peer.connect() as session:
        found = await Subscriber(session, keys=keys, protection=ring).look_at(
            namespace, prefix, deadline=MANIFEST_SECONDS if deadline is None else deadline
        )
    manifest = found.manifest
    document = describe_publication(uri, namespace, manifest) | describe_signature(found)
    document["protected"] = ring is not None
    if scope is not None:
        document["scope_is_ours"] = KVCS_SCHEME.scope_id(scope) == namespace.scope_id
    if prefix is not None:
        blocks = sum(entry.blocks for entry in manifest.covering(prefix))
        document["blocks_of_prefix"] = blocks
        document["tokens_of_prefix"] = blocks * manifest.block_tokens
    output.result(document, _facts(document))


def describe_signature(found: ManifestFacts) -> dict[str, Any]:
    """JSON form of how a manifest is signed."""
    return {
        "signed": found.kid is not None,
        "kid": None if found.kid is None else found.kid.hex(),
        "signature_verified": found.key is not None,
        "producer": None if found.key is None else found.key.name or None,
        "refused": None if found.doubt is None else found.doubt.check,
    }


def describe_publication(
    uri: str, namespace: PublicationNamespace, manifest: Manifest
) -> dict[str, Any]:
    """JSON form of a publication.

    Args:
        uri: its holder URI.
        namespace: its Track Namespace.
        manifest: the version to describe.
    """
    descriptor = _descriptor(manifest, namespace)
    octets = None
    if descriptor is not None:
        layouts = (descriptor.layout(component) for component in descriptor.components)
        per_block = sum(layout.octets for layout in layouts)
        octets = per_block * manifest.blocks * manifest.layers
    return {
        "uri": uri,
        "publication": namespace.publication_id.hex(),
        "scope_id": namespace.scope_id.hex(),
        "compat_id": namespace.compat_id.hex(),
        "anchor_key": namespace.anchor_key.hex(),
        "compat": dict(manifest.compat),
        "compat_id_verified": descriptor is not None,
        "layers": manifest.layers,
        "block_tokens": manifest.block_tokens,
        "blocks": manifest.blocks,
        "tokens": manifest.blocks * manifest.block_tokens,
        "octets": octets,
        "complete": manifest.complete,
        "deterministic": manifest.deterministic,
        "segments": [
            {
                "segment": entry.segment,
                "first_block": entry.first_block,
                "blocks": entry.blocks,
                "tracks": [str(track) for track in entry.tracks],
                "layers_listed": entry.layers_listed(),
                "complete": entry.complete,
                "block_keys_sha256": entry.block_keys_sha256.hex(),
            }
            for entry in manifest.segments
        ],
    }


def _descriptor(manifest: Manifest, namespace: PublicationNamespace) -> Descriptor | None:
    """The descriptor, where it is of our scheme and its Compatibility ID is the namespace's."""
    try:
        if KVCS_SCHEME.compat_id(manifest.compat) != namespace.compat_id:
            return None
        return Descriptor.from_json(manifest.compat)
    except UsageError:
        return None


def _signed(document: dict[str, Any]) -> str:
    if not document["signed"]:
        return "no"
    by = f"by key {document['kid']}"
    if document["signature_verified"]:
        producer = f" of {document['producer']}" if document["producer"] else ""
        return f"{by}{producer}, verified"
    if document["refused"] is None:
        return f"{by}, NOT verified: say whose keys count, --keys-file FILE"
    return f"{by}, NOT verified ({document['refused'].replace('_', ' ')})"


def _facts(document: dict[str, Any]) -> list[tuple[str, object]]:
    verified = "" if document["compat_id_verified"] else " (not that of the manifest's compat)"
    scope = ""
    if "scope_is_ours" in document:
        scope = " (ours)" if document["scope_is_ours"] else " (NOT that of the scope key)"
    facts: list[tuple[str, object]] = [
        ("publication", document["publication"]),
        ("scope id", document["scope_id"] + scope),
        ("compat id", document["compat_id"] + verified),
        ("anchor key", document["anchor_key"]),
    ]
    for name, value in document["compat"].items():
        if isinstance(value, dict):
            facts += [(f"{name} {member}", each) for member, each in value.items()]
        elif name not in ("layers", "block_tokens"):
            facts.append((name.replace("_", " "), "UNPINNED" if value is None else value))
    facts += [
        ("layers", document["layers"]),
        ("tokens", f"{document['tokens']} in {document['blocks']} blocks"),
    ]
    if "blocks_of_prefix" in document:
        mine = f"{document['tokens_of_prefix']} tokens in {document['blocks_of_prefix']} blocks"
        facts.append(("of the prefix", mine))
    if document["octets"] is not None:
        facts.append(("size", f"{octets_text(document['octets'])} of tensors"))
    facts.append(("complete", "yes" if document["complete"] else "no"))
    facts.append(("signed", _signed(document)))
    facts.append(("protected", "yes" if document["protected"] else "no"))
    for entry in document["segments"]:
        last = entry["first_block"] + entry["blocks"] - 1
        facts.append(
            (
                f"segment {entry['segment']}",
                f"blocks {entry['first_block']}-{last}, {' '.join(entry['tracks'])},"
                f" {entry['layers_listed']} of {document['layers']} layers listed",
            )
        )
    return facts

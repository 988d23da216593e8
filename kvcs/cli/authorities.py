"""What the commands around keys and tokens share: scopes, key rings, and how keys are shown."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvcs.cli.files import note_open_secret, read_scope
from kvcs.cli.output import Output
from kvcs.errors import FileError, UsageError
from kvcs.keyfiles import (
    load_key_ring,
    load_protection_ring,
    load_signing_key,
    save_key_ring,
)
from kvcs.kv import KVCS_SCHEME, ProtectionRing
from kvcs.trust import KeyRing, PublicKey, SigningKey
from kvcs.trust.keys import SCOPE_ID_OCTETS


@dataclass(frozen=True, slots=True)
class Scopes:
    """Scopes as the command line names them: by key file, by Scope ID, or both."""

    key_file: Path | None = None
    ids: str | None = None
    """Scope IDs in hex, separated by commas."""

    def read(self, output: Output) -> list[bytes]:
        """Their Scope IDs; the same one once.

        Raises:
            FileError: the file is no scope key.
            UsageError: a text is no Scope ID.
        """
        found: dict[bytes, None] = {}
        if self.key_file is not None:
            found[KVCS_SCHEME.scope_id(read_scope(self.key_file, output))] = None
        for text in (self.ids or "").split(","):
            if text:
                found[_scope_id(text)] = None
        return list(found)


def _scope_id(text: str) -> bytes:
    try:
        octets = bytes.fromhex(text)
    except ValueError:
        octets = b""
    if len(octets) != SCOPE_ID_OCTETS:
        raise UsageError(f"{text!r} is no Scope ID of {2 * SCOPE_ID_OCTETS} hex digits")
    return octets


def add_public(path: Path, keys: Iterable[PublicKey]) -> None:
    """Add keys to a ring's file, or make the file.

    Raises:
        FileError: it holds something else, keys for another use, or a key of that identifier.
    """
    fresh = list(keys)
    try:
        use = fresh[0].use
        ring = load_key_ring(path, use) if os.path.exists(path) else KeyRing(use=use)
        for key in fresh:
            ring.add(key)
    except FileError:
        raise
    except UsageError as exc:
        raise FileError(f"{path}: {exc}") from exc
    save_key_ring(path, ring)


def read_own_key(path: Path, output: Output) -> SigningKey:
    """Read a signing key, and say so where others can read it too.

    Raises:
        FileError: the file cannot be read, or is no signing key; nothing of it is repeated.
    """
    key = load_signing_key(path)
    with path.open("rb") as file:
        note_open_secret(path, file, output)
    return key


def read_protection(path: Path | None, output: Output) -> ProtectionRing | None:
    """Read a scope's protection keys, and say so where others can read them too.

    Raises:
        FileError: the file cannot be read, or holds something else; nothing of it is repeated.
    """
    if path is None:
        return None
    ring = load_protection_ring(path)
    with path.open("rb") as file:
        note_open_secret(path, file, output)
    return ring


def check_untrusted(untrusted: bool, protect_key_file: Path | None) -> None:
    """Check that relays which are not trusted get nothing that is not protected.

    Raises:
        UsageError: there are no protection keys.
    """
    if untrusted and protect_key_file is None:
        raise UsageError(
            "--untrusted-relays needs --protect-key-file FILE, the scope's protection keys;"
            " `kvcs keygen --protection` makes them"
        )


def key_facts(key: PublicKey) -> dict[str, Any]:
    """What is told of a key."""
    return {
        "kid": key.kid.hex(),
        "use": key.use.value,
        "algorithm": key.algorithm.name,
        "scope_id": "every scope" if key.scope_id is None else key.scope_id.hex(),
        "name": key.name,
        "not_before": when(key.not_before),
        "expires": when(key.expires),
    }


def when(seconds: float | None) -> str | None:
    """A time for people, UTC."""
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, OSError, ValueError):
        return f"{seconds:.0f}"

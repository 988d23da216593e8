"""Who may read, what it is and which tokens: Scope, Scheme and Prefix.

KVCS takes Compatibility ID, Scope ID and Block Keys from KVSP. Here they come from a `Scheme`; the
default one, `KvcsScheme`, is a pure function of bytes, the same in every process and on every host.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import rfc8785

from kvcs.errors import UsageError
from kvcs.kv.descriptor import Descriptor
from kvcs.kv.strict_json import Json
from kvcs.kv.tracks import (
    APPLICATION,
    BLOCK_KEY_OCTETS,
    COMPAT_ID_OCTETS,
    PUBLICATION_ID_OCTETS,
    SCOPE_ID_OCTETS,
    PublicationNamespace,
)
from kvcs.moqt.names import TrackNamespace

SCOPE_KEY_OCTETS: Final = 32
MAX_TOKEN_ID: Final = 2**32 - 1
MAX_PREFIX_TOKENS: Final = 2**28
"""Longest prefix; its Block Keys are all held in memory."""
MAX_EXTRA_IDENTITY: Final = 4_096
"""Strings in one extra identity."""
MAX_EXTRA_IDENTITY_OCTETS: Final = 1_024
"""Octets of UTF-8 in one of them."""
_FIRST_PREVIOUS = bytes(32)


@dataclass(frozen=True, slots=True)
class Scope:
    """A group of members that share KV caches, known by one secret key.

    Raises:
        UsageError: the key is not 32 octets.
    """

    key: bytes = field(repr=False)
    """Scope key, 32 secret octets; never sent, logged or shown."""

    def __post_init__(self) -> None:
        if not isinstance(self.key, bytes | bytearray | memoryview):
            raise UsageError(f"scope key: expected 32 octets, got a {type(self.key).__name__}")
        if len(self.key) != SCOPE_KEY_OCTETS:
            raise UsageError(f"scope key: expected 32 octets, got {len(self.key)}")
        object.__setattr__(self, "key", bytes(self.key))

    @classmethod
    def from_hex(cls, text: str) -> Scope:
        """Read the 64 hex characters of a key file; white space around them is dropped.

        Raises:
            UsageError: anything else. The message does not repeat the text.
        """
        digits = text.strip()
        if len(digits) != 2 * SCOPE_KEY_OCTETS or not all(
            digit in "0123456789abcdefABCDEF" for digit in digits
        ):
            raise UsageError("scope key: expected 64 hex characters")
        return cls(bytes.fromhex(digits))


class Scheme(Protocol):
    """How identity is derived; callers who have KVSP values supply their own."""

    @property
    def name(self) -> str:
        """Name and version, for logs and for comparing two sites."""

    def compat(self, descriptor: Descriptor) -> Mapping[str, Json]:
        """The ``compat`` object that a manifest carries for ``descriptor``."""

    def compat_id(self, compat: Mapping[str, Json]) -> bytes:
        """Compatibility ID, 32 octets, of a ``compat`` object, ours or a manifest's.

        Raises:
            UsageError: the object is not a Compatibility Descriptor of this scheme.
        """

    def scope_id(self, scope: Scope) -> bytes:
        """Scope ID, 16 octets."""

    def block_keys(
        self,
        scope: Scope,
        compat_id: bytes,
        blocks: Sequence[bytes],
        extra_identity: tuple[str, ...],
    ) -> Sequence[bytes]:
        """Block Keys, 32 octets each, one per block.

        Args:
            scope: the scope.
            compat_id: 32 octets.
            blocks: each block's token ids as big-endian uint32.
            extra_identity: images, adapter, salt; empty where there is none.
        """


class KvcsScheme:
    """The scheme "kvcs v1".

    Compatibility ID: SHA-256 of the descriptor's canonical JSON. Scope ID: first 16 octets of
    HMAC-SHA256(scope key, "kvcs scope v1"). Block Key: HMAC-SHA256(scope key, "kvcs block v1" ||
    Compatibility ID || previous || the block's token ids as big-endian uint32), where previous is
    the Block Key before it; for block 0 it is 32 zero octets, or SHA-256 of the canonical JSON of
    the extra identity's strings where there are any.
    """

    name = "kvcs v1"

    def compat(self, descriptor: Descriptor) -> Mapping[str, Json]:
        """All members of the descriptor."""
        return descriptor.to_json()

    def compat_id(self, compat: Mapping[str, Json]) -> bytes:
        """SHA-256 of the canonical JSON.

        Raises:
            UsageError: as `Descriptor.from_json`.
        """
        return hashlib.sha256(Descriptor.from_json(compat).canonical()).digest()

    def scope_id(self, scope: Scope) -> bytes:
        """First 16 octets of the keyed hash of the scheme's name for scopes."""
        return hmac.digest(scope.key, b"kvcs scope v1", "sha256")[:SCOPE_ID_OCTETS]

    def block_keys(
        self,
        scope: Scope,
        compat_id: bytes,
        blocks: Sequence[bytes],
        extra_identity: tuple[str, ...],
    ) -> Sequence[bytes]:
        """The keyed hash chain over the blocks."""
        previous = _FIRST_PREVIOUS
        if extra_identity:
            previous = hashlib.sha256(rfc8785.dumps(list(extra_identity))).digest()
        keys = []
        for block in blocks:
            message = b"".join((b"kvcs block v1", compat_id, previous, block))
            previous = hmac.digest(scope.key, message, "sha256")
            keys.append(previous)
        return keys


KVCS_SCHEME: Final = KvcsScheme()
"""The default scheme."""


def token_array(token_ids: object) -> npt.NDArray[np.uint32]:
    """Return token ids as a read-only uint32 array of shape [tokens].

    Args:
        token_ids: a sequence of integers, an integer numpy array, or anything with ``tolist()``.

    Raises:
        UsageError: not one-dimensional, not integers (booleans are none), or outside 0..2**32-1.
            The message names a position, never a token.
    """
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1:
            raise UsageError(
                f"token ids: expected one dimension, got shape {token_ids.shape}; take one row"
            )
        if token_ids.dtype.kind not in "iu":
            raise UsageError(f"token ids: expected integers, got an array of {token_ids.dtype}")
        values = token_ids
    else:
        values = _token_list(token_ids)
    if len(values) > MAX_PREFIX_TOKENS:
        raise UsageError(f"token ids: {len(values)} tokens, limit {MAX_PREFIX_TOKENS}")
    wrong = np.flatnonzero((values < 0) | (values > MAX_TOKEN_ID))
    if wrong.size:
        raise UsageError(f"token ids: value at position {wrong[0]} is outside 0..{MAX_TOKEN_ID}")
    array = values.astype(np.uint32)
    array.flags.writeable = False
    return array


def _token_list(token_ids: object) -> npt.NDArray[Any]:
    if hasattr(token_ids, "tolist"):
        try:
            token_ids = token_ids.tolist()
        except (TypeError, ValueError, RuntimeError) as exc:
            raise UsageError(f"token ids: {_kind(token_ids)} gives no list: {exc}") from exc
    if isinstance(token_ids, str | bytes | bytearray | Mapping) or not isinstance(
        token_ids, Iterable
    ):
        raise UsageError(f"token ids: expected a sequence of integers, got {_kind(token_ids)}")
    values = list(token_ids)
    for position, value in enumerate(values):
        if type(value) is not int and not isinstance(value, np.integer):
            raise UsageError(
                f"token ids: expected integers, got a {type(value).__name__} at {position}"
            )
        if not 0 <= value <= MAX_TOKEN_ID:
            raise UsageError(f"token ids: value at position {position} is outside 0..2**32-1")
    return np.array(values, dtype=np.int64)


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def _identity_strings(extra_identity: Iterable[str] | None) -> tuple[str, ...]:
    if extra_identity is None:
        return ()
    if isinstance(extra_identity, str | bytes) or not isinstance(extra_identity, Iterable):
        raise UsageError(
            f"extra identity: expected a list of strings, got {_kind(extra_identity)}; put one"
            " string into a list"
        )
    strings = tuple(extra_identity)
    if len(strings) > MAX_EXTRA_IDENTITY:
        raise UsageError(f"extra identity: {len(strings)} strings, limit {MAX_EXTRA_IDENTITY}")
    for position, string in enumerate(strings):
        if not isinstance(string, str):
            raise UsageError(
                f"extra identity: {_kind(string)} at position {position}, not a string"
            )
        try:
            octets = len(string.encode("utf-8"))
        except UnicodeEncodeError:
            raise UsageError(f"extra identity: string {position} is not valid Unicode") from None
        if not 1 <= octets <= MAX_EXTRA_IDENTITY_OCTETS:
            raise UsageError(
                f"extra identity: string {position} has {octets} octets, expected"
                f" 1..{MAX_EXTRA_IDENTITY_OCTETS}"
            )
    return strings


class Prefix:
    """The identity of a token prefix: whole blocks only, no token leaves this object.

    Args:
        scope: the scope whose members may share the cache.
        descriptor: what the tensors mean.
        token_ids: integers 0..2**32-1: a sequence, a one-dimensional integer array, or anything
            with ``tolist()``. Tokens after the last whole block are left over.
        extra_identity: strings that tell apart requests with equal tokens: full-width image
            digests, adapter name and fingerprint, cache salt. None, an empty list and leaving it
            out are the same.
        multimodal: says that images or other inputs stand behind placeholder tokens.
        adapted: says that an adapter changes the weights.
        scheme: how identity is derived.

    Raises:
        UsageError: fewer tokens than one block, token ids that are none, a multimodal or adapted
            request without extra identity, or a scheme whose values have other lengths.
    """

    def __init__(
        self,
        scope: Scope,
        descriptor: Descriptor,
        token_ids: object,
        *,
        extra_identity: Iterable[str] | None = None,
        multimodal: bool = False,
        adapted: bool = False,
        scheme: Scheme = KVCS_SCHEME,
    ) -> None:
        identity = _identity_strings(extra_identity)
        if (multimodal or adapted) and not identity:
            what = "multimodal" if multimodal else "adapted"
            raise UsageError(
                f"a {what} request needs extra_identity (image digests, adapter fingerprint):"
                " equal tokens alone would name different caches alike"
            )
        tokens = token_array(token_ids)
        blocks = len(tokens) // descriptor.block_tokens
        if blocks == 0:
            raise UsageError(
                f"prefix of {len(tokens)} tokens is shorter than one block of"
                f" {descriptor.block_tokens}; only whole blocks have a name"
            )
        self.scope = scope
        self.descriptor = descriptor
        self.scheme = scheme
        self.extra_identity = identity
        self.token_ids = tokens
        self.blocks = blocks
        self.tokens_left_over = len(tokens) - blocks * descriptor.block_tokens
        self.compat = scheme.compat(descriptor)
        self.compat_id = _octets(
            scheme, "Compatibility ID", scheme.compat_id(self.compat), COMPAT_ID_OCTETS
        )
        self.scope_id = _octets(scheme, "Scope ID", scheme.scope_id(scope), SCOPE_ID_OCTETS)
        raw = tokens.astype(">u4").tobytes()
        width = 4 * descriptor.block_tokens
        parts = [raw[at : at + width] for at in range(0, blocks * width, width)]
        keys = scheme.block_keys(scope, self.compat_id, parts, identity)
        self.block_keys = tuple(_octets(scheme, "Block Key", key, BLOCK_KEY_OCTETS) for key in keys)
        if len(self.block_keys) != blocks:
            raise UsageError(
                f"scheme {scheme.name!r} gave {len(self.block_keys)} Block Keys for {blocks} blocks"
            )

    scope: Scope
    """The scope."""

    descriptor: Descriptor
    """What the tensors mean."""

    scheme: Scheme
    """How identity is derived."""

    extra_identity: tuple[str, ...]
    """Extra identity of block 0, empty where there is none."""

    token_ids: npt.NDArray[np.uint32]
    """All token ids, left-over ones too; shape [tokens], read-only."""

    blocks: int
    """Whole blocks."""

    tokens_left_over: int
    """Tokens after the last whole block; they are in no cache of this prefix."""

    compat: Mapping[str, Json]
    """What a manifest carries as ``compat``."""

    compat_id: bytes
    """Compatibility ID, 32 octets."""

    scope_id: bytes
    """Scope ID, 16 octets."""

    block_keys: tuple[bytes, ...]
    """Block Key of each whole block, 32 octets each."""

    def __repr__(self) -> str:
        return (
            f"Prefix(blocks={self.blocks}, tokens_left_over={self.tokens_left_over},"
            f" compat_id={self.compat_id.hex()[:8]}, anchor_key={self.block_keys[-1].hex()[:8]})"
        )

    def _checked(self, blocks: int | None) -> int:
        if blocks is None:
            return self.blocks
        if not 1 <= blocks <= self.blocks:
            raise UsageError(f"blocks: expected 1..{self.blocks}, got {blocks}")
        return blocks

    def anchor_key(self, blocks: int | None = None) -> bytes:
        """Anchor Key of a publication whose segment 0 has ``blocks`` blocks, default all.

        Raises:
            UsageError: ``blocks`` is not 1..`blocks`.
        """
        return self.block_keys[self._checked(blocks) - 1]

    def namespace_prefix(self, blocks: int | None = None) -> TrackNamespace:
        """Fields 0 to 3: what a consumer subscribes to (KVCS "Discovering Publications")."""
        return (APPLICATION, self.scope_id, self.compat_id, self.anchor_key(blocks))

    def namespace(self, publication_id: bytes, blocks: int | None = None) -> TrackNamespace:
        """All five fields of one publication (KVCS "Track Namespace").

        Raises:
            UsageError: the Publication ID is not 16 octets.
        """
        if len(publication_id) != PUBLICATION_ID_OCTETS:
            raise UsageError(f"Publication ID: expected 16 octets, got {len(publication_id)}")
        return PublicationNamespace(
            self.scope_id, self.compat_id, self.anchor_key(blocks), bytes(publication_id)
        ).fields

    def block_keys_digest(self, first_block: int, blocks: int) -> bytes:
        """SHA-256 of the concatenated Block Keys of a segment (KVCS "Manifest Track").

        Raises:
            UsageError: the segment reaches beyond this prefix.
        """
        if first_block < 0 or blocks < 1 or first_block + blocks > self.blocks:
            raise UsageError(
                f"blocks {first_block}..{first_block + blocks - 1} are not all among the"
                f" {self.blocks} blocks of this prefix"
            )
        keys = self.block_keys[first_block : first_block + blocks]
        return hashlib.sha256(b"".join(keys)).digest()


def _octets(scheme: Scheme, what: str, value: bytes, length: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != length:
        raise UsageError(f"scheme {scheme.name!r}: {what} is not {length} octets")
    return value

"""What a file is that was named where another kind belongs: so that a message can say it."""

from __future__ import annotations

import re
from typing import Final

_PEM: Final = re.compile(rb"-----BEGIN ([A-Z0-9 ]{1,40})-----")
_SCOPE_KEY: Final = re.compile(rb"\s*[0-9A-Fa-f]{64}\s*\Z")

LOOKED_AT: Final = 4096
"""Octets from the start of a file that are looked at."""

_CBOR_ARRAY, _CBOR_MAP = 4, 5
"""Major types of a COSE_KeySet's first two octets (RFC 8949 §3.1)."""


def is_scope_key(data: bytes) -> bool:
    """Whether the octets of a file are those of a scope key: 64 hex characters."""
    return _SCOPE_KEY.match(data) is not None


def file_kind(data: bytes) -> str | None:
    """Say in a few words what the octets of a file are, and which option takes it.

    Nothing of the file is repeated: it may hold a secret.

    Args:
        data: its octets; the beginning is enough.

    Returns:
        A noun with its article, or None for what kvcs knows nothing of.
    """
    if not data:
        return "an empty file"
    start = data[:LOOKED_AT]
    pem = _PEM.search(start)
    if pem is not None:
        return _pem_kind(pem[1].decode())
    if is_scope_key(data):
        return "a scope key, which --scope-key-file takes"
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 32:
        return "a safetensors file, such as a KV cache"
    if len(start) > 1 and (start[0] >> 5, start[1] >> 5) == (_CBOR_ARRAY, _CBOR_MAP):
        return "a COSE_KeySet, as `kvcs keygen` writes; `kvcs keys FILE` shows what it is for"
    return None


def _pem_kind(label: str) -> str:
    if label == "CERTIFICATE":
        return "a certificate (PEM), which --cert, --ca, --client-cert and --client-ca take"
    if label.endswith("PRIVATE KEY"):
        return "a private key of TLS (PEM), which --key and --client-key take"
    return f"a PEM file ({label})"


def told(kind: str | None) -> str:
    """The end of a message that says what a file is; empty where that is not known."""
    return "" if kind is None else f"; this is {kind}"

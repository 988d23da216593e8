"""Tokens of a test issuer, and what verifies them."""

from __future__ import annotations

from typing import Any

import cbor2

from kvcs.trust import (
    CONSUMER,
    KeyRing,
    KeyUse,
    SigningKey,
    TokenVerifier,
    issue,
    scope_rule,
    sign1,
)

SCOPE, OTHER = b"s" * 16, b"o" * 16
NOW = 1_800_000_000
RELAY = "relay.example"
ISSUER = SigningKey.generate(use=KeyUse.TOKEN, name="issuer", scope_id=SCOPE)
ROOT = b"kvcs-1"


def token(key: SigningKey = ISSUER, **options: Any) -> bytes:
    arguments: dict[str, Any] = {
        "audience": [RELAY],
        "rules": [scope_rule(SCOPE, CONSUMER)],
        "issued_at": NOW,
        "lifetime": 600,
        "token_id": bytes(8),
    }
    return issue(key, **(arguments | options))


def ring(*keys: SigningKey) -> KeyRing:
    return KeyRing([key.public for key in keys or (ISSUER,)], use=KeyUse.TOKEN)


def verifier(issuers: KeyRing | None = None, **options: Any) -> TokenVerifier:
    return TokenVerifier(issuers or ring(), [RELAY], **({"skew": 0} | options))


def signed(claims: Any, key: SigningKey = ISSUER, header: Any = None) -> bytes:
    octets = claims if isinstance(claims, bytes) else cbor2.dumps(claims, canonical=True)
    return sign1(octets, key, {16: "CAT"} if header is None else header)


CLAIMS: dict[Any, Any] = {
    1: "issuer",
    3: [RELAY],
    4: NOW + 600,
    6: NOW,
    7: bytes(8),
    327: [[[0, 1]], [[3, 4, 7], [ROOT, SCOPE]]],
}

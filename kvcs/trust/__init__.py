"""Whom to trust: signed messages, key rings, authorization tokens, and who may do what.

No I/O and no clock: octets and the time come in, answers go out. Nothing here shows a secret: not
in `repr`, not in an error.
"""

from kvcs.trust.cose import Sign1, read_sign1, sign1
from kvcs.trust.keys import Algorithm, KeyUse, PublicKey, SigningKey
from kvcs.trust.policy import Authority, Permit
from kvcs.trust.rights import CONSUMER, PRODUCER, Action, Asked, Rule, scope_rule
from kvcs.trust.rings import KeyRing, encode_keys, read_key_set, read_signing_key
from kvcs.trust.tokens import TOKEN_TYPE, Claims, Grant, TokenVerifier, issue, read_claims

__all__ = [
    "CONSUMER",
    "PRODUCER",
    "TOKEN_TYPE",
    "Action",
    "Algorithm",
    "Asked",
    "Authority",
    "Claims",
    "Grant",
    "KeyRing",
    "KeyUse",
    "Permit",
    "PublicKey",
    "Rule",
    "Sign1",
    "SigningKey",
    "TokenVerifier",
    "encode_keys",
    "issue",
    "read_claims",
    "read_key_set",
    "read_sign1",
    "read_signing_key",
    "scope_rule",
    "sign1",
]

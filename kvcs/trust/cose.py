"""COSE_Sign1 with ES256 and EdDSA, and nothing else (RFC 9052, 4.2; RFC 9053, 2).

pycose builds and reads the structure; `cryptography` signs and verifies. What pycose lets pass is
refused first: `alg` outside the protected header, a `crit` that names what is not understood, a
label twice, octets behind the message, indefinite or overlong heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import cbor2
from pycose.messages.sign1message import Sign1Message

from kvcs.errors import TrustError, UsageError
from kvcs.trust.cbor import ARRAY, BYTES, TAG, Heads, Octets, head, load, malformed
from kvcs.trust.keys import (
    MAX_KID_OCTETS,
    PYCOSE_ERRORS,
    SIGNATURE_OCTETS,
    Algorithm,
    PublicKey,
    SigningKey,
)

SIGN1_TAG: Final = 18
"""CBOR tag of a COSE_Sign1."""

MAX_HEADER_OCTETS: Final = 1_024
"""Longest protected or unprotected header."""

ALG: Final = 1
CRIT: Final = 2
KID: Final = 4
TYP: Final = 16
"""Header labels (RFC 9052, 3.1; RFC 9596)."""

Label = int | str
Header = Mapping[Label, object]
"""Header parameters by label."""


@dataclass(frozen=True, slots=True)
class Sign1:
    """A COSE_Sign1 that was read; nothing of it counts before `verify`."""

    protected: Header
    """Protected header."""

    unprotected: Header
    """Unprotected header; whoever carries the message can change it."""

    payload: bytes = field(repr=False)
    """What was signed."""

    kid: bytes
    """Key identifier."""

    algorithm: Algorithm
    """What the message claims to be signed with."""

    signature: bytes = field(repr=False)
    """64 octets."""

    protected_octets: bytes = field(repr=False)
    """The protected header as it was signed."""

    def verify(self, key: PublicKey) -> None:
        """Check the signature.

        Raises:
            TrustError: ``algorithm``: the key is of the other one; ``signature``.
        """
        if key.algorithm is not self.algorithm:
            raise TrustError(
                f"the message says {self.algorithm.name}, the key {key.kid.hex()} is for"
                f" {key.algorithm.name}",
                check="algorithm",
            )
        key.verify(self.signature, to_be_signed(self.protected_octets, self.payload))


def to_be_signed(protected: bytes, payload: bytes) -> bytes:
    """Sig_structure of a COSE_Sign1 without external data (RFC 9052, 4.4)."""
    # Large payloads are joined once; cbor2 would take three times as long.
    start = cbor2.dumps(["Signature1", protected, b""])
    return b"".join((b"\x84", start[1:], head(BYTES, len(payload)), payload))


def sign1(payload: bytes, key: SigningKey, header: Header | None = None) -> bytes:
    """Sign a payload.

    Args:
        payload: what is signed and carried.
        key: signs it; its identifier goes into the protected header.
        header: further protected parameters.

    Returns:
        A tagged COSE_Sign1, its headers in deterministic form.

    Raises:
        UsageError: ``header`` has alg, crit or kid.
    """
    if header is not None and {ALG, CRIT, KID}.intersection(header):
        raise UsageError("alg and kid are those of the key, and nothing is critical")
    members: dict[Label, object] = {ALG: int(key.public.algorithm), KID: key.kid}
    members |= header or {}
    protected = cbor2.dumps(members, canonical=True)
    message = Sign1Message(phdr_encoded=protected, uhdr={}, payload=b"")
    message.signature = key.sign(to_be_signed(protected, payload))
    encoded: bytes = message.encode(tag=True, sign=False)
    # The payload goes in last: it may be large, and is copied once.
    behind = len(encoded) - len(head(BYTES, SIGNATURE_OCTETS)) - SIGNATURE_OCTETS
    return b"".join((encoded[: behind - 1], head(BYTES, len(payload)), payload, encoded[behind:]))


def read_sign1(
    data: Octets,
    what: str,
    *,
    max_octets: int,
    understood: frozenset[Label] = frozenset(),
    deterministic: bool = False,
) -> Sign1:
    """Read a COSE_Sign1, tagged or not.

    Args:
        data: the message and nothing else.
        what: what it is, for messages.
        max_octets: longest message that is looked at.
        understood: labels beyond alg and kid that ``crit`` may name.
        deterministic: also refuse headers whose labels are not in deterministic order.

    Raises:
        TrustError: ``size``; ``structure``; ``header``: a parameter is missing, twice, in the
            wrong place or critical and unknown; ``algorithm``: neither ES256 nor EdDSA.
    """
    if len(data) > max_octets:
        raise TrustError(f"{what}: {len(data)} octets, limit {max_octets}", check="size")
    heads = Heads(data, what)
    major, argument = heads.head()
    if major == TAG:
        if argument != SIGN1_TAG:
            raise malformed(f"{what}: CBOR tag {argument}, expected {SIGN1_TAG}")
        major, argument = heads.head()
    if (major, argument) != (ARRAY, 4):
        raise malformed(f"{what}: not the array of four that a COSE_Sign1 is")
    protected_octets = bytes(heads.string(BYTES, MAX_HEADER_OCTETS))
    unprotected_octets = heads.item(MAX_HEADER_OCTETS)
    payload = bytes(heads.string(BYTES, max_octets))
    signature = bytes(heads.string(BYTES, SIGNATURE_OCTETS))
    heads.end()
    protected = _header(protected_octets, f"{what}: protected header", deterministic)
    unprotected = _header(unprotected_octets, f"{what}: unprotected header", deterministic)
    try:
        message = Sign1Message.from_cose_obj(
            [protected_octets, dict(unprotected), payload, signature], True
        )
    except PYCOSE_ERRORS:
        raise TrustError(f"{what}: a header parameter has a wrong value", check="header") from None
    kid = _check_headers(protected, unprotected, what, understood)
    return Sign1(
        protected=protected,
        unprotected=unprotected,
        payload=payload,
        kid=kid,
        algorithm=_algorithm(protected, what),
        signature=message.signature,
        protected_octets=protected_octets,
    )


def _header(octets: Octets, what: str, deterministic: bool) -> dict[Label, object]:
    value = load(octets, what, max_octets=MAX_HEADER_OCTETS, deterministic=deterministic)
    if not isinstance(value, dict) or not all(isinstance(label, int | str) for label in value):
        raise malformed(f"{what}: not a map of labels")
    return value


def _check_headers(
    protected: Header, unprotected: Header, what: str, understood: frozenset[Label]
) -> bytes:
    def wrong(text: str) -> TrustError:
        return TrustError(f"{what}: {text}", check="header")

    if ALG in unprotected or CRIT in unprotected:
        raise wrong("alg and crit belong into the protected header")
    if any(label in unprotected for label in protected):
        raise wrong("a parameter stands in both headers")
    if CRIT in protected:
        critical = protected[CRIT]
        known = understood | {ALG, KID}
        if not isinstance(critical, list) or not critical:
            raise wrong("crit is no list of labels")
        if any(label not in known or label not in protected for label in critical):
            raise wrong("crit names a parameter that is not understood here")
    kid = protected.get(KID, unprotected.get(KID))
    if not isinstance(kid, bytes) or not 1 <= len(kid) <= MAX_KID_OCTETS:
        raise wrong(f"no kid of 1 to {MAX_KID_OCTETS} octets")
    return kid


def _algorithm(protected: Header, what: str) -> Algorithm:
    number = protected.get(ALG)
    if type(number) is not int or number not in (Algorithm.ES256, Algorithm.EDDSA):
        raise TrustError(f"{what}: alg is neither ES256 nor EdDSA", check="algorithm")
    return Algorithm(number)

"""Keys that sign and keys that verify, as COSE_Keys (RFC 9052, 7; KVCS "Manifest Track").

A key has one use. Producer keys sign manifests and issuer keys sign tokens: one of them never
passes for the other, and they are kept in rings of their own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Final

import cbor2
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from pycose import exceptions as pycose_errors
from pycose.keys.cosekey import CoseKey
from pycose.keys.ec2 import EC2Key
from pycose.keys.okp import OKPKey

from kvcs.errors import TrustError, UsageError

KID_OCTETS: Final = 8
"""Octets of a key identifier that is made from the key."""

MAX_KID_OCTETS: Final = 64
"""Longest key identifier that is taken."""

MAX_NAME: Final = 256
"""Longest name of an issuer or producer, characters."""

SCOPE_ID_OCTETS: Final = 16
"""Octets of a Scope ID (KVCS "Track Namespace")."""

SIGNATURE_OCTETS: Final = 64
"""Octets of a signature of either algorithm (RFC 9053, 2)."""

MAX_TIME: Final = 2**53
"""Latest time, Unix seconds: a JSON number holds it, too."""

_COORDINATE: Final = 32
_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551

_KTY, _KID, _ALG, _KEY_OPS = 1, 2, 3, 4
_CRV, _X, _Y, _D = -1, -2, -3, -4
_KTY_OKP, _KTY_EC2 = 1, 2
_CRV_P256, _CRV_ED25519 = 1, 6
_OP_SIGN, _OP_VERIFY = 1, 2
PYCOSE_ERRORS: Final = (
    AssertionError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    pycose_errors.CoseException,
    pycose_errors.CoseIllegalAlgorithm,
    pycose_errors.CoseIllegalKeyOps,
    pycose_errors.CoseIllegalKeyType,
    pycose_errors.CoseInvalidKey,
    pycose_errors.CoseMalformedMessage,
    pycose_errors.CoseUnsupportedCurve,
)
"""What pycose raises for members that it does not like; its own errors have no common root."""

_KEY_CLASSES: Final[dict[int, type[CoseKey]]] = {_KTY_OKP: OKPKey, _KTY_EC2: EC2Key}
_USE, _SCOPE, _NAME, _NOT_BEFORE, _EXPIRES = (
    "kvcs-use",
    "kvcs-scope",
    "kvcs-name",
    "kvcs-nbf",
    "kvcs-exp",
)
"""Labels of ours in a COSE_Key; RFC 9052 leaves text labels to applications."""

_PUBLIC_LABELS: Final = frozenset(
    {_KTY, _KID, _ALG, _KEY_OPS, _CRV, _X, _Y, _USE, _SCOPE, _NAME, _NOT_BEFORE, _EXPIRES}
)


class Algorithm(IntEnum):
    """Signature algorithms that KVCS allows, with their COSE numbers (RFC 9053)."""

    ES256 = -7
    """ECDSA on P-256 with SHA-256."""

    EDDSA = -8
    """Ed25519."""


class KeyUse(StrEnum):
    """What a key is for."""

    MANIFEST = "manifest"
    """A producer signs manifests with it."""

    TOKEN = "token"
    """An issuer signs authorization tokens with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicKey:
    """A key that verifies.

    Raises:
        UsageError: a part is out of bounds, or the key is none of its algorithm.
    """

    kid: bytes
    """Key identifier, 1 to 64 octets."""

    algorithm: Algorithm
    """The only algorithm that it verifies: the key decides, never a message."""

    octets: bytes
    """Ed25519: 32 octets. P-256: the uncompressed point, 65 octets."""

    use: KeyUse = KeyUse.MANIFEST
    """What it is for."""

    scope_id: bytes | None = None
    """The scope that it speaks for, 16 octets; None for every scope."""

    name: str = ""
    """Issuer or producer; an issuer's name stands in its tokens."""

    not_before: int | None = None
    """Unix seconds from which it counts."""

    expires: int | None = None
    """Unix seconds from which it counts no longer."""

    _key: Any = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if not 1 <= len(self.kid) <= MAX_KID_OCTETS:
            raise UsageError(f"a key identifier has 1 to {MAX_KID_OCTETS} octets")
        if self.scope_id is not None and len(self.scope_id) != SCOPE_ID_OCTETS:
            raise UsageError(f"a Scope ID has {SCOPE_ID_OCTETS} octets, not {len(self.scope_id)}")
        if len(self.name) > MAX_NAME or not self.name.isprintable():
            raise UsageError(f"the name of a key is printable and has at most {MAX_NAME} letters")
        if self.use is KeyUse.TOKEN and not self.name:
            raise UsageError("an issuer's key has a name: it stands in the tokens")
        for time in (self.not_before, self.expires):
            if time is not None and not 0 <= time <= MAX_TIME:
                raise UsageError(f"the time {time} of a key is no time in Unix seconds")
        object.__setattr__(self, "_key", _load_public(self.algorithm, self.octets))

    def __repr__(self) -> str:
        scope = "every scope" if self.scope_id is None else f"scope {self.scope_id.hex()}"
        return f"PublicKey({self.kid.hex()}, {self.algorithm.name}, {self.use.value}, {scope})"

    def check_time(self, now: float) -> None:
        """Check that the key counts now.

        Args:
            now: Unix seconds.

        Raises:
            TrustError: ``not_yet`` or ``expired``.
        """
        if self.not_before is not None and now < self.not_before:
            raise TrustError(f"the key {self.kid.hex()} does not count yet", check="not_yet")
        if self.expires is not None and now >= self.expires:
            raise TrustError(f"the key {self.kid.hex()} has expired", check="expired")

    def verify(self, signature: bytes, octets: bytes) -> None:
        """Check a signature.

        Raises:
            TrustError: ``signature``.
        """
        wrong = TrustError(f"the signature is not of key {self.kid.hex()}", check="signature")
        if len(signature) != SIGNATURE_OCTETS:
            raise wrong
        try:
            if self.algorithm is Algorithm.EDDSA:
                self._key.verify(signature, octets)
            else:
                half = SIGNATURE_OCTETS // 2
                r, s = (
                    int.from_bytes(part, "big") for part in (signature[:half], signature[half:])
                )
                self._key.verify(encode_dss_signature(r, s), octets, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            raise wrong from None

    def to_cose(self) -> bytes:
        """The key as an encoded COSE_Key."""
        return _encode(self, None)


class SigningKey:
    """A key that signs. It never shows its secret: not in `repr`, not in an error.

    Args:
        private: the secret: 32 octets of an Ed25519 key, or of a P-256 key's number.
        public: the key that verifies.

    Raises:
        UsageError: the two do not belong together.
    """

    __slots__ = ("_private", "public")

    def __init__(self, private: bytes, public: PublicKey) -> None:
        self.public = public
        """The key that verifies what this one signs."""
        self._private = _load_private(public.algorithm, private)
        if _public_octets(self._private) != public.octets:
            raise UsageError("the private and the public part of the key do not belong together")

    @classmethod
    def generate(
        cls,
        algorithm: Algorithm = Algorithm.EDDSA,
        *,
        use: KeyUse = KeyUse.MANIFEST,
        kid: bytes | None = None,
        scope_id: bytes | None = None,
        name: str = "",
        not_before: int | None = None,
        expires: int | None = None,
    ) -> SigningKey:
        """Make a new key.

        Args:
            algorithm: what it signs with. ES256 hashes large manifests faster.
            use: what it is for.
            kid: key identifier; made from the key by default.
            scope_id: the scope that it speaks for; None for every scope.
            name: issuer or producer.
            not_before: Unix seconds from which it counts.
            expires: Unix seconds from which it counts no longer.

        Raises:
            UsageError: an argument is out of bounds.
        """
        private: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
        if algorithm is Algorithm.EDDSA:
            private = ed25519.Ed25519PrivateKey.generate()
        else:
            private = ec.generate_private_key(ec.SECP256R1())
        octets = _public_octets(private)
        public = PublicKey(
            kid=key_identifier(algorithm, octets) if kid is None else kid,
            algorithm=algorithm,
            octets=octets,
            use=use,
            scope_id=scope_id,
            name=name,
            not_before=not_before,
            expires=expires,
        )
        return cls(_private_octets(private), public)

    @property
    def kid(self) -> bytes:
        """Key identifier."""
        return self.public.kid

    def sign(self, octets: bytes) -> bytes:
        """Sign: 64 octets (RFC 9053, 2)."""
        if isinstance(self._private, ed25519.Ed25519PrivateKey):
            return self._private.sign(octets)
        r, s = decode_dss_signature(self._private.sign(octets, ec.ECDSA(hashes.SHA256())))
        return r.to_bytes(_COORDINATE, "big") + s.to_bytes(_COORDINATE, "big")

    def to_cose(self) -> bytes:
        """The key with its secret, as an encoded COSE_Key: for a file that only its owner reads."""
        return _encode(self.public, _private_octets(self._private))

    def __repr__(self) -> str:
        return f"SigningKey({self.public!r})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise UsageError("a signing key is not pickled: that would copy its secret")


def key_identifier(algorithm: Algorithm, octets: bytes) -> bytes:
    """Key identifier made from a key: the start of its COSE Key Thumbprint (RFC 9679)."""
    return hashlib.sha256(cbor2.dumps(_shape(algorithm, octets), canonical=True)).digest()[
        :KID_OCTETS
    ]


def read_key(members: dict[Any, Any]) -> PublicKey | SigningKey:
    """Read a COSE_Key; one with a private part gives a `SigningKey`.

    Args:
        members: its map, decoded.

    Raises:
        TrustError: ``key``: it is no key of the two algorithms, or a part is missing or wrong. The
            message holds nothing of the key.
    """
    try:
        return _read_key(members)
    except UsageError as exc:
        raise TrustError(f"key: {exc}", check="key") from None
    except PYCOSE_ERRORS:
        # What these say may quote the key.
        raise TrustError("key: not a COSE_Key for ES256 or EdDSA", check="key") from None


def _read_key(members: dict[Any, Any]) -> PublicKey | SigningKey:
    unknown = [label for label in members if label not in _PUBLIC_LABELS and label != _D]
    if unknown:
        raise UsageError(f"{len(unknown)} members that this version does not know")
    key: CoseKey = _KEY_CLASSES[members[_KTY]].from_dict(dict(members))
    algorithm = Algorithm(members[_ALG])
    x = members[_X]
    if algorithm is Algorithm.EDDSA:
        fits = (members[_KTY], members[_CRV]) == (_KTY_OKP, _CRV_ED25519) and _Y not in members
        octets = x
    else:
        fits = (members[_KTY], members[_CRV]) == (_KTY_EC2, _CRV_P256)
        octets = b"\x04" + x + members[_Y]
    if not fits or len(x) != _COORDINATE:
        raise UsageError("the algorithm and the curve do not belong together")
    kinds = {_KID: bytes, _SCOPE: bytes, _NAME: str, _NOT_BEFORE: int, _EXPIRES: int}
    for label, kind in kinds.items():
        if label in members and type(members[label]) is not kind:
            raise UsageError(f"{label} is not of kind {kind.__name__}")
    private = members.get(_D)
    operation = _OP_VERIFY if private is None else _OP_SIGN
    if operation not in members.get(_KEY_OPS, [operation]):
        raise UsageError("its key_ops do not allow its use")
    public = PublicKey(
        kid=key.kid,
        algorithm=algorithm,
        octets=bytes(octets),
        use=KeyUse(members[_USE]),
        scope_id=members.get(_SCOPE),
        name=members.get(_NAME, ""),
        not_before=members.get(_NOT_BEFORE),
        expires=members.get(_EXPIRES),
    )
    return public if private is None else SigningKey(private, public)


def _shape(algorithm: Algorithm, octets: bytes) -> dict[Any, Any]:
    if algorithm is Algorithm.EDDSA:
        return {_KTY: _KTY_OKP, _CRV: _CRV_ED25519, _X: octets}
    x, y = octets[1 : 1 + _COORDINATE], octets[1 + _COORDINATE :]
    return {_KTY: _KTY_EC2, _CRV: _CRV_P256, _X: x, _Y: y}


def _encode(key: PublicKey, private: bytes | None) -> bytes:
    members = _shape(key.algorithm, key.octets)
    members |= {_KID: key.kid, _ALG: int(key.algorithm), _USE: key.use.value}
    members[_KEY_OPS] = [_OP_VERIFY if private is None else _OP_SIGN]
    optional = {
        _D: private,
        _SCOPE: key.scope_id,
        _NAME: key.name or None,
        _NOT_BEFORE: key.not_before,
        _EXPIRES: key.expires,
    }
    members |= {label: value for label, value in optional.items() if value is not None}
    return _KEY_CLASSES[members[_KTY]].from_dict(members).encode()


def _load_public(
    algorithm: Algorithm, octets: bytes
) -> ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey:
    try:
        if algorithm is Algorithm.EDDSA:
            return ed25519.Ed25519PublicKey.from_public_bytes(octets)
        if len(octets) != 1 + 2 * _COORDINATE:
            raise ValueError
        return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), octets)
    except ValueError:
        raise UsageError(f"not a public key of {algorithm.name}") from None


def _load_private(
    algorithm: Algorithm, octets: bytes
) -> ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey:
    if type(octets) is not bytes or len(octets) != _COORDINATE:
        raise UsageError(f"not a private key of {algorithm.name}")
    if algorithm is Algorithm.EDDSA:
        return ed25519.Ed25519PrivateKey.from_private_bytes(octets)
    number = int.from_bytes(octets, "big")
    if not 0 < number < _P256_ORDER:
        raise UsageError(f"not a private key of {algorithm.name}")
    return ec.derive_private_key(number, ec.SECP256R1())


def _private_octets(key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.private_bytes_raw()
    return key.private_numbers().private_value.to_bytes(_COORDINATE, "big")


def _public_octets(key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.public_key().public_bytes_raw()
    return key.public_key().public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
    )

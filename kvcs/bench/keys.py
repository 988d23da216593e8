"""Keys that both processes of a case make alike. They guard nothing: everybody can read them."""

from __future__ import annotations

from typing import Final

from kvcs.kv import ProtectionKey, ProtectionRing
from kvcs.trust import Algorithm, KeyRing, PublicKey, SigningKey

SECRET: Final = bytes(range(1, 33))
PUBLIC: Final = bytes.fromhex("79b5562e8fe654f94078b112e8a98ba7901f853ae695bed7e0e3910bad049664")
"""The Ed25519 key that verifies what `SECRET` signs."""


def signing_key() -> SigningKey:
    """What the producer signs manifests with."""
    return SigningKey(SECRET, PublicKey(kid=b"bench", algorithm=Algorithm.EDDSA, octets=PUBLIC))


def key_ring() -> KeyRing:
    """What the consumer verifies them with."""
    return KeyRing([signing_key().public])


def protection_ring() -> ProtectionRing:
    """What Objects are sealed and opened with."""
    return ProtectionRing([ProtectionKey(2**32, SECRET)])

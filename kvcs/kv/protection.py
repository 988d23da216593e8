"""Secure objects: payloads sealed between members of a scope, unreadable to relays.

What MOQT's Secure Objects call an implementer to do, for the suites with AES-GCM (KVCS "Security
Considerations": "publishers MUST protect Object payloads end to end"). A payload is sealed under a
key that is derived for its track, with a nonce made of its Location, so that it opens nowhere else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from kvcs.errors import KvcsError, UsageError
from kvcs.kv.memory import new_memory
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.wire import encode_vi64

Octets = bytes | bytearray | memoryview

IMMUTABLE_PROPERTIES: Final = 0x0B
"""Object property that holds what relays may not change; the Key ID is in it."""

KEY_ID_PROPERTY: Final = 0x02
"""Type of the Key ID inside the immutable properties.

MOQT has the same number for a delivery timeout, in milliseconds. Hence `MIN_KEY_ID`.
"""

MIN_KEY_ID: Final = 1 << 32
"""Smallest Key ID that is harmless to a peer that takes it for a timeout: fifty days."""

MAX_KEY_ID: Final = (1 << 64) - 1

BASE_KEY_OCTETS: Final = 32
NONCE_OCTETS: Final = 12
TAG_OCTETS: Final = 16

ENCRYPTED_PROPERTIES: Final = 0x000A
"""Sixteen-bit type of the list that may follow a payload inside the sealed octets."""

MAX_OBJECT_ID: Final = (1 << 32) - 1
"""Larger Object IDs do not fit the nonce."""

MAX_KEY_BLOCKS: Final = 1 << 32
"""Blocks of 16 octets that one derived key seals: 64 GiB, far below what AES-GCM bears."""

BLOCK_OCTETS: Final = 16

_KEY_LABEL: Final = b"MOQ 1.0 Secure Objects Secret key "
_SALT_LABEL: Final = b"MOQ 1.0 Secret salt "
_COUNTER: Final = struct.Struct(">QI")
_PLACE: Final = struct.Struct(">QIB")
_NO_PLACE: Final = (b"", b"")


class CipherSuite(IntEnum):
    """Cipher suites that kvcs offers; the suite is agreed with the key, never on the wire."""

    AES_128_GCM_SHA256_128 = 0x0004
    AES_256_GCM_SHA512_128 = 0x0005

    @property
    def key_octets(self) -> int:
        """Octets of a derived key."""
        return 16 if self is CipherSuite.AES_128_GCM_SHA256_128 else 32

    @property
    def hash(self) -> hashes.HashAlgorithm:
        """Hash of the key derivation."""
        return hashes.SHA256() if self is CipherSuite.AES_128_GCM_SHA256_128 else hashes.SHA512()


@dataclass(frozen=True, slots=True)
class ProtectionKey:
    """One base key of a scope, from which each track's own key is derived.

    Use random octets of its own, not the scope key.
    """

    key_id: int
    """Names the key on the wire; 2^32 to 2^64-1."""

    base_key: bytes = field(repr=False)
    """32 secret octets."""

    suite: CipherSuite = CipherSuite.AES_128_GCM_SHA256_128

    def __post_init__(self) -> None:
        if not MIN_KEY_ID <= self.key_id <= MAX_KEY_ID:
            raise UsageError(f"Key ID {self.key_id} is not 2^32 to 2^64-1")
        if len(self.base_key) != BASE_KEY_OCTETS:
            raise UsageError(f"a base key has 32 octets, not {len(self.base_key)}")


class KeyExhausted(KvcsError):
    """A derived key has sealed as much as one may; start a new publication."""


@dataclass(frozen=True, slots=True)
class TrackKey:
    """Key and salt of one track under one base key."""

    key: bytes = field(repr=False)
    salt: bytes = field(repr=False)


def serialized_name(name: FullTrackName) -> bytes:
    """Octets of a Full Track Name as they enter the key derivation, lengths in shortest form."""
    fields = [encode_vi64(len(name.namespace))]
    for part in (*name.namespace, name.name):
        fields += [encode_vi64(len(part)), part]
    return b"".join(fields)


def derive(suite: CipherSuite, key_id: int, base_key: bytes, serialized: bytes) -> TrackKey:
    """Derive a track's key and salt (Secure Objects "Key Derivation").

    Args:
        suite: decides hash and length.
        key_id: of the base key.
        base_key: secret octets of any length.
        serialized: `serialized_name` of the track.
    """
    extract = HMAC(bytes(suite.hash.digest_size), suite.hash)  # HKDF-Extract with an empty salt
    extract.update(base_key)
    secret = extract.finalize()
    tail = serialized + struct.pack(">HQ", suite, key_id)

    def expand(label: bytes, octets: int) -> bytes:
        return HKDFExpand(suite.hash, octets, label + tail).derive(secret)

    return TrackKey(expand(_KEY_LABEL, suite.key_octets), expand(_SALT_LABEL, NONCE_OCTETS))


def nonce(salt: bytes, location: Location) -> bytes:
    """The nonce of an Object: salt XOR (Group ID, Object ID)."""
    counter = int.from_bytes(_COUNTER.pack(*location))
    return (int.from_bytes(salt) ^ counter).to_bytes(NONCE_OCTETS)


def associated_data(location: Location, priority: int, immutable: Octets) -> bytes:
    """What is authenticated beside the payload.

    Args:
        location: Group ID up to 2^64-1, Object ID up to 2^32-1.
        priority: effective Publisher Priority, 0..255.
        immutable: value of IMMUTABLE_PROPERTIES, octet by octet as it is on the wire.
    """
    return _PLACE.pack(*location, priority) + immutable


def immutable_properties(key_id: int) -> bytes:
    """Value of IMMUTABLE_PROPERTIES of a sealed Object: the Key ID alone."""
    return encode_vi64(KEY_ID_PROPERTY) + encode_vi64(key_id)


def object_properties(key_id: int) -> bytes:
    """All properties of a sealed Object, as they follow Properties Length."""
    value = immutable_properties(key_id)
    return encode_vi64(IMMUTABLE_PROPERTIES) + encode_vi64(len(value)) + value


def sealed_octets(payload_octets: int) -> int:
    """Octets of a sealed payload: length prefix, payload and tag."""
    return len(encode_vi64(payload_octets)) + payload_octets + TAG_OCTETS


class TrackAead:
    """AES-GCM under one derived key, made once; it writes where it is told to.

    Locations have gone into the associated data before, and so they fit their nonces.

    Args:
        derived: key and salt of the track.
    """

    __slots__ = ("_aead", "_seal_into", "open_into", "salt")

    def __init__(self, derived: TrackKey) -> None:
        self._aead = AESGCM(derived.key)
        self.salt: Final = int.from_bytes(derived.salt)
        """What nonces are made from."""
        # Some releases of cryptography cannot.
        self._seal_into: Callable[..., int] | None = getattr(self._aead, "encrypt_into", None)
        self.open_into: Callable[..., int] | None = getattr(self._aead, "decrypt_into", None)
        """Opens under a nonce; None in such releases."""

    def seal(self, made: bytes, plain: Octets, associated: bytes, into: memoryview) -> None:
        """Seal octets under one of `nonces`; ``into`` has room for the tag behind them."""
        if self._seal_into is not None:
            self._seal_into(made, plain, associated, into)
        else:
            into[:] = self._aead.encrypt(made, plain, associated)

    def nonces(self, group: int, objects: Iterable[int]) -> list[bytes]:
        """Nonces of Objects of one Group."""
        salted = self.salt ^ group << 32
        return [(salted ^ each).to_bytes(NONCE_OCTETS) for each in objects]

    def open(
        self, location: Location, sealed: Octets, associated: bytes, into: memoryview | None
    ) -> memoryview:
        """Open sealed octets; raises what `AESGCM` raises where they do not."""
        made = (self.salt ^ (location.group << 32 | location.object)).to_bytes(NONCE_OCTETS)
        if into is None or self.open_into is None:
            return memoryview(self._aead.decrypt(made, sealed, associated))
        try:
            self.open_into(made, sealed, associated, into)
        except InvalidTag:
            # It is written before the tag is compared, and nobody may see it.
            into[:] = bytes(len(into))
            raise
        return into


class Sealer:
    """Seals the Objects of one track, each Location once, in ascending order.

    A nonce cannot repeat: the key is derived from the track's name, which holds a random
    Publication ID, and a Location that is not behind every sealed one is refused.

    Args:
        key: the scope's current key.
        name: the track.
    """

    def __init__(self, key: ProtectionKey, name: FullTrackName) -> None:
        derived = derive(key.suite, key.key_id, key.base_key, serialized_name(name))
        self.properties: Final = object_properties(key.key_id)
        """Object properties that go with every sealed payload."""
        self._immutable = immutable_properties(key.key_id)
        self._aead = TrackAead(derived)
        self._last: Location | None = None
        self._blocks = 0

    def seal(self, location: Location, priority: int, parts: Sequence[Octets]) -> memoryview:
        """Seal one payload.

        Args:
            location: behind every one that this has sealed.
            priority: the Object's Publisher Priority, which is fixed from here on.
            parts: the payload's octets in pieces.

        Returns:
            The sealed payload.

        Raises:
            UsageError: the Location was sealed or passed already, or its Object ID is too large.
            KeyExhausted: the key has sealed 64 GiB.
        """
        framed = b"".join((encode_vi64(sum(map(len, parts))), *parts))
        sealed = new_memory(len(framed) + TAG_OCTETS).data
        group_id, object_id = location
        run = self.run(group_id, range(object_id, object_id + 1), priority, len(framed))
        run.seal_next(framed, sealed)
        return sealed

    def run(self, group_id: int, objects: range, priority: int, octets: int) -> SealedRun:
        """Seal Objects of one Group one after the other; all count as sealed from now on.

        Args:
            group_id: their Group, not before that of any that this has sealed.
            objects: their Object IDs, at least one, ascending by 1.
            priority: Publisher Priority of all of them.
            octets: of each payload with its length before it.

        Raises:
            UsageError: as `seal`.
            KeyExhausted: as `seal`, by the last of them.
        """
        if not objects or objects.step != 1:
            raise UsageError("a run has at least one Object, and their IDs follow each other")
        self._pass(Location(group_id, objects[0]), Location(group_id, objects[-1]), octets)
        tail = bytes((priority,)) + self._immutable
        return SealedRun(
            self._aead,
            zip(
                self._aead.nonces(group_id, objects),
                [_COUNTER.pack(group_id, each) + tail for each in objects],
                strict=True,
            ),
            octets,
        )

    def _pass(self, first: Location, last: Location, octets: int) -> None:
        """Note that Objects of so many framed octets each are being sealed.

        Raises:
            UsageError: one was passed already, or an Object ID does not fit.
            KeyExhausted: the key bears no more.
        """
        if last.object > MAX_OBJECT_ID:
            raise UsageError(f"Object ID {last.object} does not fit a sealed Object's nonce")
        if self._last is not None and first <= self._last:
            raise UsageError(
                f"Object {first.group}/{first.object} was sealed or passed already; a second"
                " payload needs a new publication"
            )
        blocks = -(-octets // BLOCK_OCTETS) + 2  # associated data, tag
        blocks = self._blocks + blocks * (last.object - first.object + 1)
        if blocks > MAX_KEY_BLOCKS:
            raise KeyExhausted("one key may seal 64 GiB of a track; start a new publication")
        self._blocks, self._last = blocks, last


class SealedRun:
    """Seals Objects whose IDs follow each other; made by `Sealer.run`.

    The nonce of each is taken from a list to which nothing comes back.

    Args:
        aead: of the track.
        places: nonce and associated data of each.
        octets: as for `Sealer.run`.
    """

    __slots__ = ("_aead", "_octets", "_places")

    def __init__(self, aead: TrackAead, places: Iterator[tuple[bytes, bytes]], octets: int) -> None:
        self._aead = aead
        self._places = places
        self._octets = octets

    def seal_next(self, framed: Octets, into: memoryview) -> None:
        """Seal the next Object.

        Args:
            framed: the payload's length as a variable-length integer, then the payload.
            into: where the sealed payload goes, 16 octets longer than ``framed`` and apart from it.

        Raises:
            UsageError: it has other octets than were said, or ``into`` has; or all were sealed.
        """
        octets = self._octets
        if len(framed) != octets or len(into) != octets + TAG_OCTETS:
            raise UsageError(
                f"{len(framed)} octets and room for {len(into)}; the run has {octets} and room for"
                f" {octets + TAG_OCTETS}"
            )
        made, associated = next(self._places, _NO_PLACE)
        if not made:
            raise UsageError("every Object of the run was sealed")
        self._aead.seal(made, framed, associated, into)

"""100,000 mutated manifests, signed messages, tokens, payloads and sealed Objects, in every run.

Whatever the octets: a typed error or the good content, memory in proportion to the input, and
nothing of a forgery is ever taken.
"""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvcs.errors import KvcsError, NotAuthentic, ObjectError, PublicationError, TrustError
from kvcs.kv import (
    HEADER_OCTETS,
    Ledger,
    Outcome,
    ProtectionKey,
    ProtectionRing,
    PublicationNamespace,
    SignedManifests,
    manifest_json_bytes,
    parse_manifest,
    sign_manifest,
)
from kvcs.kv.protection import Sealer, immutable_properties
from kvcs.kv.unsealing import Unsealer
from kvcs.moqt.names import FullTrackName, Location
from kvcs.trust import (
    CONSUMER,
    PRODUCER,
    Algorithm,
    KeyRing,
    KeyUse,
    SigningKey,
    TokenVerifier,
    issue,
    read_sign1,
    scope_rule,
    sign1,
)
from tests.unit.kv.toy import K0, TOY, deliver, toy_prefix

MUTATIONS = 100_000
PARTS = 10
"""Tests that share those of one kind."""

MEASURED = 50
"""One mutation in so many has its memory measured, which takes ten times as long."""

HERE = Location(1, 2)
PRIORITY = 48
NOW = 1_000
NAMESPACE = toy_prefix().namespace(bytes(16), TOY.blocks[0])
PUBLICATION = PublicationNamespace.parse(NAMESPACE)
KEYS = {algorithm: SigningKey.generate(algorithm, kid=b"k") for algorithm in Algorithm}
ISSUER = SigningKey.generate(use=KeyUse.TOKEN, name="issuer", kid=b"k")
RING = KeyRing([ISSUER.public], use=KeyUse.TOKEN)
MANIFEST = TOY.writer([2]).to_json_bytes()
PAYLOAD = TOY.objects[K0, HERE]
PROTECTION = ProtectionKey(2**32 + 1, b"\x05" * 32)
SEALED = bytes(
    Sealer(PROTECTION, FullTrackName(NAMESPACE, K0.name)).seal(HERE, PRIORITY, [PAYLOAD])
)
IMMUTABLE = immutable_properties(PROTECTION.key_id)
TOKEN = issue(
    ISSUER,
    audience=["relay"],
    rules=[scope_rule(b"s" * 16, PRODUCER | CONSUMER)],
    issued_at=NOW,
    lifetime=600,
    token_id=bytes(8),
)


def read_manifest(data: bytes) -> object:
    """A manifest that nobody signed: what is read is written as it was read."""
    manifest = parse_manifest(data)
    assert parse_manifest(manifest_json_bytes(manifest)) == manifest
    return manifest


def verify_manifest(data: bytes) -> object:
    """`manifest.cose` of a publication."""
    ring = KeyRing([KEYS[Algorithm.EDDSA].public])
    return SignedManifests(PUBLICATION, ring).verify(data, 0, NOW, max_octets=2**20)


def verify_message(data: bytes) -> object:
    """A COSE_Sign1."""
    message = read_sign1(data, "message", max_octets=2**20)
    message.verify(KEYS[message.algorithm].public)
    return message.payload


def verify_token(data: bytes) -> object:
    """A relay's look at a token, which it has not seen before."""
    return TokenVerifier(RING, ["relay"], skew=0).verify(data, NOW)


def bare_ledger() -> Ledger:
    """A consumer's ledger that waits for everything."""
    return TOY.ledger()


def take_payload(data: bytes) -> object:
    """An Object that is not sealed; everything of its header counts but Flags and Reserved."""
    ledger = bare_ledger()
    outcome = deliver(ledger, K0, HERE, data)
    assert outcome is Outcome.VERIFIED
    return data[:6] + data[8:30] + data[32:]


def take_sealed(data: bytes) -> object:
    """A sealed Object with its immutable properties before it, their length first."""
    ledger = bare_ledger()
    unsealer = Unsealer(ledger, ProtectionRing([PROTECTION]), NAMESPACE)
    length = data[0] if data else 0
    immutable, sealed = data[1 : 1 + length], data[1 + length :]
    slot = unsealer.begin(K0, HERE, len(sealed), priority=PRIORITY, immutable=immutable)
    assert slot is not None
    for start in range(0, len(sealed), 100):
        slot.write(sealed[start : start + 100])
    try:
        assert slot.finish() is Outcome.VERIFIED
    finally:
        assert unsealer.octets == 0
    return data


@dataclass(frozen=True)
class Target:
    """A good message and what takes it."""

    good: bytes
    take: Callable[[bytes], object]
    error: type[KvcsError]
    """What alone may be raised."""

    forgeable: bool = False
    """Whether something else than the good content may be taken."""


TARGETS = {
    "manifest": Target(MANIFEST, read_manifest, PublicationError, forgeable=True),
    "signed manifest": Target(
        sign_manifest(MANIFEST, KEYS[Algorithm.EDDSA], PUBLICATION, 0),
        verify_manifest,
        NotAuthentic,
    ),
    "COSE, EdDSA": Target(sign1(MANIFEST, KEYS[Algorithm.EDDSA]), verify_message, TrustError),
    "COSE, ES256": Target(sign1(b'{"kvcs":1}', KEYS[Algorithm.ES256]), verify_message, TrustError),
    "token": Target(TOKEN, verify_token, TrustError),
    "payload": Target(PAYLOAD, take_payload, ObjectError),
    "sealed Object": Target(bytes([len(IMMUTABLE)]) + IMMUTABLE + SEALED, take_sealed, ObjectError),
}

HOSTILE = (
    *(b"\x9b" + b"\xff" * 8, b"\x5b\x7f" + b"\xff" * 7, b"\xbf", b"\x9f" * 300, b"\xd8\x3d"),
    *(b"[" * 500, b'{"a":' * 200, b"9" * 400, b"1e999", b"-0", b"null", b'"\\ud800"', b"\xff" * 9),
    *(b"\x00" * 64, b"\x80" * 9, b"KVO1", b"\xd2\x84", b"\xd1\x84"),
)
"""Lengths that lie, depth, numbers without end, heads of what could follow."""


def mutated(good: bytes, chance: random.Random) -> bytes:
    """A message changed in one to four places."""
    data = bytearray(good)
    for _ in range(chance.choice((1, 1, 2, 3, 4))):
        at, change = chance.randrange(len(data) + 1), chance.randrange(8)
        other = chance.randrange(len(data) + 1)
        if change == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif change == 1 and at < len(data):
            data[at] = chance.randrange(256)
        elif change == 2:
            data[at:at] = chance.randbytes(chance.randint(1, 8))
        elif change == 3:
            del data[at : at + chance.randint(1, 20)]
        elif change == 4:  # a part moves, or comes twice
            data[at : at + chance.randint(0, 40)] = data[other : other + chance.randint(1, 40)]
        elif change == 5:
            data[at:at] = chance.choice(HOSTILE)
        elif change == 6:
            del data[at:]
        else:
            data += chance.choice(HOSTILE)
    return bytes(data)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", list(TARGETS))
def test_nothing_but_typed_errors_in_bounded_memory(name: str, part: int) -> None:
    target = TARGETS[name]
    content = target.take(target.good)
    chance = random.Random(f"{name}, part {part}")
    found: Counter[str] = Counter()

    def look(data: bytes) -> None:
        try:
            taken = target.take(data)
        except target.error as exc:
            found[str(getattr(exc, "check", ""))] += 1
        else:
            assert target.forgeable or taken == content or data == target.good, data

    number = -(-MUTATIONS // (PARTS * len(TARGETS)))
    for index in range(number):
        data = mutated(target.good, chance)
        if index % MEASURED:
            look(data)
            continue
        tracemalloc.start()
        try:
            look(data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak <= 32 * len(data) + 2**18, (peak, len(data))
    assert sum(found.values()) > number * 0.8, "most changes are refused"
    assert len(found) >= (1 if target.error is PublicationError else 2), found


def test_a_payload_is_held_to_all_of_its_octets() -> None:
    """The look at what was taken finds every octet but those of Flags and Reserved."""
    for at in range(len(PAYLOAD)):
        data = PAYLOAD[:at] + bytes([PAYLOAD[at] ^ 1]) + PAYLOAD[at + 1 :]
        if at in (6, 7, 30, 31):
            assert take_payload(data) == take_payload(PAYLOAD)
            continue
        with pytest.raises(ObjectError):
            take_payload(data)
    assert HEADER_OCTETS == 68

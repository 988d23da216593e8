"""Whatever octets come as a signed message, a token or a key: our own errors, bounded memory."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcs.errors import NotAuthentic, TrustError
from kvcs.kv import PublicationNamespace, SignedManifests, sign_manifest
from kvcs.trust import (
    CONSUMER,
    Algorithm,
    KeyRing,
    KeyUse,
    SigningKey,
    TokenVerifier,
    encode_keys,
    issue,
    read_claims,
    read_key_set,
    read_sign1,
    scope_rule,
    sign1,
)
from kvcs.trust.cbor import load
from kvcs.trust.cose import to_be_signed
from tests.unit.kv.toy import TOY, toy_prefix

SCALE = float(os.environ.get("KVCS_FUZZ_SCALE", "1"))
"""Mutations in parts of 10,000."""

MUTATIONS = max(1, int(10_000 * SCALE))

SCOPE = b"s" * 16
NOW = 1_000
HERE = PublicationNamespace.parse(toy_prefix().namespace(bytes(16), 3))
KEYS = {algorithm: SigningKey.generate(algorithm, kid=b"k") for algorithm in Algorithm}
ISSUER = SigningKey.generate(use=KeyUse.TOKEN, name="issuer", kid=b"k")
TOKEN = issue(
    ISSUER,
    audience=["relay"],
    rules=[scope_rule(SCOPE, CONSUMER)],
    issued_at=NOW,
    lifetime=600,
    token_id=bytes(8),
)
MANIFEST = sign_manifest(TOY.writer([1]).to_json_bytes(), KEYS[Algorithm.EDDSA], HERE, 0)


def verify_message(data: bytes) -> None:
    message = read_sign1(data, "message", max_octets=2**20)
    message.verify(KEYS[message.algorithm].public)


def verify_manifest(data: bytes) -> None:
    ring = KeyRing([KEYS[Algorithm.EDDSA].public])
    try:
        SignedManifests(HERE, ring).verify(data, 0, NOW, max_octets=2**20)
    except NotAuthentic as exc:
        raise TrustError(str(exc), check=exc.check) from exc


def verify_token(data: bytes) -> None:
    ring = KeyRing([ISSUER.public], use=KeyUse.TOKEN)
    TokenVerifier(ring, ["relay"], skew=0).verify(data, NOW)


TARGETS: dict[str, tuple[bytes, Callable[[bytes], Any], bool]] = {
    "COSE, EdDSA": (sign1(b'{"kvcs":1}', KEYS[Algorithm.EDDSA]), verify_message, True),
    "COSE, ES256": (sign1(b'{"kvcs":1}', KEYS[Algorithm.ES256]), verify_message, True),
    "manifest": (MANIFEST, verify_manifest, True),
    "token": (TOKEN, verify_token, True),
    "claims": (TOKEN, read_claims, False),
    "key set": (encode_keys([KEYS[Algorithm.EDDSA]]), read_key_set, False),
    "key set, ES256": (encode_keys([KEYS[Algorithm.ES256].public]), read_key_set, False),
}
"""A good message, what takes it, and whether every other octet has to be refused."""


def mutated(good: bytes, chance: random.Random) -> bytes:
    """One message changed in one to three places."""
    data = bytearray(good)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at:at] = chance.randbytes(chance.randint(1, 8))
        elif kind == 2:
            del data[at : at + chance.randint(1, 8)]
        elif kind == 3:
            other = chance.randrange(len(data) + 1)
            data[at : at + 4] = data[other : other + 4]
        elif kind == 4:
            # Heads of CBOR items: long lengths, tags, indefinite ones.
            data[at:at] = chance.choice(
                [b"\x9b" + b"\xff" * 8, b"\xbf", b"\xc0", b"\xd8\x1c", b"\x5b\x7f", b"\x80" * 9]
            )
        else:
            data = data[:at]
        if not data:
            break
    return bytes(data)


@pytest.mark.parametrize("name", list(TARGETS))
def test_mutations_are_refused_with_our_own_errors(name: str) -> None:
    good, take, strict = TARGETS[name]
    take(good)
    chance = random.Random(name)
    checks = set()
    for _ in range(max(1, MUTATIONS // len(TARGETS))):
        data = mutated(good, chance)
        if strict and name.startswith(("COSE", "manifest")) and data == good[1:]:
            continue  # a message without its tag is the same message
        try:
            take(data)
        except TrustError as exc:
            checks.add(exc.check)
        else:
            assert not strict or data == good
    assert len(checks) >= (3 if strict else 1)


@given(st.binary(max_size=300))
def test_octets_that_nobody_signed(data: bytes) -> None:
    for _, take, strict in TARGETS.values():
        for octets in (data, b"\xd2\x84" + data):
            try:
                take(octets)
            except TrustError:
                continue
            assert not strict


ITEMS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64 - 1)
    | st.binary(max_size=30)
    | st.text(max_size=10)
    | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.integers(-9, 9) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=25)
@given(ITEMS)
def test_plain_items_are_read_as_they_are(value: Any) -> None:
    octets = cbor2.dumps(value, canonical=True)
    assert load(octets, "item", max_octets=10_000, deterministic=True) == value


@given(st.dictionaries(st.integers(-9, 9) | st.text(max_size=3), ITEMS, max_size=6), ITEMS)
def test_claims_and_headers_of_any_kind(members: dict[Any, Any], payload: Any) -> None:
    """Signed by a known key, and still nothing but our own errors."""
    sound = {**members, 1: "issuer", 3: ["relay"], 4: NOW + 9, 6: NOW}
    for header in ({16: "CAT"}, members):
        for claims in (members, payload, sound):
            try:
                verify_token(signed({1: -8, 4: b"k", **header}, claims))
            except TrustError:
                pass


def signed(header: dict[Any, Any], claims: Any) -> bytes:
    """A COSE_Sign1 of the issuer, whatever its header holds."""
    protected, octets = (cbor2.dumps(part, canonical=True) for part in (header, claims))
    signature = ISSUER.sign(to_be_signed(protected, octets))
    return cbor2.dumps(cbor2.CBORTag(18, [protected, {}, octets, signature]))


@given(st.dictionaries(st.sampled_from([1, 2, 3, 4, -1, -2, -3, -4, "kvcs-use", "x"]), ITEMS))
def test_keys_of_any_kind(members: dict[Any, Any]) -> None:
    for base in ({}, cbor2.loads(encode_keys([KEYS[Algorithm.ES256]]))[0]):
        try:
            read_key_set(cbor2.dumps([{**base, **members}]))
        except TrustError as exc:
            assert exc.__cause__ is None or isinstance(exc.__cause__, TrustError)


BOMBS = {
    "arrays": b"\x9a\x00\x0f\xff\xff" + b"\x80" * 0xFFFFF,
    "maps": b"\x9a\x00\x0f\xff\xff" + b"\xa0" * 0xFFFFF,
    "depth": b"\x81" * 2**20,
    "a count without items": b"\x9b" + b"\xff" * 8,
    "a string without octets": b"\x5b" + b"\xff" * 8,
    "many keys": b"\x9a\x00\x00\xff\xff" + b"\xa1\x01\x01" * 0xFFFF,
    "protected": b"\xd2\x84\x5a\x00\x0f\xff\xff" + b"\x80" * 0xFFFFF + b"\xa0\x40\x40",
    "unprotected": b"\xd2\x84\x40\xba\x00\x07\xff\xff" + b"\x01\x80" * 0x7FFFF,
}


@pytest.mark.parametrize("name", list(BOMBS))
@pytest.mark.parametrize("target", ["COSE, EdDSA", "manifest", "token", "key set"])
def test_memory_stays_in_proportion(name: str, target: str) -> None:
    data, take = BOMBS[name], TARGETS[target][1]
    tracemalloc.start()
    try:
        with pytest.raises(TrustError):
            take(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 32 * len(data) + 2**20

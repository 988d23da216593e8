"""Keys and key rings: files, rotation, revocation, and that no secret is ever shown."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import cbor2
import pytest
from pycose.keys.okp import OKPKey

from kvcs.errors import TrustError, UsageError
from kvcs.trust import (
    Algorithm,
    KeyRing,
    KeyUse,
    PublicKey,
    SigningKey,
    encode_keys,
    read_key_set,
    read_signing_key,
)
from kvcs.trust.keys import read_key
from kvcs.trust.rings import MAX_KEY_OCTETS

A, B = b"a" * 16, b"b" * 16


def make(**options: Any) -> SigningKey:
    return SigningKey.generate(**options)


def failed(ring: KeyRing, kid: bytes, scope: bytes, now: float = 0) -> str:
    with pytest.raises(TrustError) as caught:
        ring.find(kid, scope, now)
    return caught.value.check


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_a_key_survives_its_file(algorithm: Algorithm) -> None:
    key = make(algorithm=algorithm, scope_id=A, name="site one", not_before=5, expires=50)
    again = read_signing_key(encode_keys([key]))
    assert again.public == key.public
    again.public.verify(key.sign(b"octets"), b"octets")
    key.public.verify(again.sign(b"octets"), b"octets")
    ring = KeyRing([key.public])
    assert list(KeyRing.decode(ring.encode())) == [key.public]


def test_a_key_file_is_a_cose_key_set_that_others_read() -> None:
    key = make(scope_id=A)
    [members] = cbor2.loads(encode_keys([key]))
    theirs = OKPKey.from_dict(members)
    assert (theirs.x, theirs.kid) == (key.public.octets, key.kid)
    assert members[3] == -8 and members[4] == [1]
    [public] = cbor2.loads(KeyRing([key.public]).encode())
    assert -4 not in public and public[4] == [2]


def test_the_key_identifier_comes_from_the_key() -> None:
    first, second = make(), make()
    assert first.kid != second.kid and len(first.kid) == 8
    assert read_signing_key(encode_keys([first])).kid == first.kid


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_no_secret_is_shown(algorithm: Algorithm) -> None:
    key = make(algorithm=algorithm)
    [members] = cbor2.loads(encode_keys([key]))
    secret = members[-4]
    shown = f"{key!r} {key} {key.public!r} {KeyRing([key.public])!r}"
    for text in (secret.hex(), repr(secret)[2:-1]):
        assert text not in shown
    for taken in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(UsageError, match="not pickled") as caught:
            taken(key)
        assert secret.hex() not in str(caught.value)
    for index in range(0, 32, 5):
        broken = dict(members)
        broken[-4] = secret[:index]
        with pytest.raises(TrustError) as wrong:
            read_key(broken)
        assert secret[:8].hex() not in str(wrong.value)
        assert wrong.value.__cause__ is None and wrong.value.__suppress_context__


def test_the_parts_of_a_key_belong_together() -> None:
    one, other = make(), make()
    [members] = cbor2.loads(encode_keys([one]))
    [others] = cbor2.loads(encode_keys([other]))
    with pytest.raises(TrustError, match="do not belong together"):
        read_key(members | {-4: others[-4]})


def public_members(algorithm: Algorithm = Algorithm.EDDSA) -> dict[Any, Any]:
    [members] = cbor2.loads(KeyRing([make(algorithm=algorithm, scope_id=A).public]).encode())
    found: dict[Any, Any] = members
    return found


BROKEN = {
    "no use": lambda m: m.pop("kvcs-use"),
    "unknown use": lambda m: m.update({"kvcs-use": "both"}),
    "no kid": lambda m: m.pop(2),
    "kid of text": lambda m: m.update({2: "kid"}),
    "no alg": lambda m: m.pop(3),
    "alg of the other curve": lambda m: m.update({3: -7}),
    "alg unknown": lambda m: m.update({3: -37}),
    "kty symmetric": lambda m: m.update({1: 4}),
    "kty missing": lambda m: m.pop(1),
    "curve missing": lambda m: m.pop(-1),
    "curve X25519": lambda m: m.update({-1: 4}),
    "x missing": lambda m: m.pop(-2),
    "x short": lambda m: m.update({-2: bytes(31)}),
    "x of text": lambda m: m.update({-2: "x" * 32}),
    "scope short": lambda m: m.update({"kvcs-scope": b"short"}),
    "scope of text": lambda m: m.update({"kvcs-scope": "a" * 16}),
    "name no text": lambda m: m.update({"kvcs-name": 5}),
    "name not printable": lambda m: m.update({"kvcs-name": "a\nb"}),
    "time a boolean": lambda m: m.update({"kvcs-exp": True}),
    "time negative": lambda m: m.update({"kvcs-nbf": -1}),
    "key_ops of another use": lambda m: m.update({4: [1]}),
    "unknown member": lambda m: m.update({"kvcs-new": 1}),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_key_is_refused(name: str) -> None:
    members = public_members()
    BROKEN[name](members)
    with pytest.raises(TrustError) as caught:
        read_key_set(cbor2.dumps([members]))
    assert caught.value.check == "key"


def test_a_point_off_the_curve_is_refused() -> None:
    members = public_members(Algorithm.ES256)
    members[-3] = bytes(31) + b"\x07"
    with pytest.raises(TrustError, match="ES256"):
        read_key(members)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\xa0",
        b"\x81",
        b"\x81\x01",
        b"\x9f\xff",
        b"\x9a\xff\xff\xff\xff",
        b"\x81" + b"\xa1\x01\x59\xff\xff",
        b"\x81\xa1\x61x\x59" + (MAX_KEY_OCTETS + 9).to_bytes(2, "big") + bytes(MAX_KEY_OCTETS + 9),
    ],
)
def test_what_is_no_key_set_is_refused(data: bytes) -> None:
    with pytest.raises(TrustError) as caught:
        read_key_set(data)
    assert caught.value.check == "structure"


def test_a_ring_takes_public_keys_only() -> None:
    with pytest.raises(TrustError, match="private"):
        KeyRing.decode(encode_keys([make()]))
    with pytest.raises(TrustError, match="one private key"):
        read_signing_key(KeyRing([make().public]).encode())
    with pytest.raises(TrustError, match="one private key"):
        read_signing_key(encode_keys([make(), make()]))


def test_a_ring_is_for_one_use() -> None:
    issuer = make(use=KeyUse.TOKEN, name="issuer")
    with pytest.raises(UsageError, match="signs tokens"):
        KeyRing([issuer.public])
    with pytest.raises(TrustError, match="signs tokens"):
        KeyRing.decode(KeyRing([issuer.public], use=KeyUse.TOKEN).encode())
    with pytest.raises(UsageError, match="name"):
        make(use=KeyUse.TOKEN)


def test_keys_are_found_by_scope() -> None:
    one, other, wide = make(scope_id=A), make(scope_id=B), make()
    ring = KeyRing([one.public, other.public, wide.public])
    assert ring.find(one.kid, A, 0) == one.public
    assert ring.find(wide.kid, A, 0) == ring.find(wide.kid, B, 0) == wide.public
    assert failed(ring, other.kid, A) == "scope"
    assert failed(ring, b"nobody", A) == "kid"


def test_the_same_identifier_in_two_scopes() -> None:
    one, other = make(kid=b"k1", scope_id=A), make(kid=b"k1", scope_id=B)
    ring = KeyRing([one.public, other.public])
    assert (ring.find(b"k1", A, 0), ring.find(b"k1", B, 0)) == (one.public, other.public)
    with pytest.raises(UsageError, match="two keys"):
        ring.add(make(kid=b"k1", scope_id=A).public)
    assert len(ring) == 2


def test_keys_count_from_and_until() -> None:
    key = make(scope_id=A, not_before=100, expires=200)
    ring = KeyRing([key.public])
    assert failed(ring, key.kid, A, 99.9) == "not_yet"
    assert ring.find(key.kid, A, 100) == ring.find(key.kid, A, 199.9) == key.public
    assert failed(ring, key.kid, A, 200) == "expired"


def test_rotation_and_revocation_without_a_new_ring() -> None:
    old, new = make(scope_id=A), make(scope_id=A)
    ring = KeyRing([old.public])
    before = ring.serial
    ring.add(new.public)
    assert ring.find(old.kid, A, 0) and ring.find(new.kid, A, 0)
    assert ring.remove(old.kid) == 1
    assert ring.remove(old.kid) == 0
    assert failed(ring, old.kid, A) == "kid"
    assert old.public not in ring and new.public in ring
    assert ring.serial == before + 2
    ring.replace([old.public])
    assert failed(ring, new.kid, A) == "kid"


def test_a_replacement_that_cannot_be_used_changes_nothing() -> None:
    key = make(scope_id=A)
    ring = KeyRing([key.public])
    with pytest.raises(UsageError):
        ring.replace([make(kid=b"x").public, make(kid=b"x").public])
    assert list(ring) == [key.public]


@pytest.mark.parametrize(
    "options",
    [
        {"kid": b""},
        {"kid": bytes(65)},
        {"scope_id": b"short"},
        {"name": "x" * 257},
        {"expires": -1},
        {"expires": 2**60},
    ],
)
def test_a_key_out_of_bounds_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make(**options)


def test_octets_that_are_no_key_are_refused() -> None:
    for algorithm, octets in ((Algorithm.EDDSA, bytes(31)), (Algorithm.ES256, bytes(65))):
        with pytest.raises(UsageError, match="not a public key"):
            PublicKey(kid=b"k", algorithm=algorithm, octets=octets)
    for algorithm in Algorithm:
        public = make(algorithm=algorithm).public
        for private in (bytes(31), b"\xff" * 32 if algorithm is Algorithm.ES256 else b""):
            with pytest.raises(UsageError, match="not a private key"):
                SigningKey(private, public)

"""Rings of protection keys: which key seals, and how they are written."""

from __future__ import annotations

import pickle

import cbor2
import pytest

from kvcs.errors import TrustError, UsageError
from kvcs.kv import CipherSuite, ProtectionKey, ProtectionRing
from kvcs.kv.protection_keys import MAX_PROTECTION_KEYS

OLD = ProtectionKey(2**32 + 1, b"\x11" * 32)
NEW = ProtectionKey(2**32 + 2, b"\x22" * 32, CipherSuite.AES_256_GCM_SHA512_128)
SCOPE = b"s" * 16


def test_the_newest_key_that_may_seal_does() -> None:
    ring = ProtectionRing([NEW, OLD])
    assert ring.current is NEW
    ring.set_send(NEW.key_id, False)
    assert ring.current is OLD
    assert ring.get(NEW.key_id) is NEW  # it opens still
    ring.set_send(OLD.key_id, False)
    with pytest.raises(UsageError, match="no key of the ring may seal"):
        ring.current  # noqa: B018
    with pytest.raises(UsageError, match="no key with Key ID 7"):
        ring.set_send(7, True)


def test_rotation_counts_epochs_from_one() -> None:
    ring = ProtectionRing(scope_id=SCOPE)
    first, second = ring.rotate(), ring.rotate()
    assert [first.key_id, second.key_id] == [2**32 + 1, 2**32 + 2]
    assert first.base_key != second.base_key
    assert ring.current == second
    assert ring.remove(second.key_id) and not ring.remove(second.key_id)
    assert ring.current == first


def test_a_ring_comes_back_as_it_was_written() -> None:
    ring = ProtectionRing([OLD, NEW], scope_id=SCOPE)
    ring.set_send(OLD.key_id, False)
    again = ProtectionRing.decode(ring.encode())
    assert list(again) == [OLD, NEW]
    assert again.scope_id == SCOPE
    assert (again.may_send(OLD.key_id), again.may_send(NEW.key_id)) == (False, True)
    assert ProtectionRing.decode(ProtectionRing([OLD]).encode()).scope_id is None


def test_a_ring_is_of_one_scope() -> None:
    ring = ProtectionRing([OLD], scope_id=SCOPE)
    ring.check_scope(SCOPE)
    ProtectionRing([OLD]).check_scope(SCOPE)
    with pytest.raises(UsageError, match="for another scope"):
        ring.check_scope(b"t" * 16)
    with pytest.raises(UsageError, match="16 octets"):
        ProtectionRing(scope_id=b"short")


def test_nothing_shows_a_secret() -> None:
    ring = ProtectionRing([OLD])
    assert repr(ring) == "ProtectionRing(1 keys)"
    assert "11111111" not in repr(OLD) and repr(OLD.base_key) not in repr(OLD)
    with pytest.raises(UsageError, match="not pickled"):
        pickle.dumps(ring)


def test_one_key_id_is_one_key() -> None:
    ring = ProtectionRing([OLD])
    ring.add(OLD)
    with pytest.raises(UsageError, match="two keys"):
        ring.add(ProtectionKey(OLD.key_id, b"\x33" * 32))
    full = ProtectionRing(
        ProtectionKey(2**32 + number, b"\x33" * 32) for number in range(MAX_PROTECTION_KEYS)
    )
    with pytest.raises(UsageError, match="a ring holds"):
        full.rotate()


def members(**changes: object) -> dict[object, object]:
    known = cbor2.loads(ProtectionRing([OLD], scope_id=SCOPE).encode())[0]
    names = {"kty": 1, "kid": 2, "ops": 4, "k": -1, "use": "kvcs-use", "scope": "kvcs-scope"}
    names |= {"suite": "kvcs-suite", "send": "kvcs-send", "other": "other"}
    return known | {names[name]: value for name, value in changes.items()}


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"kty": 2}, "key"),
        ({"use": "manifest"}, "key"),
        ({"kid": b"\x00" * 8}, "key"),
        ({"kid": b"\x01\x00\x00\x00\x01"}, "key"),
        ({"k": b"S" * 31}, "key"),
        ({"k": "S" * 32}, "key"),
        ({"suite": 1}, "key"),
        ({"suite": b"S" * 32}, "key"),
        ({"send": 1}, "key"),
        ({"scope": b"short"}, "key"),
        ({"ops": [1]}, "key"),
        ({"other": 1}, "structure"),
    ],
)
def test_keys_that_are_none(changes: dict[str, object], check: str) -> None:
    with pytest.raises(TrustError) as refused:
        ProtectionRing.decode(cbor2.dumps([members(**changes)]))
    assert refused.value.check == check
    assert "SSSS" not in str(refused.value)


def test_sets_that_are_none() -> None:
    other = members(scope=b"t" * 16, kid=(2**32 + 5).to_bytes(8, "big"))
    sets = [b"", b"\xa0", cbor2.dumps([]), cbor2.dumps([members()]) + b"\x00", cbor2.dumps(["key"])]
    sets += [cbor2.dumps([members(), members()]), cbor2.dumps([members(), other])]
    for octets in sets:
        with pytest.raises(TrustError):
            ProtectionRing.decode(octets)

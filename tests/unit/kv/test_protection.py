"""Secure objects: the vectors of the reference, and every way in which one does not open."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from kvcs.errors import ObjectError, UsageError
from kvcs.kv import protection
from kvcs.kv.opening import Opener
from kvcs.kv.protection import CipherSuite, ProtectionKey, Sealer
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.wire import encode_vi64

VECTORS = Path(__file__).resolve().parents[2] / "vectors" / "secure-objects"
APPENDIX: dict[str, Any] = json.loads((VECTORS / "appendix.json").read_text())
COMPUTED: dict[str, Any] = json.loads((VECTORS / "computed.json").read_text())
GCM = (4, 5)

NAME = FullTrackName((b"kvcs-1", b"s" * 16, b"c" * 32, b"a" * 32, b"p" * 16), b"k.raw.s0")
KEY = ProtectionKey(2**32 + 1, bytes(range(32)))
IMMUTABLE = protection.immutable_properties(KEY.key_id)
HERE = Location(3, 5)


def of_gcm(vectors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [vector for vector in vectors if vector["cipher_suite"] in GCM]


def sealed(
    location: Location = HERE, priority: int = 48, payload: bytes = b"some payload"
) -> memoryview:
    return Sealer(KEY, NAME).seal(location, priority, [payload])


def opener(*keys: ProtectionKey, name: FullTrackName = NAME) -> Opener:
    return Opener({key.key_id: key for key in keys or (KEY,)}, name)


@pytest.mark.parametrize("vector", APPENDIX["full_track_name"])
def test_names_serialize_as_published(vector: dict[str, Any]) -> None:
    fields = tuple(field.encode() for field in vector["namespace"])
    name = FullTrackName(fields, vector["track_name"].encode())
    assert protection.serialized_name(name).hex() == vector["serialized"]


@pytest.mark.parametrize("vector", of_gcm(APPENDIX["key_derivation"]))
def test_keys_derive_as_published(vector: dict[str, Any]) -> None:
    derived = protection.derive(
        CipherSuite(vector["cipher_suite"]),
        vector["key_id"],
        bytes.fromhex(vector["track_base_key"]),
        bytes.fromhex(vector["serialized_full_track_name"]),
    )
    assert derived.key.hex() == vector["moq_key"]
    assert derived.salt.hex() == vector["moq_salt"]


@pytest.mark.parametrize("vector", APPENDIX["nonce_aad"])
def test_nonces_and_associated_data_are_made_as_published(vector: dict[str, Any]) -> None:
    location = Location(vector["group_id"], vector["object_id"])
    assert protection.nonce(bytes.fromhex(vector["moq_salt"]), location).hex() == vector["nonce"]
    immutable = bytes.fromhex(vector["immutable_as_used"])
    made = protection.associated_data(location, vector["publisher_priority"], immutable)
    assert made.hex() == vector["aad"]


@pytest.mark.parametrize("vector", of_gcm(APPENDIX["encryption"]))
def test_published_ciphertexts_open(vector: dict[str, Any]) -> None:
    derived = protection.derive(
        CipherSuite(vector["cipher_suite"]),
        vector["key_id"],
        bytes.fromhex(vector["track_base_key"]),
        bytes.fromhex(vector["serialized_full_track_name"]),
    )
    location = Location(vector["group_id"], vector["object_id"])
    made = protection.nonce(derived.salt, location)
    assert made.hex() == vector["nonce"]
    plain = AESGCM(derived.key).decrypt(
        made, bytes.fromhex(vector["ciphertext"]), bytes.fromhex(vector["aad"])
    )
    assert plain.hex() == vector["plaintext"]


@pytest.mark.parametrize("vector", COMPUTED["vi64"])
def test_lengths_are_written_as_in_the_reference(vector: list[Any]) -> None:
    assert encode_vi64(vector[0]).hex() == vector[1]


@pytest.mark.parametrize("vector", COMPUTED["seal"], ids=lambda vector: vector["note"])
def test_computed_objects_seal_and_open(vector: dict[str, Any]) -> None:
    name = FullTrackName(
        tuple(map(bytes.fromhex, vector["namespace_hex"])), bytes.fromhex(vector["track_name_hex"])
    )
    base_key, key_id = bytes.fromhex(vector["track_base_key"]), vector["key_id"]
    suite = CipherSuite(vector["cipher_suite"])
    location = Location(vector["group_id"], vector["object_id"])
    priority, payload = vector["publisher_priority"], bytes.fromhex(vector["payload"])
    assert protection.serialized_name(name).hex() == vector["serialized_full_track_name"]
    derived = protection.derive(suite, key_id, base_key, protection.serialized_name(name))
    assert (derived.key.hex(), derived.salt.hex()) == (vector["moq_key"], vector["moq_salt"])
    assert protection.immutable_properties(key_id).hex() == vector["immutable"]
    on_wire = protection.object_properties(key_id)
    assert (encode_vi64(len(on_wire)) + on_wire).hex() == vector["properties_on_wire"]
    if key_id < protection.MIN_KEY_ID or len(base_key) != 32:
        aad = protection.associated_data(location, priority, bytes.fromhex(vector["immutable"]))
        octets = AESGCM(derived.key).encrypt(
            protection.nonce(derived.salt, location), encode_vi64(len(payload)) + payload, aad
        )
        assert octets.hex() == vector["ciphertext"]
        return
    key = ProtectionKey(key_id, base_key, suite)
    octets = Sealer(key, name).seal(location, priority, [payload[:68], payload[68:]])
    assert bytes(octets).hex() == vector["ciphertext"]
    assert len(octets) == protection.sealed_octets(len(payload))
    immutable = bytes.fromhex(vector["immutable"])
    assert opener(key, name=name).open(location, priority, immutable, octets) == payload


@given(
    payload=st.binary(max_size=40_000),
    cuts=st.lists(st.integers(0, 40_000), max_size=4),
    suite=st.sampled_from(CipherSuite),
)
def test_what_is_sealed_in_pieces_opens_whole(
    payload: bytes, cuts: list[int], suite: CipherSuite
) -> None:
    key = ProtectionKey(2**40, bytes(32), suite)
    edges = [0, *sorted(min(cut, len(payload)) for cut in cuts), len(payload)]
    parts = [payload[a:b] for a, b in pairwise(edges)]
    octets = Sealer(key, NAME).seal(HERE, 255, parts)
    immutable = protection.immutable_properties(key.key_id)
    assert bytes(opener(key).open(HERE, 255, immutable, octets)) == payload


@pytest.mark.parametrize(
    ("location", "priority", "name", "immutable"),
    [
        (Location(3, 6), 48, NAME, IMMUTABLE),
        (Location(4, 5), 48, NAME, IMMUTABLE),
        (HERE, 49, NAME, IMMUTABLE),
        (HERE, 48, FullTrackName(NAME.namespace, b"v.raw.s0"), IMMUTABLE),
        (HERE, 48, FullTrackName((*NAME.namespace[:4], b"q" * 16), NAME.name), IMMUTABLE),
        (HERE, 48, NAME, IMMUTABLE + b"\x02\x01"),
    ],
    ids=["object", "group", "priority", "track", "publication", "properties"],
)
def test_an_object_opens_nowhere_else(
    location: Location, priority: int, name: FullTrackName, immutable: bytes
) -> None:
    octets = sealed()
    there = opener(name=name)
    with pytest.raises(ObjectError) as caught:
        there.open(location, priority, immutable, octets)
    assert caught.value.check == "seal" and there.failures == 1
    assert opener().open(HERE, 48, IMMUTABLE, octets) == b"some payload"


@given(position=st.integers(0, 200), bit=st.integers(0, 7), cut=st.integers(0, 28))
def test_any_changed_or_lost_octet_is_noticed(position: int, bit: int, cut: int) -> None:
    octets = bytearray(sealed())
    changed = bytearray(octets)
    changed[position % len(changed)] ^= 1 << bit
    for wrong in (changed, octets[:cut], octets + b"\0"):
        with pytest.raises(ObjectError) as caught:
            opener().open(HERE, 48, IMMUTABLE, wrong)
        assert caught.value.check == "seal"


@pytest.mark.parametrize(
    ("immutable", "check"),
    [
        (None, "unprotected"),
        (b"", "unprotected"),
        (b"\x04\x01", "unprotected"),
        (b"\x02", "unprotected"),
        (b"\x03\x05ab", "unprotected"),
        (IMMUTABLE + b"\x00\x07", "unprotected"),
        (protection.immutable_properties(2**32 + 2), "key"),
    ],
)
def test_without_one_known_key_id_nothing_opens(immutable: bytes | None, check: str) -> None:
    with pytest.raises(ObjectError) as caught:
        opener().open(HERE, 48, immutable, sealed())
    assert caught.value.check == check


def test_other_immutable_properties_are_borne() -> None:
    immutable = IMMUTABLE + b"\x39\x03abc"
    derived = protection.derive(
        KEY.suite, KEY.key_id, KEY.base_key, protection.serialized_name(NAME)
    )
    octets = AESGCM(derived.key).encrypt(
        protection.nonce(derived.salt, HERE),
        b"\x02hi",
        protection.associated_data(HERE, 48, immutable),
    )
    assert opener().open(HERE, 48, immutable, octets) == b"hi"


@pytest.mark.parametrize(
    ("plain", "payload"),
    [
        (b"\x02hi", b"hi"),
        (b"\x80\x02hi", b"hi"),
        (b"\x02hi\x00\x0a\x03abc", b"hi"),
        (b"\x02hi\x00\x0b\x03abc", None),
        (b"\x02hi\x00\x0a\x04abc", None),
        (b"\x02hi\x00\x0a\x02abc", None),
        (b"\x02hi\x00", None),
        (b"\x03hi", None),
        (b"", None),
        (b"\xff" + b"\xff" * 8 + b"x", None),
    ],
)
def test_what_was_sealed_is_framed_exactly(plain: bytes, payload: bytes | None) -> None:
    derived = protection.derive(
        KEY.suite, KEY.key_id, KEY.base_key, protection.serialized_name(NAME)
    )
    octets = AESGCM(derived.key).encrypt(
        protection.nonce(derived.salt, HERE),
        plain,
        protection.associated_data(HERE, 48, IMMUTABLE),
    )
    if payload is not None:
        assert opener().open(HERE, 48, IMMUTABLE, octets) == payload
        return
    with pytest.raises(ObjectError) as caught:
        opener().open(HERE, 48, IMMUTABLE, octets)
    assert caught.value.check == "seal"


def test_a_location_is_sealed_once() -> None:
    sealer = Sealer(KEY, NAME)
    sealer.seal(Location(0, 1), 0, [b"a"])
    for passed in (Location(0, 1), Location(0, 0)):
        with pytest.raises(UsageError, match="new publication"):
            sealer.seal(passed, 0, [b"b"])
    sealer.seal(Location(1, 0), 0, [b"c"])
    with pytest.raises(UsageError, match="nonce"):
        sealer.seal(Location(1, 2**32), 0, [b"d"])


def test_a_key_is_not_worn_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protection, "MAX_KEY_BLOCKS", 8)
    sealer = Sealer(KEY, NAME)
    sealer.seal(Location(0, 0), 0, [bytes(90)])
    with pytest.raises(protection.KeyExhausted):
        sealer.seal(Location(0, 1), 0, [b""])


@pytest.mark.parametrize("key_id", [0, 7, 2**32 - 1, 2**64])
def test_key_ids_that_look_like_a_timeout_are_refused(key_id: int) -> None:
    with pytest.raises(UsageError):
        ProtectionKey(key_id, bytes(32))


def test_no_secret_is_shown() -> None:
    with pytest.raises(UsageError) as caught:
        ProtectionKey(2**32, b"too short a secret")
    assert "secret" not in str(caught.value)
    derived = protection.derive(KEY.suite, KEY.key_id, KEY.base_key, b"")
    for shown in (repr(KEY), repr(derived)):
        assert "\\x" not in shown and "000102" not in shown


def test_the_key_id_of_each_object_counts_whatever_came_before() -> None:
    keys = {number: ProtectionKey(number, bytes([number % 251] * 32)) for number in (2**32, 2**40)}
    name = FullTrackName((b"kvcs-1",), b"k.raw.s0")
    opener = Opener(keys, name)
    sealers = {number: Sealer(key, name) for number, key in keys.items()}
    for at, number in enumerate((2**32, 2**40, 2**40, 2**32)):
        place, immutable = Location(0, at), protection.immutable_properties(number)
        sealed = sealers[number].seal(place, 5, [b"payload"])
        assert bytes(opener.open(place, 5, immutable, sealed)) == b"payload"
        with pytest.raises(ObjectError, match="0 Key IDs"):
            opener.open(place, 5, b"", sealed)
        other = protection.immutable_properties(2**72 // number)
        with pytest.raises(ObjectError) as caught:
            opener.open(place, 5, other, sealed)
        assert caught.value.check == "seal"
    assert opener.failures == 8


def test_where_it_does_not_open_nothing_of_it_is_left() -> None:
    octets = bytearray(sealed(payload=b"secret" * 20))
    room = memoryview(bytearray(len(octets) - protection.TAG_OCTETS))
    assert bytes(opener().open(HERE, 48, IMMUTABLE, octets, room)) == b"secret" * 20
    octets[-1] ^= 1
    for _ in range(2):
        with pytest.raises(ObjectError) as caught:
            opener().open(HERE, 48, IMMUTABLE, octets, room)
        assert caught.value.check == "seal"
        assert bytes(room) == bytes(len(room))
        room[:] = b"\x07" * len(room)


def test_a_room_of_another_length_is_refused_before_anything_is_sealed() -> None:
    run, framed = Sealer(KEY, NAME).run(HERE.group, range(5, 6), 48, 3), b"\x02hi"
    for octets in (0, 18, 20):
        with pytest.raises(UsageError, match="room for 19"):
            run.seal_next(framed, memoryview(bytearray(octets)))
    with pytest.raises(UsageError, match="the run has 3"):
        run.seal_next(b"\x03hi!", memoryview(bytearray(20)))
    room = memoryview(bytearray(19))
    run.seal_next(framed, room)  # the Location is free still
    assert room == sealed(payload=b"hi")


@given(group=st.integers(0, 2**64 - 1), first=st.integers(0, 2**32 - 5), count=st.integers(1, 5))
def test_a_run_seals_what_one_after_the_other_would(group: int, first: int, count: int) -> None:
    payloads = [bytes((each,)) * 9 for each in range(count)]
    objects = range(first, first + count)
    alone, together = Sealer(KEY, NAME), Sealer(KEY, NAME)
    run = together.run(group, objects, 200, 10)
    for each, payload in zip(objects, payloads, strict=True):
        room = memoryview(bytearray(26))
        run.seal_next(b"\x09" + payload, room)
        assert room == alone.seal(Location(group, each), 200, [payload])
    with pytest.raises(UsageError, match="every Object"):
        run.seal_next(b"\x09" + payloads[0], room)


def test_objects_of_a_run_are_sealed_once_whether_it_was_used_or_not() -> None:
    sealer = Sealer(KEY, NAME)
    sealer.run(3, range(2, 5), 0, 10)
    for group, objects in ((3, range(4, 9)), (3, range(2, 5)), (2, range(7, 8)), (3, range(1))):
        with pytest.raises(UsageError, match="new publication"):
            sealer.run(group, objects, 0, 10)
    with pytest.raises(UsageError, match="new publication"):
        sealer.seal(Location(3, 3), 0, [b"x"])
    sealer.run(3, range(5, 6), 0, 10)
    for objects in (range(9, 9), range(6, 12, 2), range(9, 6, -1)):
        with pytest.raises(UsageError, match="follow each other"):
            sealer.run(3, objects, 0, 10)
    with pytest.raises(UsageError, match="nonce"):
        sealer.run(4, range(2**32 - 1, 2**32 + 1), 0, 10)
    sealer.run(4, range(2**32 - 1, 2**32), 0, 10)  # what was refused has passed nothing


def test_a_run_counts_before_anything_of_it_is_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protection, "MAX_KEY_BLOCKS", 9)
    sealer = Sealer(KEY, NAME)
    with pytest.raises(protection.KeyExhausted):
        sealer.run(0, range(4), 0, 16)
    sealer.run(0, range(3), 0, 16)
    with pytest.raises(protection.KeyExhausted):
        sealer.run(1, range(1), 0, 1)


class OlderAead:
    """AES-GCM as releases of cryptography have it that write nowhere but into new octets."""

    def __init__(self, key: bytes) -> None:
        whole = AESGCM(key)
        self.encrypt, self.decrypt = whole.encrypt, whole.decrypt


def test_releases_without_a_place_to_write_to_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    octets = bytes(sealed())
    monkeypatch.setattr(protection, "AESGCM", OlderAead)
    assert bytes(sealed()) == octets
    room = memoryview(bytearray(len(octets) - protection.TAG_OCTETS))
    for into in (None, room):
        assert bytes(opener().open(HERE, 48, IMMUTABLE, octets, into)) == b"some payload"
        with pytest.raises(ObjectError):
            opener().open(HERE, 48, IMMUTABLE, b"\x00" + octets[1:], into)


def test_every_length_is_read_whatever_came_before() -> None:
    sealer, one = Sealer(KEY, NAME), opener()
    payloads = [b"a" * 127, b"b" * 127, b"", b"c" * 128, b"d" * 126, b"", b"e" * 127]
    for number, payload in enumerate(payloads):
        here = Location(0, number)
        octets = sealer.seal(here, 48, [payload])
        assert bytes(one.open(here, 48, IMMUTABLE, octets)) == payload
    derived = protection.derive(
        KEY.suite, KEY.key_id, KEY.base_key, protection.serialized_name(NAME)
    )
    for plain, payload in ((b"\x02hi", b"hi"), (b"\x80\x01x", b"x"), (b"\x01xx", None)):
        octets = AESGCM(derived.key).encrypt(
            protection.nonce(derived.salt, HERE),
            plain,
            protection.associated_data(HERE, 48, IMMUTABLE),
        )
        if payload is not None:
            assert bytes(one.open(HERE, 48, IMMUTABLE, octets)) == payload
            continue
        with pytest.raises(ObjectError):
            one.open(HERE, 48, IMMUTABLE, octets)

"""COSE_Sign1: what is read and verified, and every way in which one is refused."""

from __future__ import annotations

from typing import Any

import cbor2
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from pycose.algorithms import EdDSA, Es256
from pycose.headers import KID, Algorithm
from pycose.keys.ec2 import EC2Key
from pycose.keys.okp import OKPKey
from pycose.messages.sign1message import Sign1Message

from kvcs.errors import TrustError, UsageError
from kvcs.trust import Algorithm as Alg
from kvcs.trust import PublicKey, SigningKey, read_sign1, sign1
from kvcs.trust.cbor import head
from kvcs.trust.cose import to_be_signed

KEYS = {algorithm: SigningKey.generate(algorithm, kid=b"k1") for algorithm in Alg}
PAYLOAD = b'{"kvcs":1}'


def read(data: bytes, **options: Any) -> Any:
    return read_sign1(data, "message", max_octets=4096, **options)


def refused(data: bytes, check: str, key: PublicKey | None = None, **options: Any) -> None:
    with pytest.raises(TrustError) as caught:
        read(data, **options).verify(key or KEYS[Alg.EDDSA].public)
    assert caught.value.check == check, str(caught.value)


def message(
    protected: Any = None,
    unprotected: Any = None,
    payload: Any = PAYLOAD,
    *,
    key: SigningKey | None = None,
    signature: bytes | None = None,
) -> bytes:
    """A COSE_Sign1 built without the code under test, signed by an Ed25519 key."""
    signer = KEYS[Alg.EDDSA] if key is None else key
    members = {1: -8, 4: b"k1"} if protected is None else protected
    octets = members if isinstance(members, bytes) else cbor2.dumps(members)
    signed = cbor2.dumps(["Signature1", octets, b"", payload])
    return cbor2.dumps(
        cbor2.CBORTag(
            18,
            [
                octets,
                unprotected or {},
                payload,
                signer.sign(signed) if signature is None else signature,
            ],
        )
    )


@pytest.mark.parametrize("algorithm", list(Alg))
def test_what_is_signed_verifies(algorithm: Alg) -> None:
    key = KEYS[algorithm]
    data = sign1(PAYLOAD, key, {"note": 3})
    assert data[:2] == b"\xd2\x84"
    opened = read(data)
    opened.verify(key.public)
    assert opened.payload == PAYLOAD
    assert (opened.kid, opened.algorithm) == (b"k1", algorithm)
    assert opened.protected["note"] == 3


@pytest.mark.parametrize("label", [1, 2, 4])
def test_a_caller_does_not_choose_alg_crit_or_kid(label: int) -> None:
    with pytest.raises(UsageError):
        sign1(PAYLOAD, KEYS[Alg.EDDSA], {label: 0})


def test_a_message_without_its_tag_is_read() -> None:
    read(message()[1:]).verify(KEYS[Alg.EDDSA].public)


def test_a_kid_in_the_unprotected_header_is_read() -> None:
    opened = read(message({1: -8}, {4: b"k1"}))
    opened.verify(KEYS[Alg.EDDSA].public)
    assert opened.kid == b"k1"


@pytest.mark.parametrize("place", ["protected", "unprotected"])
def test_messages_of_pycose_verify(place: str) -> None:
    okp = OKPKey.generate_key("ED25519")
    ec2 = EC2Key.generate_key("P_256")
    for key, algorithm, mine in ((okp, EdDSA, Alg.EDDSA), (ec2, Es256, Alg.ES256)):
        headers = ({Algorithm: algorithm}, {KID: b"k1"})
        if place == "protected":
            headers = (headers[0] | headers[1], {})
        built = Sign1Message(phdr=headers[0], uhdr=headers[1], payload=PAYLOAD)
        built.key = key
        octets = key.x if mine is Alg.EDDSA else b"\x04" + key.x + key.y
        read(built.encode()).verify(PublicKey(kid=b"k1", algorithm=mine, octets=octets))


def test_pycose_verifies_our_messages() -> None:
    for algorithm, key in KEYS.items():
        protected, unprotected, payload, signature = cbor2.loads(sign1(PAYLOAD, key)).value
        theirs = Sign1Message.from_cose_obj(
            [protected, dict(unprotected), payload, signature], True
        )
        point = key.public.octets
        theirs.key = (
            OKPKey(crv="ED25519", x=point)
            if algorithm is Alg.EDDSA
            else EC2Key(crv="P_256", x=point[1:33], y=point[33:])
        )
        assert theirs.verify_signature()


def test_cryptography_alone_verifies_our_messages() -> None:
    protected, _, payload, signature = cbor2.loads(sign1(PAYLOAD, KEYS[Alg.EDDSA])).value
    signed = cbor2.dumps(["Signature1", protected, b"", payload])
    assert signed == to_be_signed(protected, payload)
    key = ed25519.Ed25519PublicKey.from_public_bytes(KEYS[Alg.EDDSA].public.octets)
    key.verify(signature, signed)


def test_an_es256_signature_of_cryptography_verifies() -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    numbers = private.public_key().public_numbers()
    point = b"\x04" + numbers.x.to_bytes(32, "big") + numbers.y.to_bytes(32, "big")
    protected = cbor2.dumps({1: -7, 4: b"k1"})
    der = private.sign(to_be_signed(protected, PAYLOAD), ec.ECDSA(hashes.SHA256()))
    signature = b"".join(part.to_bytes(32, "big") for part in decode_dss_signature(der))
    public = PublicKey(kid=b"k1", algorithm=Alg.ES256, octets=point)
    read(message(protected, signature=signature)).verify(public)
    refused(message(protected, signature=der), "structure", public)


WRONG = {
    "alg in the unprotected header": (message({4: b"k1"}, {1: -8}), "header"),
    "alg in both": (message({1: -8, 4: b"k1"}, {1: -8}), "header"),
    "no alg": (message({4: b"k1"}), "algorithm"),
    "alg PS256": (message({1: -37, 4: b"k1"}), "algorithm"),
    "alg ES384": (message({1: -35, 4: b"k1"}), "algorithm"),
    "alg HMAC": (message({1: 5, 4: b"k1"}), "algorithm"),
    "alg not registered": (message({1: -70_000, 4: b"k1"}), "header"),
    "alg as text": (message({1: "EdDSA", 4: b"k1"}), "algorithm"),
    "no kid": (message({1: -8}), "header"),
    "empty kid": (message({1: -8, 4: b""}), "header"),
    "kid as text": (message({1: -8, 4: "k1"}), "header"),
    "kid too long": (message({1: -8, 4: bytes(65)}), "header"),
    "kid in both": (message({1: -8, 4: b"k1"}, {4: b"k1"}), "header"),
    "critical and unknown": (message({1: -8, 2: [99], 4: b"k1", 99: 1}), "header"),
    "critical and absent": (message({1: -8, 2: ["note"], 4: b"k1"}), "header"),
    "empty crit": (message({1: -8, 2: [], 4: b"k1"}), "header"),
    "crit no list": (message({1: -8, 2: 4, 4: b"k1"}), "header"),
    "crit unprotected": (message({1: -8, 4: b"k1"}, {2: [4]}), "header"),
    "label twice": (message(b"\xa3\x01\x27\x04\x42k1\x04\x42k1"), "structure"),
    "label as octets": (message(b"\xa3\x01\x27\x04\x42k1\x41a\x01"), "structure"),
    "protected no map": (message(b"\x82\x01\x27"), "structure"),
    "protected empty": (message(b""), "structure"),
    "protected with more behind": (message(b"\xa2\x01\x27\x04\x42k1\x00"), "structure"),
    "protected indefinite": (message(b"\xbf\x01\x27\x04\x42k1\xff"), "structure"),
    "protected overlong head": (message(b"\xb8\x02\x01\x27\x04\x42k1"), "structure"),
    "protected with a tag": (message(b"\xa3\x01\x27\x04\x42k1\x05\xc0\x61a"), "structure"),
    "protected too long": (message({1: -8, 4: b"k1", "x": bytes(1100)}), "structure"),
    "nested too deeply": (
        message(b"\xa3\x01\x27\x04\x42k1\x05" + b"\x81" * 40 + b"\x00"),
        "structure",
    ),
    "no payload": (message(payload=None), "structure"),
    "payload as text": (message(payload="text"), "structure"),
    "octets behind": (message() + b"\x00", "structure"),
    "other tag": (b"\xd1" + message()[1:], "structure"),
    "two tags": (b"\xd2" + message(), "structure"),
    "array of three": (cbor2.dumps([b"", {}, b""]), "structure"),
    "array of five": (cbor2.dumps([b"", {}, b"", b"", b""]), "structure"),
    "no array": (cbor2.dumps({}), "structure"),
    "indefinite array": (b"\xd2\x9f" + message()[2:] + b"\xff", "structure"),
    "empty": (b"", "structure"),
    "cut": (message()[:-1], "structure"),
    "plain JSON": (PAYLOAD, "structure"),
    "signature empty": (message(signature=b""), "signature"),
    "signature short": (message(signature=bytes(63)), "signature"),
    "signature long": (message(signature=bytes(65)), "structure"),
    "signature of zeros": (message(signature=bytes(64)), "signature"),
    "too long": (message(payload=bytes(5000)), "size"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_broken_message_is_refused(name: str) -> None:
    refused(*WRONG[name])


def test_a_crit_that_is_understood_passes() -> None:
    data = message({1: -8, 2: ["note"], 4: b"k1", "note": 1})
    read(data, understood=frozenset({"note"})).verify(KEYS[Alg.EDDSA].public)
    refused(data, "header")


def test_labels_in_another_order_pass_where_the_order_is_free() -> None:
    data = message({4: b"k1", 1: -8})
    read(data).verify(KEYS[Alg.EDDSA].public)
    refused(data, "structure", deterministic=True)


@pytest.mark.parametrize("algorithm", list(Alg))
def test_every_changed_octet_is_refused(algorithm: Alg) -> None:
    key = KEYS[algorithm]
    good = sign1(PAYLOAD, key)
    for index in range(len(good)):
        data = bytearray(good)
        data[index] ^= 1
        with pytest.raises(TrustError):
            read(bytes(data)).verify(key.public)


def test_the_key_decides_the_algorithm() -> None:
    refused(message({1: -7, 4: b"k1"}), "algorithm", KEYS[Alg.EDDSA].public)
    refused(sign1(PAYLOAD, KEYS[Alg.ES256]), "algorithm", KEYS[Alg.EDDSA].public)


def test_another_key_is_refused() -> None:
    refused(message(), "signature", SigningKey.generate(kid=b"k1").public)


def test_the_payload_is_not_shown() -> None:
    shown = repr(read(message(payload=b"secret payload")))
    assert "secret" not in shown


@pytest.mark.parametrize("size", [10**5, 10**6])
def test_hostile_frames_cost_no_time_or_memory(size: int) -> None:
    """Millions of tiny items where a header should be are not walked through."""
    tail = b"\x41x" + b"\x58\x40" + bytes(64)
    for start in (b"\xd2\x84\x40", b"\xd2\x84\x43\xa1\x01\x27"):
        data = start + b"\x9a" + size.to_bytes(4, "big") + b"\x80" * size + tail
        with pytest.raises(TrustError) as caught:
            read_sign1(data, "message", max_octets=2**27)
        assert caught.value.check == "structure"


@pytest.mark.parametrize("size", [0, 1, 23, 24, 255, 256, 65_535, 65_536])
@pytest.mark.parametrize("algorithm", list(Alg))
def test_payloads_of_every_size_of_head(algorithm: Alg, size: int) -> None:
    """What is put together by hand is what cbor2 would write."""
    payload, key = bytes(size), KEYS[algorithm]
    data = sign1(payload, key)
    protected, unprotected, carried, signature = cbor2.loads(data).value
    again = cbor2.CBORTag(18, [protected, dict(unprotected), carried, signature])
    assert (carried, cbor2.dumps(again)) == (payload, data)
    signed = cbor2.dumps(["Signature1", protected, b"", payload])
    assert to_be_signed(protected, payload) == signed
    read_sign1(data, "message", max_octets=len(data)).verify(key.public)


def test_heads_are_those_of_cbor() -> None:
    for number in (0, 23, 24, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**64 - 1):
        assert head(0, number) == cbor2.dumps(number)
    with pytest.raises(ValueError, match="long"):
        head(0, 2**64)


@pytest.mark.parametrize("label", [-1, -2])
@pytest.mark.parametrize("value", [[], [1], [9], {}, {1: 1}, "x", 1, None])
def test_what_a_relay_puts_into_the_unprotected_header_raises_nothing_else(
    label: int, value: Any
) -> None:
    # Ephemeral keys (RFC 9053, 6.3): pycose decodes them, and stumbles in many ways.
    refused(message(unprotected={label: value}), "header")

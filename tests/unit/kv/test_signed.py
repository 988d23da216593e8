"""manifest.cose: signed, verified, and refused wherever a version is not what it claims to be."""

from __future__ import annotations

from typing import Any

import cbor2
import pytest

from kvcs.errors import NotAuthentic, UsageError
from kvcs.kv import (
    Manifest,
    PublicationNamespace,
    SignedManifests,
    check_lists,
    check_signing_key,
    look_at_signed,
    parse_manifest,
    sign_manifest,
)
from kvcs.kv.signed import NAMESPACE, VERSION
from kvcs.trust import (
    Algorithm,
    KeyRing,
    KeyUse,
    SigningKey,
    TokenVerifier,
    issue,
    sign1,
)
from tests.unit.kv.toy import TOY, toy_prefix

PREFIX = toy_prefix()
HERE = PublicationNamespace.parse(PREFIX.namespace(bytes(16), 3))
ELSEWHERE = PublicationNamespace.parse(PREFIX.namespace(bytes([1] * 16), 3))
SCOPE = HERE.scope_id
KEY = SigningKey.generate(scope_id=SCOPE, name="site one")
OTHER = SigningKey.generate(scope_id=SCOPE, name="site two")
NOW = 1_000.0
LIMIT = 2**20


def payload(layers: int | None = None) -> bytes:
    return TOY.writer(None if layers is None else [layers]).to_json_bytes()


def verify(
    data: bytes,
    version: int = 0,
    *,
    ring: KeyRing | None = None,
    manifests: SignedManifests | None = None,
    now: float = NOW,
) -> Any:
    judge = manifests or SignedManifests(
        HERE, KeyRing([KEY.public, OTHER.public]) if ring is None else ring
    )
    signed = judge.verify(data, version, now, max_octets=LIMIT)
    judge.accept(signed, parse_manifest(signed.payload))
    return signed


def refused(check: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(NotAuthentic) as caught:
        verify(*arguments, **options)
    assert caught.value.check == check, str(caught.value)


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_a_signed_version_is_verified(algorithm: Algorithm) -> None:
    key = SigningKey.generate(algorithm, scope_id=SCOPE)
    signed = verify(sign_manifest(payload(), key, HERE, 7), 7, ring=KeyRing([key.public]))
    assert signed.payload == payload()
    assert (signed.kid, signed.key, signed.version) == (key.kid, key.public, 7)


def test_a_foreign_version_without_our_parameters_is_verified() -> None:
    assert verify(sign1(payload(), KEY), 5).key == KEY.public


def test_a_version_of_another_publication_is_refused() -> None:
    refused("publication", sign_manifest(payload(), KEY, ELSEWHERE, 0))


def test_a_version_of_another_group_is_refused() -> None:
    refused("version", sign_manifest(payload(), KEY, HERE, 1), 2)


@pytest.mark.parametrize("value", ["text", -1, [1], b"x" * 96])
def test_parameters_of_another_kind_are_refused(value: Any) -> None:
    refused("publication", sign1(payload(), KEY, {NAMESPACE: value}))
    refused("version", sign1(payload(), KEY, {VERSION: value}))


def test_an_unknown_key_is_refused() -> None:
    refused("kid", sign_manifest(payload(), SigningKey.generate(), HERE, 0))
    refused("kid", sign_manifest(payload(), KEY, HERE, 0), ring=KeyRing())


def test_a_key_of_another_scope_is_refused() -> None:
    foreign = SigningKey.generate(scope_id=b"f" * 16)
    ring = KeyRing([foreign.public])
    refused("scope", sign_manifest(payload(), foreign, HERE, 0), ring=ring)


def test_a_forger_under_a_known_identifier_is_refused() -> None:
    forger = SigningKey.generate(kid=KEY.kid, scope_id=SCOPE)
    refused("signature", sign_manifest(payload(), forger, HERE, 0))


def test_a_key_counts_from_and_until() -> None:
    key = SigningKey.generate(scope_id=SCOPE, not_before=100, expires=200)
    data, ring = sign_manifest(payload(), key, HERE, 0), KeyRing([key.public])
    refused("not_yet", data, ring=ring, now=99)
    assert verify(data, ring=ring, now=100)
    refused("expired", data, ring=ring, now=200)


def test_a_revoked_key_counts_for_the_next_version_no_longer() -> None:
    ring = KeyRing([KEY.public])
    manifests = SignedManifests(HERE, ring)
    verify(sign_manifest(payload(1), KEY, HERE, 0), 0, manifests=manifests)
    ring.remove(KEY.kid)
    refused("kid", sign_manifest(payload(2), KEY, HERE, 1), 1, manifests=manifests)


def test_the_wrong_algorithm_is_refused() -> None:
    twin = SigningKey.generate(Algorithm.ES256, kid=KEY.kid, scope_id=SCOPE)
    refused("algorithm", sign_manifest(payload(), twin, HERE, 0))


@pytest.mark.parametrize(
    ("data", "check"),
    [
        (b"", "structure"),
        (payload(), "structure"),
        (b"\xd2" + payload(), "structure"),
        (sign_manifest(payload(), KEY, HERE, 0) + b"\x00", "structure"),
        (sign_manifest(payload(), KEY, HERE, 0)[:-1], "structure"),
        (bytes(LIMIT + 1), "size"),
    ],
)
def test_what_is_not_signed_is_refused(data: bytes, check: str) -> None:
    refused(check, data)
    with pytest.raises(NotAuthentic) as caught:
        look_at_signed(data, 0, max_octets=LIMIT)
    assert caught.value.check == check


def test_every_changed_octet_is_refused() -> None:
    good = sign_manifest(payload(0), KEY, HERE, 0)
    for index in range(0, len(good)):
        data = bytearray(good)
        data[index] ^= 0x20
        with pytest.raises(NotAuthentic):
            verify(bytes(data))


def test_a_swapped_payload_is_refused() -> None:
    mine = cbor2.loads(sign_manifest(payload(), KEY, HERE, 0)).value
    other = cbor2.loads(sign_manifest(payload(1), KEY, HERE, 0)).value
    swapped = cbor2.dumps(cbor2.CBORTag(18, [mine[0], {}, other[2], mine[3]]))
    refused("signature", swapped)


def test_a_token_is_no_manifest_and_a_manifest_no_token() -> None:
    issuer = SigningKey.generate(use=KeyUse.TOKEN, name="issuer", kid=KEY.kid)
    token = issue(issuer, audience=["r"], rules=[], issued_at=0, lifetime=60, token_id=bytes(8))
    refused("signature", token)
    judge = TokenVerifier(KeyRing([issuer.public], use=KeyUse.TOKEN), ["r"])
    with pytest.raises(Exception) as caught:
        judge.verify(sign_manifest(b"{}", KEY, HERE, 0), 0)
    assert getattr(caught.value, "check", None) == "header"


# --- versions ---


def test_versions_grow() -> None:
    manifests = SignedManifests(HERE, KeyRing([KEY.public]))
    for version, layers in ((0, 0), (1, 1), (4, 4)):
        data = sign_manifest(payload(layers), KEY, HERE, version)
        assert verify(data, version, manifests=manifests).version == version
    assert manifests.key == KEY.public


def test_an_older_version_is_a_rollback() -> None:
    manifests = SignedManifests(HERE, KeyRing([KEY.public]))
    verify(sign_manifest(payload(2), KEY, HERE, 3), 3, manifests=manifests)
    refused("rollback", sign_manifest(payload(1), KEY, HERE, 2), 2, manifests=manifests)
    refused("rollback", sign_manifest(payload(3), KEY, HERE, 3), 3, manifests=manifests)
    verify(sign_manifest(payload(2), KEY, HERE, 3), 3, manifests=manifests)


def test_a_newer_version_that_says_less_is_a_contradiction() -> None:
    manifests = SignedManifests(HERE, KeyRing([KEY.public]))
    verify(sign_manifest(payload(2), KEY, HERE, 0), 0, manifests=manifests)
    refused("contradiction", sign_manifest(payload(1), KEY, HERE, 1), 1, manifests=manifests)


def test_versions_of_two_producers_are_refused() -> None:
    manifests = SignedManifests(HERE, KeyRing([KEY.public, OTHER.public]))
    verify(sign_manifest(payload(1), KEY, HERE, 0), 0, manifests=manifests)
    refused("signer", sign_manifest(payload(2), OTHER, HERE, 1), 1, manifests=manifests)


def test_what_was_only_looked_at_is_not_accepted() -> None:
    looked = look_at_signed(sign_manifest(payload(), KEY, HERE, 2), 2, max_octets=LIMIT)
    assert (looked.kid, looked.key, looked.payload) == (KEY.kid, None, payload())
    with pytest.raises(UsageError, match="not verified"):
        SignedManifests(HERE, KeyRing()).accept(looked, parse_manifest(looked.payload))


# --- signing ---


def test_a_key_that_does_not_fit_is_told_before_anything_is_signed() -> None:
    check_signing_key(KEY, HERE, NOW)
    check_signing_key(SigningKey.generate(), HERE, NOW)
    for key, text in (
        (SigningKey.generate(scope_id=b"f" * 16), "another scope"),
        (SigningKey.generate(expires=5), "expired"),
        (SigningKey.generate(not_before=5_000), "not count yet"),
        (SigningKey.generate(use=KeyUse.TOKEN, name="i"), "signs tokens"),
    ):
        with pytest.raises(UsageError, match=text):
            check_signing_key(key, HERE, NOW)


def test_complete_segments_need_their_digests() -> None:
    whole = TOY.writer().manifest()
    check_lists(whole)
    check_lists(TOY.writer([2]).manifest())
    [entry] = whole.segments
    bare = type(entry)(
        entry.segment, entry.first_block, entry.blocks, entry.block_keys_sha256, entry.tracks, True
    )
    with pytest.raises(NotAuthentic) as caught:
        check_lists(Manifest(whole.compat, whole.layers, whole.block_tokens, (bare,)))
    assert caught.value.check == "digests"


def test_a_version_shows_no_payload() -> None:
    shown = repr(verify(sign_manifest(payload(), KEY, HERE, 0)))
    assert "segments" not in shown

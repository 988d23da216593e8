"""Authorization tokens: made, verified, expired, refused; vectors of others and of the profile."""

from __future__ import annotations

import hmac
import json
from pathlib import Path
from typing import Any

import cbor2
import pytest

from kvcs.errors import TrustError, UsageError
from kvcs.trust import (
    CONSUMER,
    PRODUCER,
    Action,
    Algorithm,
    Asked,
    KeyRing,
    KeyUse,
    PublicKey,
    SigningKey,
    TokenVerifier,
    issue,
    read_claims,
    scope_rule,
)
from kvcs.trust.rights import SETUP_RULE, read_rules
from kvcs.trust.tokens import MAX_VERIFIED
from tests.unit.trust.makers import (
    CLAIMS,
    ISSUER,
    NOW,
    OTHER,
    RELAY,
    ROOT,
    SCOPE,
    ring,
    signed,
    token,
    verifier,
)

VECTORS = Path(__file__).resolve().parents[2] / "vectors" / "tokens"
PROFILE = json.loads((VECTORS / "profile.json").read_text())
CAT = json.loads((VECTORS / "cat4moqt.json").read_text())


def refused(value: bytes, check: str, judge: TokenVerifier | None = None, now: float = NOW) -> None:
    with pytest.raises(TrustError) as caught:
        (judge or verifier()).verify(value, now)
    assert caught.value.check == check, str(caught.value)


# --- vectors ---


def profile_ring() -> KeyRing:
    ed25519 = PublicKey(
        kid=b"k1",
        algorithm=Algorithm.EDDSA,
        octets=bytes.fromhex(PROFILE["ed25519_public"]),
        use=KeyUse.TOKEN,
        name=PROFILE["issuer"],
    )
    p256 = PublicKey(
        kid=b"k2",
        algorithm=Algorithm.ES256,
        octets=b"\x04" + bytes.fromhex(CAT["es256_x"] + CAT["es256_y"]),
        use=KeyUse.TOKEN,
        name=PROFILE["issuer"],
    )
    return KeyRing([ed25519, p256], use=KeyUse.TOKEN)


@pytest.mark.parametrize("row", PROFILE["authorize_hex"], ids=lambda row: f"{row[0]}-{row[1]}")
def test_vectors_of_the_profile(row: Any) -> None:
    name, action, namespace, track, expected = row
    issuers = profile_ring()
    judge = TokenVerifier(issuers, [PROFILE["audience"]])
    grant = judge.verify(bytes.fromhex(PROFILE["tokens"][name]["token"]), 1_799_996_500)
    asked = Asked(
        Action(action),
        tuple(map(bytes.fromhex, namespace)),
        None if track is None else bytes.fromhex(track),
    )
    assert grant.allows(asked, 1_799_996_500, issuers) is expected


def test_the_es256_vector_of_the_profile_verifies() -> None:
    value = bytes.fromhex(PROFILE["tokens"]["consumer_es256"]["token"])
    judge = TokenVerifier(profile_ring(), [PROFILE["audience"]])
    assert judge.verify(value, 1_799_996_500).issuer == PROFILE["issuer"]


def test_an_hmac_token_is_refused() -> None:
    value = bytes.fromhex(PROFILE["tokens"]["consumer_hs256"]["token"])
    refused(value, "structure", TokenVerifier(profile_ring(), [PROFILE["audience"]]))


def test_we_make_the_vectors_of_the_profile() -> None:
    seed = bytes.fromhex(PROFILE["ed25519_seed"])
    [public] = profile_ring().having(b"k1")
    key = SigningKey(seed, public)
    for name, actions in (("producer_eddsa", PRODUCER), ("consumer_eddsa", CONSUMER)):
        made = issue(
            key,
            audience=[PROFILE["audience"]],
            rules=[scope_rule(bytes.fromhex("6d1c6481cd428737da312c089db3832a"), actions)],
            issued_at=1_799_996_400,
            lifetime=3600,
            token_id=bytes.fromhex("a0a1a2a3a4a5a6a7"),
        )
        assert made.hex() == PROFILE["tokens"][name]["token"]


def cat_claims(name: str) -> dict[Any, Any]:
    """Claims of a vector whose MAC is checked here, for the relay takes none."""
    protected, _, payload, tag = cbor2.loads(bytes.fromhex(CAT["tokens"][name])).value
    macced = cbor2.dumps(["MAC0", protected, b"", payload])
    assert hmac.digest(bytes.fromhex(CAT["hmac_key"]), macced, "sha256") == tag
    claims: dict[Any, Any] = cbor2.loads(payload)
    return claims


@pytest.mark.parametrize("row", CAT["authorize"], ids=lambda row: f"{row[0]}-{row[1]}-{row[3]}")
def test_decisions_of_the_format_s_own_vectors(row: Any) -> None:
    name, action, namespace, track, expected = row
    rules = read_rules(cat_claims(name)[327])
    asked = Asked(Action(action), tuple(field.encode() for field in namespace), track.encode())
    assert any(rule.allows(asked) for rule in rules) is expected


# --- rights ---


@pytest.mark.parametrize(
    ("namespace", "allowed"),
    [
        ((ROOT, SCOPE), True),
        ((ROOT, SCOPE, b"compat"), True),
        ((ROOT,), False),
        ((), False),
        ((ROOT, OTHER), False),
        ((ROOT, SCOPE[:15]), False),
        ((ROOT, SCOPE + b"x"), False),
        ((b"kvcs-2", SCOPE), False),
        ((SCOPE, ROOT), False),
    ],
)
def test_a_scope_is_two_whole_fields(namespace: tuple[bytes, ...], allowed: bool) -> None:
    grant = verifier().verify(token(), NOW)
    asked = Asked(Action.SUBSCRIBE_NAMESPACE, namespace)
    assert grant.allows(asked, NOW, ring()) is allowed


@pytest.mark.parametrize(("role", "yes"), [(PRODUCER, PRODUCER), (CONSUMER, CONSUMER)])
def test_roles(role: frozenset[Action], yes: frozenset[Action]) -> None:
    grant = verifier().verify(token(rules=[scope_rule(SCOPE, role)]), NOW)
    for action in Action:
        if action not in (Action.SETUP, Action.CLIENT_SETUP):
            asked = Asked(action, (ROOT, SCOPE), b"k.raw.s0")
            assert grant.allows(asked, NOW, ring()) is (action in yes)


def test_an_issuer_speaks_for_its_scope_alone() -> None:
    """A token of the issuer of one scope that grants another, or all of them, grants nothing."""
    foreign = token(rules=[scope_rule(OTHER, CONSUMER)])
    everything = signed(CLAIMS | {327: [[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]]})
    for value in (foreign, everything):
        grant = verifier().verify(value, NOW)
        assert not grant.allows(Asked(Action.SUBSCRIBE, (ROOT, OTHER)), NOW, ring())
        assert not grant.allows(Asked(Action.SUBSCRIBE_NAMESPACE, (ROOT,)), NOW, ring())
        assert not grant.allows(Asked(Action.SUBSCRIBE, (b"other",)), NOW, ring())


def test_an_issuer_of_several_scopes() -> None:
    key = SigningKey.generate(use=KeyUse.TOKEN, name="issuer", kid=b"k", scope_id=SCOPE)
    private = cbor2.loads(b"\x81" + key.to_cose())[0][-4]
    twin = SigningKey(
        private,
        PublicKey(
            kid=b"k",
            algorithm=key.public.algorithm,
            octets=key.public.octets,
            use=KeyUse.TOKEN,
            name="issuer",
            scope_id=OTHER,
        ),
    )
    issuers = ring(key, twin)
    rules = [scope_rule(SCOPE, CONSUMER), scope_rule(OTHER, CONSUMER)]
    grant = verifier(issuers).verify(token(key, rules=rules), NOW)
    for scope in (SCOPE, OTHER):
        assert grant.allows(Asked(Action.SUBSCRIBE, (ROOT, scope)), NOW, issuers)
    issuers.remove(b"k", OTHER)
    assert grant.allows(Asked(Action.SUBSCRIBE, (ROOT, SCOPE)), NOW, issuers)
    assert not grant.allows(Asked(Action.SUBSCRIBE, (ROOT, OTHER)), NOW, issuers)


@pytest.mark.parametrize(
    "claim",
    [
        5,
        None,
        "all",
        {1: []},
        [5],
        [[]],
        [[[]]],
        [[["a"]]],
        [[[True]]],
        [[[4], 5]],
        [[[4], []]],
        [[[4], [None, b"x"]]],
        [[[4], [[3, b"x"]]]],
        [[[4], [[1, "x"]]]],
        [[[4], [[1, b"x", 2]]]],
        [[[4], [b"x"], None]],
        [[[4], [b"x"], b"t", 1]],
        [[[4]]] * 257,
    ],
)
def test_a_malformed_claim_is_refused(claim: Any) -> None:
    with pytest.raises(TrustError) as caught:
        read_rules(claim)
    assert caught.value.check == "claims"


def test_rules_there_and_back() -> None:
    claim = [[[0, 1]], [[4, 99], [b"a", [1, b"b"], None], [2, b"c"]], [[4], [None]]]
    assert [rule.to_claim() for rule in read_rules(claim)] == claim
    [_, one, none] = read_rules(claim)
    assert one.allows(Asked(Action.SUBSCRIBE, (b"a", b"bx"), b"xc"))
    assert not one.allows(Asked(Action.SUBSCRIBE, (b"a", b"bx", b"y"), b"xc"))
    assert not one.allows(Asked(Action.SUBSCRIBE, (b"a", b"bx")))
    assert none.allows(Asked(Action.SUBSCRIBE, ()))
    assert not none.allows(Asked(Action.SUBSCRIBE, (b"a",)))


def test_the_map_form_means_the_same() -> None:
    for form in (False, True):
        grant = verifier().verify(token(map_form=form), NOW)
        assert grant.allows(Asked(Action.FETCH, (ROOT, SCOPE), b"t"), NOW, ring())


# --- what is refused ---


REFUSED = {
    "no tag": (token()[1:], "structure"),
    "Mac0": (b"\xd1" + token()[1:], "structure"),
    "octets behind": (token() + b"\x00", "structure"),
    "too long": (token() + bytes(1024), "size"),
    "empty": (b"", "structure"),
    "text": (b"token", "structure"),
    "no typ": (signed(CLAIMS, header={}), "header"),
    "other typ": (signed(CLAIMS, header={16: "JWT"}), "header"),
    "more in the header": (signed(CLAIMS, header={16: "CAT", "x": 1}), "header"),
    "a label in the header": (signed(CLAIMS, header={16: "CAT", 5: b"iv"}), "header"),
    "a manifest's key": (token(SigningKey.generate(use=KeyUse.TOKEN, name="issuer")), "kid"),
    "forged": (
        token(SigningKey.generate(use=KeyUse.TOKEN, name="issuer", kid=ISSUER.kid, scope_id=SCOPE)),
        "signature",
    ),
    "other algorithm": (
        token(
            SigningKey.generate(
                Algorithm.ES256, use=KeyUse.TOKEN, name="issuer", kid=ISSUER.kid, scope_id=SCOPE
            )
        ),
        "algorithm",
    ),
    "other issuer": (signed(CLAIMS | {1: "somebody"}), "issuer"),
    "other relay": (signed(CLAIMS | {3: ["elsewhere.example"]}), "audience"),
    "too long a life": (signed(CLAIMS | {4: NOW + 7200}), "lifetime"),
    "expired": (signed(CLAIMS | {4: NOW}), "expired"),
    "not yet by nbf": (signed(CLAIMS | {5: NOW + 5}), "not_yet"),
    "not yet by iat": (signed(CLAIMS | {6: NOW + 5}), "not_yet"),
    "claims no map": (signed([1]), "claims"),
    "claims not in order": (signed(cbor2.dumps(dict(reversed(CLAIMS.items())))), "structure"),
    "claim twice": (signed(b"\xa2\x01\x61a\x01\x61a"), "structure"),
    "no issuer": (signed({k: v for k, v in CLAIMS.items() if k != 1}), "claims"),
    "no audience": (signed({k: v for k, v in CLAIMS.items() if k != 3}), "claims"),
    "no expiry": (signed({k: v for k, v in CLAIMS.items() if k != 4}), "claims"),
    "no time of issue": (signed({k: v for k, v in CLAIMS.items() if k != 6}), "claims"),
    "expiry a float": (signed(CLAIMS | {4: NOW + 0.5}), "claims"),
    "expiry a boolean": (signed(CLAIMS | {4: True}), "claims"),
    "expiry huge": (signed(CLAIMS | {4: 2**63}), "claims"),
    "cti of text": (signed(CLAIMS | {7: "id"}), "claims"),
    "bound to a key": (signed(CLAIMS | {8: {3: b"x"}}), "restriction"),
    "network restricted": (signed(CLAIMS | {311: [1]}), "restriction"),
    "replay restricted": (signed(CLAIMS | {308: 1}), "restriction"),
    "composite": (signed(CLAIMS | {326: [{}]}), "restriction"),
    "revalidation": (signed(CLAIMS | {328: 60}), "restriction"),
    "other CAT version": (signed(CLAIMS | {310: 2}), "restriction"),
    "rights malformed": (signed(CLAIMS | {327: [5]}), "claims"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_wrong_token_is_refused(name: str) -> None:
    refused(*REFUSED[name])


@pytest.mark.parametrize(
    "extra", [{2: "subject"}, {310: 1}, {328: 0}, {-70_000: "private"}, {5: NOW - 5}]
)
def test_claims_that_restrict_nothing_pass(extra: dict[Any, Any]) -> None:
    assert verifier().verify(signed(CLAIMS | extra), NOW)


def test_the_cwt_tag_may_stand_around() -> None:
    assert verifier().verify(b"\xd8\x3d" + token(), NOW)


def test_an_audience_may_be_one_text() -> None:
    assert verifier().verify(signed(CLAIMS | {3: RELAY}), NOW)


def test_a_token_without_rights_allows_nothing() -> None:
    grant = verifier().verify(signed({k: v for k, v in CLAIMS.items() if k != 327}), NOW)
    assert not grant.allows(Asked(Action.SUBSCRIBE, (ROOT, SCOPE)), NOW, ring())


def test_every_changed_octet_is_refused() -> None:
    good = token()
    for index in range(len(good)):
        broken = bytearray(good)
        broken[index] ^= 1
        with pytest.raises(TrustError):
            verifier().verify(bytes(broken), NOW)


def test_clocks_may_differ_by_the_skew() -> None:
    judge = verifier(skew=30)
    assert judge.verify(token(), NOW - 30)
    assert judge.verify(token(), NOW + 629)
    refused(token(), "not_yet", judge, NOW - 31)
    refused(token(), "expired", judge, NOW + 630)


# --- rotation ---


def test_a_remembered_token_expires_and_is_revoked() -> None:
    issuers = ring()
    judge = verifier(issuers)
    value = token()
    grant = judge.verify(value, NOW)
    assert judge.verify(value, NOW + 1) is grant
    refused(value, "expired", judge, NOW + 600)
    issuers.remove(ISSUER.kid)
    refused(value, "kid", judge, NOW + 1)
    assert not grant.allows(Asked(Action.SUBSCRIBE, (ROOT, SCOPE)), NOW, issuers)


def test_issuer_keys_are_rotated_while_it_runs() -> None:
    issuers = ring()
    judge = verifier(issuers)
    fresh = SigningKey.generate(use=KeyUse.TOKEN, name="issuer", scope_id=SCOPE)
    refused(token(fresh), "kid", judge)
    issuers.add(fresh.public)
    assert judge.verify(token(fresh), NOW) and judge.verify(token(), NOW)
    issuers.replace([fresh.public])
    refused(token(), "kid", judge)
    assert judge.verify(token(fresh), NOW)


def test_a_key_s_own_times_hold_for_its_tokens() -> None:
    key = SigningKey.generate(
        use=KeyUse.TOKEN, name="issuer", scope_id=SCOPE, not_before=NOW, expires=NOW + 60
    )
    issuers = ring(key)
    judge = verifier(issuers)
    grant = judge.verify(token(key), NOW)
    asked = Asked(Action.SUBSCRIBE, (ROOT, SCOPE))
    assert grant.until(asked, NOW, issuers) == NOW + 60
    refused(token(key), "expired", judge, NOW + 60)
    assert not grant.allows(asked, NOW + 60, issuers)


def test_what_is_remembered_is_bounded() -> None:
    judge = verifier()
    values = [token(token_id=number.to_bytes(8, "big")) for number in range(3)]
    for value in values:
        judge.verify(value, NOW)
    assert len(judge._verified) == 3 <= MAX_VERIFIED


# --- making ---


@pytest.mark.parametrize(
    "options",
    [
        {"audience": []},
        {"audience": [""]},
        {"token_id": bytes(7)},
        {"token_id": bytes(17)},
        {"lifetime": 0},
        {"issued_at": -1},
        {"rules": [scope_rule(bytes([n] * 16), CONSUMER) for n in range(40)]},
    ],
)
def test_a_token_out_of_bounds_is_not_made(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        token(**options)


def test_a_manifest_key_makes_no_token() -> None:
    with pytest.raises(UsageError, match="issuer keys"):
        token(SigningKey.generate())


def test_claims_are_read_to_be_shown() -> None:
    claims = read_claims(token())
    assert (claims.issuer, claims.expires, claims.audience) == ("issuer", NOW + 600, (RELAY,))
    assert claims.rules[0] == SETUP_RULE


def test_a_verifier_out_of_bounds_is_not_made() -> None:
    for make in (
        lambda: TokenVerifier(KeyRing(), [RELAY]),
        lambda: TokenVerifier(ring(), []),
        lambda: TokenVerifier(ring(), [""]),
        lambda: verifier(skew=-1),
        lambda: verifier(max_lifetime=0),
    ):
        with pytest.raises(UsageError):
            make()

"""Who may do what: sessions, requests, and that no answer tells an outsider anything."""

from __future__ import annotations

import hashlib

import pytest

from kvcs.errors import TrustError
from kvcs.trust import (
    TOKEN_TYPE,
    Action,
    Asked,
    Authority,
    KeyRing,
    read_claims,
)
from tests.unit.trust.makers import NOW, OTHER, ROOT, SCOPE, token, verifier


def authority(issuers: KeyRing | None = None) -> Authority:
    return Authority(verifier(issuers))


def test_a_session_is_opened_by_its_token() -> None:
    boss = authority()
    assert boss.admit([], NOW) == ()
    assert boss.admit([(0x9D + 0x7F, b"grease")], NOW) == ()
    assert len(boss.admit([(TOKEN_TYPE, token())], NOW)) == 1
    for shown, check in (
        ([(TOKEN_TYPE, token(with_setup=False))], "denied"),
        ([(0, b"password")], "denied"),
        ([(TOKEN_TYPE, b"junk")], "structure"),
    ):
        with pytest.raises(TrustError) as caught:
            boss.admit(shown, NOW)
        assert caught.value.check == check


def test_decisions_name_their_end() -> None:
    boss = authority()
    short = boss.verify([(TOKEN_TYPE, token())], NOW)
    long = boss.verify([(TOKEN_TYPE, token(lifetime=900))], NOW)
    asked = Asked(Action.FETCH, (ROOT, SCOPE), b"t")
    assert boss.decide(asked, short, NOW).until == NOW + 600
    assert boss.decide(asked, short + long, NOW).until == NOW + 900
    for grants, now, check in (((), NOW, "denied"), (short, NOW + 600, "expired")):
        with pytest.raises(TrustError) as caught:
            boss.decide(asked, grants, now)
        assert caught.value.check == check
    with pytest.raises(TrustError) as caught:
        boss.decide(Asked(Action.PUBLISH, (ROOT, SCOPE), b"t"), short, NOW)
    assert caught.value.check == "denied"


def test_what_is_denied_looks_the_same_whatever_there_is() -> None:
    boss = authority()
    grants = boss.verify([(TOKEN_TYPE, token())], NOW)
    texts = set()
    for namespace in ((ROOT, OTHER), (ROOT,), (b"other",), (ROOT, OTHER, bytes(32))):
        with pytest.raises(TrustError) as caught:
            boss.decide(Asked(Action.SUBSCRIBE, namespace, b"t"), grants, NOW)
        texts.add((str(caught.value), caught.value.check))
    assert len(texts) == 1


def test_no_token_is_shown() -> None:
    value = token()
    grant = verifier().verify(value, NOW)
    shown = (
        repr(grant)
        + repr(read_claims(value))
        + repr(authority().decide(Asked(Action.FETCH, (ROOT, SCOPE), b"t"), (grant,), NOW))
    )
    signature = value[-64:]
    assert signature.hex() not in shown and repr(signature)[2:-1] not in shown
    assert hashlib.sha256(value).hexdigest() not in shown

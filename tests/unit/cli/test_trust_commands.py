"""`kvcs keygen` beside scope keys, `kvcs keys`, `kvcs token`: files, facts, and no secrets."""

from __future__ import annotations

import base64
import shutil
import stat
from pathlib import Path
from typing import Any

import cbor2
import pytest

from kvcs.keyfiles import load_key_ring, load_protection_ring, load_signing_key
from kvcs.trust import KeyUse, read_claims
from tests.command import Run

SCOPE_ID = "ab" * 16


def private(path: Path) -> str:
    """The secret of a key file, in hex."""
    [members] = cbor2.loads(path.read_bytes())
    secret: bytes = members[-4]
    return secret.hex()


def make(run: Run, folder: Path, *options: object, name: str = "own.key") -> Any:
    """Make a key and give what is told of it."""
    ran = run("keygen", "--out", folder / name, "--scope-id", SCOPE_ID, "--json", *options)
    assert (ran.code, ran.err) == (0, "")
    assert private(folder / name) not in ran.out
    return ran.json()


@pytest.mark.parametrize("algorithm", ["eddsa", "es256"])
def test_a_producer_s_key(run: Run, tmp_path: Path, algorithm: str) -> None:
    ring = tmp_path / "ring"
    told = make(
        run,
        tmp_path,
        *("--signing", "--public", ring, "--algorithm", algorithm, "--name", "site"),
        *("--days", 30),
    )
    key = load_signing_key(tmp_path / "own.key")
    assert list(load_key_ring(ring)) == [key.public]
    assert told["kid"] == key.kid.hex()
    assert (told["use"], told["name"], told["scope_id"]) == ("manifest", "site", SCOPE_ID)
    assert key.public.expires is not None and key.public.not_before is not None
    assert key.public.expires - key.public.not_before == 30 * 86_400
    for path in (ring, tmp_path / "own.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_rings_grow_and_shrink(run: Run, tmp_path: Path) -> None:
    ring = tmp_path / "ring"
    first = make(run, tmp_path, "--issuer", "one", "--public", ring, name="a")
    second = make(run, tmp_path, "--issuer", "two", name="b")
    rows = run("keys", ring, "--add", tmp_path / "b", "--json").json()
    assert {row["kid"] for row in rows} == {first["kid"], second["kid"]}
    assert {row["counts"] for row in rows} == {"yes"}
    rows = run("keys", ring, "--remove", first["kid"], "--json").json()
    assert [row["name"] for row in rows] == ["two"]
    ran = run("keys", ring, "--remove", second["kid"])
    assert ran.code == 2 and "trusts nobody" in ran.line()
    assert len(load_key_ring(ring, KeyUse.TOKEN)) == 1
    shown = run("keys", tmp_path / "b")
    assert shown.code == 0 and private(tmp_path / "b") not in shown.out


def test_a_token_is_made_and_shown(run: Run, tmp_path: Path) -> None:
    ring, out = tmp_path / "ring", tmp_path / "token"
    make(run, tmp_path, "--issuer", "one", "--public", ring)
    own = ("--issuer-key-file", tmp_path / "own.key", "--audience", "relay")
    made = run("token", "make", *own, "--role", "both", "--out", out, "--json")
    assert (made.code, made.err) == (0, "")
    text = out.read_text().strip()
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    claims = read_claims(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    assert (claims.issuer, claims.audience) == ("one", ("relay",))
    assert claims.expires - claims.issued_at == 3600
    shown = run("token", "show", out, "--issuers", ring, "--json")
    assert text not in made.out + shown.out
    document = shown.json()
    assert (document["verified"], document["expired"]) == (True, False)
    assert document["allows"][1]["namespace"] == ["kvcs-1", SCOPE_ID]
    assert {"PUBLISH_NAMESPACE", "FETCH"} <= set(document["allows"][1]["actions"])
    before = out.read_bytes()
    assert run("token", "make", *own, "--lifetime", 60, "--out", out, "--map-form").code == 0
    assert out.read_bytes() != before, "a token file is replaced"
    text_form = run("token", "show", out)
    assert "below kvcs-1/" + SCOPE_ID in text_form.out


def test_a_token_of_somebody_else_is_told(run: Run, tmp_path: Path) -> None:
    make(run, tmp_path, "--issuer", "one", name="a")
    make(run, tmp_path, "--issuer", "two", "--public", tmp_path / "ring", name="b")
    out = tmp_path / "token"
    own = ("--issuer-key-file", tmp_path / "a", "--audience", "relay")
    assert run("token", "make", *own, "--out", out).code == 0
    document = run("token", "show", out, "--issuers", tmp_path / "ring", "--json").json()
    assert (document["verified"], document["refused"]) == (False, "kid")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--scope", "--signing"), "one key at a time"),
        (("--signing", "--issuer", "x"), "one key at a time"),
        (("--public", "ring"), "no other option"),
        (("--every-scope",), "no other option"),
        (("--signing",), "say whom"),
        (("--signing", "--every-scope", "--scope-id", SCOPE_ID), "say whom"),
        (("--signing", "--scope-id", "short"), "no Scope ID"),
        (("--signing", "--scope-id", f"{SCOPE_ID},{'cd' * 16}"), "one scope"),
        (("--issuer", "x", "--name", "y", "--every-scope"), "--name is for"),
        (("--signing", "--every-scope", "--algorithm", "rsa"), "eddsa or es256"),
    ],
)
def test_mistakes_at_keygen(run: Run, tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    ran = run("keygen", "--out", tmp_path / "key", *options)
    assert ran.code == 2 and said in ran.line()
    assert not (tmp_path / "key").exists()


def test_mistakes_at_token(run: Run, tmp_path: Path) -> None:
    make(run, tmp_path, "--issuer", "one", name="issuer")
    make(run, tmp_path, "--signing", name="producer")
    wide = run("keygen", "--issuer", "w", "--every-scope", "--out", tmp_path / "wide")
    assert wide.code == 0
    out = tmp_path / "token"

    def failed(key: str, *options: object) -> str:
        ran = run(
            *("token", "make", "--issuer-key-file", tmp_path / key, "--audience", "r"),
            *("--out", out, *options),
        )
        assert ran.code == 2 and not out.exists()
        return ran.line()

    assert "signs manifests" in failed("producer")
    assert "name one" in failed("wide")
    assert "another scope" in failed("issuer", "--scope-id", "cd" * 16)
    assert "producer, consumer or both" in failed("issuer", "--role", "boss")
    assert "No such file" in failed("absent")
    (tmp_path / "junk").write_bytes(b"junk")
    assert "key set" in failed("junk")
    (tmp_path / "text").write_text("AAAA")
    shown = run("token", "show", tmp_path / "text")
    assert shown.code == 2 and "not a tagged" in shown.err


def test_a_ring_is_for_one_use(run: Run, tmp_path: Path) -> None:
    ring = tmp_path / "ring"
    make(run, tmp_path, "--issuer", "one", "--public", ring, name="a")
    ran = run("keygen", "--signing", "--every-scope", "--out", tmp_path / "b", "--public", ring)
    assert ran.code == 2 and "signs tokens" in ran.line()
    assert not (tmp_path / "b").exists()


def test_others_who_can_read_a_key_are_told_of(run: Run, tmp_path: Path) -> None:
    make(run, tmp_path, "--issuer", "one")
    (tmp_path / "own.key").chmod(0o644)
    ran = run(
        *("token", "make", "--issuer-key-file", tmp_path / "own.key"),
        *("--audience", "r", "--out", tmp_path / "token"),
    )
    assert ran.code == 0 and "can be read by others" in ran.line()


# --- protection keys ---


def test_protection_keys_are_made_rotated_and_shown(run: Run, tmp_path: Path) -> None:
    scope, ring = tmp_path / "scope.key", tmp_path / "protect.keys"
    assert run("keygen", "--out", scope).code == 0
    made = run("keygen", "--protection", "--scope-key-file", scope, "--out", ring, "--json")
    assert made.code == 0, made.err
    first = made.json()["key_id"]
    assert first == 2**32 + 1
    assert stat.S_IMODE(ring.stat().st_mode) == 0o600
    again = run("keygen", "--protection", "--scope-key-file", scope, "--out", ring)
    assert (again.code, again.line()) == (
        2,
        f"kvcs: {ring} is there already; it is not overwritten",
    )
    newer = run("keygen", "--protection", "--rotate", "--out", ring, "--json").json()
    assert (newer["key_id"], newer["keys"]) == (first + 1, 2)
    shown = run("keys", ring, "--json")
    assert [(row["key_id"], row["seals"]) for row in shown.json()] == [
        (first, "no, a newer one does"),
        (first + 1, "yes"),
    ]
    [secret, _] = [key.base_key for key in load_protection_ring(ring)]
    assert secret.hex() not in shown.out
    retired = run("keys", ring, "--receive-only", str(first), "--json").json()
    assert [row["seals"] for row in retired] == ["no, it opens only", "yes"]
    given = tmp_path / "given.keys"
    shutil.copy(ring, given)
    assert len(run("keys", ring, "--remove", str(first), "--json").json()) == 1
    assert len(run("keys", ring, "--add", given, "--json").json()) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--protection",), "say whose caches the keys protect"),
        (("--protection", "--signing"), "one key at a time"),
        (("--rotate",), "--rotate is for --protection"),
        (("--protection", "--every-scope"), "protection keys take"),
        (("--protection", "--rotate"), "No such file"),
        (("--protection", "--scope-id", "00"), "no Scope ID"),
    ],
)
def test_protection_keys_that_are_not_made(
    run: Run, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    ran = run("keygen", *words, "--out", tmp_path / "protect.keys")
    assert ran.code == 2
    assert says in ran.line()
    assert not (tmp_path / "protect.keys").exists()


def test_protection_keys_are_of_one_scope_and_no_other_ring(run: Run, tmp_path: Path) -> None:
    ring, other = tmp_path / "protect.keys", tmp_path / "other.keys"
    for path, scope_id in ((ring, "00" * 16), (other, "11" * 16)):
        made = run("keygen", "--protection", "--scope-id", scope_id, "--out", path)
        assert made.code == 0, made.err
    for words in (
        ("keys", ring, "--add", other),
        ("keys", ring, "--remove", "7"),
        ("keys", ring, "--remove", "none"),
        ("keys", ring, "--receive-only", "7"),
        ("keygen", "--protection", "--rotate", "--scope-id", "11" * 16, "--out", ring),
    ):
        assert run(*words).code == 2
    assert len(load_protection_ring(ring)) == 1
    signer, producers = tmp_path / "signer.key", tmp_path / "producers.ring"
    run("keygen", "--signing", "--every-scope", "--out", signer, "--public", producers)
    assert run("keys", producers, "--receive-only", "7").code == 2

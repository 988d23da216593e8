"""`kvcs doctor`: each weak setting is found, and nothing else is."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvcs
from kvcs.cli import checks
from kvcs.cli.checks import Chosen, Finding, findings
from tests.command import Run

DESCRIPTOR: dict[str, Any] = {
    "model": "tiny",
    "layers": 1,
    "kv_heads": 1,
    "head_dim": 2,
    "dtype": "float16",
    "block_tokens": 4,
}


@pytest.fixture(autouse=True)
def strong_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without weaknesses."""
    monkeypatch.setattr(checks, "_kernel_limit", lambda name: 1 << 30)
    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    monkeypatch.delenv("KVCS_EVENT_LOOP", raising=False)


@pytest.fixture
def made(run: Run, tmp_path: Path) -> Path:
    """A folder of files as kvcs makes them."""
    scope = ("--scope-key-file", tmp_path / "scope.key")
    signer = ("--out", tmp_path / "sign.key", "--public", tmp_path / "producers.ring")
    issued = ("--out", tmp_path / "issuer.key", "--public", tmp_path / "issuers.ring")
    issuer = ("--issuer-key-file", tmp_path / "issuer.key", "--role", "consumer")
    token = ("--audience", "relay", "--lifetime", "3600", "--out", tmp_path / "token")
    for words in (
        ("keygen", "--out", tmp_path / "scope.key"),
        ("keygen", "--protection", *scope, "--out", tmp_path / "protect.keys"),
        ("keygen", "--signing", *scope, *signer),
        ("keygen", "--issuer", "us", *scope, *issued),
        ("token", "make", *issuer, *scope, *token),
    ):
        ran = run(*words)
        assert ran.code == 0, ran.err
    return tmp_path


def producer(folder: Path) -> list[object]:
    return [
        "publish",
        *("--scope-key-file", folder / "scope.key"),
        *("--protect-key-file", folder / "protect.keys"),
        *("--sign-key-file", folder / "sign.key"),
        *("--token-file", folder / "token"),
        "--untrusted-relays",
    ]


def consumer(folder: Path) -> list[object]:
    return [
        "fetch",
        *("--scope-key-file", folder / "scope.key"),
        *("--protect-key-file", folder / "protect.keys"),
        *("--keys-file", folder / "producers.ring"),
        *("--token-file", folder / "token"),
        "--untrusted-relays",
        "--require-signed",
    ]


@pytest.mark.parametrize("strong", [producer, consumer])
def test_what_kvcs_makes_is_not_weak(
    run: Run, made: Path, strong: Callable[[Path], list[object]]
) -> None:
    ran = run("doctor", *strong(made), "--json")
    assert (ran.code, ran.json()) == (0, []), ran.err
    said = run("doctor", *strong(made))
    assert (said.code, said.err) == (0, "")
    assert "none" in said.out


@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX")
@pytest.mark.parametrize("name", ["scope.key", "protect.keys", "sign.key", "token"])
def test_a_secret_that_others_can_read(run: Run, made: Path, name: str) -> None:
    (made / name).chmod(0o640)
    ran = run("doctor", *producer(made), "--json")
    [found] = ran.json()
    assert (ran.code, found["check"], found["subject"]) == (2, "secret_readable", str(made / name))
    assert "chmod 600" in found["advice"] and "0640" in found["problem"]


def test_certificates_that_expire_or_are_for_something_else(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    assert run("certs", "--out", folder).code == 0
    assert run("certs", "--out", folder, "--client", "site-one").code == 0
    client = ("--client-cert", folder / "site-one-cert.pem")
    key = ("--client-key", folder / "site-one-key.pem")
    servers = ("--cert", folder / "cert.pem", "--client-ca", folder / "ca.pem")
    good = run("doctor", "relay", *client, *key, *servers, "--json")
    assert (good.code, good.json()) == (0, []), good.err

    [found] = run("doctor", "fetch", "--client-cert", folder / "cert.pem", "--json").json()
    assert found["check"] == "certificate_purpose"
    (folder / "site-one-key.pem").chmod(0o644)
    [found] = run("doctor", "fetch", *key, "--json").json()
    assert found["check"] == "secret_readable"
    short = ("--out", folder, "--client", "site-two", "--days", "1")
    assert run("certs", *short).code == 0
    [found] = run("doctor", "fetch", "--client-cert", folder / "site-two-cert.pem", "--json").json()
    assert found["check"] == "certificate_expires" and "1.0 days" in found["problem"]
    later = time.time() + 2 * 86_400
    [gone] = findings(Chosen(client_cert=folder / "site-two-cert.pem"), later)
    assert (gone.check, gone.problem) == ("certificate_expires", "it has expired")
    (folder / "broken.pem").write_text("nothing")
    for name in ("broken.pem", "none.pem"):
        [found] = run("doctor", "relay", "--cert", folder / name, "--json").json()
        assert found["check"] == "unreadable"
    [found] = run("doctor", "relay", "--allow-anyone", *servers, "--json").json()
    assert found["check"] == "open_relay" and "has a certificate" in found["problem"]


@pytest.mark.parametrize(
    ("words", "check"),
    [
        (("fetch", "--insecure-accept-any-certificate"), ["verify_off"]),
        (("relay", "--allow-anyone", "--upstream", "moqt://a.example"), ["open_relay"]),
        (("publish", "a.safetensors", "--serve", "127.0.0.1:0"), ["open_publisher"]),
        (("subscribe", "--untrusted-relays"), ["not_protected", "not_signed"]),
        (("fetch", "--token-file", "absent"), ["unreadable", "unreadable"]),
        (("fetch", "--keys-file", "absent"), ["unreadable"]),
        (("fetch", "--like=absent", "--relay", "moqt://a.example"), ["unreadable"]),
        (("ls", "--descriptor", "absent"), ["unreadable"]),
        (("token", "make", "--scope-key-file", "absent"), ["unreadable"]),
    ],
)
def test_weak_options(run: Run, words: tuple[str, ...], check: list[str]) -> None:
    ran = run("doctor", *words, "--json")
    assert ran.code == 2
    assert [found["check"] for found in ran.json()][: len(check)] == check
    assert all(found["advice"] and found["problem"] for found in ran.json())


@pytest.mark.parametrize("guard", ["--issuers", "--client-ca"])
def test_a_publisher_that_asks_who_comes_is_not_weak(
    run: Run, made: Path, tmp_path: Path, guard: str
) -> None:
    assert run("certs", "--out", tmp_path).code == 0
    file = tmp_path / {"--issuers": "issuers.ring", "--client-ca": "ca.pem"}[guard]
    ran = run("doctor", "publish", "--serve", "127.0.0.1:0", guard, file, "--json")
    assert (ran.code, ran.json()) == (0, [])


@pytest.mark.parametrize(
    ("words", "file", "problem"),
    [
        (("relay", "--issuers"), "none", "No such file"),
        (("relay", "--issuers"), "scope.key", "key"),
        (("relay", "--issuers"), "producers.ring", "signs manifests, not tokens"),
        (("relay", "--client-ca"), "none", "No such file"),
        (("fetch", "--ca"), "none", "No such file"),
        (("fetch", "--ca"), "scope.key", "no readable certificate"),
        (("serve-http", "DIR", "--issuers"), "none", "No such file"),
    ],
)
def test_whom_it_trusts_cannot_be_read(
    run: Run, made: Path, words: tuple[str, ...], file: str, problem: str
) -> None:
    ran = run("doctor", *words, made / file, "--json")
    [found] = ran.json()
    assert (ran.code, found["check"], found["subject"]) == (2, "unreadable", str(made / file))
    assert problem in found["problem"]


def test_authorities_and_issuers_that_end_soon(run: Run, made: Path, tmp_path: Path) -> None:
    assert run("certs", "--out", tmp_path).code == 0
    short = ("--issuer", "us", "--every-scope", "--days", "3")
    ran = run("keygen", *short, "--out", made / "short.key", "--public", made / "short.ring")
    assert ran.code == 0, ran.err
    [found] = run("doctor", "relay", "--issuers", made / "short.ring", "--json").json()
    assert found["check"] == "issuer_key_expires"
    later = time.time() + 400 * 86_400
    [gone] = findings(Chosen(ca=tmp_path / "ca.pem"), later)
    assert (gone.check, gone.problem) == ("certificate_expires", "it has expired")


def test_weights_that_are_not_pinned(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "descriptor.json"
    for weights, checked in ((None, ["weights_unpinned"]), ("sha256:1", [])):
        pinned = kvcs.UNPINNED if weights is None else weights
        document = kvcs.Descriptor(weights=pinned, **DESCRIPTOR).to_json()
        path.write_text(json.dumps(document))
        ran = run("doctor", "fetch", "--descriptor", path, "--json")
        assert [found["check"] for found in ran.json()] == checked


@pytest.mark.parametrize(("later", "says"), [(3100, "expires in"), (3700, "has expired")])
def test_a_token_that_ends_soon(made: Path, later: int, says: str) -> None:
    chosen = Chosen(token_file=made / "token")
    assert list(findings(chosen, time.time())) == []
    [found] = findings(chosen, time.time() + later)
    assert found.check == "token_expires" and says in found.problem


def test_keys_that_end_or_do_not_fit(run: Run, made: Path) -> None:
    ran = run(
        *("keygen", "--signing", "--every-scope", "--days", "3", "--out", made / "short.key"),
        *("--public", made / "short.ring"),
    )
    assert ran.code == 0
    [found] = findings(Chosen(keys_file=made / "short.ring"), time.time())
    assert found.check == "producer_key_expires"
    ring = kvcs.load_protection_ring(made / "protect.keys")
    ring.set_send(ring.current.key_id, False)
    kvcs.save_protection_ring(made / "protect.keys", ring, replace=True)
    run("keygen", "--out", made / "other.key")
    chosen = Chosen(protect_key_file=made / "protect.keys", scope_key_file=made / "other.key")
    assert [each.check for each in findings(chosen, 0.0)] == [
        "protection_seals_nothing",
        "protection_of_another_scope",
    ]


def test_a_weak_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_kernel_limit", {"rmem_max": 212_992}.get)
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    ran = run("doctor", "--json")
    assert ran.code == 2
    assert [(found["check"], found["subject"], found["level"]) for found in ran.json()] == [
        ("socket_buffers", "net.core.rmem_max", "weak"),
        ("no_uvloop", "event loop", "note"),
    ]
    assert "sysctl -w net.core.rmem_max=4194304" in run("doctor").out


@pytest.mark.parametrize("chosen", [False, True])
def test_what_is_optional_is_a_note(
    run: Run, monkeypatch: pytest.MonkeyPatch, chosen: bool
) -> None:
    if chosen:
        monkeypatch.setenv("KVCS_EVENT_LOOP", "asyncio")
    else:
        monkeypatch.setattr(checks, "find_spec", lambda name: None)
    ran = run("doctor", "--json")
    [found] = ran.json()
    assert (ran.code, found["check"], found["level"]) == (0, "no_uvloop", "note")
    said = run("doctor")
    assert said.code == 0
    assert said.out.splitlines()[1].startswith("note\tno_uvloop\t")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--allow-anyone",), "options go behind a command"),
        (("rely", "--allow-anyone"), "'rely'"),
        (("token", "mint"), "'token'"),
        (("relay", "--no-such"), "--no-such"),
        (("relay", "--sign-key-file", "a"), "--sign-key-file"),
        (("relay", "--cache-mib", "many"), "--cache-mib"),
    ],
)
def test_it_takes_the_options_of_the_command_and_no_others(
    run: Run, words: tuple[str, ...], says: str
) -> None:
    ran = run("doctor", *words)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.line()


def test_options_win_over_the_configuration(run: Run, made: Path, tmp_path: Path) -> None:
    path = tmp_path / "kvcs.toml"
    path.write_text('[publish]\nserve = "127.0.0.1:0"\n[token.make]\nscope-key-file = "absent"\n')
    checked = [found["check"] for found in run("--config", path, "doctor", "--json").json()]
    assert checked == ["open_publisher", "unreadable"]
    ring = ("--issuers", made / "issuers.ring")
    ran = run("--config", path, "doctor", "publish", *ring, "--json")
    assert [found["check"] for found in ran.json()] == ["unreadable"]


def test_the_configuration_is_looked_at(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kvcs.toml"
    path.write_text("[relay]\nallow-anyone = true\n[publish]\nuntrusted-relays = true\n")
    monkeypatch.setenv("KVCS_PUBLISH_SERVE", "127.0.0.1:0")
    monkeypatch.setenv("KVCS_FETCH_INSECURE_ACCEPT_ANY_CERTIFICATE", "1")
    ran = run("--config", path, "doctor", "--json")
    assert ran.code == 2
    assert {found["check"] for found in ran.json()} == {
        "open_relay",
        "open_publisher",
        "not_protected",
        "not_signed",
        "verify_off",
    }


def test_a_finding_is_told_once() -> None:
    chosen = Chosen(allow_anyone=True)
    assert len(set([*findings(chosen, 0.0), *findings(chosen, 0.0)])) == 1
    assert isinstance(next(findings(chosen, 0.0)), Finding)

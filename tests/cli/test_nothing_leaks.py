"""Whole commands with marked secrets: nothing of them in any output, file, metric or argument."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest

import kvcs
from tests.cli.conftest import BLOCK_TOKENS, Place, make_cache
from tests.command import Process, Run

PROBE = 24
"""Octets of each tensor that are looked for."""

SECRETS = {
    "scope.key",
    "protect.keys",
    "site-one.key",
    "issuer.key",
    "producer.token",
    "consumer.token",
    "other.token",
    "cache.safetensors",
    "got.safetensors",
}
"""Files that hold secrets, for that is what they are for."""


def forms(name: str, secret: bytes) -> Iterator[tuple[str, bytes]]:
    """Ways in which a secret could be written down."""
    yield f"{name}, raw", secret
    yield f"{name}, hex", secret.hex().encode()
    yield f"{name}, HEX", secret.hex().upper().encode()
    # Without the ends, which depend on what stands beside it.
    yield f"{name}, base64", base64.b64encode(secret).rstrip(b"=")[:-1]
    yield f"{name}, base64url", base64.urlsafe_b64encode(secret).rstrip(b"=")[:-1]
    yield f"{name}, repr", repr(secret)[2:-1].encode()


def needles(folder: Path) -> dict[str, bytes]:
    """Everything that nobody else may have."""
    found: dict[str, bytes] = {}
    secrets = {"scope key": bytes.fromhex((folder / "scope.key").read_text())}
    [protection] = kvcs.load_protection_ring(folder / "protect.keys")
    secrets["protection key"] = protection.base_key
    for name in ("site-one.key", "issuer.key"):
        [key] = cbor2.loads((folder / name).read_bytes())
        secrets[name] = key[-4]  # d (RFC 9053 §7.2)
    for name in ("producer.token", "consumer.token", "other.token"):
        text = (folder / name).read_text().strip()
        secrets[name] = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    for name, secret in secrets.items():
        assert len(secret) >= 32
        found |= dict(forms(name, secret))
    cache = kvcs.load_kv_file(folder / "cache.safetensors")
    ids = cache.token_ids[:6]
    found["token ids, text"] = ", ".join(map(str, ids)).encode()
    found["token ids, JSON"] = ",".join(map(str, ids)).encode()
    found["token ids, words"] = " ".join(map(str, ids)).encode()
    for kind in ("<i8", "<u4", ">u4"):
        found[f"token ids, {kind}"] = np.asarray(ids).astype(kind).tobytes()
    for index, layer in cache.layers.items():
        for name, tensor in (("k", layer.k), ("v", layer.v)):
            for block in range(len(tensor) // BLOCK_TOKENS):
                octets = np.ascontiguousarray(tensor[block * BLOCK_TOKENS :]).tobytes()[:PROBE]
                found[f"{name} of layer {index} block {block}"] = octets
    return found


@pytest.fixture
def folder(tmp_path: Path, place: Place, run: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything that a site has, and a member of another scope."""
    monkeypatch.chdir(tmp_path)
    make_cache(tmp_path / "cache.safetensors", seed=977)
    audience = ("--audience", "127.0.0.1")
    for words in (
        ("keygen", "--out", "scope.key"),
        ("keygen", "--out", "other.key"),
        ("keygen", "--protection", "--scope-key-file", "scope.key", "--out", "protect.keys"),
        ("keygen", "--protection", "--scope-key-file", "other.key", "--out", "wrong.keys"),
        *(
            ("keygen", *use, "--scope-key-file", scope, "--out", out, "--public", ring)
            for use, scope, out, ring in (
                (("--signing", "--name", "one"), "scope.key", "site-one.key", "producers.ring"),
                (("--issuer", "us"), "scope.key", "issuer.key", "issuers.ring"),
                (("--issuer", "them"), "other.key", "them.key", "issuers.ring"),
            )
        ),
        *(
            ("token", "make", "--issuer-key-file", key, *audience, "--role", role, "--out", out)
            for key, role, out in (
                ("issuer.key", "producer", "producer.token"),
                ("issuer.key", "consumer", "consumer.token"),
                ("them.key", "both", "other.token"),
            )
        ),
    ):
        assert run(*words).code == 0
    return tmp_path


def fetched(url: str) -> bytes:
    """What a relay's admin port says at an address; a refusal, too."""
    with urllib.request.urlopen(url, timeout=30) as response:
        return bytes(response.read())


@pytest.mark.slow
def test_nothing_of_a_secret_is_anywhere(
    folder: Path, place: Place, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = needles(folder)
    logged = folder / "logged"
    logged.mkdir()
    # What other tools use to write down traffic and keys: nothing here looks at it.
    said = {
        "KVCS_DEBUG": "1",
        "SSLKEYLOGFILE": str(logged / "keys"),
        "QLOGDIR": str(logged),
        "QUIC_QLOG_DIR": str(logged),
    }
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    loud = ("--log-level", "debug")
    ca = ("--ca", place.pem.ca)
    member = (*ca, "--scope-key-file", "scope.key", "--protect-key-file", "protect.keys")
    shown: list[bytes] = []

    def told(*words: object, code: int = 0) -> Any:
        ran = run(*words)
        assert ran.code == code, (words, ran.err)
        shown.append(f"{ran.out}\n{ran.err}".encode())
        return ran

    with Process(
        *("relay", "--bind", "127.0.0.1:0", *place.keys, "--issuers", "issuers.ring"),
        *("--cache-dir", "kept", "--cache-mib", "1", "--admin", "0", "--lines", *loud),
    ) as relay:
        listening = relay.event("listening")
        url, admin = listening["url"], listening["admin"]
        there = ("--relay", url, *member)
        with Process(
            *("publish", "cache.safetensors", *there, "--token-file", "producer.token"),
            *("--sign-key-file", "site-one.key", "--untrusted-relays", "--retain", "600"),
            *("--lines", *loud),
        ) as publisher:
            uri = publisher.event("published")["uri"]
            like = ("--like", "cache.safetensors", "--out", "got.safetensors")
            reader = ("--token-file", "consumer.token", "--keys-file", "producers.ring")
            got = told(
                *("subscribe", *there, *like, *reader, "--require-signed", "--untrusted-relays"),
                *("--compare", "cache.safetensors", "--json", *loud),
            )
            assert got.json()["equal"] is True
            told("ls", *there, "--token-file", "consumer.token", *loud)
            about = ("inspect", uri, *member, "--like", "cache.safetensors", *loud)
            told(*about, *reader, "--json")
            # Whatever goes wrong says no more.
            again = ("fetch", *there, *like, *loud)
            told(*again, "--token-file", "other.token", code=2)
            told(*again, code=2)
            (folder / "junk.token").write_text((folder / "scope.key").read_text() + "!")
            told(*again, "--token-file", "junk.token", code=2)
            wrong = ("--scope-key-file", "scope.key", "--protect-key-file", "wrong.keys")
            brief = ("--deadline", "2", *loud)
            told("fetch", "--relay", url, *ca, *wrong, *like, *reader, *brief, code=2)
            told("keys", "scope.key", code=2)
            told("keygen", "--out", "scope.key", code=2)
            prefix = ("--tokens", "scope.key", "--descriptor", place.descriptor)
            told("subscribe", *there, *reader, *prefix, *loud, code=2)
            monkeypatch.setenv("KVCS_TOKEN", (folder / "consumer.token").read_text())
            told("config", "show")
            told("token", "show", "consumer.token", "--issuers", "issuers.ring")
            for name in ("protect.keys", "producers.ring", "issuers.ring"):
                told("keys", name)
            secrets = ("--scope-key-file", "scope.key", "--token-file", "other.token")
            doctor = run("doctor", "fetch", *secrets)
            shown.append(f"{doctor.out}\n{doctor.err}".encode())
            told("inspect", "cache.safetensors", "--scope-key-file", "scope.key", "--json")
            for path in ("/metrics", "/status", "/healthz", "/readyz"):
                shown.append(fetched(f"{admin}{path}"))
            for process in (relay, publisher):
                command = Path(f"/proc/{process.pid}/cmdline")
                if command.exists():
                    shown.append(command.read_bytes())
            ended, _ = publisher.stop()
            shown.append(f"{ended.out}\n{ended.err}".encode())
        ended, _ = relay.stop()
        shown.append(f"{ended.out}\n{ended.err}".encode())
    assert json.loads(ended.out.splitlines()[-1])["unauthorized"] > 0
    assert list(logged.iterdir()) == []
    names = []
    for path in folder.rglob("*"):
        names.append(str(path.relative_to(folder)))
        # The last of them is what a wrong option has been given.
        if path.is_file() and path.name not in SECRETS | {"junk.token"}:
            shown.append(path.read_bytes())
    assert any(name.startswith("kept/") for name in names), "the relay has kept what it carried"
    everything = b"\n".join([*shown, "\n".join(names).encode()])
    assert {name for name, needle in wanted.items() if needle in everything} == set()
    assert b"published" in everything and b"unauthorized" in everything


def test_the_look_finds_what_is_there(folder: Path) -> None:
    """Each needle is in the file that holds the secret, in one form at least."""
    wanted = needles(folder)
    held = b"".join((folder / name).read_bytes() for name in SECRETS - {"got.safetensors"})
    there = {name for name, needle in wanted.items() if needle in held}
    for name in ("scope key, hex", "protection key, raw", "site-one.key, raw", "issuer.key, raw"):
        assert name in there
    assert {"producer.token, base64url", "consumer.token, base64url", "token ids, JSON"} <= there
    assert "k of layer 0 block 0" in there and "v of layer 5 block 3" in there

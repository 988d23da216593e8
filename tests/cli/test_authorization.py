"""docs/authorization.md as a user types it: every command of it, in order."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import kvcs
from tests.cli.conftest import LAYERS, Place
from tests.command import Process, Run
from tests.ports import free_port

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "authorization.md"


def commands() -> Iterator[list[str]]:
    """Words of each command in the guide's shell blocks."""
    for block in re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            yield shlex.split(line)


@pytest.fixture
def folder(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(place.cache, tmp_path / "cache.safetensors")
    return tmp_path


READY = {"relay": "relay listening", "publish": "announced"}
"""What a command that stays says once others can go on."""


def test_the_guide(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    here = f"127.0.0.1:{free_port()}"
    done: list[str] = []
    with ExitStack() as stack:
        staying: dict[str, Process] = {}
        for words in commands():
            assert words[0] == "kvcs"
            words = [word.replace("127.0.0.1:4433", here) for word in words[1:]]
            done.append(words[0])
            if words[-1] == "&":
                process = stack.enter_context(Process(*words[:-1]))
                process.says(READY[words[0]])
                staying[words[0]] = process
                continue
            result = run(*words)
            assert result.code == 0, (words, result.err)
            if words[0] == "subscribe":
                assert "signed by" in result.out
            if words[:2] == ["token", "show"]:
                assert "verified" in result.out
            assert "Traceback" not in result.err
        there = ("--relay", f"moqt://{here}", "--ca", "certs/ca.pem")
        member = (*there, "--scope-key-file", "scope.key", "--like", "cache.safetensors")
        refused = run("fetch", *member, "--out", "x", "--token-file", "producer.token")
        assert refused.code == 2 and "UNAUTHORIZED" in refused.err
        outsider = run("fetch", *member, "--out", "x")
        assert outsider.err == refused.err
        monkeypatch.setenv("KVCS_TOKEN", (folder / "consumer.token").read_text())
        by_variable = run("fetch", *member, "--out", "y", "--keys-file", "producers.ring")
        assert by_variable.code == 0, by_variable.err
        named = ("--scope-key-file", "scope.key", "--token-file", "consumer.token")
        [listed] = run("ls", *there, *named, "--json").json()
        asked = ("inspect", listed["uri"], "--ca", "certs/ca.pem", *named)
        document = run(*asked, "--keys-file", "producers.ring", "--json").json()
        assert (document["signed"], document["signature_verified"]) == (True, True)
        assert (document["producer"], document["refused"]) == ("site-one", None)
        assert (
            f"by key {document['kid']} of site-one, verified"
            in run(*asked, "--keys-file", "producers.ring").out
        )
        assert "NOT verified" in run(*asked).out
        stopped, _ = staying["relay"].stop(signal.SIGTERM)
        assert "Traceback" not in stopped.err
    assert {"keygen", "relay", "token", "publish", "subscribe", "ls", "keys"} <= set(done)
    received = kvcs.load_kv_file(folder / "received.safetensors")
    assert len(received.layers) == LAYERS
    secrets = [path for path in folder.iterdir() if path.suffix in (".key", ".token")]
    assert len(secrets) == 6
    assert all(path.stat().st_mode & 0o077 == 0 for path in [*secrets, *folder.glob("*.ring")])


def test_a_running_relay_forgets_an_issuer_on_sighup(place: Place, folder: Path, run: Run) -> None:
    for name, ring in (("one", "issuers.ring"), ("two", "issuers.ring")):
        made = run(
            *("keygen", "--issuer", name, "--scope-key-file", place.scope_key),
            *("--out", f"{name}.key", "--public", ring, "--json"),
        )
        token = ("token", "make", "--issuer-key-file", f"{name}.key", "--audience", "127.0.0.1")
        assert run(*token, "--role", "both", "--out", f"{name}.token").code == 0
    kid = made.json()["kid"]
    with Process(
        *("relay", "--bind", "127.0.0.1:0", *place.keys, "--issuers", "issuers.ring"),
        *("--lines", "--log-level", "info"),
    ) as relay:
        url = relay.event("listening")["url"]
        asked = ("ls", "--relay", url, *place.member, "--json")
        for name in ("one", "two"):
            assert run(*asked, "--token-file", f"{name}.token").json() == []
        assert run("keys", "issuers.ring", "--remove", kid).code == 0
        relay.send(signal.SIGHUP)
        relay.says("issuers_read")
        assert run(*asked, "--token-file", "one.token").json() == []
        refused = run(*asked, "--token-file", "two.token")
        assert refused.code == 2


def test_a_producer_that_listens_asks_for_tokens(place: Place, folder: Path, run: Run) -> None:
    issuer = ("keygen", "--issuer", "one", "--scope-key-file", place.scope_key)
    assert run(*issuer, "--out", "one.key", "--public", "issuers.ring").code == 0
    token = ("token", "make", "--issuer-key-file", "one.key", "--audience", "127.0.0.1")
    assert run(*token, "--role", "consumer", "--out", "one.token").code == 0
    listens = ("--serve", "127.0.0.1:0", *place.keys, "--scope-key-file", place.scope_key)
    with Process(
        *("publish", place.cache, *listens, "--issuers", "issuers.ring"),
        *("--retain", "600", "--lines", "--log-level", "info"),
    ) as publisher:
        url = publisher.event("published")["uri"].partition("#")[0]
        asked = ("ls", "--relay", url, *place.member, "--json")
        refused = run(*asked)
        assert refused.code == 2 and "not authorized" in refused.line()
        [found] = run(*asked, "--token-file", "one.token").json()
        assert found["publication"]
        assert run(*issuer, "--out", "two.key", "--public", "issuers.ring").code == 0
        publisher.send(signal.SIGHUP)
        publisher.says("issuers_read")


@pytest.mark.parametrize("option", ["--issuers", "--audience", "--client-ca"])
def test_what_is_for_listening_needs_serve(place: Place, run: Run, option: str) -> None:
    there = ("--relay", "moqt://127.0.0.1:1", *place.member)
    ran = run("publish", place.cache, *there, option, place.scope_key)
    assert ran.code == 2 and "--serve" in ran.line()

"""Client certificates by command: from flags, the environment and the configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Place
from tests.command import Process, Run


def test_who_has_no_certificate_is_turned_away(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certs = tmp_path / "certs"
    for more in ((), ("--client", "site-one")):
        assert run("certs", "--out", certs, *more).code == 0
    cert, key = certs / "site-one-cert.pem", certs / "site-one-key.pem"
    listens = ("--cert", certs / "cert.pem", "--key", certs / "key.pem", "--allow-anyone")
    with Process(
        *("relay", "--bind", "127.0.0.1:0", *listens, "--lines"),
        environment={"KVCS_RELAY_CLIENT_CA": str(certs / "ca.pem")},
    ) as relay:
        url = relay.event("listening")["url"]
        there = ("--relay", url, "--ca", certs / "ca.pem", "--scope-key-file", place.scope_key)
        refused = run("ls", *there)
        assert refused.code == 2
        assert "certificate_required" in refused.line() and "--client-cert" in refused.line()
        assert run("ls", *there, "--client-cert", cert).code == 2
        shown = ("--client-cert", cert, "--client-key", key)
        with Process(
            *("publish", place.cache, *there, *shown, "--retain", "600", "--lines")
        ) as publisher:
            uri = publisher.event("published")["uri"]
            like = ("--like", place.cache, "--compare", place.cache, "--json")
            got = run("subscribe", *there, *shown, *like, "--out", tmp_path / "got.safetensors")
            assert (got.code, got.json()["equal"]) == (0, True), got.err
            settings = tmp_path / "kvcs.toml"
            settings.write_text(f'[inspect]\nclient-cert = "{cert}"\nclient-key = "{key}"\n')
            asked = ("inspect", uri, "--ca", certs / "ca.pem", "--json")
            assert run("--config", settings, *asked).code == 0
            assert run(*asked).code == 2
            monkeypatch.setenv("KVCS_FETCH_CLIENT_CERT", str(cert))
            monkeypatch.setenv("KVCS_FETCH_CLIENT_KEY", str(key))
            assert run("fetch", *there, *like, "--out", tmp_path / "more.safetensors").code == 0

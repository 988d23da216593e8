"""`kvcs certs`: certificates that verify, keys that stay private, files that stay."""

from __future__ import annotations

import stat
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from kvcs.cli.authority import Issued, make_authority, make_server
from kvcs.errors import UsageError
from kvcs.quic.aioquic_backend.clients import ClientVerifier

Run = Callable[..., Any]

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
CERTS = Path(__file__).resolve().parents[3] / "certs"


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def verify(ca: x509.Certificate, server: x509.Certificate, name: x509.GeneralName) -> None:
    assert isinstance(name, x509.DNSName | x509.IPAddress)
    at = server.not_valid_before_utc + timedelta(hours=2)
    builder = PolicyBuilder().store(Store([ca])).time(at.replace(tzinfo=None))
    builder.build_server_verifier(name).verify(server, [])


def test_it_makes_what_verifies(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    ran = run("certs", "--out", folder, "--json")
    assert (ran.code, ran.err) == (0, "")
    ca, server = load(folder / "ca.pem"), load(folder / "cert.pem")
    verify(ca, server, x509.DNSName("localhost"))
    for address in ("127.0.0.1", "::1"):
        verify(ca, server, x509.IPAddress(ip_address(address)))
    with pytest.raises(VerificationError):
        verify(ca, server, x509.DNSName("relay.example"))
    document = ran.json()
    assert document["authority"] == "made"
    assert document["names"] == ["localhost", "127.0.0.1", "::1"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "ca-key.pem",
        "ca.pem",
        "cert.pem",
        "key.pem",
    ]


def test_private_keys_are_for_their_owner_alone(run: Run, tmp_path: Path) -> None:
    run("certs", "--out", tmp_path)
    run("certs", "--out", tmp_path, "--force")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes["ca-key.pem"] == modes["key.pem"] == 0o600
    Issued.from_pem((tmp_path / "cert.pem").read_bytes(), (tmp_path / "key.pem").read_bytes())


def test_it_says_what_it_wrote(run: Run, tmp_path: Path) -> None:
    ran = run("certs", "--out", tmp_path, "--name", "relay.example")
    for name in ("ca.pem", "ca-key.pem", "cert.pem", "key.pem", "relay.example"):
        assert name in ran.out
    assert "PRIVATE" not in ran.out


def test_nothing_is_overwritten_without_force(run: Run, tmp_path: Path) -> None:
    run("certs", "--out", tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    ran = run("certs", "--out", tmp_path)
    assert ran.code == 2
    assert ran.line() == f"kvcs: {tmp_path}/cert.pem is there already; --force replaces it"
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_force_replaces_the_server_and_keeps_the_authority(run: Run, tmp_path: Path) -> None:
    run("certs", "--out", tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    ran = run("certs", "--out", tmp_path, "--force", "--json")
    assert (ran.code, ran.json()["authority"]) == (0, "kept")
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"cert.pem", "key.pem"}
    verify(load(tmp_path / "ca.pem"), load(tmp_path / "cert.pem"), x509.DNSName("localhost"))


def test_one_authority_signs_several_servers(run: Run, tmp_path: Path) -> None:
    run("certs", "--out", tmp_path)
    ran = run("certs", "--out", tmp_path, "--server", "relay-2", "--name", "two.example")
    assert ran.code == 0
    server = load(tmp_path / "relay-2-cert.pem")
    verify(load(tmp_path / "ca.pem"), server, x509.DNSName("two.example"))
    assert stat.S_IMODE((tmp_path / "relay-2-key.pem").stat().st_mode) == 0o600


def test_a_clients_certificate_is_for_clients_alone(run: Run, tmp_path: Path) -> None:
    run("certs", "--out", tmp_path)
    ran = run("certs", "--out", tmp_path, "--client", "site-one", "--json")
    assert (ran.code, ran.json()["authority"], ran.json()["names"]) == (0, "kept", ["site-one"])
    ca, client = load(tmp_path / "ca.pem"), load(tmp_path / "site-one-cert.pem")
    assert stat.S_IMODE((tmp_path / "site-one-key.pem").stat().st_mode) == 0o600
    ClientVerifier(tmp_path / "ca.pem").check(client, [])
    with pytest.raises(x509.ExtensionNotFound):  # nobody can call a server by it
        client.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    with pytest.raises(VerificationError):
        verify(ca, client, x509.DNSName("localhost"))
    again = run("certs", "--out", tmp_path, "--client", "site-one")
    assert again.code == 2 and "--force" in again.line()


@pytest.mark.parametrize("words", [("--name", "localhost"), ("--server", "two")])
def test_a_client_has_no_servers_names(run: Run, tmp_path: Path, words: tuple[str, ...]) -> None:
    ran = run("certs", "--out", tmp_path, "--client", "site-one", *words)
    assert ran.code == 2 and "--client" in ran.line()


@pytest.mark.parametrize("client", ["../x", "a/b", ".hidden", "ca", " "])
def test_a_clients_name_stays_in_the_folder(run: Run, tmp_path: Path, client: str) -> None:
    assert run("certs", "--out", tmp_path / "c", "--client", client).code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("server", ["../x", "a/b", ".hidden", "ca", " "])
def test_a_prefix_stays_in_the_folder(run: Run, tmp_path: Path, server: str) -> None:
    assert run("certs", "--out", tmp_path / "c", "--server", server).code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a b", "", "https://relay.example", "relay.example:4433", "*"])
def test_a_name_that_is_none(run: Run, tmp_path: Path, name: str) -> None:
    ran = run("certs", "--out", tmp_path, "--name", name)
    assert ran.code == 2
    assert "neither a DNS name nor an IP address" in ran.line()
    assert list(tmp_path.iterdir()) == []


def test_an_authority_that_cannot_sign_is_replaced_by_force_only(run: Run, tmp_path: Path) -> None:
    expired = make_authority(datetime.now(UTC) - timedelta(days=30), 1)
    (tmp_path / "ca.pem").write_bytes(expired.certificate_pem())
    (tmp_path / "ca-key.pem").write_bytes(expired.key_pem())
    ran = run("certs", "--out", tmp_path)
    assert ran.code == 2
    assert "it has expired" in ran.line()
    assert run("certs", "--out", tmp_path, "--force", "--json").json()["authority"] == "made"
    verify(load(tmp_path / "ca.pem"), load(tmp_path / "cert.pem"), x509.DNSName("localhost"))


@pytest.mark.parametrize("lost", ["ca.pem", "ca-key.pem"])
def test_half_an_authority_is_told(run: Run, tmp_path: Path, lost: str) -> None:
    run("certs", "--out", tmp_path)
    (tmp_path / lost).unlink()
    ran = run("certs", "--out", tmp_path, "--server", "b")
    assert ran.code == 2
    assert "cannot sign" in ran.line()


def test_a_key_of_another_certificate_is_refused() -> None:
    one, two = make_authority(NOW, 1), make_authority(NOW, 1)
    with pytest.raises(UsageError, match="do not belong together"):
        Issued.from_pem(one.certificate_pem(), two.key_pem())
    with pytest.raises(UsageError, match="not a certificate"):
        Issued.from_pem(b"", one.key_pem())


def test_the_certificates_say_what_they_may_do() -> None:
    authority = make_authority(NOW, 400)
    server = make_server(authority, ["relay.example"], NOW, 90).certificate
    ca = authority.certificate
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = server.extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.digital_signature and not usage.key_cert_sign
    assert ca.subject != make_authority(NOW, 400).certificate.subject
    key = server.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    assert server.not_valid_before_utc < NOW < server.not_valid_after_utc
    assert server.not_valid_after_utc == NOW + timedelta(days=90)


def test_a_server_does_not_outlive_its_authority() -> None:
    authority = make_authority(NOW, 10)
    end = authority.certificate.not_valid_after_utc
    later = NOW + timedelta(days=5)
    assert make_server(authority, ["a"], later, 90).certificate.not_valid_after_utc == end
    with pytest.raises(UsageError, match="expired on 2026-03-11"):
        make_server(authority, ["a"], NOW + timedelta(days=11), 90)
    with pytest.raises(UsageError, match="1 to 100 names"):
        make_server(authority, [], NOW, 90)


def test_git_ignores_every_key() -> None:
    names = ["ca.pem", "ca-key.pem", "cert.pem", "key.pem", "relay-2-key.pem", "other.txt"]
    result = subprocess.run(
        ["git", "check-ignore", *names],
        cwd=CERTS,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout.split() == names
    kept = subprocess.run(
        ["git", "check-ignore", "README.md", "make", ".gitignore"],
        cwd=CERTS,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert kept.stdout == ""

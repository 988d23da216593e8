"""Files of certificates and keys: what cannot be used is said before a handshake needs it."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa, x25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from structlog.testing import capture_logs

from kvcs.errors import FileError
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.aioquic_backend.certificates import client_configuration, server_configuration
from tests.certificates import make_ca, make_certificate, write_pem

SETTINGS = QuicSettings()


def pem(key: PrivateKeyTypes) -> bytes:
    """A key in PEM, not encrypted."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def test_a_chain_is_read_with_its_own_certificate_first(tmp_path: Path) -> None:
    ca = make_ca()
    files = write_pem(tmp_path, ca)
    files.cert.write_bytes(files.cert.read_bytes() + ca.certificate_pem)
    configuration = server_configuration(SETTINGS, cert=files.cert, key=str(files.key))
    assert configuration.certificate.subject != ca.certificate.subject
    assert configuration.certificate_chain == [ca.certificate]
    assert not configuration.is_client


def test_authorities_come_from_a_file_or_octets_whatever_the_line_ends(tmp_path: Path) -> None:
    ca, other = make_ca(), make_ca("other")
    both = b"# two\r\n" + (ca.certificate_pem + other.certificate_pem).replace(b"\n", b"\r\n")
    path = tmp_path / "ca.pem"
    path.write_bytes(both)
    for given in (path, str(path), both):
        configuration = client_configuration(
            SETTINGS, server_name="localhost", ca=given, verify=True
        )
        assert configuration.cadata == ca.certificate_pem + other.certificate_pem


def test_without_an_authority_the_default_store_is_used() -> None:
    configuration = client_configuration(SETTINGS, server_name="localhost", ca=None, verify=True)
    assert configuration.cadata is None
    assert configuration.verify_mode != 0


@pytest.mark.parametrize("spoil", ["missing", "directory", "text"])
@pytest.mark.parametrize("which", ["cert", "key", "ca"])
def test_unreadable_files_are_named(tmp_path: Path, which: str, spoil: str) -> None:
    files = write_pem(tmp_path)
    path: Path = getattr(files, which)
    path.unlink()
    if spoil == "directory":
        path.mkdir()
    elif spoil == "text":
        path.write_text("no PEM")
    with pytest.raises(FileError) as caught:
        server_configuration(SETTINGS, cert=files.cert, key=files.key)
        client_configuration(SETTINGS, server_name="x", ca=files.ca, verify=True)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_authority_is_refused() -> None:
    with pytest.raises(FileError, match="no readable certificate"):
        client_configuration(SETTINGS, server_name="x", ca=b"", verify=True)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    files = write_pem(tmp_path)
    files.key.write_bytes(make_certificate(make_ca()).key_pem)
    with pytest.raises(FileError, match="does not belong"):
        server_configuration(SETTINGS, cert=files.cert, key=files.key)


def test_an_encrypted_key_is_refused(tmp_path: Path) -> None:
    files = write_pem(tmp_path)
    key = ec.generate_private_key(ec.SECP256R1())
    files.key.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    with pytest.raises(FileError, match="is encrypted"):
        server_configuration(SETTINGS, cert=files.cert, key=files.key)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ec.generate_private_key(ec.SECP521R1()), "P-256 or P-384"),
        (x25519.X25519PrivateKey.generate, "of a kind"),
        (ed25519.Ed25519PrivateKey.generate, "does not belong"),
        (lambda: rsa.generate_private_key(65_537, 2048), "does not belong"),
    ],
)
def test_keys_that_cannot_sign_a_handshake_are_refused(
    tmp_path: Path, make: Callable[[], PrivateKeyTypes], text: str
) -> None:
    files = write_pem(tmp_path)
    files.key.write_bytes(pem(make()))
    with pytest.raises(FileError, match=text):
        server_configuration(SETTINGS, cert=files.cert, key=files.key)


def test_a_server_that_starts_with_an_expired_certificate_says_so(tmp_path: Path) -> None:
    ca = make_ca()
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    files = write_pem(tmp_path, ca, make_certificate(ca, not_after=past))
    with capture_logs() as logs:
        server_configuration(SETTINGS, cert=files.cert, key=files.key)
    assert [entry["event"] for entry in logs] == ["certificate_expired"]

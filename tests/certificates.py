"""Certificates for tests: a small authority and leaves of it, made anew in each run."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Certified:
    """A certificate and the key to it."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        """The certificate alone."""
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """The private key, not encrypted."""
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@dataclass(frozen=True, slots=True)
class PemFiles:
    """Where `write_pem` put what it made."""

    ca: Path
    cert: Path
    key: Path


def make_ca(name: str = "kvcs test authority") -> Certified:
    """Make an authority that signs leaves and nothing else."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    builder = (
        _builder(subject, subject, key.public_key(), _now() + 30 * DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return Certified(builder.sign(key, hashes.SHA256()), key)


def make_certificate(
    ca: Certified,
    names: tuple[str, ...] = ("localhost", "127.0.0.1"),
    not_after: datetime.datetime | None = None,
) -> Certified:
    """Make a server's certificate for DNS names and addresses; a past `not_after` expires it."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _builder(
            _name(names[0]), ca.certificate.subject, key.public_key(), not_after or _now() + 7 * DAY
        )
        .add_extension(x509.SubjectAlternativeName([_general(n) for n in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key()),
            critical=False,
        )
    )
    return Certified(builder.sign(ca.key, hashes.SHA256()), key)


def write_pem(
    directory: Path, ca: Certified | None = None, certificate: Certified | None = None
) -> PemFiles:
    """Write ca.pem, cert.pem and key.pem, making what is not given (for localhost, 127.0.0.1)."""
    ca = ca or make_ca()
    certificate = certificate or make_certificate(ca)
    directory.mkdir(parents=True, exist_ok=True)
    files = PemFiles(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")
    files.ca.write_bytes(ca.certificate_pem)
    files.cert.write_bytes(certificate.certificate_pem)
    files.key.touch(mode=0o600)
    files.key.write_bytes(certificate.key_pem)
    return files


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    not_after: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(_now(), not_after) - DAY)
        .not_valid_after(not_after)
    )

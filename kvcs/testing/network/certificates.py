"""Certificates for the hosts of a virtual network: the same octets in every run."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
UNTIL = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files of one server, and the authority that its clients trust."""

    cert: Path
    """PEM file with the certificate."""

    key: Path
    """PEM file with its private key."""

    ca: Path
    """PEM file with the authority's certificate."""


def write_credentials(folder: str | os.PathLike[str], *names: str) -> Credentials:
    """Write a certificate for host names, its key, and the authority; for tests only.

    Keys and serial numbers are fixed, and Ed25519 signs alike each time: packets of handshakes have
    the same sizes in every run. Anyone can compute these keys, so they protect nothing.

    Args:
        folder: where; it must exist.
        names: the hosts that the certificate is for.
    """
    authority = Ed25519PrivateKey.from_private_bytes(b"kvcs virtual network authority..")
    leaf = Ed25519PrivateKey.from_private_bytes(b"kvcs virtual network server key.")
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvcs virtual network")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    root = (
        _builder(issuer, issuer, authority, 1)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority, None)
    )
    certificate = (
        _builder(subject, issuer, leaf, 2)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(authority, None)
    )
    here = Path(folder)
    files = Credentials(here / "cert.pem", here / "key.pem", here / "ca.pem")
    files.cert.write_bytes(certificate.public_bytes(Encoding.PEM))
    files.ca.write_bytes(root.public_bytes(Encoding.PEM))
    files.key.touch(mode=0o600)
    files.key.write_bytes(leaf.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


def _builder(
    subject: x509.Name, issuer: x509.Name, key: Ed25519PrivateKey, serial: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(FROM)
        .not_valid_after(UNTIL)
    )

"""A development certificate authority and certificates of it, as PEM; no files here."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvcs.errors import UsageError

MAX_NAMES = 100
"""Names in one certificate."""

CLOCK_SKEW = timedelta(hours=1)
"""How long before now a certificate is valid, for peers whose clock is behind."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def certificate_pem(self) -> bytes:
        """The certificate alone."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self) -> bytes:
        """The private key, not encrypted."""
        return self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    @classmethod
    def from_pem(cls, certificate: bytes, key: bytes) -> Issued:
        """Read both.

        Raises:
            UsageError: not PEM, not a P-256 key, or the two do not belong together.
        """
        try:
            loaded = x509.load_pem_x509_certificate(certificate)
            private = serialization.load_pem_private_key(key, password=None)
        except (ValueError, TypeError) as exc:
            raise UsageError(f"not a certificate and its unencrypted key: {exc}") from exc
        if not isinstance(private, ec.EllipticCurvePrivateKey) or (
            private.public_key() != loaded.public_key()
        ):
            raise UsageError("the certificate and the key do not belong together")
        return cls(loaded, private)


def make_authority(now: datetime, days: int) -> Issued:
    """Make an authority of its own name, which signs certificates of servers and clients alone.

    Args:
        now: the time, with its zone.
        days: how long it is valid.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    identifier = x509.SubjectKeyIdentifier.from_public_key(public)
    # Two authorities of one name would confuse whoever trusts both.
    subject = _name(f"kvcs development CA {identifier.digest.hex()[:8]}")
    builder = (
        _builder(subject, subject, public, now, now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(ca=True), critical=True)
        .add_extension(identifier, critical=False)
    )
    return Issued(builder.sign(key, hashes.SHA256()), key)


def make_server(authority: Issued, names: Sequence[str], now: datetime, days: int) -> Issued:
    """Make a server's certificate; it does not outlive its authority.

    Args:
        authority: signs it.
        names: DNS names and IP addresses by which clients will call the server.
        now: the time, with its zone.
        days: how long it is valid.

    Raises:
        UsageError: no names or too many, or one that is neither; or the authority has expired.
    """
    if not 1 <= len(names) <= MAX_NAMES:
        raise UsageError(f"a certificate needs 1 to {MAX_NAMES} names, got {len(names)}")
    general_names = [_general_name(name) for name in names]
    alternative = x509.SubjectAlternativeName(general_names)
    return _make_leaf(authority, names[0], ExtendedKeyUsageOID.SERVER_AUTH, alternative, now, days)


def make_client(authority: Issued, name: str, now: datetime, days: int) -> Issued:
    """Make a client's certificate. It holds no name of a server: nobody can be called by it.

    Args:
        authority: signs it.
        name: what logs call the client.
        now: the time, with its zone.
        days: how long it is valid.

    Raises:
        UsageError: the authority has expired.
    """
    return _make_leaf(authority, name, ExtendedKeyUsageOID.CLIENT_AUTH, None, now, days)


def _make_leaf(
    authority: Issued,
    common: str,
    purpose: x509.ObjectIdentifier,
    names: x509.SubjectAlternativeName | None,
    now: datetime,
    days: int,
) -> Issued:
    end = authority.certificate.not_valid_after_utc
    if end <= now:
        raise UsageError(f"the authority expired on {end:%Y-%m-%d}; make a new one")
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key()
    issuer = authority.certificate
    builder = (
        _builder(_name(common), issuer.subject, public, now, min(now + timedelta(days=days), end))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
    )
    if names is not None:
        builder = builder.add_extension(names, critical=False)
    return Issued(builder.sign(authority.key, hashes.SHA256()), key)


def _name(common: str) -> x509.Name:
    # The attribute holds 64 characters; the names that count stand in the certificate in full.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        ascii_name = name.encode("idna").decode("ascii")
    except UnicodeError:
        ascii_name = ""
    labels = ascii_name.removeprefix("*.").split(".")
    if not all(label.replace("-", "a").replace("_", "a").isalnum() for label in labels):
        raise UsageError(f"{name!r} is neither a DNS name nor an IP address")
    return x509.DNSName(ascii_name)


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    now: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(end)
    )

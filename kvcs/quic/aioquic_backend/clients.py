"""Whom a server lets in by certificate: the authority, the dates and the purpose (RFC 5280)."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from typing import Final

from aioquic.tls import Alert, AlertBadCertificate, AlertCertificateExpired, AlertDescription
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import (
    Criticality,
    ExtensionPolicy,
    Policy,
    PolicyBuilder,
    Store,
    VerificationError,
)

from kvcs.errors import FileError
from kvcs.observe import get_logger
from kvcs.quic.aioquic_backend.certificates import Path, authorities
from kvcs.quic.aioquic_backend.ending import one_line

log = get_logger("kvcs.quic")

MAX_DEPTH: Final = 4
"""Authorities between a client's certificate and one that is trusted."""

SMALLEST_RSA: Final = 2048
"""Bits of an RSA key that counts; those of authorities are held to the same by the library."""

Clock = Callable[[], datetime.datetime]
"""The time, with its zone."""


class AlertUnknownAuthority(Alert):
    """No chain of valid certificates leads to an authority that is trusted."""

    description = AlertDescription.unknown_ca


class AlertUnfit(Alert):
    """The certificate is not for clients, or its key is too weak."""

    description = AlertDescription.unsupported_certificate


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class ClientVerifier:
    """Decides about clients' certificates. A file of authorities counts anew when it has changed.

    A certificate counts if a chain of valid certificates leads from it to one of the authorities,
    and its Extended Key Usage names client authentication: what a server is known by lets nobody
    in. Names are not looked at; whoever the authority has certified comes in.

    Args:
        ca: the authorities, a PEM file or its octets.
        clock: the time.

    Raises:
        FileError: `ca` cannot be read or holds no certificate.
    """

    def __init__(self, ca: Path | bytes, clock: Clock = _utc_now) -> None:
        self._ca = ca
        self._clock = clock
        self._mark = self._look()
        self._store = _store(ca)
        self.refused: dict[str, int] = {}
        """Clients refused, by the name of the TLS alert that they got."""

    def check(self, certificate: x509.Certificate, chain: Sequence[x509.Certificate]) -> None:
        """Verify one client's certificate; `chain` is what it has sent beside it.

        Raises:
            Alert: it does not verify.
        """
        self._follow()
        now = self._clock()
        try:
            self._verify(certificate, chain, now)
        except Alert as exc:
            self.count(exc)
            raise
        except Exception as exc:
            # The library has errors of several kinds for what stands in extensions. A certificate
            # that anybody can make is to be no failure of this side.
            alert = AlertBadCertificate(f"the certificate cannot be read: {type(exc).__name__}")
            self.count(alert)
            raise alert from exc

    @property
    def refusals(self) -> int:
        """Clients refused."""
        return sum(self.refused.values())

    def count(self, alert: Alert) -> None:
        """Note that a client was refused; the log tells the first, and ever fewer of more."""
        name = alert.description.name
        self.refused[name] = count = self.refused.get(name, 0) + 1
        if count & (count - 1) == 0:  # a flood must not fill the log
            log.warning("client_certificate_refused", alert=name, why=str(alert), count=count)

    def _verify(
        self,
        certificate: x509.Certificate,
        chain: Sequence[x509.Certificate],
        now: datetime.datetime,
    ) -> None:
        if now < certificate.not_valid_before_utc:
            raise AlertCertificateExpired("the certificate is not valid yet")
        if now > certificate.not_valid_after_utc:
            raise AlertCertificateExpired("the certificate is no longer valid")
        try:
            purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        except (x509.ExtensionNotFound, ValueError):
            purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.OCSP_SIGNING])
        if ExtendedKeyUsageOID.CLIENT_AUTH not in purposes:
            raise AlertUnfit("the certificate is not for client authentication")
        key = certificate.public_key()
        if isinstance(key, rsa.RSAPublicKey) and key.key_size < SMALLEST_RSA:
            raise AlertUnfit(f"an RSA key has at least {SMALLEST_RSA} bits")
        # What the library asks for besides are rules of the public web: a name, a key identifier.
        leaf = ExtensionPolicy.permit_all().require_present(
            x509.ExtendedKeyUsage, Criticality.AGNOSTIC, _for_clients
        )
        authority = ExtensionPolicy.permit_all().require_present(
            x509.BasicConstraints, Criticality.AGNOSTIC, _signs
        )
        authority = authority.may_be_present(x509.KeyUsage, Criticality.AGNOSTIC, _may_sign)
        verifier = (
            PolicyBuilder()
            .store(self._store)
            .time(now)
            .max_chain_depth(MAX_DEPTH)
            .extension_policies(ee_policy=leaf, ca_policy=authority)
            .build_client_verifier()
        )
        try:
            verifier.verify(certificate, list(chain))
        except (VerificationError, ValueError) as exc:
            log.debug("client_chain_refused", why=one_line(str(exc)))
            raise AlertUnknownAuthority("no valid chain leads to a trusted authority") from exc

    def _follow(self) -> None:
        """Read a file of authorities again where it has changed; a broken one changes nothing."""
        mark = self._look()
        if mark == self._mark:
            return
        self._mark = mark
        try:
            self._store = _store(self._ca)
        except FileError as exc:
            log.error("client_ca_not_read", reason=str(exc))
        else:
            log.info("client_ca_read")

    def _look(self) -> tuple[int, int, int] | None:
        """What tells one state of the file from the next."""
        if isinstance(self._ca, bytes):
            return None
        try:
            found = os.stat(self._ca)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _store(ca: Path | bytes) -> Store:
    return Store(authorities(ca, "client_ca"))


def _for_clients(
    policy: Policy, certificate: x509.Certificate, purposes: x509.ExtendedKeyUsage
) -> None:
    if ExtendedKeyUsageOID.CLIENT_AUTH not in purposes:
        raise ValueError("not for client authentication")


def _signs(
    policy: Policy, certificate: x509.Certificate, constraints: x509.BasicConstraints
) -> None:
    if not constraints.ca:
        raise ValueError("not an authority")


def _may_sign(policy: Policy, certificate: x509.Certificate, usage: x509.KeyUsage | None) -> None:
    if usage is not None and not usage.key_cert_sign:
        raise ValueError("an authority that may not sign certificates")

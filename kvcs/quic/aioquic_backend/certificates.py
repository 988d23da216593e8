"""Certificates and keys from files, checked before a handshake needs them."""

from __future__ import annotations

import datetime
import ssl
from os import PathLike, fspath
from typing import Final

from aioquic.quic.configuration import QuicConfiguration
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from kvcs.errors import FileError, UsageError
from kvcs.filekinds import file_kind, told
from kvcs.observe import get_logger
from kvcs.quic.aioquic_backend.settings import SMALLEST_DATAGRAM, QuicSettings

log = get_logger("kvcs.quic")

Path = str | PathLike[str]

ServerKey = (
    rsa.RSAPrivateKey
    | ec.EllipticCurvePrivateKey
    | ed25519.Ed25519PrivateKey
    | ed448.Ed448PrivateKey
)

ServerPublicKey = (
    rsa.RSAPublicKey | ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | ed448.Ed448PublicKey
)

CURVES: Final = (ec.SECP256R1, ec.SECP384R1)
"""Elliptic curves that the library signs a handshake with."""


def client_configuration(
    settings: QuicSettings,
    *,
    server_name: str,
    ca: Path | bytes | None,
    verify: bool,
    cert: Path | None = None,
    key: Path | None = None,
) -> QuicConfiguration:
    """Configure a client that trusts `ca`: PEM octets, a PEM file, or None for certifi's store.

    With `cert` and `key` it has a certificate to show where the server asks for one.

    Raises:
        FileError: a file cannot be read, is of another kind, or the two do not belong together.
        UsageError: there is a certificate without its key, or the other way round.
    """
    if (cert is None) != (key is None):
        raise UsageError("client_cert and client_key belong together: pass both, or neither")
    configuration = _configuration(settings, is_client=True)
    configuration.server_name = server_name
    configuration.verify_mode = ssl.CERT_REQUIRED if verify else ssl.CERT_NONE
    if ca is not None:
        # Written anew: the library splits files at bare line ends only.
        configuration.cadata = b"".join(
            each.public_bytes(Encoding.PEM) for each in authorities(ca, "ca")
        )
    if cert is not None and key is not None:
        _identify(configuration, cert, key)
    return configuration


def server_configuration(settings: QuicSettings, *, cert: Path, key: Path) -> QuicConfiguration:
    """Configure a server with a PEM certificate chain, its own first, and the PEM key to it.

    Raises:
        FileError: a file cannot be read, is of another kind, or the two do not belong together.
    """
    configuration = _configuration(settings, is_client=False)
    _identify(configuration, cert, key)
    return configuration


def _identify(configuration: QuicConfiguration, cert: Path, key: Path) -> None:
    """Give an endpoint the certificate that it shows, and the key to it."""
    chain = _certificates(_read(cert, "certificate"), f"certificate {fspath(cert)}")
    private_key = _private_key(key)
    if _public_octets(private_key.public_key()) != _public_octets(_public_key(chain[0], cert)):
        raise FileError(
            f"key {fspath(key)} does not belong to certificate {fspath(cert)}: pass the key that "
            "the certificate was made with"
        )
    expires = chain[0].not_valid_after_utc
    if expires < datetime.datetime.now(datetime.UTC):
        log.warning("certificate_expired", certificate=fspath(cert), expired=str(expires))
    configuration.certificate = chain[0]
    configuration.certificate_chain = chain[1:]
    configuration.private_key = private_key


def _configuration(settings: QuicSettings, *, is_client: bool) -> QuicConfiguration:
    return QuicConfiguration(
        alpn_protocols=list(settings.alpn),
        idle_timeout=settings.idle_timeout,
        is_client=is_client,
        max_data=settings.receive_window,
        max_stream_data=settings.stream_receive_window,
        max_datagram_size=SMALLEST_DATAGRAM,
        max_datagram_frame_size=settings.max_datagram_frame_size,
    )


def _read(path: Path, what: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as exc:
        raise FileError(
            f"cannot read {what} {fspath(path)}: {exc.strerror or exc}; check the path"
        ) from exc


def _certificates(pem: bytes, what: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as exc:
        raise FileError(
            f"{what} holds no readable certificate: PEM is expected{told(file_kind(pem))}"
        ) from exc


def authorities(ca: Path | bytes, what: str) -> list[x509.Certificate]:
    """Read certificates of authorities, from a PEM file or its octets; `what` names the setting.

    Raises:
        FileError: the file cannot be read, or there is no certificate in it.
    """
    if isinstance(ca, bytes):
        return _certificates(ca, what)
    return _certificates(_read(ca, what), f"{what} {fspath(ca)}")


def _private_key(path: Path) -> ServerKey:
    pem = _read(path, "key")
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError as exc:
        raise FileError(f"key {fspath(path)} is encrypted: store it without a password") from exc
    except ValueError as exc:
        raise FileError(
            f"key {fspath(path)} is not a readable PEM private key{told(file_kind(pem))}"
        ) from exc
    if isinstance(key, ec.EllipticCurvePrivateKey) and not isinstance(key.curve, CURVES):
        raise FileError(
            f"key {fspath(path)} is on curve {key.curve.name}: P-256 or P-384 is needed"
        )
    if not isinstance(key, ServerKey):
        raise FileError(f"key {fspath(path)} is of a kind that TLS 1.3 cannot use here")
    return key


def _public_key(certificate: x509.Certificate, path: Path) -> ServerPublicKey:
    key = certificate.public_key()
    if not isinstance(key, ServerPublicKey):
        raise FileError(f"certificate {fspath(path)} has a key that TLS 1.3 cannot use here")
    return key


def _public_octets(key: ServerPublicKey) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

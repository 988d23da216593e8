"""Weak settings that `kvcs doctor` looks for: what each is, and what to do about it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvcs.cli.loops import VARIABLE as LOOP_VARIABLE
from kvcs.cli.peers import read_token
from kvcs.cli.prefixes import read_descriptor
from kvcs.errors import KvcsError
from kvcs.keyfiles import load_key_ring, load_protection_ring
from kvcs.kv import KVCS_SCHEME, UNPINNED, Scope
from kvcs.kvfile import load_kv_file
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.trust import KeyUse, read_claims

TOKEN_SOON_SECONDS = 600.0
"""A token that has less time left than this is about to expire."""

KEY_SOON_SECONDS = 7 * 86_400.0
"""A certificate or a producer's key that has less time left than this is about to expire."""

KERNEL_LIMITS = ("rmem_max", "wmem_max")

OPEN_TO_OTHERS = 0o077

SECRETS = (
    "scope_key_file",
    "protect_key_file",
    "sign_key_file",
    "token_file",
    "key",
    "client_key",
)
"""Options that name a file with a secret in it."""


Level = Literal["weak", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One weak setting, or a note."""

    check: str
    """Its short name, the same for ever."""

    subject: str
    """What it is about: a file, an option, a setting of the machine."""

    problem: str
    """What is wrong with it."""

    advice: str
    """What to do."""

    level: Level = "weak"
    """Whether it is a weakness, or a note on what could be better and is nobody's duty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What a user runs kvcs with; names are those of the options."""

    scope_key_file: Path | None = None
    protect_key_file: Path | None = None
    sign_key_file: Path | None = None
    keys_file: Path | None = None
    token_file: Path | None = None
    key: Path | None = None
    cert: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    client_ca: Path | None = None
    ca: Path | None = None
    issuers: Path | None = None
    like: Path | None = None
    descriptor: Path | None = None
    insecure: bool = False
    allow_anyone: bool = False
    serve: bool = False
    """Whether a publisher listens itself."""
    require_signed: bool = False
    untrusted_relays: bool = False

    @classmethod
    def of(cls, command: str, values: dict[str, Any]) -> Chosen:
        """What a command is run with.

        Args:
            command: its name.
            values: its options by parameter, as far as somebody has said them.
        """
        known: dict[str, Any] = {}
        if command == "publish":
            known["serve"] = bool(values.get("bind"))
        for each in fields(cls):
            value = values.get(each.name)
            if value is not None:
                known[each.name] = value if isinstance(each.default, bool) else Path(str(value))
        return cls(**known)


def findings(chosen: Chosen, now: float) -> Iterator[Finding]:
    """Everything that is weak in what a command is run with.

    Args:
        chosen: its options.
        now: Unix seconds.
    """
    for secret in SECRETS:
        path: Path | None = getattr(chosen, secret)
        if path is not None:
            yield from _secret_file(path)
    if chosen.insecure:
        yield Finding(
            "verify_off",
            "--insecure-accept-any-certificate",
            "whoever answers is believed to be the relay",
            "leave it out and name the authority with --ca FILE",
        )
    if chosen.allow_anyone:
        whom = "whoever can reach it" if chosen.client_ca is None else "whoever has a certificate"
        yield Finding(
            "open_relay",
            "--allow-anyone",
            f"the relay serves {whom}, in every scope, and takes publications from the same",
            "ask for tokens: --issuers FILE (`kvcs keygen --issuer NAME` makes the key)",
        )
    if chosen.serve and chosen.issuers is None and chosen.client_ca is None:
        yield Finding(
            "open_publisher",
            "--serve",
            "the publisher serves whoever can reach it",
            "ask for tokens with --issuers FILE, or for certificates with --client-ca FILE",
        )
    yield from _certificate(chosen.cert, now)
    yield from _certificate(chosen.client_cert, now, ExtendedKeyUsageOID.CLIENT_AUTH)
    yield from _authorities(chosen.ca, now)
    yield from _authorities(chosen.client_ca, now)
    yield from _weights(chosen)
    yield from _token(chosen.token_file, now)
    yield from _public_keys(chosen.keys_file, KeyUse.MANIFEST, "producer_key_expires", now)
    yield from _public_keys(chosen.issuers, KeyUse.TOKEN, "issuer_key_expires", now)
    yield from _protection(chosen)
    if chosen.untrusted_relays:
        yield from _untrusted(chosen)


def machine() -> Iterator[Finding]:
    """Everything that is weak in the machine, and what could make it faster."""
    wanted = QuicSettings().socket_buffer
    for name in KERNEL_LIMITS:
        limit = _kernel_limit(name)
        if limit is not None and limit < wanted:
            yield Finding(
                "socket_buffers",
                f"net.core.{name}",
                f"{limit} octets, where kvcs asks for {wanted}: bursts are lost",
                f"sysctl -w net.core.{name}={wanted}",
            )
    if os.environ.get(LOOP_VARIABLE) == "asyncio" or find_spec("uvloop") is None:
        chosen = os.environ.get(LOOP_VARIABLE) == "asyncio"
        yield Finding(
            "no_uvloop",
            "event loop",
            "asyncio's own loop is slower than uvloop",
            f"unset {LOOP_VARIABLE}" if chosen else "pip install '.[uvloop]' in its source",
            # An extra, which everything works without.
            level="note",
        )


def _secret_file(path: Path) -> Iterator[Finding]:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as exc:
        yield _unreadable(path, exc.strerror or str(exc))
        return
    if mode & OPEN_TO_OTHERS:
        yield Finding(
            "secret_readable",
            str(path),
            f"its mode is {mode:04o}: others than its owner can get at the secret in it",
            f"chmod 600 {path}; if somebody may have read it, make a new one",
        )


def _unreadable(path: Path, why: str) -> Finding:
    return Finding("unreadable", str(path), why, "name a file that is there and can be read")


def _certificate(
    path: Path | None, now: float, purpose: x509.ObjectIdentifier | None = None
) -> Iterator[Finding]:
    if path is None:
        return
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except OSError as exc:
        yield _unreadable(path, exc.strerror or str(exc))
        return
    except x509.ExtensionNotFound:
        usage = None
    except ValueError:
        yield _unreadable(path, "it holds no readable certificate")
        return
    yield from _end(certificate, path, now)
    if purpose is not None and (usage is None or purpose not in usage):
        yield Finding(
            "certificate_purpose",
            str(path),
            "it is not for client authentication: kvcs relays refuse it",
            "`kvcs certs --client NAME` makes one that is",
        )


def _end(certificate: x509.Certificate, path: Path, now: float) -> Iterator[Finding]:
    left = certificate.not_valid_after_utc.timestamp() - now
    if left < KEY_SOON_SECONDS:
        yield Finding(
            "certificate_expires",
            str(path),
            "it has expired" if left <= 0 else f"it expires in {left / 86_400:.1f} days",
            "renew it; for development: `kvcs certs --force`",
        )


def _authorities(path: Path | None, now: float) -> Iterator[Finding]:
    if path is None:
        return
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as exc:
        yield _unreadable(path, exc.strerror or str(exc))
        return
    except ValueError:
        yield _unreadable(path, "it holds no readable certificate")
        return
    # A bundle holds some that have ended: while one counts, that is nobody's duty.
    yield from _end(max(found, key=lambda each: each.not_valid_after_utc), path, now)


def _weights(chosen: Chosen) -> Iterator[Finding]:
    for path in (chosen.like, chosen.descriptor):
        if path is None:
            continue
        try:
            descriptor = (
                read_descriptor(path)
                if path is chosen.descriptor
                else load_kv_file(path, partial=True).descriptor
            )
        except KvcsError as exc:
            yield _unreadable(path, str(exc))
            continue
        if descriptor.weights is UNPINNED:
            yield Finding(
                "weights_unpinned",
                str(path),
                "the descriptor names no weights: caches of another training of the model fit, too",
                "make it with the weights' fingerprint",
            )


def _token(path: Path | None, now: float) -> Iterator[Finding]:
    if path is None:
        return
    try:
        left = read_claims(read_token(path, is_known=True)).expires - now
    except KvcsError as exc:
        yield _unreadable(path, str(exc))
        return
    if left < TOKEN_SOON_SECONDS:
        yield Finding(
            "token_expires",
            str(path),
            "it has expired" if left <= 0 else f"it expires in {left:.0f} s",
            "put a fresh one into the file: `kvcs token make`",
        )


def _public_keys(path: Path | None, use: KeyUse, check: str, now: float) -> Iterator[Finding]:
    if path is None:
        return
    try:
        ring = load_key_ring(path, use)
    except KvcsError as exc:
        yield _unreadable(path, str(exc))
        return
    for key in ring:
        if key.expires is not None and key.expires - now < KEY_SOON_SECONDS:
            yield Finding(
                check,
                f"{path}: key {key.kid.hex()}",
                "it counts no longer, or for less than a week",
                "add its successor: `kvcs keys RING --add FILE`",
            )


def _protection(chosen: Chosen) -> Iterator[Finding]:
    path = chosen.protect_key_file
    if path is None:
        return
    try:
        ring = load_protection_ring(path)
    except KvcsError as exc:
        yield _unreadable(path, str(exc))
        return
    if not any(ring.may_send(key.key_id) for key in ring):
        yield Finding(
            "protection_seals_nothing",
            str(path),
            "every key of it is for receiving only: nothing can be published with it",
            f"kvcs keygen --protection --rotate --out {path}",
        )
    if chosen.scope_key_file is None or ring.scope_id is None:
        return
    try:
        text = chosen.scope_key_file.read_text("ascii")
        scope_id = KVCS_SCHEME.scope_id(Scope.from_hex(text))
    except (KvcsError, OSError, UnicodeDecodeError):
        return  # it was told already, or the other commands tell it
    if scope_id != ring.scope_id:
        yield Finding(
            "protection_of_another_scope",
            str(path),
            "its keys are for another scope than the scope key",
            f"kvcs keygen --protection --scope-key-file {chosen.scope_key_file} --out FILE",
        )


def _untrusted(chosen: Chosen) -> Iterator[Finding]:
    if chosen.protect_key_file is None:
        yield Finding(
            "not_protected",
            "--untrusted-relays",
            "relays are not trusted, and nothing keeps them from reading or making caches",
            "--protect-key-file FILE (`kvcs keygen --protection` makes it)",
        )
    if chosen.sign_key_file is None and not (chosen.keys_file and chosen.require_signed):
        yield Finding(
            "not_signed",
            "--untrusted-relays",
            "protection shows that a cache is of the scope, and not who of it has made it",
            "producers: --sign-key-file FILE; consumers: --keys-file FILE --require-signed",
        )


def _kernel_limit(name: str) -> int | None:
    try:
        return int(Path(f"/proc/sys/net/core/{name}").read_text("ascii"))
    except (OSError, ValueError):
        return None

"""Why a connection ended or never came to be, in words for its user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aioquic.quic.events import ConnectionTerminated
from aioquic.quic.packet import QuicErrorCode
from aioquic.tls import AlertDescription

from kvcs.errors import CertificateError, ConnectionFailed

IDLE_REASON: Final = "Idle timeout"
"""The library's reason where nothing was heard; it has no code of its own for that."""

CERTIFICATE_ALERTS: Final = frozenset(
    (
        AlertDescription.bad_certificate,
        AlertDescription.unsupported_certificate,
        AlertDescription.certificate_revoked,
        AlertDescription.certificate_expired,
        AlertDescription.certificate_unknown,
        AlertDescription.unknown_ca,
    )
)
"""TLS alerts that mean: the certificate does not verify."""

OUR_CERTIFICATE_REFUSED: Final = "the peer refuses this side's certificate"
"""Begins the reason of an end by such an alert of the peer, or where it wants one and got none."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a connection is over."""

    code: int | None
    """Application code; None where the transport ended the connection."""

    reason: str
    """One printable line."""

    by_peer: bool
    """Whether the peer closed."""

    transport_error: int | None = None
    """QUIC error code (RFC 9000 §20.1), where the transport ended the connection."""

    idle: bool = False
    """Whether silence ended the connection."""


def one_line(text: str) -> str:
    """Make a peer's words safe for a log or a terminal: one line, printable."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def ending_of(event: ConnectionTerminated, *, by_peer: bool, idle_timeout: float) -> Ending:
    """Read the library's event; `idle_timeout` in seconds."""
    reason = one_line(event.reason_phrase)
    if event.frame_type is None:
        return Ending(code=event.error_code, reason=reason, by_peer=by_peer)
    if not by_peer and event.reason_phrase == IDLE_REASON:
        text = f"idle timeout: nothing was received for {idle_timeout:g} s"
        return Ending(code=None, reason=text, by_peer=False, idle=True)
    alert = event.error_code - QuicErrorCode.CRYPTO_ERROR
    if by_peer and (alert in CERTIFICATE_ALERTS or alert == AlertDescription.certificate_required):
        text = f"{OUR_CERTIFICATE_REFUSED} ({AlertDescription(alert).name}: {reason or 'no more'})"
        return Ending(code=None, reason=text, by_peer=True, transport_error=event.error_code)
    text = f"QUIC error {_error_name(event.error_code)}"
    if reason:
        text += f": {reason}"
    return Ending(code=None, reason=text, by_peer=by_peer, transport_error=event.error_code)


def explain(ending: Ending, target: str, alpn: tuple[str, ...]) -> ConnectionFailed:
    """Say why no connection to `target` ("host:port") came to be, and what to do about it."""
    error = ending.transport_error
    alert = None if error is None else error - QuicErrorCode.CRYPTO_ERROR
    if alert in CERTIFICATE_ALERTS and not ending.by_peer:
        return _certificate_error(ending, target, alert == AlertDescription.certificate_expired)
    if alert == AlertDescription.no_application_protocol:
        return ConnectionFailed(
            f"{target} does not speak {' or '.join(alpn)}: it refused the protocol; "
            "check the address, and the version that the peer speaks"
        )
    if error == QuicErrorCode.CONNECTION_REFUSED:
        return ConnectionFailed(
            f"{target} takes no more connections now ({ending.reason}); try again later"
        )
    if ending.idle:
        return no_answer(target, None)
    if ending.reason.startswith(OUR_CERTIFICATE_REFUSED):
        return certificate_refused(target, ending.reason)
    who = "the peer ended" if ending.by_peer else "this side gave up"
    return ConnectionFailed(
        f"cannot connect to {target}: {who} the handshake ({ending.reason or 'no reason given'})"
    )


def certificate_refused(target: str, reason: str) -> CertificateError:
    """Say that `target` wants another certificate of ours than it was shown, or one at all."""
    return CertificateError(
        f"cannot connect to {target}: {reason}; pass a certificate of an authority that it trusts,"
        " for client authentication (client_cert and client_key, --client-cert and --client-key);"
        " `kvcs certs --client NAME` makes one for development"
    )


def no_answer(target: str, seconds: float | None) -> ConnectionFailed:
    """Say that nothing came back from `target` for `seconds`."""
    within = "" if seconds is None else f" within {seconds:g} s"
    return ConnectionFailed(
        f"no answer from {target}{within}; check host and port, that the server runs, and that "
        "UDP reaches it"
    )


def nobody_listens(target: str) -> ConnectionFailed:
    """Say that `target`'s host refused the datagrams."""
    return ConnectionFailed(
        f"cannot connect to {target}: nothing listens there (UDP port unreachable); start the "
        "server, or check host and port"
    )


def _certificate_error(ending: Ending, target: str, expired: bool) -> CertificateError:
    reason = ending.reason
    if expired or "expired" in reason:
        advice = "renew it, or check this machine's clock"
    elif "match" in reason or "subjectAltName" in reason:
        advice = "connect by a name that it carries, or give it this one (kvcs certs --name)"
    else:
        advice = "pass as ca (--ca) the authority that signed it"
    return CertificateError(f"the certificate of {target} does not verify ({reason}); {advice}")


def _error_name(code: int) -> str:
    alert = code - QuicErrorCode.CRYPTO_ERROR
    try:
        if alert >= 0:
            return f"TLS alert {AlertDescription(alert).name}"
        return QuicErrorCode(code).name
    except ValueError:
        return f"{code:#x}"

"""Reaches into the handshake: a server that asks its clients for certificates (RFC 8446 §4.3.2).

The library has the messages, and checks that a client holds the key of its certificate. It asks
for one behind a private switch alone, lets clients without one pass, and looks at no chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

# The library gives it here and does not say so, as strict typing asks.
from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.tls import Alert, AlertBadCertificate, AlertDescription, Context, State
from cryptography import x509

MAX_CHAIN_CERTIFICATES: Final = 8
"""Certificates that a client may send beside its own."""


class Clients(Protocol):
    """Whom a server lets in."""

    def check(self, certificate: x509.Certificate, chain: Sequence[x509.Certificate], /) -> None:
        """Raise an `Alert` for a client's certificate, with its chain, that does not verify."""

    def count(self, alert: Alert, /) -> None:
        """Hear of a client that was refused before its certificate could be looked at."""


class AlertCertificateRequired(Alert):
    """The client has sent no certificate."""

    description = AlertDescription.certificate_required


def require_certificate(context: Context, clients: Clients) -> None:
    """Ask the client for a certificate, and end the handshake without one that counts.

    Args:
        context: a server's, before the client's first message.
        clients: asked once the client has shown that it holds the certificate's key.
    """
    take_certificate = context._server_handle_certificate
    take_verify = context._server_handle_certificate_verify

    def refuse(alert: Alert) -> Alert:
        # The close leaves only behind this batch of datagrams, and a Finished may be in it: in this
        # state it is a violation, where it would complete the handshake otherwise.
        context._set_state(State.SERVER_EXPECT_CERTIFICATE)
        return alert

    def counted(take: Callable[[Buffer], None], input_buf: Buffer) -> None:
        try:
            take(input_buf)
        except Alert as exc:  # it cannot be read, or the client has not the key
            clients.count(exc)
            raise

    def certificate(input_buf: Buffer) -> None:
        counted(take_certificate, input_buf)
        alert: Alert
        if context._peer_certificate is None:
            alert = AlertCertificateRequired("a client certificate is required")
        elif len(context._peer_certificate_chain) > MAX_CHAIN_CERTIFICATES:
            alert = AlertBadCertificate("too many certificates")
        else:
            return
        clients.count(alert)
        raise refuse(alert)

    def verify(input_buf: Buffer) -> None:
        counted(take_verify, input_buf)
        leaf = context._peer_certificate
        assert leaf is not None  # `certificate` has seen it
        try:
            clients.check(leaf, tuple(context._peer_certificate_chain))
        except Alert as exc:
            raise refuse(exc) from None

    context._request_client_certificate = True
    # Methods of this one object: the library has no hook, and makes the context itself.
    context._server_handle_certificate = certificate  # type: ignore[method-assign]
    context._server_handle_certificate_verify = verify  # type: ignore[method-assign]

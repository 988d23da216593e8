"""Stateless resets: telling a peer that its connection is not known here (RFC 9000 §10.3).

A server that was killed and started again on its port has forgotten its connections. Its clients
would wait for their idle time-out; a reset tells them with the next packet that they send.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from kvcs.observe import get_logger
from kvcs.quic.aioquic_backend.certificates import ServerKey
from kvcs.quic.aioquic_backend.ports import Address

log = get_logger("kvcs.quic")

TOKEN_OCTETS: Final = 16
"""Octets of a token, which ends a reset (RFC 9000 §10.3)."""

SHORTEST_RESET: Final = 21
"""Octets of a reset, at least: a shorter datagram cannot be a packet (RFC 9000 §10.3)."""

LONGEST_RESET: Final = 43
"""Octets of a reset, at most: nothing shows in more of them (RFC 9000 §10.3)."""

FORM: Final = 0xC0
SHORT_PACKET: Final = 0x40
"""Bits of the first octet, and what they are in a packet of a connection (RFC 9000 §17.3.1)."""

LABEL: Final = b"kvcs stateless reset"
"""Sets the secret apart from whatever else is made of a private key."""


def reset_secret(key: ServerKey, address: Address) -> bytes:
    """The secret behind a listener's tokens: the same after a restart, and nowhere else.

    It is made of the certificate's private key, so that there is no further secret to keep: who has
    that key can be the server anyhow, and neither the secret nor a token tells anything of it (HKDF
    and HMAC are one-way). The names of the machine and of the address go in: servers that share
    a certificate must not tell the tokens of each other's connections (RFC 9000 §21.11).

    Args:
        key: the certificate's private key.
        address: where the listener is bound.

    Returns:
        32 octets.
    """
    encoded = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    place = f"{socket.gethostname()}\0{address[0]}\0{address[1]}".encode()
    info = LABEL + b"\0" + place
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(encoded)


class StatelessResets:
    """Makes the tokens of a listener's connection IDs, and resets for those that are not known.

    Each reset is shorter than the packet that it answers, so that two endpoints that know nothing
    of each other fall silent (RFC 9000 §10.3.3), and nobody is sent more than was spent on it.

    Args:
        secret: from `reset_secret`.
        per_second: resets in a second, at most; also how many may go out at once.
    """

    def __init__(self, secret: bytes, per_second: int) -> None:
        self._secret = secret
        self._per_second = per_second
        self._left = float(per_second)
        self._at = 0.0
        self.sent = 0
        """Resets that were made."""
        self.left_out = 0
        """Packets that got none since there were too many."""

    def token(self, connection_id: bytes) -> bytes:
        """The token of a connection ID, 16 octets."""
        return hmac.digest(self._secret, connection_id, hashlib.sha256)[:TOKEN_OCTETS]

    def answer(self, data: bytes, connection_id: bytes, now: float) -> bytes | None:
        """The reset that answers a packet.

        Args:
            data: the packet; its connection ID must be that of no connection that is known.
            connection_id: the one that it is addressed to.
            now: seconds, monotonic.

        Returns:
            The datagram; None where the packet is of a handshake or too short to be answered, or
            where too many came.
        """
        size = min(len(data) - 1, LONGEST_RESET)
        if size < SHORTEST_RESET or data[0] & FORM != SHORT_PACKET:
            return None
        self._left = min(self._per_second, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            self.left_out += 1
            return None
        self._left -= 1
        self.sent += 1
        if self.sent & (self.sent - 1) == 0:  # a flood must not fill the log
            log.info("stateless_resets_sent", count=self.sent, left_out=self.left_out)
        # It looks like any other packet of a connection.
        noise = bytearray(os.urandom(size - TOKEN_OCTETS))
        noise[0] = noise[0] & ~FORM | SHORT_PACKET
        return bytes(noise) + self.token(connection_id)

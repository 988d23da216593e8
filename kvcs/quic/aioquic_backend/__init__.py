"""QUIC over aioquic: the only room that imports it.

transport = await connect_quic("relay.example", 4433, receiver_factory=..., ca="ca.pem")
listener = await listen_quic("127.0.0.1", 4433, receiver_factory=..., cert=..., key=...)
"""

from __future__ import annotations

import logging

from kvcs.quic.aioquic_backend.client import connect_quic
from kvcs.quic.aioquic_backend.driver import Negotiated
from kvcs.quic.aioquic_backend.server import AioquicListener, listen_quic
from kvcs.quic.aioquic_backend.settings import (
    LARGEST_DATAGRAM,
    SMALLEST_DATAGRAM,
    QuicSettings,
)
from kvcs.quic.aioquic_backend.transport import AioquicTransport

__all__ = [
    "LARGEST_DATAGRAM",
    "SMALLEST_DATAGRAM",
    "AioquicListener",
    "AioquicTransport",
    "Negotiated",
    "QuicSettings",
    "connect_quic",
    "listen_quic",
]

# The library warns of each failed handshake, which we report as an exception. Without a handler
# the standard library would print it, and kvcs is silent unless its user configures logging.
logging.getLogger("quic").addHandler(logging.NullHandler())

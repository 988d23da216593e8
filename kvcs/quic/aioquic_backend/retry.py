"""Answers to first flights that take no state: Retry, and refusals (RFC 9000 §8.1.2, §5.2.2)."""

from __future__ import annotations

import os
from typing import Final, cast

from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicFrameType,
    QuicHeader,
    QuicPacketType,
    encode_quic_retry,
)
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.retry import QuicRetryTokenHandler

from kvcs.quic.aioquic_backend.ports import Address
from kvcs.quic.aioquic_backend.settings import SMALLEST_DATAGRAM

CONNECTION_ID_OCTETS: Final = 8
"""Length of the connection ID that a Retry gives."""


class AddressValidation:
    """Has a client prove that it receives at its address before it gets any state.

    The proof is a token, which the client's next first flight brings back: it is sealed with a key
    of this process, and holds for one address, one connection ID and half a minute.
    """

    def __init__(self) -> None:
        self._tokens = QuicRetryTokenHandler()

    def retry(self, header: QuicHeader, address: Address, now: float) -> bytes:
        """The Retry packet for a first flight that brings no token."""
        source = os.urandom(CONNECTION_ID_OCTETS)
        token = self._tokens.create_token(
            address=address,
            original_destination_connection_id=header.destination_cid,
            retry_source_connection_id=source,
            now=now,
        )
        return encode_quic_retry(
            version=cast(int, header.version),
            source_cid=source,
            destination_cid=header.source_cid,
            original_destination_cid=header.destination_cid,
            retry_token=token,
        )

    def original_connection_id(
        self, header: QuicHeader, address: Address, now: float
    ) -> bytes | None:
        """The connection ID that the client chose at first; None where its token is not good."""
        try:
            return self._tokens.validate_token(
                address=address, destination_cid=header.destination_cid, token=header.token, now=now
            )
        except ValueError:
            return None


def refusal(header: QuicHeader, code: QuicErrorCode, reason: str) -> bytes:
    """A datagram that tells a client at once that it is not taken."""
    version = cast(int, header.version)
    crypto = CryptoPair()
    crypto.setup_initial(cid=header.destination_cid, is_client=False, version=version)
    builder = QuicPacketBuilder(
        host_cid=header.destination_cid,
        peer_cid=header.source_cid,
        version=version,
        is_client=False,
        max_datagram_size=SMALLEST_DATAGRAM,
    )
    builder.start_packet(QuicPacketType.INITIAL, crypto)
    words = reason.encode()
    frame = builder.start_frame(QuicFrameType.TRANSPORT_CLOSE, capacity=16 + len(words))
    frame.push_uint_var(code)
    frame.push_uint_var(QuicFrameType.PADDING)
    frame.push_uint_var(len(words))
    frame.push_bytes(words)
    [datagram] = builder.flush()[0]
    return datagram

"""Packets of a client with a payload of a test's choice, handed to a server that is ready."""

from __future__ import annotations

from aioquic.tls import Epoch

from kvcs.quic.aioquic_backend.private.flights import Flight
from tests.unit.quic.pair import CLIENT, Pair, hand_over

FIRST = 6
"""The first stream of Objects of a client: 2 is for control."""


def flight_of(pair: Pair, payload: bytes, first: int = 0) -> bytes:
    """One datagram of the client's with a payload of our choice."""
    quic = pair.client.quic
    flight = Flight(quic._cryptos[Epoch.ONE_RTT], quic._peer_cid.cid, False, quic._packet_number)
    flight._first |= first
    flight._plain_head = bytes((flight._first,)) + flight.peer_cid
    flight.seal([payload])
    quic._packet_number += 1
    return flight.datagrams()[0]


def give(pair: Pair, *datagrams: bytes) -> None:
    """Hand datagrams to the server as if the client had sent them."""
    now = pair.clock.time()
    hand_over(pair.server.transport, list(datagrams), CLIENT, now)
    pair.server.transport.batch_ended(now)


def piece(stream_id: int, offset: int, data: bytes, fin: bool = False) -> bytes:
    """A STREAM frame that ends its packet."""
    head = bytes((0x0C | fin, 0x80)) + stream_id.to_bytes(3, "big")
    return head + (offset | 0x80000000).to_bytes(4, "big") + data


def ready() -> Pair:
    """A pair whose server reads the short way and knows one stream."""
    pair = Pair()
    give(pair, flight_of(pair, piece(FIRST, 0, b"first")))
    give(pair, flight_of(pair, piece(FIRST, 5, b"second" * 10)))
    assert pair.server.quic._reading is not None
    assert pair.server.receiver.data[FIRST] == b"first" + b"second" * 10
    return pair

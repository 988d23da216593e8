"""Keys are updated before they have sealed too many packets, and nothing is lost over it."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest
from aioquic.tls import Epoch

from kvcs.quic.aioquic_backend.private import outgoing
from tests.unit.quic.packets import FIRST, flight_of, give, piece, ready
from tests.unit.quic.pair import CLIENT, Pair, Side


def watched(side: Side) -> list[int]:
    """Numbers of the first packets that a side may seal under each key, as they are known."""
    begun: list[int] = []
    build = side.quic.datagrams_to_send

    def building(now: float) -> list[tuple[bytes, Any]]:
        datagrams = build(now)
        if not begun or begun[-1] != side.quic._key_begun:
            begun.append(side.quic._key_begun)
        return datagrams

    side.quic.datagrams_to_send = building  # type: ignore[method-assign]
    return begun


def the_same_both_ways(pair: Pair) -> bool:
    """Whether each side opens with what the other one seals with."""
    client, server = (side.quic._cryptos[Epoch.ONE_RTT] for side in (pair.client, pair.server))
    return client.send.secret == server.recv.secret and client.recv.secret == server.send.secret


@pytest.mark.parametrize("apart", [True, False], ids=["short", "long"])
def test_keys_are_updated_again_and_again_in_one_transfer(
    monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    monkeypatch.setattr(outgoing, "KEY_PACKETS", 200)
    pair = Pair()
    client, server = pair.client, pair.server
    if not apart:
        client.quic._objects_go_apart = lambda: False  # type: ignore[method-assign]
    begun = watched(client)
    content = os.urandom(3 << 20)
    client.transport.send(2, b"control", False)
    left = memoryview(content)

    def go_on() -> None:
        nonlocal left
        while left and (room := client.transport.stream_octets(FIRST)):
            client.transport.send(FIRST, left[:room], room >= len(left))
            left = left[room:]

    client.receiver.on_batch = go_on
    go_on()
    client.transport.flush()
    pair.clock.run_until(lambda: FIRST in server.receiver.finished)
    assert server.receiver.data[FIRST] == content
    assert len(begun) >= 5, "several updates in one transfer"
    assert all(later - earlier >= 200 for earlier, later in pairwise(begun[1:]))
    assert client.quic.packets_lost == 0, "the path loses nothing"
    pair.clock.run_until(lambda: client.transport.unacknowledged() == 0)
    pair.clock.run_for(0.5)
    assert the_same_both_ways(pair)
    # And the short way is in use again, at both ends.
    theirs: list[bytes] = []
    leave = server.quic._leave

    def leaving(data: bytes, addr: Any, now: float) -> None:
        theirs.append(data)
        leave(data, addr, now)

    server.quic._leave = leaving  # type: ignore[method-assign]
    client.transport.send(FIRST + 4, bytes(20_000), True)
    client.transport.flush()
    pair.clock.run_until(lambda: FIRST + 4 in server.receiver.finished)
    assert len(theirs) <= 1, "the first packet after a change, at most, is the library's"
    assert client.quic._objects_go_apart() == apart


def both_ways(pair: Pair, octets: int) -> tuple[bytes, bytes]:
    """Have each side send so much on its first stream of Objects; returns what."""
    contents = os.urandom(octets), os.urandom(octets)
    for side, control, content in zip((pair.client, pair.server), (2, 3), contents, strict=True):
        side.transport.send(control, b"control", False)
        side.transport.send(control + 4, content, True)
        side.transport.flush()
    return contents


@pytest.mark.parametrize("by", ["client", "server"])
def test_what_was_on_the_way_when_keys_were_updated_is_read(by: str) -> None:
    pair = Pair()
    client, server = pair.client, pair.server
    contents = both_ways(pair, 300_000)
    pair.clock.run_until(lambda: min(client.receiver.octets, server.receiver.octets) > 100_000)
    updater: Side = getattr(pair, by)
    phase = updater.quic._cryptos[Epoch.ONE_RTT].recv.key_phase
    updater.quic.request_key_update()
    pair.clock.run_until(
        lambda: FIRST in server.receiver.finished and FIRST + 1 in client.receiver.finished
    )
    assert (server.receiver.data[FIRST], client.receiver.data[FIRST + 1]) == contents
    assert client.quic.packets_lost == server.quic.packets_lost == 0
    assert updater.quic._cryptos[Epoch.ONE_RTT].recv.key_phase != phase
    assert the_same_both_ways(pair)


def kept_back(pair: Pair) -> tuple[bytes, int]:
    """A datagram of the client's that it sealed before it updates the keys, and its number."""
    number = pair.client.quic._packet_number
    return flight_of(pair, piece(FIRST, 65, b"old" * 20)), number


def updated(pair: Pair) -> None:
    """Have the client update the keys, and the server hear of it."""
    pair.client.quic.request_key_update()
    pair.client.transport.send(2, b"control", False)
    pair.client.transport.flush()
    pair.clock.run_until(lambda: 2 in pair.server.receiver.data)
    assert pair.server.quic._last_keys is not None


def test_an_old_packet_is_read_once_and_not_for_ever() -> None:
    pair = ready()
    early, late = kept_back(pair)[0], flight_of(pair, piece(FIRST, 125, b"older" * 20))
    updated(pair)
    give(pair, early, early)
    give(pair, early)
    assert pair.server.receiver.data[FIRST][65:] == b"old" * 20
    pair.clock.run_for(5.0)
    give(pair, late)
    assert len(pair.server.receiver.data[FIRST]) == 125, "its keys were forgotten"
    assert pair.server.quic.close_event is None


def test_old_keys_open_nothing_that_is_newer_than_the_update() -> None:
    pair = ready()
    quic = pair.client.quic
    quic._packet_number += 50
    datagram, number = kept_back(pair)
    quic._packet_number = number - 50
    updated(pair)
    assert quic._packet_number < number
    give(pair, datagram)
    assert len(pair.server.receiver.data[FIRST]) == 65
    assert pair.server.quic.close_event is None
    assert number not in pair.server.quic._spaces[Epoch.ONE_RTT].received_packets


def test_the_next_keys_are_taken_where_the_last_ones_are_still_kept() -> None:
    """Also where the first packet under the keys in use was read by the library."""
    pair = ready()
    client, server = pair.client, pair.server
    server.transport.send(3, b"control", False)
    server.quic.request_key_update()
    server.transport.flush()
    give(pair, flight_of(pair, piece(FIRST, 65, b"old" * 20)))
    last = server.quic._last_keys
    assert last is not None
    assert server.receiver.data[FIRST][65:] == b"old" * 20
    pair.clock.run_until(lambda: 3 in client.receiver.data)
    server.quic.receive_datagram(
        flight_of(pair, piece(FIRST, 125, b"new" * 20)), CLIENT, pair.clock.time()
    )
    assert last.begun > client.quic._packet_number, "nobody has noted it"
    client.quic.request_key_update()
    client.transport.send(2, b"control", False)
    client.transport.flush()
    pair.clock.run_until(lambda: 2 in server.receiver.data)
    assert the_same_both_ways(pair)
    assert server.receiver.data[FIRST][125:] == b"new" * 20

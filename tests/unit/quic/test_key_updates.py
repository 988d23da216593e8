"""Keys are updated before they have sealed too many packets, and nothing is lost over it."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest
from aioquic.tls import Epoch

from kvcs.quic.aioquic_backend.private import outgoing
from tests.unit.quic.pair import Pair, Side

FIRST = 6
"""The first stream of Objects of a client: 2 is for control."""


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
    content = os.urandom(2 << 20)
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
    assert len(begun) >= 6, "several updates in one transfer"
    assert all(later - earlier >= 200 for earlier, later in pairwise(begun[1:]))
    assert client.quic.packets_lost == 0, "the path loses nothing"
    pair.clock.run_until(lambda: client.transport.unacknowledged() == 0)
    pair.clock.run_for(0.5)
    assert the_same_both_ways(pair)
    # And the short way is in use again, at both ends.
    assert client.quic._objects_go_apart() == apart
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

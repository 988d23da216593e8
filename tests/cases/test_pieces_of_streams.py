"""One send is not one receive: streams mean the same however the network cuts them."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from kvcs.moqt import messages as m
from kvcs.moqt.events import RequestAccepted
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.settings import Role
from kvcs.moqt.streams import SubgroupHeader
from kvcs.testing.bench import Bench
from kvcs.testing.tracks import NAME, fetch_stream, joined, locations, subgroup_stream

NONE, BARE = Parameters(), KeyValues()
KIB = 1024
MIB = 1024 * KIB


def subscribed() -> Bench:
    """A core with a subscription, accepted under alias 9."""
    bench = Bench(Role.CLIENT)
    bench.core.requester.subscribe(NAME, NONE)
    bench.drain()
    bench.say(0, m.SubscribeOk(9, NONE, BARE))
    assert bench.take(RequestAccepted)
    return bench


def fetching() -> Bench:
    """A core with a FETCH, accepted."""
    bench = Bench(Role.CLIENT)
    bench.core.requester.fetch(NAME, NONE)
    bench.drain()
    bench.say(0, m.FetchOk(False, Location(9, 9), NONE, BARE), fin=True)
    assert bench.take(RequestAccepted)
    return bench


SUBGROUP = subgroup_stream(SubgroupHeader(9, 0, 0, 0), 0, 1, 2, octets=40)
FETCHED = fetch_stream(0, *(Location(group, 0) for group in range(3)), octets=40)

KINDS = pytest.mark.parametrize(
    ("make", "octets", "found"),
    [
        pytest.param(subscribed, SUBGROUP, [(0, 0), (0, 1), (0, 2)], id="subgroup"),
        pytest.param(fetching, FETCHED, [(0, 0), (1, 0), (2, 0)], id="fetch"),
    ],
)


def received(make: Callable[[], Bench], *pieces: bytes) -> Bench:
    """What a core makes of a stream that comes in these pieces."""
    bench = make()
    stream_id = bench.uni(pieces[0], fin=len(pieces) == 1)
    for index, piece in enumerate(pieces[1:], 2):
        bench.data(stream_id, piece, fin=index == len(pieces))
    assert bench.close is None
    return bench


@KINDS
def test_every_cut_gives_the_same_objects(
    make: Callable[[], Bench], octets: bytes, found: list[tuple[int, int]]
) -> None:
    whole = received(make, octets)
    assert locations(whole.events) == found
    expected = joined(whole.events)
    for cut in range(1, len(octets) + 1):
        assert joined(received(make, octets[:cut], octets[cut:]).events) == expected, cut
    single = [octets[index : index + 1] for index in range(len(octets))]
    assert joined(received(make, *single).events) == expected


@KINDS
def test_two_objects_in_one_piece_are_two(
    make: Callable[[], Bench], octets: bytes, found: list[tuple[int, int]]
) -> None:
    cut = len(octets) - 60  # the second object ends and the third begins in the last piece
    bench = received(make, octets[:cut], octets[cut:])
    assert locations(bench.events) == found


def cost(make: Callable[[], Bench], octets: bytes) -> tuple[int, int]:
    """Calls that Python makes, and the most octets that it keeps, for a stream in small pieces."""
    pieces = [octets[start : start + 1200] for start in range(0, len(octets), 1200)]
    bench = make()
    stream_id = bench.uni(pieces[0])
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    tracemalloc.start()
    sys.setprofile(count)
    try:
        for piece in pieces[1:]:
            bench.data(stream_id, piece)
            bench.events.clear()  # a session's user takes them as they come
    finally:
        sys.setprofile(before)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return calls, most


@pytest.mark.parametrize("kind", ["subgroup", "fetch"])
def test_the_cost_of_a_large_object_is_linear(kind: str) -> None:
    def stream(octets: int) -> bytes:
        if kind == "subgroup":
            return subgroup_stream(SubgroupHeader(9, 0, 0, 0), 0, octets=octets)
        return fetch_stream(0, Location(0, 0), octets=octets)

    make = subscribed if kind == "subgroup" else fetching
    (few, small), (many, large) = cost(make, stream(100 * KIB)), cost(make, stream(MIB))
    assert many < 11 * few, "calls grow as the octets do"
    assert large < small + 64 * KIB, "a payload is not gathered"

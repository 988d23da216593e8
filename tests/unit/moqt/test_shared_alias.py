"""Two subscriptions to one Track that share a Track Alias: each gets its own streams (MOQT §3.1.3).

The publisher sends an Object once for each subscription that wants it, and the streams look alike.
"""

from __future__ import annotations

from kvcs.moqt import messages as m
from kvcs.moqt.datagrams import ObjectDatagram
from kvcs.moqt.events import DatagramReceived
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.settings import Role
from kvcs.moqt.streams import SubgroupHeader
from kvcs.testing.bench import Bench
from kvcs.testing.tracks import NAME, locations, subgroup_stream

ALIAS = 9


def two(*filters: LocationFilter) -> tuple[Bench, list[int]]:
    """A session with a subscription for each filter; all have one alias."""
    bench = Bench(Role.CLIENT)
    requests = []
    for number, chosen in enumerate(filters):
        asked = Parameters.of(location_filter=chosen)
        requests.append(bench.core.requester.subscribe(NAME, asked))
        bench.drain()
        known = Parameters.of(largest_object=Location(4, 9))
        bench.say(4 * number, m.SubscribeOk(ALIAS, known, KeyValues()))
    return bench, requests


def group(number: int) -> bytes:
    return subgroup_stream(SubgroupHeader(ALIAS, number, 0, 0), 0, 1)


def test_each_gets_one_of_two_streams_that_look_alike() -> None:
    bench, requests = two(LocationFilter.none(), LocationFilter.none())
    for number in (5, 6):
        for _ in requests:
            bench.uni(group(number), fin=True)
    for request_id in requests:
        assert locations(bench.events, request_id) == [
            Location(number, object_id) for number in (5, 6) for object_id in (0, 1)
        ]


def test_a_stream_goes_to_the_one_whose_filter_wants_it() -> None:
    bench, requests = two(LocationFilter.absolute_start(8, 0), LocationFilter.group_end(5, 0, 6))
    for number in (5, 6, 8):
        bench.uni(group(number), fin=True)
    assert {at.group for at in locations(bench.events, requests[0])} == {8}
    assert {at.group for at in locations(bench.events, requests[1])} == {5, 6}


def test_relative_filters_count_from_what_the_reply_named() -> None:
    bench, requests = two(LocationFilter.relative_start(0), LocationFilter.group_end(4, 0, 4))
    bench.uni(group(4), fin=True)
    bench.uni(group(5), fin=True)
    assert {at.group for at in locations(bench.events, requests[0])} == {5}
    assert {at.group for at in locations(bench.events, requests[1])} == {4}


def test_after_an_update_of_its_filter_it_may_have_any_group() -> None:
    bench, requests = two(LocationFilter.absolute_start(8, 0), LocationFilter.group_end(6, 0, 6))
    everything = Parameters.of(location_filter=LocationFilter.none())
    bench.core.requester.update(requests[0], everything)
    bench.drain()
    bench.uni(group(5), fin=True)
    assert {at.group for at in locations(bench.events, requests[0])} == {5}


def test_datagrams_are_shared_out_too() -> None:
    bench, requests = two(LocationFilter.none(), LocationFilter.absolute_start(5, 2))
    for object_id in (1, 2, 2):
        bench.datagram(ObjectDatagram(ALIAS, 5, object_id, 0, b"x").encode())
    got = [(event.request_id, event.datagram.object_id) for event in bench.take(DatagramReceived)]
    assert got == [(requests[0], 1), (requests[0], 2), (requests[1], 2)]


def test_when_one_is_cancelled_the_other_gets_all_that_follows() -> None:
    bench, requests = two(LocationFilter.none(), LocationFilter.none())
    bench.core.requester.cancel(requests[0])
    bench.drain()
    bench.uni(group(5), fin=True)
    assert len(locations(bench.events, requests[1])) == 2


def test_what_is_remembered_to_share_is_bounded() -> None:
    from kvcs.moqt.incoming import expected

    bench, requests = two(LocationFilter.none(), LocationFilter.none())
    for number in range(expected.MAX_SHARED_PLACES + 10):
        bench.datagram(ObjectDatagram(ALIAS, 5, number, 0, b"x").encode())
    (bound,) = bench.core.data_streams._aliases.values()
    assert max(len(one.places) for one in bound) <= expected.MAX_SHARED_PLACES
    assert requests

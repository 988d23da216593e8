"""What data streams and datagrams bring, and what makes their Track malformed (MOQT §11, §12.1)."""

from __future__ import annotations

import pytest

from kvcs.moqt import messages as m
from kvcs.moqt.datagrams import ObjectDatagram
from kvcs.moqt.errors import SessionCode, StreamCode
from kvcs.moqt.events import (
    DatagramReceived,
    DataStreamEnded,
    ObjectStarted,
    SubscriptionEnded,
    TrackMalformed,
)
from kvcs.moqt.filters import RangeFilter
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.settings import Role
from kvcs.moqt.streams import FetchHeader, SubgroupHeader
from kvcs.moqt.track.store import Track
from kvcs.testing.bench import Bench
from kvcs.testing.residue import residue
from kvcs.testing.tracks import (
    NAME,
    locations,
    subgroup_stream,
)
from tests.unit.moqt.subscriptions import (
    BARE,
    END_OF_GROUP,
    NONE,
    OK,
    OTHER,
    served,
    status,
    stream_of,
    subscriber,
    update,
)

# Statuses and malformed data


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_an_undefined_status_closes(cut: int) -> None:
    bench = subscriber()
    octets = stream_of(0, 0, 1)[: len(stream_of(0, 0, 1))] + bytes.fromhex("000007")
    stream = bench.uni(octets[: len(octets) - cut])
    bench.data(stream, octets[len(octets) - cut :])
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_properties_on_a_status_close() -> None:
    bench = subscriber()
    header = SubgroupHeader(9, 0, 0, 0, has_properties=True)
    bench.uni(header.encode() + bytes.fromhex("00 02 7805 00 03"))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_statuses_are_reported_as_objects() -> None:
    bench = subscriber()
    end = status(1, 0, ObjectStatus.END_OF_TRACK)
    bench.uni(stream_of(0, 0, status(0, 1), end_of_group=True), fin=True)
    bench.uni(stream_of(1, end), fin=True)
    seen = [event.header.status for event in bench.take(ObjectStarted)]
    assert seen == [ObjectStatus.NORMAL, END_OF_GROUP, ObjectStatus.END_OF_TRACK]


@pytest.mark.parametrize(
    "streams",
    [
        pytest.param([stream_of(0, 0, status(0, 1), 2)], id="behind end of group"),
        pytest.param([stream_of(0, 0, status(0, 1)), stream_of(0, 5)], id="on another stream"),
        pytest.param([stream_of(0, 0, end_of_group=True), stream_of(0, 1)], id="behind the bit"),
        pytest.param([stream_of(0, 0), stream_of(0, 1)], id="behind the fin of its subgroup"),
        pytest.param([stream_of(0, 0, 1), stream_of(0, 0)], id="before the fin of its subgroup"),
        pytest.param([stream_of(0, 0, 2), stream_of(0, 1, end_of_group=True)], id="short bit"),
        pytest.param(
            [stream_of(1, status(1, 0, ObjectStatus.END_OF_TRACK)), stream_of(2, 0)],
            id="behind end of track",
        ),
        pytest.param(
            [subgroup_stream(SubgroupHeader(9, 0, 0, p), p) for p in (0, 1)],
            id="two priorities of a subgroup",
        ),
        pytest.param(
            [
                subgroup_stream(
                    SubgroupHeader(9, 0, 0, 0, has_properties=True),
                    ObjectHeader(0, 0, 0, 0, properties=KeyValues.of({0x4000: 1}).write()),
                )
            ],
            id="mandatory track property on an object",
        ),
    ],
)
def test_a_malformed_track_cancels_all_that_was_asked_of_it(streams: list[bytes]) -> None:
    bench = subscriber()
    fetch = bench.core.requester.fetch(NAME, NONE)
    other = bench.core.requester.subscribe(OTHER, NONE)
    bench.drain()
    bench.say(8, m.SubscribeOk(10, NONE, BARE))
    for octets in streams:
        bench.uni(octets, fin=True)
    assert [event.request_id for event in bench.take(TrackMalformed)] == [0, fetch]
    assert bench.stops.keys() >= {0, 4}
    assert bench.stops[0] == StreamCode.MALFORMED_TRACK
    assert bench.close is None
    assert [request.request_id for request in bench.core.requests.all()] == [other]


def test_a_malformed_track_stops_its_other_streams() -> None:
    bench = subscriber()
    open_stream = bench.uni(stream_of(3, 0))
    bench.uni(stream_of(0, 0, status(0, 1), 2))
    assert bench.stops[open_stream] == StreamCode.MALFORMED_TRACK


def test_early_streams_of_a_track_that_proves_malformed_are_not_read_on() -> None:
    bench = subscriber(None)
    bench.uni(stream_of(0, 0, status(0, 1), 2), fin=True)
    late = bench.uni(stream_of(1, 0))
    bench.say(0, OK)
    assert len(bench.take(TrackMalformed)) == 1
    assert locations(bench.events) == [(0, 0)]
    bench.advance(2.0)
    assert bench.stops[late] == StreamCode.CANCELLED


def test_a_default_priority_agrees_with_its_number_after_the_reply() -> None:
    bench = subscriber(
        m.SubscribeOk(9, NONE, KeyValues.of({Property.DEFAULT_PUBLISHER_PRIORITY: 5}))
    )
    bench.uni(subgroup_stream(SubgroupHeader(9, 0, 0, None), 0))
    bench.uni(subgroup_stream(SubgroupHeader(9, 0, 0, 5), 1))
    assert bench.take(TrackMalformed) == []
    bench.uni(subgroup_stream(SubgroupHeader(9, 0, 0, 6), 2))
    assert len(bench.take(TrackMalformed)) == 1


def test_hidden_properties_leave_the_default_priority_open() -> None:
    bench = subscriber(OK, Parameters.of(include_properties=0))
    bench.uni(subgroup_stream(SubgroupHeader(9, 0, 0, None), 0))
    bench.uni(subgroup_stream(SubgroupHeader(9, 0, 0, 5), 1))
    assert bench.take(TrackMalformed) == []


def test_filtered_streams_of_one_subgroup_may_end_in_different_places() -> None:
    bench = Bench(Role.CLIENT, options=KeyValues.of({0x06: 9}))
    for last in (5, 2):
        filters = Parameters.of(objectid_filter=[RangeFilter(0, ((0, last),))])
        bench.core.requester.subscribe(NAME, filters)
    bench.drain()
    for number, last in enumerate((5, 2)):
        bench.say(4 * number, m.SubscribeOk(9 + number, NONE, BARE))
        header = SubgroupHeader(9 + number, 0, 0, 0, end_of_group=True)
        bench.uni(subgroup_stream(header, last), fin=True)
    assert bench.take(TrackMalformed) == []
    assert len(bench.take(DataStreamEnded)) == 2


def test_fin_inside_an_object_closes_and_a_reset_does_not() -> None:
    bench = subscriber()
    octets = stream_of(0, 0)
    stream = bench.uni(octets[:-1])
    bench.reset(stream, 0x2)
    assert bench.take(DataStreamEnded) == [DataStreamEnded(0, stream, 0x2)]
    bench.uni(octets[:-1], fin=True)
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_a_subgroup_named_by_its_first_object_may_stay_empty() -> None:
    bench = subscriber()
    bench.uni(SubgroupHeader(9, 0, None, 0).encode(), fin=True)
    bench.uni(subgroup_stream(SubgroupHeader(9, 0, None, 0), ObjectHeader(0, 4, None, 0)), fin=True)
    assert bench.take(ObjectStarted)[0].header.subgroup_id == 4
    assert len(bench.take(DataStreamEnded)) == 2


# Datagrams


def datagrams(source: Track, *object_ids: int) -> None:
    for object_id in object_ids:
        header = ObjectHeader(0, object_id, None, 3, payload_length=4)
        source.take_datagram(header, b"data", 0.0)


def test_datagrams_pass_filters_and_need_no_stream() -> None:
    filters = Parameters.of(objectid_filter=[RangeFilter(0, ((0, 2),))])
    pair, source, _ = served(filters)
    pair.server.credit.unidirectional = 0
    datagrams(source, 0, 2, 5)
    pair.run()
    got = [event.datagram for event in pair.client.of(DatagramReceived)]
    assert got == [ObjectDatagram(0, 0, object_id, 3, b"data") for object_id in (0, 2)]


def test_datagrams_that_wait_are_dropped_with_the_subscription_or_by_a_pause() -> None:
    pair, source, request_id = served()
    pair.server.credit.object_octets = 0
    datagrams(source, 0)
    pair.run()
    update(pair, request_id, forward=0)
    update(pair, request_id, forward=1, subscriber_priority=3)
    datagrams(source, 1)
    pair.client.core.requester.cancel(request_id)
    pair.run()
    pair.server.credit.object_octets = 1 << 40
    pair.run()
    assert pair.client.of(DatagramReceived) == []
    assert residue(pair.server.core, source) == {}


def test_publish_done_waits_for_datagrams() -> None:
    pair, source, _ = served()
    pair.server.credit.object_octets = 0
    datagrams(source, 0)
    source.end()
    pair.advance(5.0)
    assert pair.client.of(SubscriptionEnded) == []
    pair.server.credit.object_octets = 1 << 40
    pair.run()
    pair.advance(1.0)
    kinds = [type(event) for event in pair.client.events]
    assert kinds.index(DatagramReceived) < kinds.index(SubscriptionEnded)


def test_a_malformed_datagram_ends_the_subscription() -> None:
    bench = subscriber()
    bench.uni(stream_of(0, status(0, 1)))
    bench.datagram(ObjectDatagram(9, 0, 5, 0, b"x").encode())
    assert bench.take(DatagramReceived) == []
    assert len(bench.take(TrackMalformed)) == 1
    assert bench.close is None


@pytest.mark.parametrize("fin", [True, False])
def test_a_stream_that_is_stopped_is_read_over_until_it_ends(fin: bool) -> None:
    bench = subscriber()
    octets = stream_of(0, 0, 1)
    stream = bench.uni(octets[:-1])
    for code in (StreamCode.EXCESSIVE_LOAD, StreamCode.CANCELLED):
        bench.core.requester.stop_stream(stream, code)
        bench.drain()
    assert bench.stops == {stream: StreamCode.EXCESSIVE_LOAD}
    bench.events.clear()
    bench.data(stream, octets[-1:] + bytes.fromhex("000007"))  # read, this would end the session
    assert bench.events == [] and bench.close is None
    if fin:
        bench.data(stream, b"\x00", fin=True)
    else:
        bench.reset(stream, StreamCode.EXCESSIVE_LOAD)
    ended = bench.take(DataStreamEnded)
    assert [event.reset_code for event in ended] == [None if fin else StreamCode.EXCESSIVE_LOAD]
    bench.uni(stream_of(1, 0))
    assert locations(bench.events) == [(1, 0)], "the subscription goes on"


def test_a_stream_that_is_whole_is_not_stopped() -> None:
    bench = subscriber()
    stream = bench.uni(stream_of(0, 0, 1), fin=True)
    bench.core.requester.stop_stream(stream)
    bench.drain()
    assert bench.stops == {} and len(bench.take(DataStreamEnded)) == 1


@pytest.mark.parametrize("fin", [True, False])
def test_a_stream_of_a_fetch_that_is_gone_is_given_up_once_however_it_was_cut(fin: bool) -> None:
    bench = Bench(Role.CLIENT)
    octets = FetchHeader(6).encode()
    stream = bench.uni(octets[:1])
    bench.data(stream, octets[1:] + b"more", fin=fin)
    bench.advance(5.0)
    assert bench.close is None
    assert bench.stops == ({} if fin else {stream: 0x1})
    if not fin:
        bench.reset(stream)
    assert residue(bench.core) == {}


def test_a_whole_stream_of_a_fetch_that_is_gone_is_not_held() -> None:
    bench = Bench(Role.CLIENT)
    bench.uni(FetchHeader(6).encode() + bytes(1200), fin=True)
    assert bench.close is None
    assert residue(bench.core) == {}

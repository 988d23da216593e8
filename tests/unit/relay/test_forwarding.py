"""What becomes of upstream streams on the way downstream (MOQT §7, §11)."""

from __future__ import annotations

import pytest

from kvcs.moqt import events
from kvcs.moqt.data import SubgroupEncoder, SubgroupHeader
from kvcs.moqt.datagrams import ObjectDatagram
from kvcs.moqt.errors import PublishDoneCode, RequestCode, StreamCode
from kvcs.moqt.events import DataStreamOpened
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.sending.publishing import location_filter
from kvcs.moqt.track.stored import FIRST_PART_OCTETS, OBJECT_BOOKKEEPING_OCTETS
from kvcs.relay.cache import TRACK_OCTETS
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import payload, put, put_group, track


class RawPublisher:
    """A publisher whose subgroup streams a test writes octet by octet."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.peer = PublisherPeer(hub)
        self.peer.track()
        self._next_stream = 1002

    def open(self, header: SubgroupHeader) -> RawStream:
        """A subgroup stream with this header."""
        self._next_stream += 4
        return RawStream(self, self._next_stream, header)

    def stream(
        self, group: int = 0, subgroup: int = 0, priority: int = 9, **bits: bool
    ) -> RawStream:
        """A subgroup stream of the first alias."""
        return self.open(SubgroupHeader(0, group, subgroup, priority, **bits))


class RawStream:
    """One subgroup stream towards the relay."""

    def __init__(self, publisher: RawPublisher, stream_id: int, header: SubgroupHeader) -> None:
        self.publisher = publisher
        self.stream_id = stream_id
        self.encoder = SubgroupEncoder(header)
        self.header = header
        self.write(header.encode())

    def write(self, data: bytes, *, fin: bool = False) -> None:
        """Octets arrive at the relay."""
        hub, spoke = self.publisher.hub, self.publisher.peer.spoke
        spoke.relay.core.receive_stream_data(self.stream_id, data, fin, hub.now)
        spoke.relay.drain_events()
        hub.run()

    def object(
        self,
        object_id: int,
        *,
        octets: int = 8,
        sent: int | None = None,
        status: ObjectStatus = ObjectStatus.NORMAL,
        properties: bytes = b"",
        fin: bool = False,
    ) -> bytes:
        """An Object, or the first ``sent`` octets of its payload; returns the payload."""
        data = b""
        if status is ObjectStatus.NORMAL:
            data = payload(Location(self.header.group_id, object_id), octets)
        head = self.encoder.object(
            ObjectHeader(self.header.group_id, object_id, 0, None, status, properties, len(data))
        )
        self.write(head + (data if sent is None else data[:sent]), fin=fin)
        return data

    def fin(self) -> None:
        """FIN."""
        self.write(b"", fin=True)

    def reset(self, code: int) -> None:
        """RESET_STREAM."""
        hub, spoke = self.publisher.hub, self.publisher.peer.spoke
        spoke.relay.core.receive_reset(self.stream_id, code, hub.now)
        spoke.relay.drain_events()
        hub.run()


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def publisher(hub: Hub) -> RawPublisher:
    return RawPublisher(hub)


def headers(consumer: ConsumerPeer) -> list[SubgroupHeader]:
    found = (event.header for event in consumer.end.of(DataStreamOpened))
    return [header for header in found if isinstance(header, SubgroupHeader)]


def test_an_object_goes_on_before_its_last_octet_is_in(hub: Hub, publisher: RawPublisher) -> None:
    consumer = ConsumerPeer(hub)
    consumer.subscribe()
    stream = publisher.stream(first_object=True)
    data = stream.object(0, octets=1000, sent=300)
    chunks = consumer.end.of(events.ObjectChunk)
    assert b"".join(bytes(event.data) for event in chunks) == data[:300]
    assert consumer.locations() == []
    stream.write(data[300:999])
    assert consumer.locations() == []
    stream.write(data[999:])
    assert consumer.contents() == {Location(0, 0): data}


def test_a_joiner_gets_an_arriving_object_from_its_fill_as_it_comes(
    hub: Hub, publisher: RawPublisher
) -> None:
    first = ConsumerPeer(hub)
    first.subscribe()
    stream = publisher.stream(first_object=True)
    stream.object(0)
    data = stream.object(1, octets=1000, sent=400)
    second = ConsumerPeer(hub)
    request_id = second.subscribe()
    assert second.locations() == [Location(0, 0)]
    assert sum(len(event.data) for event in second.end.of(events.ObjectChunk)) == 8 + 400
    stream.write(data[400:])
    stream.object(2)
    assert second.locations(request_id) == [Location(0, i) for i in range(3)]


def test_first_object_is_copied_and_cleared_for_who_joins_in_the_middle(
    hub: Hub, publisher: RawPublisher
) -> None:
    first, second = ConsumerPeer(hub), ConsumerPeer(hub)
    first.subscribe()
    stream = publisher.stream(first_object=True, end_of_group=True)
    stream.object(0)
    second.subscribe()
    stream.object(1)
    stream.fin()
    assert [header.first_object for header in headers(first)] == [True]
    assert [header.first_object for header in headers(second)] == [False]
    assert {header.end_of_group for header in headers(first) + headers(second)} == {True}
    assert {header.publisher_priority for header in headers(first)} == {9}
    assert first.locations() == second.locations() == [Location(0, 0), Location(0, 1)]


def test_first_object_stays_clear_where_upstream_joined_in_the_middle(
    hub: Hub, publisher: RawPublisher
) -> None:
    consumer = ConsumerPeer(hub)
    consumer.subscribe()
    publisher.stream(first_object=False).object(5)
    assert [header.first_object for header in headers(consumer)] == [False]


def test_fin_and_end_of_group_object_go_on(hub: Hub, publisher: RawPublisher) -> None:
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    stream = publisher.stream(first_object=True)
    stream.object(0)
    stream.object(1, status=ObjectStatus.END_OF_GROUP, fin=True)
    statuses = [item.header.status for item in consumer.objects(request_id)]
    assert statuses == [ObjectStatus.NORMAL, ObjectStatus.END_OF_GROUP]
    assert consumer.stream_ends(request_id) == [None]


def test_properties_go_on_unchanged(hub: Hub, publisher: RawPublisher) -> None:
    consumer = ConsumerPeer(hub)
    consumer.subscribe()
    properties = KeyValues.of({0x20: 5, 0x3C01: b"opaque"}).write()
    stream = publisher.stream(first_object=True, has_properties=True)
    stream.object(0, properties=properties)
    late = ConsumerPeer(hub)
    late.subscribe()
    for peer in (consumer, late):
        assert [item.header.properties for item in peer.objects()] == [properties]


def test_a_gap_within_one_upstream_stream_stays_on_one_stream(
    hub: Hub, publisher: RawPublisher
) -> None:
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    stream = publisher.stream(first_object=True)
    stream.object(0)
    stream.object(7)
    stream.fin()
    assert consumer.locations(request_id) == [Location(0, 0), Location(0, 7)]
    assert consumer.stream_ends(request_id) == [None]


def test_the_next_object_rule_opens_a_new_stream(hub: Hub, publisher: RawPublisher) -> None:
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    broken = publisher.stream(first_object=True)
    broken.object(0)
    broken.reset(StreamCode.DELIVERY_TIMEOUT)
    again = publisher.stream(first_object=False)
    again.object(3)  # whether 1 and 2 exist is not known
    again.fin()
    assert consumer.locations(request_id) == [Location(0, 0), Location(0, 3)]
    assert consumer.stream_ends(request_id) == [StreamCode.DELIVERY_TIMEOUT, None]
    assert [header.first_object for header in headers(consumer)] == [True, False]


def test_objects_that_wait_are_parted_where_the_next_one_is_not_known(
    hub: Hub, publisher: RawPublisher
) -> None:
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    consumer.spoke.relay.credit.object_octets = 0  # nothing leaves the relay meanwhile
    broken = publisher.stream(first_object=True)
    broken.object(0)
    broken.reset(StreamCode.CANCELLED)
    again = publisher.stream(first_object=False)
    again.object(3)
    again.fin()
    assert consumer.locations(request_id) == []
    consumer.spoke.relay.credit.object_octets = 1 << 30
    consumer.spoke.relay.core.receive_credit()
    hub.run()
    assert sorted(consumer.locations(request_id)) == [Location(0, 0), Location(0, 3)]
    assert consumer.stream_ends(request_id) == [StreamCode.CANCELLED, None]


def test_a_reset_in_mid_object_is_passed_on_and_the_rest_is_fetched(
    hub: Hub, publisher: RawPublisher
) -> None:
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    stream = publisher.stream(first_object=True)
    stream.object(0)
    stream.object(1, octets=1000, sent=400)
    stream.reset(StreamCode.INTERNAL_ERROR)
    assert consumer.stream_ends(request_id) == [StreamCode.INTERNAL_ERROR]
    assert consumer.locations(request_id) == [Location(0, 0)]
    origin = track()
    put(origin, 0, 0, octets=8, priority=9)
    put(origin, 0, 1, octets=1000, priority=9)
    publisher.peer.tracks[full_name()] = origin
    late = ConsumerPeer(hub)
    fill = late.subscribe()
    # What was cut is unknown, not absent: it is fetched. Object 0 is here already.
    assert late.locations(fill) == [Location(0, 0), Location(0, 1)]
    assert [asked(event) for event in publisher.peer.fetches] == [
        LocationFilter.absolute_range(0, 1, 0, 1)
    ]


def asked(event: events.FetchReceived) -> LocationFilter | None:
    return location_filter(event.parameters)


def test_a_slow_second_publisher_completes_what_the_first_left_open(hub: Hub) -> None:
    first, second = RawPublisher(hub), RawPublisher(hub)
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    one, two = first.stream(first_object=True), second.stream(first_object=True)
    data = one.object(0, octets=1000, sent=600)
    two.object(0, octets=1000, sent=200)
    one.reset(StreamCode.INTERNAL_ERROR)
    assert consumer.stream_ends(request_id) == []
    two.write(data[200:])
    two.fin()
    assert consumer.contents(request_id) == {Location(0, 0): data}
    assert consumer.stream_ends(request_id) == [None]


def test_a_second_publisher_may_overtake_the_first(hub: Hub) -> None:
    first, second = RawPublisher(hub), RawPublisher(hub)
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    one, two = first.stream(first_object=True), second.stream(first_object=True)
    data = one.object(0, octets=1000, sent=100)
    two.object(0, octets=1000, sent=700)
    one.write(data[100:900])
    two.write(data[700:])
    one.write(data[900:])
    one.object(1)
    two.object(1)
    one.fin()
    two.fin()
    assert consumer.locations(request_id) == [Location(0, 0), Location(0, 1)]
    assert consumer.contents(request_id)[Location(0, 0)] == data
    assert consumer.stream_ends(request_id) == [None]


@pytest.mark.parametrize("late", ["payload", "priority"])
def test_a_contradiction_ends_the_track_for_everybody(hub: Hub, late: str) -> None:
    first, second = RawPublisher(hub), RawPublisher(hub)
    live, filling = ConsumerPeer(hub), ConsumerPeer(hub)
    requests = [(live, live.subscribe()), (filling, filling.subscribe())]
    first.stream(first_object=True).object(0)
    other = second.stream(first_object=True, priority=9 if late == "payload" else 10)
    octets = b"otherwise" if late == "payload" else b""
    if late == "payload":
        head = other.encoder.object(ObjectHeader(0, 0, 0, None, payload_length=8))
        other.write(head + octets[:8])
    else:
        other.object(0)
    hub.advance(1)
    for consumer, request_id in requests:
        done = consumer.done(request_id)
        assert done is not None and done.status == PublishDoneCode.MALFORMED_TRACK
        assert StreamCode.MALFORMED_TRACK in consumer.stream_ends(request_id)
        assert not consumer.end.core.closed
    stats = hub.core.snapshot()
    assert (stats.malformed, stats.tracks) == (1, 0)  # nothing of it stays cached
    assert not first.peer.end.core.closed and not second.peer.end.core.closed


def test_a_malformed_track_is_not_asked_from_its_publisher_again(
    hub: Hub, publisher: RawPublisher
) -> None:
    consumer = ConsumerPeer(hub)
    consumer.subscribe()
    publisher.stream(first_object=True, priority=1).object(0)
    publisher.stream(first_object=False, priority=2).object(1)
    hub.advance(1)
    assert consumer.refused(consumer.subscribe()) == RequestCode.DOES_NOT_EXIST
    assert consumer.refused(consumer.fetch()) == RequestCode.DOES_NOT_EXIST
    assert len(publisher.peer.subscribes) == 1


def test_an_object_beyond_the_limit_ends_its_stream_only(publisher: RawPublisher) -> None:
    hub = Hub(RelayLimits(max_object_octets=500))
    publisher = RawPublisher(hub)
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    stream = publisher.stream(first_object=True)
    stream.object(0, octets=500)
    stream.object(1, octets=501, sent=0)
    assert consumer.stream_ends(request_id) == [StreamCode.EXCESSIVE_LOAD]
    publisher.stream(group=1, first_object=True).object(0, fin=True)
    assert consumer.locations(request_id) == [Location(0, 0), Location(1, 0)]
    assert hub.core.snapshot().too_large == 1


def test_an_object_whose_rest_has_no_room_ends_its_stream_only() -> None:
    """Its first part had: what was only announced counts little."""
    kib, first_parts = 1024, 2 * (FIRST_PART_OCTETS + OBJECT_BOOKKEEPING_OCTETS)
    hub = Hub(RelayLimits(cache_octets=TRACK_OCTETS + first_parts + 2 * kib))
    publisher = RawPublisher(hub)
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    streams = [publisher.stream(group, first_object=True) for group in range(2)]
    octets = 67 * kib
    for stream in streams:
        data = stream.object(0, octets=octets, sent=kib)
    streams[1].write(data[kib : octets - 1])
    assert consumer.stream_ends(request_id) == [StreamCode.EXCESSIVE_LOAD]
    assert hub.core.snapshot().too_large == 1
    streams[1].write(data[octets - 1 :], fin=True)  # it was on its way, and nobody takes it
    streams[0].write(payload(Location(0, 0), octets)[kib:], fin=True)
    assert consumer.locations(request_id) == [Location(0, 0)]


def test_payloads_that_differ_in_the_middle_end_the_track(hub: Hub) -> None:
    first, second = RawPublisher(hub), RawPublisher(hub)
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    first.stream(first_object=True).object(0, octets=90, fin=True)
    stream = second.stream(first_object=True)
    data = stream.object(0, octets=90, sent=30)
    stream.write(data[30:60])
    assert consumer.done(request_id) is None
    stream.write(bytes(29))
    done = consumer.done(request_id)
    assert done is not None and done.status == PublishDoneCode.MALFORMED_TRACK
    assert hub.core.snapshot().malformed == 1


def test_a_cancelled_downstream_stream_leaves_the_others_alone(
    hub: Hub, publisher: RawPublisher
) -> None:
    leaving, staying = ConsumerPeer(hub), ConsumerPeer(hub)
    gone, kept = leaving.subscribe(), staying.subscribe()
    stream = publisher.stream(first_object=True)
    data = stream.object(0, octets=1000, sent=100)
    leaving.cancel(gone)
    stream.write(data[100:])
    stream.fin()
    assert staying.contents(kept) == {Location(0, 0): data}
    assert leaving.contents(gone) == {}


def test_paused_subscriptions_get_what_comes_after_and_a_fill_for_what_they_missed(
    hub: Hub,
) -> None:
    publisher = PublisherPeer(hub)
    source = publisher.track()
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe(forward=0)
    put_group(source, 0, 1)
    hub.run()
    assert consumer.locations(request_id) == []
    fill = Parameters.of(location_filter=LocationFilter.absolute_start(0, 0))
    consumer.end.core.requester.update(
        request_id,
        Parameters.of(
            forward=1, location_filter=LocationFilter.next_object(), fill_parameters=fill
        ),
    )
    hub.run()
    put_group(source, 1, 1)
    hub.run()
    assert consumer.locations(request_id) == [Location(0, 0), Location(1, 0)]


def test_datagrams_go_on_as_datagrams_and_by_fill(hub: Hub, publisher: RawPublisher) -> None:
    consumer = ConsumerPeer(hub)
    consumer.subscribe()
    for _ in range(2):  # the second copy is a duplicate
        datagram = ObjectDatagram(
            track_alias=0, group_id=2, object_id=1, publisher_priority=3, payload=b"datagram"
        )
        spoke = publisher.peer.spoke
        spoke.relay.core.receive_datagram(datagram.encode(), hub.now)
        spoke.relay.drain_events()
        hub.run()
    received = consumer.end.of(events.DatagramReceived)
    assert [bytes(event.datagram.payload) for event in received] == [b"datagram"]
    late = ConsumerPeer(hub)
    fill = late.subscribe()
    assert late.contents(fill) == {Location(2, 1): b"datagram"}
    assert [item.header.subgroup_id for item in late.objects(fill)] == [None]


def test_group_order_and_filters_are_each_subscribers_own(hub: Hub) -> None:
    publisher = PublisherPeer(hub)
    source = publisher.track()
    for group in range(3):
        put_group(source, group, 2)
    up, down = ConsumerPeer(hub), ConsumerPeer(hub)
    ascending, descending = up.subscribe(group_order=1), down.subscribe(group_order=2)
    forwards = [Location(g, o) for g in range(3) for o in range(2)]
    backwards = [Location(g, o) for g in (2, 1, 0) for o in range(2)]
    assert up.locations(ascending) == forwards
    assert down.locations(descending) == backwards
    put(source, 3, 0)
    hub.run()
    assert up.locations(ascending)[-1] == down.locations(descending)[-1] == Location(3, 0)


def test_objects_come_without_an_event_for_each_input() -> None:
    """Only what comes with a stream's header, before anybody takes it, does; and every octet is
    passed on."""
    hub = Hub()
    raw = RawPublisher(hub)
    consumer = ConsumerPeer(hub)
    request = consumer.subscribe()
    seen: list[object] = []
    original = hub.core.event

    def event(key: int, event: events.Event, now: float) -> None:
        seen.append(event)
        original(key, event, now)

    hub.core.event = event  # type: ignore[method-assign]
    stream = raw.stream(first_object=True)
    whole = [stream.object(0, octets=3000, sent=1000)]
    for start in (1000, 2000):
        stream.write(whole[0][start : start + 1000])
    whole += [stream.object(number, octets=50) for number in range(1, 5)]
    stream.write(b"", fin=True)
    kinds = [type(each) for each in seen if isinstance(each, events.ObjectsReceived)]
    assert kinds == []
    assert sum(isinstance(each, events.DataStreamOpened) for each in seen) == 1
    assert sum(isinstance(each, events.DataStreamEnded) for each in seen) == 1
    assert [bytes(each.payload) for each in consumer.objects(request)] == whole
    assert hub.core.stats.objects_in == 5
    assert hub.core.stats.octets_in == 3200

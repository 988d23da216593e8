"""What the cache lacks, and how it is got from upstream (MOQT §3.4, §7, §9.20)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode, StreamCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.messages import FetchOk
from kvcs.moqt.names import MAX_VI64, GroupOrder, Location
from kvcs.moqt.objects import RangeKind
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.sending.publishing import location_filter
from kvcs.moqt.track.store import Track
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import PUBLICATION, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import put, put_group

LAYERS = [Location(g, o) for g in range(6) for o in range(3)]


class Scene:
    """A publisher of six Groups of three Objects, and one consumer."""

    def __init__(self, limits: RelayLimits | None = None) -> None:
        self.hub = Hub(limits)
        self.publisher = PublisherPeer(self.hub)
        self.track = self.publisher.track()
        for group in range(6):
            put_group(self.track, group, 3, octets=100)
        self.consumer = ConsumerPeer(self.hub)

    def evict(self, *groups: int) -> None:
        """Drop Groups from the relay's cache."""
        entry = self.hub.core.cache.get(self.track.name)
        assert entry is not None
        for group in groups:
            assert entry.track.evict_group(group) > 0

    def asked(self) -> list[LocationFilter | None]:
        """Ranges of the FETCHes that came to the publisher."""
        return [location_filter(event.parameters) for event in self.publisher.fetches]


def end_location(consumer: ConsumerPeer, request_id: int) -> Location:
    accepted = consumer.accepted(request_id)
    assert accepted is not None and isinstance(accepted.reply, FetchOk)
    return accepted.reply.end_location


def test_a_cold_fetch_subscribes_and_asks_for_its_range_only() -> None:
    scene = Scene()
    request_id = scene.consumer.fetch(chosen=LocationFilter.group_end(1, 0, 2))
    assert scene.consumer.locations(request_id) == LAYERS[3:9]
    assert scene.asked() == [LocationFilter.group_end(1, 0, 2)]
    assert scene.consumer.markers(request_id) == []
    assert scene.consumer.stream_ends(request_id) == [None]
    again = scene.consumer.fetch(chosen=LocationFilter.group_end(1, 0, 2))
    assert scene.consumer.locations(again) == LAYERS[3:9]
    assert len(scene.publisher.fetches) == 1  # from the cache
    assert end_location(scene.consumer, again) == Location(2, 2)


def test_a_fetch_without_an_end_ends_at_the_largest_object() -> None:
    scene = Scene()
    request_id = scene.consumer.fetch()
    assert scene.consumer.locations(request_id) == LAYERS
    assert end_location(scene.consumer, request_id) == Location(5, 3)


def test_a_fetch_beyond_the_largest_object_is_refused() -> None:
    scene = Scene()
    request_id = scene.consumer.fetch(chosen=LocationFilter.absolute_start(9, 0))
    assert scene.consumer.refused(request_id) == RequestCode.INVALID_RANGE


def test_a_fetch_of_an_empty_track_is_refused_once_upstream_said_so() -> None:
    hub = Hub()
    PublisherPeer(hub).track()
    consumer = ConsumerPeer(hub)
    assert consumer.refused(consumer.fetch()) == RequestCode.INVALID_RANGE


def test_what_was_evicted_is_fetched_again_and_the_rest_is_not() -> None:
    scene = Scene()
    assert scene.consumer.locations(scene.consumer.subscribe()) == LAYERS
    scene.evict(1, 4)
    late = ConsumerPeer(scene.hub)
    request_id = late.subscribe()
    assert late.locations(request_id) == LAYERS
    assert scene.asked() == [
        LocationFilter.absolute_range(1, 0, 1, 2),
        LocationFilter.absolute_range(4, 0, 4, 2),
    ]
    assert late.markers(request_id) == []
    stats = scene.hub.core.snapshot()
    assert (stats.upstream_fills, stats.upstream_fetches) == (1, 2)


@pytest.mark.parametrize("order", list(GroupOrder))
def test_a_descending_reader_gets_its_order_whatever_arrives_when(order: GroupOrder) -> None:
    scene = Scene()
    scene.consumer.subscribe()
    scene.evict(1, 2, 4)
    late = ConsumerPeer(scene.hub)
    request_id = late.subscribe(group_order=int(order))
    groups = range(6) if order is GroupOrder.ASCENDING else range(5, -1, -1)
    assert late.locations(request_id) == [Location(g, o) for g in groups for o in range(3)]
    assert late.markers(request_id) == []


@pytest.mark.parametrize("order", list(GroupOrder))
def test_a_cold_relative_join_in_either_order(order: GroupOrder) -> None:
    scene = Scene()
    request_id = scene.consumer.subscribe(
        fill=LocationFilter.relative_start(3), group_order=int(order)
    )
    groups = (3, 4, 5) if order is GroupOrder.ASCENDING else (5, 4, 3)
    assert scene.consumer.locations(request_id) == [
        Location(g, o) for g in groups for o in range(3)
    ]
    assert scene.consumer.markers(request_id) == []


def test_one_fetch_serves_all_who_wait_for_it() -> None:
    scene = Scene()
    scene.consumer.subscribe()
    scene.evict(2)
    scene.publisher.silent = True
    readers = [ConsumerPeer(scene.hub) for _ in range(4)]
    requests = [reader.subscribe() for reader in readers]
    assert len(scene.publisher.fetches) == 1
    responder = scene.publisher.end.core.responder
    responder.accept_fetch(scene.publisher.fetches[0].request_id, scene.track, scene.hub.now)
    scene.hub.run()
    for reader, request_id in zip(readers, requests, strict=True):
        assert reader.locations(request_id) == LAYERS
    assert len(scene.publisher.fetches) == 1


def test_readers_of_overlapping_ranges_wait_for_what_is_on_its_way() -> None:
    scene = Scene()
    scene.consumer.subscribe(fill=None)
    scene.publisher.silent = True
    first = scene.consumer.fetch(chosen=LocationFilter.group_end(2, 0, 3))
    second = scene.consumer.fetch(chosen=LocationFilter.group_end(1, 0, 4))
    responder = scene.publisher.end.core.responder
    answered = 0
    while answered < len(scene.publisher.fetches):
        event = scene.publisher.fetches[answered]
        responder.accept_fetch(event.request_id, scene.track, scene.hub.now)
        scene.hub.run()
        answered += 1
    assert scene.consumer.locations(first) == LAYERS[6:12]
    assert scene.consumer.locations(second) == LAYERS[3:15]
    asked = scene.asked()
    assert asked[0] == LocationFilter.group_end(2, 0, 3)
    assert all(chosen != LocationFilter.group_end(1, 0, 4) for chosen in asked)


def test_fill_timeout_zero_never_waits() -> None:
    scene = Scene()
    scene.consumer.subscribe()
    scene.evict(2)
    late = ConsumerPeer(scene.hub)
    request_id = late.subscribe(fill_timeout=0)
    assert late.locations(request_id) == LAYERS[:6] + LAYERS[9:]
    marks = late.markers(request_id)
    assert [(mark.kind, mark.location) for mark in marks] == [(RangeKind.TIMED_OUT, Location(2, 2))]
    assert late.stream_ends(request_id) == [None]


def test_fill_timeout_marks_what_did_not_come_in_time() -> None:
    scene = Scene()
    scene.consumer.subscribe()
    scene.evict(1, 4)
    scene.publisher.silent = True
    late = ConsumerPeer(scene.hub)
    request_id = late.subscribe(fill_timeout=700)
    scene.hub.advance(0.6)
    assert late.locations(request_id) == LAYERS[:3]
    scene.hub.advance(0.2)
    # The budget is for the whole fill: the second gap does not wait again.
    assert late.locations(request_id) == LAYERS[:3] + LAYERS[6:12] + LAYERS[15:]
    kinds = [mark.kind for mark in late.markers(request_id)]
    assert kinds == [RangeKind.TIMED_OUT, RangeKind.TIMED_OUT]
    assert not late.end.core.closed


def test_without_a_fill_timeout_the_relays_own_wait_counts() -> None:
    scene = Scene(RelayLimits(fetch_wait=2.0, upstream_wait=60.0))
    scene.consumer.subscribe()
    scene.evict(3)
    scene.publisher.silent = True
    late = ConsumerPeer(scene.hub)
    request_id = late.fetch()
    scene.hub.advance(1.9)
    assert late.stream_ends(request_id) == []
    scene.hub.advance(0.2)
    assert late.locations(request_id) == LAYERS[:9] + LAYERS[12:]
    assert [mark.kind for mark in late.markers(request_id)] == [RangeKind.TIMED_OUT]


def test_a_fetch_that_makes_no_progress_is_given_up() -> None:
    scene = Scene(RelayLimits(fetch_wait=60.0, upstream_wait=2.0))
    scene.consumer.subscribe()
    scene.evict(3)
    scene.publisher.silent = True
    late = ConsumerPeer(scene.hub)
    request_id = late.fetch()
    scene.hub.advance(2.1)
    assert [mark.kind for mark in late.markers(request_id)] == [RangeKind.UNKNOWN]
    cancelled = scene.publisher.end.of(events.RequestCancelled)
    assert [event.code for event in cancelled] == [StreamCode.CANCELLED]


def test_the_next_publisher_is_asked_where_one_fails() -> None:
    scene = Scene()
    scene.consumer.subscribe()
    scene.evict(3)
    other = PublisherPeer(scene.hub, None)
    other.tracks[scene.track.name] = scene.track
    other.announce(PUBLICATION)
    scene.publisher.refusal = RequestError("no", RequestCode.INTERNAL_ERROR)
    late = ConsumerPeer(scene.hub)
    request_id = late.subscribe()
    assert late.locations(request_id) == LAYERS
    assert (len(scene.publisher.fetches), len(other.fetches)) == (1, 1)
    assert late.markers(request_id) == []


def test_nobody_who_can_tell_makes_it_unknown() -> None:
    scene = Scene()
    scene.consumer.subscribe()
    scene.evict(3)
    scene.publisher.refusal = RequestError("no", RequestCode.INTERNAL_ERROR)
    late = ConsumerPeer(scene.hub)
    request_id = late.subscribe()
    assert late.locations(request_id) == LAYERS[:9] + LAYERS[12:]
    marks = [(mark.kind, mark.location) for mark in late.markers(request_id)]
    assert marks == [(RangeKind.UNKNOWN, Location(3, 2))]


def test_a_fetch_refused_for_load_is_repeated_after_its_interval() -> None:
    scene = Scene()
    scene.consumer.subscribe()
    scene.evict(3)
    scene.publisher.refusal = RequestError("busy", RequestCode.EXCESSIVE_LOAD, 300)
    late = ConsumerPeer(scene.hub)
    request_id = late.subscribe()
    scene.publisher.refusal = None
    scene.hub.advance(0.29)
    assert len(late.locations(request_id)) == 9
    scene.hub.advance(0.02)
    assert late.locations(request_id) == LAYERS
    assert len(scene.publisher.fetches) == 2


def test_what_was_got_for_a_reader_may_leave_once_it_has_passed_it() -> None:
    hub = Hub()
    track = PublisherPeer(hub).track()
    for group in range(3):
        put_group(track, group, 2)
    reader = ConsumerPeer(hub)
    request_id = reader.fetch(chosen=LocationFilter.absolute_range(0, 0, 2, 9))
    entry = hub.core.cache.get(full_name())
    assert entry is not None
    assert len(reader.locations(request_id)) == 6
    hub.core._let_go()  # as where room is needed
    assert [entry.track.groups[group].wanted for group in range(3)] == [0, 0, 0]


def test_fetches_of_ours_on_one_session_take_turns() -> None:
    hub = Hub(RelayLimits(max_upstream_fetches=2))
    publisher = PublisherPeer(hub)
    names = [full_name(b"track-%d" % number) for number in range(5)]
    for name in names:
        put_group(publisher.track(name), 0, 1)
    publisher.before_answer = lambda event: setattr(
        publisher, "silent", isinstance(event, events.FetchReceived)
    )
    consumer = ConsumerPeer(hub)
    requests = [consumer.fetch(name) for name in names]
    running = 0
    while running < len(publisher.fetches):
        assert len(publisher.fetches) - running <= 2
        event = publisher.fetches[running]
        track = publisher.tracks[event.full_track_name]
        publisher.end.core.responder.accept_fetch(event.request_id, track, hub.now)
        hub.run()
        running += 1
    assert [consumer.locations(request_id) for request_id in requests] == [[Location(0, 0)]] * 5


def test_a_fill_that_never_comes_is_replaced_by_a_fetch() -> None:
    scene = Scene()
    scene.publisher.before_answer = ignore_fills(scene.publisher)
    request_id = scene.consumer.subscribe()
    assert scene.consumer.accepted(request_id) is not None
    assert scene.consumer.locations(request_id) == []
    scene.hub.advance(1.1)
    assert scene.consumer.locations(request_id) == LAYERS
    assert scene.asked() == [LocationFilter.absolute_range(0, 0, 5, 3)]


def ignore_fills(publisher: PublisherPeer) -> Callable[[events.Event], None]:
    """A publisher that knows nothing of FILL_PARAMETERS."""

    def before(event: events.Event) -> None:
        if isinstance(event, events.SubscribeReceived):
            request = publisher.end.core.requests.get(event.request_id)
            assert request is not None
            kept = tuple(
                item
                for item in request.message.parameters.items
                if item[0] is not ParameterType.FILL_PARAMETERS
            )
            request.message = replace(request.message, parameters=Parameters(kept))

    return before


@pytest.mark.parametrize("piece", [1, 7, 1 << 30])
def test_octets_may_come_in_any_pieces(piece: int) -> None:
    hub = Hub(piece=piece)
    publisher = PublisherPeer(hub)
    track = publisher.track()
    put_group(track, 0, 2, octets=50)
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    put_group(track, 1, 2, octets=50)
    hub.run()
    assert consumer.locations(request_id) == [Location(g, o) for g in (0, 1) for o in (0, 1)]


def test_a_cold_fill_saves_the_round_trip_of_a_fetch() -> None:
    scene = Scene()
    scene.consumer.subscribe()
    assert scene.publisher.fetches == []
    assert scene.track.objects_sent == len(LAYERS)


def test_a_fill_is_not_asked_for_what_is_cached() -> None:
    scene = Scene(RelayLimits(upstream_linger=0.0))
    first = scene.consumer.subscribe()
    scene.consumer.cancel(first)
    scene.hub.advance(1)
    for group in (6, 7):
        put_group(scene.track, group, 3, octets=100)
    late = ConsumerPeer(scene.hub)
    request_id = late.subscribe()
    assert len(late.locations(request_id)) == 8 * 3
    assert scene.track.objects_sent == 8 * 3  # each Object once over both subscriptions


def test_markers_of_upstream_are_not_taken_for_absence() -> None:
    """A chained relay that cannot tell says so; what it marked stays unknown here."""
    scene = Scene()
    scene.consumer.subscribe(fill=None)
    upstream = PublisherPeer(scene.hub, None)
    half = relay_like_track(scene)
    upstream.tracks[scene.track.name] = half
    scene.publisher.refusal = RequestError("no", RequestCode.INTERNAL_ERROR)
    upstream.announce(PUBLICATION)
    late = ConsumerPeer(scene.hub)
    request_id = late.fetch(chosen=LocationFilter.group_end(0, 0, 2))
    assert late.locations(request_id) == LAYERS[:3] + LAYERS[6:9]
    marks = [(mark.kind, mark.location.group) for mark in late.markers(request_id)]
    assert marks == [(RangeKind.UNKNOWN, 1)]
    entry = scene.hub.core.cache.get(scene.track.name)
    assert entry is not None
    assert entry.track.first_unknown(Location(0, 0), Location(2, MAX_VI64)) is not None
    # Where the first publisher answers again, the gap is closed.
    scene.publisher.refusal = None
    again = ConsumerPeer(scene.hub)
    full = again.fetch(chosen=LocationFilter.group_end(0, 0, 2))
    assert again.locations(full) == LAYERS[:9]
    assert again.markers(full) == []


def relay_like_track(scene: Scene) -> Track:
    half = Track(scene.track.name, authoritative=False)
    for group in (0, 2, 5):
        put_group(half, group, 3, octets=100)
        half.learn(Location(group, 0), Location(group, MAX_VI64))
    return half


def test_an_object_put_while_a_fill_runs_comes_once() -> None:
    scene = Scene()
    scene.publisher.end.credit.object_octets = 0
    request_id = scene.consumer.subscribe()
    put(scene.track, 6, 0, octets=100)
    scene.hub.run()
    scene.publisher.end.credit.object_octets = 1 << 30
    scene.publisher.end.core.receive_credit()
    scene.hub.run()
    assert sorted(scene.consumer.locations(request_id)) == [*LAYERS, Location(6, 0)]

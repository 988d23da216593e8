"""A Track whose upstream is gone goes on from another one, on the same subscription (MOQT §7)."""

from __future__ import annotations

import pytest

from kvcs.errors import RequestError
from kvcs.moqt.errors import PublishDoneCode, RequestCode, StreamCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.intervals import following
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.track.bridge import Bridge
from kvcs.moqt.track.store import Track
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import end_track, payload, put_group
from tests.unit.relay.chains import OBJECTS, A, B, C, locations
from tests.unit.relay.publishing import Pusher
from tests.unit.relay.two_upstreams import OCTETS, Streaming, World


def test_the_same_subscription_goes_on_from_the_next_upstream() -> None:
    world = World()
    request = world.consumer.subscribe()
    world.put_group(0)
    put_group(world.tracks[1], 1, OBJECTS)  # the first upstream never has it
    world.lower.run()
    world.lose()
    put_group(world.tracks[1], 2, OBJECTS)
    end_track(world.tracks[1], 3)
    world.lower.run()
    world.lower.advance(1.0)
    assert world.consumer.locations(request) == locations(range(3))
    ended = world.consumer.done(request)
    assert ended is not None and ended.status == PublishDoneCode.TRACK_ENDED
    assert ended.every_stream_seen
    assert set(world.consumer.stream_ends(request)) == {None}  # each with FIN
    (asked,) = world.producers[1].subscribes
    fill = asked.parameters.get(ParameterType.FILL_PARAMETERS)
    # From the first Location that is not at the lower relay, not from the beginning.
    start = fill.get(ParameterType.LOCATION_FILTER)
    assert start == LocationFilter.absolute_start(1, 0)
    assert world.stats == (1, 0)
    assert len(world.lower.core._tracks) == 0 or not world.lower.core._timers.next()


def test_an_object_of_which_a_part_has_come_is_continued_on_its_stream() -> None:
    world = World()
    request = world.consumer.subscribe()
    for streaming in world.streaming:
        streaming.open(0)
        streaming.begin(0, 0)
        streaming.complete(0, 0)
        streaming.begin(0, 1)
    world.lower.run()
    world.lose()
    streaming = world.streaming[1]
    streaming.complete(0, 1)
    streaming.begin(0, 2)
    streaming.complete(0, 2)
    streaming.finish(0)
    world.lower.run()
    objects = world.consumer.objects(request)
    assert [item.header.location for item in objects] == locations(range(1))
    assert len({item.stream_id for item in objects}) == 1
    assert all(bytes(item.payload) == payload(item.header.location, OCTETS) for item in objects)
    assert world.consumer.stream_ends(request) == [None]


def test_the_part_is_continued_also_by_an_upstream_that_lags() -> None:
    world = World()
    first, second = world.streaming
    first.open(0)
    second.open(0)
    request = world.consumer.subscribe()
    for item in range(2):
        first.begin(0, item)
        first.complete(0, item)
    first.begin(0, 2)
    second.begin(0, 0)
    second.complete(0, 0)
    world.lower.run()
    world.lose()
    for item in range(1, 3):
        second.begin(0, item)
        second.complete(0, item)
        world.lower.run()
    second.finish(0)
    world.lower.run()
    objects = world.consumer.objects(request)
    assert [item.header.location for item in objects] == locations(range(1))
    assert len({item.stream_id for item in objects}) == 1
    assert world.consumer.stream_ends(request) == [None]


@pytest.mark.parametrize("refused", ["nothing", "refused", "silent"])
def test_where_no_other_upstream_has_it_the_subscription_ends(refused: str) -> None:
    world = World()
    if refused == "nothing":
        world.lose(1)
    world.producers[1].refusal = RequestError("no", RequestCode.UNAUTHORIZED)
    world.producers[1].silent = refused == "silent"
    request = world.consumer.subscribe()
    put_group(world.tracks[0], 0, OBJECTS)
    world.streaming[0].open(1)
    world.streaming[0].begin(1, 0)
    world.lower.run()
    world.lose()
    world.lower.advance(world.lower.core.limits.upstream_wait + 1.0)
    ended = world.consumer.done(request)
    assert ended is not None and ended.status == PublishDoneCode.GOING_AWAY
    assert world.consumer.locations(request) == locations(range(1))
    # What was cut is reset: a FIN is not invented.
    assert world.consumer.stream_ends(request) == [None, StreamCode.INTERNAL_ERROR]
    assert world.stats == (0, int(refused != "nothing"))
    world.lower.advance(60.0)
    assert len(world.lower.core._tracks) == 0


def test_a_next_upstream_that_lacks_something_is_not_taken_for_whole() -> None:
    """The fill has a hole that nobody can close: the subscription ends as it did without all this,
    and what lacks is not passed over without a word."""
    world = World()
    request = world.consumer.subscribe()
    world.put_group(0)
    late = ConsumerPeer(world.uppers[1])
    late.subscribe()
    for group in (1, 2):
        put_group(world.tracks[1], group, OBJECTS)
    world.lower.run()
    cached = world.uppers[1].core.cache.get(world.tracks[1].name)
    assert cached is not None
    cached.track.evict_group(1)
    producer = world.producers[1]
    producer.before_answer = lambda event: setattr(
        producer, "refusal", RequestError("no", RequestCode.UNAUTHORIZED)
    )
    world.lose()
    world.lower.advance(15.0)
    ended = world.consumer.done(request)
    assert ended is not None and ended.status == PublishDoneCode.GOING_AWAY
    assert world.stats == (1, 1)


def test_the_second_upstream_may_be_lost_as_well() -> None:
    world = World()
    third = Hub(relay_id=b"D" * 16)
    world.uppers.append(third)
    world.links.append(world.lower.link(third, 2))
    world.producers.append(PublisherPeer(third))
    world.tracks.append(world.producers[2].track())
    request = world.consumer.subscribe()
    for which in range(3):
        world.put_group(2 * which)
        put_group(world.tracks[2], 2 * which + 1, OBJECTS)
        for track in world.tracks[:2]:
            put_group(track, 2 * which + 1, OBJECTS)
        if which < 2:
            world.lose(which)
        world.lower.run()
    assert world.consumer.locations(request) == locations(range(6))
    assert world.consumer.done(request) is None
    assert world.stats == (2, 0)


def test_upstreams_that_accept_and_end_in_turns_do_not_keep_it_busy() -> None:
    world = World()
    request = world.consumer.subscribe()
    world.put_group(0)
    for _ in range(10):
        for producer in world.producers:
            for event in producer.subscribes:
                responder = producer.end.core.responder
                responder.end_subscription(event.request_id, PublishDoneCode.GOING_AWAY)
        world.lower.advance(0.5)
    ended = world.consumer.done(request)
    assert ended is not None and ended.status == PublishDoneCode.GOING_AWAY
    assert world.lower.core.stats.upstream_subscriptions == 2


def test_a_subgroup_whose_rest_comes_by_fill_ends_as_it_did_there() -> None:
    """Its last Object is known by then: that is no invented FIN (§7)."""
    world = World()
    request = world.consumer.subscribe()
    for streaming in world.streaming:
        streaming.open(0)
        streaming.begin(0, 0)
        streaming.complete(0, 0)
    world.lower.run()
    ahead = world.streaming[1]
    ahead.begin(0, 1)
    ahead.complete(0, 1)
    ahead.finish(0)
    put_group(world.tracks[1], 1, OBJECTS)
    world.lower.run()
    world.lose()
    first, *others = world.consumer.locations(request)
    assert first == Location(0, 0)
    assert sorted(others) == [Location(0, 1), *locations(range(1, 2))]
    assert world.consumer.stream_ends(request) == [None, None]


@pytest.mark.parametrize("fin_first", [True, False])
def test_a_subgroup_that_one_stream_has_ended_is_whole_whatever_others_do(fin_first: bool) -> None:
    """Both end while the source changes; nothing is kept for each of many streams."""
    track = Track(full_name(), authoritative=False)
    whole, cut = Streaming(track), [Streaming(track) for _ in range(5)]
    for streaming in (whole, *cut):
        streaming.open(0)
        streaming.begin(0, 0)
        streaming.complete(0, 0)
    bridge = Bridge(track)
    bridge.resume()
    if fin_first:
        whole.finish(0)
    for streaming in cut:
        streaming.reset(0)
    if not fin_first:
        whole.finish(0)
    assert len(bridge._ends) == 1
    bridge.settle()
    subgroup = track.groups[0].subgroups[0]
    assert subgroup.finished and subgroup.reset_code is None


def test_what_is_held_for_the_next_upstream_is_held_for_a_while() -> None:
    world = World()
    world.consumer.subscribe()
    for streaming in world.streaming:
        streaming.open(0)
        streaming.begin(0, 0)
        streaming.complete(0, 0)
    world.lower.run()
    world.lose()
    for streaming in world.streaming:
        streaming.finish(0)
    world.lower.run()
    entry = world.lower.core.cache.get(full_name())
    assert entry is not None and world.stats == (1, 0)
    assert entry.track.groups[0].arriving == 1  # streams may yet go on
    world.lower.advance(RelayLimits().upstream_wait + 1.0)
    assert entry.track.groups[0].arriving == 0


def test_a_relay_that_has_it_from_here_is_not_asked_instead() -> None:
    """It would wait for this one, which would wait for it."""
    above, here, below = Hub(relay_id=A), Hub(relay_id=B), Hub(relay_id=C)
    lost = here.link(above)
    put_group(PublisherPeer(above).track(), 0, OBJECTS)
    here.link(below, 1)
    below.link(here)
    consumer = ConsumerPeer(below)
    request = consumer.subscribe()
    assert consumer.locations(request) == locations(range(1))
    above.disconnect(lost)
    here.advance(1.0)
    ended = consumer.done(request)
    assert ended is not None and ended.status == PublishDoneCode.GOING_AWAY
    assert here.core.stats.upstream_subscriptions == 1


def test_nobody_is_asked_where_nobody_follows() -> None:
    world = World()
    fetched = world.consumer.subscribe()
    world.put_group(0)
    world.consumer.cancel(fetched)
    world.lose()
    assert world.lower.core.stats.upstream_subscriptions == 1
    assert world.stats == (0, 0)


def test_a_track_that_has_ended_there_ends_behind_what_lacks() -> None:
    """The word that it has ended overtakes the fill, which a relay must not take for less."""
    world = World()
    request = world.consumer.subscribe()
    world.put_group(0)
    for group in (1, 2):
        put_group(world.tracks[1], group, OBJECTS)
    end_track(world.tracks[1], 3)
    world.tracks[1].end(PublishDoneCode.TRACK_ENDED)
    world.lower.run()
    link = world.links[1].peer
    original = link.core.receive_stream_data
    held: list[tuple[int, bytes, bool]] = []

    def receive(stream_id: int, data: bytes, fin: bool, now: float) -> None:
        if stream_id % 4 == 3:  # from the upstream alone: its fill, then its answer to a FETCH
            held.append((stream_id, bytes(data), fin))
        else:
            original(stream_id, data, fin, now)

    link.core.receive_stream_data = receive  # type: ignore[method-assign]
    world.lose()
    world.lower.advance(2.0)
    assert held and world.consumer.done(request) is None
    link.core.receive_stream_data = original  # type: ignore[method-assign]
    for piece in held:
        original(*piece, world.lower.now)
        link.drain_events()
    world.lower.advance(2.0)
    assert world.consumer.locations(request) == locations(range(3))
    ended = world.consumer.done(request)
    assert ended is not None and ended.status == PublishDoneCode.TRACK_ENDED
    assert world.stats == (1, 0)


def test_a_track_that_failed_is_open_for_whoever_asks_next() -> None:
    """One that has published it does not give what it began behind; what follows it does."""
    hub = Hub()
    here, pusher = PublisherPeer(hub), Pusher(hub, namespace=None)
    consumer = ConsumerPeer(hub)
    put_group(here.track(), 0, OBJECTS)
    request = consumer.subscribe()
    pushed = pusher.track()
    for group in range(3):
        put_group(pushed, group, OBJECTS)
    pusher.push_track(pushed)
    pusher.refusal = RequestError("no", RequestCode.UNAUTHORIZED)
    here.vanish()
    hub.advance(RelayLimits().upstream_wait + 1.0)
    ended = consumer.done(request)
    assert ended is not None and ended.status == PublishDoneCode.GOING_AWAY
    assert hub.core.stats.failovers_failed == 1
    again = consumer.subscribe(fill=None)
    put_group(pushed, 3, OBJECTS)
    hub.run()
    assert consumer.locations(again) == locations(range(3, 4))
    hub.advance(1.0)
    assert consumer.done(again) is None


def test_what_came_before_a_publisher_was_resumed_is_nobodys() -> None:
    """Who followed from then on is owed by the next source only what lies behind."""
    upper, lower = Hub(relay_id=A), Hub(relay_id=B)
    lower.link(upper)
    pusher, there = Pusher(lower, namespace=None), PublisherPeer(upper)
    pushed, _ = pusher.push(parameters=Parameters.of(forward=0))
    other = there.track()
    for group in range(2):
        for track in (pushed, other):
            put_group(track, group, OBJECTS)
    lower.run()
    consumer = ConsumerPeer(lower)
    request = consumer.subscribe(fill=None)
    resumed_at = pushed.largest
    assert resumed_at is not None
    pusher.vanish()
    for group in range(2, 4):
        put_group(other, group, OBJECTS)
    lower.run()
    assert consumer.locations(request) == locations(range(2, 4))
    assert consumer.done(request) is None
    assert lower.core.stats.failovers == 1
    (asked,) = there.subscribes
    fill = asked.parameters.get(ParameterType.FILL_PARAMETERS)
    # Nothing of what was there before is got for nobody.
    behind = following(resumed_at)
    assert behind is not None
    start = fill.get(ParameterType.LOCATION_FILTER)
    assert start == LocationFilter.absolute_start(*behind)


def test_a_subgroup_that_another_stream_brings_is_not_reset_with_the_first() -> None:
    track = Track(full_name(), authoritative=False)
    first, second = Streaming(track), Streaming(track)
    first.open(0)
    first.begin(0, 0)
    first.complete(0, 0)
    bridge = Bridge(track)
    bridge.resume()
    first.reset(0)
    second.open(0)
    second.begin(0, 1)
    bridge.settle()
    subgroup = track.groups[0].subgroups[0]
    assert subgroup.reset_code is None and not subgroup.finished
    second.complete(0, 1)
    second.finish(0)
    assert subgroup.finished and subgroup.reset_code is None
    bridge.release()


def test_nothing_is_missing_behind_the_end_of_a_group_that_was_delivered_and_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcs.moqt.track.store.MAX_KNOWN_RANGES", 0)  # no room for where it ended
    world = World()
    world.consumer.subscribe()
    put_group(world.tracks[0], 0, OBJECTS)
    world.lower.run()
    entry = world.lower.core.cache.get(full_name())
    assert entry is not None
    entry.track.evict_group(0)
    assert Bridge(entry.track).first_missing(Location(0, 0)) == Location(1, 0)


def test_a_lost_publisher_is_replaced_by_an_upstream() -> None:
    """What was announced here is asked of upstreams once its publisher is gone."""
    upper, lower = Hub(relay_id=A), Hub(relay_id=B)
    lower.link(upper)
    here, there = PublisherPeer(lower), PublisherPeer(upper)
    tracks = [here.track(), there.track()]
    consumer = ConsumerPeer(lower)
    request = consumer.subscribe()
    for track in tracks:
        put_group(track, 0, OBJECTS)
    lower.run()
    here.vanish()
    put_group(tracks[1], 1, OBJECTS)
    lower.run()
    assert consumer.locations(request) == locations(range(2))
    assert consumer.done(request) is None


def test_what_was_evicted_is_not_delivered_again() -> None:
    world = World()
    request = world.consumer.subscribe()
    for group in range(3):
        put_group(world.tracks[0], group, OBJECTS)
        world.lower.run()
    entry = world.lower.core.cache.get(world.tracks[0].name)
    assert entry is not None
    entry.track.evict_group(0)
    entry.track.evict_group(1)
    world.lose()  # the next upstream has nothing yet
    world.lower.run()
    for group in range(4):
        put_group(world.tracks[1], group, OBJECTS)
        world.lower.run()
    assert world.consumer.locations(request) == locations(range(4))
    assert world.consumer.done(request) is None


@pytest.mark.parametrize("fill", [True, False])
def test_a_fetch_that_is_cut_inside_an_object_goes_on(fill: bool) -> None:
    """The stream of the consumer's fill or FETCH is not reset; the Object comes once, whole."""
    world = World()
    for streaming in world.streaming:
        streaming.open(0)
        for item in range(3):
            streaming.begin(0, item)
            streaming.complete(0, item)
        streaming.finish(0)
    world.uppers[0].piece = 16
    consumer = world.consumer
    request = consumer.subscribe(run=False) if fill else consumer.fetch(run=False)

    steps = 0
    link = world.links[0].peer.core
    original = link.receive_stream_data

    def receive(stream_id: int, data: bytes, fin: bool, now: float) -> None:
        nonlocal steps
        original(stream_id, data, fin, now)
        entry = world.lower.core.cache.get(world.tracks[0].name)
        stored = None if entry is None else entry.track.get(Location(0, 1))
        if not steps and stored is not None and 0 < stored.received < OCTETS:
            steps += 1
            world.uppers[0].disconnect(world.links[0])

    link.receive_stream_data = receive  # type: ignore[method-assign]
    world.lower.run()
    assert steps == 1
    objects = consumer.objects(request)
    assert [item.header.location for item in objects] == locations(range(1))
    assert len({item.stream_id for item in objects}) == 1
    assert all(bytes(item.payload) == payload(item.header.location, OCTETS) for item in objects)
    assert None in consumer.stream_ends(request)

"""Peers that do not take what they asked for: they are told, and nobody else notices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcs.moqt.errors import PublishDoneCode, StreamCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location, TrackNamespace
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.track.store import Track
from kvcs.relay import backlogs
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import PUBLICATION, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import put, put_group
from tests.unit.relay.chains import locations

ELSEWHERE: TrackNamespace = (b"kvcs-1", b"2" * 16, *PUBLICATION[2:])
BEHIND = PublishDoneCode.TOO_FAR_BEHIND
LIMIT = 30.0
"""Seconds that a subscription may be behind by default."""

MARGIN = 3 * backlogs.LOOK_SECONDS


def served(limits: RelayLimits | None = None) -> tuple[Hub, Track]:
    """A relay with a publisher that has a Track."""
    hub = Hub(limits)
    return hub, PublisherPeer(hub).track()


def stop(peer: ConsumerPeer) -> None:
    """The peer takes no Objects any more."""
    peer.spoke.relay.credit.object_octets = 0


def go_on(peer: ConsumerPeer) -> None:
    peer.spoke.relay.credit.object_octets = 1 << 40
    peer.spoke.relay.core.receive_credit()
    peer.hub.run()


def status(peer: ConsumerPeer, request_id: int) -> int | None:
    done = peer.done(request_id)
    return None if done is None else done.status


def test_who_stops_reading_is_told_after_its_time_and_the_rest_go_on() -> None:
    hub, track = served()
    stopped, beside = ConsumerPeer(hub), ConsumerPeer(hub)
    lost, kept = stopped.subscribe(fill=None), beside.subscribe(fill=None)
    put_group(track, 0, 3)
    hub.run()
    stop(stopped)
    put_group(track, 1, 3)
    hub.advance(LIMIT)
    assert status(stopped, lost) is None
    hub.advance(MARGIN)
    assert status(stopped, lost) == BEHIND
    assert hub.core.stats.too_far_behind == 1
    put_group(track, 2, 3)
    hub.run()
    assert beside.locations(kept) == locations(range(3)) and status(beside, kept) is None
    assert stopped.locations(lost) == locations(range(1))
    go_on(stopped)
    assert len(hub.core._timers) <= 4


def test_streams_that_are_open_then_are_reset_with_the_same_code() -> None:
    hub, track = served()
    peer = ConsumerPeer(hub)
    request_id = peer.subscribe(fill=None)
    put(track, 0, 0)
    hub.run()
    stop(peer)
    put(track, 0, 1)
    hub.advance(LIMIT + MARGIN)
    assert peer.stream_ends(request_id) == [StreamCode.TOO_FAR_BEHIND]
    assert status(peer, request_id) == BEHIND


def test_who_is_slow_but_takes_what_is_there_in_time_is_left_alone() -> None:
    hub, track = served()
    peer = ConsumerPeer(hub)
    request_id = peer.subscribe(fill=None)
    for group in range(20):
        stop(peer)
        put_group(track, group, 3)
        hub.advance(LIMIT - MARGIN)
        go_on(peer)
    assert peer.locations(request_id) == locations(range(20))
    assert status(peer, request_id) is None and hub.core.stats.too_far_behind == 0


def test_a_subscription_that_is_always_behind_by_more_than_its_time_ends() -> None:
    """It takes some all the time, and never what has waited longest."""
    hub, track = served(RelayLimits(max_lag_seconds=5))
    peer = ConsumerPeer(hub)
    request_id = peer.subscribe(fill=None)
    stop(peer)
    put_group(track, 0, 200)
    for second in range(12):
        hub.advance(1)
        peer.spoke.relay.credit.object_octets = 1
        peer.spoke.relay.core.receive_credit()
        for _ in range(4):
            hub.step()
        stop(peer)
        put_group(track, second + 1, 1)
    hub.advance(2)
    assert status(peer, request_id) == BEHIND
    assert 0 < len(peer.locations(request_id)) < 200


def test_a_subscription_that_is_owed_more_octets_than_allowed_ends_at_the_next_look() -> None:
    hub, track = served(RelayLimits(max_lag_octets=1000))
    stopped, beside = ConsumerPeer(hub), ConsumerPeer(hub)
    lost, kept = stopped.subscribe(fill=None), beside.subscribe(fill=None)
    stop(stopped)
    put(track, 0, 0, octets=600)
    put(track, 0, 1, octets=400)
    hub.advance(MARGIN)
    assert status(stopped, lost) is None
    owed = hub.core.peer(stopped.spoke.key)
    assert owed is not None and owed.lag_octets == 1000
    put(track, 1, 0, octets=1)
    hub.advance(MARGIN)
    assert status(stopped, lost) == BEHIND and status(beside, kept) is None
    assert owed.lag_octets == 0


def test_who_has_taken_all_is_owed_nothing() -> None:
    hub, track = served()
    peer = ConsumerPeer(hub)
    peer.subscribe(fill=None)
    stop(peer)
    put(track, 0, 0, octets=600)
    hub.advance(MARGIN)
    owed = hub.core.peer(peer.spoke.key)
    assert owed is not None and owed.lag_octets == 600
    go_on(peer)
    hub.advance(backlogs.IDLE_SECONDS)
    assert owed.lag_octets == 0


def test_octets_that_have_not_come_here_yet_are_owed_to_nobody() -> None:
    hub = Hub(RelayLimits(max_lag_octets=1000))
    origin = PublisherPeer(hub)
    track = origin.track()
    peer = ConsumerPeer(hub)
    request_id = peer.subscribe(fill=None)
    stop(peer)
    put(track, 0, 0, octets=100_000)
    origin.end.credit.object_octets = 500
    while not hub.core.stats.octets_in:
        assert hub.step()
    origin.end.credit.object_octets = 0
    hub.advance(MARGIN)
    assert status(peer, request_id) is None
    origin.end.credit.object_octets = 1 << 40
    origin.end.core.receive_credit()
    hub.advance(MARGIN)
    assert status(peer, request_id) == BEHIND


@pytest.mark.parametrize("by", ["octets", "eviction"])
def test_a_fill_goes_on_at_its_own_pace_and_done_follows_it(by: str) -> None:
    hub, track = served(RelayLimits(max_lag_octets=1000))
    put_group(track, 0, 3)
    beside = ConsumerPeer(hub)
    kept = beside.subscribe()
    slow = ConsumerPeer(hub)
    stop(slow)
    request_id = slow.subscribe()
    put_group(track, 1, 3, octets=20 if by == "eviction" else 1000)
    hub.run()
    if by == "eviction":
        entry = hub.core.cache.get(full_name())
        assert entry is not None
        entry.track.evict_group(1)
    hub.advance(2 * LIMIT)
    assert status(slow, request_id) is None
    put_group(track, 2, 3)
    go_on(slow)
    assert status(slow, request_id) == BEHIND
    assert slow.locations(request_id) == locations(range(1))
    assert slow.stream_ends(request_id) == [None]
    assert beside.locations(kept) == locations(range(3))
    # And it gets the rest by asking.
    fetched = slow.fetch(chosen=LocationFilter.absolute_range(1, 0, 2, 9))
    assert slow.locations(fetched) == locations(range(1, 3))


def test_time_does_not_run_while_a_fill_goes_first() -> None:
    hub, track = served()
    put_group(track, 0, 3)
    peer = ConsumerPeer(hub)
    stop(peer)
    request_id = peer.subscribe()
    put_group(track, 1, 3)
    hub.advance(10 * LIMIT)
    assert status(peer, request_id) is None
    go_on(peer)
    assert sorted(peer.locations(request_id)) == locations(range(2))


def test_time_begins_anew_once_a_fill_has_gone_first() -> None:
    """What was published during the fill is not late from the first moment on."""
    hub, track = served()
    put_group(track, 0, 3)
    peer = ConsumerPeer(hub)
    request_id = peer.subscribe(fill=None)
    stop(peer)
    put_group(track, 1, 3)
    hub.advance(LIMIT / 2)  # it is late, for less than its time
    fill = Parameters.of(location_filter=LocationFilter.absolute_start(0, 0))
    peer.end.core.requester.update(request_id, Parameters.of(fill_parameters=fill))
    hub.advance(10 * LIMIT)
    deliveries = hub.core.peer(peer.spoke.key)
    assert deliveries is not None
    (delivery,) = deliveries.core.deliveries.subscriptions()
    assert delivery._fills and status(peer, request_id) is None
    for sender in list(delivery._fills):
        delivery.host.reset_sender(sender, StreamCode.CANCELLED)
    hub.advance(LIMIT - MARGIN)
    assert status(peer, request_id) is None
    hub.advance(2 * MARGIN)
    assert status(peer, request_id) == BEHIND


def test_a_fetch_is_never_too_far_behind() -> None:
    hub, track = served()
    put_group(track, 0, 3, octets=1000)
    peer = ConsumerPeer(hub)
    stop(peer)
    request_id = peer.fetch()
    hub.advance(10 * LIMIT)
    go_on(peer)
    assert peer.locations(request_id) == locations(range(1))


def test_datagrams_that_are_not_taken_are_late_too() -> None:
    hub = Hub()
    track = PublisherPeer(hub).track()
    peer = ConsumerPeer(hub)
    request_id = peer.subscribe(fill=None)
    entry = hub.core.cache.get(full_name())
    assert entry is not None
    stop(peer)
    put(track, 0, 0)
    hub.run()
    live = entry.track.groups[0].objects[0].header
    entry.track.take_datagram(replace(live, group_id=1, subgroup_id=None), b"8 octets", hub.now)
    hub.advance(LIMIT + MARGIN)
    assert status(peer, request_id) == BEHIND


def test_many_sessions_are_looked_at_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlogs, "MAX_LOOKED", 2)
    hub, track = served(RelayLimits(max_lag_octets=10))
    peers = [ConsumerPeer(hub) for _ in range(7)]
    asked = [peer.subscribe(fill=None) for peer in peers]
    for peer in peers:
        stop(peer)
    put(track, 0, 0, octets=50)
    hub.advance(1.5)
    first = [status(peer, each) for peer, each in zip(peers, asked, strict=True)]
    assert first.count(BEHIND) == 2
    hub.advance(4)
    assert [status(peer, each) for peer, each in zip(peers, asked, strict=True)] == [BEHIND] * 7


def test_nothing_is_looked_at_where_nothing_is_served() -> None:
    hub, track = served()
    put(track, 0, 0)
    peer = ConsumerPeer(hub)
    peer.cancel(peer.subscribe())
    hub.advance(60)
    assert hub.core.next_timer() is None
    peer.subscribe()
    assert hub.core.next_timer() is not None


# What waits below the cache


def pressed(limits: RelayLimits, *namespaces: TrackNamespace) -> tuple[Hub, list[ConsumerPeer]]:
    """A relay with one reader for each namespace, each later one of lower priority, that has a
    stream open."""
    hub = Hub(limits)
    tracks = {}
    for namespace in dict.fromkeys(namespaces):
        name = full_name(namespace=namespace)
        tracks[name] = PublisherPeer(hub, namespace).track(name)
    peers = []
    for number, namespace in enumerate(namespaces):
        peers.append(ConsumerPeer(hub))
        name = full_name(namespace=namespace)
        peers[-1].subscribe(name, subscriber_priority=100 + number, fill=None)
    for track in tracks.values():
        put(track, 1, 0)
    hub.run()
    return hub, peers


def wait_below(hub: Hub, peers: list[ConsumerPeer], *amounts: int) -> list[list[int | None]]:
    """So much waits for each; how their streams ended soon after."""
    for peer, octets in zip(peers, amounts, strict=True):
        peer.spoke.queued = octets
    hub.advance(backlogs.LOOK_SECONDS + 0.1)
    return [peer.stream_ends(0) for peer in peers]


OVER: list[int | None] = [StreamCode.EXCESSIVE_LOAD]


def test_the_lowest_priority_goes_first_when_too_much_waits() -> None:
    hub, peers = pressed(RelayLimits(max_queued_octets=3000), *3 * [PUBLICATION])
    assert wait_below(hub, peers, 1000, 1000, 1000) == [[], [], []]
    assert hub.core.stats.pressure_resets == 0
    assert wait_below(hub, peers, 1200, 1200, 1200) == [[], [], OVER]
    assert hub.core.stats.pressure_resets == 1
    # The subscription lives on, and what was cut off can be fetched.
    assert peers[2].done(0) is None
    peers[2].spoke.queued = 0
    fetched = peers[2].fetch(chosen=LocationFilter.absolute_range(1, 0, 1, 0))
    assert peers[2].locations(fetched) == [Location(1, 0)]


def test_publisher_priority_decides_between_streams_of_one_subscription() -> None:
    hub = Hub(RelayLimits(max_queued_octets=100))
    track = PublisherPeer(hub).track()
    peer = ConsumerPeer(hub)
    request_id = peer.subscribe(fill=None)
    for group, priority in ((0, 10), (1, 200), (2, 20)):
        put(track, group, 0, priority=priority)
    hub.run()
    assert wait_below(hub, [peer], 120) == [OVER]
    peer.spoke.queued = 0
    for group in range(3):
        track.finish_subgroup(group, 0)
    hub.run()
    assert peer.stream_ends(request_id) == [*OVER, None, None]
    assert sorted(peer.locations(request_id)) == [Location(group, 0) for group in range(3)]


def test_who_holds_less_than_an_equal_share_loses_nothing_whatever_its_priority() -> None:
    hub, peers = pressed(RelayLimits(max_queued_octets=3000), *3 * [PUBLICATION])
    assert wait_below(hub, peers, 5000, 900, 900) == [OVER, [], []]


def test_what_some_leave_of_their_share_is_the_others() -> None:
    hub, peers = pressed(RelayLimits(max_queued_octets=3000), *4 * [PUBLICATION])
    assert wait_below(hub, peers, 2600, 10, 10, 900) == [OVER, [], [], []]


def test_as_many_streams_are_reset_as_it_takes() -> None:
    hub, peers = pressed(RelayLimits(max_queued_octets=2000), *4 * [PUBLICATION])
    assert wait_below(hub, peers, 1000, 1000, 1000, 1000) == [[], [], OVER, OVER]


def test_a_scope_at_its_limit_loses_its_own_streams_alone() -> None:
    limits = RelayLimits(scope_queued_octets=1000)
    hub, peers = pressed(limits, PUBLICATION, PUBLICATION, ELSEWHERE)
    assert wait_below(hub, peers, 600, 600, 1000) == [[], OVER, []]


def test_a_subgroup_that_was_reset_is_not_begun_again_in_its_middle() -> None:
    hub = Hub(RelayLimits(max_queued_octets=100))
    track = PublisherPeer(hub).track()
    peer = ConsumerPeer(hub)
    request_id = peer.subscribe(fill=None)
    put(track, 0, 0)
    hub.run()
    assert wait_below(hub, [peer], 101) == [OVER]
    peer.spoke.queued = 0
    put(track, 0, 1)
    put(track, 1, 0)
    hub.run()
    assert peer.locations(request_id) == [Location(0, 0), Location(1, 0)]


def test_where_no_stream_is_open_nothing_is_reset() -> None:
    hub, track = served(RelayLimits(max_queued_octets=100))
    put_group(track, 0, 1)
    peer = ConsumerPeer(hub)
    request_id = peer.subscribe()
    assert wait_below(hub, [peer], 1000) == [[None]]
    assert hub.core.stats.pressure_resets == 0 and peer.done(request_id) is None
    assert peer.refused(peer.fetch()) is None
    # That much may wait for all; a scope's own limit is another matter.
    assert RelayLimits().scope_queued_octets < RelayLimits().max_queued_octets

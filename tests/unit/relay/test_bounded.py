"""Peers that ask, cancel and stall without end: what the relay keeps for them is bounded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import MAX_VI64, FullTrackName
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.sending.delivery import RangeSender
from kvcs.relay import retrieving
from kvcs.relay.cache import EXPIRIES_SLACK, RelayCache
from kvcs.relay.settings import RelayLimits
from kvcs.relay.stats import RelayStats
from kvcs.relay.timers import CANCELLED_KEPT, Timers
from kvcs.testing.actors import ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import put


class Stalled:
    """A publisher that accepts subscriptions and never answers a FETCH."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.peer = PublisherPeer(hub)
        self.peer.before_answer = self._before

    def _before(self, event: events.Event) -> None:
        self.peer.silent = isinstance(event, events.FetchReceived)

    def serve(self, *names: FullTrackName) -> None:
        """Tracks of far-off Groups, which a relay does not get by itself."""
        for name in names:
            put(self.peer.track(name), 2**40, 0)


def far(group: int) -> LocationFilter:
    """One Location that the relay has to ask for."""
    return LocationFilter.absolute_range(group, 0, group, 0)


@contextmanager
def readers_gone() -> Iterator[None]:
    """No fetch or fill outlives what is done here."""

    def readers() -> int:
        gc.collect()
        # By type: isinstance asks an object for its class, and some answer with a warning.
        return sum(issubclass(type(found), RangeSender) for found in gc.get_objects())

    before = readers()
    yield
    assert readers() == before


def test_held_subscriptions_that_are_cancelled_leave_no_timer() -> None:
    hub = Hub()
    consumer = ConsumerPeer(hub)
    for number in range(300):
        name = full_name(b"%d" % number)
        consumer.cancel(consumer.subscribe(name, rendezvous_timeout=60_000))
    assert len(hub.core._timers) <= 2 * CANCELLED_KEPT
    assert not hub.core._tracks and not len(hub.core.cache)


def test_held_subscriptions_are_still_refused_in_time() -> None:
    hub = Hub()
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe(rendezvous_timeout=3000)
    hub.advance(2.9)
    assert consumer.refused(request_id) is None
    hub.advance(0.2)
    assert consumer.refused(request_id) == RequestCode.TIMEOUT


def test_a_fill_timeout_of_centuries_keeps_no_reader() -> None:
    hub = Hub()
    stalled = Stalled(hub)
    stalled.serve(full_name())
    consumer = ConsumerPeer(hub)
    kept = consumer.subscribe(fill=None)
    with readers_gone():
        for group in range(20):
            consumer.cancel(consumer.fetch(chosen=far(group), fill_timeout=2**60))
        waiting = consumer.fetch(chosen=far(77), fill_timeout=2**60)
        hub.advance(hub.core.limits.max_fill_wait + 1)
        assert consumer.stream_ends(waiting) == [None]
        assert len(consumer.markers(waiting)) == 1
    consumer.cancel(kept)
    hub.advance(70)
    assert len(hub.core._timers) == 0


def test_fetches_that_nobody_waits_for_are_not_sent_and_leave_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retrieving, "MAX_RETRIEVALS", 50)
    hub = Hub(RelayLimits(max_upstream_fetches=2))
    stalled = Stalled(hub)
    stalled.serve(full_name(b"a"), full_name(b"b"))
    holder, asker = ConsumerPeer(hub), ConsumerPeer(hub)
    for name in (full_name(b"a"), full_name(b"b")):
        holder.subscribe(name, fill=None)
    held = [holder.fetch(full_name(b"a"), far(group)) for group in range(2)]
    for group in range(200):
        asker.cancel(asker.fetch(full_name(b"b"), far(2 * group)))
    (publisher,) = (peer for peer in hub.core._peers.values() if peer.announced)
    assert publisher.turns is not None
    assert len(publisher.turns) <= retrieving.MAX_RETRIEVALS
    assert len(stalled.peer.fetches) == 2
    # When a slot comes free, what is left of them goes at once, and not by recursion.
    for request_id in held:
        holder.cancel(request_id)
    hub.advance(hub.core.limits.upstream_wait + 1)
    assert len(publisher.turns) == publisher.turns.running == 0
    assert len(stalled.peer.fetches) == 2
    assert not any(peer.core.closed for peer in hub.core._peers.values())


def test_what_is_served_is_told_without_what_is_over() -> None:
    hub = Hub()
    put(PublisherPeer(hub).track(), 0, 0)
    consumer = ConsumerPeer(hub)
    peer = hub.core.peer(consumer.spoke.key)
    assert peer is not None
    consumer.subscribe()
    for _ in range(5):
        consumer.fetch()
    assert consumer.objects() and peer.serving == 1


def test_a_retry_interval_of_centuries_goes_to_the_next_publisher() -> None:
    hub = Hub()
    slow, good = PublisherPeer(hub), PublisherPeer(hub)
    for publisher in (slow, good):
        put(publisher.track(), 5, 0)

    def before(event: events.Event) -> None:
        later = RequestError("later", RequestCode.EXCESSIVE_LOAD, 2**60)
        slow.refusal = later if isinstance(event, events.FetchReceived) else None

    slow.before_answer = before
    consumer = ConsumerPeer(hub)
    consumer.subscribe(fill=None)
    for publisher in (slow, good):
        publisher.fetches.clear()  # they had to show what they name
    request_id = consumer.fetch(chosen=far(3))
    assert len(slow.fetches) == len(good.fetches) == 1
    assert consumer.markers(request_id) == []
    assert consumer.stream_ends(request_id) == [None]


def test_tracks_that_left_are_not_remembered_by_their_expiry() -> None:
    cache = RelayCache(10**9, 16, lambda name: False, RelayStats())
    for number in range(1000):
        entry = cache.open(full_name(b"%d" % number))
        entry.track.properties = KeyValues.of({Property.MAX_CACHE_DURATION: MAX_VI64})
        put(entry.track, 0, 0)
        cache.began(entry, entry.track.groups[0].objects[0].header.location, 0.0)
    assert len(cache._expiries) <= 2 * len(cache) + EXPIRIES_SLACK
    assert cache.next_timer() is not None


def test_timers_run_in_order_and_cancelled_ones_do_not() -> None:
    timers, ran = Timers(), []
    for when in (3.0, 1.0, 2.0):
        timers.at(when, lambda now, when=when: ran.append(when))  # type: ignore[misc]
    never = timers.at(0.5, lambda now: ran.append(0.5))
    assert timers.next() == 0.5
    never.cancel()
    never.cancel()
    assert timers.next() == 1.0
    timers.run(2.5)
    assert ran == [1.0, 2.0]
    assert timers.next() == 3.0


@pytest.mark.parametrize("live", [0, 500])
def test_cancelled_timers_are_swept_out(live: int) -> None:
    timers = Timers()
    for _ in range(live):
        timers.at(9.0, lambda now: None)
    for _ in range(10_000):
        timers.at(5.0, lambda now: None).cancel()
    assert live <= len(timers) <= 2 * (live + CANCELLED_KEPT) + 1
    timers.run(10.0)
    assert len(timers) == 0 and timers.next() is None

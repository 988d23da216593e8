"""The cache's budget, eviction and expiry (MOQT §7.1, §10)."""

from __future__ import annotations

import pytest

from kvcs.errors import RequestError, StoreFull, UsageError
from kvcs.moqt.errors import PublishDoneCode, RequestCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.objects import ObjectHeader
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.track.stored import OBJECT_BOOKKEEPING_OCTETS
from kvcs.relay.cache import TRACK_OCTETS, CachedTrack, RelayCache
from kvcs.relay.settings import RelayLimits
from kvcs.relay.stats import RelayStats
from kvcs.testing.actors import ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import end_track, payload, put, put_group

OBJECT = 1000
COST = OBJECT + OBJECT_BOOKKEEPING_OCTETS


class Shelf:
    """A cache on its own, and Tracks that a test says are in use."""

    def __init__(self, octets: int, max_tracks: int = 16) -> None:
        self.used: set[FullTrackName] = set()
        self.stats = RelayStats()
        self.cache = RelayCache(octets, max_tracks, self.used.__contains__, self.stats)

    def open(self, name: str, *, used: bool = False, duration_ms: int | None = None) -> CachedTrack:
        full = full_name(name.encode())
        if used:
            self.used.add(full)
        entry = self.cache.open(full)
        if duration_ms is not None:
            entry.track.properties = KeyValues.of({Property.MAX_CACHE_DURATION: duration_ms})
        return entry

    def add(self, entry: CachedTrack, group: int, object_id: int = 0, now: float = 0.0) -> None:
        header = ObjectHeader(group, object_id, 0, 1, payload_length=OBJECT)
        writer = entry.track.begin_fetched(header, now)
        writer.write(memoryview(payload(header.location, OBJECT)))
        self.cache.began(entry, header.location, now)

    def groups(self, entry: CachedTrack) -> list[int]:
        return list(entry.track.group_ids())


def test_the_budget_counts_payload_bookkeeping_and_tracks() -> None:
    shelf = Shelf(10**6)
    entry = shelf.open("a")
    assert shelf.cache.octets == TRACK_OCTETS
    shelf.add(entry, 0)
    assert shelf.cache.octets == TRACK_OCTETS + COST
    shelf.cache.drop(entry.track.name)
    assert shelf.cache.octets == 0
    assert shelf.cache.get(entry.track.name) is None


def test_properties_count_too() -> None:
    shelf = Shelf(10**6)
    entry = shelf.open("a")
    entry.track.begin_fetched(ObjectHeader(0, 0, 0, 1, properties=bytes(500)), 0.0)
    assert shelf.cache.octets == TRACK_OCTETS + OBJECT_BOOKKEEPING_OCTETS + 500


def test_whole_groups_leave_least_recently_used_first() -> None:
    shelf = Shelf(TRACK_OCTETS + 4 * COST)
    entry = shelf.open("a")
    for group in range(4):
        shelf.add(entry, group)
    entry.track.touch(0)
    shelf.add(entry, 4)
    assert shelf.groups(entry) == [0, 2, 3, 4]
    assert shelf.stats.groups_evicted == 1
    unknown = entry.track.first_unknown(Location(1, 0), Location(1, 0))
    assert unknown == (Location(1, 0), Location(1, 0))  # not absent


def test_eviction_reaches_over_tracks_and_empties_leave() -> None:
    shelf = Shelf(2 * TRACK_OCTETS + 3 * COST)
    old, new = shelf.open("old"), shelf.open("new")
    shelf.add(old, 0)
    for group in range(3):
        shelf.add(new, group)
    assert shelf.cache.get(old.track.name) is None
    assert len(shelf.cache) == 1
    assert shelf.groups(new) == [0, 1, 2]


def test_the_newest_group_of_a_live_track_stays_while_others_can_go() -> None:
    shelf = Shelf(2 * TRACK_OCTETS + 3 * COST)
    live, other = shelf.open("live", used=True), shelf.open("other", used=True)
    shelf.add(live, 7)
    shelf.add(other, 0)
    other.track.end(PublishDoneCode.TRACK_ENDED)
    shelf.add(other, 1)
    shelf.add(other, 2)
    assert shelf.groups(live) == [7]
    assert shelf.groups(other) == [1, 2]
    # Where nothing else can go it goes, too.
    live.track.groups[7].used = 0
    other.track.groups[1].arriving = other.track.groups[2].arriving = 1
    shelf.add(other, 3)
    assert shelf.groups(live) == []


def test_a_group_that_is_arriving_is_never_evicted() -> None:
    shelf = Shelf(TRACK_OCTETS + 2 * COST)
    entry = shelf.open("a")
    for group in range(2):
        shelf.add(entry, group)
        entry.track.groups[group].arriving = 1
    with pytest.raises(StoreFull):
        shelf.add(entry, 2)
    assert shelf.groups(entry) == [0, 1]
    assert shelf.cache.octets == TRACK_OCTETS + 2 * COST


def test_unused_tracks_make_room_for_new_ones() -> None:
    shelf = Shelf(10**6, max_tracks=2)
    shelf.open("used", used=True)
    shelf.open("unused")
    shelf.open("third", used=True)
    assert shelf.cache.get(full_name(b"unused")) is None
    with pytest.raises(RequestError) as refused:
        shelf.open("fourth")
    assert refused.value.code == RequestCode.EXCESSIVE_LOAD


def test_a_cache_without_room_for_a_track_refuses_it() -> None:
    shelf = Shelf(TRACK_OCTETS - 1)
    with pytest.raises(RequestError) as refused:
        shelf.open("a")
    assert refused.value.code == RequestCode.EXCESSIVE_LOAD
    assert len(shelf.cache) == 0


def test_objects_expire_each_at_its_own_time() -> None:
    shelf = Shelf(10**6)
    entry = shelf.open("a", duration_ms=10_000)
    shelf.add(entry, 0, 0, now=0.0)
    shelf.add(entry, 0, 1, now=4.0)
    shelf.add(entry, 1, 0, now=5.0)
    assert shelf.cache.next_timer() == pytest.approx(10.0)
    shelf.cache.receive_timer(10.0)
    assert entry.track.get(Location(0, 0)) is not None  # to the last moment
    shelf.cache.receive_timer(10.1)
    assert entry.track.get(Location(0, 0)) is None
    assert entry.track.get(Location(0, 1)) is not None
    assert shelf.cache.next_timer() == pytest.approx(14.0)
    shelf.cache.receive_timer(14.1)
    assert shelf.groups(entry) == [1]
    shelf.cache.receive_timer(60.0)
    assert shelf.cache.next_timer() is None
    assert shelf.cache.octets == 0  # an empty track that nobody uses is dropped
    assert shelf.stats.objects_expired == 3


def test_the_timer_is_due_when_there_is_something_to_expire() -> None:
    shelf = Shelf(10**6)
    entry = shelf.open("a", duration_ms=10_000)
    shelf.add(entry, 0, 0, now=4.95538)
    due = shelf.cache.next_timer()
    assert due is not None
    shelf.cache.receive_timer(due)  # a clock may strike at the very instant
    assert shelf.stats.objects_expired == 1
    assert shelf.cache.next_timer() is None


def test_who_arms_the_timer_hears_when_it_is_due_earlier() -> None:
    """Objects come without an event each, so nobody would look at the timer otherwise."""
    shelf = Shelf(10**6)
    told: list[float | None] = []
    shelf.cache.on_due = lambda: told.append(shelf.cache.next_timer())
    late = shelf.open("a", duration_ms=10_000)
    shelf.add(late, 0, 0, now=1.0)
    assert told == [pytest.approx(11.0)]
    shelf.add(late, 0, 1, now=2.0)
    assert len(told) == 1
    soon = shelf.open("b", duration_ms=1000)
    shelf.add(soon, 0, 0, now=2.0)
    assert told[1:] == [pytest.approx(3.0)]
    shelf.add(shelf.open("c", duration_ms=5000), 0, 0, now=2.0)
    assert len(told) == 2
    shelf.cache.receive_timer(3.1)
    shelf.add(soon, 1, 0, now=3.2)  # its first one again
    assert told[2:] == [pytest.approx(4.2)]


def test_a_shorter_duration_that_comes_later_counts() -> None:
    shelf = Shelf(10**6)
    entry = shelf.open("a", used=True)
    shelf.add(entry, 0, now=0.0)
    assert shelf.cache.next_timer() is None
    entry.track.properties = KeyValues.of({Property.MAX_CACHE_DURATION: 1000})
    shelf.cache.schedule(entry)
    shelf.cache.receive_timer(1.1)
    assert shelf.groups(entry) == []
    assert shelf.cache.octets == TRACK_OCTETS


def test_ages_of_evicted_objects_do_not_pile_up() -> None:
    shelf = Shelf(TRACK_OCTETS + 10 * COST)
    entry = shelf.open("a")
    for group in range(5000):
        shelf.add(entry, group)
    assert len(shelf.groups(entry)) <= 10
    assert len(entry.ages) < 3000


@pytest.mark.parametrize("name", ["cache_octets", "max_object_octets", "max_tracks"])
def test_limits_are_checked(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        RelayLimits(**{name: 0})
    with pytest.raises(UsageError, match="fetch_wait"):
        RelayLimits(fetch_wait=-1.0)


# In the relay


def test_an_expired_object_is_fetched_again_and_never_called_absent() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    track = publisher.track(properties=KeyValues.of({Property.MAX_CACHE_DURATION: 1000}))
    put_group(track, 0, 2)
    first = ConsumerPeer(hub)
    first.subscribe()
    hub.advance(2)
    late = ConsumerPeer(hub)
    request_id = late.subscribe()
    assert late.locations(request_id) == [Location(0, 0), Location(0, 1)]
    assert len(publisher.fetches) == 1
    hub.advance(2)
    publisher.refusal = RequestError("no", RequestCode.INTERNAL_ERROR)
    later = ConsumerPeer(hub)
    request_id = later.subscribe()
    assert later.locations(request_id) == []
    assert len(later.markers(request_id)) == 1


def test_an_expired_finished_track_is_not_served_as_whole() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub)
    track = publisher.track(properties=KeyValues.of({Property.MAX_CACHE_DURATION: 5000}))
    put_group(track, 0, 2)
    first = ConsumerPeer(hub)
    first.subscribe()
    end_track(track, 1)
    hub.advance(2)
    publisher.leave()
    late = ConsumerPeer(hub)
    assert len(late.locations(late.subscribe())) == 2
    hub.advance(10)
    assert late.refused(late.subscribe()) == RequestCode.DOES_NOT_EXIST
    assert hub.core.snapshot().tracks == 0


def test_a_relay_under_pressure_serves_everything_by_fetching_again() -> None:
    hub = Hub(RelayLimits(cache_octets=2 * TRACK_OCTETS + 12 * COST))
    publisher = PublisherPeer(hub)
    track = publisher.track()
    for group in range(8):
        put_group(track, group, 3, octets=OBJECT)
    wanted = [Location(g, o) for g in range(8) for o in range(3)]
    for _ in range(3):
        consumer = ConsumerPeer(hub)
        request_id = consumer.fetch()
        assert consumer.locations(request_id) == wanted
        assert consumer.markers(request_id) == []
        assert hub.core.cache.octets <= hub.core.limits.cache_octets
    assert hub.core.snapshot().groups_evicted > 0


def test_an_object_that_the_cache_cannot_hold_is_not_carried() -> None:
    hub = Hub(RelayLimits(cache_octets=2 * TRACK_OCTETS + 2 * COST))
    publisher = PublisherPeer(hub)
    track = publisher.track()
    consumer = ConsumerPeer(hub)
    request_id = consumer.subscribe()
    put(track, 0, 0, octets=20_000)
    track.finish_subgroup(0, 0)
    put(track, 1, 0, octets=OBJECT)
    track.finish_subgroup(1, 0)
    hub.run()
    assert consumer.locations(request_id) == [Location(1, 0)]
    assert hub.core.snapshot().too_large == 1
    fetch = consumer.fetch(chosen=LocationFilter.absolute_start(0, 0))
    assert consumer.locations(fetch) == [Location(1, 0)]
    assert [mark.location.group for mark in consumer.markers(fetch)] == [0]
    assert not publisher.end.core.closed

"""A Track's Objects: publishing them, taking them over, and letting them go (MOQT §2, §7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcs.errors import StoreFull, UsageError
from kvcs.moqt.errors import MalformedTrack, PublishDoneCode, StreamCode
from kvcs.moqt.names import MAX_VI64, Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.streams import SubgroupHeader
from kvcs.moqt.track import store
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import OBJECT_BOOKKEEPING_OCTETS, Group, StoreBudget, Subgroup
from kvcs.testing.tracks import NAME, bring, end_track, payload, put, put_group, track

END_OF_GROUP, END_OF_TRACK = ObjectStatus.END_OF_GROUP, ObjectStatus.END_OF_TRACK
HEADER = SubgroupHeader(9, 0, 0, 0, first_object=True)


def at(group: int, object_id: int) -> Location:
    return Location(group, object_id)


class Follower:
    """Records what a Track tells those who follow it."""

    def __init__(self, target: Track) -> None:
        self.heard: list[object] = []
        target.listeners.append(self)

    def object_added(self, subgroup: Subgroup, count: int = 1) -> None:
        self.heard += [stored.header.location for stored in subgroup.objects[-count:]]

    def subgroup_ended(self, subgroup: Subgroup) -> None:
        how = "fin" if subgroup.reset_code is None else subgroup.reset_code
        self.heard.append((subgroup.group_id, subgroup.subgroup_id, how))

    def group_evicted(self, group: Group) -> None:
        self.heard.append(("evicted", group.group_id))

    def track_ended(self) -> None:
        self.heard.append("ended")


class Sleeper:
    """Counts how often it is woken."""

    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


# Publishing


def test_what_is_published_is_found_and_told() -> None:
    source = track()
    follower = Follower(source)
    put_group(source, 3, 1)
    put(source, 1, 0)
    end_track(source, 4)
    assert source.group_ids() == [1, 3, 4]
    stored = source.get(at(3, 0))
    assert stored is not None
    assert b"".join(stored.views(0, 100)) == payload(at(3, 0))
    assert source.get(at(3, 9)) is None
    assert source.get(at(9, 0)) is None
    assert source.largest == at(4, 0)
    assert source.final == at(4, 0)
    assert follower.heard == [
        at(3, 0),
        at(3, 1),
        (3, 0, "fin"),
        at(1, 0),
        at(4, 0),
        (4, 0, "fin"),
        (1, 0, StreamCode.CANCELLED),
        "ended",
    ]


@pytest.mark.parametrize(
    "publish",
    [
        pytest.param(lambda source: put(source, 0, 1), id="location used"),
        pytest.param(lambda source: put(source, 0, 9), id="behind end of group"),
        pytest.param(lambda source: put(source, 1, 3), id="behind the end of group bit"),
        pytest.param(lambda source: put(source, 2, 3), id="before the last of its subgroup"),
        pytest.param(lambda source: put(source, 2, 6, priority=1), id="another priority"),
        pytest.param(
            lambda source: put(source, 2, 4, status=END_OF_GROUP, subgroup=1),
            id="end of group before an object",
        ),
        pytest.param(
            lambda source: put(source, 1, 9, status=END_OF_TRACK), id="end of track before a group"
        ),
        pytest.param(
            lambda source: source.publish(
                ObjectHeader(2, 6, 0, 0, properties=b"\x78\x05"), (), 0.0
            ),
            id="properties where the stream has none",
        ),
        pytest.param(lambda source: put(source, 5, 0), id="in a group that was evicted"),
    ],
)
def test_an_object_never_changes_and_an_end_stays(publish: Callable[[Track], None]) -> None:
    source = track()
    put_group(source, 0, 2)
    put(source, 1, 2)
    source.finish_subgroup(1, 0)
    put(source, 2, 5)
    put(source, 5, 0)
    put(source, 6, 0)
    source.evict_group(5)
    before = (source.largest, source.octets)
    with pytest.raises(UsageError):
        publish(source)
    assert (source.largest, source.octets) == before


def test_nothing_is_published_behind_the_end_of_the_track() -> None:
    source = track()
    end_track(source, 4)
    with pytest.raises(UsageError):
        put(source, 3, 0)
    source = track()
    put(source, 4, 0, status=END_OF_TRACK)
    put(source, 3, 0)
    with pytest.raises(UsageError):
        put(source, 5, 0)


def test_a_finished_subgroup_takes_no_more() -> None:
    source = track()
    source.publish(ObjectHeader(0, 0, 0, 0), (), 0.0)
    source.finish_subgroup(0, 0)
    with pytest.raises(UsageError):
        source.publish(ObjectHeader(0, 1, 0, 0), (), 0.0)
    source.publish(ObjectHeader(0, 1, 1, 0), (), 0.0)


def test_a_subgroup_that_begins_with_properties_may_have_them_later() -> None:
    source = track()
    for object_id, properties in enumerate((b"\x78\x05", b"", b"\x78\x06")):
        source.publish(ObjectHeader(0, object_id, 0, 0, properties=properties), (), 0.0)
    assert source.groups[0].subgroups[0].has_properties


def test_finishing_what_was_evicted_is_quiet() -> None:
    source = track()
    put(source, 0, 0)
    source.evict_group(0)
    source.finish_subgroup(0, 0)
    source.finish_subgroup(7, 0)


def test_subgroups_of_a_group_are_apart() -> None:
    source = track()
    put(source, 0, 5, subgroup=2)
    put(source, 0, 3, subgroup=1, priority=9)
    assert source.groups[0].object_ids == [3, 5]
    assert {key: one.priority for key, one in source.groups[0].subgroups.items()} == {2: 0, 1: 9}


def test_a_track_that_ends_twice_keeps_its_first_end() -> None:
    source = track()
    source.end(PublishDoneCode.INTERNAL_ERROR, "gone")
    source.end()
    assert (source.ended, source.ended_reason) == (PublishDoneCode.INTERNAL_ERROR, "gone")
    source.reopen()
    assert source.ended is None


def test_a_full_budget_refuses_and_leaves_the_track_as_it_was() -> None:
    source = Track(NAME, authoritative=True, budget=StoreBudget(2 * OBJECT_BOOKKEEPING_OCTETS))
    put(source, 0, 0)
    with pytest.raises(StoreFull):
        put(source, 1, 0, octets=OBJECT_BOOKKEEPING_OCTETS)
    assert source.group_ids() == [0]
    assert source.budget.used == source.octets == OBJECT_BOOKKEEPING_OCTETS + 8
    source.clear()
    assert source.budget.used == source.octets == 0


@pytest.mark.parametrize(
    ("properties", "priority"),
    [
        (KeyValues(), 128),
        (KeyValues.of({Property.DEFAULT_PUBLISHER_PRIORITY: 7}), 7),
        (
            KeyValues.of(
                {
                    Property.IMMUTABLE_PROPERTIES: KeyValues.of(
                        {Property.DEFAULT_PUBLISHER_PRIORITY: 9}
                    ).write()
                }
            ),
            9,
        ),
    ],
)
def test_default_priority(properties: KeyValues, priority: int) -> None:
    assert track(properties=properties).default_priority == priority


# What is known


def test_what_the_origin_has_not_published_does_not_exist() -> None:
    source = track()
    put(source, 0, 0)
    assert source.first_unknown(at(0, 0), at(9, 9)) is None


def test_what_the_origin_has_evicted_is_unknown() -> None:
    source = track()
    put_group(source, 0, 1)
    put(source, 1, 0)
    source.evict_group(1)
    source.evict_group(0)
    assert source.first_unknown(at(0, 0), at(0, 9)) == (at(0, 0), at(0, 1))
    assert source.first_unknown(at(0, 2), at(1, 0)) == (at(1, 0), at(1, 0))


def test_a_cache_knows_what_it_holds_and_what_it_learnt() -> None:
    cache = track(authoritative=False)
    bring(cache, 0, 2)
    assert cache.first_unknown(at(0, 0), at(0, 9)) == (at(0, 0), at(0, 1))
    assert cache.first_unknown(at(0, 2), at(0, 2)) is None
    cache.learn(at(0, 0), at(0, 5))
    assert cache.first_unknown(at(0, 0), at(0, 9)) == (at(0, 6), at(0, 9))


def test_the_ranges_that_a_cache_learns_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_KNOWN_RANGES", 5)
    cache = track(authoritative=False)
    sleeper = Sleeper()
    for group in range(20):
        cache.watch(sleeper)
        cache.learn(at(2 * group, 0), at(2 * group, 1))
    assert len(cache.known) == 5
    assert sleeper.woken == 20


@pytest.mark.parametrize("status", [END_OF_GROUP, END_OF_TRACK])
def test_a_status_says_what_does_not_exist(status: ObjectStatus) -> None:
    cache = track(authoritative=False)
    stream = cache.open_stream(HEADER)
    stream.begin(ObjectHeader(0, 2, 0, 0, status), 0.0)
    assert cache.first_unknown(at(0, 2), at(0, 9)) is None
    assert (cache.first_unknown(at(1, 0), at(1, 0)) is None) == (status is END_OF_TRACK)
    assert cache.final == (at(0, 2) if status is END_OF_TRACK else None)


def test_largest_moves_with_what_comes_live_and_what_upstream_names_only() -> None:
    cache = track(authoritative=False)
    bring(cache, 7, 0)
    assert cache.largest is None
    cache.note_largest(at(3, 0))
    cache.note_largest(at(2, 0))
    assert cache.largest == at(3, 0)
    cache.open_stream(HEADER).begin(ObjectHeader(4, 0, 0, 0, payload_length=5), 0.0)
    assert cache.largest == at(4, 0)


def test_an_expired_object_is_only_a_caches() -> None:
    properties = KeyValues.of({Property.MAX_CACHE_DURATION: 500})
    for authoritative in (True, False):
        target = track(authoritative=authoritative, properties=properties)
        bring(target, 0, 0)
        stored = target.get(at(0, 0))
        assert stored is not None
        assert not target.expired(stored, 0.5)
        assert target.expired(stored, 0.6) is not authoritative
    stored = track().next_stored(at(0, 0), at(9, 9))
    assert stored is None


@pytest.mark.parametrize(
    ("start", "end", "found"),
    [
        (at(0, 0), at(9, 9), at(1, 2)),
        (at(1, 3), at(9, 9), at(1, 5)),
        (at(1, 6), at(9, 9), at(4, 0)),
        (at(1, 6), at(3, 9), None),
        (at(4, 1), at(9, 9), None),
        (at(1, 3), at(1, 4), None),
    ],
)
def test_next_stored(start: Location, end: Location, found: Location | None) -> None:
    cache = track(authoritative=False)
    for group, object_id in ((4, 0), (1, 5), (1, 2)):
        bring(cache, group, object_id)
    stored = cache.next_stored(start, end)
    assert (None if stored is None else stored.header.location) == found


# Leaving


def test_eviction_is_told_and_gives_the_octets_back() -> None:
    cache = track(authoritative=False)
    follower = Follower(cache)
    bring(cache, 0, 0)
    bring(cache, 1, 0)
    freed = cache.evict_group(0)
    assert freed == OBJECT_BOOKKEEPING_OCTETS + 8
    assert cache.evict_group(0) == 0
    assert cache.octets == cache.budget.used == freed
    assert follower.heard == [("evicted", 0)]
    assert cache.first_unknown(at(0, 0), at(0, 0)) == (at(0, 0), at(0, 0))


def test_the_end_of_a_group_stays_known_when_it_is_evicted() -> None:
    cache = track(authoritative=False)
    bring(cache, 0, 0)
    cache.end_group(0, 3)
    cache.evict_group(0)
    assert cache.first_unknown(at(0, 0), at(0, 0)) is not None
    assert cache.first_unknown(at(0, 4), at(0, MAX_VI64)) is None


def test_a_group_whose_objects_are_gone_can_be_evicted_while_a_stream_brings_it() -> None:
    cache = track(authoritative=False)
    stream = cache.open_stream(HEADER)
    stream.begin(ObjectHeader(0, 0, 0, 0, payload_length=8), 0.0)
    stored = cache.get(at(0, 0))
    assert stored is not None
    cache.end_group(0, 3)
    cache.forget(stored)
    assert cache.group_ids() == [0]
    cache.evict_group(0)
    assert cache.octets == 0


def test_what_is_discarded_is_unknown_again() -> None:
    cache = track(authoritative=False)
    bring(cache, 0, 0)
    stored = cache.get(at(0, 0))
    assert stored is not None
    cache.discard(stored)
    cache.discard(stored)
    assert cache.groups == {}
    assert cache.group_ids() == []
    assert cache.octets == 0
    assert cache.first_unknown(at(0, 0), at(0, 0)) is not None


@pytest.mark.parametrize("how", ["evicted", "expired"])
def test_who_waits_for_the_rest_of_an_object_hears_its_end_wherever_it_is(how: str) -> None:
    cache = track(authoritative=False)
    writer = cache.begin_fetched(ObjectHeader(0, 0, 0, 0, payload_length=8), 0.0)
    stored = cache.get(at(0, 0))
    assert stored is not None
    if how == "evicted":
        cache.evict_group(0)
    else:
        cache.forget(stored)
    sleeper = Sleeper()
    stored.watch(sleeper)
    cache.abandon(writer)
    assert sleeper.woken == 1
    assert stored.failed


def test_the_last_one_to_leave_is_told() -> None:
    left: list[str] = []
    source = track()
    source.on_unfollowed = lambda: left.append("left")
    first, second = Follower(source), Follower(source)
    source.leave(first)
    source.leave(first)
    source.readers += 1
    source.leave(second)
    assert source.followed
    assert left == []
    source.reader_left()
    assert left == ["left"]


def test_a_group_that_is_used_is_the_last_to_go_and_one_that_is_not_there_is_quiet() -> None:
    cache = track(authoritative=False)
    bring(cache, 0, 0)
    bring(cache, 1, 0)
    cache.touch(0)
    cache.touch(7)
    assert cache.groups[0].used > cache.groups[1].used
    cache.end_group(7, 3)
    assert cache.first_unknown(at(7, 3), at(7, MAX_VI64)) is None


def test_an_object_that_left_may_be_forgotten_again() -> None:
    cache = track(authoritative=False)
    bring(cache, 0, 0)
    stored = cache.get(at(0, 0))
    assert stored is not None
    cache.evict_group(0)
    cache.forget(stored)
    assert cache.octets == 0


# Datagrams


def test_a_datagram_is_kept_and_told_once() -> None:
    cache = track(authoritative=False)
    follower = Follower(cache)
    header = ObjectHeader(2, 1, None, 3, payload_length=4)
    for _ in range(2):
        cache.take_datagram(header, b"data", 0.0)
    assert follower.heard == [at(2, 1)]
    assert cache.largest == at(2, 1)
    with pytest.raises(MalformedTrack):
        cache.take_datagram(header, b"date", 0.0)
    cache.take_datagram(ObjectHeader(2, 2, None, 3, END_OF_GROUP), b"", 0.0)
    assert cache.first_unknown(at(2, 2), at(2, 9)) is None


@pytest.mark.parametrize(
    ("changes", "parts", "why"),
    [
        ({"payload_length": 3}, (memoryview(b"four"),), "have 4 octets, the header says 3"),
        ({}, b"four", "a sequence of memoryviews"),
        ({}, memoryview(b"four"), "a sequence of memoryviews"),
        ({}, ("four",), "a sequence of memoryviews"),
        ({}, (memoryview(b"four").cast("H"),), "are cast to octets first"),
        ({"group_id": -1}, (memoryview(b"four"),), r"lie in 0\.\.2\*\*64-1"),
        ({"object_id": MAX_VI64 + 1}, (memoryview(b"four"),), r"lie in 0\.\.2\*\*64-1"),
        ({"subgroup_id": -1}, (memoryview(b"four"),), r"lie in 0\.\.2\*\*64-1"),
        ({"publisher_priority": 256}, (memoryview(b"four"),), r"lies in 0\.\.255, not 256"),
    ],
)
def test_what_no_peer_could_be_sent_is_not_published(
    changes: dict[str, Any], parts: Any, why: str
) -> None:
    target = track()
    header = ObjectHeader(**{"group_id": 0, "object_id": 0, "payload_length": 4, **changes})
    with pytest.raises(UsageError, match=why):
        target.publish(header, parts, 0.0)
    assert target.largest is None
    header = ObjectHeader(group_id=0, object_id=0, payload_length=4)
    target.publish(header, (memoryview(b"fo"), memoryview(b"ur")), 0.0)
    assert target.largest == at(0, 0)

"""Subgroup streams on their way into a store, from one publisher or several (MOQT §7, §11.3)."""

from __future__ import annotations

import pytest

from kvcs.moqt.errors import MalformedTrack, StreamCode
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.streams import SubgroupHeader
from kvcs.moqt.track.live import LiveStream
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import Subgroup
from kvcs.testing.tracks import payload, track

HEADER = SubgroupHeader(9, 0, 0, 0, end_of_group=True, first_object=True)


def header(object_id: int, *, octets: int = 8, group: int = 0) -> ObjectHeader:
    return ObjectHeader(group, object_id, 0, 0, payload_length=octets)


def bring(stream: LiveStream, *object_ids: int) -> None:
    """Whole Objects come on a stream."""
    for object_id in object_ids:
        writer = stream.begin(header(object_id), 0.0)
        writer.write(memoryview(payload(Location(0, object_id))))


def subgroup(cache: Track) -> Subgroup:
    return cache.groups[0].subgroups[0]


def ids(cache: Track) -> list[int]:
    return [stored.header.object_id for stored in subgroup(cache).objects]


def continued(cache: Track) -> list[bool]:
    return [stored.continues for stored in subgroup(cache).objects]


def test_a_stream_fills_its_subgroup_and_ends_it() -> None:
    cache = track(authoritative=False)
    stream = cache.open_stream(HEADER)
    bring(stream, 0, 2, 3)
    assert cache.groups[0].arriving == 1
    stream.finish()
    assert ids(cache) == [0, 2, 3]
    assert continued(cache) == [True, True, True]
    assert subgroup(cache).finished
    assert subgroup(cache).from_start
    assert cache.groups[0].final == 3
    assert cache.groups[0].arriving == 0
    assert cache.first_unknown(Location(0, 3), Location(0, 99)) is None


def test_the_end_of_group_bit_is_void_after_a_reset() -> None:
    cache = track(authoritative=False)
    stream = cache.open_stream(HEADER)
    bring(stream, 0)
    stream.reset(StreamCode.CANCELLED)
    assert cache.groups[0].final is None
    assert subgroup(cache).reset_code == StreamCode.CANCELLED


def test_a_stream_without_the_bit_says_nothing_about_its_group() -> None:
    cache = track(authoritative=False)
    stream = cache.open_stream(SubgroupHeader(9, 0, 0, 0))
    bring(stream, 4)
    stream.finish()
    assert cache.groups[0].final is None
    assert not subgroup(cache).from_start


@pytest.mark.parametrize("empty", [True, False])
def test_a_stream_that_brought_nothing_leaves_nothing(empty: bool) -> None:
    cache = track(authoritative=False)
    stream = cache.open_stream(HEADER)
    if empty:
        stream.finish()
    else:
        stream.reset(StreamCode.CANCELLED)
    assert cache.groups == {}


def test_a_reset_drops_the_object_that_it_cut() -> None:
    cache = track(authoritative=False)
    stream = cache.open_stream(HEADER)
    bring(stream, 0)
    stream.begin(header(1), 0.0).write(memoryview(b"abc"))
    stored = cache.get(Location(0, 1))
    stream.reset(StreamCode.CANCELLED)
    assert cache.get(Location(0, 1)) is None
    assert stored is not None
    assert stored.failed
    assert cache.get(Location(0, 0)) is not None


def test_a_reset_in_the_first_object_leaves_no_group() -> None:
    cache = track(authoritative=False)
    stream = cache.open_stream(HEADER)
    stream.begin(header(0), 0.0)
    stream.reset(StreamCode.CANCELLED)
    assert cache.groups == {}
    assert cache.octets == 0


def test_objects_beyond_an_end_are_malformed() -> None:
    cache = track(authoritative=False)
    stream = cache.open_stream(HEADER)
    bring(stream, 0, 1)
    stream.finish()
    with pytest.raises(MalformedTrack):
        bring(cache.open_stream(HEADER), 2)
    end = ObjectHeader(1, 0, 0, 0, ObjectStatus.END_OF_TRACK)
    cache.open_stream(SubgroupHeader(9, 1, 0, 0)).begin(end, 0.0)
    with pytest.raises(MalformedTrack):
        cache.open_stream(SubgroupHeader(9, 2, 0, 0)).begin(header(0, group=2), 0.0)


def test_a_new_stream_goes_on_where_the_next_object_is_proved() -> None:
    cache = track(authoritative=False)
    for object_ids in ((0, 1), (2, 3), (7,)):
        stream = cache.open_stream(HEADER)
        bring(stream, *object_ids)
        stream.reset(StreamCode.CANCELLED)
    assert ids(cache) == [0, 1, 2, 3, 7]
    assert continued(cache) == [True, True, True, True, False]


def test_two_publishers_bring_one_subgroup() -> None:
    cache = track(authoritative=False)
    first, second = cache.open_stream(HEADER), cache.open_stream(HEADER)
    bring(first, 0)
    bring(second, 0, 1)
    bring(first, 1, 2)
    assert ids(cache) == [0, 1, 2]
    assert all(continued(cache))
    first.reset(StreamCode.CANCELLED)
    assert subgroup(cache).reset_code is None
    bring(second, 2, 3)
    second.finish()
    assert cache.groups[0].final == 3
    first.reset(StreamCode.CANCELLED)
    assert subgroup(cache).finished


def test_the_end_of_a_group_is_the_last_object_of_the_stream_that_ends_it() -> None:
    cache = track(authoritative=False)
    first, second = cache.open_stream(HEADER), cache.open_stream(HEADER)
    bring(first, 0, 5)
    bring(second, 0, 2)
    first.finish()
    assert cache.groups[0].final == 5
    bring(second, 3)


def test_what_a_fetch_brought_first_is_still_told_live() -> None:
    cache = track(authoritative=False)
    told: list[Location] = []

    class Follower:
        def object_added(self, subgroup: Subgroup, count: int = 1) -> None:
            told.extend(stored.header.location for stored in subgroup.objects[-count:])

        def subgroup_ended(self, subgroup: Subgroup) -> None:
            told.append(Location(subgroup.group_id, 999))

        def group_evicted(self, group: object) -> None:
            raise AssertionError(group)

        def track_ended(self) -> None:
            raise AssertionError("not ended")

    cache.listeners.append(Follower())
    cache.begin_fetched(header(0), 0.0).write(memoryview(payload(Location(0, 0))))
    assert cache.largest is None
    stream = cache.open_stream(HEADER)
    bring(stream, 0, 1)
    stream.finish()
    assert told == [(0, 0), (0, 1), (0, 999)]
    assert cache.largest == (0, 1)


def test_a_stream_whose_group_was_evicted_under_way_goes_on_in_a_new_one() -> None:
    cache = track(authoritative=False)
    stream = cache.open_stream(HEADER)
    bring(stream, 0)
    old = cache.groups[0]
    cache.evict_group(0)
    bring(stream, 1)
    stream.finish()
    assert ids(cache) == [1]
    assert subgroup(cache).finished
    assert not subgroup(cache).from_start
    assert (old.arriving, cache.groups[0].arriving) == (0, 0)

"""Objects of a Track that come twice: copies that agree, that differ, that break off (MOQT §2)."""

from __future__ import annotations

import pytest

from kvcs.moqt.errors import MalformedTrack
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.streams import SubgroupHeader
from kvcs.testing.tracks import bring, payload, track

PLACE = Location(0, 0)
"""Of every Object here."""


@pytest.mark.parametrize(
    "other",
    [
        ObjectHeader(0, 0, 0, 0, payload_length=9),
        ObjectHeader(0, 0, 1, 0, payload_length=8),
        ObjectHeader(0, 0, None, 0, payload_length=8),
        ObjectHeader(0, 0, 0, 5, payload_length=8),
        ObjectHeader(0, 0, 0, None, payload_length=8),
        ObjectHeader(0, 0, 0, 0, ObjectStatus.END_OF_GROUP),
    ],
)
def test_a_copy_with_other_fields_makes_the_track_malformed(other: ObjectHeader) -> None:
    cache = track(authoritative=False)
    bring(cache, 0, 0)
    with pytest.raises(MalformedTrack):
        cache.begin_fetched(other, 0.0)
    with pytest.raises(MalformedTrack):
        cache.open_stream(SubgroupHeader(9, 0, 0, 0, first_object=True)).begin(other, 0.0)


def test_the_default_priority_may_be_spelt_out_in_a_copy() -> None:
    cache = track(authoritative=False)
    cache.begin_fetched(ObjectHeader(0, 0, 0, None, payload_length=8), 0.0)
    cache.begin_fetched(ObjectHeader(0, 0, 0, 128, payload_length=8), 0.0)


def test_a_copy_that_breaks_off_leaves_the_first() -> None:
    cache = track(authoritative=False)
    bring(cache, 0, 0)
    copy = cache.begin_fetched(ObjectHeader(0, 0, 0, 0, payload_length=8), 0.0)
    copy.write(memoryview(payload(PLACE))[:2])
    cache.abandon(copy)
    assert cache.get(PLACE) is not None


def test_the_first_that_breaks_off_leaves_the_object_to_its_copy() -> None:
    cache = track(authoritative=False)
    header = ObjectHeader(0, 0, 0, 0, payload_length=8)
    first = cache.begin_fetched(header, 0.0)
    second = cache.begin_fetched(header, 0.0)
    octets = memoryview(payload(PLACE))
    first.write(octets[:3])
    second.write(octets[:2])
    cache.abandon(first)
    second.write(octets[2:])
    stored = cache.get(PLACE)
    assert stored is not None
    assert stored.complete


def test_both_breaking_off_drops_the_object() -> None:
    cache = track(authoritative=False)
    header = ObjectHeader(0, 0, 0, 0, payload_length=8)
    first, second = cache.begin_fetched(header, 0.0), cache.begin_fetched(header, 0.0)
    cache.abandon(first)
    assert cache.get(PLACE) is not None
    cache.abandon(second)
    assert cache.get(PLACE) is None

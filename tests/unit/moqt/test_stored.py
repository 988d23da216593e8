"""Objects at rest: octets, copies, and the budget that they share (MOQT §2, §12.1)."""

from __future__ import annotations

import pytest

from kvcs.errors import StoreFull
from kvcs.moqt.errors import MalformedTrack
from kvcs.moqt.objects import ObjectHeader
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import (
    FIRST_PART_OCTETS,
    LEAST_PART_OCTETS,
    MANY_PARTS,
    OBJECT_BOOKKEEPING_OCTETS,
    DuplicateObject,
    StoreBudget,
    StoredObject,
    arriving,
)
from kvcs.testing.tracks import NAME

HEADER = ObjectHeader(1, 2, 0, 0, payload_length=10)
OCTETS = memoryview(b"0123456789")


class Sleeper:
    """Counts how often it is woken."""

    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


def held(stored: StoredObject, offset: int = 0, limit: int = 100) -> bytes:
    return b"".join(stored.views(offset, limit))


def test_views_are_slices_of_the_parts_and_copy_nothing() -> None:
    parts = (memoryview(b"head"), memoryview(b""), memoryview(b"payload"))
    stored = StoredObject(ObjectHeader(0, 0, payload_length=11), parts, 11, 0.0)
    assert stored.complete
    assert held(stored) == b"headpayload"
    assert held(stored, 2, 4) == b"adpa"
    assert held(stored, 4, 7) == b"payload"
    assert held(stored, 11) == b""
    assert next(stored.views(5, 2)).obj is parts[2].obj


def test_an_arriving_object_shows_what_is_there() -> None:
    stored = arriving(HEADER, 3.5)
    assert stored.born == 3.5
    assert held(stored) == b""
    stored.write(OCTETS[:4])
    assert (held(stored), held(stored, 3), stored.complete) == (b"0123", b"3", False)
    stored.write(OCTETS[4:])
    assert stored.complete


def test_an_object_without_payload_is_whole_at_once() -> None:
    assert arriving(ObjectHeader(0, 0), 0.0).complete


def test_who_watches_is_woken_once_with_more_octets_or_with_the_end() -> None:
    stored, sleeper, other = arriving(HEADER, 0.0), Sleeper(), Sleeper()
    stored.watch(sleeper)
    stored.watch(sleeper)
    stored.watch(other)
    stored.unwatch(other)
    stored.write(OCTETS[:1])
    stored.write(OCTETS[1:2])
    assert (sleeper.woken, other.woken) == (1, 0)
    stored.watch(sleeper)
    stored.fail()
    assert sleeper.woken == 2
    stored.unwatch(sleeper)


def test_an_object_that_broke_off_keeps_no_octets() -> None:
    stored = arriving(HEADER, 0.0)
    stored.write(OCTETS[:4])
    stored.fail()
    assert stored.failed
    assert held(stored) == b""
    stored.write(OCTETS[4:6])
    assert held(stored) == b""


def test_a_whole_object_that_is_dropped_can_still_be_sent() -> None:
    stored = arriving(HEADER, 0.0)
    stored.write(OCTETS)
    stored.fail()
    assert held(stored) == bytes(OCTETS)


def test_a_copy_with_the_same_octets_is_nothing() -> None:
    stored = arriving(HEADER, 0.0)
    stored.write(OCTETS)
    copy = DuplicateObject(stored)
    copy.write(OCTETS[:3])
    copy.write(OCTETS[3:])
    copy.fail()
    assert stored.followers == 0


@pytest.mark.parametrize("at", range(10))
def test_a_copy_with_another_octet_makes_the_track_malformed(at: int) -> None:
    stored = arriving(HEADER, 0.0)
    stored.write(OCTETS)
    damaged = bytearray(OCTETS)
    damaged[at] ^= 1
    copy = DuplicateObject(stored)
    with pytest.raises(MalformedTrack):
        for index in range(10):
            copy.write(memoryview(damaged)[index : index + 1])


def test_a_copy_may_overtake_the_first_and_they_complete_each_other() -> None:
    stored = arriving(HEADER, 0.0)
    stored.write(OCTETS[:2])
    copy = DuplicateObject(stored)
    copy.write(OCTETS[:6])
    assert held(stored) == bytes(OCTETS[:6])
    stored.write(OCTETS[2:5])
    assert held(stored) == bytes(OCTETS[:6])
    stored.write(OCTETS[5:8])
    copy.write(OCTETS[6:])
    assert stored.complete
    stored.write(OCTETS[8:])
    assert held(stored) == bytes(OCTETS)


def test_the_first_is_held_against_a_copy_that_overtook_it() -> None:
    stored = arriving(HEADER, 0.0)
    copy = DuplicateObject(stored)
    copy.write(OCTETS[:6])
    with pytest.raises(MalformedTrack):
        stored.write(memoryview(b"01x"))


def test_an_object_counts_its_payload_its_properties_and_what_keeping_it_costs() -> None:
    header = ObjectHeader(0, 0, properties=b"abc", payload_length=10)
    assert arriving(header, 0.0).octets == 13 + OBJECT_BOOKKEEPING_OCTETS
    assert StoredObject(header, (), 10, 0.0, octets=0).octets == 0


def test_a_budget_refuses_what_does_not_fit_and_takes_nothing_for_it() -> None:
    budget = StoreBudget(100)
    budget.reserve(60)
    with pytest.raises(StoreFull):
        budget.reserve(41)
    budget.reserve(40)
    budget.release(100)
    assert budget.used == 0


def test_a_budget_asks_for_the_room_that_it_lacks() -> None:
    asked: list[int] = []

    def free(octets: int) -> None:
        asked.append(octets)
        budget.release(50)

    budget = StoreBudget(100, free)
    budget.reserve(90)
    budget.reserve(30)
    assert (asked, budget.used) == ([20], 70)
    with pytest.raises(StoreFull):
        budget.reserve(90)


def test_ticks_grow() -> None:
    budget = StoreBudget(1)
    assert budget.tick() < budget.tick()


MIB = 2**20
HUGE = ObjectHeader(1, 2, 0, 0, payload_length=100 * MIB)


def test_an_announced_length_takes_no_memory_before_octets_come() -> None:
    stored = arriving(HUGE, 0.0)
    stored.write(OCTETS)
    assert sum(map(len, stored.parts)) == FIRST_PART_OCTETS
    assert stored.octets == FIRST_PART_OCTETS + OBJECT_BOOKKEEPING_OCTETS


@pytest.mark.parametrize("piece", [1000, LEAST_PART_OCTETS, FIRST_PART_OCTETS, 100_000, MIB])
def test_a_large_object_grows_with_what_comes_and_counts_it(piece: int) -> None:
    octets = bytes(range(256)) * 4096
    track = Track(NAME, authoritative=False, budget=StoreBudget(4 * MIB))
    header = ObjectHeader(0, 0, 0, 0, payload_length=len(octets))
    stored = track.begin_fetched(header, 0.0)
    assert isinstance(stored, StoredObject)
    for start in range(0, len(octets), piece):
        stored.write(memoryview(octets)[start : start + piece])
        assert sum(map(len, stored.parts)) <= max(2 * stored.received, FIRST_PART_OCTETS)
    assert stored.complete
    assert held(stored, limit=len(octets)) == octets
    assert track.budget.used == track.octets == len(octets) + OBJECT_BOOKKEEPING_OCTETS
    track.clear()
    assert track.budget.used == track.octets == 0


def test_what_comes_at_once_takes_no_more_room_than_its_octets() -> None:
    stored = arriving(HUGE, 0.0)
    piece = bytes(LEAST_PART_OCTETS)
    for _ in range(3):
        stored.write(memoryview(piece))
    assert list(map(len, stored.parts)) == 3 * [LEAST_PART_OCTETS]


def test_a_large_object_lies_in_few_parts_however_small_its_pieces_are() -> None:
    stored = arriving(ObjectHeader(0, 0, 0, 0, payload_length=32 * MIB), 0.0)
    piece = bytes(LEAST_PART_OCTETS)
    while not stored.complete:
        stored.write(memoryview(piece))
    assert len(stored.parts) <= MANY_PARTS + 8


def test_the_end_of_a_payload_takes_no_more_room_than_its_octets() -> None:
    stored = arriving(ObjectHeader(0, 0, 0, 0, payload_length=LEAST_PART_OCTETS + 3), 0.0)
    stored.write(bytes(LEAST_PART_OCTETS))
    stored.write(b"end")
    assert list(map(len, stored.parts)) == [LEAST_PART_OCTETS, 3]
    assert stored.complete


def test_a_payload_that_outgrows_the_budget_is_refused_and_leaves_nothing() -> None:
    track = Track(NAME, authoritative=False, budget=StoreBudget(MIB))
    stored = track.begin_fetched(HUGE, 0.0)
    with pytest.raises(StoreFull):
        for _ in range(100):
            stored.write(memoryview(bytes(FIRST_PART_OCTETS)))
    track.abandon(stored)
    assert track.budget.used == track.octets == 0


def test_a_payload_whose_group_left_grows_no_further() -> None:
    track = Track(NAME, authoritative=False)
    stored = track.begin_fetched(HUGE, 0.0)
    stored.write(memoryview(bytes(FIRST_PART_OCTETS)))
    track.clear()
    with pytest.raises(StoreFull, match="left"):
        stored.write(OCTETS)
    assert track.budget.used == 0

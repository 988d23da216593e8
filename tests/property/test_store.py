"""A store against plain sets: what readers find, and what a fetch stream claims about the rest."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvcs.moqt.data import FetchParser
from kvcs.moqt.encoders import FetchEncoder
from kvcs.moqt.filters import Range
from kvcs.moqt.names import MAX_VI64, GroupOrder, Location
from kvcs.moqt.objects import ObjectHeader, ObjectStarted, RangeKind, RangeMarked
from kvcs.moqt.streams import SubgroupHeader
from kvcs.moqt.track.ranges import RangeReader
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import (
    FIRST_PART_OCTETS,
    LEAST_PART_OCTETS,
    OBJECT_BOOKKEEPING_OCTETS,
    StoreBudget,
    StoredObject,
)
from kvcs.testing.tracks import NAME, payload, track

LINE = [Location(group, object_id) for group in range(5) for object_id in (0, 1, 2, 3, MAX_VI64)]
places = st.sampled_from(LINE)
spans = st.tuples(places, places).map(lambda pair: (min(pair), max(pair)))
orders = st.sampled_from(list(GroupOrder))


@dataclass
class Contents:
    """What a cache holds, and where it knows that nothing else exists."""

    held: set[Location]
    learnt: list[tuple[Location, Location]]

    def build(self) -> Track:
        cache = track(authoritative=False)
        for place in sorted(self.held):
            cache.begin_fetched(ObjectHeader(*place, 0, 0), 0.0)
        for start, end in self.learnt:
            cache.learn(start, end)
        return cache

    def knows(self, place: Location) -> bool:
        return place in self.held or any(start <= place <= end for start, end in self.learnt)


contents = st.builds(Contents, st.sets(places, max_size=8), st.lists(spans, max_size=4))


def rank(place: Location, order: GroupOrder) -> tuple[int, int]:
    """Place of a Location in delivery order."""
    return (place.group if order is GroupOrder.ASCENDING else -place.group, place.object)


def fetched(source: Track, span: tuple[Location, Location], order: GroupOrder) -> bytes:
    """The fetch stream of a range in which nobody can tell about what is unknown."""
    reader, encoder = RangeReader(source, Range(*span), order), FetchEncoder(order)
    octets = b""
    while (upcoming := reader.peek(0.0)) is not None:
        if isinstance(upcoming, StoredObject):
            octets += encoder.object(upcoming.header)
            reader.passed(upcoming.header.location)
        else:
            octets += encoder.marker(RangeKind.UNKNOWN, upcoming.last_delivered(order))
            reader.passed(upcoming.end)
    return octets


@given(contents, spans, orders)
def test_a_fetch_stream_never_calls_non_existent_what_is_unknown(
    what: Contents, span: tuple[Location, Location], order: GroupOrder
) -> None:
    items = FetchParser(order).feed(fetched(what.build(), span, order))
    delivered: list[Location] = []
    marked: set[Location] = set()
    wanted = sorted(
        (place for place in LINE if span[0] <= place <= span[1]), key=lambda p: rank(p, order)
    )
    done = 0
    for item in items:
        if isinstance(item, ObjectStarted):
            place = item.header.location
            delivered.append(place)
        elif isinstance(item, RangeMarked):
            place = item.location
        else:
            continue
        passed = [p for p in wanted[done:] if rank(p, order) <= rank(place, order)]
        done += len(passed)
        if isinstance(item, RangeMarked):
            marked.update(passed)
    assert delivered == [place for place in wanted if place in what.held]
    # A marker may take in what does not exist, right before what is unknown: it claims less.
    assert {place for place in wanted if not what.knows(place)} <= marked
    assert not marked & what.held


@given(contents, spans, orders, st.lists(st.tuples(places, st.booleans()), max_size=6))
def test_what_becomes_known_while_it_is_waited_for_is_delivered_in_order(
    what: Contents,
    span: tuple[Location, Location],
    order: GroupOrder,
    arrivals: list[tuple[Location, bool]],
) -> None:
    source = what.build()
    reader = RangeReader(source, Range(*span), order)
    delivered: list[Location] = []
    for _ in range(200):
        upcoming = reader.peek(0.0)
        if upcoming is None:
            break
        if isinstance(upcoming, StoredObject):
            delivered.append(upcoming.header.location)
            reader.passed(upcoming.header.location)
        elif arrivals:
            place, exists = arrivals.pop()
            if exists and not what.knows(place):
                source.begin_fetched(ObjectHeader(*place, 0, 0), 0.0)
                what.held.add(place)
            else:
                source.learn(place, place)
                what.learnt.append((place, place))
        else:
            # All that was asked for is learnt at last.
            source.learn(upcoming.start, upcoming.end)
    else:
        raise AssertionError("the reader does not end")
    assert delivered == sorted(delivered, key=lambda place: rank(place, order))
    assert len(set(delivered)) == len(delivered)
    inside = {place for place in what.held if span[0] <= place <= span[1]}
    late = set(delivered) ^ inside
    # Only what arrived behind the reader's back, in a part that it had passed, is not delivered.
    assert not set(delivered) - inside
    assert all(delivered and rank(place, order) < rank(delivered[-1], order) for place in late)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("fetched"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("live"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("discard"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("forget"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("evict"), st.integers(0, 3), st.just(0)),
    ),
    max_size=40,
)


@given(steps)
def test_octets_are_counted_and_given_back(what: list[tuple[str, int, int]]) -> None:
    cache = track(authoritative=False)
    for step, group, object_id in what:
        place = Location(group, object_id)
        stored = cache.get(place)
        if step == "evict":
            cache.evict_group(group)
        elif step == "fetched":
            header = ObjectHeader(*place, 0, 0, payload_length=8)
            writer = cache.begin_fetched(header, 0.0)
            writer.write(memoryview(payload(place)))
        elif step == "live":
            stream = cache.open_stream(SubgroupHeader(1, group, 0, 0))
            writer = stream.begin(ObjectHeader(*place, 0, 0, payload_length=8), 0.0)
            writer.write(memoryview(payload(place)))
            stream.reset(1)
        elif stored is not None:
            (cache.discard if step == "discard" else cache.forget)(stored)
        assert cache.octets == cache.budget.used
        assert cache.octets >= sum(
            len(one.objects) * (OBJECT_BOOKKEEPING_OCTETS + 8) for one in cache.groups.values()
        )
        assert cache.group_ids() == sorted(cache.groups)
        for one in cache.groups.values():
            assert one.object_ids == sorted(one.objects)
            assert one.objects
    cache.clear()
    assert cache.octets == 0
    assert not cache.groups


PIECES = st.one_of(st.integers(1, 100), st.integers(1, 3 * LEAST_PART_OCTETS))


@given(st.lists(PIECES, max_size=20), st.booleans(), st.integers(0, 9), st.integers(1, 200_000))
def test_pieces_of_any_size_are_kept_and_counted_as_what_they_are(
    pieces: list[int], copy_comes: bool, before_copy: int, length: int
) -> None:
    octets = random.Random(length).randbytes(length)
    cache = Track(NAME, authoritative=False, budget=StoreBudget(1 << 22))
    header = ObjectHeader(0, 0, 0, 0, payload_length=length)
    stored = cache.begin_fetched(header, 0.0)
    assert isinstance(stored, StoredObject)
    at = 0
    for number, size in enumerate([*pieces, length]):
        if copy_comes and number == before_copy:
            cache.begin_fetched(header, 0.0).write(octets[: at + 50])  # it overtakes the first
        piece = bytearray(octets[at : at + size])
        if piece:
            stored.write(memoryview(piece))
            piece[:] = bytes(len(piece))  # whoever brings it may use its memory again
        at += len(piece)
        room = sum(map(len, stored.parts))
        assert stored.received <= room <= max(2 * stored.received, FIRST_PART_OCTETS)
        counted = min(length, max(room, FIRST_PART_OCTETS)) + OBJECT_BOOKKEEPING_OCTETS
        assert stored.octets == cache.budget.used == counted
    assert stored.complete and stored.grow is None
    assert b"".join(stored.views(0, length)) == octets

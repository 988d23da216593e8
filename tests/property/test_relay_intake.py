"""What a fetch stream's gaps and markers tell, in either order, against a model that is a set."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcs.moqt.names import MAX_VI64, GroupOrder, Location
from kvcs.moqt.objects import ObjectHeader, RangeKind
from kvcs.relay.cache import RelayCache
from kvcs.relay.intake import Bay, RangeIntake
from kvcs.relay.stats import RelayStats
from kvcs.testing.actors import full_name

GROUPS, OBJECTS = 4, 4
PLACES = [Location(g, o) for g in range(GROUPS) for o in range(OBJECTS)]
ENDS = [*PLACES, *(Location(g, MAX_VI64) for g in range(GROUPS))]


def delivery_key(order: GroupOrder, location: Location) -> tuple[int, int]:
    group = location.group if order is GroupOrder.ASCENDING else -location.group
    return group, location.object


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(list(GroupOrder)),
    st.sets(st.sampled_from(PLACES)),
    st.dictionaries(
        st.sampled_from(ENDS), st.sampled_from([RangeKind.UNKNOWN, RangeKind.NON_EXISTENT])
    ),
    st.sampled_from(PLACES),
    st.sampled_from(ENDS),
    st.booleans(),
)
def test_nothing_is_learnt_that_the_stream_did_not_say(
    order: GroupOrder,
    existing: set[Location],
    markers: dict[Location, RangeKind],
    start: Location,
    end: Location,
    fin: bool,
) -> None:
    if end < start:
        return
    stats = RelayStats()
    cache = RelayCache(10**9, 16, lambda name: True, stats)
    entry = cache.open(full_name())
    intake = RangeIntake(Bay(cache, entry, 10**6, stats), order, start, end, {})
    # Objects outside of the range are sent too, which breaks a rule; the markers lie inside.
    items = sorted(
        {*existing, *(place for place in markers if start <= place <= end)},
        key=lambda place: delivery_key(order, place),
    )
    # What lies between two items has the status of the later one where that is a marker, and does
    # not exist where it is an Object or the end.
    told_absent: set[Location] = set()
    told_present: set[Location] = set()
    waiting = sorted(
        (place for place in PLACES if start <= place <= end),
        key=lambda place: delivery_key(order, place),
    )
    for item in items:
        if not start <= item <= end:
            intake.started(ObjectHeader(*item, 0, 1, payload_length=3), 0.0)
            intake.chunk(b"abc")
            intake.completed()
            continue
        passed = [p for p in waiting if delivery_key(order, p) <= delivery_key(order, item)]
        waiting = waiting[len(passed) :]
        kind = None if item in existing else markers[item]
        if kind is None:
            told_present.add(item)
            intake.started(ObjectHeader(*item, 0, 1), 0.0)
            intake.completed()
        else:
            intake.marked(kind, item)
        if kind is not RangeKind.UNKNOWN:
            told_absent.update(place for place in passed if place not in told_present)
    intake.ended(None if fin else 0x1)
    if fin:
        intake.complete(end)
        told_absent.update(waiting)
    track = entry.track
    assert intake.objects == len(told_present) and intake.octets == 0
    for place in PLACES:
        known = track.first_unknown(place, place) is None
        if not start <= place <= end:
            assert not known and track.get(place) is None
            continue
        if place in told_present:
            assert known and track.get(place) is not None
        elif known:
            assert place in told_absent
        elif fin:
            assert place not in told_absent
    assert not any(group.arriving for group in track.groups.values())

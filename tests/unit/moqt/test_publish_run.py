"""Several Objects of one Subgroup that are published at once (MOQT §2)."""

from __future__ import annotations

import pytest

from kvcs.errors import StoreFull, UsageError
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import OBJECT_BOOKKEEPING_OCTETS, Group, StoreBudget, Subgroup
from kvcs.testing.tracks import NAME, payload, put, track

END_OF_GROUP = ObjectStatus.END_OF_GROUP

Parts = tuple[memoryview, ...]


def at(group: int, object_id: int) -> Location:
    return Location(group, object_id)


class Follower:
    """Records which Objects a Track tells of."""

    def __init__(self, target: Track) -> None:
        self.heard: list[Location] = []
        target.listeners.append(self)

    def object_added(self, subgroup: Subgroup, count: int = 1) -> None:
        self.heard += [stored.header.location for stored in subgroup.objects[-count:]]

    def subgroup_ended(self, subgroup: Subgroup) -> None: ...

    def group_evicted(self, group: Group) -> None: ...

    def track_ended(self) -> None: ...


def a_run(*ids: int, priority: int = 3, octets: int = 8) -> list[tuple[ObjectHeader, Parts]]:
    """NORMAL Objects of Group 2."""
    return [
        (
            ObjectHeader(2, each, 0, priority, payload_length=octets),
            (memoryview(payload(at(2, each), octets)),),
        )
        for each in ids
    ]


def test_a_run_is_what_its_objects_published_one_by_one_are() -> None:
    single, run = track(), track()
    told, told_at_once = Follower(single), Follower(run)
    for header, parts in a_run(0, 1, 2):
        single.publish(header, parts, 5.0, end_of_group=True)
    run.publish_run(a_run(0, 1, 2), 5.0, end_of_group=True)
    assert told.heard == told_at_once.heard == [at(2, 0), at(2, 1), at(2, 2)]
    for each in (single, run):
        assert each.largest == at(2, 2)
        assert each.octets == each.budget.used == 3 * (8 + OBJECT_BOOKKEEPING_OCTETS)
        subgroup = each.groups[2].subgroups[0]
        assert subgroup.from_start and subgroup.end_of_group and subgroup.priority == 3
        assert each.groups[2].object_ids == [0, 1, 2]
        for stored in subgroup.objects:
            assert stored.continues and stored.live and stored.born == 5.0
            assert each.get(stored.header.location) is stored


def test_a_run_may_lie_between_objects_of_other_subgroups() -> None:
    source = track()
    for object_id in (0, 9):
        put(source, 2, object_id, subgroup=1)
    source.publish_run(a_run(3, 4, 5), 0.0)
    assert source.groups[2].object_ids == [0, 3, 4, 5, 9]
    found = source.next_stored(at(2, 1), at(2, 20))
    assert found is not None and found.header.location == at(2, 3)


@pytest.mark.parametrize(
    "run",
    [
        a_run(1, 3),
        a_run(2, 1),
        a_run(1) + a_run(2, priority=4),
        [*a_run(1), (ObjectHeader(2, 2, 0, 3, END_OF_GROUP), ())],
        [*a_run(1), (ObjectHeader(2, 2, 0, 3, properties=b"\x02\x01", payload_length=0), ())],
        a_run(4, 5, 6),
    ],
)
def test_of_a_run_that_cannot_be_published_nothing_is(
    run: list[tuple[ObjectHeader, Parts]],
) -> None:
    source = track()
    put(source, 2, 5, subgroup=1)
    follower = Follower(source)
    before = source.octets
    with pytest.raises(UsageError):
        source.publish_run(run, 0.0)
    assert source.octets == before and source.groups[2].object_ids == [5] and not follower.heard


def test_a_run_that_does_not_fit_leaves_the_track_as_it_was() -> None:
    budget = StoreBudget(2 * (8 + OBJECT_BOOKKEEPING_OCTETS))
    source = Track(NAME, authoritative=True, budget=budget)
    with pytest.raises(StoreFull):
        source.publish_run(a_run(0, 1, 2), 0.0)
    assert source.octets == source.budget.used == 0 and not source.groups

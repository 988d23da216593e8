"""Conditions that make a Track malformed (MOQT §12.1)."""

from __future__ import annotations

import pytest

from kvcs.moqt.errors import MalformedTrack
from kvcs.moqt.incoming import rules
from kvcs.moqt.incoming.rules import TrackRules
from kvcs.moqt.limits import Budget
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus

NORMAL = ObjectStatus.NORMAL
END_OF_GROUP = ObjectStatus.END_OF_GROUP
END_OF_TRACK = ObjectStatus.END_OF_TRACK


def header(
    group: int,
    object_id: int,
    *,
    subgroup: int | None = 0,
    priority: int | None = 0,
    status: ObjectStatus = NORMAL,
) -> ObjectHeader:
    return ObjectHeader(group, object_id, subgroup, priority, status)


def checked(*headers: ObjectHeader) -> TrackRules:
    track = TrackRules()
    for one in headers:
        track.check_object(one)
    return track


def malformed(track: TrackRules, bad: ObjectHeader) -> None:
    with pytest.raises(MalformedTrack):
        track.check_object(bad)


def test_groups_may_come_in_any_order_and_an_object_twice() -> None:
    checked(header(3, 1), header(0, 5), header(0, 2), header(3, 1), header(3, 0))


def test_a_subgroup_has_one_priority() -> None:
    track = checked(header(0, 0, priority=3), header(0, 1, subgroup=1, priority=9))
    malformed(track, header(0, 2, priority=4))
    track.check_object(header(1, 0, priority=4))


def test_a_datagram_belongs_to_no_subgroup() -> None:
    checked(header(0, 0, priority=3), header(0, 1, subgroup=None, priority=9))


def test_a_stream_without_a_priority_agrees_with_the_tracks_default() -> None:
    track = checked(header(0, 0, priority=None), header(0, 1, priority=128))
    track.default_priority = 128
    track.check_object(header(0, 2, priority=None))
    track.check_object(header(0, 3, priority=128))
    track.check_object(header(1, 0, priority=None))
    malformed(track, header(1, 1, priority=127))


def test_an_explicit_priority_is_remembered_behind_an_unknown_default() -> None:
    track = checked(header(0, 0, priority=None), header(0, 1, priority=7))
    malformed(track, header(0, 2, priority=8))


def test_nothing_lies_beyond_the_fin_of_a_subgroup() -> None:
    track = checked(header(0, 0), header(0, 1))
    track.finish_subgroup(0, 0, 1, end_of_group=False)
    track.check_object(header(0, 1))
    track.check_object(header(0, 9, subgroup=1))
    malformed(track, header(0, 2))


def test_a_subgroup_ends_in_one_place() -> None:
    track = checked(header(0, 3))
    track.finish_subgroup(0, 0, 3, end_of_group=False)
    track.finish_subgroup(0, 0, 3, end_of_group=False)
    with pytest.raises(MalformedTrack):
        track.finish_subgroup(0, 0, 2, end_of_group=False)


def test_nothing_lies_beyond_the_end_of_group_bit() -> None:
    track = checked(header(0, 3))
    track.finish_subgroup(0, 0, 3, end_of_group=True)
    track.check_object(header(0, 2, subgroup=1))
    malformed(track, header(0, 4, subgroup=1))


def test_the_end_of_group_bit_is_held_against_what_came_before() -> None:
    track = checked(header(0, 3), header(0, 5, subgroup=1))
    with pytest.raises(MalformedTrack):
        track.finish_subgroup(0, 0, 3, end_of_group=True)


@pytest.mark.parametrize("object_id", [2, 3, 9])
def test_no_object_at_or_beyond_end_of_group(object_id: int) -> None:
    track = checked(header(0, 1), header(0, 2, status=END_OF_GROUP))
    track.check_object(header(0, 0, subgroup=1))
    malformed(track, header(0, object_id, subgroup=1))


@pytest.mark.parametrize("object_id", [0, 1])
def test_end_of_group_is_held_against_what_came_before(object_id: int) -> None:
    malformed(checked(header(0, 1)), header(0, object_id, status=END_OF_GROUP))


@pytest.mark.parametrize("object_id", [1, 3])
def test_a_group_ends_in_one_place(object_id: int) -> None:
    track = checked(header(0, 2, status=END_OF_GROUP), header(0, 2, status=END_OF_GROUP))
    malformed(track, header(0, object_id, status=END_OF_GROUP))


def test_end_of_group_under_the_end_of_group_bit_is_one_end() -> None:
    track = checked(header(0, 1), header(0, 2, status=END_OF_GROUP))
    track.finish_subgroup(0, 0, 2, end_of_group=True)
    malformed(track, header(0, 2))


@pytest.mark.parametrize("bad", [header(4, 0), header(4, 1), header(5, 0), header(9, 9)])
def test_no_object_at_or_beyond_end_of_track(bad: ObjectHeader) -> None:
    track = checked(header(3, 7), header(4, 0, status=END_OF_TRACK))
    track.check_object(header(3, 8))
    malformed(track, bad)


@pytest.mark.parametrize("last", [header(4, 0), header(4, 2), header(5, 0)])
def test_end_of_track_is_held_against_what_came_before(last: ObjectHeader) -> None:
    malformed(checked(last), header(4, 0, status=END_OF_TRACK))


def test_a_track_ends_in_one_place() -> None:
    track = checked(header(4, 0, status=END_OF_TRACK), header(4, 0, status=END_OF_TRACK))
    malformed(track, header(3, 0, status=END_OF_TRACK))


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_RULE_ENTRIES", 10)
    track = TrackRules()
    for group in range(100):
        track.check_object(header(group, 0))
        track.check_object(header(group, 1, status=END_OF_GROUP))
        track.finish_subgroup(group, 0, 1, end_of_group=True)
    assert track.entries <= 10 and track.forgotten
    malformed(track, header(99, 1))


# Gaps, the end that FETCH_OK names, and what was forgotten


def test_gaps_are_held_against_what_came_before_and_after() -> None:
    track = checked(header(5, 2), header(5, 9))
    with pytest.raises(MalformedTrack):
        track.check_object(header(5, 12), object_gap=3)
    track = checked(header(5, 2), header(5, 9))
    track.check_object(header(5, 12), object_gap=2)
    malformed(track, header(5, 11, subgroup=1))
    track.check_object(header(5, 12), object_gap=2)


def test_a_group_gap_is_told_once_and_may_be_none() -> None:
    track = checked(header(1, 0))
    track.check_object(header(3, 0), group_gap=0)
    track.check_object(header(3, 1))
    with pytest.raises(MalformedTrack):
        track.check_object(header(3, 2), group_gap=1)
    track.check_object(header(6, 0), group_gap=2)
    malformed(track, header(5, 0))


@pytest.mark.parametrize("final", [(3, 7), (4, 0)])
def test_no_object_beyond_the_end_that_fetch_ok_names(final: tuple[int, int]) -> None:
    track = checked(header(3, 7))
    track.finish_track(Location(*final))
    track.finish_track(Location(9, 9))  # a later one says less
    malformed(track, header(4, 1))
    track.check_object(header(4, 1, status=END_OF_TRACK))
    with pytest.raises(MalformedTrack):
        track.finish_track(Location(3, 6))


def test_ends_of_what_was_forgotten_are_taken_as_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "MAX_RULE_ENTRIES", 4)
    track = checked(*[header(group, 0) for group in range(9)])
    track.finish_subgroup(0, 0, 0, end_of_group=True)
    track.finish_group(1, 5)
    track.finish_subgroup(8, 7, 3, end_of_group=False)
    assert track.entries <= 4


def test_the_group_in_use_is_kept_and_the_next_one_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "MAX_RULE_ENTRIES", 8)
    track = checked(header(0, 0), header(1, 0), header(2, 0))
    for object_id in range(3, 12, 3):
        track.check_object(header(0, object_id))
    track.finish_subgroup(0, 0, 9, end_of_group=True)
    malformed(track, header(0, 20))
    assert track.entries <= 8


def test_a_budget_without_room_keeps_the_last_group_only() -> None:
    budget = Budget(0)
    track = TrackRules(budget)
    for number in range(20):
        track.check_object(header(number, 0))
    assert track.entries == budget.used <= 3  # its Group, Subgroup and run

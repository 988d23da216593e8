"""Which of many announced publications are read, which is taken, and what that costs."""

from __future__ import annotations

from typing import Any, cast

import pytest

import kvcs
from kvcs.kv import Manifest
from kvcs.quic.connection import Connection
from kvcs.subscriber.candidates import Candidates, Place
from kvcs.subscriber.coverage import Holding
from kvcs.subscriber.discovery import halved
from tests.unit.kv.toy import toy_prefix, toy_publication

SESSION = cast(Connection, object())
WHOLE = toy_publication((3,)).writer().manifest()
GROWING = toy_publication((3,)).writer(layers=[1], complete=False).manifest()


class Fake:
    """A follower that a test makes ready or fails."""

    def __init__(self, place: Place, holding: Holding | None) -> None:
        self.place, self.holding = place, holding
        self.manifest: Manifest | None = None
        self.error: kvcs.KvcsError | None = None
        self.blocks = 0
        self.is_final = True
        self.started = self.stopped = 0

    @property
    def ready(self) -> bool:
        return self.error is None and self.blocks > 0

    def start(self) -> None:
        self.started += 1

    def stop(self) -> None:
        self.stopped += 1

    def read(self, manifest: Manifest, blocks: int = 3) -> None:
        """A version was read."""
        self.manifest, self.blocks = manifest, blocks


class World:
    """Candidates and every follower that they made."""

    def __init__(self, limit: int = 8, least: int = 1) -> None:
        self.made: list[Fake] = []
        self.candidates = Candidates(self._follow, limit, 2.0, wanted=3, least=least)

    def _follow(self, place: Place, holding: Holding | None) -> Fake:
        self.made.append(Fake(place, holding))
        return self.made[-1]


def place(number: int) -> Place:
    """The place of a publication."""
    return SESSION, toy_prefix().namespace(number.to_bytes(16, "big"))


def test_the_newest_are_read_first_and_failures_make_room() -> None:
    world = World(limit=2)
    for number in range(5):
        world.candidates.announced(place(number))
    world.candidates.advance(0.0)
    assert [each.place for each in world.made] == [place(4), place(3)]
    world.made[0].error = kvcs.PublicationError("wrong")
    world.made[1].error = kvcs.PublicationError("wrong")
    world.candidates.advance(0.0)
    assert [each.place for each in world.made[2:]] == [place(2), place(1)]
    assert world.candidates.reading
    world.made[3].read(WHOLE)
    assert world.candidates.best(world.candidates.ready(False)) is world.made[3]
    world.candidates.others_than(world.made[3])
    assert [each.stopped for each in world.made] == [0, 0, 1, 0]


def test_a_refused_one_is_tried_once_more_and_anew_when_announced() -> None:
    world = World()
    world.candidates.announced(place(0))
    for now, tries in ((0.0, 1), (1.9, 1), (2.0, 2), (9.0, 2), (99.0, 2)):
        world.candidates.advance(now)
        assert len(world.made) == tries
        if world.made[-1].error is None:
            world.made[-1].error = kvcs.RequestError("gone", 0x10)
            world.candidates.advance(now)
    assert isinstance(world.candidates.error, kvcs.RequestError)
    world.candidates.announced(place(0))
    world.candidates.advance(99.0)
    assert len(world.made) == 3
    assert world.candidates.error is None


def test_one_that_cannot_be_used_is_not_tried_again() -> None:
    world = World()
    world.candidates.announced(place(0))
    world.candidates.advance(0.0)
    world.made[0].error = kvcs.PublicationError("another descriptor")
    world.candidates.advance(0.0)
    world.candidates.announced(place(0))
    world.candidates.advance(99.0)
    assert len(world.made) == 1


def test_a_withdrawn_one_is_forgotten_but_not_where_an_index_names_it() -> None:
    world = World()
    for number in range(2):
        world.candidates.announced(place(number))
    world.candidates.named(place(1), None)
    world.candidates.advance(0.0)
    for number in range(2):
        world.candidates.withdrawn(place(number))
    assert {each.place: each.stopped for each in world.made} == {place(0): 1, place(1): 0}
    assert world.candidates.reading


def test_what_an_index_says_comes_after_an_announcement() -> None:
    world = World()
    world.candidates.announced(place(0))
    world.candidates.advance(0.0)
    uri = "moqt://relay#kvcs:" + kvcs.moqt.names.namespace_text(place(0)[1])
    said = kvcs.Holding(uri, 2)
    world.candidates.named(place(0), said)
    world.candidates.advance(0.0)
    assert [(each.holding, each.stopped) for each in world.made] == [(None, 1), (said, 0)]


@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [
        ((WHOLE, 2), (GROWING, 3), 0),  # a complete one before one with more blocks
        ((WHOLE, 3), (WHOLE, 2), 0),  # more blocks before a newer one
        ((WHOLE, 3), (WHOLE, 3), 1),  # the newer one
    ],
)
def test_ranking(first: Any, second: Any, taken: int) -> None:
    world = World()
    for number in range(2):
        world.candidates.announced(place(number))
    world.candidates.advance(0.0)
    for (manifest, blocks), number in ((first, 0), (second, 1)):
        (fake,) = (each for each in world.made if each.place == place(number))
        fake.read(manifest, blocks)
    assert world.candidates.best(world.candidates.ready(True)).place == place(taken)


def test_shorter_ones_are_taken_when_asked_and_not_below_the_least() -> None:
    world = World(least=2)
    for number in range(2):
        world.candidates.announced(place(number))
    world.candidates.advance(0.0)
    world.made[0].read(WHOLE, 2)
    world.made[1].read(WHOLE, 1)
    world.made[1].is_final = False
    assert world.candidates.ready(False) == []
    world.candidates.advance(0.0)
    assert world.candidates.ready(True) == [world.made[0].place]
    assert world.candidates.too_short == 1  # it may be given another segment yet
    world.made[1].is_final = True
    world.candidates.advance(0.0)
    assert world.candidates.too_short == 0
    assert "1 blocks of the 2 wanted" in str(world.candidates.error)


@pytest.mark.slow
def test_ten_thousand_announcements_cost_no_more_each_than_a_hundred() -> None:
    def steps(count: int) -> int:
        world = World()
        made = 0
        for number in range(count):
            world.candidates.announced(place(number))
            world.candidates.advance(float(number))
            for fake in world.made[made:]:
                fake.error = kvcs.RequestError("refused", 0x10)
            made = len(world.made)
        assert len(world.candidates._followers) <= 8
        return made

    # Each is read once, and once more; nothing is done again for those that were there before.
    assert steps(100) <= 200
    assert steps(10_000) <= 20_000


@pytest.mark.parametrize(
    ("blocks", "count", "least", "lengths"),
    [
        (12, 8, 1, (6, 3, 1)),
        (1, 8, 1, ()),
        (1000, 2, 1, (500, 250)),
        (1000, 0, 1, ()),
        (2**20, 99, 1, tuple(2**power for power in range(19, 11, -1))),
        (12, 8, 3, (6, 3)),
    ],
)
def test_halving(blocks: int, count: int, least: int, lengths: tuple[int, ...]) -> None:
    assert halved(blocks, count, least) == lengths


def advance(world: World, now: float) -> None:
    """Go on; what is read says nothing for now."""
    world.candidates.advance(now)
    for each in world.made:
        each.is_final = each.manifest is not None


def test_those_whose_manifests_never_come_make_room_where_others_wait() -> None:
    world = World(limit=2)
    for number in range(5):
        world.candidates.announced(place(number))
    advance(world, 0.0)
    assert world.candidates.next_retry == 2.0
    world.made[0].read(WHOLE)
    advance(world, 1.9)
    assert len(world.made) == 2
    advance(world, 2.0)
    # What was read stays, and what was passed over comes last and is given longer.
    assert [each.stopped for each in world.made] == [0, 1, 0]
    for now in (4.0, 6.0, 8.0, 12.0):
        assert world.candidates.next_retry == now
        advance(world, now)
    order = [each.place for each in world.made]
    assert order == [place(number) for number in (4, 3, 2, 1, 0, 3, 2)]
    assert world.candidates.next_retry == 16.0


def test_without_others_that_wait_a_manifest_has_all_the_time() -> None:
    world = World(limit=2)
    world.candidates.announced(place(0))
    advance(world, 0.0)
    advance(world, 99.0)
    assert world.made[0].stopped == 0 and world.candidates.next_retry == float("inf")

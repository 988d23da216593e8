"""Objects that come the short way end as those that are parsed and checked one by one.

Every world runs twice: once with a sink, where payloads, Objects like the one before and what was
unsealed take short ways, and once with events alone, where every header is parsed and every check
made by itself.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings

from kvcs.kv import Ledger, Outcome, Slot
from kvcs.kv.unsealing import Unsealer
from kvcs.subscriber.receiver import TrackReceiver
from tests.property.object_worlds import (
    BLOCKS,
    LAYERS,
    WANTED,
    WORLDS,
    Consumer,
    Item,
    Stream,
    World,
    octets_of,
)


@settings(max_examples=200, deadline=None)
@given(WORLDS)
def test_both_ways_end_alike(world: World) -> None:
    short = Consumer(world, short=True).run().state()
    parsed = Consumer(world, short=False).run().state()
    assert short == parsed


def row(
    *,
    fetch: bool = False,
    first: int = 0,
    properties: str = "none",
    octets: str = "right",
    cut: int = 150,
) -> Stream:
    """Every Object of a layer on one stream, in pieces that are not shorter than a header."""
    return Stream(
        fetch=fetch,
        layer=1,
        first=first,
        items=(Item(properties=properties, octets=octets),) * (BLOCKS - first),
        subgroup=0,
        priority=None,
        with_properties=properties != "none",
        end_of_group=True,
        flip=None,
        cuts=(cut,),
        end="fin",
    )


def plain(toy: str, *, fetch: bool, properties: str, signed: bool) -> World:
    """One stream of a whole layer."""
    stream = row(fetch=fetch, properties=properties)
    return World(toy, (stream,), (0,), signed, LAYERS if signed else 0, 0)


@pytest.mark.parametrize("octets", ["right", "other"])
@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1), (1, 0, 0), (0, 0, 0, 1), (0, 0, 0, 0, 0, 1), (1, 1, 0)])
def test_two_copies_at_once_end_alike_both_ways(
    order: tuple[int, ...], first: int, octets: str
) -> None:
    for cut in (150, 190):
        streams = (row(cut=cut), row(fetch=True, first=first, octets=octets, cut=cut))
        world = World("apart", streams, order, signed=False, listed=0, manifest_at=0)
        short, parsed = (Consumer(world, short=way).run() for way in (True, False))
        assert short.state() == parsed.state()
        assert parsed.ledger.counters.verified


@pytest.mark.parametrize("fetch", [False, True])
def test_a_gap_that_each_object_tells_is_held_against_the_one_before(fetch: bool) -> None:
    world = World("apart", (row(fetch=fetch, first=1, properties="gap"),), (0,), False, 0, 0)
    short, parsed = (Consumer(world, short=way).run() for way in (True, False))
    assert short.state() == parsed.state()
    assert short.failure == "Object 1 was received, and lies in the gap before 1/2"


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("fetch", [False, True])
@pytest.mark.parametrize(
    ("toy", "properties"),
    [
        ("apart", "none"),
        ("apart", "harmless"),
        ("apart", "gap"),
        ("latent", "none"),
        ("joint", "none"),
    ],
)
def test_plain_streams_take_the_short_way(
    toy: str,
    properties: str,
    fetch: bool,
    signed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is gained by a short way that nobody takes."""
    calls = {"like": 0, "ledger": 0}
    take_run, go_on = TrackReceiver.take_run, Ledger.go_on

    def takes_run(*arguments: Any) -> None:
        calls["like"] += arguments[-1]
        take_run(*arguments)

    def goes_on(*arguments: Any) -> int:
        took = go_on(*arguments)
        calls["ledger"] += took
        return took

    monkeypatch.setattr(TrackReceiver, "take_run", takes_run)
    monkeypatch.setattr(Ledger, "go_on", goes_on)
    consumer = Consumer(plain(toy, fetch=fetch, properties=properties, signed=signed), short=True)
    consumer.run()
    if properties == "gap":
        assert not any(calls.values()) and consumer.failure is not None
        return
    assert consumer.failure is None and consumer.ledger.counters.verified == WANTED
    assert calls["like"] >= 2 and calls["ledger"] >= 1


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("fetch", [False, True])
@pytest.mark.parametrize("toy", ["apart", "latent", "joint"])
def test_pieces_of_many_objects_are_taken_in_runs(
    toy: str, fetch: bool, signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    go_on = Ledger.go_on

    def goes_on(*arguments: Any) -> int:
        runs.append(go_on(*arguments))
        return runs[-1]

    monkeypatch.setattr(Ledger, "go_on", goes_on)
    octets = len(octets_of(plain(toy, fetch=fetch, properties="none", signed=signed), row()))
    # The first piece goes through events, as far as an Object whose header is like all that follow;
    # the second one ends within the last wanted Object.
    cuts = (octets * 3 // (2 * BLOCKS), octets * 3 // BLOCKS, octets)
    stream = replace(row(fetch=fetch), cuts=cuts)
    world = World(toy, (stream,), (0,), signed, LAYERS if signed else 0, 0)
    short, parsed = (Consumer(world, short=way).run() for way in (True, False))
    assert runs == [WANTED - 2]
    assert short.state() == parsed.state()
    assert parsed.failure is None and parsed.ledger.counters.verified == WANTED


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("fetch", [False, True])
def test_a_run_may_be_cut_at_every_octet(fetch: bool, is_sealed: bool) -> None:
    stream = replace(row(fetch=fetch), with_properties=is_sealed)
    world = World("apart", (stream,), (0,), False, 0, 0, sealed=is_sealed)
    parsed = Consumer(world, short=False).run()
    assert parsed.failure is None and parsed.ledger.counters.verified == WANTED
    for at in range(220):  # more than one Object and what stands before it
        cut = replace(world, streams=(replace(stream, cuts=(300, 280 + at, 2000)),))
        assert Consumer(cut, short=True).run().state() == parsed.state(), at


@pytest.mark.parametrize("toy", ["apart", "latent", "joint"])
@pytest.mark.parametrize("number", range(BLOCKS))
@pytest.mark.parametrize(
    "amiss", [{"damage": 5}, {"damage": 170}, {"octets": "other"}, {"octets": "short"}]
)
def test_one_bad_object_of_a_run_ends_alike_both_ways(
    amiss: dict[str, Any], number: int, toy: str
) -> None:
    items = (Item(),) * number + (Item(**amiss),) + (Item(),) * (BLOCKS - 1 - number)
    for cuts, signed, listed, sealed in product(
        ((100, 2000), (100, 500), (290, 600, 400)), (False, True), (0, LAYERS), (False, True)
    ):
        stream = replace(row(), items=items, cuts=cuts, with_properties=sealed)
        world = World(toy, (stream,), (0,), signed, listed, 0, sealed=sealed)
        short, parsed = (Consumer(world, short=way).run() for way in (True, False))
        assert short.state() == parsed.state()


@pytest.mark.parametrize("toy", ["apart", "joint"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0, 0), (1, 1, 0), (0, 0, 1)])
def test_runs_of_two_streams_that_bring_the_same_end_alike_both_ways(
    order: tuple[int, ...], toy: str
) -> None:
    for first in range(4):
        for cuts in ((100, 500), (700,), (290, 600, 400)):
            streams = (
                replace(row(), cuts=cuts),
                replace(row(fetch=True, first=first), cuts=(450,)),
            )
            world = World(toy, streams, order, signed=False, listed=0, manifest_at=0)
            short, parsed = (Consumer(world, short=way).run() for way in (True, False))
            assert short.state() == parsed.state()
            assert parsed.ledger.counters.verified


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("fetch", [False, True])
def test_sealed_objects_take_their_short_ways(
    fetch: bool, signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_by_step: list[Slot] = []
    runs: list[int] = []
    finish, go_on = Ledger.finish, Unsealer.go_on

    def finishes(ledger: Ledger, slot: Slot) -> Outcome:
        step_by_step.append(slot)
        return finish(ledger, slot)

    def goes_on(*arguments: Any) -> int:
        runs.append(go_on(*arguments))
        return runs[-1]

    monkeypatch.setattr(Ledger, "finish", finishes)
    monkeypatch.setattr(Unsealer, "go_on", goes_on)
    stream = replace(row(fetch=fetch), with_properties=True)
    world = World("apart", (stream,), (0,), signed, LAYERS if signed else 0, 0, sealed=True)
    short = Consumer(world, short=True).run()
    # The first one of a layer finds no memory yet.
    assert [slot.location.object for slot in step_by_step] == [0]
    assert sum(runs) >= 2
    parsed = Consumer(world, short=False).run()
    assert short.state() == parsed.state()
    assert parsed.failure is None and parsed.ledger.counters.verified == WANTED

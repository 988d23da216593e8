"""Objects that come the short way end as those that are parsed and checked one by one.

Every world runs twice: once with a sink, where payloads, Objects like the one before and what was
unsealed take short ways, and once with events alone, where every header is parsed and every check
made by itself.
"""

from __future__ import annotations

from dataclasses import replace
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
    like, go_on = TrackReceiver.take_like, Ledger.go_on

    def take_like(*arguments: Any) -> None:
        calls["like"] += 1
        like(*arguments)

    def goes_on(*arguments: Any) -> bool:
        took = go_on(*arguments)
        calls["ledger"] += took
        return took

    monkeypatch.setattr(TrackReceiver, "take_like", take_like)
    monkeypatch.setattr(Ledger, "go_on", goes_on)
    consumer = Consumer(plain(toy, fetch=fetch, properties=properties, signed=signed), short=True)
    consumer.run()
    if properties == "gap":
        assert not any(calls.values()) and consumer.failure is not None
        return
    assert consumer.failure is None and consumer.ledger.counters.verified == WANTED
    assert calls["like"] >= 2
    # Two sections, K and then V, are not one place; all the same each Object is verified.
    assert (calls["ledger"] > 0) == (toy != "joint")


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

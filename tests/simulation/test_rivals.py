"""A broken publication beside a good one that is still produced: whoever may use the good one ends
complete, if it is whole soon enough before the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import pytest

import kvcs
from kvcs.moqt.names import Location
from tests.builders import same
from tests.simulation.finding import SCOPE, Field, fill, play, prefix_of
from tests.simulation.retrievals.means import Saved, tap
from tests.unit.kv.toy import Toy, toy_publication

GOOD, BAD = toy_publication((4,)), toy_publication((4,), seed=5)
PREFIX = prefix_of(range(16))
QUIET = kvcs.SubscriberSettings().quiet
MARGIN = 2 * QUIET
"""Seconds before the deadline by which a publication has to be whole: from one look to the next,
and for reading its manifest and its Objects."""

DEADLINE = 20.0
SIGNER = kvcs.SigningKey.generate(name="producer", scope_id=PREFIX.scope_id)


class Unfinished(Exception):
    """A producer leaves before its publication is complete."""


@asynccontextmanager
async def producing(
    field: Field, toy: Toy, host: str, prefix: kvcs.Prefix = PREFIX, **options: Any
) -> AsyncIterator[kvcs.Segment]:
    """A publication with one segment, of which nothing was put yet."""
    with suppress(Unfinished):
        async with (
            field.session(host) as session,
            kvcs.Publisher(session).publish(prefix, **options) as publication,
        ):
            segment = await publication.segment()
            yield segment
            if not segment.complete:
                raise Unfinished


@asynccontextmanager
async def broken(field: Field, how: str, toy: Toy = BAD, **options: Any) -> AsyncIterator[None]:
    """A publication that says nothing any more, or says that it is complete and is not."""
    async with producing(field, toy, "broken", **options) as segment:
        layers: Sequence[int] = range(4)
        if how in ("first damaged", "last damaged"):
            at = Location(0 if how == "first damaged" else 3, 1)
            tap(segment.tracks[0], Saved(), [at], Random(1))
        else:
            layers = {"empty": [], "stands still": [0]}[how]
        await fill(segment, toy, layers)
        yield


async def grow(segment: kvcs.Segment, seconds: float) -> None:
    """Put all layers of the good one, the last after so many seconds."""
    for layer in range(4):
        await asyncio.sleep(seconds / 4)
        await fill(segment, GOOD, [layer])


async def read(
    field: Field, deadline: float = DEADLINE, **options: Any
) -> kvcs.CacheReport | kvcs.CacheIncomplete:
    """What a consumer gets; tensors that it gets whole are the good ones."""
    keys = kvcs.KeyRing([SIGNER.public])
    async with field.session("consumer") as session:
        try:
            opening = kvcs.Subscriber(session, keys=keys).open(PREFIX, deadline=deadline, **options)
            async with opening as cache:
                got = [layer async for layer in cache]
                assert [same(layer, GOOD) for layer in got] == [True] * 4
                return cache.report
        except kvcs.CacheIncomplete as exc:
            return exc


CASES = [
    *((how, True, False) for how in ("empty", "stands still", "first damaged", "last damaged")),
    # Nothing can be handed out before the first layer is there.
    *((how, False, False) for how in ("empty", "first damaged")),
    *((how, False, True) for how in ("empty", "stands still", "first damaged", "last damaged")),
]


@pytest.mark.parametrize("good_first", [False, True])
@pytest.mark.parametrize(("how", "whole", "deterministic"), CASES)
def test_it_ends_complete_where_the_good_one_is_whole_in_time(
    how: str, whole: bool, deterministic: bool, good_first: bool
) -> None:
    expect_complete(how, whole, good_first, deterministic=deterministic)


@pytest.mark.parametrize(
    ("how", "whole", "deterministic"),
    [("stands still", False, True), ("last damaged", False, True), ("stands still", True, False)],
)
def test_signed_ones_end_complete_too(how: str, whole: bool, deterministic: bool) -> None:
    """What comes of the good one is on no list of ours, and on the good one's."""
    expect_complete(how, whole, True, deterministic=deterministic, sign=SIGNER)


def expect_complete(how: str, whole: bool, good_first: bool, **options: Any) -> None:
    """A consumer gets all of the good one."""
    toy = GOOD if options["deterministic"] else BAD

    async def scenario(field: Field) -> None:
        good = producing(field, GOOD, "good", **options)
        bad = broken(field, how, toy, **options)
        if not good_first:
            await bad.__aenter__()
        async with good as segment:
            growing = asyncio.create_task(grow(segment, DEADLINE - MARGIN))
            if good_first:
                await bad.__aenter__()
            await asyncio.sleep(0.3)
            report = await read(field, DEADLINE - 0.3, whole=whole)
            assert isinstance(report, kvcs.CacheReport), report
            await growing
        await bad.__aexit__(None, None, None)

    play(scenario)


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_that_answers_nothing_does_not_keep_us_from_the_next(deterministic: bool) -> None:
    """It is complete, as its manifest says, and nothing of it comes; a relay waits for 10 s."""
    options = {"deterministic": deterministic}

    async def scenario(field: Field) -> None:
        toy = GOOD if deterministic else BAD
        async with broken(field, "stands still", toy, **options):
            reading = asyncio.create_task(read(field, deadline=12.0, whole=True))
            await asyncio.sleep(QUIET / 2)
            async with (
                field.session("silent") as session,
                kvcs.Publisher(session).publish(PREFIX, **options) as publication,
            ):
                silent = await publication.segment()
                answered = no_answers(session, silent)
                await fill(silent, GOOD)
                async with producing(field, GOOD, "good", **options) as segment:
                    await fill(segment, GOOD)
                    report = await reading
                    assert isinstance(report, kvcs.CacheReport), report
                assert answered, "it was asked"

    play(scenario)


@pytest.mark.parametrize(
    ("whole", "deterministic", "sign"),
    [(True, False, None), (False, True, None), (True, False, SIGNER)],
)
def test_one_that_brings_too_little_is_as_one_that_stands_still(
    whole: bool, deterministic: bool, sign: kvcs.SigningKey | None
) -> None:
    """A layer comes in every span of `quiet`, and that is not enough for all of them."""
    layers = 128
    options = {"deterministic": deterministic, "sign": sign}
    keys = kvcs.KeyRing([SIGNER.public])
    good = toy_publication((4,), layers=layers)
    bad = good if deterministic else toy_publication((4,), layers=layers, seed=5)
    prefix = kvcs.Prefix(SCOPE, good.descriptor, list(range(16)))

    async def dribble(segment: kvcs.Segment) -> None:
        for layer in range(layers):
            await fill(segment, bad, [layer])
            await asyncio.sleep(0.9 * QUIET)

    async def scenario(field: Field) -> None:
        async with (
            producing(field, good, "good", prefix, **options) as segment,
            producing(field, bad, "bad", prefix, **options) as other,
            asyncio.TaskGroup() as tasks,
            field.session("consumer") as session,
        ):
            dribbling = tasks.create_task(dribble(other))
            await asyncio.sleep(QUIET)
            subscriber = kvcs.Subscriber(session, keys=keys)
            async with subscriber.open(prefix, deadline=DEADLINE, whole=whole) as cache:
                await asyncio.sleep(QUIET)
                await fill(segment, good)
                assert [same(layer, good) async for layer in cache] == [True] * layers
            dribbling.cancel()

    play(scenario)


def no_answers(session: kvcs.Connection, segment: kvcs.Segment) -> list[object]:
    """Requests for a segment's data tracks get none from now on; the list takes them."""
    asked: list[object] = []
    responder: Any = session.core.responder
    for verb in ("accept_fetch", "accept_subscribe"):
        inner = getattr(responder, verb)

        def answer(
            request_id: int, track: Any, *more: Any, _inner: Any = inner, **named: Any
        ) -> None:
            if track in segment.tracks:
                asked.append(request_id)
            else:
                _inner(request_id, track, *more, **named)

        setattr(responder, verb, answer)
    return asked


def test_one_that_is_never_whole_is_waited_for_up_to_the_deadline() -> None:
    async def scenario(field: Field) -> None:
        async with (
            producing(field, GOOD, "good") as segment,
            broken(field, "first damaged"),
        ):
            await fill(segment, GOOD, [0, 1])
            began = asyncio.get_running_loop().time()
            error = await read(field)
            assert isinstance(error, kvcs.CacheIncomplete) and "deadline" in str(error)
            assert asyncio.get_running_loop().time() - began == pytest.approx(DEADLINE, abs=0.2)

    play(scenario)


@pytest.mark.parametrize("why", ["left", "handed out", "unsigned", "other tokens", "alone"])
def test_recovery_ends_at_its_bound_where_nothing_of_another_may_be_used(why: str) -> None:
    """The producer of the good one has left; or a layer was handed out; or ours is signed."""
    sign = SIGNER if why == "unsigned" else None

    async def scenario(field: Field) -> None:
        how = "last damaged" if why == "handed out" else "first damaged"
        async with broken(field, how, sign=sign):
            if why == "alone":
                await expect_bound(field)
                return
            shorter = {"first_segment_blocks": 2} if why == "other tokens" else {}
            async with producing(field, GOOD, "good", **shorter) as segment:
                await fill(segment, GOOD, [0])
                if why != "left":
                    await expect_bound(field)
                    return
                reading = asyncio.create_task(read(field))
                await asyncio.sleep(3 * QUIET)
                assert not reading.done()
            began = asyncio.get_running_loop().time()
            error = await reading
            assert isinstance(error, kvcs.CacheIncomplete)
            assert asyncio.get_running_loop().time() - began < MARGIN

    play(scenario)


async def expect_bound(field: Field) -> None:
    """A consumer is told at the bound of recovery."""
    began = asyncio.get_running_loop().time()
    error = await read(field)
    assert isinstance(error, kvcs.CacheIncomplete) and "recovery ended after 1 s" in str(error)
    assert asyncio.get_running_loop().time() - began < 2.0


def test_without_another_publication_nothing_is_asked_again_and_again() -> None:
    async def scenario(field: Field) -> None:
        async with broken(field, "stands still"), field.session("consumer") as session:
            asked: list[object] = []
            requester: Any = session.core.requester
            for verb in ("subscribe", "fetch", "subscribe_namespace"):
                inner = getattr(requester, verb)

                def noting(*parts: Any, _inner: Any = inner, **named: Any) -> Any:
                    asked.append(parts)
                    return _inner(*parts, **named)

                setattr(requester, verb, noting)
            with pytest.raises(kvcs.CacheIncomplete):
                opening = kvcs.Subscriber(session).open(PREFIX, deadline=60.0, whole=True)
                async with opening as cache:
                    await asyncio.sleep(2 * QUIET)
                    before = len(asked)
                    await cache.complete()
            assert len(asked) - before <= 1

    play(scenario)


@pytest.mark.parametrize("signs", ["good", "broken", None])
def test_what_one_of_our_keys_has_signed_comes_first(signs: str | None) -> None:
    """Anybody in the scope can announce a complete publication that brings nothing."""

    async def scenario(field: Field) -> None:
        ours, theirs = (SIGNER if signs == each else None for each in ("good", "broken"))
        async with (
            producing(field, GOOD, "good", sign=ours) as segment,
            broken(field, "last damaged", sign=theirs),
        ):
            growing = asyncio.create_task(grow(segment, 5.0))
            await asyncio.sleep(0.3)
            outcome = await read(field)
            assert isinstance(outcome, kvcs.CacheReport) is (signs == "good")
            await growing

    play(scenario)


def test_one_that_has_let_a_retrieval_down_comes_last_the_next_time() -> None:
    async def scenario(field: Field) -> None:
        async with (
            producing(field, GOOD, "good") as segment,
            broken(field, "last damaged"),
            field.session("consumer") as session,
        ):
            growing = asyncio.create_task(grow(segment, 5.0))
            await asyncio.sleep(0.3)
            subscriber = kvcs.Subscriber(session)
            with pytest.raises(kvcs.CacheIncomplete):
                async with subscriber.open(PREFIX) as cache:
                    await cache.layer(0)
                    await cache.complete()
            async with subscriber.open(PREFIX) as cache:
                assert [same(layer, GOOD) async for layer in cache] == [True] * 4
            await growing

    play(scenario)

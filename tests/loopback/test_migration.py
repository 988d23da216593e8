"""Retrievals whose session is sent away or lost at every stage: each Object once, nothing lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

import kvcs
from kvcs.kv import Component, DataTrack, PublicationNamespace
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, SessionCode
from kvcs.moqt.names import Location
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import Server
from tests.builders import QUICK, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import accepting, serving
from tests.loopback.moving import SAFETY, Held, Wires, linked, over, until
from tests.loopback.raw_publication import K0, V0

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

TRACKS = ("k.raw.s0", "v.raw.s0")
EVERY = {Location(layer, block) for layer in range(4) for block in range(3)}


@dataclass
class Moving:
    """A publication on two servers, and a consumer that has begun at the first."""

    first: Held
    second: Held
    old: Server
    new: Server
    session: Connection
    wires: Wires
    cache: kvcs.Cache

    async def all_layers(self) -> None:
        """Every layer comes, once, with the producer's bits."""
        async with asyncio.timeout(SAFETY):
            got = [layer async for layer in self.cache]
        assert [layer.index for layer in got] == list(range(4))
        assert all(same(layer, self.first.toy) for layer in got)
        assert self.cache.report.objects == 24

    def each_once(self) -> None:
        """No Object crossed the wire twice."""
        for name in TRACKS:
            assert self.wires.objects(name) == dict.fromkeys(EVERY, 1)
        assert self.cache.report.duplicates == 0

    async def has(self, layer: int, block: int) -> None:
        """Wait until an Object has come on both tracks."""
        wire, at = self.wires.newest, Location(layer, block)
        await wire.until(lambda: all(at in wire.objects(name) for name in TRACKS), SAFETY)

    async def follows(self, times: int = 1) -> None:
        """Wait until the first server is followed for live Objects."""
        await self.first.subscribed(K0, times)
        await self.first.subscribed(V0, times)
        wire = self.wires.newest
        await wire.until(lambda: len(wire.of(events.RequestAccepted)) >= 4, SAFETY)

    async def moved(self) -> None:
        """Wait until the old session is over, and the retrieval goes over the new one."""
        await until(self.session, lambda: self.session.newest is not self.session)
        await over(self.session)
        assert self.cache.report.moves == 1
        assert self.session.newest.peer == self.new.url

    def layers(self, *layers: int) -> None:
        """Both servers publish layers."""
        for raw in (self.first, self.second):
            raw.layers(*layers)

    def finish(self, *raws: Held) -> None:
        """The publication is complete."""
        for raw in raws or (self.first, self.second):
            raw.end()
            raw.manifest()


@asynccontextmanager
async def moving(
    files: PemFiles, first: Held, second: Held, **options: Any
) -> AsyncIterator[Moving]:
    """Begin a retrieval at the first server."""
    prefix, wires = toy_prefix(), Wires()
    async with (
        serving(files, observer=accepting(first.answer)) as old,
        serving(files, observer=accepting(second.answer)) as new,
        linked(old.url, files, wires) as session,
    ):
        subscriber = kvcs.Subscriber(session, settings=QUICK)
        async with subscriber.open(prefix, deadline=SAFETY, **options) as cache:
            yield Moving(first, second, old, new, session, wires, cache)


def two() -> tuple[Held, Held]:
    """The same publication at two places, empty."""
    return Held(toy_publication()), Held(toy_publication())


@pytest.mark.parametrize("seconds", [0.0, 10.0])
async def test_goaway_between_layers(files: PemFiles, seconds: float) -> None:
    first, second = two()
    for raw in (first, second):
        raw.manifest(layers=0)
    async with moving(files, first, second) as it:
        await it.follows()
        it.layers(0, 1)
        await it.has(1, 2)
        it.old.goaway(it.new.url, timeout=seconds)
        await it.moved()
        second.layers(2, 3)  # the first one is not needed any more
        it.finish(second)
        await it.all_layers()
        it.each_once()


async def test_goaway_before_the_first_object(files: PemFiles) -> None:
    first, second = two()
    for raw in (first, second):
        raw.manifest(layers=0)
    async with moving(files, first, second) as it:
        it.old.goaway(it.new.url)
        await it.moved()
        second.layers(0, 1, 2, 3)
        it.finish(second)
        await it.all_layers()
        it.each_once()


async def test_goaway_after_the_last_object(files: PemFiles) -> None:
    first, second = two()
    first.layers(0, 1, 2, 3)
    first.end()
    first.manifest()
    async with moving(files, first, second) as it:
        await it.all_layers()
        it.old.goaway(it.new.url)
        await until(it.session, lambda: it.session.newest is not it.session)
        await over(it.session)
        it.each_once()
        assert it.cache.report.moves == 0
        assert not second.requests  # nothing is asked for that is there
        assert same(await it.cache.layer(3), first.toy)


@pytest.mark.parametrize("retrieve", ["subscribe", "fetch"])
async def test_goaway_during_a_fill_or_fetch(files: PemFiles, retrieve: str) -> None:
    first, second = two()
    hole: dict[tuple[DataTrack, int], bytes | None] = {(K0, 1): None, (V0, 1): None}
    for tracks in (first.live, first.stored):
        for name in tracks:
            tracks[name] = first.track(name.name, authoritative=False)
    first.hold_unknown = True  # the stream stops there, as on a slow path
    first.layers(0)
    first.layer(1, hole, hole)
    first.layers(2, 3)
    second.layers(0, 1, 2, 3)
    for raw in (first, second):
        raw.end()
        raw.manifest()
    async with moving(files, first, second, retrieve=retrieve) as it:
        await it.has(1, 0)
        it.old.goaway(it.new.url, timeout=10.0)
        await it.all_layers()
        it.each_once()
        await until(it.session, lambda: it.session.newest is not it.session)
        await over(it.session)
        assert it.session.newest.peer == it.new.url


async def test_goaway_while_the_new_server_is_slow_to_answer_loses_nothing(
    files: PemFiles,
) -> None:
    """Both sessions bring the same live layers; the old one's count, and the gap is none."""
    first, second = two()
    for raw in (first, second):
        raw.manifest(layers=0)
    second.hold_answers = True
    async with moving(files, first, second) as it:
        await it.follows()
        it.layers(0)
        await it.has(0, 2)
        it.old.goaway(it.new.url, timeout=SAFETY)
        await second.until_asked(lambda: len(second.held) == 3)  # manifest, k and v
        wire = it.wires.all[0]
        it.layers(1, 2)  # still over the old session
        at = Location(2, 2)
        await wire.until(lambda: all(at in wire.objects(name) for name in TRACKS), SAFETY)
        second.let_go()
        await it.moved()
        second.layers(3)
        it.finish(second)
        await it.all_layers()
        # The new session was asked before layers 1 and 2 came over the old one.
        for name in TRACKS:
            counts = it.wires.objects(name)
            assert set(counts) == EVERY
            assert {at for at, count in counts.items() if count > 1} <= {
                Location(layer, block) for layer in (1, 2) for block in range(3)
            }


async def test_publish_done_before_the_last_streams_while_it_moves(files: PemFiles) -> None:
    first, second = two()
    for raw in (first, second):
        raw.manifest(layers=0)
    second.hold_answers = True
    async with moving(files, first, second) as it:
        await it.follows()
        it.layers(0, 1, 2)
        await it.has(2, 2)
        hand = await first.subscribed(K0)
        it.old.goaway(it.new.url, timeout=SAFETY)
        await second.until_asked(lambda: len(second.held) == 3)
        wire = it.wires.all[0]
        hand.drop(PublishDoneCode.TRACK_ENDED)  # layer 3 of k never comes over this session
        await wire.until(lambda: bool(wire.of(events.SubscriptionEnded)), SAFETY)
        second.layers(3)
        it.finish(second)
        second.let_go()
        await it.all_layers()
        it.each_once()


@pytest.mark.parametrize("status", [PublishDoneCode.GOING_AWAY, None])
async def test_a_publisher_that_goes_away_from_one_track_is_asked_again(
    files: PemFiles, status: PublishDoneCode | None
) -> None:
    first, second = two()
    first.manifest(layers=0)
    async with moving(files, first, second) as it:
        await it.follows()
        first.layers(0)
        await it.has(0, 2)
        (await first.subscribed(K0)).drop(status)
        await first.subscribed(K0, 2)
        first.layers(1, 2, 3)
        it.finish(first)
        await it.all_layers()
        for name in TRACKS:
            assert set(it.wires.objects(name)) == EVERY
        assert it.session.is_usable


async def test_the_old_session_is_lost_while_it_moves(files: PemFiles) -> None:
    first, second = two()
    for raw in (first, second):
        raw.manifest(layers=0)
    second.hold_answers = True
    async with moving(files, first, second) as it:
        await it.follows()
        it.layers(0)
        await it.has(0, 2)
        it.old.goaway(it.new.url, timeout=SAFETY)
        await second.until_asked(lambda: len(second.held) == 3)
        await it.old.close(SessionCode.INTERNAL_ERROR, "it crashed")
        await over(it.session)
        second.layers(1, 2, 3)
        it.finish(second)
        second.let_go()
        await it.all_layers()
        it.each_once()


async def test_the_new_session_is_lost_while_it_moves(files: PemFiles) -> None:
    first, second = two()
    for raw in (first, second):
        raw.manifest(layers=0)
    second.hold_answers = True
    async with moving(files, first, second) as it:
        await it.follows()
        it.layers(0)
        await it.has(0, 2)
        it.old.goaway(it.new.url, timeout=SAFETY)
        await second.until_asked(lambda: len(second.held) == 3)
        (peer,) = it.new.connections
        await peer.close(SessionCode.INTERNAL_ERROR, "it crashed")
        second.hold_answers = False  # the next session is served
        it.layers(1, 2, 3)
        it.finish()
        await it.all_layers()
        for name in TRACKS:
            assert set(it.wires.objects(name)) == EVERY


async def test_a_second_goaway_is_a_violation_and_loses_nothing(files: PemFiles) -> None:
    first, second = two()
    for raw in (first, second):
        raw.manifest(layers=0)
    second.hold_answers = True
    async with moving(files, first, second) as it:
        await it.follows()
        it.layers(0)
        await it.has(0, 2)
        (peer,) = it.old.connections
        it.old.goaway(it.new.url)
        await second.until_asked(lambda: len(second.held) == 3)
        peer.core.control.goaway_sent = False
        peer.goaway(it.new.url)  # what a correct peer never does
        await over(it.session)
        assert it.session.close_error().code == SessionCode.PROTOCOL_VIOLATION
        second.layers(1, 2, 3)
        it.finish(second)
        second.let_go()
        await it.all_layers()
        it.each_once()


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_goaway_for_one_request(files: PemFiles, elsewhere: bool) -> None:
    first, second = two()
    for raw in (first, second):
        raw.manifest(layers=0)
    async with moving(files, first, second) as it:
        await it.follows()
        it.layers(0)
        await it.has(0, 2)
        (peer,) = it.old.connections
        (asked,) = (
            each
            for each in first.asks(events.SubscribeReceived)
            if each.full_track_name == first.live[K0].name  # type: ignore[union-attr]
        )
        uri = it.new.url if elsewhere else ""
        peer.goaway(uri, timeout=10.0, request_id=asked.request_id)
        if elsewhere:
            await second.subscribed(K0)
            await second.subscribed(V0)
            await it.wires.newest.until(
                lambda: len(it.wires.newest.of(events.RequestAccepted)) >= 3, SAFETY
            )
        else:
            await it.follows(2)
            await it.wires.newest.until(
                lambda: len(it.wires.newest.of(events.RequestAccepted)) >= 7, SAFETY
            )
        it.layers(1, 2, 3)
        it.finish()
        await it.all_layers()
        assert it.session.is_usable and it.session.newest is it.session
        assert it.cache.report.moves == 1
        for name in TRACKS:
            assert set(it.wires.objects(name)) == EVERY


@pytest.mark.parametrize("other_is_lost", [False, True])
async def test_what_one_relay_has_lost_is_fetched_from_another(
    files: PemFiles, other_is_lost: bool
) -> None:
    first, second = two()
    hole: dict[tuple[DataTrack, int], bytes | None] = {(K0, 1): None}
    first.live[K0] = first.track(b"k.raw.s0", authoritative=False)
    for layer in range(4):
        first.layer(layer, hole if layer == 2 else None)
        second.layer(layer)
    for raw in (first, second):
        raw.end()
        raw.manifest()
    first.fetchable = False
    second.announced = False  # it is found at the first
    second.hold_answers = other_is_lost
    settings = replace(QUICK, least_recovery=2.0 if other_is_lost else SAFETY)
    async with (
        serving(files, observer=accepting(first.answer)) as here,
        serving(files, observer=accepting(second.answer)) as there,
        linked(here.url, files) as session,
        linked(there.url, files, policy=kvcs.Reconnect(deadline=0.1)) as other,
    ):
        subscriber = kvcs.Subscriber(session, other, settings=settings)
        async with subscriber.open(
            toy_prefix(),
            deadline=SAFETY,
            publication=PublicationNamespace.parse(first.namespace),
        ) as cache:
            if other_is_lost:
                await second.until_asked(lambda: bool(second.asks_held(events.FetchReceived)))
                await there.close()
                with pytest.raises(kvcs.CacheIncomplete) as caught:
                    await cache.complete()
                assert [str(run) for run in caught.value.missing] == [
                    "k layer 2 blocks 1-1 (tokens 4-7)"
                ]
                return
            assert all([same(layer, first.toy) async for layer in cache])
            assert cache._retrieval.connection is session
            assert (cache.report.moves, cache.report.duplicates) == (0, 0)
    assert second.asks(events.FetchReceived) and not second.asks(events.SubscribeReceived)


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_goaway_for_a_namespace_subscription(files: PemFiles, elsewhere: bool) -> None:
    first, second = two()
    first.announced = False
    prefix, wires = toy_prefix(), Wires()
    async with (
        serving(files, observer=accepting(first.answer)) as old,
        serving(files, observer=accepting(second.answer)) as new,
        linked(old.url, files, wires) as session,
    ):
        serving_one = second if elsewhere else first
        serving_one.layers(0, 1, 2, 3)
        serving_one.end()
        serving_one.manifest()
        subscriber = kvcs.Subscriber(session, settings=QUICK)

        async def retrieve() -> list[kvcs.Layer]:
            async with subscriber.open(prefix, deadline=SAFETY) as cache:
                return [layer async for layer in cache]

        async with asyncio.TaskGroup() as group:
            task = group.create_task(retrieve())
            await first.until_asked(lambda: bool(first.asks(events.SubscribeNamespaceReceived)))
            (asked,) = first.asks(events.SubscribeNamespaceReceived)
            first.announced = True
            (peer,) = old.connections
            peer.goaway(new.url if elsewhere else "", timeout=10.0, request_id=asked.request_id)
        assert all(same(layer, first.toy) for layer in task.result())
        assert session.newest is session and session.is_usable


async def test_a_segment_that_is_added_while_it_moves(files: PemFiles) -> None:
    toy = toy_publication((2, 1))
    alone = replace(toy, blocks=[2], segments=toy.segments[:1])
    first, second = Held(toy), Held(toy)
    for raw in (first, second):
        raw.manifest(alone.writer([0]).to_json_bytes())
    publication = PublicationNamespace.parse(first.namespace)
    async with moving(files, first, second, publication=publication) as it:
        await first.subscribed(K0)
        it.old.goaway(it.new.url)
        await it.moved()
        second.manifest(layers=0)  # both segments
        await second.subscribed(DataTrack(Component.K, "raw", 1))
        second.layers(0, 1, 2, 3)
        it.finish(second)
        await it.all_layers()


async def test_a_session_that_is_lost_before_discovery_is_over(files: PemFiles) -> None:
    first, second = two()
    second.layers(0, 1, 2, 3)
    second.end()
    second.manifest()
    first.announced = False
    prefix, wires = toy_prefix(), Wires()
    async with (
        serving(files, observer=accepting(first.answer)) as old,
        serving(files, observer=accepting(second.answer)) as new,
        linked(old.url, files, wires) as session,
    ):
        subscriber = kvcs.Subscriber(session, settings=QUICK)

        async def retrieve() -> list[kvcs.Layer]:
            async with subscriber.open(prefix, deadline=SAFETY) as cache:
                return [layer async for layer in cache]

        async with asyncio.TaskGroup() as group:
            task = group.create_task(retrieve())
            await first.until_asked(lambda: bool(first.requests))
            old.goaway(new.url)
        assert all(same(layer, second.toy) for layer in task.result())

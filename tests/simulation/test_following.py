"""Tracks that are followed over sessions which are lost, sent away or given up, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

import kvcs
from kvcs.errors import ConnectionClosed, RequestError, StreamError
from kvcs.moqt import FullTrackName, Location, Track
from kvcs.moqt.errors import PublishDoneCode
from kvcs.quic import Connection, Server, connect, follow, follow_tracks, subscribe, take
from kvcs.testing.network import Conditions, Network, leftovers
from kvcs.testing.tracks import end_track, payload, put
from tests.virtual import virtual

NAME = FullTrackName((b"example",), b"track")
POLICY = kvcs.Reconnect(deadline=20.0, first_pause=0.05, max_pause=0.5, leave=2.0, linger=0.1)
GROUPS, OBJECTS = 8, 3
EVERY = [Location(group, number) for group in range(GROUPS) for number in range(OBJECTS)]


class Stage:
    """A server with one Track, and a client."""

    def __init__(self, network: Network, server: Server, session: Connection) -> None:
        self.network = network
        self.server = server
        self.session = session
        self.track = Track(NAME, authoritative=True)
        server.origin.add_track(self.track)

    async def publish(self, until: int = GROUPS, *, first: int = 0) -> None:
        """Publish Groups, one Object every 50 ms; the end behind the last."""
        for group in range(first, until):
            for number in range(OBJECTS):
                put(self.track, group, number, octets=700)
                await asyncio.sleep(0.05)
            self.track.finish_subgroup(group, 0)
        if until == GROUPS:
            end_track(self.track, GROUPS)

    async def lose(self) -> None:
        """The server ends the session as if it had failed."""
        await self.server.connections[0].close_alone(1, "a test")


@asynccontextmanager
async def stage(reconnect: kvcs.Reconnect | None = POLICY) -> AsyncIterator[Stage]:
    network = Network(2, conditions=Conditions(delay=0.02, loss=0.02, reorder=0.2))
    with network.host("server"):
        async with kvcs.quic.serve("server", 4433, cert="unused", key="unused") as server:
            with network.host("client"):
                async with connect("moqt://server:4433", reconnect=reconnect) as session:
                    yield Stage(network, server, session)
    await asyncio.sleep(60)
    assert leftovers(network) == []


async def lost(made: Stage) -> None:
    """Sessions fail, three times."""
    for _ in range(3):
        await asyncio.sleep(0.3)
        await made.lose()
        await asyncio.sleep(0.5)


async def sent_away(made: Stage) -> None:
    """The session is sent away."""
    await asyncio.sleep(0.4)
    made.server.connections[0].goaway()


@virtual
@pytest.mark.parametrize("fault", [lost, sent_away])
@pytest.mark.parametrize("before", [0, 3])
async def test_each_object_comes_once_over_all_sessions(
    fault: Callable[[Stage], Awaitable[None]], before: int
) -> None:
    async with stage() as made:
        await made.publish(before)
        first = made.session
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(made.publish(first=before))
            tasks.create_task(fault(made))
            async with asyncio.timeout(60):
                items = [item async for item in follow(made.session, NAME)]
        assert made.session.newest is not first
    got = [item.location for item in items if item.payload]
    assert sorted(got) == EVERY
    assert all(item.payload == payload(item.location, 700) for item in items if item.payload)


@virtual
async def test_without_a_fill_it_begins_with_the_next_object_and_misses_none_behind() -> None:
    async with stage() as made:
        await made.publish(2)
        items: list[Location] = []

        async def consume() -> None:
            async for item in follow(made.session, NAME, fill=False):
                items.append(item.location)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(consume())
            await asyncio.sleep(1)
            await made.lose()
            # Published while there is no session.
            await made.publish(first=2)
    assert sorted(at for at in items if at.group < GROUPS and at.object < OBJECTS) == EVERY[6:]


@virtual
async def test_a_subscription_alone_ends_with_its_session() -> None:
    async with stage() as made:
        async with subscribe(made.session, NAME) as track:
            put(made.track, 0, 0)
            assert (await anext(track)).location == Location(0, 0)
            await made.lose()
            with pytest.raises(ConnectionClosed):
                await anext(track)


@virtual
@pytest.mark.parametrize("reconnect", [None, POLICY])
async def test_where_no_session_follows_that_is_told(reconnect: kvcs.Reconnect | None) -> None:
    async with stage(reconnect) as made:
        put(made.track, 0, 0)
        async with aclosing(follow(made.session, NAME)) as items:
            assert (await anext(items)).location == Location(0, 0)
            await made.server.close()
            with pytest.raises(ConnectionClosed):
                await anext(items)


@virtual
async def test_a_track_that_does_not_come_back_is_given_up_at_the_deadline() -> None:
    async with stage() as made:
        put(made.track, 0, 0)
        async with aclosing(follow(made.session, NAME)) as items:
            assert (await anext(items)).location == Location(0, 0)
            made.server.origin.remove_track(NAME)
            await made.lose()
            began = asyncio.get_running_loop().time()
            with pytest.raises(RequestError):
                await anext(items)
            assert 20 <= asyncio.get_running_loop().time() - began < 40


@virtual
async def test_a_publisher_that_went_away_and_comes_back_is_followed() -> None:
    async with stage() as made:
        put(made.track, 0, 0)
        async with asyncio.timeout(60), aclosing(follow(made.session, NAME)) as items:
            assert (await anext(items)).location == Location(0, 0)
            made.track.end(PublishDoneCode.GOING_AWAY, "a test", abandoned=True)
            waiting = asyncio.create_task(anext(items))  # type: ignore[arg-type]
            await asyncio.sleep(3)
            assert not waiting.done()
            made.track.reopen()
            put(made.track, 1, 0)
            assert (await waiting).location == Location(1, 0)


@virtual
async def test_what_is_no_loss_of_a_session_is_raised_at_once() -> None:
    async with stage() as made:
        with pytest.raises(RequestError):
            await anext(follow(made.session, FullTrackName((b"no",), b"such")))
        put(made.track, 0, 0)
        async with aclosing(follow(made.session, NAME)) as items:
            assert (await anext(items)).location == Location(0, 0)
            made.track.end(PublishDoneCode.INTERNAL_ERROR, "a fault", abandoned=True)
            with pytest.raises(StreamError, match="a fault"):
                await anext(items)


@virtual
@pytest.mark.parametrize("fault", [lost, sent_away])
async def test_tracks_are_offered_again_by_the_next_session(
    fault: Callable[[Stage], Awaitable[None]],
) -> None:
    async with stage() as made:
        sessions: list[Connection] = []
        async with (
            asyncio.timeout(60),
            aclosing(follow_tracks(made.session, (b"example",))) as all_,
        ):
            offered = await anext(all_)
            sessions.append(offered.connection)
            offered.refuse()
            await fault(made)
            again = await anext(all_)
            while again.connection in sessions:
                again = await anext(all_)
            assert again.name == NAME
            with take(again) as track:
                put(made.track, 0, 0)
                assert (await anext(track)).location == Location(0, 0)


@virtual
async def test_a_watch_alone_ends_with_its_session() -> None:
    async with stage() as made:
        watch = made.session.tracks.watch((b"other",))
        await watch.answered.wait()
        await made.lose()
        with pytest.raises(ConnectionClosed):
            await anext(watch)  # type: ignore[call-overload]

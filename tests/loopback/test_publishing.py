"""PUBLISH, SUBSCRIBE_TRACKS and updates over real QUIC, direct and through the relay (MOQT §9)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kvcs.errors import ConnectionClosed, RequestError, UsageError
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, RequestCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.messages import RequestOk
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import Server, connect, serve
from kvcs.quic.origin import Origin
from kvcs.quic.subscription import take
from kvcs.quic.tracks import OfferedTrack
from kvcs.relay.server import Relay, RelaySettings
from kvcs.testing.residue import residue
from kvcs.testing.tracks import end_track, locations, payload, put_group, track
from tests.certificates import PemFiles
from tests.loopback.test_lifetimes import tables

PREFIX = (b"news",)
NAME = FullTrackName((*PREFIX, b"today"), b"lines")
OTHER = FullTrackName((*PREFIX, b"today"), b"photos")
OCTETS = 5000
SECONDS = 30

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Log:
    """Events of one request, and waits for them."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []
        self._changed = asyncio.Event()

    def take(self, event: events.Event) -> None:
        singles = event.singles() if isinstance(event, events.ObjectsReceived) else (event,)
        for one in singles:
            if isinstance(one, events.ObjectChunk):
                data = memoryview(bytes(one.data))
                one = events.ObjectChunk(one.request_id, one.stream_id, data)
            self.events.append(one)
        self._changed.set()

    async def until(self, done: Callable[[list[events.Event]], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not self.events or not done(self.events):
                self._changed.clear()
                await self._changed.wait()

    async def ended(self) -> events.SubscriptionEnded:
        await self.until(lambda seen: isinstance(seen[-1], events.SubscriptionEnded))
        last = self.events[-1]
        assert isinstance(last, events.SubscriptionEnded)
        return last

    async def objects(self, count: int) -> list[Location]:
        await self.until(lambda seen: len(locations(seen)) >= count)
        return sorted(locations(self.events))


@asynccontextmanager
async def ends(
    files: PemFiles, *, relayed: bool
) -> AsyncIterator[tuple[Origin, Connection, Callable[[], object]]]:
    """An origin, a session of its subscriber, and what waits until the origin is attached."""
    if not relayed:
        async with serve("127.0.0.1", 0, cert=files.cert, key=files.key) as server:
            async with connect(server.url, ca=files.ca) as session:
                yield server.origin, session, server.drain
        return
    settings = RelaySettings(
        cert=files.cert, key=files.key, port=0, allow_anyone=True, goaway_timeout=SECONDS
    )
    async with (
        Relay(settings) as relay,
        connect(relay.url, ca=files.ca) as publisher,
        connect(relay.url, ca=files.ca) as session,
    ):
        yield publisher.origin, session, publisher.drain


async def offered(session: Connection) -> tuple[OfferedTrack, Log]:
    """The first Track that the peer publishes, accepted."""
    watch = session.tracks.watch(PREFIX)
    async with asyncio.timeout(SECONDS):
        one = await anext(watch)
    log = Log()
    one.accept(log.take)
    return one, log


@pytest.mark.parametrize("relayed", [False, True])
async def test_every_track_below_a_prefix_is_offered_and_taken(
    files: PemFiles, relayed: bool
) -> None:
    async with ends(files, relayed=relayed) as (origin, session, _):
        first = track(NAME, properties=KeyValues.of({0x78: 3}))
        put_group(first, 0, 2, octets=OCTETS)
        origin.add_track(first)
        if relayed:
            await origin.push_track(NAME)
        one, log = await offered(session)
        assert (one.name, one.properties) == (NAME, KeyValues.of({0x78: 3}))
        assert one.parameters.get(ParameterType.LARGEST_OBJECT) == Location(0, 2)
        put_group(first, 1, 3, octets=OCTETS)
        assert await log.objects(3) == [(1, 0), (1, 1), (1, 2)]
        chunks = b"".join(
            bytes(event.data) for event in log.events if isinstance(event, events.ObjectChunk)
        )
        assert chunks == b"".join(payload(Location(1, n), OCTETS) for n in range(3))
        end_track(first, 2)
        done = await log.ended()
        assert done.status == PublishDoneCode.TRACK_ENDED
        assert done.every_stream_seen


@pytest.mark.parametrize("relayed", [False, True])
async def test_what_is_published_later_is_offered_too(files: PemFiles, relayed: bool) -> None:
    async with ends(files, relayed=relayed) as (origin, session, _):
        watch = session.tracks.watch(PREFIX)
        await watch.answered.wait()
        assert watch.error is None
        names = []
        for name in (NAME, OTHER):
            origin.add_track(track(name))
            if relayed:
                await origin.push_track(name)
            async with asyncio.timeout(SECONDS):
                one = await anext(watch)
            names.append(one.name)
            one.refuse()
        assert names == [NAME, OTHER]
        watch.close()
        with pytest.raises(StopAsyncIteration):
            await anext(watch)


@pytest.mark.parametrize("relayed", [False, True])
async def test_a_published_track_is_joined_with_fill_paused_and_resumed(
    files: PemFiles, relayed: bool
) -> None:
    async with ends(files, relayed=relayed) as (origin, session, _):
        source = track(NAME)
        put_group(source, 0, 2, octets=OCTETS)
        origin.add_track(source)
        if relayed:
            await origin.push_track(NAME, Parameters.of(forward=0))
        one, log = await offered(session)
        requester = session.core.requester

        async def update(**parameters: object) -> RequestOk:
            update_id = requester.update(one.request_id, Parameters.of(**parameters))

            def answered(seen: list[events.Event]) -> bool:
                return any(
                    isinstance(event, events.RequestUpdateAnswered) and event.update_id == update_id
                    for event in seen
                )

            await log.until(answered)
            (answer,) = (
                event.reply
                for event in log.events
                if isinstance(event, events.RequestUpdateAnswered) and event.update_id == update_id
            )
            assert isinstance(answer, RequestOk)
            return answer

        await update(forward=0)
        put_group(source, 1, 1, octets=OCTETS)
        fill = Parameters.of(location_filter=LocationFilter.absolute_start(0, 0))
        reply = await update(forward=1, fill_parameters=fill)
        assert reply.parameters.get(ParameterType.LARGEST_OBJECT) is not None
        put_group(source, 2, 1, octets=OCTETS)
        end_track(source, 3)
        await log.ended()
        assert sorted(set(locations(log.events))) == [(0, 0), (0, 1), (1, 0), (2, 0)]


@pytest.mark.parametrize("relayed", [False, True])
async def test_a_published_track_is_followed_by_iterating(files: PemFiles, relayed: bool) -> None:
    async with ends(files, relayed=relayed) as (origin, session, _):
        source = track(NAME)
        origin.add_track(source)
        if relayed:
            await origin.push_track(NAME)
        async with asyncio.timeout(SECONDS):
            offered = await anext(session.tracks.watch(PREFIX))
            with take(offered) as following:
                put_group(source, 0, 2, octets=OCTETS)
                end_track(source, 1)
                got = {item.location: item.payload async for item in following if item.payload}
        assert got == {Location(0, n): payload(Location(0, n), OCTETS) for n in range(2)}
        assert following.lost == 0
        if not relayed:
            assert source.listeners == []


async def test_a_subscriber_that_leaves_ends_a_published_subscription(files: PemFiles) -> None:
    server: Server
    async with serve("127.0.0.1", 0, cert=files.cert, key=files.key) as server:
        async with connect(server.url, ca=files.ca) as session:
            source = track(NAME)
            server.origin.add_track(source)
            one, log = await offered(session)
            put_group(source, 0, 1)
            await log.objects(1)
            left = asyncio.Event()
            source.on_unfollowed = left.set
            session.cancel(one.request_id)
            async with asyncio.timeout(SECONDS):
                await left.wait()
            assert source.listeners == []
            assert session.is_open


async def test_a_peer_that_sends_us_away_is_offered_nothing_new(files: PemFiles) -> None:
    async with serve("127.0.0.1", 0, cert=files.cert, key=files.key) as server:
        async with connect(server.url, ca=files.ca) as session:
            watch = session.tracks.watch(PREFIX)
            await watch.answered.wait()
            [connection] = server.connections
            heard = asyncio.Event()
            connection.on_goaway(heard.set)
            session.goaway()
            async with asyncio.timeout(SECONDS):
                await heard.wait()
            server.origin.add_track(track(NAME))
            assert [one for one in connection.core.requests.all() if one.ours] == []


async def test_what_is_not_wanted_is_refused_and_what_is_not_there_is_not_pushed(
    files: PemFiles,
) -> None:
    async with serve("127.0.0.1", 0, cert=files.cert, key=files.key) as server:
        with pytest.raises(UsageError):
            await server.origin.push_track(NAME)
        server.origin.add_track(track(NAME))
        with pytest.raises(ConnectionClosed):
            await server.origin.push_track(NAME)
        async with connect(server.url, ca=files.ca) as session:
            session.origin.add_track(track(OTHER))
            with pytest.raises(RequestError) as refused:
                await session.origin.push_track(OTHER)
            assert refused.value.code == RequestCode.UNINTERESTED
            watch = session.tracks.watch(PREFIX)
            with pytest.raises(UsageError):
                session.tracks.watch((*PREFIX, b"today"))
            waiting = asyncio.ensure_future(anext(watch))
            async with asyncio.timeout(SECONDS):
                offering = await waiting
            assert tables(session)["cancellations"] == 1
            offering.refuse()
            assert "cancellations" not in tables(session)  # many may come and be answered
            last = asyncio.ensure_future(anext(watch))
            await session.close()
            with pytest.raises(ConnectionClosed):
                await last
            assert residue(session.core) == {}

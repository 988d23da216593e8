"""Following one Track with `kvcs.quic.subscribe`, on the virtual network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kvcs.errors import ConnectionClosed, RequestError, StreamError
from kvcs.moqt import FullTrackName, Location, LocationFilter, ObjectHeader, Parameters, Track
from kvcs.moqt.properties import KeyValues
from kvcs.quic import Connection, ReceivedObject, Server, connect, serve, subscribe
from kvcs.testing.network import Conditions, Network, leftovers, run
from kvcs.testing.tracks import end_track, payload, put, put_group

NAME = FullTrackName((b"example",), b"track")
ROUGH = Conditions(delay=0.02, loss=0.1, reorder=0.3)


class Stage:
    """A server with one Track, and a session with it."""

    def __init__(self, network: Network, server: Server, session: Connection) -> None:
        self.network = network
        self.server = server
        self.session = session
        self.track = Track(NAME, authoritative=True)
        server.origin.add_track(self.track)


@asynccontextmanager
async def stage(conditions: Conditions) -> AsyncIterator[Stage]:
    network = Network(2, conditions=conditions)
    with network.host("server"):
        async with serve("server", 4433, cert="unused", key="unused") as server:
            with network.host("client"):
                async with connect("moqt://server:4433", reconnect=None) as session:
                    yield Stage(network, server, session)
    await asyncio.sleep(40)
    assert leftovers(network) == []


def played(test: Callable[[Stage], Awaitable[None]], conditions: Conditions = ROUGH) -> None:
    async def main() -> None:
        async with stage(conditions) as made:
            await test(made)

    run(main())


def locations(items: list[ReceivedObject]) -> list[Location]:
    return [item.location for item in items if item.payload]


@pytest.mark.parametrize("joins_after", [0.0, 0.05, 0.5, 3.0])
def test_whatever_the_moment_of_the_join_each_object_comes_once(joins_after: float) -> None:
    every = [Location(group, index) for group in range(10) for index in range(3)]

    async def publish(track: Track) -> None:
        for group in range(10):
            for index in range(3):
                put(track, group, index, octets=700)
                await asyncio.sleep(0.03)
            track.finish_subgroup(group, 0)
        end_track(track, 10)

    async def test(made: Stage) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish(made.track))
            await asyncio.sleep(joins_after)
            async with subscribe(made.session, NAME) as track:
                items = [item async for item in track]
        assert sorted(locations(items)) == every
        assert all(i.payload == payload(i.location, 700) for i in items if i.payload)
        assert track.lost == 0
        assert track.reply is not None

    played(test)


def test_without_fill_it_begins_with_the_next_object() -> None:
    async def test(made: Stage) -> None:
        put_group(made.track, 0, 3)
        async with subscribe(made.session, NAME, fill=False) as track:
            put_group(made.track, 1, 2)
            end_track(made.track, 2)
            items = [item async for item in track]
        assert locations(items) == [Location(1, 0), Location(1, 1)]

    played(test)


def test_parameters_replace_what_is_asked_for() -> None:
    async def test(made: Stage) -> None:
        asked = Parameters.of(location_filter=LocationFilter.absolute_range(1, 0, 1, 9))
        async with subscribe(made.session, NAME, parameters=asked) as track:
            for group in range(3):
                put_group(made.track, group, 1)
            end_track(made.track, 3)
            assert Location(1, 0) in locations([await anext(track)])

    played(test)


def test_an_unknown_track_is_refused() -> None:
    async def test(made: Stage) -> None:
        with pytest.raises(RequestError):
            async with subscribe(made.session, FullTrackName((b"example",), b"other")):
                raise AssertionError("it was accepted")

    played(test)


def test_what_is_whole_is_given_before_the_error() -> None:
    async def test(made: Stage) -> None:
        async with subscribe(made.session, NAME) as track:
            put_group(made.track, 0, 2)
            await asyncio.sleep(2)
            made.track.end(0x0, "the sensor broke", abandoned=True)
            await asyncio.sleep(2)
            assert locations([await anext(track), await anext(track)]) == [(0, 0), (0, 1)]
            with pytest.raises(StreamError, match="the sensor broke"):
                async for item in track:
                    assert not item.payload

    played(test)


def test_a_stream_that_is_reset_is_counted_and_its_object_never_given() -> None:
    async def test(made: Stage) -> None:
        async with subscribe(made.session, NAME) as track:
            put(made.track, 0, 0)
            await asyncio.sleep(1)
            made.track.end()  # the Group's stream was never finished
            items = [item async for item in track]
        assert locations(items) == [Location(0, 0)]
        assert track.lost == 1

    played(test)


def test_a_session_that_ends_is_told() -> None:
    async def test(made: Stage) -> None:
        async with subscribe(made.session, NAME) as track:
            await made.server.close()
            with pytest.raises(ConnectionClosed):
                await anext(track)
        with pytest.raises(ConnectionClosed):
            async with subscribe(made.session, NAME):
                raise AssertionError("there is no session")

    played(test)


@pytest.mark.parametrize(("octets", "of_properties"), [(0, 0), (600, 0), (1, 600)])
def test_objects_that_nobody_takes_are_bounded(octets: int, of_properties: int) -> None:
    """Those that come after the bound was reached are not given either, and not without payload."""
    properties = b"" if not of_properties else KeyValues.of([(0x3D, bytes(of_properties))]).write()

    async def test(made: Stage) -> None:
        async with subscribe(made.session, NAME, max_octets=10_000) as track:
            for group in range(60):
                made.track.publish(
                    ObjectHeader(group, 0, payload_length=octets, properties=properties),
                    (memoryview(bytes(octets)),) if octets else (),
                    0.0,
                )
                made.track.finish_subgroup(group, 0)
            await asyncio.sleep(5)
            items = []
            with pytest.raises(StreamError, match="more than 10000 octets wait"):
                async for item in track:
                    items.append(item)
            each = 256 + octets + len(properties)
            assert 0 < len(items) <= 10_000 // each
            assert all(item.payload == bytes(octets) for item in items)

    played(test, Conditions())


def test_leaving_early_ends_the_subscription() -> None:
    async def test(made: Stage) -> None:
        async with subscribe(made.session, NAME) as track:
            put_group(made.track, 0, 1)
            await anext(track)
        await asyncio.sleep(5)
        assert not made.track.followed

    played(test)

"""Tracks that are pushed to a relay, and whoever takes them, on the virtual network: by seeds."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

import kvcs
from kvcs.moqt import FullTrackName, Location, LocationFilter, Parameters, Track
from kvcs.moqt.parameters import ParameterType
from kvcs.quic import OfferedTrack, ReceivedObject, connect, subscribe, take
from kvcs.testing.network import Conditions, Network, leftovers, run
from kvcs.testing.tracks import end_track, payload, put

PORT = 4433
PREFIX = (b"example",)
NAMES = [FullTrackName((*PREFIX, b"pushed"), name) for name in (b"a", b"b")]
GROUPS, OBJECTS, OCTETS = 8, 3, 900
EVERY = [Location(group, number) for group in range(GROUPS) for number in range(OBJECTS)]
SEEDS = 12


class Story:
    """One run."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        loss = self.random.choice([0.0, 0.05])
        conditions = Conditions(delay=0.02, loss=loss, reorder=0.2)
        self.network = Network(seed, conditions=conditions)
        settings = kvcs.RelaySettings(
            cert="unused",
            key="unused",
            host=self.network.host("relay").address,
            port=PORT,
            allow_anyone=True,
            limits=kvcs.RelayLimits(upstream_linger=self.random.choice([0.1, 0.5, 5.0])),
        )
        self.relay = kvcs.Relay(settings)
        self.over: set[FullTrackName] = set()
        """Tracks that have ended."""

    async def play(self) -> None:
        with self.network.host("relay"):
            await self.relay.__aenter__()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.push())
            for number in range(3):
                tasks.create_task(self.follow(number))
                tasks.create_task(self.take_all(number))
        await self.relay.close(at_once=True)
        await asyncio.sleep(60)
        assert leftovers(self.network) == []

    async def push(self) -> None:
        with self.network.host("publisher"):
            async with connect(f"moqt://relay:{PORT}", reconnect=None) as session:
                tracks = [Track(name, authoritative=True) for name in NAMES]
                for track in tracks:
                    session.origin.add_track(track)
                # Announced, too: who comes behind the end finds the past.
                await session.origin.add_namespace(NAMES[0].namespace)
                async with asyncio.TaskGroup() as tasks:
                    for track in tracks:
                        paused = Parameters.of(forward=self.random.choice([0, 1]))
                        await session.origin.push_track(track.name, paused)
                        tasks.create_task(self.publish(track))
                await asyncio.sleep(20)  # who follows fetches what the relay lacks

    async def publish(self, track: Track) -> None:
        for group in range(GROUPS):
            for number in range(OBJECTS):
                put(track, group, number, octets=OCTETS)
                await asyncio.sleep(self.random.random() * 0.1)
            track.finish_subgroup(group, 0)
            await asyncio.sleep(self.random.choice([0.0, 0.1, 1.5]))
        self.over.add(track.name)
        end_track(track, GROUPS)

    async def follow(self, number: int) -> None:
        """SUBSCRIBE to one Track with its past, whenever it comes."""
        await asyncio.sleep(self.random.random() * 6)
        waits = 10_000
        with self.network.host(f"follower{number}"):
            async with connect(f"moqt://relay:{PORT}", reconnect=None) as session:
                asked = Parameters.of(
                    location_filter=LocationFilter.next_object(),
                    rendezvous_timeout=waits,
                    fill_parameters=Parameters.of(
                        location_filter=LocationFilter.absolute_start(0, 0)
                    ),
                )
                name = self.random.choice(NAMES)
                async with subscribe(session, name, parameters=asked) as track:
                    items = [item async for item in track]
        assert track.lost == 0
        check(items, EVERY)

    async def take_all(self, number: int) -> None:
        """Take what is offered from then on, some of it not to the end."""
        await asyncio.sleep(self.random.random() * 4)
        with self.network.host(f"taker{number}"):
            async with connect(f"moqt://relay:{PORT}", reconnect=None) as session:
                watch = session.tracks.watch(PREFIX)
                await watch.answered.wait()
                over = set(self.over)
                offers: set[FullTrackName] = set()
                async with asyncio.TaskGroup() as tasks:
                    try:
                        async with asyncio.timeout(60):
                            async for offered in watch:
                                assert offered.name not in offers
                                offers.add(offered.name)
                                leaves = self.random.random() < 0.3
                                tasks.create_task(self.take_one(offered, leaves))
                    except TimeoutError:
                        pass  # nothing more comes
                assert set(NAMES) - offers <= over

    async def take_one(self, offered: OfferedTrack, leaves: bool) -> None:
        after = offered.parameters.get(ParameterType.LARGEST_OBJECT)
        wanted = [at for at in EVERY if after is None or at > after]
        items: list[ReceivedObject] = []
        with take(offered) as track:
            async for item in track:
                items.append(item)
                if leaves and len(items) > 3:
                    return
        assert track.lost == 0
        check(items, wanted)


def check(items: list[ReceivedObject], wanted: list[Location]) -> None:
    """Each Object once, with its own octets."""
    objects = [item for item in items if item.payload]
    assert sorted(item.location for item in objects) == wanted
    assert all(item.payload == payload(item.location, OCTETS) for item in objects)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_pushed_tracks_reach_everybody_once(seed: int) -> None:
    async def main() -> None:
        await Story(seed).play()

    run(main())

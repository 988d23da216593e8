"""Groups in files: what leaves memory comes back, checked, also after a restart (MOQT §7.1)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvcs.errors import FileError
from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.properties import KeyValues, Property
from kvcs.relay import disk as rooms
from kvcs.relay.disk import KEY_FILE, SUFFIX, Disk
from kvcs.relay.settings import RelayLimits
from kvcs.relay.shelf import ShelvedGroup, ShelvedObject, ShelvedTrack
from kvcs.relay.stats import RelayStats
from kvcs.testing.actors import ConsumerPeer, PublisherPeer
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import end_track, payload, put_group

MIB = 2**20
GROUPS, OBJECTS, OCTETS = 12, 2, 32 * 1024
MEMORY = 256 * 1024
"""A third of the Track."""

WANTED = {Location(group, each) for group in range(GROUPS) for each in range(OBJECTS)}


class World:
    """A relay's core with a small cache and a folder."""

    def __init__(self, disk: Disk, hub: Hub) -> None:
        self.disk, self.hub = disk, hub
        self.stats = hub.core.stats

    async def read_whole(self) -> None:
        """A consumer that joins gets every octet."""
        consumer = ConsumerPeer(self.hub)
        asked = consumer.subscribe(run=False)
        self.hub.run()
        # Each Group that is read lets its reader ask for the next one.
        while (done := consumer.done(asked)) is None and self.hub.now < 5:
            await self.disk.settled()
            self.hub.advance(0.01)
        assert done is not None and done.status == PublishDoneCode.TRACK_ENDED
        got = consumer.contents(asked)
        assert set(got) == WANTED
        assert all(octets == payload(place, OCTETS) for place, octets in got.items())


@asynccontextmanager
async def relay(
    folder: Path, *, octets: int = 64 * MIB, clock: Callable[[], float] | None = None
) -> AsyncIterator[World]:
    hub = Hub(RelayLimits(cache_octets=MEMORY))
    stats = hub.core.stats
    disk = Disk(folder, octets, stats, clock or time.time, lambda: hub.now)
    await disk.open()
    hub.core.cache.shelf = disk
    try:
        yield World(disk, hub)
    finally:
        disk.draining()
        hub.core.cache.shelve()
        await disk.close()


def publish(world: World, duration_ms: int | None = None) -> PublisherPeer:
    """Publish the Track and let somebody read it, so that it crosses the relay."""
    properties = {} if duration_ms is None else {Property.MAX_CACHE_DURATION: duration_ms}
    publisher = PublisherPeer(world.hub)
    track = publisher.track(properties=KeyValues.of(properties))
    reader = ConsumerPeer(world.hub)
    reader.subscribe()
    for group in range(GROUPS):
        put_group(track, group, OBJECTS, octets=OCTETS)
        world.hub.run()
    end_track(track, GROUPS)
    world.hub.run()
    assert len(reader.locations()) == len(WANTED)
    reader.end.core.close()
    world.hub.run()
    world.hub.advance(0.5)
    return publisher


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


async def test_what_left_memory_is_served_from_files_and_not_from_upstream(tmp_path: Path) -> None:
    async with relay(tmp_path) as world:
        publisher = publish(world)
        await world.disk.settled()
        assert world.stats.disk_groups == world.stats.disk_written == len(files(tmp_path)) > 4
        asked = world.stats.upstream_fetches
        publisher.vanish()
        await world.read_whole()
        assert world.stats.upstream_fetches == asked
        assert world.stats.disk_hits >= world.stats.disk_groups - 2
        assert world.hub.core.cache.octets <= MEMORY


async def test_a_finished_track_is_served_after_a_restart_without_its_publisher(
    tmp_path: Path,
) -> None:
    async with relay(tmp_path) as world:
        publish(world)
    async with relay(tmp_path) as world:
        assert world.stats.disk_groups >= GROUPS
        assert len(world.hub.core.cache) == 0
        await world.read_whole()
        assert world.stats.upstream_fetches == world.stats.upstream_subscriptions == 0
        consumer = ConsumerPeer(world.hub)
        fetched = consumer.fetch(chosen=LocationFilter.absolute_range(3, 0, 3, 1))
        for _ in range(5):
            await world.disk.settled()
            world.hub.advance(0.01)
        assert consumer.locations(fetched) == [Location(3, 0), Location(3, 1)]


def flip_last(octets: bytearray) -> None:
    octets[-1] ^= 1


def flip_head(octets: bytearray) -> None:
    octets[rooms.PREFIX_OCTETS + 20] ^= 1


def cut(octets: bytearray) -> None:
    del octets[-7:]


@pytest.mark.parametrize("spoil", [flip_last, flip_head, cut])
async def test_a_file_that_was_changed_is_dropped_counted_and_asked_for_upstream(
    tmp_path: Path, spoil: Callable[[bytearray], None]
) -> None:
    async with relay(tmp_path) as world:
        publish(world)
        await world.disk.settled()
        for path in files(tmp_path):
            octets = bytearray(path.read_bytes())
            spoil(octets)
            path.write_bytes(octets)
        misses, groups = world.stats.misses, world.stats.disk_groups
        await world.read_whole()
        # Those that were in memory then may have left since, and come back.
        assert world.stats.disk_hits <= GROUPS + 1 - groups
        assert world.stats.disk_bad == groups
        assert world.stats.misses >= misses + groups
        assert world.stats.upstream_fetches > 0


async def test_files_of_another_key_and_rests_of_a_crash_are_swept(tmp_path: Path) -> None:
    async with relay(tmp_path) as world:
        publish(world)
    (tmp_path / "00001-1.part").write_bytes(b"half")
    (tmp_path / f"00001-2{SUFFIX}").write_bytes(b"")
    (tmp_path / KEY_FILE).write_bytes(bytes(32))
    async with relay(tmp_path) as world:
        assert world.stats.disk_groups == 0
        assert world.stats.disk_bad > GROUPS
        assert os.listdir(tmp_path) == [KEY_FILE]


async def test_a_full_disk_stops_the_writing_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async with relay(tmp_path) as world:
        monkeypatch.setattr(Path, "replace", full)
        publish(world)
        await world.disk.settled()
        assert world.stats.disk_errors >= 1
        assert world.stats.disk_groups == 0
        assert os.listdir(tmp_path) == [KEY_FILE]
        await world.read_whole()  # from upstream
        monkeypatch.undo()


async def test_the_files_take_no_more_than_they_may(tmp_path: Path) -> None:
    octets = 4 * (OBJECTS * OCTETS + rooms.FILE_OCTETS)
    async with relay(tmp_path, octets=octets) as world:
        publish(world)
        await world.disk.settled()
        assert 0 < world.stats.disk_octets <= octets
        assert sum(path.stat().st_size for path in files(tmp_path)) <= octets
        await world.read_whole()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= octets


async def test_files_last_as_long_as_their_track_allows(tmp_path: Path) -> None:
    wall = 1_000_000.0
    async with relay(tmp_path, clock=lambda: wall) as world:
        publish(world, duration_ms=3_600_000)
    assert files(tmp_path)
    wall += 3000
    async with relay(tmp_path, clock=lambda: wall) as world:
        assert world.stats.disk_groups >= GROUPS
    wall += 3_700
    async with relay(tmp_path, clock=lambda: wall) as world:
        assert world.stats.disk_groups == 0
        consumer = ConsumerPeer(world.hub)
        asked = consumer.subscribe()
        assert consumer.refused(asked) is not None
        await world.disk.settled()
    assert files(tmp_path) == []


async def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    hub = Hub()
    disk = Disk(tmp_path / "file", MIB, hub.core.stats)
    with pytest.raises(FileError, match="file"):
        await disk.open()
    await disk.close()


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be claimed there")
async def test_two_relays_do_not_share_a_folder(tmp_path: Path) -> None:
    async with relay(tmp_path):
        with pytest.raises(FileError, match="another relay keeps its cache there"):
            async with relay(tmp_path):
                pass
    async with relay(tmp_path):  # it is free again
        pass


async def test_a_folder_is_left_where_it_could_not_be_used(tmp_path: Path) -> None:
    planted = tmp_path / KEY_FILE
    planted.write_bytes(bytes(32))
    planted.chmod(0o644)
    with pytest.raises(FileError, match="0600"):
        async with relay(tmp_path):
            pass
    planted.unlink()
    async with relay(tmp_path):
        pass


async def test_the_key_is_its_owners_alone(tmp_path: Path) -> None:
    async with relay(tmp_path / "cache"):
        assert os.stat(tmp_path / "cache" / KEY_FILE).st_mode & 0o077 == 0


NAME = FullTrackName((b"a", b"b"), b"track")


def shelved(group_id: int, *, objects: int = 1, octets: int = 1000) -> ShelvedGroup:
    """A Group as the cache puts it on its shelf."""
    each = memoryview(bytes(octets))
    headers = [
        ObjectHeader(group_id, object_id, 0, 0, ObjectStatus.NORMAL, b"", octets)
        for object_id in range(objects)
    ]
    return ShelvedGroup(
        NAME,
        group_id,
        objects,
        ShelvedTrack(KeyValues.of({}), Location(group_id, objects - 1), None, False, ()),
        tuple(ShelvedObject(header, 0.0, (each,)) for header in headers),
    )


@asynccontextmanager
async def shelf(folder: Path, *, octets: int) -> AsyncIterator[tuple[Disk, RelayStats]]:
    stats = RelayStats()
    disk = Disk(folder, octets, stats)
    await disk.open()
    try:
        yield disk, stats
    finally:
        await disk.close()


async def test_what_is_forgotten_while_it_is_being_written_does_not_come_back(
    tmp_path: Path,
) -> None:
    async with shelf(tmp_path, octets=MIB) as (disk, stats):
        disk.put(shelved(0))
        disk.forget(NAME)
        disk.put(shelved(1))
        for _ in range(2):  # written, then removed
            await disk.settled()
        assert dict(disk.groups(NAME)) == {1: 1}
        assert stats.disk_groups == len(files(tmp_path)) == 1


async def test_what_is_being_written_is_not_written_twice(tmp_path: Path) -> None:
    async with shelf(tmp_path, octets=MIB) as (disk, stats):
        disk.put(shelved(0))
        disk.put(shelved(0))
        await disk.settled()
        assert (stats.disk_written, stats.disk_skipped, len(files(tmp_path))) == (1, 1, 1)


async def test_a_group_that_never_fits_takes_the_place_of_none(tmp_path: Path) -> None:
    async with shelf(tmp_path, octets=16 * 1024) as (disk, stats):
        disk.put(shelved(0))
        await disk.settled()
        disk.put(shelved(1, octets=20_000))
        await disk.settled()
        assert (stats.disk_groups, stats.disk_skipped) == (1, 1)


async def test_long_heads_count_too(tmp_path: Path) -> None:
    limit = 256 * 1024
    async with shelf(tmp_path, octets=limit) as (disk, stats):
        for group_id in range(3):
            disk.put(shelved(group_id, objects=1000, octets=1))
            await disk.settled()
        await disk.settled()
        assert sum(path.stat().st_size for path in files(tmp_path)) == stats.disk_octets <= limit
        used = stats.disk_octets
    async with shelf(tmp_path, octets=limit) as (_, stats):
        assert stats.disk_octets == used > 0


@pytest.mark.parametrize("how", ["readable", "a link"])
async def test_a_key_that_others_may_know_is_refused(tmp_path: Path, how: str) -> None:
    planted = tmp_path / KEY_FILE
    if how == "readable":
        planted.write_bytes(bytes(32))
        planted.chmod(0o644)
    else:
        (tmp_path / "theirs").write_bytes(bytes(32))
        (tmp_path / "theirs").chmod(0o600)
        planted.symlink_to("theirs")
    with pytest.raises(FileError):
        async with relay(tmp_path):
            pass


async def test_what_is_no_file_does_not_hold_up_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"pipe{SUFFIX}")
    (tmp_path / "folder.part").mkdir()
    async with relay(tmp_path) as world:
        assert world.stats.disk_groups == 0

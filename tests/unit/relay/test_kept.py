"""What lies whole in files is named to who may hear of it, after a restart too (MOQT §7.1)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvcs.moqt.errors import RequestCode
from kvcs.moqt.properties import KeyValues, Property
from kvcs.relay.disk import Disk
from kvcs.testing.actors import PUBLICATION, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import end_track, put_group
from kvcs.trust import CONSUMER
from tests.unit.relay import guarded
from tests.unit.relay.chains import A, named, subscribe_namespace, withdrawn
from tests.unit.relay.guarded import ELSEWHERE, Guarded

DATA, MANIFEST = b"k.raw.s0", b"manifest"
GROUPS, OBJECTS = 3, 2


@asynccontextmanager
async def keeping(
    folder: Path, hub: Hub | None = None, clock: Callable[[], float] = time.time
) -> AsyncIterator[Hub]:
    """A relay's core that has read a folder, and writes what it holds when it stops."""
    hub = Hub() if hub is None else hub
    disk = Disk(folder, 2**26, hub.core.stats, clock, lambda: hub.now)
    await disk.open()
    hub.core.cache.shelf = disk
    hub.core.shelf_opened(hub.now)
    try:
        yield hub
        await disk.settled()
    finally:
        disk.draining()
        hub.core.cache.shelve()
        await disk.close()


async def carry(
    folder: Path,
    *names: bytes,
    ends: bool = True,
    missing: int | None = None,
    duration_ms: int | None = None,
    clock: Callable[[], float] = time.time,
) -> None:
    """Let a relay carry Tracks of the publication, and stop it."""
    properties = {} if duration_ms is None else {Property.MAX_CACHE_DURATION: duration_ms}
    async with keeping(folder, clock=clock) as hub:
        publisher = PublisherPeer(hub)
        for name in names:
            track = publisher.track(full_name(name), KeyValues.of(properties))
            ConsumerPeer(hub).subscribe(full_name(name))
            for group in range(GROUPS):
                put_group(track, group, OBJECTS)
            if ends:
                end_track(track, GROUPS)
            hub.run()
            entry = hub.core.cache.get(full_name(name))
            assert entry is not None
            if missing is not None:
                entry.track.evict_group(missing)
        hub.advance(0.5)


async def test_a_whole_publication_is_named_until_something_of_it_is_gone(tmp_path: Path) -> None:
    await carry(tmp_path, DATA, MANIFEST)
    async with keeping(tmp_path) as hub:
        consumer = ConsumerPeer(hub)
        subscribe_namespace(consumer)
        assert named(consumer) == [PUBLICATION[2:]]
        hub.core.cache.forget(full_name(DATA))
        hub.run()
        hub.core.receive_timer(hub.now)
        hub.run()
        assert withdrawn(consumer) == [PUBLICATION[2:]]
        late = ConsumerPeer(hub)
        subscribe_namespace(late)
        assert named(late) == []


@pytest.mark.parametrize(
    ("names", "ends", "missing"),
    [((DATA,), True, None), ((DATA, MANIFEST), False, None), ((DATA, MANIFEST), True, 1)],
    ids=["no manifest", "not ended", "a Group lacks"],
)
async def test_what_is_not_whole_is_not_named(
    tmp_path: Path, names: tuple[bytes, ...], ends: bool, missing: int | None
) -> None:
    await carry(tmp_path, *names, ends=ends, missing=missing)
    async with keeping(tmp_path) as hub:
        assert hub.core.snapshot().disk_groups
        consumer = ConsumerPeer(hub)
        subscribe_namespace(consumer)
        assert named(consumer) == []


async def test_it_is_named_for_its_cache_duration(tmp_path: Path) -> None:
    wall = 1_000_000.0
    await carry(tmp_path, DATA, MANIFEST, duration_ms=60_000, clock=lambda: wall)
    hub = Hub()
    async with keeping(tmp_path, hub, lambda: wall + 30 + hub.now):
        consumer = ConsumerPeer(hub)
        subscribe_namespace(consumer)
        hub.advance(25.0)
        assert named(consumer) == [PUBLICATION[2:]] and not withdrawn(consumer)
        hub.advance(6.0)
        assert withdrawn(consumer) == [PUBLICATION[2:]]
    async with keeping(tmp_path, clock=lambda: wall + 61) as hub:
        consumer = ConsumerPeer(hub)
        subscribe_namespace(consumer)
        assert named(consumer) == []


async def test_a_clock_that_is_put_back_lets_it_be_named_for_longer(tmp_path: Path) -> None:
    wall = 1_000_000.0
    await carry(tmp_path, DATA, MANIFEST, duration_ms=60_000, clock=lambda: wall)
    hub = Hub()
    back = 0.0
    async with keeping(tmp_path, hub, lambda: wall + 30 + hub.now - back):
        consumer = ConsumerPeer(hub)
        subscribe_namespace(consumer)
        hub.advance(5.0)
        back = 20.0
        hub.advance(30.0)
        assert named(consumer) == [PUBLICATION[2:]] and not withdrawn(consumer)
        hub.advance(20.0)
        assert withdrawn(consumer) == [PUBLICATION[2:]]


async def test_a_producer_that_is_back_and_goes_changes_nothing(tmp_path: Path) -> None:
    await carry(tmp_path, DATA, MANIFEST)
    async with keeping(tmp_path) as hub:
        consumer = ConsumerPeer(hub)
        subscribe_namespace(consumer)
        producer = PublisherPeer(hub)
        producer.withdraw()
        assert named(consumer) == [PUBLICATION[2:]] and not withdrawn(consumer)


async def test_only_who_may_hear_of_the_scope_is_told(tmp_path: Path) -> None:
    await carry(tmp_path, DATA, MANIFEST)
    async with keeping(tmp_path, Guarded()) as hub:
        member = guarded.consumer(hub, guarded.token(CONSUMER))
        subscribe_namespace(member)
        assert named(member) == [PUBLICATION[2:]]
        stranger = guarded.consumer(hub)
        asked = subscribe_namespace(stranger)
        assert stranger.refused(asked) == RequestCode.UNAUTHORIZED
        other = guarded.consumer(
            hub, guarded.token(CONSUMER, guarded.OTHER, scope_id=guarded.OTHER_ID)
        )
        subscribe_namespace(other, ELSEWHERE[:2])
        for peer in (stranger, other):
            assert named(peer) == []


async def test_a_relay_below_hears_of_it_too(tmp_path: Path) -> None:
    await carry(tmp_path, DATA, MANIFEST)
    async with keeping(tmp_path, Hub(relay_id=A)) as upper:
        lower = Hub(relay_id=b"B" * 16)
        lower.link(upper)
        consumer = ConsumerPeer(lower)
        subscribe_namespace(consumer)
        assert named(consumer) == [PUBLICATION[2:]]

"""Many tiny publications through a relay with a small cache: nothing of them stays for ever.

The kind of fault: bookkeeping that the cache's limit does not count, some kilobytes a Group.
"""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path

import pytest

from kvcs.moqt.names import FullTrackName, TrackNamespace
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import ConsumerPeer, PublisherPeer
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import end_track, put_group

MIB = 2**20
LAYERS = 2
TRACKS = (b"k.raw.s0", b"v.raw.s0", b"manifest.json")
BATCH = 20
"""Publications of one session: sessions come and go too."""

GROWTH_OCTETS = 64
"""What one publication may leave behind on average; measured, some kilobytes is the fault."""


PAGES_OCTETS = 3 * MIB
"""By what the memory of a process differs from one moment to the next, whatever it does."""

FEW = 1000
"""Publications, up to which memory is traced octet by octet."""

STATM = Path("/proc/self/statm")


def traced() -> int:
    """Octets that Python objects take, of those made since tracing began."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def resident() -> int:
    """Memory of this process."""
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def publish_and_read(hub: Hub, first: int, *, read: bool, cache: int) -> None:
    """Publish a batch, read it, and leave."""
    publisher = PublisherPeer(hub, namespace=None)
    consumer = ConsumerPeer(hub)
    for number in range(first, first + BATCH):
        namespace: TrackNamespace = (b"kvcs", b"scope", b"anchor", b"%d" % number)
        publisher.announce(namespace)
        for name in TRACKS:
            full = FullTrackName(namespace, name)
            track = publisher.track(full)
            for layer in range(LAYERS):
                put_group(track, layer, 1, octets=64)
            end_track(track, LAYERS)
            if read:
                consumer.subscribe(full)
        assert hub.core.cache.octets <= cache
    if read:
        expected = BATCH * len(TRACKS) * LAYERS
        assert len(consumer.locations()) == expected
        assert hub.core.snapshot().groups > 0
    publisher.leave()
    consumer.end.core.close()
    hub.run()
    hub.advance(hub.core.limits.upstream_linger + 1)
    while hub.core.next_report() is not None:
        pass
    hub.spokes.clear()  # the peers' own memory is not what is measured


@pytest.mark.skipif(not STATM.exists(), reason="reads the memory of the process from /proc")
@pytest.mark.parametrize("read", [False, True], ids=["no-subscriber", "one-subscriber"])
@pytest.mark.parametrize(
    ("warm", "total", "cache"),
    [(40, 100, MIB // 4), pytest.param(2000, 20_000, MIB, marks=pytest.mark.slow)],
    ids=["quick", "full"],
)
@pytest.mark.timeout(900)
def test_what_is_held_does_not_grow(warm: int, total: int, cache: int, *, read: bool) -> None:
    if read and total > FEW:
        total //= 4  # they take twenty times as long
    hub = Hub(RelayLimits(cache_octets=cache))
    # Tracing is exact and slow: many publications show in the memory of the process too.
    held = resident if total > FEW else traced
    if held is traced:
        tracemalloc.start()
    try:
        for first in range(0, warm, BATCH):
            publish_and_read(hub, first, read=read, cache=cache)
        filled = hub.core.snapshot()
        tracks, groups, evicted = filled.tracks, filled.groups, filled.groups_evicted
        before = held()
        for first in range(warm, total, BATCH):
            publish_and_read(hub, first, read=read, cache=cache)
        grown = held() - before
    finally:
        tracemalloc.stop()
    # With a subscriber the cache was full at both times; without one nothing was in it.
    assert (groups > 0, evicted > 0) == (read, read)
    assert grown <= GROWTH_OCTETS * (total - warm) + (0 if held is traced else PAGES_OCTETS)
    after = hub.core.snapshot()
    assert (after.sessions, after.namespaces) == (0, 0)
    assert after.tracks <= 2 * tracks + 8
    assert after.groups <= 2 * groups + 8
    assert after.cache_octets <= cache


def test_gauges_of_tracks_and_groups_fall() -> None:
    hub = Hub()
    publish_and_read(hub, 0, read=True, cache=hub.core.limits.cache_octets)
    full = hub.core.snapshot()
    assert full.tracks == BATCH * len(TRACKS)
    groups = full.groups
    for name in [name for name in hub.core.cache._entries]:
        hub.core.cache.drop(name)
    empty = hub.core.snapshot()
    assert groups > 0
    assert (empty.tracks, empty.groups, empty.cache_octets) == (0, 0, 0)

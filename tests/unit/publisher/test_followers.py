"""A publication that ends waits for requests that are on their way, and not for others."""

from __future__ import annotations

import asyncio

from kvcs.moqt.names import FullTrackName
from kvcs.moqt.track.store import Track
from kvcs.publisher import followers
from kvcs.publisher.followers import Followers
from kvcs.testing.network import run


class Reader:
    """Follows a Track, as a subscription does."""

    def __init__(self, track: Track) -> None:
        track.listeners.append(self)  # type: ignore[arg-type]
        assert track.on_followed is not None
        track.on_followed()


def tracks() -> tuple[Followers, Track, Track, Track]:
    manifest, k, v = (
        Track(FullTrackName((b"ns",), name), authoritative=True)
        for name in (b"manifest", b"k", b"v")
    )
    found = Followers(manifest, 2)
    for track in (k, v):
        found.watch(track)
    return found, manifest, k, v


def test_nobody_is_waited_for_where_nobody_reads() -> None:
    async def body() -> float:
        found, *_ = tracks()
        began = asyncio.get_running_loop().time()
        await found.requests_under_way(5.0)
        return asyncio.get_running_loop().time() - began

    assert run(body()) == 0


def test_who_has_the_manifest_is_waited_for_until_it_has_asked() -> None:
    async def body() -> float:
        found, manifest, k, v = tracks()
        loop = asyncio.get_running_loop()
        began = loop.time()
        Reader(manifest)
        loop.call_later(0.25, Reader, k)
        loop.call_later(0.5, Reader, v)
        await found.requests_under_way(5.0)
        return loop.time() - began

    assert run(body()) == 0.5


def test_who_asks_for_the_manifest_alone_costs_the_grace_and_no_more() -> None:
    async def body(seconds: float) -> float:
        found, manifest, *_ = tracks()
        began = asyncio.get_running_loop().time()
        Reader(manifest)
        await found.requests_under_way(seconds)
        return asyncio.get_running_loop().time() - began

    assert run(body(5.0)) == followers.GRACE_SECONDS
    assert run(body(0.25)) == 0.25


def test_whoever_has_left_the_manifest_is_not_waited_for() -> None:
    async def body() -> float:
        found, manifest, *_ = tracks()
        began = asyncio.get_running_loop().time()
        manifest.leave(Reader(manifest))  # type: ignore[arg-type]
        await found.requests_under_way(5.0)
        return asyncio.get_running_loop().time() - began

    assert run(body()) == 0

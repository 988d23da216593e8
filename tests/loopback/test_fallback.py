"""What a retrieval does where no session brings what lacks: HTTP, then the caller's own engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

import kvcs
from kvcs.errors import CacheIncomplete, PublicationNotFound, UsageError
from kvcs.fallback import HttpServer, HttpSource
from kvcs.kv import RAW, BlockLayout, register
from kvcs.kv.tracks import PublicationNamespace
from kvcs.quic.connection import Connection
from kvcs.subscriber.last_means import MissingLayer
from tests.builders import BRIEF, QUICK, Toy, put, same, tensors, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.http_fixtures import save, shelf
from tests.loopback.kv_fixtures import joined, serving
from tests.loopback.raw_publication import V0, RawPublication

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Engine:
    """Recomputes from what the toy has, and notes what it was asked for."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self.asked: list[tuple[int, int, int]] = []

    async def __call__(self, missing: MissingLayer) -> tuple[object, object]:
        self.asked.append((missing.layer, missing.first_token, missing.last_token))
        k, v = tensors(self.toy, missing.layer)
        part = slice(missing.first_token, missing.last_token + 1)
        return k[part], v[part]


def spoil(root: Path, file: str, place: int) -> None:
    """Change one octet of a saved publication."""
    [path] = root.glob(f"*/*/*/*/{file}")
    octets = bytearray(path.read_bytes())
    octets[place] ^= 1
    path.write_bytes(octets)


async def all_of(cache: kvcs.Cache, toy: Toy, layers: range = range(4)) -> None:
    """Every layer comes, with the producer's bits."""
    got = [layer async for layer in cache]
    assert [layer.index for layer in got] == list(layers)
    assert all(same(layer, toy) for layer in got)


# Without any session


@pytest.mark.parametrize(
    "selection", [{}, {"layers": (1, 2)}, {"layers": (3, 3), "blocks": 2}, {"retrieve": "fetch"}]
)
async def test_a_publication_comes_over_http_alone(
    tmp_path: Path, selection: dict[str, Any]
) -> None:
    async with shelf(tmp_path) as it:
        subscriber = kvcs.Subscriber(fallback=HttpSource(it.server.url), settings=QUICK)
        async with subscriber.open(it.prefix, **selection) as cache:
            got = [layer async for layer in cache]
            first, last = selection.get("layers", (0, 3))
            assert [layer.index for layer in got] == list(range(first, last + 1))
            blocks = selection.get("blocks")
            assert all(same(layer, it.toy, blocks) for layer in got)
            report = cache.report
            assert report.fetched_over_http == 2 * (blocks or 3) * (last - first + 1)
            assert (report.refetches, report.recomputed) == (0, 0)
            assert PublicationNamespace.parse(cache.namespace) == it.namespace


async def test_a_named_publication_and_a_shorter_one(tmp_path: Path) -> None:
    async with shelf(tmp_path) as it:
        subscriber = kvcs.Subscriber(fallback=HttpSource(it.server.url), settings=QUICK)
        async with subscriber.open(it.prefix, publication=it.namespace) as cache:
            await all_of(cache, it.toy)
        longer = toy_prefix(6, descriptor=it.toy.descriptor)
        async with subscriber.open(longer, anchors=[3]) as cache:
            await all_of(cache, it.toy)
            assert cache.blocks == 3


class Rough:
    """Says that it loses bits."""

    name, number, lossless, in_place, error_bound = "rough", 0xFF21, False, False, 0.1

    def data_octets(self, layout: BlockLayout) -> int | None:
        return layout.octets

    def encode(self, sections: Sequence[Any], layout: BlockLayout) -> Any:
        return RAW.encode(sections, layout)

    def decode(self, data: memoryview, layout: BlockLayout) -> Any:
        return RAW.decode(data, layout)


async def test_the_publication_is_taken_whose_encoding_may_be(
    tmp_path: Path, own_codecs: None
) -> None:
    register(Rough())
    async with shelf(tmp_path) as it:
        rough = await save(tmp_path, it.toy, encodings=("rough",))
        subscriber = kvcs.Subscriber(fallback=HttpSource(it.server.url), settings=QUICK)
        async with subscriber.open(it.prefix) as cache:
            assert PublicationNamespace.parse(cache.namespace) == it.namespace
        async with subscriber.open(it.prefix, codecs=("rough",), lossy=True) as cache:
            assert PublicationNamespace.parse(cache.namespace) == rough
            await all_of(cache, it.toy)


async def test_nothing_there_is_absent_and_no_server_is_unknown(tmp_path: Path) -> None:
    async with HttpServer(tmp_path, port=0, authority=None) as server:
        subscriber = kvcs.Subscriber(fallback=HttpSource(server.url), settings=QUICK)
        with pytest.raises(PublicationNotFound) as caught:
            async with subscriber.open(toy_prefix()):
                pass
        assert caught.value.absent
    with pytest.raises(PublicationNotFound) as caught:
        async with subscriber.open(toy_prefix()):
            pass
    assert not caught.value.absent


class Silent(HttpSource):
    """A source that never comes to an end."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.asked = asyncio.Event()
        self.left = False

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.left = True
        await super().__aexit__(kind, error, trace)

    async def publications(self, *_: bytes) -> list[PublicationNamespace]:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


async def test_a_source_that_never_answers_is_waited_for_until_the_deadline() -> None:
    source = Silent()
    subscriber = kvcs.Subscriber(fallback=source, settings=QUICK)
    async with asyncio.timeout(30):
        with pytest.raises(PublicationNotFound, match="has not answered in time") as caught:
            async with subscriber.open(toy_prefix(), deadline=0.2):
                raise AssertionError("it was opened")
    assert not caught.value.absent
    assert source.left


async def test_a_source_that_never_ends_does_not_hold_up_what_a_session_finds(
    files: PemFiles,
) -> None:
    toy, source = toy_publication(), Silent()
    settings = replace(QUICK, least_recovery=0.01, recompute_per_1k_tokens=1e-6)
    async with asyncio.timeout(60), serving(files) as server, joined(server, files) as session:
        subscriber = kvcs.Subscriber(session, fallback=source, settings=settings)

        async def consume() -> int:
            async with subscriber.open(toy_prefix()) as cache:
                return cache.blocks

        async with asyncio.TaskGroup() as group:
            consumer = group.create_task(consume())
            await source.asked.wait()
            async with kvcs.Publisher(server).publish(toy_prefix()) as publication:
                await put(await publication.segment(), toy)
                assert await consumer == 3


def test_a_subscriber_needs_a_place_to_look() -> None:
    with pytest.raises(UsageError, match="fallback"):
        kvcs.Subscriber()


@pytest.mark.slow
async def test_octets_that_changed_on_the_shelf_are_never_released(tmp_path: Path) -> None:
    async with shelf(tmp_path) as it:
        spoil(tmp_path, "v.raw.s0/2", -1)
        # All else has to come in the time that recovery has.
        settings = replace(QUICK, least_recovery=4.0)
        subscriber = kvcs.Subscriber(fallback=HttpSource(it.server.url), settings=settings)
        async with subscriber.open(it.prefix) as cache:
            with pytest.raises(CacheIncomplete) as caught:
                await cache.complete()
            [missing] = caught.value.missing
            assert (missing.component, missing.layer, missing.first_block) == ("v", 2, 2)
            assert caught.value.usable_tokens == 8
            assert cache.report.rejected["digest"] >= 1


# Where sessions fail


@asynccontextmanager
async def published(
    files: PemFiles, root: Path, raw: RawPublication
) -> AsyncIterator[tuple[Connection, HttpServer]]:
    """A faulty server of a publication, and a good shelf of the same one."""
    async with (
        raw.serve(files) as server,
        joined(server, files) as client,
        HttpServer(root, port=0, authority=None) as http,
    ):
        yield client, http


async def faulty(root: Path, toy: Toy) -> RawPublication:
    """A publication of which a shelf has everything."""
    namespace = await save(root, toy)
    return RawPublication(toy, publication_id=namespace.publication_id)


async def test_what_a_relay_lacks_comes_over_http(tmp_path: Path, files: PemFiles) -> None:
    toy = toy_publication()
    raw = await faulty(tmp_path, toy)
    async with published(files, tmp_path, raw) as (client, http):
        raw.manifest()
        for layer in range(4):
            gone = {(V0, 1): None} if layer == 2 else {}
            raw.layer(layer, live=gone, stored=gone)
        raw.end()
        subscriber = kvcs.Subscriber(client, fallback=HttpSource(http.url), settings=QUICK)
        async with subscriber.open(toy_prefix()) as cache:
            await all_of(cache, toy)
            assert cache.report.fetched_over_http == 1
            assert cache.report.refetches >= 1  # the session was asked first


async def test_a_session_that_dies_is_followed_by_http(tmp_path: Path, files: PemFiles) -> None:
    toy = toy_publication()
    raw = await faulty(tmp_path, toy)
    async with published(files, tmp_path, raw) as (client, http):
        raw.manifest(layers=1)
        raw.layer(0)
        subscriber = kvcs.Subscriber(client, fallback=HttpSource(http.url), settings=QUICK)
        async with subscriber.open(toy_prefix()) as cache:
            await cache.layer(0)
            await client.close()
            await all_of(cache, toy)
            assert cache.report.fetched_over_http >= 18
            assert cache.manifest.complete  # its newest version came over HTTP, too


@pytest.mark.slow
async def test_a_session_that_knows_of_nothing_gives_way(tmp_path: Path, files: PemFiles) -> None:
    async with shelf(tmp_path) as it, serving(files) as server, joined(server, files) as client:
        source = HttpSource(it.server.url)
        # Half of the time for recovery is a session's that may come back.
        settings = replace(QUICK, least_recovery=5.0)
        subscriber = kvcs.Subscriber(client, fallback=source, settings=settings)
        async with subscriber.open(it.prefix, wait=0.4) as cache:
            await all_of(cache, it.toy)
            assert cache.report.fetched_over_http == 24


class Late:
    """A source that has what another one has, once a test lets it answer."""

    def __init__(self, inner: HttpSource) -> None:
        self.inner = inner
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def __aenter__(self) -> Late:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.inner.__aexit__(*error)

    async def publications(self, *where: bytes) -> Any:
        self.asked.set()
        await self.go_on.wait()
        return await self.inner.publications(*where)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Together(Late):
    """A source whose layers are given once so many are asked for side by side."""

    def __init__(self, inner: HttpSource, count: int) -> None:
        super().__init__(inner)
        self.count = count
        self.asked_for = 0

    async def payloads(self, *what: Any) -> AsyncIterator[Any]:
        self.asked_for += 1
        if self.asked_for == self.count:
            self.go_on.set()
        await self.go_on.wait()
        async for stored in self.inner.payloads(*what):
            yield stored

    async def publications(self, *where: bytes) -> Any:
        return await self.inner.publications(*where)


async def test_layers_are_asked_for_side_by_side(tmp_path: Path) -> None:
    async with shelf(tmp_path) as it:
        # Eight layers of tracks at a time: all of the toy's; one by one would never end.
        source = Together(HttpSource(it.server.url), 8)
        subscriber = kvcs.Subscriber(
            fallback=source,  # type: ignore[arg-type]
            settings=QUICK,
        )
        async with subscriber.open(it.prefix) as cache:
            await all_of(cache, it.toy)
        assert source.asked_for == 8


async def test_a_session_that_dies_while_the_source_is_asked_does_not_count(
    tmp_path: Path, files: PemFiles
) -> None:
    async with shelf(tmp_path) as it, serving(files) as server, joined(server, files) as client:
        source = Late(HttpSource(it.server.url))
        subscriber = kvcs.Subscriber(
            client,
            fallback=source,  # type: ignore[arg-type]
            settings=replace(QUICK, listen=20.0),  # it looks on while the source is asked
        )

        async def end_the_session() -> None:
            await source.asked.wait()
            await client.close()
            source.go_on.set()

        ending = asyncio.create_task(end_the_session())
        async with subscriber.open(it.prefix, wait=0.1) as cache:
            await all_of(cache, it.toy)
        await ending


async def test_sessions_come_first(tmp_path: Path, files: PemFiles) -> None:
    toy = toy_publication()
    async with (
        serving(files) as server,
        kvcs.Publisher(server).publish(toy_prefix()) as publication,
        HttpServer(tmp_path, port=0, authority=None) as http,
    ):
        await put(await publication.segment(), toy)
        await publication.save(tmp_path)
        async with joined(server, files) as client:
            subscriber = kvcs.Subscriber(client, fallback=HttpSource(http.url), settings=QUICK)
            async with subscriber.open(toy_prefix()) as cache:
                await all_of(cache, toy)
        assert http.requests == 0


# Protected and signed


async def test_what_is_sealed_and_signed_is_opened_and_verified(tmp_path: Path) -> None:
    toy, scope_id = toy_publication(), toy_prefix().scope_id
    ring = kvcs.ProtectionRing(scope_id=scope_id)
    key = ring.rotate()
    signer = kvcs.SigningKey.generate(name="producer", scope_id=scope_id)
    async with shelf(tmp_path, toy=toy, protect=key, sign=signer) as it:
        source = HttpSource(it.server.url)
        subscriber = kvcs.Subscriber(
            fallback=source,
            settings=QUICK,
            keys=kvcs.KeyRing([signer.public]),
            require_signed=True,
            protection=ring,
        )
        async with subscriber.open(it.prefix) as cache:
            await all_of(cache, toy)
            assert cache.report.signed_by == signer.public.kid
        other = kvcs.ProtectionRing(scope_id=scope_id)
        other.rotate()
        # A ring with another key under the same Key ID opens nothing, and shows no more than that.
        for wrong, error in ((None, kvcs.NotProtected), (other, PublicationNotFound)):
            stranger = kvcs.Subscriber(
                fallback=source,
                settings=QUICK,
                keys=kvcs.KeyRing([signer.public]),
                protection=wrong,
            )
            with pytest.raises(error):
                async with stranger.open(it.prefix):
                    raise AssertionError("it was opened")


class Foreign:
    """A caller's own source that raises what no source should, wherever it says."""

    def __init__(self, inner: HttpSource, *where: str) -> None:
        self.inner, self.where = inner, where

    def _check(self, here: str) -> None:
        if here in self.where:
            raise ValueError("a foreign error")

    async def __aenter__(self) -> Foreign:
        self._check("enter")
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.inner.__aexit__(*error)
        self._check("exit")

    async def publications(self, *of: bytes) -> list[kvcs.PublicationNamespace]:
        self._check("publications")
        return await self.inner.publications(*of)

    async def manifest(self, *of: Any) -> Any:
        self._check("manifest")
        return await self.inner.manifest(*of)

    async def payloads(self, *of: Any) -> AsyncIterator[Any]:
        self._check("payloads")
        async for stored in self.inner.payloads(*of):
            yield stored


@pytest.mark.parametrize("where", ["enter", "publications", "manifest"])
async def test_a_source_that_raises_anything_only_has_no_publication(
    tmp_path: Path, where: str
) -> None:
    async with shelf(tmp_path) as it:
        subscriber = kvcs.Subscriber(fallback=Foreign(HttpSource(it.server.url), where))  # type: ignore[arg-type]
        with pytest.raises(kvcs.PublicationNotFound, match="ValueError"):
            async with subscriber.open(it.prefix):
                raise AssertionError("it has none")


async def test_a_source_that_raises_anything_only_has_no_blocks(tmp_path: Path) -> None:
    async with shelf(tmp_path) as it:
        source = Foreign(HttpSource(it.server.url), "payloads", "exit")
        subscriber = kvcs.Subscriber(fallback=source, settings=BRIEF)  # type: ignore[arg-type]
        async with subscriber.open(it.prefix) as cache:
            with pytest.raises(kvcs.CacheIncomplete, match="ValueError"):
                await cache.complete()
            assert cache.missing

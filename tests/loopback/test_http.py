"""Saved publications over HTTP: what is served, to whom, and what a client does not take."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import aiohttp
import pytest
from aiohttp import web

from kvcs.errors import FileError, UsageError
from kvcs.fallback import HttpServer, HttpSource, SourceFailed, reading, server
from kvcs.fallback.folder import folder_of
from kvcs.kv import Component, DataTrack
from kvcs.kv.tracks import PublicationNamespace
from kvcs.moqt.names import Location
from kvcs.trust import CONSUMER, Authority, KeyUse, SigningKey, scope_rule
from tests.builders import toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.http_fixtures import Shelf, save, shelf
from tests.unit.trust.makers import ring, token, verifier

K0 = DataTrack(Component.K, "raw", 0)
LIMIT = 1 << 20


async def blocks_of(source: HttpSource, it: Shelf, layer: int, *wanted: int) -> dict[int, bytes]:
    keys = [it.prefix.block_keys[block] for block in wanted]
    return {
        stored.block: bytes(stored.payload)
        async for stored in source.payloads(it.namespace, K0, layer, wanted, keys, LIMIT)
    }


async def test_what_was_published_comes_back(tmp_path: Path) -> None:
    async with shelf(tmp_path) as it, HttpSource(it.server.url) as source:
        scope, compat, anchor, _ = it.namespace
        assert await source.publications(scope, compat, anchor) == [it.namespace]
        manifest = await source.manifest(it.namespace, LIMIT)
        assert manifest.name == b"manifest"
        assert b'"complete":true' in manifest.payload
        for layer in range(4):
            got = await blocks_of(source, it, layer, 0, 1, 2)
            assert got == {block: it.toy.objects[K0, Location(layer, block)] for block in range(3)}


async def test_adjacent_blocks_are_one_request(tmp_path: Path) -> None:
    async with shelf(tmp_path) as it, HttpSource(it.server.url) as source:
        await blocks_of(source, it, 0, 0)
        before = it.server.requests
        await blocks_of(source, it, 1, 0, 1, 2)
        assert it.server.requests == before + 1
        assert set(await blocks_of(source, it, 1, 0, 2)) == {0, 2}
        assert it.server.requests == before + 3


async def test_new_publications_appear_by_themselves(tmp_path: Path) -> None:
    async with shelf(tmp_path) as it, HttpSource(it.server.url) as source:
        other = await save(tmp_path, it.toy)
        found = await source.publications(*it.namespace[:3])
        assert set(found) == {it.namespace, other}


async def test_what_is_not_there_is_left_out_or_told(tmp_path: Path) -> None:
    async with shelf(tmp_path) as it, HttpSource(it.server.url) as source:
        assert await blocks_of(source, it, 9, 0) == {}
        nowhere = it.namespace._replace(publication_id=bytes(16))
        assert await source.publications(bytes(16), bytes(32), bytes(32)) == []
        with pytest.raises(SourceFailed) as caught:
            await source.manifest(nowhere, LIMIT)
        assert caught.value.status == 404


@asynccontextmanager
async def asking(it: Shelf) -> AsyncIterator[Callable[..., Awaitable[tuple[int, bytes]]]]:
    """Plain requests below the publication's path."""
    async with aiohttp.ClientSession() as session:

        async def ask(where: str, **headers: str) -> tuple[int, bytes]:
            path = "/".join(field.hex() for field in it.namespace)
            url = f"{it.server.url}/kvcs-1/{path}/{where}"
            async with session.get(url, headers=headers) as response:
                return response.status, await response.read()

        yield ask


async def test_one_block_is_asked_for_by_its_key(tmp_path: Path) -> None:
    async with shelf(tmp_path) as it, asking(it) as ask:
        key = it.prefix.block_keys[1].hex()
        assert await ask(f"{key}/2/k.raw") == (200, it.toy.objects[K0, Location(2, 1)])
        whole = b"".join(it.toy.objects[K0, Location(2, block)] for block in range(3))
        assert await ask("k.raw.s0/2") == (200, whole)
        assert await ask("k.raw.s0/2", Range="bytes=10-19") == (206, whole[10:20])


@pytest.mark.parametrize(
    "where",
    [
        "",
        "manifest.cose",
        "manifest/",
        "k.raw.s0",
        "k.raw.s0/4",
        "k.raw.s0/00",
        "k.raw.s0/-1",
        "k.raw.s1/0",
        "K.raw.s0/0",
        "kv.raw.s0/0",
        "..%2fpublication.json",
        "%2e%2e/x",
        "k.raw.s0/..%2f..%2fpublication.json",
        f"{bytes(32).hex()}/0/k.raw",
        "zz/0/k.raw",
    ],
)
async def test_other_paths_are_not_found(tmp_path: Path, where: str) -> None:
    async with shelf(tmp_path) as it, asking(it) as ask:
        assert (await ask(where))[0] == 404


async def test_a_range_beyond_the_end_is_refused(tmp_path: Path) -> None:
    async with shelf(tmp_path) as it, asking(it) as ask:
        assert (await ask("k.raw.s0/0", Range="bytes=100000-100001"))[0] == 416


# Disks that are slow, and files that are not what their index says


@contextlib.contextmanager
def held(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, wanted: str
) -> Iterator[tuple[asyncio.Event, threading.Event]]:
    """A disk that does not answer reads of one path: an event for their begin, one that ends it."""
    read = getattr(module, name)
    loop, begun, released = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def slow(path: Path, *arguments: object) -> object:
        if wanted in "/".join(map(str, (path, *arguments))):
            loop.call_soon_threadsafe(begun.set)
            assert released.wait(60), "nobody else was served meanwhile"
        return read(path, *arguments)

    monkeypatch.setattr(module, name, slow)
    try:
        yield begun, released
    finally:
        released.set()


@pytest.mark.parametrize(
    ("module", "name", "wanted"),
    [
        (reading, "size_of", "k.raw.s0/0"),
        (reading, "read_part", "k.raw.s0/0"),
        (server, "read_changed", "/"),
        (server, "publications", "/"),
    ],
)
async def test_a_disk_that_does_not_answer_stops_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, wanted: str
) -> None:
    async with shelf(tmp_path) as it, asking(it) as ask:
        payloads = [
            b"".join(it.toy.objects[K0, Location(layer, block)] for block in range(3))
            for layer in range(2)
        ]
        where = "../" if name == "publications" else "k.raw.s0/0"
        with held(monkeypatch, module, name, wanted) as (begun, released):
            slow = asyncio.create_task(ask(where))
            await begun.wait()
            if name == "read_changed":  # every file is looked up in the index first
                assert (await ask("../"))[0] == 200
            else:
                assert await ask("k.raw.s0/1") == (200, payloads[1])
            assert not slow.done()
            released.set()
            status, body = await slow
        assert status == 200
        if name != "publications":
            assert body == payloads[0]


async def test_reads_at_a_time_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "READERS", 1)
    async with shelf(tmp_path) as it, asking(it) as ask:
        with held(monkeypatch, reading, "read_part", "k.raw.s0/0") as (begun, released):
            first = asyncio.create_task(ask("k.raw.s0/0"))
            await begun.wait()
            second = asyncio.create_task(ask("k.raw.s0/1"))
            async with aiohttp.ClientSession() as session:
                async with session.post(it.server.url) as response:
                    assert response.status == 405
            assert not first.done() and not second.done()
            released.set()
            assert [(await each)[0] for each in (first, second)] == [200, 200]


async def test_a_file_goes_out_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE", 7)
    read: list[int] = []
    plain = reading.read_part

    def counted(path: Path, start: int, octets: int) -> bytes:
        read.append(octets)
        return plain(path, start, octets)

    monkeypatch.setattr(reading, "read_part", counted)
    async with shelf(tmp_path) as it, asking(it) as ask:
        whole = b"".join(it.toy.objects[K0, Location(2, block)] for block in range(3))
        assert await ask("k.raw.s0/2") == (200, whole)
        assert max(read) == 7 and sum(read) == len(whole)
        for asked, expected in (
            ("bytes=0-0", whole[:1]),
            ("bytes=5-23", whole[5:24]),
            ("bytes=30-", whole[30:]),
            ("bytes=-9", whole[-9:]),
            (f"bytes=3-{1 << 40}", whole[3:]),
        ):
            assert await ask("k.raw.s0/2", Range=asked) == (206, expected)
        for asked in ("bytes=9-3", "bytes=a-b", f"bytes={len(whole)}-", "lines=1-2"):
            assert await ask("k.raw.s0/2", Range=asked) == (416, b"")
        url = f"{it.server.url}/kvcs-1/{'/'.join(field.hex() for field in it.namespace)}"
        async with aiohttp.ClientSession() as session, session.head(f"{url}/k.raw.s0/2") as answer:
            assert (answer.status, answer.headers["Content-Length"]) == (200, str(len(whole)))
            assert await answer.read() == b""
        async with aiohttp.ClientSession() as session, session.get(f"{url}/k.raw.s0/2") as answer:
            assert answer.content_type == "application/octet-stream"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/publication.json") as answer:
                assert answer.content_type == "application/json"


async def test_a_file_that_ends_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shelf(tmp_path) as it, asking(it) as ask:
        path = folder_of(tmp_path, it.namespace) / "k.raw.s0/2"
        octets = path.read_bytes()
        path.write_bytes(octets[:-1])
        key = it.prefix.block_keys
        assert (await ask(f"{key[2].hex()}/2/k.raw"))[0] == 404
        assert (await ask(f"{key[0].hex()}/2/k.raw"))[0] == 200
        # Cut off while it goes out.
        path.write_bytes(octets)
        monkeypatch.setattr(reading, "PIECE", 8)
        plain = reading.read_part

        def cut(path: Path, start: int, octets: int) -> bytes:
            if start:
                path.write_bytes(b"")
            return plain(path, start, octets)

        monkeypatch.setattr(reading, "read_part", cut)
        with pytest.raises(aiohttp.ClientError):
            await ask("k.raw.s0/2")
        path.unlink()
        assert (await ask("k.raw.s0/2"))[0] == 404


# Who gets it


OURS, OTHER = toy_prefix().scope_id, b"o" * 16
ISSUERS = {
    scope: SigningKey.generate(use=KeyUse.TOKEN, name=f"issuer {number}", scope_id=scope)
    for number, scope in enumerate((OURS, OTHER))
}


def bearer(scope: bytes) -> bytes:
    """A token for consumers of a scope, valid now."""
    rules = [scope_rule(scope, CONSUMER)]
    return token(ISSUERS[scope], rules=rules, issued_at=int(time.time()))


async def statuses(it: Shelf, value: bytes | None) -> set[int | None]:
    """Statuses of a list, of a manifest that is there, and of one that is not."""
    found: set[int | None] = set()
    async with HttpSource(it.server.url, token=value) as source:
        nowhere = it.namespace._replace(publication_id=bytes(16))
        for ask in (
            lambda: source.publications(*it.namespace[:3]),
            lambda: source.manifest(it.namespace, LIMIT),
            lambda: source.manifest(nowhere, LIMIT),
        ):
            try:
                await ask()
                found.add(None)
            except SourceFailed as exc:
                found.add(exc.status)
    return found


async def test_tokens_of_the_scope_open_it_and_others_see_nothing(tmp_path: Path) -> None:
    authority = Authority(verifier(ring(*ISSUERS.values())))
    async with shelf(tmp_path, authority=authority) as it:
        good = bearer(OURS)
        assert await statuses(it, good) == {None, 404}
        assert await statuses(it, bearer(OTHER)) == {403}
        assert await statuses(it, None) == {401}
        forged = good[:-1] + bytes([good[-1] ^ 1])
        assert await statuses(it, forged) == {401}


# What a client does not take


@asynccontextmanager
async def answering(
    answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    """A server that gives one answer to everything."""
    runner = web.ServerRunner(web.Server(answer), handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (lambda: web.Response(status=302, headers={"Location": "/elsewhere"}), "302"),
        (lambda: web.Response(status=500), "500"),
        (lambda: web.Response(body=bytes(1 << 18)), "limit"),
        (lambda: web.Response(body=b"[1"), "malformed"),
        (lambda: web.Response(body=b'["00"]'), "malformed"),
        (lambda: web.Response(body=b'{"a":1}'), "malformed"),
        (lambda: web.Response(body=b"[]", headers={"Content-Encoding": "br"}), "encoded"),
    ],
)
async def test_answers_that_are_not_taken(response: Callable[[], web.Response], why: str) -> None:
    asked = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        asked.append(request.path)
        return response()

    async with answering(answer) as url, HttpSource(url) as source:
        with pytest.raises(SourceFailed, match=why):
            await source.publications(bytes(16), bytes(32), bytes(32))
    assert len(asked) == 1  # redirects are not followed


async def test_a_server_that_is_silent_is_not_waited_for_for_ever() -> None:
    done = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await done.wait()
        return web.Response()

    async with answering(answer) as url, HttpSource(url, timeout=0.1) as source:
        with pytest.raises(SourceFailed, match="cannot be read"):
            await source.publications(bytes(16), bytes(32), bytes(32))
        done.set()


def test_a_connection_of_the_last_moment_is_closed_as_well(tmp_path: Path) -> None:
    """Wherever between its arrival and its first request the server stops."""

    async def connect_and_stop(client: socket.socket, turns: int) -> None:
        async with HttpServer(tmp_path, port=0, authority=None) as server:
            client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
            for _ in range(turns):
                await asyncio.sleep(0)

    for turns in range(8):
        with warnings.catch_warnings(record=True) as said, socket.socket() as client:
            warnings.simplefilter("always")
            asyncio.run(connect_and_stop(client, turns))
            gc.collect()
        assert not said, turns


async def test_a_server_that_is_not_there_is_told() -> None:
    async with HttpSource("http://127.0.0.1:9") as source:
        with pytest.raises(SourceFailed, match="cannot be read"):
            await source.publications(bytes(16), bytes(32), bytes(32))


async def test_tls_is_verified(tmp_path: Path, files: PemFiles) -> None:
    namespace = await save(tmp_path, toy_publication())
    server = HttpServer(tmp_path, port=0, cert=files.cert, key=files.key, authority=None)
    async with server:
        assert server.url.startswith("https://")
        async with HttpSource(server.url, ca=files.ca) as source:
            assert await source.publications(*namespace[:3]) == [namespace]
        async with HttpSource(server.url) as source:
            with pytest.raises(SourceFailed, match=r"[Cc]ertificate"):
                await source.publications(*namespace[:3])


def test_what_is_refused_before_anything_is_asked(tmp_path: Path, files: PemFiles) -> None:
    for url in ("http://cache.example", "moqt://127.0.0.1", "https://", "https://a/?b", "nothing"):
        with pytest.raises(UsageError):
            HttpSource(url)
    with pytest.raises(UsageError, match="certificate"):
        HttpServer(tmp_path, host="0.0.0.0", authority=None)
    with pytest.raises(UsageError, match="key"):
        HttpServer(tmp_path, cert=files.cert, authority=None)


async def test_a_source_is_entered_first_and_a_folder_is_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="enter"):
        await HttpSource("http://127.0.0.1:9").manifest(
            PublicationNamespace(bytes(16), bytes(32), bytes(32), bytes(16)), LIMIT
        )
    with pytest.raises(FileError, match="no folder"):
        async with HttpServer(tmp_path / "nowhere", port=0, authority=None):
            pass


async def test_connections_that_ask_nothing_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    async with asyncio.timeout(30), shelf(tmp_path) as it:
        port = int(it.server.url.rpartition(":")[2])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        with contextlib.suppress(ConnectionError):
            assert await held[2][0].read() == b""
        for _, writer in held[:2]:
            writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        for reader, writer in held:
            if writer is not held[2][1]:
                assert (await reader.readline()).startswith(b"HTTP/1.1 404")
            writer.close()


async def test_a_connection_without_a_whole_request_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.05)
    async with asyncio.timeout(30), shelf(tmp_path) as it:
        port = int(it.server.url.rpartition(":")[2])
        for begun in (b"", b"GET / HTTP/1.1\r\nHost:"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(begun)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()

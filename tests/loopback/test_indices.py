"""A longer publication is found through an index in a file or at a server, and confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

import kvcs
from kvcs.errors import PublicationNotFound
from kvcs.fallback.source import SourceFailed
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import joined, serving

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@asynccontextmanager
async def web_server(answers: dict[str, web.Response]) -> AsyncIterator[tuple[str, list[str]]]:
    """A server on this machine; its URL, and what it was asked for."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.headers.get("Authorization") != "Bearer AAAA":
            return web.Response(status=401)
        return answers.get(request.path, web.Response(status=404))

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}", asked
    finally:
        await runner.cleanup()


async def test_a_longer_publication_is_found_by_either(tmp_path: Path, files: PemFiles) -> None:
    toy, ours = toy_publication((6,)), toy_prefix(3)
    theirs = toy_prefix(6, descriptor=toy.descriptor)
    async with (
        serving(files) as server,
        joined(server, files) as session,
        kvcs.Publisher(server).publish(theirs) as publication,
    ):
        await put(await publication.segment(), toy)
        document = kvcs.index_json([(publication.uri(server.url), theirs)])
        (tmp_path / "index.json").write_bytes(document)
        path = f"/{ours.scope_id.hex()}/{ours.compat_id.hex()}/{ours.block_keys[-1].hex()}.json"
        async with web_server({path: web.Response(body=document)}) as (url, asked):
            template = url + "/{scope}/{compat}/{anchor}.json"
            for index in (kvcs.FileIndex(tmp_path), kvcs.HttpIndex(template, token="AAAA")):
                subscriber = kvcs.Subscriber(session, settings=QUICK, index=index)
                async with subscriber.open(ours) as cache:
                    got = [layer async for layer in cache]
                    assert len(got) == 4 and all(same(layer, toy, 3) for layer in got)
                    assert not cache.report.believed
            assert asked == [path]
        # Without the index nobody can know of it.
        with pytest.raises(PublicationNotFound) as caught:
            async with kvcs.Subscriber(session, settings=QUICK).open(ours, wait=0):
                pass
        assert caught.value.absent


@pytest.mark.parametrize("token", ["AAAA", "BBBB"])
async def test_an_index_that_fails_is_unknown_not_absent(files: PemFiles, token: str) -> None:
    answers = {"/bad": web.Response(body=b"[]"), "/moved": web.Response(status=302)}
    async with (
        web_server(answers) as (url, _),
        serving(files) as server,
        joined(server, files) as session,
    ):
        for where in ("/bad", "/moved", "/none"):
            index = kvcs.HttpIndex(url + where, token=token)
            wrong = kvcs.UsageError if (where, token) == ("/bad", "AAAA") else SourceFailed
            with pytest.raises(wrong):
                await index.find(toy_prefix())
            subscriber = kvcs.Subscriber(session, settings=QUICK, index=index)
            with pytest.raises(PublicationNotFound, match="the index failed") as caught:
                async with subscriber.open(toy_prefix(), wait=0):
                    pass
            assert not caught.value.absent


async def test_an_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def drips(index: kvcs.HttpIndex, url: str, limit: int) -> bytes:
        return bytes(await asyncio.get_running_loop().create_future())

    monkeypatch.setattr(kvcs.HttpIndex, "small", drips)
    monkeypatch.setattr("kvcs.subscriber.indices.MAX_ANSWER_SECONDS", 0.05)
    async with asyncio.timeout(20):
        with pytest.raises(SourceFailed, match=r"no answer in 0\.05 s"):
            await kvcs.HttpIndex("http://127.0.0.1:1/index").find(toy_prefix())

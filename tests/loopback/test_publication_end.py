"""How a publication ends, and what can be read of it without its tensors."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import kvcs
from kvcs.kv import KVCS_SCHEME, parse_holder_uri
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from tests.certificates import PemFiles

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

HOST = "127.0.0.1"
DESCRIPTOR = kvcs.Descriptor(
    model="tiny",
    weights=kvcs.UNPINNED,
    layers=3,
    kv_heads=1,
    head_dim=4,
    dtype="float16",
    block_tokens=4,
)
PREFIX = kvcs.Prefix(kvcs.Scope(key=bytes(32)), DESCRIPTOR, range(10))


class ShutDown(Exception):
    """What a service around the producer fails with."""


async def put(segment: kvcs.Segment, layers: range) -> None:
    for layer in layers:
        k = np.full((segment.tokens, 1, 4), layer, np.float16)
        await segment.put(layer, k, -k)


@pytest.mark.parametrize("error", [ShutDown, asyncio.CancelledError])
async def test_a_complete_publication_is_not_aborted_by_what_fails_around_it(
    files: PemFiles, error: type[BaseException]
) -> None:
    async with (
        kvcs.Relay(
            kvcs.RelaySettings(cert=files.cert, key=files.key, port=0, allow_anyone=True)
        ) as relay,
        kvcs.connect(relay.url, ca=files.ca) as consumer,
    ):
        with pytest.raises(error):
            async with (
                kvcs.connect(relay.url, ca=files.ca) as producer,
                kvcs.Publisher(producer).publish(PREFIX) as publication,
            ):
                await put(await publication.segment(), range(3))
                async with kvcs.Subscriber(consumer).open(PREFIX) as cache:
                    await cache.complete()
                raise error
        assert publication.aborted is None
        # The relay has kept it, since nobody told it that the cache is worthless.
        uri = publication.uri(relay.url)
        async with kvcs.Subscriber(consumer).open(PREFIX, publication=uri) as cache:
            layers = [layer async for layer in cache]
        assert [float(layer.k[0, 0, 0]) for layer in layers] == [0.0, 1.0, 2.0]


async def test_an_incomplete_publication_is_aborted(files: PemFiles) -> None:
    async with (
        kvcs.serve(HOST, 0, cert=files.cert, key=files.key) as server,
        kvcs.connect(server.url, ca=files.ca) as consumer,
    ):
        leave = asyncio.Event()

        async def produce() -> None:
            async with kvcs.Publisher(server).publish(PREFIX) as publication:
                await put(await publication.segment(), range(2))
                await leave.wait()
                raise ShutDown

        async with asyncio.TaskGroup() as tasks:
            producing = tasks.create_task(_outcome(produce()))
            async with kvcs.Subscriber(consumer).open(PREFIX) as cache:
                assert [(await cache.layer(0)).index, (await cache.layer(1)).index] == [0, 1]
                leave.set()
                with pytest.raises(kvcs.PublicationAborted, match="ShutDown"):
                    await cache.layer(2)
                missing = cache.missing
                assert {
                    (run.component, run.layer, run.first_token, run.last_token) for run in missing
                } == {("k", 2, 0, 7), ("v", 2, 0, 7)}
        assert producing.result() is ShutDown


async def _outcome(body: object) -> type[BaseException] | None:
    try:
        await body  # type: ignore[misc]
    except Exception as exc:
        return type(exc)
    return None


async def test_a_manifest_is_read_without_a_prefix_and_held_to_one(files: PemFiles) -> None:
    other = kvcs.Prefix(PREFIX.scope, DESCRIPTOR, range(1, 11))
    async with (
        kvcs.serve(HOST, 0, cert=files.cert, key=files.key) as server,
        kvcs.connect(server.url, ca=files.ca) as session,
        kvcs.Publisher(server).publish(PREFIX) as publication,
    ):
        segment = await publication.segment()
        await put(segment, range(2))
        subscriber = kvcs.Subscriber(session)
        uri = publication.uri(server.url)
        _, namespace = parse_holder_uri(uri)
        for prefix in (None, PREFIX):
            manifest = await subscriber.manifest(uri, prefix)
            assert (manifest.layers, manifest.blocks, manifest.complete) == (3, 2, False)
            assert manifest.segments[0].layers_listed() == 2
            assert KVCS_SCHEME.compat_id(manifest.compat) == namespace.compat_id
        with pytest.raises(kvcs.PublicationError, match="block_keys_sha256"):
            await subscriber.manifest(namespace, other)
        with pytest.raises(kvcs.UsageError, match="deadline"):
            await subscriber.manifest(namespace, deadline=0.0)
        gone = namespace._replace(publication_id=bytes(16))
        with pytest.raises(kvcs.RequestError) as caught:
            await subscriber.manifest(gone)
        assert caught.value.code == RequestCode.DOES_NOT_EXIST
        await put(segment, range(2, 3))


async def test_a_session_tells_of_goaway_once(files: PemFiles) -> None:
    async with (
        kvcs.serve(HOST, 0, cert=files.cert, key=files.key) as server,
        kvcs.connect(server.url, ca=files.ca, reconnect=None) as session,
    ):
        told = asyncio.Queue[str]()
        session.on_goaway(lambda: told.put_nowait("goaway"))
        [peer] = server.connections
        peer.goaway(timeout=30.0)
        async with asyncio.timeout(20.0):
            assert await told.get() == "goaway"
        session.on_goaway(lambda: told.put_nowait("late"))
        assert told.get_nowait() == "late"
        assert not session.is_usable
        assert session.is_open


async def test_a_peer_that_does_not_answer_an_announcement_is_told_of(files: PemFiles) -> None:
    def mute(connection: kvcs.Connection, event: object) -> bool:
        return isinstance(event, events.PublishNamespaceReceived)

    async with (
        kvcs.serve(HOST, 0, cert=files.cert, key=files.key) as server,
        kvcs.connect(server.url, ca=files.ca) as session,
    ):
        [peer] = server.connections
        peer.answer_with(mute)
        settings = kvcs.PublisherSettings(answer=0.1)
        publishing = kvcs.Publisher(session, settings=settings).publish(PREFIX)
        with pytest.raises(kvcs.RequestError, match=r"no answer to the announcement") as caught:
            await publishing.__aenter__()
        assert caught.value.code == RequestCode.TIMEOUT
        assert session.is_open
    with pytest.raises(kvcs.UsageError, match="answer"):
        kvcs.PublisherSettings(answer=0.0)

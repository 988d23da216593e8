"""Another draft-22 stack, Rust underneath: moq-rs reads our publisher, and ours reads its own.

Its Python names are text, while namespaces of KVCS are octets: here a Scheme makes identifiers of
letters, one field a part of its paths. What it cannot do, and so is not here: read through our
relay, since it asks for every namespace there is and a relay of ours names none beyond a scope;
FILL_PARAMETERS, which its server passes over; a FETCH of several Groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

import kvcs
from kvcs.kv.identity import KvcsScheme
from kvcs.moqt.names import Location
from tests.builders import put, same, toy_publication
from tests.certificates import PemFiles, make_ca, make_certificate, write_pem

moq = pytest.importorskip("moq", reason="moq-rs has no wheel for this machine")

LETTERS = b"abcdefghijklmnop"
TRACKS = ("manifest", "k.raw.s0", "v.raw.s0")
DEADLINE_SECONDS = 90.0
PATIENT = kvcs.SubscriberSettings(least_recovery=DEADLINE_SECONDS)
"""Its Groups come one FETCH after the other, however slow the machine is."""
SETTINGS = kvcs.PublisherSettings(random_octets=lambda count: b"p" * count)
TOY = toy_publication()


class Readable(KvcsScheme):
    """Identifiers of letters, so that a namespace is also a path of text."""

    name = "letters"

    def compat_id(self, compat: Mapping[str, Any]) -> bytes:
        return letters(super().compat_id(compat))

    def scope_id(self, scope: kvcs.Scope) -> bytes:
        return letters(super().scope_id(scope))

    def block_keys(self, *of: Any) -> Sequence[bytes]:
        return [letters(key) for key in super().block_keys(*of)]


def letters(octets: bytes) -> bytes:
    return bytes(LETTERS[octet & 15] for octet in octets)


PREFIX = kvcs.Prefix(
    kvcs.Scope(key=bytes(32)), TOY.descriptor, list(range(TOY.k.shape[1])), scheme=Readable()
)
PATH = "/".join(field.decode() for field in PREFIX.namespace(b"p" * 16))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> PemFiles:
    authority = make_ca()
    certificate = make_certificate(authority, ("127.0.0.1",))
    return write_pem(tmp_path_factory.mktemp("moq-rs"), authority, certificate)


def their_client(url: str, files: PemFiles) -> Any:
    return moq.Client(
        url,
        tls_roots=[str(files.ca)],
        tls_system_roots=False,
        websocket_enabled=False,
        reconnect=False,
    )


class Theirs:
    """A publication of their publisher with the octets of one of ours."""

    def __init__(self, manifest: bytes, objects: Mapping[tuple[str, int, int], bytes]) -> None:
        self.manifest = manifest
        self.objects = objects

    def publish(self, origin: Any) -> Any:
        """Publish it; whole, before anybody asks."""
        broadcast = origin.create_broadcast(PATH)
        tracks = {name: broadcast.publish_track(name) for name in TRACKS}
        group = tracks["manifest"].append_group()
        group.write_frame(self.manifest)
        group.finish()
        for layer in range(TOY.descriptor.layers):
            for name in TRACKS[1:]:
                group = tracks[name].append_group()
                for block in range(PREFIX.blocks):
                    group.write_frame(self.objects[name, layer, block])
                group.finish()
        broadcast.announce()
        return broadcast, tracks


@asynccontextmanager
async def ours(files: PemFiles) -> AsyncIterator[tuple[kvcs.Server, kvcs.Publication]]:
    """A publisher of ours that listens."""
    async with (
        kvcs.serve("127.0.0.1", 0, cert=files.cert, key=files.key) as server,
        kvcs.Publisher(server, settings=SETTINGS).publish(PREFIX) as publication,
    ):
        yield server, publication


@pytest.fixture(scope="module")
def theirs(files: PemFiles) -> Theirs:
    async def make() -> Theirs:
        async with ours(files) as (_, publication):
            segment = await publication.segment()
            await put(segment, TOY)
            objects = {}
            for track in segment.tracks:
                for layer in range(TOY.descriptor.layers):
                    for block in range(PREFIX.blocks):
                        stored = track.get(Location(layer, block))
                        assert stored is not None
                        place = (track.name.name.decode(), layer, block)
                        objects[place] = b"".join(stored.views(0, stored.received))
            return Theirs(b"".join(publication.writer.parts()), objects)

    return asyncio.run(make())


async def test_their_reader_has_every_object_of_our_live_publication(
    files: PemFiles, theirs: Theirs
) -> None:
    seen: dict[tuple[str, int, int], bytes] = {}
    more = asyncio.Event()
    async with asyncio.timeout(DEADLINE_SECONDS), ours(files) as (server, publication):
        async with their_client(server.url, files) as client:
            broadcast = await client.announced_broadcast(PATH)
            tracks = {name: await broadcast.subscribe_track(name) for name in TRACKS}

            async def read(name: str) -> None:
                async for group in tracks[name]:
                    block = 0
                    async for frame in group:
                        seen[name, group.sequence, block] = frame.payload
                        block += 1
                        more.set()

            readers = [asyncio.ensure_future(read(name)) for name in TRACKS[1:]]
            segment = await publication.segment()
            for layer in range(TOY.descriptor.layers):
                await put(segment, TOY, [layer])
                wanted = {(name, layer, PREFIX.blocks - 1) for name in TRACKS[1:]}
                while not wanted <= seen.keys():
                    more.clear()
                    await more.wait()
            await asyncio.gather(*readers)
    assert seen == theirs.objects


async def test_their_reader_fetches_layers_of_a_complete_publication(
    files: PemFiles, theirs: Theirs
) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS), ours(files) as (server, publication):
        await put(await publication.segment(), TOY)
        async with their_client(server.url, files) as client:
            broadcast = await client.announced_broadcast(PATH)
            for name in TRACKS[1:]:
                for layer in range(TOY.descriptor.layers):
                    group = await broadcast.fetch_group(name, layer)
                    frames = [frame.payload async for frame in group]
                    wanted = [theirs.objects[name, layer, block] for block in range(PREFIX.blocks)]
                    assert frames == wanted


async def accept(server: Any, sessions: list[Any]) -> None:
    """Take sessions, and hold them: they end when they are forgotten."""
    async for request in server:
        sessions.append(await request.accept())


async def test_ours_reads_their_publisher_group_by_group(files: PemFiles, theirs: Theirs) -> None:
    sessions: list[Any] = []
    async with (
        asyncio.timeout(DEADLINE_SECONDS),
        moq.Server("127.0.0.1:0", tls_cert=[str(files.cert)], tls_key=[str(files.key)]) as server,
    ):
        held = theirs.publish(server)
        accepting = asyncio.ensure_future(accept(server, sessions))
        async with kvcs.connect(f"moqt://{server.local_addr}", ca=files.ca) as session:
            async with kvcs.Subscriber(session, settings=PATIENT).open(PREFIX) as cache:
                assert all([same(layer, TOY) async for layer in cache])
                assert cache.report.objects == len(theirs.objects)
        accepting.cancel()
        del held


async def test_ours_reads_their_publisher_through_our_relay(
    files: PemFiles, theirs: Theirs
) -> None:
    settings = kvcs.RelaySettings(cert=files.cert, key=files.key, port=0, allow_anyone=True)
    async with asyncio.timeout(DEADLINE_SECONDS), kvcs.Relay(settings) as relay:
        async with their_client(relay.url, files) as client:
            held = theirs.publish(client)
            async with kvcs.connect(relay.url, ca=files.ca) as session:
                async with kvcs.Subscriber(session, settings=PATIENT).open(PREFIX) as cache:
                    assert all([same(layer, TOY) async for layer in cache])
            del held

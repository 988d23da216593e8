"""Protected publications: what a publisher seals, and what it does when that fails."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import kvcs
from kvcs.errors import StoreFull, UsageError
from kvcs.kv import (
    MANIFEST,
    MANIFEST_COSE,
    RAW,
    BlockLayout,
    SignedManifests,
    parse_manifest,
    register,
)
from kvcs.kv.opening import Opener as KeyOpener
from kvcs.kv.protection import (
    ProtectionKey,
    immutable_properties,
    object_properties,
    sealed_octets,
)
from kvcs.kv.protection_keys import ProtectionRing
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName
from kvcs.moqt.parameters import Parameters
from kvcs.publisher import manifest_track, sealing
from kvcs.publisher import payloads as payloads_of_layers
from kvcs.quic.endpoint import Server
from kvcs.trust import KeyRing, SigningKey
from tests.builders import put, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import SESSION, Read, Tape, joined, serving, subscribe

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

TOY = toy_publication()
PREFIX = toy_prefix()
LAYERS = TOY.descriptor.layers
OLD, KEY = ProtectionKey(2**32 + 1, b"\x01" * 32), ProtectionKey(2**32 + 2, b"\x02" * 32)
RING = ProtectionRing([OLD, KEY], scope_id=PREFIX.scope_id)
SIGNER = SigningKey.generate(scope_id=PREFIX.scope_id)
FILLED = Parameters.of(
    location_filter=LocationFilter.next_object(),
    fill_parameters=Parameters.of(location_filter=LocationFilter.absolute_start(0, 0)),
)


async def taken(client: Any, publication: kvcs.Publication, name: bytes, count: int) -> list[Read]:
    """Objects with a payload, in order."""
    tape, _ = await subscribe(client, publication.namespace, name, FILLED)
    await tape.until(lambda: len(payloads(tape)) >= count)
    return payloads(tape)


def payloads(tape: Tape) -> list[Read]:
    whole = [read for read in tape.objects if read.whole and not read.is_status]
    return sorted(whole, key=lambda read: read.header.location)


def opened(publication: kvcs.Publication, name: bytes, read: Read) -> bytes:
    """An Object of the new key, opened."""
    header = read.header
    assert header.properties == object_properties(KEY.key_id)
    assert header.publisher_priority is not None
    opener = KeyOpener({KEY.key_id: KEY}, FullTrackName(publication.namespace, name))
    immutable = immutable_properties(KEY.key_id)
    payload = bytes(read.payload)
    return bytes(opener.open(header.location, header.publisher_priority, immutable, payload))


@pytest.mark.parametrize("processors", [None, 1, 4])
@pytest.mark.parametrize("lend", [False, True])
async def test_every_object_with_a_payload_is_sealed(
    files: PemFiles, monkeypatch: pytest.MonkeyPatch, processors: int | None, lend: bool
) -> None:
    if processors is not None:  # else layers are small: at once
        monkeypatch.setattr(payloads_of_layers, "THREAD_OCTETS", 0)
        monkeypatch.setattr(payloads_of_layers, "PROCESSORS", processors)
        monkeypatch.setattr(sealing, "STEP_OCTETS", 1)
        monkeypatch.setattr(manifest_track, "THREAD_OCTETS", 0)
    async with serving(files) as server, joined(server, files) as client:
        publisher = kvcs.Publisher(server)
        async with publisher.publish(PREFIX, protect=RING) as publication:
            part = await publication.segment()
            k, v = np.array(TOY.k), np.array(TOY.v)
            for layer in range(LAYERS):
                await part.put(layer, k[layer], v[layer], lend=lend)
                k[layer], v[layer] = 0, 0  # lent or not: what is sealed was copied
            for track in TOY.segments[0]:
                reads = await taken(client, publication, track.name, LAYERS * part.blocks)
                assert [opened(publication, track.name, read) for read in reads] == [
                    TOY.objects[track, read.header.location] for read in reads
                ]
                assert len(reads) == LAYERS * part.blocks
            # Versions are sealed behind the layers: the last one is waited for.
            tape, _ = await subscribe(client, publication.namespace, MANIFEST, FILLED)
            await tape.until(
                lambda: any(
                    parse_manifest(opened(publication, MANIFEST, read)).complete
                    for read in payloads(tape)
                )
            )
            octets = {len(bytes(read.payload)) for read in reads}
            size = {len(payload) for payload in TOY.objects.values()}
            assert octets == {sealed_octets(octet) for octet in size}
            # The store has what is sealed, and nothing besides.
            sealed = part.octets
            assert sealed <= publication.held_octets <= sealed + 2000 * part.objects
        assert publisher.held_octets == 0


async def test_a_codec_of_ones_own_works_off_the_event_loop_there_too(
    files: PemFiles, monkeypatch: pytest.MonkeyPatch, own_codecs: None
) -> None:
    monkeypatch.setattr(payloads_of_layers, "THREAD_OCTETS", 0)
    monkeypatch.setattr(payloads_of_layers, "PROCESSORS", 1)
    threads: set[int] = set()

    class Copy:
        """Data is the sections, which it does not promise."""

        name, number, lossless, in_place = "copy", 0xFF03, True, False

        def data_octets(self, layout: BlockLayout) -> int | None:
            return None

        def encode(self, sections: Any, layout: BlockLayout) -> Any:
            threads.add(threading.get_ident())
            return RAW.encode(sections, layout)

        def decode(self, data: memoryview, layout: BlockLayout) -> Any:
            return RAW.decode(data, layout)

    register(Copy())
    async with (
        serving(files) as server,
        kvcs.Publisher(server).publish(PREFIX, protect=KEY, encodings=("copy",)) as publication,
    ):
        await put(await publication.segment(), TOY)
    assert threads and threading.get_ident() not in threads


async def test_signed_versions_are_sealed(files: PemFiles) -> None:
    async with serving(files) as server, joined(server, files) as client:
        publisher = kvcs.Publisher(server)
        async with publisher.publish(PREFIX, sign=SIGNER, protect=KEY) as publication:
            await put(await publication.segment(), TOY)
            judge = SignedManifests(
                kvcs.PublicationNamespace.parse(publication.namespace), KeyRing([SIGNER.public])
            )

            def complete(read: Read) -> bool:
                octets = opened(publication, MANIFEST_COSE, read)
                signed = judge.verify(octets, read.header.group_id, 0.0, max_octets=len(octets))
                return parse_manifest(signed.payload).complete

            # Versions are signed and sealed behind the layers: the last one is waited for.
            tape, _ = await subscribe(client, publication.namespace, MANIFEST_COSE, FILLED)
            await tape.until(lambda: any(complete(read) for read in payloads(tape)))


async def test_what_is_sealed_may_lie_in_the_spill_folder(files: PemFiles, tmp_path: Any) -> None:
    settings = kvcs.PublisherSettings(store_octets=40_000, spill=tmp_path)
    async with serving(files) as server, joined(server, files) as client:
        publisher = kvcs.Publisher(server, settings=settings)
        async with publisher.publish(PREFIX, protect=KEY) as publication:
            part = await publication.segment()
            await put(part, TOY)
            track = TOY.segments[0][0]
            reads = await taken(client, publication, track.name, LAYERS * part.blocks)
            assert [opened(publication, track.name, read) for read in reads] == [
                TOY.objects[track, read.header.location] for read in reads
            ]


async def test_a_layer_that_never_was_sealed_may_be_put_again(files: PemFiles) -> None:
    settings = kvcs.PublisherSettings(store_octets=1)
    async with serving(files) as server:
        with pytest.raises(StoreFull):
            async with kvcs.Publisher(server, settings=settings).publish(
                PREFIX, protect=KEY
            ) as publication:
                part = await publication.segment()
                with pytest.raises(UsageError, match="shape"):
                    await part.put(0, TOY.k[0][1:], TOY.v[0])
                assert publication.is_open
                try:
                    await part.put(0, TOY.k[0], TOY.v[0])
                finally:
                    assert publication.is_open


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_nothing_is_sealed_twice(
    files: PemFiles, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(payloads_of_layers, "THREAD_OCTETS", 0)
    monkeypatch.setattr(payloads_of_layers, "PROCESSORS", 4)
    begun, go_on = asyncio.Event(), asyncio.Event()
    threads: list[Any] = []

    async def in_thread(work: Any, *arguments: Any) -> Any:
        threads.append(asyncio.get_running_loop().run_in_executor(None, work, *arguments))
        begun.set()
        await go_on.wait()
        await asyncio.wait(threads)
        raise OSError("the disk is gone")

    monkeypatch.setattr(payloads_of_layers.asyncio, "to_thread", in_thread)
    async with serving(files) as server:
        with pytest.raises(UsageError, match="start a new publication"):
            async with kvcs.Publisher(server).publish(PREFIX, protect=KEY) as publication:
                part = await publication.segment()
                putting = asyncio.create_task(part.put(0, TOY.k[0], TOY.v[0]))
                await begun.wait()
                if how == "cancelled":
                    putting.cancel()
                go_on.set()
                with pytest.raises(asyncio.CancelledError if how == "cancelled" else OSError):
                    await putting
                await asyncio.wait(threads)
                assert publication.aborted is not None
                assert not publication.is_open
                await part.put(0, TOY.k[0], TOY.v[0])


async def test_nothing_is_sealed_twice_where_it_is_sealed_on_the_event_loop(
    files: PemFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads_of_layers, "THREAD_OCTETS", 0)
    monkeypatch.setattr(payloads_of_layers, "PROCESSORS", 1)
    monkeypatch.setattr(sealing, "STEP_OCTETS", 1)
    async with serving(files) as server:
        with pytest.raises(UsageError, match="start a new publication"):
            async with kvcs.Publisher(server).publish(PREFIX, protect=KEY) as publication:
                part = await publication.segment()
                putting = asyncio.create_task(part.put(0, TOY.k[0], TOY.v[0]))
                await asyncio.sleep(0)  # it lets what was put before be handed over
                await asyncio.sleep(0)  # it has sealed one block, and it is our turn
                putting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await putting
                assert publication.aborted is not None
                await part.put(0, TOY.k[0], TOY.v[0])


async def test_keys_of_another_scope_seal_nothing(files: PemFiles) -> None:
    async with serving(files) as server:
        publisher = kvcs.Publisher(server)
        for ring, why in (
            (ProtectionRing([KEY], scope_id=b"t" * 16), "another scope"),
            (ProtectionRing(), "no key of the ring may seal"),
        ):
            with pytest.raises(UsageError, match=why):
                async with publisher.publish(PREFIX, protect=ring):
                    pytest.fail("it was published")
        assert publisher.publications == ()


async def test_relays_that_are_not_trusted_get_nothing_unprotected(files: PemFiles) -> None:
    async with kvcs.serve(
        "127.0.0.1", 0, cert=files.cert, key=files.key, relays="untrusted"
    ) as server:
        publisher = kvcs.Publisher(server)
        with pytest.raises(UsageError, match=r"protect=.*kvcs keygen --protection"):
            async with publisher.publish(PREFIX):
                pytest.fail("it was published")
        async with publisher.publish(PREFIX, protect=KEY) as publication:
            await put(await publication.segment(), TOY)
        async with kvcs.connect(server.url, ca=files.ca, relays="untrusted") as session:
            assert session.relays == "untrusted"
            with pytest.raises(UsageError, match="protect="):
                async with kvcs.Publisher(session).publish(PREFIX):
                    pytest.fail("it was published")
        with pytest.raises(UsageError, match='"trusted" or "untrusted"'):
            async with kvcs.connect(server.url, ca=files.ca, relays="some"):  # type: ignore[arg-type]
                pytest.fail("it was opened")


async def test_a_source_that_repeats_itself_does_not_make_a_nonce_repeat() -> None:
    publisher = kvcs.Publisher(
        Server(SESSION), settings=kvcs.PublisherSettings(random_octets=lambda count: bytes(count))
    )
    namespaces = set()
    for _ in range(2):
        async with publisher.publish(PREFIX, protect=RING) as publication:
            await put(await publication.segment(), TOY)
            namespaces.add(publication.namespace)
    assert len(namespaces) == 2

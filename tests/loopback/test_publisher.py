"""What a Publisher puts on the wire, and what `put` takes, keeps and refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvcs
from kvcs.kv import MANIFEST
from kvcs.moqt import events
from kvcs.moqt.data import SubgroupHeader
from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectStatus
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import Property
from kvcs.moqt.track.stored import OBJECT_BOOKKEEPING_OCTETS
from kvcs.publisher import payloads
from kvcs.quic.connection import Connection, PeerRequest
from tests.builders import (
    BRIEF,
    QUICK,
    put,
    same,
    tensors,
    toy_descriptor,
    toy_prefix,
    toy_publication,
)
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import Wire, accepting, joined, serving, subscribe
from tests.loopback.retrieving import meeting
from tests.virtual import virtual

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LIVE = Parameters.of(location_filter=LocationFilter.next_object())
BOOKKEEPING = 2 * 3 * OBJECT_BOOKKEEPING_OCTETS
"""What the Objects of one layer of the toy cost beside."""


async def layers_of(
    connection: kvcs.Connection, prefix: kvcs.Prefix, **options: Any
) -> list[kvcs.Layer]:
    """Every layer of a publication."""
    async with kvcs.Subscriber(connection, settings=QUICK).open(prefix, **options) as cache:
        return [layer async for layer in cache]


# The wire


async def test_a_data_track_is_one_stream_a_layer_in_the_order_of_the_draft(
    files: PemFiles,
) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    settings = kvcs.PublisherSettings(retention=7.0)
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server, settings=settings).publish(prefix) as publication:
            tape, reply = await subscribe(client, publication.namespace, b"k.raw.s0", LIVE)
            await put(await publication.segment(), toy)
        done = await tape.until_done()
    properties = dict(reply.track_properties.items)
    assert properties == {Property.MAX_CACHE_DURATION: 7000}  # and no delivery time-out
    assert done.status == PublishDoneCode.TRACK_ENDED
    headers = {}
    for header in tape.streams.values():
        assert isinstance(header, SubgroupHeader)
        headers[header.group_id] = header
    assert len(tape.streams) == 5 and sorted(headers) == [0, 1, 2, 3, 4]
    for group, header in headers.items():
        assert (header.subgroup_id, header.end_of_group) == (0, True)
        assert header.publisher_priority == (0, 32, 64, 96, 127)[group]
    by_stream: dict[int, list[tuple[int, int, ObjectStatus]]] = {}
    for read in tape.objects:
        place = (read.header.group_id, read.header.object_id, read.header.status)
        by_stream.setdefault(read.stream_id, []).append(place)
    layer = [(block, ObjectStatus.NORMAL) for block in range(3)] + [(3, ObjectStatus.END_OF_GROUP)]
    assert sorted(by_stream.values()) == [
        *[[(group, *each) for each in layer] for group in range(4)],
        [(4, 0, ObjectStatus.END_OF_TRACK)],
    ]
    assert set(tape.ends.values()) == {None}
    assert [bytes(read.payload) for read in tape.objects if not read.is_status] == [
        toy.objects[track, Location(group, block)]
        for group in range(4)
        for block in range(3)
        for track in toy.segments[0][:1]
    ]


async def test_the_five_fields_are_announced(files: PemFiles) -> None:
    announced: asyncio.Queue[tuple[bytes, ...]] = asyncio.Queue()

    def accept(connection: Connection, request: PeerRequest) -> bool:
        if not isinstance(request, events.PublishNamespaceReceived):
            return False
        announced.put_nowait(request.track_namespace)
        connection.core.responder.accept(request.request_id)
        return True

    withdrawn = asyncio.Event()
    prefix = toy_prefix()
    async with serving(files, observer=accepting(accept)) as relay:
        async with joined(relay, files) as session:
            async with kvcs.Publisher(session).publish(prefix) as publication:
                namespace = announced.get_nowait()  # announced before `publish` gives anything
                (server_side,) = relay.connections
                server_side.on_cancelled(0, lambda _: withdrawn.set())
                await put(await publication.segment(), toy_publication())
            async with asyncio.timeout(20):
                await withdrawn.wait()
    assert [len(part) for part in namespace] == [6, 16, 32, 32, 16]
    assert namespace == (*prefix.namespace_prefix(), publication.publication_id)


async def test_priorities_stay_a_subscriber_can_use_for_deep_models(files: PemFiles) -> None:
    toy = toy_publication((1,), layers=300)
    prefix = toy_prefix(1, descriptor=toy.descriptor)
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            tape, _ = await subscribe(client, publication.namespace, b"v.raw.s0", LIVE)
            await put(await publication.segment(), toy)
        await tape.until_done()
    priorities = {read.header.group_id: read.header.publisher_priority for read in tape.objects}
    assert priorities == {group: 128 * group // 300 for group in range(300)} | {300: 127}


# What `put` takes


async def test_put_copies_so_an_engine_may_overwrite_its_arrays(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    k, v = (np.empty_like(tensor[0]) for tensor in (toy.k, toy.v))
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            segment = await publication.segment()
            for layer in range(4):
                k[:], v[:] = tensors(toy, layer)
                await segment.put(layer, k, v)
                k[:], v[:] = 0, 0
            got = await layers_of(client, prefix)
    assert len(got) == 4 and all(same(layer, toy) for layer in got)


@virtual
async def test_lent_arrays_are_views_and_take_no_room() -> None:
    toy, prefix = toy_publication(), toy_prefix()
    settings = kvcs.PublisherSettings(store_octets=4 * BOOKKEEPING)
    async with meeting() as (server, client):
        publisher = kvcs.Publisher(server, settings=settings)
        async with publisher.publish(prefix) as publication:
            segment = await publication.segment()
            for layer in range(4):
                await segment.put(layer, *tensors(toy, layer), lend=True)
            assert publisher.held_octets == 4 * BOOKKEEPING
            assert all(same(layer, toy) for layer in await layers_of(client, prefix))
            toy.v[2][5] += 1  # the promise is broken: a reader must notice
            with pytest.raises(kvcs.CacheIncomplete) as caught:
                async with kvcs.Subscriber(client, settings=BRIEF).open(prefix) as cache:
                    await cache.complete()
    assert [str(run) for run in caught.value.missing] == ["v layer 2 blocks 1-1 (tokens 4-7)"]


async def test_lent_arrays_must_be_contiguous(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server:
        publisher = kvcs.Publisher(server)
        async with publisher.publish(prefix) as publication:
            segment = await publication.segment()
            k, v = tensors(toy, 0)
            strided = np.asfortranarray(k)
            with pytest.raises(kvcs.UsageError, match="contiguous"):
                await segment.put(0, strided, v, lend=True)
            assert publisher.held_octets == 0
            await segment.put(0, strided, v)  # copied, it is
            await put(segment, toy, range(1, 4))


class WithArray:
    """What a framework's tensor shows to numpy."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self._array


class WithDlpack:
    """A tensor that knows DLPack alone."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("wrapper", [WithArray, WithDlpack])
async def test_anything_that_shares_host_memory_is_taken(
    files: PemFiles, wrapper: Callable[[npt.NDArray[Any]], object]
) -> None:
    toy = toy_publication(dtype="float32")
    prefix = toy_prefix(descriptor=toy.descriptor)
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            segment = await publication.segment()
            for layer in range(4):
                k, v = tensors(toy, layer)
                await segment.put(layer, wrapper(k), wrapper(v))
            assert all(same(layer, toy) for layer in await layers_of(client, prefix))


async def test_latent_attention_has_one_tensor_a_layer(files: PemFiles) -> None:
    descriptor = toy_descriptor(kv_heads=1, head_dim=24, v_head_dim=0)
    prefix = toy_prefix(descriptor=descriptor)
    joint = np.arange(4 * 12 * 24).reshape(4, 12, 1, 24).astype(descriptor.numpy_dtype)
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            segment = await publication.segment()
            with pytest.raises(kvcs.UsageError, match="leave v out"):
                await segment.put(0, joint[0], joint[0])
            for layer in range(4):
                await segment.put(layer, joint[layer])
            got = await layers_of(client, prefix)
    assert [layer.k.tobytes() for layer in got] == [each.tobytes() for each in joint]
    assert {layer.v.shape for layer in got} == {(12, 1, 0)}


async def test_a_chunked_prefill_is_a_segment_a_pass(files: PemFiles) -> None:
    toy, prefix = toy_publication((1, 2)), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        publishing = kvcs.Publisher(server).publish(prefix, first_segment_blocks=1)
        async with publishing as publication:
            with pytest.raises(kvcs.UsageError, match="first_segment_blocks"):
                await publication.segment(blocks=2)
            await put(await publication.segment(), toy)
            uri = publication.uri(server.url)
            reading = asyncio.create_task(layers_of(client, prefix, publication=uri))
            with pytest.raises(kvcs.UsageError, match="2 of the prefix's 3 blocks are left"):
                await publication.segment(blocks=3)
            second = await publication.segment()
            assert (second.first_block, second.blocks, publication.complete) == (1, 2, False)
            await put(second, toy)
            assert publication.complete
            assert all(same(layer, toy) for layer in await reading)
            with pytest.raises(kvcs.UsageError, match="0 of the prefix's 3 blocks are left"):
                await publication.segment()


# What `put` refuses


async def test_what_put_refuses_changes_nothing(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    k, v = tensors(toy, 0)
    async with serving(files) as server, joined(server, files) as client:
        publisher = kvcs.Publisher(server)
        async with publisher.publish(prefix) as publication:
            segment = await publication.segment()
            for wrong, text in (
                ((0, k.astype("float16"), v), "k of layer 0: expected dtype bfloat16"),
                ((0, k, v.astype("float32")), "v of layer 0: expected dtype bfloat16"),
                ((0, k[:11], v), r"k of layer 0: expected shape \[12, 2, 8\]"),
                ((0, k, v[:, :1]), r"v of layer 0: expected shape \[12, 2, 8\]"),
                ((0, k, None), "v of layer 0 is missing"),
                ((0, "k", v), "expected an array or tensor"),
                ((1, k, v), "layer 1 of segment 0 came before layer 0"),
                ((-1, k, v), "layer -1 does not exist"),
                ((4, k, v), "layer 4 does not exist"),
                ((k, v, 0), "put takes the layer's index first"),
            ):
                with pytest.raises(kvcs.UsageError, match=text):
                    await segment.put(*wrong)
            assert (publication.progress.objects, publisher.held_octets) == (0, 0)
            await segment.put(np.int64(0), k, v)  # type: ignore[arg-type]
            with pytest.raises(kvcs.UsageError, match="layer 0 of segment 0 was put already"):
                await segment.put(0, k, v)
            await put(segment, toy, range(1, 4))
            assert all(same(layer, toy) for layer in await layers_of(client, prefix))
    with pytest.raises(kvcs.UsageError, match="the publication has ended"):
        await segment.put(0, k, v)
    with pytest.raises(kvcs.UsageError, match="the publication has ended"):
        await publication.segment()


async def test_layers_that_were_put_side_by_side_keep_their_order(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            segment = await publication.segment()
            await asyncio.gather(*(segment.put(at, *tensors(toy, at)) for at in range(4)))
            assert all(same(layer, toy) for layer in await layers_of(client, prefix))


def large_toy() -> Any:
    """Layers of 2 MiB, which are copied and hashed in a thread or step by step."""
    return toy_publication((2,), layers=2, kv_heads=8, head_dim=128, block_tokens=256)


async def test_a_layer_is_handed_over_before_the_next_is_hashed(
    files: PemFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "THREAD_OCTETS", 0)
    toy, prefix, wire = toy_publication(), toy_prefix(), Wire()
    handed_over: list[set[int]] = []
    steps = payloads.LayerPayloads._steps

    def noting(self: payloads.LayerPayloads, *given: Any) -> Any:
        handed_over.append({track.objects_sent for track in segment.tracks})
        return steps(self, *given)

    monkeypatch.setattr(payloads.LayerPayloads, "_steps", noting)
    async with serving(files) as server, joined(server, files, wire) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                await wire.until(lambda: len(wire.of(events.RequestAccepted)) == 4)
                segment = await publication.segment()
                await put(segment, toy)
                assert all([same(layer, toy) async for layer in cache])
    objects = prefix.blocks + 1  # the End of Group, too
    assert handed_over == [{layer * objects} for layer in range(prefix.descriptor.layers)]


@pytest.mark.parametrize("processors", [1, 4])
async def test_put_can_be_cancelled_and_repeated(
    files: PemFiles, monkeypatch: pytest.MonkeyPatch, processors: int
) -> None:
    monkeypatch.setattr(payloads, "PROCESSORS", processors)
    monkeypatch.setattr(payloads, "STEP_OCTETS", 1)
    toy = large_toy()
    prefix = toy_prefix(2, descriptor=toy.descriptor)
    async with serving(files) as server, joined(server, files) as client:
        publisher = kvcs.Publisher(server)
        async with publisher.publish(prefix) as publication:
            segment = await publication.segment()
            first = asyncio.create_task(segment.put(0, *tensors(toy, 0)))
            second = asyncio.create_task(segment.put(1, *tensors(toy, 1)))
            entered = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(entered.set_result, None)
            await entered  # both have begun: the first copies, the second waits for it
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            # Layer 1 must not slip in before layer 0.
            with pytest.raises(kvcs.UsageError, match="put that again first"):
                await second
            assert (publication.progress.objects, publisher.held_octets) == (0, 0)
            await put(segment, toy)
            assert all(same(layer, toy) for layer in await layers_of(client, prefix))


async def test_others_have_their_turn_between_the_steps_of_a_layer(
    files: PemFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "PROCESSORS", 1)
    monkeypatch.setattr(payloads, "STEP_OCTETS", 1)
    toy = large_toy()
    prefix = toy_prefix(2, descriptor=toy.descriptor)
    async with serving(files) as server:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            segment = await publication.segment()
            putting = asyncio.create_task(segment.put(0, *tensors(toy, 0)))
            turns = 0
            while not putting.done():
                await asyncio.sleep(0)
                turns += 1
            await putting
            assert turns >= 4, "K and V have two blocks each"
            assert publication.progress.objects == 4
            await segment.put(1, *tensors(toy, 1))


# Ending


async def test_leaving_early_aborts_and_says_what_lacks(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        with pytest.raises(kvcs.UsageError, match="2 of 4 layers were put"):
            async with kvcs.Publisher(server).publish(prefix) as publication:
                tape, _ = await subscribe(client, publication.namespace, MANIFEST, LIVE)
                await put(await publication.segment(), toy, range(2))
        done = await tape.until_done()
    assert done.status == PublishDoneCode.INTERNAL_ERROR
    assert done.reason == "the producer left before every layer was published"


async def test_the_text_of_an_exception_stays_here(files: PemFiles) -> None:
    async with serving(files) as server, joined(server, files) as client:
        with pytest.raises(RuntimeError, match="secret prompt"):
            async with kvcs.Publisher(server).publish(toy_prefix()) as publication:
                tape, _ = await subscribe(client, publication.namespace, MANIFEST, LIVE)
                raise RuntimeError("cannot tokenize 'secret prompt'")
        done = await tape.until_done()
    assert done.reason == "the producer failed (RuntimeError)"


async def test_who_is_cancelled_has_not_failed(files: PemFiles) -> None:
    async with serving(files) as server, joined(server, files) as client:
        with pytest.raises(asyncio.CancelledError):
            async with kvcs.Publisher(server).publish(toy_prefix()) as publication:
                tape, _ = await subscribe(client, publication.namespace, MANIFEST, LIVE)
                raise asyncio.CancelledError
        done = await tape.until_done()
    assert done.reason == "the producer was cancelled"


async def test_leaving_waits_for_fetches_in_progress(files: PemFiles) -> None:
    toy = large_toy()
    prefix = toy_prefix(2, descriptor=toy.descriptor)
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            await put(await publication.segment(), toy)
            subscriber = kvcs.Subscriber(client, settings=QUICK)
            opening = subscriber.open(prefix, retrieve="fetch")
            cache = await opening.__aenter__()
            # The publication is left while the fetch has hardly begun.
        got = [layer async for layer in cache]
        await opening.__aexit__(None, None, None)
    assert all(same(layer, toy) for layer in got)
    assert cache.report.refetches == 0

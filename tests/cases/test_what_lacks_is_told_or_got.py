"""Partial failures never become a wrong or a silent answer (cases 1, 2, 3, 5, 6, 7 and 48)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import kvcs
from kvcs.integrations.block_loads import BlockLoads
from kvcs.kv import RAW, BlockLayout, Component, DataTrack, register
from kvcs.moqt.errors import StreamCode
from kvcs.moqt.names import Location
from kvcs.subscriber.last_means import MissingLayer
from tests.builders import BRIEF, QUICK, Toy, put, same, tensors, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import Wire, joined, serving
from tests.loopback.raw_publication import K0, V0, RawPublication, damaged
from tests.loopback.retrieving import meeting
from tests.loopback.test_relay import relaying
from tests.virtual import virtual

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Engine:
    """Recomputes what it is asked for, and notes it."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self.asked: list[MissingLayer] = []

    async def __call__(self, missing: MissingLayer) -> tuple[object, object]:
        self.asked.append(missing)
        k, v = tensors(self.toy, missing.layer)
        part = slice(missing.first_token, missing.last_token + 1)
        return k[part], v[part]


def lacking(toy: Toy, how: str) -> RawPublication:
    """A relay that lacks group 2 / object 1 of the V track, or has it damaged."""
    return spoilt(toy, V0, Location(2, 1), how)


def corrupt(toy: Toy) -> RawPublication:
    """A relay that has group 1 / object 0 of the K track damaged."""
    return spoilt(toy, K0, Location(1, 0), "damaged")


def spoilt(toy: Toy, track: DataTrack, location: Location, how: str) -> RawPublication:
    """A relay with everything but one Object, which is unknown or damaged."""
    raw = RawPublication(toy)
    payload = None if how == "unknown" else damaged(toy.objects[track, location])
    raw.manifest()
    for layer in range(4):
        wrong = {(track, location.object): payload} if layer == location.group else {}
        raw.layer(layer, live=wrong, stored=wrong)
    raw.end()
    return raw


# Case 1


@virtual
@pytest.mark.parametrize("how", ["unknown", "damaged"])
async def test_one_lost_object_is_one_typed_error(how: str) -> None:
    toy, other = toy_publication(), toy_publication(seed=1)
    raw = lacking(toy, how)
    async with meeting(raw) as (_, client):
        subscriber = kvcs.Subscriber(client, settings=BRIEF)
        async with subscriber.open(toy_prefix()) as cache:
            with pytest.raises(kvcs.CacheIncomplete) as caught:
                await cache.layer(2)
            [missing] = caught.value.missing
            assert (missing.component, missing.layer) == ("v", 2)
            assert (missing.first_block, missing.last_block) == (1, 1)
            assert (missing.first_token, missing.last_token) == (4, 7)
            assert caught.value.usable_tokens == 4
            for layer in (0, 1, 3):
                assert same(await cache.layer(layer), toy)
                assert not same(await cache.layer(layer), other)
            with pytest.raises(kvcs.CacheIncomplete):
                await cache.complete()


@pytest.mark.parametrize("how", ["unknown", "damaged"])
async def test_one_lost_object_is_recomputed_and_nothing_else(files: PemFiles, how: str) -> None:
    toy = toy_publication()
    raw, engine = lacking(toy, how), Engine(toy)
    async with raw.serve(files) as server, joined(server, files) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        async with subscriber.open(toy_prefix(), recompute=engine) as cache:
            assert all([same(layer, toy) async for layer in cache])
            assert engine.asked == [MissingLayer(2, 1, 1, 4, 7)]
            assert (cache.report.recomputed, cache.report.objects) == (1, 23)


# Case 2


async def test_a_layer_that_cannot_be_encoded_aborts_long_before_the_deadline(
    files: PemFiles,
) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    loop = asyncio.get_running_loop()
    async with serving(files) as server, joined(server, files) as client:
        retrieval = kvcs.Subscriber(client, settings=QUICK).open(prefix)
        with pytest.raises(kvcs.UsageError, match="v of layer 3"):
            async with kvcs.Publisher(server).publish(prefix) as publication:
                first_id = publication.publication_id
                cache = await retrieval.__aenter__()
                segment = await publication.segment()
                await put(segment, toy, range(3))
                await cache.layer(2)  # what is still on its way when it aborts is reset
                began = loop.time()
                await segment.put(3, toy.k[3], toy.v[3][:8])  # its third block lacks
        with pytest.raises(kvcs.PublicationAborted):
            await cache.layer(3)
        assert loop.time() - began < 20.0  # the deadline is 50 s
        assert not cache.manifest.complete
        assert same(await cache.layer(2), toy)
        await retrieval.__aexit__(None, None, None)
        async with kvcs.Publisher(server).publish(prefix) as again:
            assert again.publication_id != first_id
            await put(await again.segment(), toy)


class RawCodec:
    """Raw Data."""

    lossless = True

    def data_octets(self, layout: BlockLayout) -> int | None:
        return layout.octets

    def encode(self, sections: Sequence[Any], layout: BlockLayout) -> Sequence[Any]:
        return RAW.encode(sections, layout)

    def decode(self, data: memoryview, layout: BlockLayout) -> Sequence[Any]:
        return RAW.decode(data, layout)


class Brittle(RawCodec):
    """Its encoding fails for one block."""

    name, number, in_place = "brittle", 0xFF22, True

    def __init__(self, bad: bytes) -> None:
        self.bad = bad

    def encode(self, sections: Sequence[Any], layout: BlockLayout) -> Sequence[Any]:
        pieces = super().encode(sections, layout)
        if b"".join(map(bytes, pieces)) == self.bad:
            raise RuntimeError("out of scratch memory")
        return pieces


@virtual
async def test_an_encoder_that_raises_for_one_block_aborts_and_sends_no_end(
    own_codecs: None,
) -> None:
    toy, prefix, wire = toy_publication(), toy_prefix(), Wire()
    register(Brittle(toy.v[3][8:12].tobytes()))  # layer 3, block 2 of the V track
    loop = asyncio.get_running_loop()
    async with meeting(None, wire) as (server, client):
        retrieval = kvcs.Subscriber(client, settings=QUICK).open(prefix)
        with pytest.raises(Exception, match="out of scratch memory"):
            async with kvcs.Publisher(server).publish(prefix, encodings=["brittle"]) as publication:
                first_id = publication.publication_id
                cache = await retrieval.__aenter__()
                await put(await publication.segment(), toy)
        began = loop.time()
        with pytest.raises(kvcs.PublicationAborted):
            await cache.layer(3)
        assert loop.time() - began < 5.0  # the deadline is 50 s
        assert not cache.manifest.complete
        assert not [key for key in wire.objects("v.brittle.s0") if key.group >= 3]
        await retrieval.__aexit__(None, None, None)
        async with kvcs.Publisher(server).publish(prefix) as again:
            assert again.publication_id != first_id
            await put(await again.segment(), toy)


# Case 3


@virtual
async def test_awaiting_a_corrupt_layer_ends_with_the_blocks_that_are_bad() -> None:
    toy = toy_publication()
    raw = corrupt(toy)
    async with meeting(raw) as (_, client):
        async with kvcs.Subscriber(client, settings=BRIEF).open(toy_prefix()) as cache:
            async with asyncio.timeout(2.0):
                with pytest.raises(kvcs.CacheIncomplete) as caught:
                    await cache.layer(1)
            assert [str(run) for run in caught.value.missing] == [
                "k layer 1 blocks 0-0 (tokens 0-3)"
            ]
            assert caught.value.usable_tokens == 0
            assert cache.report.rejected["digest"] >= 1


@virtual
async def test_the_engine_is_told_which_of_its_blocks_were_not_loaded() -> None:
    toy = toy_publication()
    raw = corrupt(toy)
    memory: dict[tuple[int, int], bytes] = {}

    def store(block_id: int, tensors: kvcs.Layer) -> None:
        memory[block_id, tensors.index] = tensors.k.tobytes() + tensors.v.tobytes()

    loads = BlockLoads(store)
    async with meeting(raw) as (_, client):
        async with kvcs.Subscriber(client, settings=BRIEF).open(toy_prefix()) as cache:
            loading = loads.start("request", cache, [70, 40, 10])
            assert (loads.get_finished(), loads.get_block_ids_with_load_errors()) == (set(), set())
            async with asyncio.timeout(2.0):
                await loading
            assert isinstance(loads.failures["request"], kvcs.CacheIncomplete)
            # Its step asks what is finished first; the blocks are told in this step or before.
            assert loads.get_finished() == set()
            assert loads.get_block_ids_with_load_errors() == {70}
            assert loads.get_finished() == {"request"}
            assert (loads.get_finished(), loads.get_block_ids_with_load_errors()) == (set(), set())
    assert {key for key in memory if key[0] != 70} == {
        (block_id, layer) for block_id in (40, 10) for layer in range(4)
    }
    for block, block_id in ((1, 40), (2, 10)):
        for layer in range(4):
            k, v = (each[4 * block : 4 * block + 4] for each in tensors(toy, layer))
            assert memory[block_id, layer] == k.tobytes() + v.tobytes()


# Case 5


class Faulty(RawCodec):
    """Its decoding fails for one block, in one of two ways."""

    name, number, in_place = "faulty", 0xFF21, False
    how, bad = "raises", b""

    def decode(self, data: memoryview, layout: BlockLayout) -> Sequence[Any]:
        pieces = list(super().decode(data, layout))
        if bytes(data) != self.bad:
            return pieces
        if self.how == "raises":
            raise RuntimeError("a table is corrupt")
        return [*pieces[:-1], memoryview(pieces[-1])[:-1]]


@virtual
@pytest.mark.parametrize("how", ["raises", "one octet too few"])
async def test_what_does_not_decode_is_missing_and_not_counted_as_loaded(
    how: str, own_codecs: None
) -> None:
    codec = Faulty()
    codec.how = how
    register(codec)
    toy = toy_publication(components=(Component.KV,), codec="faulty")
    [[track]] = toy.segments
    codec.bad = toy.objects[track, Location(1, 2)][68:]
    raw = RawPublication(toy)
    raw.manifest()
    raw.layers(0, 1, 2, 3)
    raw.end()
    async with meeting(raw) as (_, client):
        async with kvcs.Subscriber(client, settings=BRIEF).open(toy_prefix()) as cache:
            with pytest.raises(kvcs.CacheIncomplete) as caught:
                await cache.layer(1)
            assert [str(run) for run in caught.value.missing] == [
                "kv layer 1 blocks 2-2 (tokens 8-11)"
            ]
            assert cache.report.rejected["codec"] >= 1
            assert cache.report.objects == 11  # of 12
            for layer in (0, 2, 3):
                assert same(await cache.layer(layer), toy)


# Case 6


async def test_an_abort_reaches_everybody_through_a_relay(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    engine = Engine(toy)
    async with relaying(files) as relay, joined(relay, files) as consumer:  # type: ignore[arg-type]
        subscriber = kvcs.Subscriber(consumer, settings=BRIEF)
        async with joined(relay, files) as producer:  # type: ignore[arg-type]
            async with kvcs.Publisher(producer).publish(prefix) as publication:
                uri = publication.uri(relay.url)
                segment = await publication.segment()
                async with subscriber.open(prefix) as first:
                    await put(segment, toy, range(2))
                    assert same(await first.layer(1), toy)
                    joining = kvcs.Subscriber(consumer, settings=BRIEF)
                    async with joining.open(prefix) as joined_later:
                        assert same(await joined_later.layer(1), toy)
                        publication.abort("input too long")
                        for cache in (first, joined_later):
                            with pytest.raises(kvcs.PublicationAborted, match="input too long"):
                                await cache.layer(3)
                    assert same(await first.layer(0), toy)
                async with asyncio.timeout(30.0):
                    with pytest.raises(kvcs.KvcsError):
                        async with subscriber.open(prefix, publication=uri) as second:
                            await second.complete()
        async with asyncio.timeout(30.0):
            with pytest.raises(kvcs.KvcsError):
                async with subscriber.open(prefix, publication=uri, recompute=None) as third:
                    await third.complete()
            with pytest.raises(kvcs.PublicationNotFound):
                async with subscriber.open(prefix, wait=0, recompute=engine):
                    raise AssertionError("an aborted publication was opened")


# Case 7


async def test_a_publisher_that_is_killed_before_its_last_manifest(files: PemFiles) -> None:
    toy = toy_publication()
    raw, engine = RawPublication(toy), Engine(toy)
    raw.manifest(layers=0)
    async with raw.serve(files) as server, joined(server, files) as client:
        subscriber = kvcs.Subscriber(client, settings=BRIEF)
        async with subscriber.open(toy_prefix(), recompute=engine) as cache:
            await raw.subscribed(K0)
            await raw.subscribed(V0)
            raw.layers(0, 1, 2, 3)
            assert same(await cache.layer(3), toy)
            await server.close()
            with pytest.raises(kvcs.CacheIncomplete) as caught:
                await cache.complete()
            assert caught.value.missing == ()
            assert not cache.manifest.complete
            assert engine.asked == []  # nothing lacks; what lacks is the producer's word


@virtual
async def test_what_no_signed_list_names_when_its_producer_is_killed_is_unverified() -> None:
    toy, prefix, wire = toy_publication(), toy_prefix(), Wire()
    key = kvcs.SigningKey.generate(scope_id=prefix.scope_id)
    lazy = kvcs.ManifestCadence(first_layers=(1,), every_layers=99)
    settings = kvcs.PublisherSettings(signed_cadence=lazy)
    async with meeting(None, wire) as (server, client):
        subscriber = kvcs.Subscriber(
            client, settings=BRIEF, keys=kvcs.KeyRing([key.public]), require_signed=True
        )
        with pytest.raises(ConnectionResetError):
            async with kvcs.Publisher(server, settings=settings).publish(
                prefix, sign=key
            ) as publication:
                retrieval = subscriber.open(prefix)
                cache = await retrieval.__aenter__()
                await put(await publication.segment(), toy, range(3))
                assert same(await cache.layer(0), toy)
                last = Location(2, 2)
                await wire.until(
                    lambda: last in wire.objects(str(V0)) and last in wire.objects(str(K0))
                )
                await server.close()
                raise ConnectionResetError
        with pytest.raises(kvcs.CacheIncomplete) as caught:
            await cache.layer(1)
        lacking = {(run.component, run.layer) for run in caught.value.missing}
        assert lacking == {(name, layer) for name in "kv" for layer in (1, 2, 3)}
        assert cache.report.objects == 6
        await retrieval.__aexit__(None, None, None)


# Case 48


async def test_streams_reset_as_too_far_behind_go_on_by_fetch(files: PemFiles) -> None:
    toy, wire = toy_publication(), Wire()
    raw = RawPublication(toy)
    raw.manifest(layers=0)
    async with raw.serve(files) as server, joined(server, files, wire) as client:
        async with kvcs.Subscriber(client, settings=QUICK).open(toy_prefix()) as cache:
            await raw.subscribed(K0)
            await raw.subscribed(V0)
            raw.layers(0, 1)
            for name, track in raw.stored.items():
                raw.group(track, name, 2)
            cut = [raw.begin(name, 2, 1, 100) for name in (K0, V0)]
            await wire.until(
                lambda: all(Location(2, 1) in wire.objects(str(name)) for name in (K0, V0))
            )
            for stream in cut:
                stream.reset(StreamCode.TOO_FAR_BEHIND)
            raw.layers(3)
            raw.manifest()
            got = [layer async for layer in cache]
            assert [layer.index for layer in got] == [0, 1, 2, 3]
            assert all(same(layer, toy) for layer in got)
            assert cache.report.duplicates == 0
            assert cache.report.objects == 24

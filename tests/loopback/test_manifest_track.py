"""The manifest track on the wire, and what a consumer makes of manifests, good and bad."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

import kvcs
from kvcs.kv import MANIFEST, ManifestLimits, parse_manifest
from kvcs.moqt import events
from kvcs.moqt.data import FetchHeader, SubgroupHeader
from kvcs.moqt.errors import PublishDoneCode, RequestCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import Parameters
from kvcs.quic.connection import Connection, PeerRequest
from tests.builders import QUICK, put, same, toy_descriptor, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import Tape, Wire, accepting, joined, serving, subscribe
from tests.loopback.raw_publication import K0, MANIFEST_COSE, V0, RawPublication
from tests.loopback.retrieving import meeting
from tests.virtual import virtual

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

NEWEST_AND_LATER = Parameters.of(
    location_filter=LocationFilter.next_object(),
    fill_parameters=Parameters.of(location_filter=LocationFilter.relative_start(1)),
)


def versions(tape: Tape) -> list[kvcs.Manifest]:
    """The versions on a tape, by Group."""
    reads = sorted(tape.objects, key=lambda read: read.header.group_id)
    return [parse_manifest(bytes(read.payload)) for read in reads]


# What a publisher sends


async def test_each_version_is_a_group_of_one_object_on_its_own_stream(files: PemFiles) -> None:
    toy = toy_publication((1,), layers=30)
    prefix = toy_prefix(1, descriptor=toy.descriptor)
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            tape, _ = await subscribe(client, publication.namespace, MANIFEST, NEWEST_AND_LATER)
            # The first version is there before the first Object.
            await tape.until(lambda: bool(tape.objects) and tape.objects[0].whole)
            assert publication.progress.objects == 0
            await put(await publication.segment(), toy)
            assert publication.progress.manifests == 8
        done = await tape.until_done()
    assert (done.status, done.reason) == (PublishDoneCode.TRACK_ENDED, "")
    listed = [version.segments[0].layers_listed() for version in versions(tape)]
    assert listed == [0, 1, 2, 4, 8, 16, 24, 30]
    assert [version.complete for version in versions(tape)] == [False] * 7 + [True]
    assert not any(read.is_status for read in tape.objects)
    places = sorted((read.header.group_id, read.header.object_id) for read in tape.objects)
    assert places == [(group, 0) for group in range(8)]
    assert {read.header.publisher_priority for read in tape.objects} == {0}
    headers = list(tape.streams.values())
    live = [header for header in headers if isinstance(header, SubgroupHeader)]
    assert len(live) == 7 and len(headers) == 8  # the first version came on the fill stream
    assert all(header.end_of_group and header.subgroup_id == 0 for header in live)
    assert set(tape.ends.values()) == {None}
    newest = versions(tape)[-1].segments[0]
    for track in (K0, V0):
        for layer in range(30):
            assert newest.digest(track, layer, 0) == toy.digests[track, Location(layer, 0)]


async def test_a_new_segment_is_a_new_version(files: PemFiles) -> None:
    toy, prefix = toy_publication((1, 2)), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        publishing = kvcs.Publisher(server).publish(prefix, first_segment_blocks=1)
        async with publishing as publication:
            tape, _ = await subscribe(client, publication.namespace, MANIFEST, NEWEST_AND_LATER)
            await put(await publication.segment(), toy)
            second = await publication.segment()
            await put(second, toy)
        await tape.until_done()
    shown = [
        [(entry.blocks, entry.layers_listed(), entry.complete) for entry in version.segments]
        for version in versions(tape)
    ]
    assert shown == [
        [(1, 0, False)],
        [(1, 1, False)],
        [(1, 2, False)],
        [(1, 4, True)],
        [(1, 4, True), (2, 0, False)],
        [(1, 4, True), (2, 1, False)],
        [(1, 4, True), (2, 2, False)],
        [(1, 4, True), (2, 4, True)],
    ]


async def test_a_late_subscriber_gets_the_newest_version_alone(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            await put(await publication.segment(), toy)
            tape, _ = await subscribe(client, publication.namespace, MANIFEST, NEWEST_AND_LATER)
            await tape.until(lambda: bool(tape.ends))
        await tape.until_done()
    assert [type(header) for header in tape.streams.values()] == [FetchHeader]
    (newest,) = versions(tape)
    assert newest.complete and len(tape.objects) == 1


async def test_the_deterministic_promise_is_in_every_version(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix, deterministic=True) as publication:
            tape, _ = await subscribe(client, publication.namespace, MANIFEST, NEWEST_AND_LATER)
            await put(await publication.segment(), toy)
        await tape.until_done()
    assert {version.deterministic for version in versions(tape)} == {True}


# What a consumer makes of it


def changed(raw: RawPublication, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The complete manifest of a publication, changed."""
    members = json.loads(raw.toy.writer().to_json_bytes())
    change(members)
    return json.dumps(members).encode()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.update(kvcs=2), "kvcs is 2"),
        (lambda m: m.pop("compat"), "compat is missing"),
        (lambda m: m["compat"].update(dtype="float16"), "dtype: ours bfloat16, theirs float16"),
        (lambda m: m.update(layers=5), "layers"),
        (lambda m: m.update(layers=4.0), "float"),
        (lambda m: m["segments"][0].update(blocks=2), "digests"),
        (lambda m: m["segments"][0].update(block_keys_sha256="00" * 32), "block_keys_sha256"),
        (lambda m: m["segments"][0].update(tracks=["k.raw.s0"]), "tracks does not"),
        (
            lambda m: m["segments"][0].update(tracks=["kv.zip.s0"], object_digests={}),
            "no lossless encoding",
        ),
    ],
)
async def test_a_manifest_that_does_not_fit_is_refused_in_words(
    files: PemFiles, change: Callable[[dict[str, Any]], Any], text: str
) -> None:
    raw, wire = RawPublication(toy_publication()), Wire()
    raw.layers(0, 1, 2, 3)
    raw.manifest(changed(raw, change))
    async with raw.serve(files) as server, joined(server, files, wire) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        with pytest.raises(kvcs.PublicationError, match=text):
            async with subscriber.open(
                toy_prefix(), publication=kvcs.PublicationNamespace.parse(raw.namespace)
            ):
                raise AssertionError("it was opened")
        assert wire.tracks("subscribe") == ["manifest.cose", "manifest"]


@pytest.mark.parametrize(
    "code", [RequestCode.UNAUTHORIZED, RequestCode.INTERNAL_ERROR, RequestCode.NOT_SUPPORTED]
)
async def test_who_does_not_say_that_there_is_no_signed_manifest_is_asked_for_no_other(
    files: PemFiles, code: RequestCode
) -> None:
    raw, wire = RawPublication(toy_publication()), Wire()
    raw.layers(0, 1, 2, 3)
    raw.end()
    raw.manifest()

    def answer(connection: Connection, request: PeerRequest) -> bool:
        if isinstance(request, events.SubscribeReceived):
            if request.full_track_name.name == MANIFEST_COSE:
                responder = connection.core.responder
                responder.refuse(request.request_id, kvcs.RequestError("not this one", code))
                return True
        return raw.answer(connection, request)

    named = kvcs.PublicationNamespace.parse(raw.namespace)
    async with serving(files, observer=accepting(answer)) as server:
        async with joined(server, files, wire) as client:
            with pytest.raises(kvcs.RequestError) as caught:
                async with kvcs.Subscriber(client, settings=QUICK).open(
                    toy_prefix(), publication=named
                ):
                    raise AssertionError("it was opened")
    assert caught.value.code == code
    assert set(wire.tracks("subscribe")) == {"manifest.cose"}


async def test_octets_that_are_no_json_are_refused(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(b'{"kvcs": 1')
    async with raw.serve(files) as server, joined(server, files) as client:
        with pytest.raises(kvcs.PublicationNotFound, match="manifest") as caught:
            async with kvcs.Subscriber(client, settings=QUICK).open(toy_prefix(), wait=0):
                raise AssertionError("it was opened")
        assert isinstance(caught.value.__cause__, kvcs.PublicationError)
        assert not caught.value.absent


async def test_a_manifest_above_the_limit_is_refused_before_it_comes(files: PemFiles) -> None:
    raw, wire = RawPublication(toy_publication()), Wire()
    raw.manifest(b" " * 300_000)
    settings = kvcs.SubscriberSettings(manifest_limits=ManifestLimits(octets=100_000))
    async with raw.serve(files) as server, joined(server, files, wire) as client:
        subscriber = kvcs.Subscriber(client, settings=settings)
        named = kvcs.PublicationNamespace.parse(raw.namespace)
        with pytest.raises(kvcs.PublicationError, match="300000 octets, limit 100000"):
            async with subscriber.open(toy_prefix(), publication=named):
                raise AssertionError("it was opened")
        assert not wire.of(events.ObjectEnded)


async def test_a_large_manifest_is_read_beside_the_loop(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.layers(0, 1, 2, 3)
    raw.end()
    raw.manifest(changed(raw, lambda members: members.update(note="x" * 1_500_000)))
    async with raw.serve(files) as server, joined(server, files) as client:
        async with kvcs.Subscriber(client, settings=QUICK).open(toy_prefix()) as cache:
            assert all([same(layer, raw.toy) async for layer in cache])


async def test_a_manifest_that_goes_back_ends_the_use(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.layers(0, 1)
    raw.manifest(layers=2)
    async with raw.serve(files) as server, joined(server, files) as client:
        async with kvcs.Subscriber(client, settings=QUICK).open(toy_prefix()) as cache:
            assert same(await cache.layer(1), raw.toy)
            raw.manifest(layers=1)
            with pytest.raises(kvcs.PublicationError, match="went back from 2 listed layers to 1"):
                await cache.complete()


async def test_a_publication_may_begin_without_a_segment(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(changed(raw, lambda members: members.update(segments=[])))
    async with raw.serve(files) as server, joined(server, files) as client:
        retrieval = kvcs.Subscriber(client, settings=QUICK).open(toy_prefix())
        with pytest.raises(kvcs.PublicationNotFound, match="never came"):
            async with kvcs.Subscriber(client, settings=QUICK).open(toy_prefix(), deadline=2.0):
                raise AssertionError("it was opened")
        raw.layers(0, 1, 2, 3)
        raw.end()
        raw.manifest()
        async with retrieval as cache:
            assert all([same(layer, raw.toy) async for layer in cache])


async def test_a_manifest_of_another_namespace_is_refused(files: PemFiles) -> None:
    """It fits our descriptor, and the namespace says that the content is another."""
    raw = RawPublication(toy_publication())
    elsewhere = toy_prefix(descriptor=toy_descriptor(dtype="float16")).namespace(bytes(16))
    raw.namespace = (*raw.namespace[:2], elsewhere[2], *raw.namespace[3:])
    raw.manifest_track = raw.track(MANIFEST)
    raw.manifest()
    async with raw.serve(files) as server, joined(server, files) as client:
        named = kvcs.PublicationNamespace.parse(raw.namespace)
        with pytest.raises(kvcs.PublicationError, match="another Compatibility ID than the name"):
            async with kvcs.Subscriber(client).open(toy_prefix(), publication=named):
                raise AssertionError("it was opened")


async def test_a_longer_publication_cannot_be_checked(files: PemFiles) -> None:
    raw = RawPublication(toy_publication((5,)))
    raw.manifest()
    async with raw.serve(files) as server, joined(server, files) as client:
        named = kvcs.PublicationNamespace.parse(raw.namespace)
        with pytest.raises(kvcs.PublicationError, match="segment 0 has 5 blocks, the prefix has 3"):
            async with kvcs.Subscriber(client).open(toy_prefix(), publication=named):
                raise AssertionError("it was opened")


async def test_a_signed_publication_is_refused_where_nobody_can_verify_it(
    files: PemFiles,
) -> None:
    raw, wire = RawPublication(toy_publication(), manifest=MANIFEST_COSE), Wire()
    raw.layers(0, 1, 2, 3)
    raw.manifest(b"\xd2\x84\x40\xa0\x40\x40")  # the follower must not even look at it
    async with raw.serve(files) as server, joined(server, files, wire) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        named = kvcs.PublicationNamespace.parse(raw.namespace)
        with pytest.raises(kvcs.PublicationError, match="no producer keys"):
            async with subscriber.open(toy_prefix(), publication=named):
                raise AssertionError("it was opened")
        with pytest.raises(kvcs.PublicationNotFound, match="no producer keys"):
            async with subscriber.open(toy_prefix(), wait=0):
                raise AssertionError("it was opened")
        assert set(wire.tracks("subscribe")) == {"manifest.cose"}


def _second(**members: Any) -> dict[str, Any]:
    """The entry of a segment behind the toy's three blocks."""
    entry = {
        "segment": 1,
        "first_block": 3,
        "blocks": 1,
        "block_keys_sha256": "00" * 32,
        "tracks": ["k.raw.s1", "v.raw.s1"],
        "complete": False,
    }
    return {**entry, **members}


def _nested(depth: int) -> Any:
    return json.loads("[" * depth + "]" * depth)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m["segments"].append(_second(first_block=2)), "first_block is 2, expected 3"),
        (lambda m: m["segments"].append(_second(first_block=4)), "first_block is 4, expected 3"),
        (lambda m: m["segments"].append(_second(segment=2)), "numbered 2"),
        (lambda m: m["segments"].append(_second(tracks=["q.raw.s1"])), "component.codec.sN"),
        (lambda m: m["segments"].pop(), "segment"),
        (lambda m: m["segments"][0].update(blocks=2), "digests"),
        (lambda m: m["segments"][0].update(block_keys_sha256="00" * 32), "block_keys_sha256"),
        (lambda m: m["segments"][0]["tracks"].remove("v.raw.s0"), "v.raw.s0"),
        (lambda m: m["segments"][0]["object_digests"]["v.raw.s0"][1].reverse(), "v.raw.s0 layer 1"),
        (lambda m: m["compat"].update(model="another"), "model"),
        (lambda m: m.update(deterministic=True), "deterministic changed"),
        (lambda m: m["compat"].update(deep=_nested(17)), "nested more than 16"),
    ],
)
@virtual
async def test_a_later_version_that_contradicts_the_first_ends_the_use_in_words(
    change: Callable[[dict[str, Any]], Any], text: str
) -> None:
    raw = RawPublication(toy_publication())
    raw.layers(0, 1)
    raw.manifest(layers=2)
    async with meeting(raw) as (_, client):
        async with kvcs.Subscriber(client, settings=QUICK).open(toy_prefix()) as cache:
            assert same(await cache.layer(1), raw.toy)
            waiting = asyncio.create_task(cache.layer(3))
            raw.manifest(changed(raw, change))
            with pytest.raises(kvcs.PublicationError, match=text):
                await cache.complete()
            with pytest.raises(kvcs.PublicationError, match=text):
                await waiting
            with pytest.raises(kvcs.PublicationError, match=text):
                await cache.layer(0)  # nothing of it may be used any more

"""What a caller, a peer or the network gets wrong: a typed error, in time, and nothing left."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import kvcs
from kvcs.errors import UsageError
from kvcs.moqt import events
from kvcs.moqt.names import Location
from tests.builders import QUICK, put, same, toy_descriptor, toy_prefix, toy_publication
from tests.certificates import PemFiles, write_pem
from tests.loopback import recorder
from tests.loopback.kv_fixtures import HOST, Wire, joined, serving
from tests.loopback.raw_publication import K0, V0, RawPublication
from tests.loopback.retrieving import meeting
from tests.ports import closed_port
from tests.virtual import virtual

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

HASTY = kvcs.QuicSettings(connect_timeout=0.4, close_timeout=0.3)


# What is asked for


@pytest.mark.parametrize(
    ("ours", "text"),
    [
        ({"dtype": "float8_e4m3fn"}, "dtype: ours float8_e4m3fn, theirs bfloat16"),
        ({"kv_heads": 4}, "kv_heads: ours 4, theirs 2"),
        ({"head_dim": 16}, "head_dim: ours 16, theirs 8"),
        ({"layers": 5}, "layers: ours 5, theirs 4"),
        ({"model": "other"}, "model: ours other, theirs toy"),
        ({"extra": {"rope": "yarn"}}, "extra"),
    ],
)
async def test_a_descriptor_that_disagrees_is_refused_at_the_manifest(
    files: PemFiles, ours: dict[str, Any], text: str
) -> None:
    toy, wire = toy_publication(), Wire()
    mine = toy_prefix(descriptor=toy_descriptor(**ours))
    async with serving(files) as server, joined(server, files, wire) as client:
        async with kvcs.Publisher(server).publish(toy_prefix()) as publication:
            await put(await publication.segment(), toy)
            subscriber = kvcs.Subscriber(client, settings=QUICK)
            with pytest.raises(kvcs.PublicationError, match=text):
                async with subscriber.open(mine, publication=publication.uri(server.url)):
                    raise AssertionError("it was opened")
            # No data track was asked for; and by discovery it is not even seen.
            assert wire.tracks("subscribe") == ["manifest.cose", "manifest"]
            with pytest.raises(kvcs.PublicationNotFound) as caught:
                async with subscriber.open(mine, wait=0):
                    raise AssertionError("it was opened")
            assert caught.value.absent


def test_a_prefix_shorter_than_a_block_has_no_name() -> None:
    ours = toy_prefix()
    with pytest.raises(kvcs.UsageError, match="prefix of 3 tokens is shorter than one block of 4"):
        kvcs.Prefix(ours.scope, ours.descriptor, [1, 2, 3])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layers": (2, 1)}, r"layers 2\.\.1 are not within 0\.\.3"),
        ({"layers": (0, 4)}, r"layers 0\.\.4 are not within 0\.\.3"),
        ({"blocks": 0}, "blocks"),
        ({"blocks": 4}, "at most the prefix's 3, not 4"),
        ({"deadline": 0.0}, "deadline must be more than 0 s"),
        ({"wait": -1.0}, "wait must not be negative"),
        ({"retrieve": "guess"}, "retrieve must be one of auto, subscribe, fetch, not 'guess'"),
        ({"publication": "moqt://h:1/"}, "is not a holder URI"),
        ({"publication": "moqt://h:1#kvcs:a-b"}, "names no publication"),
    ],
)
async def test_arguments_out_of_bounds_are_refused_before_anything_is_asked(
    files: PemFiles, options: dict[str, Any], text: str
) -> None:
    heard: list[events.Event] = []
    async with serving(files, observer=lambda _, event: heard.append(event)) as server:
        async with joined(server, files) as client:
            with pytest.raises(kvcs.UsageError, match=text):
                async with kvcs.Subscriber(client).open(toy_prefix(), **options):
                    raise AssertionError("it was opened")
    assert [type(event) for event in heard if hasattr(event, "request_id")] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"least_deadline": 0.0},
        {"least_recovery": -1.0},
        {"listen": 0.0},
        {"stall": 0.0},
        {"quiet": 0.0},
        {"retry_pause": 0.0},
        {"recompute_per_1k_tokens": 0.0},
        {"max_candidates": 0},
        {"subscriber_priority": 256},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(kvcs.UsageError, match=next(iter(wrong))):
        kvcs.SubscriberSettings(**wrong)


def test_deadlines_grow_with_the_prefix() -> None:
    settings = kvcs.SubscriberSettings(recompute_per_1k_tokens=2.0)
    assert [settings.deadline(tokens) for tokens in (1, 7_500, 100_000)] == [30.0, 30.0, 400.0]
    assert [settings.recovery(tokens) for tokens in (1, 500, 100_000)] == [1.0, 1.0, 200.0]


# Who is asked


async def test_no_relay_there_is_said_within_the_time_to_connect(files: PemFiles) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with closed_port() as port, pytest.raises(kvcs.ConnectionFailed, match=HOST):
        async with kvcs.connect(f"moqt://{HOST}:{port}", ca=files.ca, quic=HASTY):
            raise AssertionError("it was connected")
    assert loop.time() - began < 20.0


async def test_a_certificate_that_does_not_verify_is_refused(
    files: PemFiles, tmp_path: Path
) -> None:
    stranger = write_pem(tmp_path)
    async with serving(files) as server:
        with pytest.raises(kvcs.CertificateError):
            async with kvcs.connect(server.url, ca=stranger.ca):
                raise AssertionError("it was connected")


async def test_a_peer_that_never_says_setup_is_no_moqt_endpoint(files: PemFiles) -> None:
    mute = await recorder.serve(files)
    with pytest.raises(kvcs.ConnectionFailed, match="sent no SETUP within"):
        quic = kvcs.QuicSettings(connect_timeout=2.0, close_timeout=0.3)
        async with kvcs.connect(f"moqt://{HOST}:{mute.port}", ca=files.ca, quic=quic):
            raise AssertionError("it was connected")
    await recorder.end(mute)


@pytest.mark.parametrize("url", ["http://h", "moqt://", "moqt://h:99999"])
async def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        async with kvcs.connect(url):
            raise AssertionError("it was connected")


async def test_a_token_that_is_no_base64_is_refused_and_not_repeated(files: PemFiles) -> None:
    async with serving(files) as server:
        with pytest.raises(kvcs.UsageError) as caught:
            async with kvcs.connect(server.url, ca=files.ca, token="not/base64!"):
                raise AssertionError("it was connected")
    assert "not/base64" not in str(caught.value)


async def test_a_named_publication_whose_manifest_never_comes_is_not_found(
    files: PemFiles,
) -> None:
    raw = RawPublication(toy_publication())
    async with raw.serve(files) as server, joined(server, files) as client:
        named = kvcs.PublicationNamespace.parse(raw.namespace)
        with pytest.raises(kvcs.PublicationNotFound, match="manifest of the publication never"):
            async with kvcs.Subscriber(client).open(toy_prefix(), publication=named, deadline=0.2):
                raise AssertionError("it was opened")


# Publishers that fail


async def test_an_abort_reaches_live_and_late_consumers_with_its_reason(
    files: PemFiles,
) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    loop = asyncio.get_running_loop()
    async with serving(files) as server, joined(server, files) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        async with kvcs.Publisher(server).publish(prefix) as publication:
            uri = publication.uri(server.url)
            segment = await publication.segment()
            async with subscriber.open(prefix) as live:
                await put(segment, toy, range(2))
                assert same(await live.layer(1), toy)
                waiting = [asyncio.create_task(live.layer(index)) for index in (2, 3)]
                await asyncio.gather(live.layer(0))
                publication.abort("input too long")
                publication.abort("twice is once")
                for task in waiting:
                    with pytest.raises(kvcs.PublicationAborted, match="input too long") as info:
                        await task
                    assert info.value.reason == "input too long"
                assert same(await live.layer(0), toy)  # what was verified stays usable
                with pytest.raises(kvcs.PublicationAborted):
                    await live.complete()
            began = loop.time()
            with pytest.raises(kvcs.PublicationAborted, match="input too long"):
                async with subscriber.open(prefix, publication=uri) as late:
                    await late.complete()
            assert loop.time() - began < 20.0  # the deadline is 50 s
            with pytest.raises(kvcs.PublicationNotFound):
                async with subscriber.open(prefix, wait=0):
                    raise AssertionError("it was opened")
            with pytest.raises(kvcs.UsageError, match="has ended: input too long"):
                await put(segment, toy, range(2, 4))
            assert publication.aborted == "input too long"
        # The publisher is gone.
        with pytest.raises(kvcs.RequestError) as caught:
            async with subscriber.open(prefix, publication=uri):
                raise AssertionError("it was opened")
        assert caught.value.code == 0x10


async def test_an_encoder_that_raises_aborts_the_publication_at_once(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        with pytest.raises(kvcs.UsageError, match="v of layer 3"):
            async with kvcs.Publisher(server).publish(prefix) as publication:
                retrieval = kvcs.Subscriber(client, settings=QUICK).open(prefix)
                cache = await retrieval.__aenter__()
                segment = await publication.segment()
                await put(segment, toy, range(3))
                await segment.put(3, toy.k[3], toy.v[3][:8])
        with pytest.raises(kvcs.PublicationAborted, match=r"producer failed \(UsageError\)"):
            await cache.complete()
        assert not cache.manifest.complete
        await retrieval.__aexit__(None, None, None)


async def test_a_publisher_that_dies_before_its_last_manifest_is_never_complete(
    files: PemFiles,
) -> None:
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    async with raw.serve(files) as server, joined(server, files) as client:
        async with kvcs.Subscriber(client, settings=QUICK).open(toy_prefix()) as cache:
            await raw.subscribed(K0)
            await raw.subscribed(V0)
            raw.layers(0, 1, 2, 3)
            got = [await cache.layer(index) for index in range(4)]
            assert all(same(layer, raw.toy) for layer in got)
            await server.close()
            with pytest.raises(kvcs.CacheIncomplete, match="session closed") as caught:
                await cache.complete()
            assert caught.value.missing == ()
            assert not cache.manifest.complete
            assert same(await cache.layer(3), raw.toy)


@virtual
async def test_the_deadline_names_what_lacks_and_keeps_what_came() -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with meeting() as (server, client):
        with pytest.raises(kvcs.UsageError, match="2 of 4"):
            async with kvcs.Publisher(server).publish(prefix) as publication:
                await put(await publication.segment(), toy, range(2))
                subscriber = kvcs.Subscriber(client, settings=QUICK)
                async with subscriber.open(prefix, deadline=2.0) as cache:
                    with pytest.raises(kvcs.CacheIncomplete, match=r"deadline of 2 s") as info:
                        await cache.layer(2)
                    assert {(run.component, run.layer) for run in info.value.missing} == {
                        ("k", 2),
                        ("v", 2),
                        ("k", 3),
                        ("v", 3),
                    }
                    assert same(await cache.layer(1), toy)


# Peers that break rules


async def test_a_stranger_on_a_data_track_is_dropped(files: PemFiles) -> None:
    """Objects of layers and blocks that do not exist; the rest of the track counts."""
    raw = RawPublication(toy_publication())
    raw.manifest(layers=0)
    payload = raw.toy.objects[K0, Location(0, 0)]
    async with raw.serve(files) as server, joined(server, files) as client:
        async with kvcs.Subscriber(client, settings=QUICK).open(toy_prefix()) as cache:
            hand = await raw.subscribed(K0)
            await raw.subscribed(V0)
            hand.stream(4, (0, payload))
            hand.stream(7, (0, payload))
            raw.layers(0, 1, 2, 3)
            raw.end()
            raw.manifest()
            assert all([same(layer, raw.toy) async for layer in cache])
            assert cache.report.rejected == {"layer": 2}

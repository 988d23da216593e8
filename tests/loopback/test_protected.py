"""Protected publications end to end: sealed at the producer, opened at the consumer, and nowhere
between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import kvcs
from kvcs.errors import NotProtected, PublicationNotFound, UsageError
from kvcs.kv import ProtectionKey, ProtectionRing, codecs
from kvcs.quic.endpoint import connect
from kvcs.subscriber import manifests
from kvcs.trust import KeyRing, SigningKey
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.cases.test_lossy_only_when_asked import Coarse, Squeeze
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import joined, serving

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

TOY = toy_publication()
PREFIX = toy_prefix()
LAYERS = TOY.descriptor.layers
OLD, KEY = ProtectionKey(2**32 + 1, b"\x01" * 32), ProtectionKey(2**32 + 2, b"\x02" * 32)
RING = ProtectionRing([OLD, KEY])
SIGNER = SigningKey.generate(scope_id=PREFIX.scope_id)


def opening(*sessions: Any, ring: ProtectionRing = RING, **options: Any) -> kvcs.Subscriber:
    return kvcs.Subscriber(*sessions, settings=QUICK, protection=ring, **options)


@asynccontextmanager
async def relaying(files: PemFiles) -> AsyncIterator[kvcs.Relay]:
    settings = kvcs.RelaySettings(
        cert=files.cert, key=files.key, port=0, allow_anyone=True, goaway_timeout=0.5
    )
    async with kvcs.Relay(settings) as relay:
        yield relay


@pytest.mark.parametrize("signed", [False, True])
async def test_through_a_relay_live_late_and_fetched(files: PemFiles, signed: bool) -> None:
    options: dict[str, Any] = {}
    if signed:
        options = {"keys": KeyRing([SIGNER.public]), "require_signed": True}
    async with (
        relaying(files) as relay,
        connect(relay.url, ca=files.ca, relays="untrusted") as producer,
        connect(relay.url, ca=files.ca, relays="untrusted") as consumer,
    ):
        async with kvcs.Publisher(producer).publish(
            PREFIX, sign=SIGNER if signed else None, protect=RING
        ) as publication:
            segment = await publication.segment()
            await put(segment, TOY, [0, 1])
            subscriber = opening(consumer, **options)
            async with subscriber.open(PREFIX) as cache:
                assert same(await cache.layer(1), TOY)  # while later ones are still produced
                await put(segment, TOY, range(2, LAYERS))
                assert [same(layer, TOY) async for layer in cache] == [True] * LAYERS
                report = cache.report
                assert report.rejected == {}
                assert report.signed_by == (SIGNER.kid if signed else None)
            async with subscriber.open(PREFIX) as cache:  # all of it from the fill
                assert [same(layer, TOY) async for layer in cache] == [True] * LAYERS
            async with subscriber.open(PREFIX, layers=(1, 2), blocks=2, retrieve="fetch") as cache:
                assert [same(layer, TOY, 2) async for layer in cache] == [True] * 2
            facts = await subscriber.look_at(kvcs.PublicationNamespace.parse(publication.namespace))
            assert facts.manifest.complete
            assert subscriber.unopened == {} == subscriber.refused


@pytest.mark.parametrize("encodings", [("squeeze",), ("kv.coarse8", "raw"), ("kv.raw",)])
async def test_every_encoding_is_sealed(
    files: PemFiles, own_codecs: None, encodings: tuple[str, ...]
) -> None:
    """Those too whose Data has a length that only encoding tells."""
    codecs.register(Squeeze())
    codecs.register(Coarse())
    async with serving(files) as server, joined(server, files) as client:
        publisher = kvcs.Publisher(server)
        async with publisher.publish(PREFIX, protect=KEY, encodings=encodings) as publication:
            await put(await publication.segment(), TOY)
            assert publisher.held_octets >= publication.progress.octets
            async with opening(client).open(PREFIX) as cache:
                assert [same(layer, TOY) async for layer in cache] == [True] * LAYERS
                assert cache.report.rejected == {}
        assert publisher.held_octets == 0


async def test_a_rotation_goes_on_while_both_keys_are_known(files: PemFiles) -> None:
    ring = ProtectionRing([OLD])
    consumer_ring = ProtectionRing([OLD])
    async with serving(files) as server, joined(server, files) as client:
        publisher = kvcs.Publisher(server)
        subscriber = opening(client, ring=consumer_ring)
        async with publisher.publish(PREFIX, protect=ring) as before:
            await put(await before.segment(), TOY)
            newer = ring.rotate()
            async with publisher.publish(PREFIX, protect=ring) as after:
                await put(await after.segment(), TOY)
                named = [
                    kvcs.PublicationNamespace.parse(each.namespace) for each in (before, after)
                ]
                async with subscriber.open(PREFIX, publication=named[0]) as cache:
                    await cache.complete()
                with pytest.raises(NotProtected) as refused:
                    await subscriber.manifest(named[1])
                assert (refused.value.check, refused.value.key_id) == ("key", newer.key_id)
                assert str(newer.key_id) in str(refused.value)
                consumer_ring.add(newer, send=False)
                for name in named:
                    async with subscriber.open(PREFIX, publication=name) as cache:
                        assert [same(layer, TOY) async for layer in cache] == [True] * LAYERS
                assert subscriber.unopened == {"key": 1}


async def test_without_keys_a_sealed_publication_says_which_lacks(files: PemFiles) -> None:
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(PREFIX, protect=KEY) as publication:
            await put(await publication.segment(), TOY)
            name = kvcs.PublicationNamespace.parse(publication.namespace)
            plain = kvcs.Subscriber(client, settings=QUICK)
            with pytest.raises(NotProtected) as refused:
                await plain.manifest(name)
            assert (refused.value.check, refused.value.key_id) == ("key", KEY.key_id)
            assert f"Key ID {KEY.key_id}" in str(refused.value)
            with pytest.raises(PublicationNotFound, match=f"Key ID {KEY.key_id}"):
                async with plain.open(PREFIX, wait=0.0):
                    pytest.fail("it was opened")


@pytest.mark.parametrize("in_thread", [False, True])
async def test_what_is_not_sealed_does_not_count_where_keys_are_given(
    files: PemFiles, monkeypatch: pytest.MonkeyPatch, in_thread: bool
) -> None:
    if in_thread:
        monkeypatch.setattr(manifests, "THREAD_OCTETS", 0)
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(PREFIX) as publication:
            await put(await publication.segment(), TOY)
            subscriber = opening(client)
            with pytest.raises(NotProtected) as refused:
                await subscriber.manifest(kvcs.PublicationNamespace.parse(publication.namespace))
            assert (refused.value.check, refused.value.key_id) == ("unprotected", None)
            assert subscriber.unopened == {"unprotected": 1}


async def test_relays_that_are_not_trusted_are_not_read_without_keys(files: PemFiles) -> None:
    async with serving(files) as server:
        async with kvcs.Publisher(server).publish(PREFIX, protect=KEY) as publication:
            await put(await publication.segment(), TOY)
            name = kvcs.PublicationNamespace.parse(publication.namespace)
            async with connect(server.url, ca=files.ca, relays="untrusted") as session:
                plain = kvcs.Subscriber(session, settings=QUICK)
                assert [info.namespace for info in await plain.list(PREFIX)] == [name]
                for read in (plain.manifest, plain.look_at):
                    with pytest.raises(UsageError, match=r"Subscriber\(protection="):
                        await read(name)
                with pytest.raises(UsageError, match=r"Subscriber\(protection="):
                    async with plain.open(PREFIX):
                        pytest.fail("it was opened")
                async with opening(session).open(PREFIX) as cache:
                    assert [same(layer, TOY) async for layer in cache] == [True] * LAYERS


@pytest.mark.parametrize(("pad", "padding"), [(8, 5), (2, 1), (3, 0)])
async def test_padding_is_passed_over_and_hides_the_length(
    files: PemFiles, pad: int, padding: int
) -> None:
    async with serving(files) as server, joined(server, files) as client:
        publisher = kvcs.Publisher(server)
        async with publisher.publish(PREFIX, protect=KEY, pad_blocks=pad) as publication:
            segment = await publication.segment()
            await put(segment, TOY)
            assert segment.padding_blocks == padding
            assert publication.progress.objects == 2 * LAYERS * (segment.blocks + padding)
            for options in ({}, {"retrieve": "fetch"}, {"blocks": 2, "retrieve": "fetch"}):
                async with opening(client).open(PREFIX, **options) as cache:
                    blocks = options.get("blocks", segment.blocks)
                    assert [same(layer, TOY, blocks) async for layer in cache] == [True] * LAYERS
                    report = cache.report
                    assert (report.rejected, report.refetches) == ({}, 0)
                    [entry] = cache.manifest.segments
                    assert (entry.blocks, entry.padding_blocks) == (segment.blocks, padding)


async def test_padding_that_would_hide_nothing_is_refused(files: PemFiles) -> None:
    async with serving(files) as server:
        publisher = kvcs.Publisher(server)
        for options, why in (
            ({"pad_blocks": 4}, "hides nothing"),
            ({"pad_blocks": 0, "protect": KEY}, "must lie in"),
        ):
            with pytest.raises(UsageError, match=why):
                async with publisher.publish(PREFIX, **options):
                    pytest.fail("it was published")

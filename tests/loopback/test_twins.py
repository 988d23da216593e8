"""Blocks of another publication of the prefix: taken where both say "deterministic", never else."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvcs
from kvcs.fallback import HttpServer, HttpSource
from kvcs.kv import Component, Manifest, ManifestWriter, parse_manifest
from kvcs.kv.tracks import DataTrack, PublicationNamespace
from kvcs.quic.endpoint import Server
from kvcs.subscriber.authenticity import Authenticity
from kvcs.subscriber.others import Others, are_twins, same_segment, twins
from tests.builders import BRIEF, QUICK, Toy, put, same, toy_descriptor, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.http_fixtures import save
from tests.loopback.kv_fixtures import SESSION, joined, serving
from tests.loopback.raw_publication import V0, RawPublication

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def said(toy: Toy, deterministic: bool) -> bytes:
    """The toy's manifest, with that word in it."""
    octets = toy.writer().to_json_bytes()
    assert b'"deterministic":false' in octets
    return (
        octets.replace(b'"deterministic":false', b'"deterministic":true')
        if deterministic
        else octets
    )


def lacking(toy: Toy, deterministic: bool) -> RawPublication:
    """A publication of which one block will be nowhere, so far its first layer."""
    raw = RawPublication(toy, publication_id=bytes([7] * 16))
    raw.manifest(said(toy, deterministic))
    raw.layer(0)
    return raw


def go_on(raw: RawPublication) -> None:
    """Publish the rest, in which the block lacks."""
    for layer in (1, 2, 3):
        gone = {(V0, 1): None} if layer == 2 else {}
        raw.layer(layer, live=gone, stored=gone)
    raw.end()


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("theirs", [True, False])
async def test_over_http(tmp_path: Path, files: PemFiles, ours: bool, theirs: bool) -> None:
    toy = toy_publication()
    raw = lacking(toy, ours)
    await save(tmp_path, toy, deterministic=theirs)
    async with (
        raw.serve(files) as server,
        joined(server, files) as client,
        HttpServer(tmp_path, port=0, authority=None) as http,
    ):
        both = ours and theirs
        subscriber = kvcs.Subscriber(
            client, fallback=HttpSource(http.url), settings=QUICK if both else BRIEF
        )
        async with subscriber.open(toy_prefix(), publication=_named(raw)) as cache:
            assert same(await cache.layer(0), toy)  # from here on no segment can be taken whole
            go_on(raw)
            if both:
                got = [layer async for layer in cache]
                assert [layer.index for layer in got] == [0, 1, 2, 3]
                assert all(same(layer, toy) for layer in got)
                assert cache.report.fetched_over_http == 1
                return
            with pytest.raises(kvcs.CacheIncomplete) as caught:
                await cache.layer(2)
            [missing] = caught.value.missing
            assert (missing.component, missing.layer, missing.first_block) == ("v", 2, 1)
            assert cache.report.fetched_over_http == 0


async def test_over_another_session(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    raw = lacking(toy, True)
    async with (
        raw.serve(files) as server,
        serving(files) as other,
        kvcs.Publisher(other).publish(prefix, deterministic=True) as publication,
    ):
        await put(await publication.segment(), toy)
        async with joined(server, files) as first, joined(other, files) as second:
            subscriber = kvcs.Subscriber(first, second, settings=QUICK)
            async with subscriber.open(prefix, publication=_named(raw)) as cache:
                assert same(await cache.layer(0), toy)
                go_on(raw)
                got = [layer async for layer in cache]
                assert [layer.index for layer in got] == [0, 1, 2, 3]
                assert all(same(layer, toy) for layer in got)
                assert cache.namespace == raw.namespace
                assert cache.report.from_other_publications == 1
                assert cache.report.segments_from == {}


def _named(raw: RawPublication) -> kvcs.PublicationNamespace:
    return kvcs.PublicationNamespace.parse(raw.namespace)


def test_segments_have_to_be_the_same() -> None:
    one, two = toy_publication((3,)), toy_publication((2, 1))
    first, second = (parse_manifest(said(toy, True)) for toy in (one, two))
    assert are_twins(first, first)
    assert not are_twins(first, second)
    assert not are_twins(second, first)
    assert not are_twins(first, parse_manifest(said(one, False)))
    joint = toy_publication((3,), components=[Component.KV])  # the same blocks, in other tracks
    assert not are_twins(first, parse_manifest(said(joint, True)))


def test_a_segment_that_is_still_produced_stands_for_none() -> None:
    toy = toy_publication()
    whole, part = (parse_manifest(toy.writer([layers]).to_json_bytes()) for layers in (4, 3))
    assert same_segment(part, whole, 0)
    assert not same_segment(whole, part, 0)
    assert not same_segment(whole, whole, 1)


async def test_a_twin_that_goes_on_otherwise_is_none_any_more(tmp_path: Path) -> None:
    # The same first segment, a system prompt say, may be continued by another conversation.
    toy, publisher = toy_publication(), kvcs.Publisher(Server(SESSION))
    async with publisher.publish(
        toy_prefix(), deterministic=True, first_segment_blocks=2
    ) as publication:
        for part in (slice(0, 8), slice(8, 12)):
            segment = await publication.segment()
            for layer in range(4):
                await segment.put(layer, toy.k[layer, part], toy.v[layer, part])
        await publication.save(tmp_path)
    ours = kvcs.Prefix(toy_prefix().scope, toy_descriptor(), [*range(8), 50, 51, 52, 53])
    others = Others(ours, QUICK, Authenticity())
    named = PublicationNamespace.parse(ours.namespace(bytes(16), 2))

    def manifest(prefix: kvcs.Prefix, *segments: int) -> Manifest:
        writer = ManifestWriter(prefix.compat, layers=4, block_tokens=4, deterministic=True)
        for number, blocks in enumerate(segments):
            keys = prefix.block_keys_digest(writer.blocks, blocks)
            names = [DataTrack.parse(f"{part}.raw.s{number}") for part in "kv"]
            writer.add_segment(blocks, keys, names)
        return parse_manifest(writer.to_json_bytes())

    async with (
        HttpServer(tmp_path, port=0, authority=None) as http,
        HttpSource(http.url) as source,
    ):
        found = await others.at(source, named)
        assert len(twins(manifest(ours, 2), found)) == 1
        assert twins(manifest(ours, 2, 1), found) == []
        assert len(twins(manifest(toy_prefix(), 2, 1), found)) == 1

"""What a Publisher keeps, where, and what makes room for the next publication."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import kvcs
from tests.builders import (
    QUICK,
    put,
    same,
    tensors,
    toy_prefix,
    toy_publication,
)
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import joined, serving
from tests.loopback.test_publisher import BOOKKEEPING, layers_of

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LAYER_OCTETS = 2 * 3 * 128
"""Tensor octets of one layer of the toy."""


async def test_a_full_store_is_said_at_once_and_nothing_is_half_published(
    files: PemFiles,
) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    octets = 2 * (LAYER_OCTETS + BOOKKEEPING)
    settings = kvcs.PublisherSettings(store_octets=octets)
    async with serving(files) as server:
        publisher = kvcs.Publisher(server, settings=settings)
        with pytest.raises(kvcs.StoreFull, match="raise the store's limit"):
            async with publisher.publish(prefix) as publication:
                segment = await publication.segment()
                await put(segment, toy, range(2))
                try:
                    await segment.put(2, *tensors(toy, 2))
                finally:
                    assert publisher.held_octets == octets
                    assert publication.progress.layers == 2
        assert publisher.held_octets == 0
        assert publication.aborted == "the producer failed (StoreFull)"


async def test_copies_beyond_the_store_go_to_the_spill_folder(
    files: PemFiles, tmp_path: Path
) -> None:
    toy = toy_publication(layers=8, head_dim=64, block_tokens=64)
    prefix = toy_prefix(descriptor=toy.descriptor)
    layer_octets = toy.k[0].nbytes + toy.v[0].nbytes
    # Room for the copies of three layers, and for the bookkeeping of all eight.
    settings = kvcs.PublisherSettings(store_octets=4 * layer_octets, spill=tmp_path)
    async with serving(files) as server, joined(server, files) as client:
        publisher = kvcs.Publisher(server, settings=settings)
        async with publisher.publish(prefix) as publication:
            await put(await publication.segment(), toy)
            assert 3 * layer_octets < publisher.held_octets <= settings.store_octets
            assert os.listdir(tmp_path) == []  # nothing to clean up, whatever happens
            assert all(same(layer, toy) for layer in await layers_of(client, prefix))
        assert publisher.held_octets == 0


async def test_a_full_spill_folder_makes_finished_publications_leave(
    files: PemFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, offset: int, octets: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    toy, prefix = toy_publication(), toy_prefix()
    octets = 5 * (LAYER_OCTETS + BOOKKEEPING)
    settings = kvcs.PublisherSettings(store_octets=octets, spill=tmp_path)
    async with serving(files) as server:
        publisher = kvcs.Publisher(server, settings=settings)
        async with publisher.publish(prefix) as first:
            await put(await first.segment(), toy)
            monkeypatch.setattr(os, "posix_fallocate", full)
            async with publisher.publish(prefix) as second:
                segment = await second.segment()
                await put(segment, toy, range(1))
                assert first.is_open
                await put(segment, toy, range(1, 4))
                assert list(publisher.publications) == [second]
        settings = kvcs.PublisherSettings(store_octets=2 * BOOKKEEPING, spill=tmp_path)
        publisher = kvcs.Publisher(server, settings=settings)
        with pytest.raises(kvcs.StoreFull, match="nor the spill folder: No space left on device"):
            async with publisher.publish(prefix) as third:
                segment = await third.segment()
                await segment.put(0, *tensors(toy, 0), lend=True)
                await put(segment, toy, [1])
    assert publisher.held_octets == 0


async def test_a_spill_folder_that_cannot_be_written_is_refused(
    files: PemFiles, tmp_path: Path
) -> None:
    async with serving(files) as server:
        for wrong in (tmp_path / "absent", files.cert):
            settings = kvcs.PublisherSettings(spill=wrong)
            with pytest.raises(kvcs.UsageError, match="cannot be written"):
                kvcs.Publisher(server, settings=settings)


async def test_the_oldest_finished_publication_makes_room(files: PemFiles) -> None:
    toys = [toy_publication(seed=seed) for seed in range(3)]
    prefixes = [
        kvcs.Prefix(toy_prefix().scope, toys[0].descriptor, range(start, start + 12))
        for start in (0, 100, 200)
    ]
    settings = kvcs.PublisherSettings(store_octets=8 * (LAYER_OCTETS + BOOKKEEPING))
    async with serving(files) as server, joined(server, files) as client:
        publisher = kvcs.Publisher(server, settings=settings)
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        async with (
            publisher.publish(prefixes[0]) as first,
            publisher.publish(prefixes[1]) as second,
        ):
            await put(await first.segment(), toys[0])
            unfinished = await second.segment()
            await put(unfinished, toys[1], range(3))
            assert [len(await subscriber.list(prefix)) for prefix in prefixes] == [1, 1, 0]
            async with publisher.publish(prefixes[2]) as third:
                segment = await third.segment()
                await put(segment, toys[2])  # the first goes; the second is not finished
                assert publisher.publications == (second, third)
                assert not first.is_open and first.aborted is None
                assert [len(await subscriber.list(prefix)) for prefix in prefixes] == [0, 1, 1]
                got = await layers_of(client, prefixes[2])
                assert all(same(layer, toys[2]) for layer in got)
            await put(unfinished, toys[1], range(3, 4))
            assert all(same(layer, toys[1]) for layer in await layers_of(client, prefixes[1]))
    assert publisher.held_octets == 0


async def test_a_manifest_that_will_be_too_large_is_refused_before_anything_is_published(
    files: PemFiles,
) -> None:
    settings = kvcs.PublisherSettings(max_manifest_octets=1500)
    async with serving(files) as server:
        publisher = kvcs.Publisher(server, settings=settings)
        with pytest.raises(kvcs.UsageError, match="use larger blocks"):
            async with publisher.publish(toy_prefix()):
                raise AssertionError("it was published")
        assert publisher.publications == ()

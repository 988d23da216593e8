"""A publication that is complete and idle serves whoever comes, one after the other."""

from __future__ import annotations

import pytest

import kvcs
from kvcs.moqt import events
from kvcs.moqt.data import FetchHeader
from kvcs.moqt.names import Location
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import Wire, joined, serving

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

TRACKS = ("k.raw.s0", "v.raw.s0")


async def test_each_gets_the_newest_manifest_from_the_fill_and_every_object_once(
    files: PemFiles,
) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    every = {Location(layer, block): 1 for layer in range(4) for block in range(3)}
    async with serving(files) as server:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            await put(await publication.segment(), toy)
            published = publication.progress
            for _ in range(3):
                wire = Wire()
                async with joined(server, files, wire) as client:
                    async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                        assert cache.manifest.complete  # nobody waits for a new version
                        assert all([same(layer, toy) async for layer in cache])
                assert [wire.objects(name) for name in TRACKS] == [every, every]
                assert sum(wire.objects("manifest").values()) == 1
                opened = [event.header for event in wire.of(events.DataStreamOpened)]
                assert all(isinstance(header, FetchHeader) for header in opened)
                report = cache.report
                assert (report.manifest_versions, report.duplicates, report.refetches) == (1, 0, 0)
            assert publication.progress == published  # the publisher did nothing for it

"""Retrieval of what is there already: selections, filters, named publications, shared sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import kvcs
from kvcs.moqt.filters import LocationFilter, RangeFilter
from kvcs.moqt.names import GroupOrder, Location
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import Server
from tests.builders import BRIEF, QUICK, Toy, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import SESSION, Wire, joined, serving, with_session
from tests.loopback.raw_publication import RawPublication
from tests.loopback.retrieving import meeting
from tests.virtual import virtual

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@dataclass
class Published:
    """A complete publication of a toy with 8 layers, and a session with its server."""

    toy: Toy
    prefix: kvcs.Prefix
    server: Server
    publication: kvcs.Publication
    client: Connection
    wire: Wire

    def open(self, **options: Any) -> Any:
        """Open it on the session."""
        subscriber = kvcs.Subscriber(self.client, settings=QUICK)
        return subscriber.open(self.prefix, **options)

    def asked(self) -> dict[str, Parameters]:
        """Parameters of each FETCH, by track."""
        return {
            name.name.decode(): parameters
            for kind, name, parameters in self.wire.asked
            if kind == "fetch"
        }


@asynccontextmanager
async def published(
    files: PemFiles, session: kvcs.SessionSettings = SESSION
) -> AsyncIterator[Published]:
    """Publish the toy, whole, and connect to its server."""
    toy, wire = toy_publication(layers=8), Wire()
    prefix = toy_prefix(descriptor=toy.descriptor)
    async with (
        serving(files, session=session) as server,
        kvcs.Publisher(server).publish(prefix) as publication,
    ):
        await put(await publication.segment(), toy)
        async with joined(server, files, wire) as client:
            yield Published(toy, prefix, server, publication, client, wire)


def places(layers: range, blocks: int) -> dict[Location, int]:
    """Each Object of some layers and blocks, once."""
    return {Location(layer, block): 1 for layer in layers for block in range(blocks)}


# Selections


async def test_some_layers_are_one_fetch_a_track(files: PemFiles) -> None:
    async with published(files) as it:
        async with it.open(layers=(2, 5)) as cache:
            got = [layer async for layer in cache]
            assert [layer.index for layer in got] == [2, 3, 4, 5]
            assert all(same(layer, it.toy) for layer in got)
        asked = it.asked()
        assert sorted(asked) == ["k.raw.s0", "v.raw.s0"]
        for name, parameters in asked.items():
            chosen = parameters.get(ParameterType.LOCATION_FILTER)
            assert chosen == LocationFilter.group_end(2, 0, 5)
            assert parameters.get(ParameterType.GROUP_ORDER) == GroupOrder.ASCENDING
            assert ParameterType.OBJECTID_FILTER not in parameters
            assert it.wire.objects(name) == places(range(2, 6), 3)
        assert (cache.report.objects, cache.report.refetches) == (24, 0)


async def test_some_blocks_are_filtered_by_the_publisher(files: PemFiles) -> None:
    async with published(files) as it:
        async with it.open(layers=(1, 2), blocks=2) as cache:
            got = [layer async for layer in cache]
            assert all(same(layer, it.toy, blocks=2) for layer in got)
            assert [layer.k.shape for layer in got] == [(8, 2, 8)] * 2
            assert cache.usable_tokens == 8
        for name, parameters in it.asked().items():
            (chosen,) = parameters.all(ParameterType.OBJECTID_FILTER)
            assert chosen == RangeFilter(0, ((0, 1),))
            assert it.wire.objects(name) == places(range(1, 3), 2)
        assert cache.report.objects == 8


async def test_some_blocks_are_dropped_here_where_the_publisher_cannot_filter(
    files: PemFiles,
) -> None:
    async with published(files, with_session(max_filter_ranges=0)) as it:
        async with it.open(blocks=1) as cache:
            got = [layer async for layer in cache]
            assert len(got) == 8 and all(same(layer, it.toy, blocks=1) for layer in got)
        for name, parameters in it.asked().items():
            assert ParameterType.OBJECTID_FILTER not in parameters
            assert it.wire.objects(name) == places(range(8), 3)
        report = cache.report
        assert (report.objects, report.duplicates, report.rejected) == (16, 0, {})


@pytest.mark.parametrize("how", ["fetch", "subscribe"])
async def test_the_caller_may_say_how(files: PemFiles, how: str) -> None:
    async with published(files) as it:
        async with it.open(retrieve=how, layers=(3, 3)) as cache:
            assert all([same(layer, it.toy) async for layer in cache])
        other = "subscribe" if how == "fetch" else "fetch"
        assert it.wire.tracks(how)[-2:] == ["k.raw.s0", "v.raw.s0"]
        assert "k.raw.s0" not in it.wire.tracks(other)
        assert cache.report.objects == 6


@virtual
async def test_a_fetch_of_what_is_unfinished_names_what_lacks() -> None:
    raw = RawPublication(toy_publication())
    raw.layers(0, 1)
    raw.manifest(layers=2)
    async with meeting(raw) as (_, client):
        opening = kvcs.Subscriber(client, settings=BRIEF).open(toy_prefix(), retrieve="fetch")
        async with opening as cache:
            assert same(await cache.layer(1), raw.toy)
            with pytest.raises(kvcs.CacheIncomplete, match="the Largest Object is 1/3") as caught:
                await cache.complete()
            assert {run.layer for run in caught.value.missing} == {2, 3}
            assert same(await cache.layer(0), raw.toy)


# Named publications


async def test_a_publication_can_be_named_in_every_form(files: PemFiles) -> None:
    async with published(files) as it:
        (info,) = await kvcs.Subscriber(it.client, settings=QUICK).list(it.prefix)
        uri = it.publication.uri(it.server.url)
        assert uri.startswith(f"{it.server.url}#kvcs:") or "#kvcs:" in uri
        for name in (uri, info.namespace, info):
            async with it.open(publication=name) as cache:
                assert all([same(layer, it.toy) async for layer in cache])
                assert cache.namespace == it.publication.namespace
                assert cache.report.publication.publication_id == it.publication.publication_id


async def test_a_named_publication_is_taken_from_the_session_that_has_it(
    files: PemFiles,
) -> None:
    async with published(files) as it, serving(files) as empty, joined(empty, files) as other:
        uri = it.publication.uri(it.server.url)
        for sessions in ((other, it.client), (it.client, other)):
            subscriber = kvcs.Subscriber(*sessions, settings=QUICK)
            async with subscriber.open(it.prefix, publication=uri) as cache:
                assert all([same(layer, it.toy) async for layer in cache])
        with pytest.raises(kvcs.RequestError) as caught:
            async with kvcs.Subscriber(other).open(it.prefix, publication=uri):
                raise AssertionError("it was opened")
        assert caught.value.code == 0x10


# One session, several users


async def test_two_retrievals_share_a_session(files: PemFiles) -> None:
    async with published(files) as it:

        async def read(**options: Any) -> int:
            async with it.open(**options) as cache:
                return sum([same(layer, it.toy) async for layer in cache])

        asked = (read(), read(), read(layers=(0, 3)), read(retrieve="fetch"))
        assert list(await asyncio.gather(*asked)) == [8, 8, 4, 8]
        assert it.wire.objects("k.raw.s0")[Location(0, 0)] == 4


async def test_one_session_can_publish_and_retrieve(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        async with (
            kvcs.Publisher(server).publish(prefix) as down,
            kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache,
        ):
            await put(await down.segment(), toy)
            assert all([same(layer, toy) async for layer in cache])
        # The client's own publications are offered to the server on the same session.
        with pytest.raises(kvcs.RequestError, match="not interested"):
            async with kvcs.Publisher(client).publish(prefix):
                raise AssertionError("a server that takes no publications took one")

"""Finding publications: which is taken, who shares a watch, and absent told from unknown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

import kvcs
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.quic.connection import Connection, PeerRequest
from kvcs.quic.endpoint import Observer
from tests.builders import QUICK, put, same, toy_descriptor, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import accepting, joined, serving
from tests.loopback.raw_publication import RawPublication

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def counting(asked: list[tuple[bytes, ...]], ended: list[int]) -> Observer:
    """An observer of a server that notes namespace subscriptions and their ends."""

    def observe(connection: Connection, event: events.Event) -> None:
        if isinstance(event, events.SubscribeNamespaceReceived):
            asked.append(event.track_namespace_prefix)
        elif isinstance(event, events.RequestCancelled):
            ended.append(event.request_id)

    return observe


def later_prefix(start: int = 100) -> kvcs.Prefix:
    """Another prefix of the same scope."""
    ours = toy_prefix()
    return kvcs.Prefix(ours.scope, ours.descriptor, range(start, start + 12))


# Listing


async def test_publications_are_listed_for_a_prefix_and_for_a_scope(files: PemFiles) -> None:
    prefix, other = toy_prefix(), later_prefix()
    async with serving(files) as server, joined(server, files) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        publisher = kvcs.Publisher(server)
        assert await subscriber.list(prefix) == []
        async with AsyncExitStack() as stack:
            made = []
            for wanted in (prefix, prefix, other):
                publication = await stack.enter_async_context(publisher.publish(wanted))
                await put(await publication.segment(), toy_publication())
                made.append(publication)
            ids = [publication.publication_id for publication in made]
            for of, expected in ((prefix, ids[:2]), (other, ids[2:]), (prefix.scope_id, ids)):
                found = await subscriber.list(of)
                assert sorted(info.namespace.publication_id for info in found) == sorted(expected)
                assert {info.peer for info in found} == {client.peer}
            assert await subscriber.list(bytes(16)) == []
        assert await subscriber.list(prefix.scope_id) == []  # left, so withdrawn


async def test_namespaces_that_are_no_publications_are_not_listed(files: PemFiles) -> None:
    prefix = toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        server.origin.offer_namespace((*prefix.namespace_prefix(), b"short"))
        server.origin.offer_namespace((*prefix.namespace_prefix(), bytes(16), b"six"))
        assert await kvcs.Subscriber(client, settings=QUICK).list(prefix) == []


@pytest.mark.parametrize("wrong", [b"", bytes(15), bytes(32)])
async def test_a_scope_id_has_sixteen_octets(files: PemFiles, wrong: bytes) -> None:
    async with serving(files) as server, joined(server, files) as client:
        with pytest.raises(kvcs.UsageError, match="16 octets"):
            await kvcs.Subscriber(client).list(wrong)


# Sharing


async def test_users_of_a_session_share_a_namespace_subscription(files: PemFiles) -> None:
    prefix = toy_prefix()
    asked: list[tuple[bytes, ...]] = []
    ended: list[int] = []
    async with serving(files, observer=counting(asked, ended)) as server:
        async with joined(server, files) as client, kvcs.Publisher(server).publish(prefix) as made:
            await put(await made.segment(), toy_publication())
            one, other = (kvcs.Subscriber(client, settings=QUICK) for _ in range(2))
            same_prefix = (one.list(prefix), other.list(prefix), one.list(prefix))
            assert all(len(found) == 1 for found in await asyncio.gather(*same_prefix))
            assert asked == [prefix.namespace_prefix()]
            # A narrower one is served by a wider one.
            wide_first = (one.list(prefix.scope_id), other.list(prefix))
            assert all(len(found) == 1 for found in await asyncio.gather(*wide_first))
            assert asked[1:] == [prefix.namespace_prefix()[:2]]
            # A wider one takes the place of a narrower one that is still in use.
            narrow_first = (other.list(prefix), one.list(prefix.scope_id))
            assert all(len(found) == 1 for found in await asyncio.gather(*narrow_first))
            assert prefix.namespace_prefix()[:2] in asked[2:]
            # Every one but the last has ended by now, and that is on its way.
            assert len(ended) >= len(asked) - 1


async def test_a_retrieval_ends_its_namespace_subscription(files: PemFiles) -> None:
    prefix, toy = toy_prefix(), toy_publication()
    asked: list[tuple[bytes, ...]] = []
    ended: list[int] = []
    async with serving(files, observer=counting(asked, ended)) as server:
        async with joined(server, files) as client, kvcs.Publisher(server).publish(prefix) as made:
            await put(await made.segment(), toy)
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                assert all([same(layer, toy) async for layer in cache])
                assert len(asked) == len(ended) == 1


# Which one is taken


async def test_the_complete_publication_is_taken_before_a_newer_one(files: PemFiles) -> None:
    prefix = toy_prefix()
    toys = [toy_publication(seed=seed) for seed in range(3)]
    async with serving(files) as server, joined(server, files) as client:
        publisher = kvcs.Publisher(server)
        async with publisher.publish(prefix) as old, publisher.publish(prefix) as whole:
            await put(await old.segment(), toys[0])
            await put(await whole.segment(), toys[1])
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                # Of two that are complete, the one that was announced last.
                assert cache.namespace == whole.namespace
            with pytest.raises(kvcs.UsageError, match="1 of 4"):
                async with publisher.publish(prefix) as fresh:
                    await put(await fresh.segment(), toys[2], range(1))
                    async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                        assert cache.namespace == whole.namespace
                        assert all([same(layer, toys[1]) async for layer in cache])


async def test_layers_of_two_publications_are_never_mixed(files: PemFiles) -> None:
    """A producer comes back under a new Publication ID; its tensors differ by noise."""
    prefix = toy_prefix()
    first, again = toy_publication(), toy_publication(seed=1)
    async with serving(files) as server, joined(server, files) as client:
        publisher = kvcs.Publisher(server)
        with pytest.raises(kvcs.UsageError):
            async with publisher.publish(prefix) as dead:
                await put(await dead.segment(), first, range(2))
                retrieval = kvcs.Subscriber(client, settings=QUICK).open(prefix)
                cache = await retrieval.__aenter__()
                assert same(await cache.layer(1), first)
        async with publisher.publish(prefix) as alive:
            await put(await alive.segment(), again)
            with pytest.raises(kvcs.PublicationAborted):
                await cache.layer(2)
            await retrieval.__aexit__(None, None, None)
            assert alive.publication_id != dead.publication_id
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as fresh:
                assert all([same(layer, again) async for layer in fresh])


async def test_a_publication_that_cannot_be_used_stands_in_nobodys_way(files: PemFiles) -> None:
    prefix, toy = toy_prefix(), toy_publication()
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            server.origin.offer_namespace(prefix.namespace(b"without manifest"))
            await put(await publication.segment(), toy)
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                assert cache.namespace == publication.namespace
                assert all([same(layer, toy) async for layer in cache])
        with pytest.raises(kvcs.PublicationNotFound, match="no usable publication") as caught:
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix, wait=0):
                raise AssertionError("it was opened")
        assert not caught.value.absent


async def test_what_was_withdrawn_is_not_taken(files: PemFiles) -> None:
    raw = RawPublication(toy_publication())
    raw.layers(0, 1, 2, 3)
    raw.manifest()
    withdrawn = asyncio.Event()

    def answer(connection: Connection, request: PeerRequest) -> bool:
        """Withdraw the publication as soon as its manifest is asked for."""
        if isinstance(request, events.SubscribeReceived) and not withdrawn.is_set():
            (listing,) = raw.asks(events.SubscribeNamespaceReceived)
            connection.core.responder.namespace_done(listing.request_id, raw.namespace[4:])
            withdrawn.set()
        return raw.answer(connection, request)

    async with serving(files, observer=accepting(answer)) as server:
        async with joined(server, files) as client:
            with pytest.raises(kvcs.PublicationNotFound, match="is announced") as caught:
                async with kvcs.Subscriber(client, settings=QUICK).open(toy_prefix(), wait=0):
                    raise AssertionError("it was opened")
            assert caught.value.absent and withdrawn.is_set()


async def test_a_publication_that_appears_later_is_found(files: PemFiles) -> None:
    prefix, toy = toy_prefix(), toy_publication()
    async with serving(files) as server, joined(server, files) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        retrieval = subscriber.open(prefix)
        opening = asyncio.create_task(retrieval.__aenter__())
        assert await subscriber.list(prefix) == []  # on the same watch: it was answered
        assert not opening.done()
        async with kvcs.Publisher(server).publish(prefix) as publication:
            await put(await publication.segment(), toy)
            cache = await opening
            assert all([same(layer, toy) async for layer in cache])
        await retrieval.__aexit__(None, None, None)


# Nothing there, or nobody knows


@pytest.mark.slow
async def test_nothing_announced_is_absent_at_once_or_at_the_deadline(files: PemFiles) -> None:
    async with serving(files) as server, joined(server, files) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        loop = asyncio.get_running_loop()
        for options, least in (
            ({"wait": 0.0}, 0.1),
            ({"deadline": 2.0}, 2.0),
            ({"deadline": 50.0, "wait": 0.2}, 0.2),
        ):
            began = loop.time()
            with pytest.raises(kvcs.PublicationNotFound, match="is announced") as caught:
                async with subscriber.open(toy_prefix(), **options):  # type: ignore[arg-type]
                    raise AssertionError("it was opened")
            assert least <= loop.time() - began < 20.0
            assert caught.value.absent


def silent(heard: list[PeerRequest], answering: asyncio.Event) -> Callable[..., bool]:
    """A peer that does not answer the first namespace subscription."""

    def answer(connection: Connection, request: PeerRequest) -> bool:
        if isinstance(request, events.SubscribeNamespaceReceived) and not answering.is_set():
            heard.append(request)
            return True
        return False

    return answer


async def test_no_answer_is_unknown_and_leaves_no_trace(files: PemFiles) -> None:
    prefix, toy = toy_prefix(), toy_publication()
    heard: list[PeerRequest] = []
    answering = asyncio.Event()
    async with serving(files, observer=accepting(silent(heard, answering))) as server:
        async with joined(server, files) as client, kvcs.Publisher(server).publish(prefix) as made:
            await put(await made.segment(), toy)
            subscriber = kvcs.Subscriber(client, settings=QUICK)
            for wait in (0.0, None):
                with pytest.raises(kvcs.PublicationNotFound, match="unknown whether") as caught:
                    async with subscriber.open(prefix, deadline=0.2, wait=wait):
                        raise AssertionError("it was opened")
                assert not caught.value.absent
            assert len(heard) == 2
            impatient = kvcs.SubscriberSettings(least_deadline=0.1)
            with pytest.raises(kvcs.PublicationNotFound, match="unknown what") as caught:
                await kvcs.Subscriber(client, settings=impatient).list(prefix)
            assert not caught.value.absent
            answering.set()
            async with subscriber.open(prefix) as cache:
                assert all([same(layer, toy) async for layer in cache])


def refusing(connection: Connection, request: PeerRequest) -> bool:
    """A relay that tells nobody what is published."""
    if not isinstance(request, events.SubscribeNamespaceReceived):
        return False
    refusal = kvcs.RequestError("not in this scope", RequestCode.UNAUTHORIZED)
    connection.core.responder.refuse(request.request_id, refusal)
    return True


async def test_a_refusal_counts_only_where_nobody_answers(files: PemFiles) -> None:
    prefix, toy = toy_prefix(), toy_publication()
    async with (
        serving(files, observer=accepting(refusing)) as closed,
        serving(files) as server,
        joined(closed, files) as refused,
        joined(server, files) as client,
        kvcs.Publisher(server).publish(prefix) as publication,
    ):
        await put(await publication.segment(), toy)
        both = kvcs.Subscriber(refused, client, settings=QUICK)
        async with both.open(prefix) as cache:
            assert all([same(layer, toy) async for layer in cache])
        assert len(await both.list(prefix)) == 1
        alone = kvcs.Subscriber(refused, settings=QUICK)
        with pytest.raises(kvcs.RequestError, match="not in this scope") as caught:
            async with alone.open(prefix):
                raise AssertionError("it was opened")
        assert caught.value.code == RequestCode.UNAUTHORIZED
        with pytest.raises(kvcs.RequestError, match="not in this scope"):
            await alone.list(prefix)


async def test_a_session_that_ends_ends_the_search(files: PemFiles) -> None:
    async with serving(files) as server, joined(server, files) as client:
        subscriber = kvcs.Subscriber(client, settings=QUICK)
        retrieval = subscriber.open(toy_prefix())
        opening = asyncio.create_task(retrieval.__aenter__())
        assert await subscriber.list(toy_prefix()) == []
        await client.close()
        with pytest.raises(kvcs.ConnectionClosed):
            await opening
        with pytest.raises(kvcs.ConnectionClosed):
            await subscriber.list(toy_prefix())
        with pytest.raises(kvcs.ConnectionClosed):
            async with subscriber.open(toy_prefix(descriptor=toy_descriptor(layers=2))):
                raise AssertionError("it was opened")

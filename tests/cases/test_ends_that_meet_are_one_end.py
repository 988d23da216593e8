"""Two ends at one moment are one end: no error, no negative gauge, one report of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

import kvcs
from kvcs.kv import Ledger
from kvcs.kv.slots import Outcome, Slot
from kvcs.quic.connection import Connection
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import joined, serving
from tests.loopback.test_lifetimes import exchange, server_side, tables

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def ends(logs: list[Any]) -> list[str]:
    return [entry["outcome"] for entry in logs if entry["event"] == "retrieval_ended"]


async def nothing_open(*connections: Connection) -> None:
    """Neither side remembers a request; no count is below zero."""
    async with asyncio.timeout(20):
        while any(name.startswith("deliveries") for each in connections for name in tables(each)):
            await exchange(connections[0])
    assert all(size > 0 for each in connections for size in tables(each).values())


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_cancelled_in_the_tick_in_which_the_last_object_is_verified(
    files: PemFiles, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    loop = asyncio.get_running_loop()
    consumer: asyncio.Task[None] | None = None
    cancelled: list[bool] = []

    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            segment = await publication.segment()

            async def consume() -> None:
                async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                    opened.set()
                    await cache.complete()

            def cancel(left: int) -> None:
                if left:
                    loop.call_soon(cancel, left - 1)
                else:
                    assert consumer is not None
                    cancelled.append(consumer.cancel())

            finish = Ledger.finish

            def finishing(self: Ledger, slot: Slot) -> Outcome:
                outcome = finish(self, slot)
                if self.whole and not cancelled:
                    cancel(turns)
                return outcome

            monkeypatch.setattr(Ledger, "finish", finishing)
            opened = asyncio.Event()
            with capture_logs() as logs:
                consumer = asyncio.create_task(consume())
                await opened.wait()
                await put(segment, toy)
                results = await asyncio.gather(consumer, return_exceptions=True)
            assert cancelled
            assert results[0] is None or isinstance(results[0], asyncio.CancelledError)
            assert len(ends(logs)) == 1
            await nothing_open(client, server_side(server))


async def test_an_error_in_the_context_and_a_close_before_it(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            await put(await publication.segment(), toy)
            with capture_logs() as logs:
                with pytest.raises(ZeroDivisionError):
                    async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                        assert same(await cache.layer(0), toy)
                        cache.close()
                        cache.close()
                        raise ZeroDivisionError
            assert len(ends(logs)) == 1
            await nothing_open(client, server_side(server))


async def test_the_session_goes_while_the_context_is_left(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            await put(await publication.segment(), toy)
            async with joined(server, files) as client:
                with capture_logs() as logs:
                    async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                        assert same(await cache.layer(3), toy)
                        await asyncio.gather(client.close(), client.close())
                    cache.close()
                assert len(ends(logs)) == 1
                assert tables(client) == {}

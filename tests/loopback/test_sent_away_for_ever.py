"""A peer that sends the same request away again and again is followed more and more slowly."""

from __future__ import annotations

import asyncio
import random

import pytest

import kvcs
from kvcs.moqt import events
from kvcs.quic.connection import Connection, PeerRequest
from kvcs.quic.reconnect import DEFAULT_RECONNECT, Moves
from tests.builders import QUICK, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import accepting, serving
from tests.loopback.moving import SAFETY, Held, linked

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SECONDS = 0.7
"""How long the peer goes on; as fast as messages cross, that were a hundred times and more."""

MOST = DEFAULT_RECONNECT.max_hops + 6
"""Requests in that time: those that are free, and a few behind pauses that double from 0.1 s."""


class Sender:
    """A peer that accepts requests, and sends each of a kind away at once."""

    def __init__(self, kind: type[PeerRequest]) -> None:
        self.kind = kind
        self.seen = 0
        self.first, self.too_many = asyncio.Event(), asyncio.Event()
        self.raw = Held(toy_publication())
        self.raw.layers(0)
        self.raw.manifest(layers=0)

    def answer(self, connection: Connection, request: PeerRequest) -> bool:
        if isinstance(request, events.PublishNamespaceReceived):
            connection.core.responder.accept(request.request_id)
        elif not self.raw.answer(connection, request):
            return False
        if isinstance(request, self.kind):
            self.seen += 1
            self.first.set()
            if self.seen > MOST:
                self.too_many.set()
            connection.goaway("", timeout=10.0, request_id=request.request_id)
        return True


@pytest.mark.parametrize(
    "kind", [events.SubscribeNamespaceReceived, events.PublishNamespaceReceived]
)
async def test_requests_that_are_sent_away_for_ever(
    files: PemFiles, kind: type[PeerRequest]
) -> None:
    sender = Sender(kind)
    async with (
        serving(files, observer=accepting(sender.answer)) as server,
        linked(server.url, files) as session,
    ):

        async def ask() -> None:
            if kind is events.PublishNamespaceReceived:
                await session.origin.add_namespace((b"x",))
                return
            subscriber = kvcs.Subscriber(session, settings=QUICK)
            async with subscriber.open(toy_prefix(), deadline=3 * SAFETY) as cache:
                async for _ in cache:
                    pass

        asking = asyncio.create_task(ask())
        async with asyncio.timeout(SAFETY):
            await sender.first.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SECONDS):
                await sender.too_many.wait()
        asking.cancel()
        await asyncio.wait((asking,))


def test_moves_that_are_far_apart_are_free() -> None:
    moves, chance = Moves(), random.Random(1)
    assert [moves.pause(0.0, chance) for _ in range(DEFAULT_RECONNECT.max_hops)] == [0.0] * 4
    pauses = [moves.pause(1.0, chance) for _ in range(20)]
    assert all(0 < pause <= DEFAULT_RECONNECT.max_pause for pause in pauses)
    assert pauses[-1] >= DEFAULT_RECONNECT.max_pause / 2
    assert moves.pause(1.0 + DEFAULT_RECONNECT.settled, chance) == 0.0

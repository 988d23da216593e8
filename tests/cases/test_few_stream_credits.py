"""A peer that grants four streams at a time gets six hundred, and others beside them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

import kvcs
from kvcs.moqt.events import DataStreamEnded, DataStreamOpened, RequestAccepted
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import Wire, joined, serving

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LAYERS = 300
PATIENT = replace(QUICK, quiet=60.0)
"""Nothing comes for a long time, and nothing is lost."""

STREAMS = 4
FEW = kvcs.QuicSettings(uni_streams=1 + STREAMS)
"""One for control, and four for data."""


def most_open(wire: Wire) -> int:
    """The largest number of data streams that were open at a time."""
    open_now = most = 0
    for event in wire.events:
        open_now += isinstance(event, DataStreamOpened) - isinstance(event, DataStreamEnded)
        most = max(most, open_now)
    return most


async def test_all_arrive_four_at_a_time_and_a_small_publication_is_not_stuck(
    files: PemFiles,
) -> None:
    toy, small = toy_publication(layers=LAYERS), toy_publication()
    prefix, small_prefix = toy_prefix(descriptor=toy.descriptor), toy_prefix()
    wire = Wire()
    async with serving(files) as server, joined(server, files, wire, quic=FEW) as client:
        publisher, subscriber = kvcs.Publisher(server), kvcs.Subscriber(client, settings=PATIENT)
        async with publisher.publish(prefix) as large, publisher.publish(small_prefix) as other:
            await put(await other.segment(), small)
            async with subscriber.open(prefix, deadline=60) as cache:
                await wire.until(lambda: len(wire.of(RequestAccepted)) >= 4)
                (connection,) = server.connections
                transport: Any = connection.transport
                octets, transport.octets = transport.octets, lambda: 0
                await put(await large.segment(), toy)
                accepted = len(wire.of(RequestAccepted))
                opening = asyncio.create_task(first_of(subscriber, small_prefix, small, cache))
                await wire.until(lambda: len(wire.of(RequestAccepted)) > accepted + 1)
                transport.octets = octets
                connection.batch_received()
                assert await opening < LAYERS // 2, "the small one waited for the large one"
                assert all([same(layer, toy) async for layer in cache])
    assert wire.of(DataStreamOpened)[-1] and len(wire.of(DataStreamOpened)) > 2 * LAYERS
    assert most_open(wire) <= STREAMS


async def first_of(
    subscriber: kvcs.Subscriber, prefix: kvcs.Prefix, toy: Any, large: kvcs.Cache
) -> int:
    """Open a publication; returns how many layers of the large one were whole by then."""
    async with subscriber.open(prefix, deadline=60) as cache:
        whole = large.progress.layers_ready
        assert all([same(layer, toy) async for layer in cache])
        return whole

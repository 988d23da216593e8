"""The address of a client changes in the middle of layer 1, as behind a NAT that forgot it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import kvcs
from kvcs.kv import UNPINNED
from kvcs.quic.endpoint import open_connection
from tests.builders import QUICK
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import HOST, Wire
from tests.loopback.shim import Shim

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LAYERS, BLOCKS, TOKENS = 3, 16, 16
DESCRIPTOR = kvcs.Descriptor(
    model="toy",
    weights=UNPINNED,
    layers=LAYERS,
    kv_heads=8,
    head_dim=128,
    dtype="float16",
    block_tokens=TOKENS,
)
PREFIX = kvcs.Prefix(kvcs.Scope(key=bytes(32)), DESCRIPTOR, list(range(TOKENS * BLOCKS)))
"""A layer of 1 MiB: many more datagrams than are read at a time."""

OFTEN = kvcs.QuicSettings(ping_interval=0.5)
"""Who only receives is heard from its new address with the next PING."""

K, V = "k.raw.s0", "v.raw.s0"


def tensors() -> list[tuple[np.ndarray, np.ndarray]]:
    """K and V of each layer."""
    rng = np.random.default_rng(57)
    shape = (TOKENS * BLOCKS, 8, 128)
    return [
        (rng.random(shape).astype(np.float16), rng.random(shape).astype(np.float16))
        for _ in range(LAYERS)
    ]


class Mover:
    """Loses everything from a moment on until the shim has its new port."""

    def __init__(self) -> None:
        self.due = lambda: False
        self.shim: Shim
        self.moving: asyncio.Task[None] | None = None

    def lost(self, data: bytes) -> bool:
        """Whether a datagram is lost now."""
        if self.moving is None and self.due():
            self.moving = asyncio.create_task(self.shim.move())
        return self.moving is not None and not self.moving.done()


@pytest.mark.parametrize("whose", ["consumer", "producer"])
async def test_the_transfer_goes_on_and_nothing_comes_twice(files: PemFiles, whose: str) -> None:
    layers, wire, mover = tensors(), Wire(), Mover()
    settings = kvcs.RelaySettings(cert=files.cert, key=files.key, port=0, allow_anyone=True)
    async with kvcs.Relay(settings) as relay:
        shim = mover.shim = await Shim.start(relay.port, lost=mover.lost)
        shimmed = f"moqt://{HOST}:{shim.port}"
        urls = {"producer": relay.url, "consumer": relay.url, whose: shimmed}
        consuming = await open_connection(
            urls["consumer"], ca=files.ca, observer=wire.observe, quic=OFTEN
        )
        wire.attach(consuming)
        async with (
            kvcs.connect(urls["producer"], ca=files.ca, quic=OFTEN) as producing,
            kvcs.Publisher(producing).publish(PREFIX) as publication,
            kvcs.Subscriber(consuming, settings=QUICK).open(PREFIX, deadline=50) as cache,
        ):
            segment = await publication.segment(blocks=BLOCKS)
            await segment.put(0, *layers[0])
            await cache.layer(0)
            mover.due = lambda: any(location.group == 1 for location in wire.objects(K))
            for index in (1, 2):
                await segment.put(index, *layers[index])
            segment.finish()
            seen = 0
            async for layer in cache:
                assert np.array_equal(layer.k, layers[layer.index][0])
                assert np.array_equal(layer.v, layers[layer.index][1])
                seen += 1
            assert seen == LAYERS
            assert mover.moving is not None, "it changed while layer 1 was on its way"
            await mover.moving
            assert cache.report.duplicates == 0
            for track in (K, V):
                assert set(wire.objects(track).values()) == {1}
            assert consuming.is_open and producing.is_open
        await consuming.close()
        shim.close()

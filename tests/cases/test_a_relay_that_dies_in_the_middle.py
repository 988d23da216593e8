"""A relay is killed in mid-layer and started again, empty; another one is there (case 36)."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

import kvcs
from kvcs.moqt.names import Location
from tests.builders import QUICK, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.moving import SAFETY, Held, Wires, linked, restartable, until
from tests.loopback.raw_publication import K0, V0

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

TRACKS = ("k.raw.s0", "v.raw.s0")
EVERY = {Location(layer, block) for layer in range(4) for block in range(3)}


async def test_it_goes_on_over_the_other_relay_and_then_over_the_one_that_is_back(
    files: PemFiles,
) -> None:
    raw = Held(toy_publication())
    raw.manifest(layers=0)
    wires = Wires()
    async with AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(restartable(files)) for _ in range(2)]
        # One producer at both relays, which comes back to each.
        for relay in (a, b):
            link = await stack.enter_async_context(
                linked(relay.url, files, prepare=lambda each: each.answer_with(raw.answer))
            )
            assert link.link is not None
            await link.link.origin.add_namespace(raw.namespace)
        over_b = await stack.enter_async_context(linked(b.url, files, wires))
        over_a = await stack.enter_async_context(linked(a.url, files, wires))
        subscriber = kvcs.Subscriber(over_b, over_a, settings=QUICK)
        cache = await stack.enter_async_context(subscriber.open(toy_prefix(), deadline=SAFETY))

        async def came(layer: int, block: int) -> None:
            at = Location(layer, block)
            await wires.until(lambda: all(at in wires.objects(name) for name in TRACKS))

        raw.layers(0, 1)
        await came(1, 2)
        streams = [raw.begin(name, 2, 1) for name in (K0, V0)]
        await came(2, 0)
        # Which of the two it has found first is chance; that one is killed.
        serving = cache._retrieval.connection
        lost, first, other = (over_b, b, a) if serving is over_b else (over_a, a, b)
        await first.kill()
        await until(lost, lambda: not lost.is_open)
        for stream in streams:
            stream.reset(1)
        for name in (K0, V0):
            raw.begin(name, 2, 3, first=1).finish()
        await came(2, 2)
        await first.start()
        await until(lost, lambda: lost.newest.is_usable)
        await other.kill()
        raw.layers(3)
        raw.end()
        raw.manifest()
        layers = [layer async for layer in cache]
        assert [layer.index for layer in layers] == list(range(4))
        assert all(same(layer, raw.toy) for layer in layers)
        report = cache.report
        assert (report.objects, report.duplicates, report.moves) == (24, 0, 2)
        for name in TRACKS:
            counts = wires.objects(name)
            assert set(counts) == EVERY
            # At most the one Object that was on its way came again.
            assert sum(counts.values()) <= len(EVERY) + 1

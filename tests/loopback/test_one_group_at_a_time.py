"""Servers that refuse a FETCH of several Groups as NOT_SUPPORTED: each Group is asked for alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import kvcs
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.sending.publishing import location_filter
from tests.builders import QUICK, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import Wire, joined
from tests.loopback.raw_publication import K0, V0, RawPublication

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

LAYERS = range(6)


def refusals(wire: Wire) -> int:
    """FETCHes that were refused."""
    return sum(
        event.error.error_code == RequestCode.NOT_SUPPORTED
        for event in wire.of(events.RequestRefused)
    )


def groups_asked(wire: Wire) -> Counter[tuple[str, int]]:
    """How often each layer of a track was asked for alone."""
    found: Counter[tuple[str, int]] = Counter()
    for kind, name, parameters in wire.asked:
        chosen = location_filter(parameters)
        if kind == "fetch" and chosen is not None and not chosen.end_group_delta:
            found[name.name.decode(), chosen.start_group] += 1
    return found


@pytest.mark.parametrize(
    "selection", [{"retrieve": "fetch"}, {"layers": (1, 4)}, {"layers": (1, 4), "blocks": 2}]
)
async def test_a_fetch_becomes_one_for_each_layer(
    files: PemFiles, selection: dict[str, Any]
) -> None:
    toy, wire = toy_publication(layers=len(LAYERS)), Wire()
    raw = RawPublication(toy)
    raw.one_group_alone = True
    prefix = toy_prefix(descriptor=toy.descriptor)
    async with raw.serve(files) as server, joined(server, files, wire) as client:
        raw.manifest()
        raw.layers(*LAYERS)
        raw.end()
        async with kvcs.Subscriber(client, settings=QUICK).open(prefix, **selection) as cache:
            got = [layer async for layer in cache]
            first, last = selection.get("layers", (0, len(LAYERS) - 1))
            assert [layer.index for layer in got] == list(range(first, last + 1))
            assert all(same(layer, toy, selection.get("blocks")) for layer in got)
            assert cache.report.refetches == 0  # nothing was lost
            assert cache.report.duplicates == 0
        assert refusals(wire) == 2  # once a track
        assert groups_asked(wire) == {
            (str(track), layer): 1 for track in (K0, V0) for layer in range(first, last + 1)
        }


async def test_lost_layers_are_asked_for_one_by_one(files: PemFiles) -> None:
    toy, wire = toy_publication(layers=len(LAYERS)), Wire()
    raw = RawPublication(toy)
    raw.one_group_alone = True
    prefix = toy_prefix(descriptor=toy.descriptor)
    async with raw.serve(files) as server, joined(server, files, wire) as client:
        raw.manifest()
        for layer in LAYERS:  # K comes to the live track in part alone
            lacks = {(K0, block): None for block in range(toy.blocks[0])}
            raw.layer(layer, live=lacks if layer in (1, 2, 3) else None)
        raw.end()
        async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
            got = [layer async for layer in cache]
            assert [layer.index for layer in got] == list(LAYERS)
            assert all(same(layer, toy) for layer in got)
        assert refusals(wire) == 1
        assert groups_asked(wire) == {(str(K0), layer): 1 for layer in (1, 2, 3)}

"""In which order recovery asks for what was lost: earlier layers first, over all segments."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from kvcs.errors import MissingBlocks
from kvcs.kv import Component
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.intervals import EVERYTHING
from kvcs.moqt.names import FullTrackName, GroupOrder
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.recovery import MAX_FETCHES, Recovery
from tests.builders import QUICK
from tests.unit.kv.toy import fill, toy_prefix, toy_publication

TOY = toy_publication((3, 2))
LAYER_MAJOR = [(layer, segment) for layer in range(4) for segment in range(2)]


class Asked:
    """A session and another place at once: notes what it is asked for and never answers."""

    is_open, peer, can_recompute = True, "a test", False

    def __init__(self) -> None:
        self.order: list[tuple[int, int]] = []
        """Layer and segment of each request."""
        self.group_orders: set[object] = set()
        """In which order each request wants its layers."""
        self.everything = asyncio.Event()
        self.core = SimpleNamespace(requester=SimpleNamespace(fetch=self.fetched))

    def fetched(self, name: FullTrackName, parameters: Parameters) -> int:
        self.group_orders.add(parameters.get(ParameterType.GROUP_ORDER))
        where = cast(LocationFilter, parameters.get(ParameterType.LOCATION_FILTER))
        self.order.append((where.start_group, int(name.name[-1:])))
        if len(self.order) == len(LAYER_MAJOR):
            self.everything.set()
        return len(self.order)

    def handle(self, *_: object) -> None:
        """Nothing comes."""

    def cancel(self, request_id: int) -> None:
        """Nothing was under way."""

    async def look_around(self) -> None:
        """There is no newer manifest."""

    async def fetch(self, missing: Sequence[MissingBlocks]) -> str | None:
        self.order += [(run.layer, run.segment) for run in missing]
        self.everything.set()
        return None


def recovering(asked: Asked, **members: Any) -> tuple[Recovery, Any]:
    """Recovery of a retrieval that lacks block 1 of every layer of every k track."""
    ledger = TOY.ledger()
    fill(ledger, TOY, lambda key: key[0].component is not Component.K or key[1].object != 1)
    defaults = {"sources": [], "last_means": None, "connection": asked}
    patient = SimpleNamespace(
        ledger=ledger,
        namespace=toy_prefix(5).namespace(bytes(16)),
        receiver=lambda *_, **__: None,
        **{**defaults, **members},
    )
    return Recovery(cast(Any, patient), QUICK), patient


async def test_sessions_are_asked_for_early_layers_of_every_segment_first() -> None:
    assert len(LAYER_MAJOR) <= MAX_FETCHES
    asked = Asked()
    recovery, patient = recovering(asked, sources=[asked])
    for track in reversed(patient.ledger.tracks):
        recovery.doubted(track, EVERYTHING, "a test")
    async with asyncio.timeout(20):
        await asked.everything.wait()
    recovery.stop()
    assert [layer for layer, _ in asked.order] == [layer for layer, _ in LAYER_MAJOR]
    assert sorted(asked.order) == LAYER_MAJOR
    assert asked.group_orders == {GroupOrder.ASCENDING}


async def test_other_places_are_asked_for_early_layers_of_every_segment_first() -> None:
    asked = Asked()
    recovery, patient = recovering(asked, last_means=asked)
    recovery.go_alone(reversed(patient.ledger.tracks), "a test", bounded=False)
    async with asyncio.timeout(20):
        await asked.everything.wait()
    recovery.stop()
    assert asked.order == LAYER_MAJOR

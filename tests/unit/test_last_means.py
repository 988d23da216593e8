"""What `LastMeans` asks a place for that is no session: nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

import kvcs
from kvcs.fallback.source import BlockSource, StoredBlock
from kvcs.kv import Component, DataTrack, parse_manifest
from kvcs.kv.tracks import PublicationNamespace
from kvcs.moqt.names import Location
from kvcs.subscriber.last_means import LastMeans
from kvcs.subscriber.others import Other
from tests.builders import QUICK
from tests.unit.kv.toy import K0, TOY, toy_prefix

PREFIX = toy_prefix()
OURS, *TWINS = (
    PublicationNamespace.parse(PREFIX.namespace(bytes([number] * 16))) for number in range(4)
)
MANIFEST = parse_manifest(
    TOY.writer().to_json_bytes().replace(b'"deterministic":false', b'"deterministic":true')
)

Blocks = tuple[PublicationNamespace, int, int]
"""Publication, layer and block."""


class Shelf:
    """A `BlockSource` that has K of one segment, as far as a test says; notes what is asked."""

    def __init__(self, has: Callable[[PublicationNamespace, int, int], bool]) -> None:
        self.has = has
        self.asked: list[Blocks] = []

    async def __aenter__(self) -> Shelf:
        return self

    async def __aexit__(self, *_: object) -> None:
        """It holds nothing."""

    async def payloads(
        self,
        namespace: PublicationNamespace,
        track: DataTrack,
        layer: int,
        blocks: Sequence[int],
        block_keys: Sequence[bytes],
        max_octets: int,
    ) -> AsyncIterator[StoredBlock]:
        assert list(block_keys) == [PREFIX.block_keys[block] for block in blocks]
        for block in blocks:
            await asyncio.sleep(0)  # the layers take turns
            self.asked.append((namespace, layer, block))
            if self.has(namespace, layer, block):
                yield StoredBlock(block, TOY.objects[track, Location(layer, block)], b"")


def means_of(shelf: Shelf) -> tuple[LastMeans, Any]:
    """Means of a retrieval of K, that has three deterministic twins and nothing yet."""
    ledger = TOY.ledger()
    others = [Other(namespace, MANIFEST, is_signed=False) for namespace in TWINS]

    async def at(source: BlockSource, ours: PublicationNamespace) -> list[Other]:
        return others

    means = LastMeans(cast(BlockSource, shelf), None, QUICK)
    patient = SimpleNamespace(
        ledger=ledger,
        namespace=OURS.fields,
        prefix=PREFIX,
        manifest=MANIFEST,
        may_have_twins=True,
        finder=SimpleNamespace(at=at),
        replacements=None,
        entry=lambda track: MANIFEST.segments[track.segment],
        verified=lambda: None,
    )
    means.serve(cast(Any, patient))
    return means, ledger


def lacking(ledger: Any) -> list[Any]:
    """K that is missing."""
    return [run for run in ledger.missing() if run.component == Component.K.value]


async def test_a_twin_is_asked_for_what_still_lacks_alone() -> None:
    # Ours lacks one block of two layers, the first twin one of them.
    gone = {OURS: {(1, 2), (3, 0)}, TWINS[0]: {(3, 0)}, TWINS[1]: set(), TWINS[2]: set()}
    shelf = Shelf(lambda namespace, layer, block: (layer, block) not in gone[namespace])
    means, ledger = means_of(shelf)
    assert await means.fetch(lacking(ledger)) is None
    assert not lacking(ledger)
    assert sorted(shelf.asked[:12]) == [
        (OURS, layer, block) for layer in range(4) for block in range(3)
    ]
    assert sorted(shelf.asked[12:]) == [(TWINS[0], 1, 2), (TWINS[0], 3, 0), (TWINS[1], 3, 0)]
    assert means.fetched == 12


async def test_an_error_of_one_layer_keeps_nobody_from_the_rest() -> None:
    def has(namespace: PublicationNamespace, layer: int, block: int) -> bool:
        if (namespace, layer, block) == (OURS, 0, 1):
            raise kvcs.FileError("a disk failed")
        return True

    shelf = Shelf(has)
    means, ledger = means_of(shelf)
    assert await means.fetch(lacking(ledger)) is None
    assert shelf.asked[11:] == [(TWINS[0], 0, 1), (TWINS[0], 0, 2)]
    assert not lacking(ledger)


@pytest.mark.parametrize("layer", [0, 3])
async def test_what_nobody_has_is_told_once_all_were_asked(layer: int) -> None:
    shelf = Shelf(lambda _, *at: at != (layer, 1))
    means, ledger = means_of(shelf)
    assert await means.fetch(lacking(ledger)) == f"blocks of {K0} layer {layer} are not there"
    assert shelf.asked[12:] == [(twin, layer, 1) for twin in TWINS]
    [run] = lacking(ledger)
    assert (run.layer, run.first_block, run.last_block) == (layer, 1, 1)

"""What must be true of every retrieval, whatever happened: looked at block by block."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import kvcs
from kvcs.kv import Component
from kvcs.kv.rows import VERIFIED
from kvcs.moqt.names import Location
from tests.simulation.retrievals.content import ENGINE, Context
from tests.simulation.retrievals.plan import (
    PublicationPlan,
    ReaderPlan,
    RetrievalPlan,
    RetrievalsPlan,
)

Place = tuple[int, str, int, int]
"""Segment, component, layer and block within the segment."""


def places(missing: tuple[kvcs.MissingBlocks, ...]) -> Counter[Place]:
    """A list of missing blocks, one by one."""
    return Counter(
        (run.segment, str(run.component), run.layer, block)
        for run in missing
        for block in range(run.first_block, run.last_block + 1)
    )


def lacking(cache: kvcs.Cache) -> Counter[Place]:
    """What is not there, as the ledger's own rows have it."""
    ledger: Any = cache._retrieval.ledger
    found: Counter[Place] = Counter()
    for number, part in enumerate(ledger._parts):
        for track in part.tracks:
            for layer in ledger.layers:
                row = ledger.lane(track).rows.get(layer)
                for block in range(part.wanted):
                    if row is None or row.states[block] != VERIFIED:
                        found[number, track.component.value, layer, block] += 1
    beyond = ledger.blocks - ledger.covered
    if beyond > 0:
        tracks = ledger._parts[-1].tracks
        for layer in ledger.layers:
            for track in tracks:
                for block in range(beyond):
                    found[len(ledger._parts), track.component.value, layer, block] += 1
    return found


def owed(cache: kvcs.Cache) -> int:
    """Objects that the selected blocks have in the selected layers and tracks."""
    ledger: Any = cache._retrieval.ledger
    per_layer = sum(part.wanted * len(part.tracks) for part in ledger._parts)
    return per_layer * len(cache.layers)


@dataclass(frozen=True)
class Origins:
    """Which publications a cache is of."""

    own: int
    """The one that was opened."""

    others: dict[int, int]
    """Segments that came whole from others."""

    def of(self, segment: int) -> int:
        """That of a segment."""
        return self.others.get(segment, self.own)


def wrong_blocks(context: Context, cache: kvcs.Cache, origins: Origins, shared: int) -> list[str]:
    """Blocks that count as there, and are not what was published or recomputed."""
    ledger: Any = cache._retrieval.ledger
    found = []
    rows = [
        (lane, layer, row)
        for lane in map(ledger.lane, ledger.tracks)
        for layer, row in lane.rows.items()
    ]
    for lane, layer, row in rows:
        track = lane.track
        part = ledger._parts[track.segment]
        for block, state in enumerate(row.states):
            if state != VERIFIED:
                continue
            location = Location(layer, block)
            absolute = part.first_block + block
            ours = (track, location) in ledger._supplied
            if absolute >= shared:
                found.append(f"{track} {location}: block {absolute} is of other tokens")
                continue
            variant = ENGINE if ours else context.variant(origins.of(track.segment))
            k, v = context.octets(variant, layer, absolute)
            meant = {Component.K: k, Component.V: v, Component.KV: k + v}[track.component]
            if b"".join(map(bytes, ledger._sections(lane, row, layer, block))) != meant:
                found.append(f"{track} {location}: wrong tensors")
    return found


def wrong_layer(context: Context, layer: kvcs.Layer, cache: kvcs.Cache, origins: Origins) -> bool:
    """Whether a layer that was handed out is not, block by block, what a publication or the
    caller's engine has."""
    size = context.descriptor.block_tokens
    passes = context.plan.publications[origins.own].passes
    segments = [number for number, blocks in enumerate(passes) for _ in range(blocks)]
    if len(layer.k) != cache.blocks * size or len(layer.v) != len(layer.k):
        return True
    for block in range(cache.blocks):
        if block >= len(segments):
            return True
        variants = (context.variant(origins.of(segments[block])), ENGINE)
        part = slice(block * size, (block + 1) * size)
        known = [context.octets(variant, layer.index, block) for variant in variants]
        if layer.k[part].tobytes() not in [k for k, _ in known]:
            return True
        if layer.v[part].tobytes() not in [v for _, v in known]:
            return True
    return False


def is_acceptable(publication: PublicationPlan, reader: ReaderPlan) -> bool:
    """Whether a reader may use a publication."""
    if publication.sealed is not reader.opens:
        return False
    if publication.signed:
        return reader.verifies and not reader.strange
    return not reader.required


def must_be_complete(plan: RetrievalsPlan, retrieval: RetrievalPlan) -> bool:
    """Whether nothing in the plan excuses a retrieval that does not get everything."""
    reader = plan.readers[retrieval.reader]
    if not plan.calm or not reader.sessions:
        return False
    if retrieval.leave_after is not None or retrieval.cancel_after is not None:
        return False
    if retrieval.blocks is not None:
        return False
    if retrieval.named is not None:
        found = [plan.publications[retrieval.named]]
        if found[0].passes[0] > retrieval.shared:
            return False
    else:
        found = list(plan.publications)
        if retrieval.own or all(each.passes[0] != retrieval.shared for each in found):
            return False
    return all(
        is_acceptable(each, reader) and each.end == "finish" and not each.damaged for each in found
    )


def expected_missing(
    plan: RetrievalsPlan, retrieval: RetrievalPlan, cache: kvcs.Cache, publication: int
) -> Counter[Place] | None:
    """Just what has to be missing of a cache in the end; None where the plan does not say."""
    chosen, reader = plan.publications[publication], plan.readers[retrieval.reader]
    if not plan.calm or chosen.end != "finish" or retrieval.engine is not None:
        return None
    if reader.source is not None or not reader.sessions or len(plan.publications) > 1:
        return None
    ledger: Any = cache._retrieval.ledger
    found: Counter[Place] = Counter()
    for number, part in enumerate(ledger._parts):
        encoding = chosen.encodings[0]
        joint = encoding.startswith("kv.") or plan.model.latent
        name = f"{'kv' if joint else 'k'}.{encoding.removeprefix('kv.')}.s{number}"
        for track in part.tracks:
            if str(track) != name:
                continue
            for layer, block in chosen.damaged:
                within = block - part.first_block
                if layer in ledger.layers and 0 <= within < part.wanted:
                    found[number, track.component.value, layer, within] += 1
    # A segment of which the prompt has only some blocks cannot be held to their Block Keys.
    ends = [sum(chosen.passes[: number + 1]) for number in range(len(chosen.passes))]
    if ledger.blocks > max((end for end in ends if end <= retrieval.shared), default=0):
        found.update({place: 1 for place in lacking(cache) if place[0] == len(ledger._parts)})
    return found

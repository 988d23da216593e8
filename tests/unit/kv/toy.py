"""A toy publication: 4 layers, blocks of 4 tokens, 2 heads of 8 elements, bfloat16, 3 blocks.

Its values depend on the seed alone, so two publications of one seed are bit-identical.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcs.kv import (
    HEADER_OCTETS,
    UNPINNED,
    Component,
    DataTrack,
    Descriptor,
    Ledger,
    ManifestWriter,
    Outcome,
    PayloadHeader,
    Prefix,
    Scope,
    Slot,
    build_payload,
)
from kvcs.moqt.names import Location

SCOPE = Scope(bytes(range(32)))
K0, V0 = DataTrack.parse("k.raw.s0"), DataTrack.parse("v.raw.s0")
DATA_OCTETS = 4 * 2 * 8 * 2
PAYLOAD_OCTETS = 68 + DATA_OCTETS


def toy_descriptor(**changes: Any) -> Descriptor:
    """The toy's descriptor, with members changed."""
    members: dict[str, Any] = {
        "model": "toy",
        "weights": UNPINNED,
        "layers": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "dtype": "bfloat16",
        "block_tokens": 4,
    }
    return Descriptor(**{**members, **changes})


def toy_prefix(blocks: int = 3, **options: Any) -> Prefix:
    """A prefix of token ids 0, 1, 2, ..."""
    descriptor = options.pop("descriptor", toy_descriptor())
    return Prefix(SCOPE, descriptor, range(blocks * descriptor.block_tokens), **options)


@dataclass
class Toy:
    """Everything that one publication sends."""

    descriptor: Descriptor
    k: npt.NDArray[Any]
    """[layers, tokens, heads, dim]."""
    v: npt.NDArray[Any]
    segments: list[list[DataTrack]]
    blocks: list[int]
    objects: dict[tuple[DataTrack, Location], bytes] = field(default_factory=dict)
    """Whole payloads."""
    digests: dict[tuple[DataTrack, Location], bytes] = field(default_factory=dict)

    def writer(self, layers: Sequence[int] | None = None, complete: bool = True) -> ManifestWriter:
        """A manifest that lists the first ``layers[s]`` layers of segment s, default all."""
        prefix = toy_prefix(sum(self.blocks), descriptor=self.descriptor)
        writer = ManifestWriter(
            prefix.compat,
            layers=self.descriptor.layers,
            block_tokens=self.descriptor.block_tokens,
        )
        first = 0
        for segment, (tracks, blocks) in enumerate(zip(self.segments, self.blocks, strict=True)):
            writer.add_segment(blocks, prefix.block_keys_digest(first, blocks), tracks)
            listed = self.descriptor.layers if layers is None else layers[segment]
            for track in tracks:
                for layer in range(listed):
                    locations = [Location(layer, block) for block in range(blocks)]
                    writer.add_group(track, [self.digests[track, at] for at in locations])
            if complete and listed == self.descriptor.layers:
                writer.complete(segment)
            first += blocks
        return writer

    def ledger(self, blocks: int | None = None, **options: Any) -> Ledger:
        """A ledger that selects every segment its blocks reach."""
        wanted = sum(self.blocks) if blocks is None else blocks
        ledger = Ledger(self.descriptor, blocks=wanted, **options)
        for tracks, size in zip(self.segments, self.blocks, strict=True):
            if ledger.covered < wanted:
                ledger.add_segment(tracks, size)
        return ledger


def toy_publication(
    blocks: Sequence[int] = (3,),
    *,
    components: Sequence[Component] = (Component.K, Component.V),
    codec: str = "raw",
    seed: int = 0,
    **changes: Any,
) -> Toy:
    """Compute a publication's tensors and every payload of it."""
    descriptor = toy_descriptor(**changes)
    random = np.random.default_rng(seed)
    tokens, size = sum(blocks) * descriptor.block_tokens, descriptor.block_tokens
    shape = (descriptor.layers, tokens, descriptor.kv_heads)
    k = random.standard_normal((*shape, descriptor.head_dim)).astype(descriptor.numpy_dtype)
    v = random.standard_normal((*shape, descriptor.v_head_dim)).astype(descriptor.numpy_dtype)
    segments = [[DataTrack(c, codec, number) for c in components] for number in range(len(blocks))]
    toy = Toy(descriptor, k, v, segments, list(blocks))
    first = 0
    for tracks, count in zip(segments, blocks, strict=True):
        for track in tracks:
            tensors = {Component.K: (k,), Component.V: (v,), Component.KV: (k, v)}[track.component]
            for layer in range(descriptor.layers):
                for block in range(count):
                    start = (first + block) * size
                    payload = build_payload(
                        track,
                        Location(layer, block),
                        [tensor[layer, start : start + size] for tensor in tensors],
                        first_block=first,
                        descriptor=descriptor,
                    )
                    at = track, Location(layer, block)
                    toy.objects[at] = b"".join(payload.parts())
                    toy.digests[at] = payload.header.data_digest
        first += count
    return toy


def deliver(
    ledger: Ledger, track: DataTrack, location: Location, payload: bytes, piece: int = 50
) -> Outcome | None:
    """Hand one Object to a ledger in pieces; None if the ledger does not want it."""
    slot = ledger.begin(track, location, len(payload))
    if slot is None:
        return None
    for start in range(0, len(payload), piece):
        slot.write(payload[start : start + piece])
    return slot.finish()


TOY = toy_publication()
"""The toy as it is, for tests that change nothing of it."""

AT = Location(1, 2)
"""Where the tests look: layer 1, block 2."""


def fill(
    ledger: Ledger, toy: Toy | None = None, where: Callable[[Any], bool] = lambda key: True
) -> None:
    """Deliver a toy's objects, those that ``where`` picks."""
    for key, payload in (toy or TOY).objects.items():
        if where(key):
            deliver(ledger, *key, payload)


def started(ledger: Ledger, payload: bytes, track: DataTrack = K0, at: Location = AT) -> Slot:
    """A slot that the ledger gives for one Object."""
    slot = ledger.begin(track, at, len(payload))
    assert slot is not None
    return slot


def same_place_other_bytes(payload: bytes) -> bytes:
    """Another Object for the same Location that passes every check of its own."""
    data = bytes(255 - octet for octet in payload[HEADER_OCTETS:])
    header = PayloadHeader.unpack(payload)
    digest = hashlib.sha256(data).digest()
    return replace(header, data_digest=digest).pack() + data


def taken_right(ledger: Ledger) -> bool:
    """Whether layer 1 is right once everything but the Object at `AT` is delivered."""
    fill(ledger, where=lambda key: key != (K0, AT))
    return np.array_equal(ledger.layer(1).k, TOY.k[1])

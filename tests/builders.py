"""What a Publisher and a Subscriber need of a toy model: prefix, tensors, comparisons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

import kvcs
from tests.unit.kv.toy import Toy, toy_descriptor, toy_prefix, toy_publication

__all__ = [
    "BRIEF",
    "QUICK",
    "Toy",
    "put",
    "same",
    "tensors",
    "toy_descriptor",
    "toy_prefix",
    "toy_publication",
]

QUICK = kvcs.SubscriberSettings(
    least_deadline=50.0, least_recovery=30.0, listen=0.1, stall=0.05, quiet=20.0, retry_pause=0.02
)
"""Waits short enough for tests; its bounds are for tests that should never meet them, on a machine
however busy."""

BRIEF = replace(QUICK, least_recovery=1.5)
"""For what nobody can bring: recovery gives up soon. On virtual time where all else has to be there
by then."""


def tensors(toy: Toy, layer: int, blocks: int | None = None) -> tuple[npt.NDArray[Any], ...]:
    """K and V of a layer as the producer has them: all tokens, or those of the first blocks."""
    tokens = None if blocks is None else blocks * toy.descriptor.block_tokens
    return toy.k[layer][:tokens], toy.v[layer][:tokens]


def same(layer: kvcs.Layer, toy: Toy, blocks: int | None = None) -> bool:
    """Whether a layer has exactly the producer's bits."""
    return all(
        got.dtype == meant.dtype and got.shape == meant.shape and got.tobytes() == meant.tobytes()
        for got, meant in zip((layer.k, layer.v), tensors(toy, layer.index, blocks), strict=True)
    )


async def put(segment: kvcs.Segment, toy: Toy, layers: Iterable[int] | None = None) -> None:
    """Put layers of a segment, all by default."""
    size = toy.descriptor.block_tokens
    first, tokens = segment.first_block * size, segment.tokens
    for layer in range(toy.descriptor.layers) if layers is None else layers:
        k, v = (tensor[layer][first : first + tokens] for tensor in (toy.k, toy.v))
        await segment.put(layer, np.ascontiguousarray(k), np.ascontiguousarray(v))

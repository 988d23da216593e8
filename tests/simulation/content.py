"""What a producer of a plan publishes: its identity and its tensors, from the seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import kvcs
from tests.simulation.plan import ProducerPlan

Array = npt.NDArray[Any]

SCOPE = kvcs.Scope(key=bytes(range(32)))


@dataclass(frozen=True)
class Content:
    """One producer's prefix and its layers."""

    prefix: kvcs.Prefix
    layers: list[tuple[Array, Array | None]]
    """K and V of each layer, [tokens, kv_heads, head_dim]; V is None for latent attention."""

    def holds(self, layer: kvcs.Layer, blocks: int) -> bool:
        """Whether a layer that was received is ours, octet for octet, for the first blocks."""
        tokens = blocks * self.prefix.descriptor.block_tokens
        k, v = self.layers[layer.index]
        if layer.k.tobytes() != k[:tokens].tobytes() or layer.k.shape != k[:tokens].shape:
            return False
        return v is None or layer.v.tobytes() == v[:tokens].tobytes()


def content(plan: ProducerPlan, seed: int) -> Content:
    """Make it."""
    rng = np.random.default_rng([seed, *plan.content.encode()])
    descriptor = kvcs.Descriptor(
        model="simulated",
        weights=kvcs.UNPINNED,
        layers=plan.layers,
        kv_heads=1 if plan.latent else plan.kv_heads,
        head_dim=plan.head_dim,
        v_head_dim=0 if plan.latent else None,
        dtype="float16",
        block_tokens=plan.block_tokens,
    )
    tokens = plan.blocks * plan.block_tokens
    ids = rng.integers(0, 50_000, tokens).tolist()
    shape = (tokens, descriptor.kv_heads, descriptor.head_dim)

    def tensor() -> Array:
        return rng.integers(0, 1 << 15, shape, dtype=np.uint16).view(np.float16)

    layers = [(tensor(), None if plan.latent else tensor()) for _ in range(plan.layers)]
    return Content(kvcs.Prefix(SCOPE, descriptor, ids), layers)

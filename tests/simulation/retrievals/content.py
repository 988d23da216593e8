"""What is published and recomputed: each publication's tensors differ in every block from all
others', unless both are deterministic."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import kvcs
from kvcs.kv import RAW, BlockLayout, codecs, register
from tests.simulation.retrievals.plan import RetrievalsPlan

Array = npt.NDArray[Any]

SCOPE = kvcs.Scope(key=bytes(range(32)))
ENGINE = 99
"""Stands for the caller's own engine among the variants."""

RING = kvcs.ProtectionRing([kvcs.ProtectionKey(2**32 + 7, bytes([7] * 32))])
SIGNER, STRANGER = (kvcs.SigningKey.generate() for _ in range(2))
KEYS, STRANGE_KEYS = kvcs.KeyRing([SIGNER.public]), kvcs.KeyRing([STRANGER.public])


class Squeeze:
    """A lossless codec whose Data has another length for each block: zlib."""

    name, number, lossless, in_place = "squeeze", 0xFF31, True, False

    def data_octets(self, layout: BlockLayout) -> int | None:
        """Nobody knows."""
        return None

    def encode(self, sections: Sequence[Any], layout: BlockLayout) -> list[bytes]:
        """Data of a block."""
        return [zlib.compress(b"".join(RAW.encode(sections, layout)), 1)]

    def decode(self, data: memoryview, layout: BlockLayout) -> Sequence[memoryview]:
        """Its sections."""
        plain = zlib.decompressobj().decompress(data, layout.octets)
        return RAW.decode(memoryview(plain), layout)


def with_codec() -> None:
    """Make `Squeeze` known, once."""
    if Squeeze.name not in codecs.codec_names():
        register(Squeeze())


@dataclass
class Context:
    """The tokens that a run is about, and what each publication has of them."""

    plan: RetrievalsPlan
    descriptor: kvcs.Descriptor = field(init=False)
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        model = self.plan.model
        self.descriptor = kvcs.Descriptor(
            model="simulated",
            weights=kvcs.UNPINNED,
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            v_head_dim=0 if model.latent else None,
            dtype="float16",
            block_tokens=model.block_tokens,
        )
        rng = np.random.default_rng([self.plan.seed, 1])
        count = model.blocks * model.block_tokens
        self.tokens = rng.integers(0, 50_000, count).tolist()
        shape = (2, model.layers, count, model.kv_heads, model.head_dim)
        self._bits = rng.integers(0, 1 << 14, shape, dtype=np.uint16)

    def prefix(self, shared: int, own: int = 0, seed: int = 0) -> kvcs.Prefix:
        """The first blocks of the context, and blocks of a prompt's own behind them."""
        size = self.descriptor.block_tokens
        others = np.random.default_rng([self.plan.seed, 2, seed])
        more = others.integers(50_000, 60_000, own * size).tolist()
        return kvcs.Prefix(SCOPE, self.descriptor, [*self.tokens[: shared * size], *more])

    def variant(self, publication: int) -> int:
        """Which bits a publication has: deterministic ones have the same."""
        return 0 if self.plan.publications[publication].deterministic else publication + 1

    def tensors(self, variant: int, layer: int, first: int, last: int) -> tuple[Array, Array]:
        """K and V of some tokens, [tokens, kv_heads, head_dim]."""
        k, v = (
            (self._bits[part, layer, first:last] ^ (variant * 37)).view(np.float16)
            for part in (0, 1)
        )
        return k, v[..., :0] if self.plan.model.latent else v

    def octets(self, variant: int, layer: int, block: int) -> tuple[bytes, bytes]:
        """K and V of one block, as octets."""
        size = self.descriptor.block_tokens
        k, v = self.tensors(variant, layer, block * size, (block + 1) * size)
        return k.tobytes(), v.tobytes()

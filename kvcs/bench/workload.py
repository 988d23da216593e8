"""What one run transfers: an imaginary model's KV cache, whose Objects have a chosen size."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

KV_HEADS: Final = 8
HEAD_DIM: Final = 128
DTYPE: Final = "bfloat16"
ELEMENT_OCTETS: Final = 2
TOKEN_OCTETS: Final = KV_HEADS * HEAD_DIM * ELEMENT_OCTETS
"""Octets of one token in one layer of K or V: 2 KiB."""

LAYERS: Final = 32
"""Layers where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One amount of Object data in Objects of one size."""

    data_octets: int
    """Data of one Object; a multiple of `TOKEN_OCTETS`."""

    blocks: int
    """Objects in one Group: blocks of one layer."""

    layers: int = LAYERS
    """Groups of each track."""

    components: int = 2
    """Tracks: K and V, or one joint tensor as latent attention has."""

    @classmethod
    def of(
        cls, data_octets: int, total_octets: int, *, layers: int = LAYERS, components: int = 2
    ) -> Workload:
        """As many blocks as make ``total_octets`` over all layers.

        Raises:
            ValueError: a size does not come out even.
        """
        blocks, rest = divmod(total_octets, layers * components * data_octets)
        if data_octets % TOKEN_OCTETS or rest or not blocks:
            raise ValueError(f"{total_octets} octets do not divide into Objects of {data_octets}")
        return cls(data_octets, blocks, layers, components)

    @property
    def size(self) -> str:
        """Size of an Object as part of a name."""
        return size_name(self.data_octets)

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        return self.data_octets // TOKEN_OCTETS

    @property
    def streams(self) -> int:
        """QUIC streams: one for each layer of each track."""
        return self.layers * self.components

    @property
    def stream_octets(self) -> int:
        """Object data of one stream."""
        return self.blocks * self.data_octets

    @property
    def objects(self) -> int:
        """Objects in all."""
        return self.streams * self.blocks

    @property
    def octets(self) -> int:
        """Object data in all."""
        return self.objects * self.data_octets

    def to_json(self) -> dict[str, Any]:
        """For a process of the bench."""
        return asdict(self)


def size_name(octets: int) -> str:
    """Octets as part of a name: ``32KiB``, ``1MiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if octets % unit == 0:
            return f"{octets // unit}{name}"
    return f"{octets}B"

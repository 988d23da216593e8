"""The codec "raw": Data is the sections as they lie in memory (KVCS "Object Payload")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy.typing as npt

from kvcs.kv.arrays import byte_view
from kvcs.kv.layout import BlockLayout


class RawCodec:
    """C order, little-endian; K then V for component kv. Number 1, as in the draft's example."""

    name = "raw"
    number = 1
    lossless = True
    in_place = True

    def data_octets(self, layout: BlockLayout) -> int | None:
        """Octets of all sections."""
        return layout.octets

    def encode(
        self, sections: Sequence[npt.NDArray[Any]], layout: BlockLayout
    ) -> Sequence[memoryview]:
        """Views of the arrays' bytes; nothing is copied.

        Raises:
            UsageError: an array is not C-contiguous.
        """
        return [byte_view(section) for section in sections]

    def decode(self, data: memoryview, layout: BlockLayout) -> Sequence[memoryview]:
        """Views of ``data``, one per section."""
        views, start = [], 0
        for octets in layout.section_octets:
            views.append(data[start : start + octets])
            start += octets
        return views


RAW: Final = RawCodec()

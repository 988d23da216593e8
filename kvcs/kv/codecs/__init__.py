"""Codecs of data tracks: a registry from name to 16-bit number (the "KVSP Codecs" registry)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy.typing as npt

from kvcs.errors import UsageError
from kvcs.kv.codecs.raw import RAW
from kvcs.kv.layout import BlockLayout
from kvcs.kv.strict_json import Octets
from kvcs.kv.tracks import is_codec_name

MAX_CODEC_NUMBER: Final = 2**16 - 1

__all__ = ["MAX_CODEC_NUMBER", "RAW", "Codec", "codec_names", "lookup", "register"]


class Codec(Protocol):
    """Turns the sections of one block into Data and back.

    A codec keeps no state between blocks: every Object is independently usable (KVCS "Groups").
    A lossy one may have an attribute ``error_bound``, the largest error of an element, which
    reports then name.
    """

    @property
    def name(self) -> str:
        """Codec name as in Track Names."""

    @property
    def number(self) -> int:
        """Value of the payload header's Codec field."""

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back every bit; a lossy codec is never taken unasked."""

    @property
    def in_place(self) -> bool:
        """Whether Data is the sections themselves, so that octets may land in the tensor."""

    def data_octets(self, layout: BlockLayout) -> int | None:
        """Exact Data Length for ``layout``, or None where it depends on the values."""

    def encode(self, sections: Sequence[npt.NDArray[Any]], layout: BlockLayout) -> Sequence[Octets]:
        """Data in pieces, in order; may be views of the arrays.

        Args:
            sections: one C-contiguous array per section, shaped and typed as ``layout`` says.
            layout: the block's form.
        """

    def decode(self, data: memoryview, layout: BlockLayout) -> Sequence[Octets]:
        """The octets of each section, in order.

        The caller compares their lengths with ``layout``, and treats any exception and any other
        length as a damaged Object. Must not return more octets than the layout has.
        """


_BY_NAME: dict[str, Codec] = {}
_BY_NUMBER: dict[int, Codec] = {}


def register(codec: Codec) -> None:
    """Make a codec known under its name and number.

    Raises:
        UsageError: bad name or number, or one that another codec has.
    """
    if not is_codec_name(codec.name):
        raise UsageError(f"codec name {codec.name!r} does not have the draft's syntax")
    if not 0 <= codec.number <= MAX_CODEC_NUMBER:
        raise UsageError(f"codec number {codec.number} is not 16 bits")
    if codec.name in _BY_NAME or codec.number in _BY_NUMBER:
        raise UsageError(f"codec {codec.name!r} (number {codec.number}) is already registered")
    _BY_NAME[codec.name] = codec
    _BY_NUMBER[codec.number] = codec


def lookup(name: str) -> Codec:
    """The codec of that name.

    Raises:
        UsageError: none is registered; the message lists those that are.
    """
    codec = _BY_NAME.get(name)
    if codec is None:
        raise UsageError(f"codec {name!r} is unknown here; known: {', '.join(codec_names())}")
    return codec


def codec_names() -> tuple[str, ...]:
    """Names of all registered codecs, in order of their numbers."""
    return tuple(_BY_NUMBER[number].name for number in sorted(_BY_NUMBER))


register(RAW)

"""Which data tracks a segment has: one encoding, or several side by side (KVCS "Track Names")."""

from __future__ import annotations

from collections.abc import Sequence

from kvcs.errors import UsageError
from kvcs.kv import Component, DataTrack, Descriptor, lookup

MAX_ENCODINGS = 8
"""Encodings of one publication."""

JOINT = "kv."
"""How an encoding begins whose K and V are one track."""


def check_encodings(encodings: Sequence[str]) -> tuple[str, ...]:
    """The encodings of a publication, checked.

    Args:
        encodings: names of codecs, for a k and a v track; with "kv." before it for a joint track.

    Raises:
        UsageError: none, too many, one twice, or a codec that is not registered.
    """
    found = tuple(encodings)
    if isinstance(encodings, str) or not 1 <= len(found) <= MAX_ENCODINGS:
        raise UsageError(f"encodings: expected a list of 1..{MAX_ENCODINGS}, got {encodings!r}")
    if len(set(found)) != len(found):
        raise UsageError(f"encodings: one is named twice: {', '.join(found)}")
    for encoding in found:
        lookup(encoding.removeprefix(JOINT))
    return found


def tracks_of(
    encodings: Sequence[str], descriptor: Descriptor, segment: int
) -> tuple[DataTrack, ...]:
    """The data tracks of a segment; each encoding is complete on its own.

    A model with latent attention has the joint track alone.
    """
    found: dict[DataTrack, None] = {}
    for encoding in encodings:
        codec = encoding.removeprefix(JOINT)
        joint = encoding.startswith(JOINT) or descriptor.latent
        for component in (Component.KV,) if joint else (Component.K, Component.V):
            found[DataTrack(component, codec, segment)] = None
    return tuple(found)

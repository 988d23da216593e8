"""One version of a manifest: on its way in, and read."""

from __future__ import annotations

from typing import NamedTuple

from kvcs.kv import Manifest, SignedVersion
from kvcs.moqt.objects import ObjectHeader


class Arriving:
    """One version on its way in; its length was only announced, so it grows with what comes."""

    __slots__ = ("group_id", "header", "octets")

    def __init__(self, header: ObjectHeader) -> None:
        self.group_id = header.group_id
        self.header = header
        self.octets = bytearray()

    def write(self, data: memoryview) -> None:
        """Take the next octets."""
        self.octets += data


class Parsed(NamedTuple):
    """A version that was read."""

    group_id: int
    """Its Group."""

    manifest: Manifest
    """What it says."""

    blocks: int
    """Blocks of the prefix that it covers; its own where there is no prefix."""

    signed: SignedVersion | None
    """How it was signed; None where it is not."""

    is_final: bool
    """Whether later versions can cover no more of the prefix."""

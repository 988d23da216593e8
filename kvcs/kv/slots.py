"""Where one arriving Object's octets go: in place, aside, or nowhere but into a hash.

Octets come in pieces of any size. Those of Data are copied once, into their place in the layer's
tensor, and hashed there when the last one is in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import numpy as np

from kvcs.errors import ObjectError
from kvcs.kv.arrays import byte_view
from kvcs.kv.holdings import Row
from kvcs.kv.payload import HEADER_OCTETS
from kvcs.kv.strict_json import Octets
from kvcs.kv.tracks import DataTrack
from kvcs.moqt.names import Location


class Outcome(Enum):
    """How an Object that passed every check was taken."""

    VERIFIED = "verified"
    """It is in place and counts."""

    WAITING = "waiting"
    """Signed mode: it is in place, and counts once a signed list names it."""

    DUPLICATE = "duplicate"
    """Dropped: the same octets are in place already, or another copy holds the place."""


class Sink(Protocol):
    """Takes Data octets in order."""

    def write(self, octets: Octets) -> None:
        """Take the next octets; never more in all than the payload's length allows."""

    def digest(self) -> bytes:
        """SHA-256 of what was taken."""


class Nowhere:
    """Keeps no octets: for copies of what is there already."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def write(self, octets: Octets) -> None:
        """Hash the octets."""
        self._hash.update(octets)

    def digest(self) -> bytes:
        """SHA-256 of what was taken."""
        return self._hash.digest()


class InPlace:
    """Copies octets to where they belong; hashes them there.

    Args:
        sections: writable views of the sections' octets in the layer's tensors.
    """

    def __init__(self, sections: Sequence[memoryview]) -> None:
        self._sections = [section for section in sections if len(section)]
        self._section = 0
        self._offset = 0

    def write(self, octets: Octets) -> None:
        """Copy the octets to their place."""
        while size := len(octets):
            section, start = self._sections[self._section], self._offset
            stop, end = start + size, len(section)
            if stop < end:
                section[start:stop] = octets
                self._offset = stop
                return
            self._section += 1
            self._offset = 0
            if stop == end:
                section[start:] = octets
                return
            section[start:] = octets[: end - start]
            octets = octets[end - start :]

    def leave(self) -> Nowhere:
        """Stop writing here: returns a sink that knows what was taken so far.

        Another copy of the Object is about to own the place.
        """
        elsewhere = Nowhere()
        for section in self._sections[: self._section]:
            elsewhere.write(section)
        if self._offset:
            elsewhere.write(self._sections[self._section][: self._offset])
        return elsewhere

    def digest(self) -> bytes:
        """SHA-256 of what was taken."""
        if self._section == len(self._sections) == 1:
            return hashlib.sha256(self._sections[0]).digest()
        return self.leave().digest()


class Aside:
    """Keeps octets in a buffer of their own: to be decoded, or because the place is taken.

    Args:
        octets: Data Length, checked against a limit by the caller.
    """

    def __init__(self, octets: int) -> None:
        # Not zeroed: a peer that announces much and sends little costs nothing.
        self.data = byte_view(np.empty(octets, dtype=np.uint8))
        self._taken = 0

    def write(self, octets: Octets) -> None:
        """Copy the octets into the buffer."""
        self.data[self._taken : self._taken + len(octets)] = octets
        self._taken += len(octets)

    def digest(self) -> bytes:
        """SHA-256 of what was taken."""
        return hashlib.sha256(self.data[: self._taken]).digest()


class Keeper(Protocol):
    """What a slot needs of the ledger that made it."""

    def place(self, slot: Slot, header: Octets) -> Sink:
        """Check the header, note its Data Digest in the slot, and say where Data goes.

        Raises:
            ObjectError: a field is wrong.
        """

    def finish(self, slot: Slot) -> Outcome:
        """Check the whole Object and count it."""

    def abandon(self, slot: Slot) -> None:
        """Give the slot up."""


class Slot:
    """One Object on its way in, made by `Ledger.begin`.

    `write` never raises for what a peer sent; `finish` says how it went. Every slot ends with one
    `finish` or `abandon`.
    """

    __slots__ = (
        "_header_octets",
        "_ledger",
        "digest",
        "ended",
        "error",
        "location",
        "payload_length",
        "received",
        "row",
        "sink",
        "track",
    )

    def __init__(
        self, ledger: Keeper, track: DataTrack, location: Location, payload_length: int
    ) -> None:
        self.track = track
        """Track that carries the Object."""
        self.location = location
        """Its Location."""
        self.payload_length = payload_length
        """Octets of the whole payload, as announced."""
        self.received = 0
        """Octets of the payload so far."""
        self.digest: bytes | None = None
        """Data Digest of the header, once that is in and checked."""
        self.error: ObjectError | None = None
        """First check that failed; what comes after is dropped."""
        self.sink: Sink | None = None
        """Where Data goes, once the header is checked."""
        self.row: Row | None = None
        """Where the ledger keeps the state of its block, once the header is checked."""
        self.ended = False
        """Whether it was finished or abandoned."""
        self._ledger = ledger
        self._header_octets = b""

    def write(self, octets: Octets) -> None:
        """Take the next octets of the payload, header first, in pieces of any size.

        The octets may be reused by the caller as soon as this returns.

        Args:
            octets: the octets; a view must be one of single octets.
        """
        self.received += len(octets)
        sink = self.sink
        if sink is not None and self.received <= self.payload_length:
            sink.write(octets)
        elif self.error is None and not self.ended:
            self._begin(octets)

    def _begin(self, octets: Octets) -> None:
        """Take octets up to the end of the header, or what nobody announced."""
        if self.received > self.payload_length:
            self.sink = None
            self.error = ObjectError(
                f"{self.track} {self.location}: more than the {self.payload_length} octets"
                " that were announced",
                check="length",
            )
            return
        wanted = HEADER_OCTETS - len(self._header_octets)
        header: Octets = octets
        if self._header_octets or len(octets) < wanted:
            header = self._header_octets = self._header_octets + bytes(octets[:wanted])
            if len(header) < HEADER_OCTETS:
                return
        try:
            self.sink = self._ledger.place(self, header)
        except ObjectError as exc:
            self.error = exc
            return
        if len(octets) > wanted:
            self.sink.write(octets[wanted:])

    def finish(self) -> Outcome:
        """Check the whole Object and release or drop it; see `Ledger.finish`."""
        return self._ledger.finish(self)

    def abandon(self) -> None:
        """Give the Object up, for example when its stream was reset; it is owed again."""
        self._ledger.abandon(self)

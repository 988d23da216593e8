"""Where one arriving Object's octets go: in place, aside, or nowhere but into a hash.

Octets come in pieces of any size. Those of Data are copied once, into their place in the layer's
tensor, and hashed there when the last one is in; `kvcs.kv.successions` has the way of Objects that
came in one piece.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from kvcs.errors import ObjectError
from kvcs.kv.payload import HEADER_OCTETS
from kvcs.kv.rows import Lane, Row
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


class InPieces:
    """Copies octets to where they belong, in several places; hashes them there.

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
        return self.leave().digest()

    def digest_with(self, octets: Octets) -> bytes:
        """SHA-256 of what was taken and of the next octets; they are not copied."""
        elsewhere = self.leave()
        elsewhere.write(octets)
        return elsewhere.digest()


class Keeper(Protocol):
    """What a slot needs of the ledger that made it."""

    def place(self, slot: Slot, header: Octets) -> None:
        """Check the header, note its Data Digest in the slot, and where Data goes.

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
        "is_aside",
        "lane",
        "location",
        "payload_length",
        "place",
        "received",
        "row",
        "sink",
    )

    def __init__(self, ledger: Keeper, lane: Lane, location: Location, payload_length: int) -> None:
        self.lane = lane
        """Of the track that carries the Object."""
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
        self.place: memoryview | None = None
        """Where all of Data goes, once the header is checked: into the layer's tensor, or aside.
        None where it does not go to one place."""
        self.is_aside = False
        """Whether `place` is a buffer of its own: to be decoded, or because the place is taken."""
        self.sink: Sink | None = None
        """What takes Data instead."""
        self.row: Row | None = None
        """Where the ledger keeps the state of its block, once the header is checked."""
        self.ended = False
        """Whether it was finished or abandoned."""
        self._ledger = ledger
        self._header_octets = b""

    @property
    def track(self) -> DataTrack:
        """Track that carries the Object."""
        return self.lane.track

    def write(self, octets: Octets) -> None:
        """Take the next octets of the payload, header first, in pieces of any size.

        The octets may be reused by the caller as soon as this returns.

        Args:
            octets: the octets; a view must be one of single octets.
        """
        start = self.received
        stop = self.received = start + len(octets)
        if stop > self.payload_length:
            self._refuse_excess()
        elif self.place is not None:
            self.place[start - HEADER_OCTETS : stop - HEADER_OCTETS] = octets
        elif self.sink is not None:
            self.sink.write(octets)
        elif self.error is None and not self.ended:
            self._begin(octets)

    def _begin(self, octets: Octets) -> None:
        """Take octets up to the end of the header, and what of Data comes with them."""
        wanted = HEADER_OCTETS - len(self._header_octets)
        size = len(octets)
        header: Octets = octets
        if self._header_octets or size < wanted:
            header = self._header_octets = self._header_octets + bytes(octets[:wanted])
            if len(header) < HEADER_OCTETS:
                return
        try:
            self._ledger.place(self, header)
        except ObjectError as exc:
            self.error = exc
            return
        if size > wanted:
            if self.place is not None:
                self.place[: size - wanted] = octets[wanted:]
            elif self.sink is not None:
                self.sink.write(octets[wanted:])

    def _refuse_excess(self) -> None:
        """More came than was announced."""
        if self.error is None and not self.ended:
            self.place = self.sink = None
            self.error = ObjectError(
                f"{self.track} {self.location}: more than the {self.payload_length} octets"
                " that were announced",
                check="length",
            )

    def leave(self) -> None:
        """Write to the tensors no longer: another copy of the Object is about to own the place."""
        if self.place is not None and not self.is_aside:
            nowhere = Nowhere()
            nowhere.write(self.place[: self.received - HEADER_OCTETS])
            self.place, self.sink = None, nowhere
        elif isinstance(self.sink, InPieces):
            self.sink = self.sink.leave()

    def data_digest(self) -> bytes:
        """SHA-256 of Data, all of which came."""
        if self.place is not None:
            return hashlib.sha256(self.place).digest()
        assert self.sink is not None  # Data went somewhere
        return self.sink.digest()

    def finish(self) -> Outcome:
        """Check the whole Object and release or drop it; see `Ledger.finish`."""
        return self._ledger.finish(self)

    def abandon(self) -> None:
        """Give the Object up, for example when its stream was reset; it is owed again."""
        self._ledger.abandon(self)

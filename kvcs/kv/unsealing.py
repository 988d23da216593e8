"""Sealed Objects on their way in: opened first, then checked and taken like any other.

A sealed payload shows nothing before its last octet is there and its tag was verified, so it needs
a buffer of its own. Plain logic: no I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kvcs.errors import ObjectError, UsageError
from kvcs.kv.ledger import Ledger
from kvcs.kv.memory import new_memory
from kvcs.kv.opening import Alike, Keys, Opener
from kvcs.kv.payload import HEADER_OCTETS, MAX_DATA_OCTETS
from kvcs.kv.protection import TAG_OCTETS, sealed_octets
from kvcs.kv.rows import Lane
from kvcs.kv.slots import Outcome
from kvcs.kv.strict_json import Octets
from kvcs.kv.tracks import DataTrack
from kvcs.moqt.names import FullTrackName, Location, TrackNamespace

MAX_SEALED_OCTETS: Final = 256 * 2**20
"""Octets of sealed Objects that are on their way at a time, as announced; one always may be."""

MAX_ENCRYPTED_PROPERTIES: Final = 4096
"""Octets that may follow the payload inside a sealed one, where the codec fixes its length."""

MAX_SPARE_BUFFERS: Final = 4
"""Buffers that are kept for the next sealed Objects, which most often are as long as the last."""

MAX_SPARE_OCTETS: Final = 4 * 2**20
"""Longest buffer that is kept."""

QUIET_CHECKS: Final = frozenset({"unprotected", "key", "seal"})
"""Checks whose failure must not show: to the peer it looks as if the Object had been fine."""


@dataclass(frozen=True, slots=True, eq=False)
class SealedLane:
    """What the sealed Objects of one selected track have in common."""

    lane: Lane
    """The ledger's."""

    opener: Opener
    """Opens them."""

    longest: int
    """Octets of a sealed payload at most."""


class Unsealer:
    """Opens the Objects of one publication's data tracks before a ledger takes them.

    Args:
        ledger: takes them.
        keys: the scope's protection keys.
        namespace: the publication.
        max_data_octets: largest Data of one Object; a sealed one is as much longer as sealing makes
            it.
        max_octets: see `MAX_SEALED_OCTETS`.
    """

    def __init__(
        self,
        ledger: Ledger,
        keys: Keys,
        namespace: TrackNamespace,
        *,
        max_data_octets: int = MAX_DATA_OCTETS,
        max_octets: int = MAX_SEALED_OCTETS,
    ) -> None:
        self.ledger = ledger
        """Takes what was opened."""
        self.octets = 0
        """Octets of sealed Objects on their way, as announced."""
        self._keys = keys
        self._namespace = namespace
        self._longest = sealed_octets(HEADER_OCTETS + max_data_octets)
        self._max_octets = max_octets
        self._lanes: dict[DataTrack, SealedLane] = {}
        self._arriving: OrderedDict[SealedSlot, None] = OrderedDict()
        """Those on their way, the one that got nothing for longest first."""
        self.latest: SealedSlot | None = None
        """The last of those, if it still is on its way."""
        self._spare: list[memoryview] = []
        """Buffers that nobody uses, all of one length."""
        self._spare_octets = 0
        self._plain = memoryview(b"")
        """Where an Object lies between its opening and its place; the next one overwrites it."""

    def begin(
        self,
        track: DataTrack,
        location: Location,
        payload_length: int,
        *,
        priority: int,
        immutable: bytes | None,
    ) -> SealedSlot | None:
        """Start to receive one Object with a payload.

        Where too many are on their way, those that got nothing for longest are displaced: a peer
        that announces much and sends nothing must not keep out what others send.

        Args:
            track: one of the ledger's tracks.
            location: Group ID is the layer, Object ID the block.
            payload_length: octets of the sealed payload, as announced.
            priority: its effective Publisher Priority.
            immutable: value of its IMMUTABLE_PROPERTIES; None where it has none.

        Returns:
            A slot for the octets, or None: the Object is outside the selection, drop it.

        Raises:
            ObjectError: as `Ledger.begin`. Drop it; it is counted.
        """
        return self.begin_on(
            self.lane(track), location, payload_length, priority=priority, immutable=immutable
        )

    def begin_on(
        self,
        lane: SealedLane,
        location: Location,
        payload_length: int,
        *,
        priority: int,
        immutable: bytes | None,
    ) -> SealedSlot | None:
        """As `begin`, for who has looked the track's lane up before."""
        track, longest = lane.lane.track, lane.longest
        if not (
            location.group in self.ledger.layers and location.object < lane.lane.part.wanted
        ) and not self.ledger.wants(track, location):
            return None
        try:
            if not TAG_OCTETS < payload_length <= longest:
                raise ObjectError(
                    f"{track} {location}: sealed payload of {payload_length} octets, expected"
                    f" {TAG_OCTETS + 1} to {longest}",
                    check="length",
                )
        except ObjectError as exc:
            self.ledger.counters.rejected[exc.check] += 1
            raise
        while self._arriving and self.octets + payload_length > self._max_octets:
            next(iter(self._arriving)).displace()
        slot = SealedSlot(self, lane, location, payload_length, priority, immutable)
        self.octets += payload_length
        self._arriving[slot] = None
        self.latest = slot
        return slot

    def go_on(
        self, slot: SealedSlot, first: Location, data: memoryview, stop: int, lead: int, count: int
    ) -> int:
        """End one Object and take the next ones of its layer with the same slot.

        It is what `SealedSlot.write`, `SealedSlot.finish` and `begin` do one after the other, where
        each Object that ends is sealed alike, opens, is verified, and nobody has anything of it.
        One that is all there in ``data`` is opened from there.

        Args:
            slot: takes the first Object; from then on the one that began last.
            first: Location of the second one; all sealed payloads are as long as that of the first.
            data: octets of all of them.
            stop: the first Object ends before this position.
            lead: octets between the end of one and the payload of the next.
            count: how many begin in ``data``.

        Returns:
            How many have begun; those before the last of them have ended, and of that one
            `SealedSlot.received` octets are taken: none where it is all there and has not ended
            here. Where it is 0, nothing has happened that those calls would not do.
        """
        ledger, length, (layer, block) = self.ledger, slot.payload_length, slot.location
        lane, buffer, alike = slot.lane.lane, slot.buffer, slot.alike
        count = min(count, lane.part.wanted - 1 - block)
        if buffer is None or count < 1 or slot.received + stop != length:
            return 0
        if alike is None:
            alike = slot.alike = slot.lane.opener.alike(layer, slot.priority, slot.immutable)
        # The one that begins last, too: while it lacks, the layer does not become whole.
        row = ledger.open_row(lane, layer, block, count + 1)
        if (
            row is None
            or alike is None
            or alike.octets != length - TAG_OCTETS
            or alike.octets - alike.start != lane.payload_octets
            or first != (layer, block + 1)
        ):
            return 0
        buffer[slot.received :] = data[:stop]
        room, size = self.plain(alike.octets), len(data)
        payload = room[alike.start :]
        inner = payload[HEADER_OCTETS:]
        sealed, location, end, begun = buffer, slot.location, stop, 0
        while alike.open(location[1], sealed, room) and ledger.put_whole(
            lane, row, location, payload, inner
        ):
            begun += 1
            location = Location(layer, block + begun)
            begin = end + lead
            end = begin + length
            sealed = data[begin:end]
            if end > size or begun == count:
                break
        if begun:
            ledger.count_whole(lane, row, layer, block, begun)
            slot.location, slot.received = location, 0
            if end > size:
                slot.write(sealed)
        return begun

    def heard_of(self, slot: SealedSlot) -> None:
        """Octets of a slot have come, and before them such of another one."""
        self.latest = slot
        self._arriving.move_to_end(slot)

    def leave(self, slot: SealedSlot) -> None:
        """A slot needs no room any more."""
        del self._arriving[slot]
        self.octets -= slot.payload_length
        if self.latest is slot:
            self.latest = None

    def lane(self, track: DataTrack) -> SealedLane:
        """What the Objects of a selected track have in common.

        Raises:
            UsageError: ``track`` was not selected.
        """
        found = self._lanes.get(track)
        if found is None:
            lane, longest = self.ledger.lane(track), self._longest
            if lane.payload_octets is not None:
                longest = min(
                    longest, sealed_octets(lane.payload_octets) + MAX_ENCRYPTED_PROPERTIES
                )
            opener = Opener(self._keys, FullTrackName(self._namespace, track.name))
            found = self._lanes[track] = SealedLane(lane, opener, longest)
        return found

    def buffer(self, octets: int) -> memoryview:
        """Memory for a sealed payload of so many octets."""
        if octets == self._spare_octets and self._spare:
            return self._spare.pop()
        # Not zeroed: a peer that announces much and sends little costs nothing.
        return new_memory(octets).data

    def keep(self, buffer: memoryview, octets: int) -> None:
        """Nobody uses a buffer of so many octets any more."""
        if octets != self._spare_octets:
            self._spare.clear()
            self._spare_octets = octets
        if len(self._spare) < MAX_SPARE_BUFFERS and octets <= MAX_SPARE_OCTETS:
            self._spare.append(buffer)

    def plain(self, octets: int) -> memoryview:
        """Memory for so many octets of an opened Object, until the next call."""
        plain = self._plain
        if len(plain) != octets:
            plain = new_memory(octets).data
            if octets <= MAX_SPARE_OCTETS:
                self._plain = plain
        return plain


class SealedSlot:
    """One sealed Object on its way in, made by `Unsealer.begin`.

    `write` never raises for what a peer sent; `finish` says how it went. Every slot ends with one
    `finish` or `abandon`.
    """

    __slots__ = (
        "_unsealer",
        "alike",
        "buffer",
        "displaced",
        "ended",
        "immutable",
        "lane",
        "location",
        "payload_length",
        "priority",
        "received",
    )

    def __init__(
        self,
        unsealer: Unsealer,
        lane: SealedLane,
        location: Location,
        payload_length: int,
        priority: int,
        immutable: bytes | None,
    ) -> None:
        self.lane = lane
        """Of the track that carries the Object."""
        self.location = location
        """Its Location."""
        self.priority = priority
        """Its effective Publisher Priority."""
        self.immutable = immutable
        """Value of its IMMUTABLE_PROPERTIES."""
        self.buffer: memoryview | None = unsealer.buffer(payload_length)
        """Where its octets lie until it is opened; none once it has ended."""
        self.payload_length = payload_length
        """Octets of the sealed payload, as announced."""
        self.received = 0
        """Octets of it so far."""
        self.ended = False
        """Whether it was finished, abandoned or displaced."""
        self.displaced = False
        """Whether others have its room."""
        self.alike: Alike | None = None
        """Opens Objects like it."""
        self._unsealer = unsealer

    @property
    def track(self) -> DataTrack:
        """Track that carries the Object."""
        return self.lane.lane.track

    def write(self, octets: Octets) -> None:
        """Take the next octets; what nobody announced is dropped."""
        start = self.received
        stop = self.received = start + len(octets)
        if self.buffer is not None and stop <= self.payload_length:
            self.buffer[start:stop] = octets
            if self._unsealer.latest is not self:
                self._unsealer.heard_of(self)

    def begin_next(self, location: Location) -> SealedSlot | None:
        """Start to receive the next Object of the stream, which is like this one but for its place.

        Raises:
            ObjectError: as `Unsealer.begin`.
        """
        return self._unsealer.begin_on(
            self.lane,
            location,
            self.payload_length,
            priority=self.priority,
            immutable=self.immutable,
        )

    def finish(self) -> Outcome:
        """Open the Object, and give it to the ledger; see `Ledger.finish`.

        Raises:
            ObjectError: it did not open (`QUIET_CHECKS`), failed a check of the ledger, or
                ``room``: it was displaced; it is dropped, counted and owed again.
            PublicationError: as `Ledger.finish`.
            UsageError: the slot has ended before.
        """
        if self.displaced:
            self.displaced = False
            raise ObjectError(
                f"{self.track} {self.location}: others had its room: too many sealed Objects were"
                " on their way",
                check="room",
            )
        if self.ended or self.buffer is None:
            raise UsageError(f"{self.track} {self.location}: the slot has ended")
        unsealer, lane, sealed = self._unsealer, self.lane, self.buffer
        ledger = unsealer.ledger
        self._leave()
        try:
            if self.received != self.payload_length:
                raise ObjectError(
                    f"{self.track} {self.location}: {self.received} of {self.payload_length} octets"
                    " came",
                    check="length",
                )
            payload = lane.opener.open(
                self.location,
                self.priority,
                self.immutable,
                sealed,
                unsealer.plain(self.payload_length - TAG_OCTETS),
            )
        except ObjectError as exc:
            ledger.counters.rejected[exc.check] += 1
            ledger.counters.octets += self.received
            raise
        finally:
            unsealer.keep(sealed, self.payload_length)
        outcome = ledger.take_whole(lane.lane, self.location, payload)
        if outcome is not None:
            return outcome
        slot = ledger.begin_on(lane.lane, self.location, len(payload))
        if slot is None:
            return Outcome.DUPLICATE  # it was selected when it began, and is no longer
        slot.write(payload)
        return slot.finish()

    def abandon(self) -> None:
        """Give the Object up, for example when its stream was reset; it is owed again."""
        if not self.ended:
            counters = self._unsealer.ledger.counters
            counters.abandoned += 1
            counters.octets += self.received
            self._leave()

    def displace(self) -> None:
        """Give its room to others; `finish` will tell."""
        self.displaced = True
        counters = self._unsealer.ledger.counters
        counters.rejected["room"] += 1
        counters.octets += self.received
        self._leave()

    def _leave(self) -> None:
        self.ended = True
        self.buffer = None
        self._unsealer.leave(self)

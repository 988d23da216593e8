"""The short ways of nearly every Object into its layer.

The blocks of a layer come one after the other on one stream, and the octets that end one begin the
next; sealed ones are all there when they were opened. What the ledger does step by step for each is
done here in one, where every check passes; where one does not, nothing has happened, and the steps
have to be made.
"""

from __future__ import annotations

import hashlib

from kvcs.errors import ObjectError
from kvcs.kv.payload import DIGEST_OCTETS, HEADER_OCTETS
from kvcs.kv.rows import OWED, VERIFIED, WAITING, Lane, Row
from kvcs.kv.slots import InPieces, Outcome, Slot
from kvcs.kv.substitutes import Substitutes
from kvcs.moqt.names import Location

_sha256 = hashlib.sha256
_location = tuple.__new__
"""Makes a Location without the call of its own constructor."""


class Successions(Substitutes):
    """Substitutes that take one Object after the other; arguments as for `Holdings`."""

    signed: bool

    def go_on(
        self, slot: Slot, first: Location, data: memoryview, stop: int, lead: int, count: int
    ) -> int:
        """End one Object and take the next ones of its layer with the same slot.

        It is what `Slot.write`, `Slot.finish` and `Ledger.begin` do one after the other, where
        each Object that ends is verified, nobody has anything of those that begin, and their
        headers are all there and right.

        Args:
            slot: takes the first Object; from then on the one that began last.
            first: Location of the second one; all payloads are as long as that of the first.
            data: octets of all of them.
            stop: the first Object ends before this position.
            lead: octets between the end of one and the payload of the next.
            count: how many begin in ``data``.

        Returns:
            How many have begun; those before the last of them have ended, and of that one
            `Slot.received` octets are taken. Where it is 0, nothing has happened that those calls
            would not do.
        """
        row, lane, length = slot.row, slot.lane, slot.payload_length
        layer, block = slot.location
        count = min(count, lane.part.wanted - 1 - block)
        if (
            row is None
            or slot.is_aside
            or (slot.place is None and type(slot.sink) is not InPieces)
            or slot.received + stop != length
            or length != lane.payload_octets
            or first.object != block + 1
            or row.states[block] != OWED
        ):
            return 0
        states, holders, listed = row.states, row.holders, row.listed
        for number in range(block + 1, block + 1 + count):
            if states[number] != OWED or number in holders:
                count = number - block - 1
                break
        if count < 1:
            return 0
        digest = self._fill(slot, data[:stop])
        announced, location, end, size = slot.digest, slot.location, stop, len(data)
        digests: list[bytes] = []
        while digest == announced and len(digests) < count:
            at, begin = block * DIGEST_OCTETS, end + lead
            head = begin + HEADER_OCTETS
            if head > size or (listed is not None and listed[at : at + DIGEST_OCTETS] != digest):
                break
            following = _location(Location, (layer, block + 1))
            try:
                announces = lane.check.digest(data[begin:head], following, length)
            except ObjectError:
                break
            if digests:
                self._put(slot, block, data[end - length + HEADER_OCTETS : end])
            elif slot.sink is not None:
                slot.sink.write(data[:stop])
            digests.append(digest)
            location, announced, block, end = following, announces, block + 1, begin + length
            if end > size:
                break
            # Before it is copied: it lies in the processor's cache.
            digest = _sha256(data[head:end]).digest()
        if digests:
            self._ended(slot, location, digests)
            slot.digest = announced
            # Of an Object that is all there, but has not ended here, just the header is taken.
            slot.received = HEADER_OCTETS
            if end > size:
                slot.write(data[end - length + HEADER_OCTETS :])
        return len(digests)

    @staticmethod
    def _fill(slot: Slot, octets: memoryview) -> bytes:
        """SHA-256 of a slot's Data, of which these are the last octets.

        They are put in their place where it is one; writing them once more is no harm.
        """
        place = slot.place
        if place is not None:
            place[slot.received - HEADER_OCTETS :] = octets
            return _sha256(place).digest()
        sink = slot.sink
        assert isinstance(sink, InPieces)  # whoever fills has looked
        return sink.digest_with(octets)

    def _put(self, slot: Slot, block: int, data: memoryview) -> None:
        """Copy all Data of a block of a slot's layer to its place."""
        row, size = slot.row, len(data)
        assert row is not None  # it has a place
        if slot.place is not None:
            row.places[0][block * size : (block + 1) * size] = data
        else:
            InPieces(self._sections(slot.lane, row, slot.location.group, block)).write(data)

    def _ended(self, slot: Slot, location: Location, digests: list[bytes]) -> None:
        """Count Objects of a slot's layer that are verified, and go on to the one behind them.

        Args:
            slot: takes the first of them; from then on the one at ``location``.
            location: right behind the last of them.
            digests: SHA-256 of the Data of each.
        """
        row, lane, count = slot.row, slot.lane, len(digests)
        assert row is not None  # it has a place
        layer, after = location
        block = after - count
        row.digests[block * DIGEST_OCTETS : after * DIGEST_OCTETS] = b"".join(digests)
        counters = self.counters
        if row.listed is None and self.signed:
            row.states[block:after] = bytes((WAITING,)) * count
        else:
            row.states[block:after] = bytes((VERIFIED,)) * count
            # The layer lacks the next Object, so it is not ready.
            self._verified[layer] += count
            counters.verified += count
            counters.verified_octets += count * lane.layout.octets
        counters.octets += count * slot.payload_length
        del row.holders[block]
        row.holders[after] = slot
        slot.location = location
        if slot.place is not None:
            octets = len(slot.place)
            slot.place = row.places[0][after * octets : (after + 1) * octets]
        else:
            slot.sink = InPieces(self._sections(lane, row, layer, after))

    def take_whole(self, lane: Lane, location: Location, payload: memoryview) -> Outcome | None:
        """Take an Object all of whose octets are there.

        It is what `Ledger.begin`, `Slot.write` and `Slot.finish` do one after the other, where the
        Object is not the first of its layer on the track, nobody has anything of it, and every
        check passes.

        Args:
            lane: its track's.
            location: where it came.
            payload: all of it.

        Returns:
            How it was taken; None where nothing has happened, and those calls have to be made.
        """
        layer, block = location
        row = self.open_row(lane, layer, block, 1)
        if row is None or len(payload) != lane.payload_octets:
            return None
        if not self.put_whole(lane, row, location, payload, payload[HEADER_OCTETS:]):
            return None
        self.counters.octets += len(payload)
        if row.listed is None and self.signed:
            row.states[block] = WAITING
            return Outcome.WAITING
        self._release(lane, layer, row, block)
        return Outcome.VERIFIED

    def open_row(self, lane: Lane, layer: int, block: int, count: int) -> Row | None:
        """The row of a layer that whole payloads may be put in, one place for all of Data.

        Args:
            lane: its track's.
            layer: the layer.
            block: the first of those that are to be put.
            count: how many.

        Returns:
            The row; None where it is not there yet, or somebody has or fills one of them.
        """
        row = lane.rows.get(layer)
        if (
            row is None
            or not row.places
            or any(map(len, row.places[1:]))
            or not lane.part.codec.in_place
            or layer not in self.layers
            or block + count > lane.part.wanted
        ):
            return None
        if any(row.states[block : block + count]) or (
            row.holders and any(each in row.holders for each in range(block, block + count))
        ):
            return None
        return row

    @staticmethod
    def put_whole(
        lane: Lane, row: Row, location: Location, payload: memoryview, data: memoryview
    ) -> bool:
        """Check all of a payload and put its Data in its place, which is owed; nothing is counted.

        Args:
            lane: its track's.
            row: of its layer, as `open_row` gives it.
            location: where it came.
            payload: the octets that the lane's payloads have.
            data: those of them behind the header.

        Returns:
            Whether every check passed; else nothing has happened.
        """
        try:
            announced = lane.check.digest(payload, location, len(payload))
        except ObjectError:
            return False
        # Before it is copied: it was opened a moment ago, and lies in the processor's cache.
        digest = hashlib.sha256(data).digest()
        block, octets, listed = location[1], len(data), row.listed
        at, behind = block * DIGEST_OCTETS, (block + 1) * DIGEST_OCTETS
        if digest != announced or (listed is not None and listed[at:behind] != digest):
            return False
        row.places[0][block * octets : (block + 1) * octets] = data
        row.digests[at:behind] = digest
        return True

    def count_whole(self, lane: Lane, row: Row, layer: int, block: int, count: int) -> None:
        """Count payloads that `put_whole` has put, behind which the layer lacks another one.

        Args:
            lane: their track's.
            row: of their layer.
            layer: the layer.
            block: the first of them; they follow each other.
            count: how many.
        """
        counters = self.counters
        assert lane.payload_octets is not None  # else none was put
        counters.octets += count * lane.payload_octets
        if row.listed is None and self.signed:
            row.states[block : block + count] = bytes((WAITING,)) * count
        else:
            row.states[block : block + count] = bytes((VERIFIED,)) * count
            self._verified[layer] += count
            counters.verified += count
            counters.verified_octets += count * lane.layout.octets

"""The short ways of nearly every Object into its layer.

The blocks of a layer come one after the other on one stream, and the octets that end one begin the
next; sealed ones are all there when they were opened. What the ledger does step by step for each is
done here in one, where every check passes; where one does not, nothing has happened, and the steps
have to be made.
"""

from __future__ import annotations

import hashlib

from kvcs.errors import ObjectError
from kvcs.kv.holdings import OWED, VERIFIED, WAITING, Lane, Row
from kvcs.kv.payload import DIGEST_OCTETS, HEADER_OCTETS
from kvcs.kv.slots import Outcome, Slot
from kvcs.kv.substitutes import Substitutes
from kvcs.moqt.names import Location


class Successions(Substitutes):
    """Substitutes that take one Object after the other; arguments as for `Holdings`."""

    signed: bool

    def go_on(
        self, slot: Slot, location: Location, data: memoryview, stop: int, start: int
    ) -> bool:
        """End one Object and begin the next one of its layer with the same slot.

        It is what `Slot.write`, `Slot.finish`, `Ledger.begin` and `Slot.write` do one after the
        other, where the first Object is verified, nobody has anything of the second one, and its
        header is all there and right.

        Args:
            slot: takes the first Object; from then on the second one.
            location: of the second Object, whose payload is as long as that of the first.
            data: octets of both.
            stop: the first Object ends before this position.
            start: the second one begins here, and does not end in ``data``.

        Returns:
            Whether it was so; else nothing has happened that those calls would not do.
        """
        place, row, lane, length = slot.place, slot.row, slot.lane, slot.payload_length
        layer, block = slot.location
        after = location.object
        head, size = start + HEADER_OCTETS, len(data)
        if (
            place is None
            or row is None
            or slot.is_aside
            or slot.received + stop != length
            or length != lane.payload_octets
            or after != block + 1
            or after >= lane.part.wanted
            or head > size
        ):
            return False
        states, holders, listed = row.states, row.holders, row.listed
        if states[block] != OWED or states[after] != OWED or after in holders:
            return False
        place[slot.received - HEADER_OCTETS :] = data[:stop]
        digest = hashlib.sha256(place).digest()
        at, behind = block * DIGEST_OCTETS, after * DIGEST_OCTETS
        if digest != slot.digest or (listed is not None and listed[at:behind] != digest):
            return False
        try:
            announced = lane.check.digest(data[start:head], location, length)
        except ObjectError:
            return False
        row.digests[at:behind] = digest
        counters = self.counters
        if listed is None and self.signed:
            states[block] = WAITING
        else:
            states[block] = VERIFIED
            # The layer lacks the next Object, so it is not ready.
            self._verified[layer] += 1
            counters.verified += 1
            counters.verified_octets += lane.layout.octets
        counters.octets += length
        octets = len(place)
        slot.place = place = row.places[0][after * octets : (after + 1) * octets]
        del holders[block]
        holders[after] = slot
        slot.location, slot.digest, slot.received = location, announced, size - start
        place[: size - head] = data[head:]
        return True

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

"""What one consumer is owed by one publication, what it has, and whether that is verified.

Objects come in any order, twice, cut short or damaged; the ledger holds exactly what passed every
check (KVCS "Object Payload", "Verification and Recovery"). Plain logic: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kvcs.errors import ObjectError, PublicationError, UsageError
from kvcs.kv import codecs
from kvcs.kv.arrays import byte_view
from kvcs.kv.descriptor import Descriptor
from kvcs.kv.manifest import Manifest, check_succession
from kvcs.kv.payload import (
    DIGEST_OCTETS,
    HEADER_OCTETS,
    MAX_DATA_OCTETS,
    HeaderCheck,
    check_length,
    compare_digests,
)
from kvcs.kv.rows import OWED, VERIFIED, WAITING, Lane, Part, Row, digest_at
from kvcs.kv.slots import InPieces, Nowhere, Outcome, Slot
from kvcs.kv.strict_json import Octets
from kvcs.kv.successions import Successions
from kvcs.kv.tracks import Component, DataTrack
from kvcs.moqt.names import Location

if TYPE_CHECKING:
    from kvcs.kv.unsealing import Unsealer

MAX_ASIDE_OCTETS: Final = 16 * 2**20
"""Octets of second copies that are kept while a first copy of the same Object is on its way."""


class Ledger(Successions):
    """Receives one publication's Objects into preallocated layer tensors.

    Memory is bounded by the selection: a layer's tensors are allocated when the first Object for
    them has passed its header checks, with the geometry of the consumer's own descriptor.

    Args:
        descriptor: the consumer's own.
        blocks: how many blocks of the context are wanted, from its start, over all segments.
        layers: first and last layer wanted, inclusive; all by default.
        signed: release only what an applied manifest lists; give it only manifests whose
            signature was verified.
        max_data_octets: largest Data of one Object.
        max_aside_octets: see `MAX_ASIDE_OCTETS`.

    Raises:
        UsageError: the selection is empty or out of bounds.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        *,
        blocks: int,
        layers: tuple[int, int] | None = None,
        signed: bool = False,
        max_data_octets: int = MAX_DATA_OCTETS,
        max_aside_octets: int = MAX_ASIDE_OCTETS,
    ) -> None:
        super().__init__(descriptor, blocks=blocks, layers=layers)
        self.signed = signed
        self._max_data_octets = max_data_octets
        self._max_aside_octets = max_aside_octets
        self._manifest: Manifest | None = None
        self._aside: dict[Slot, int] = {}
        self.unsealer: Unsealer | None = None

    signed: bool
    """Whether only listed Objects are released."""

    unsealer: Unsealer | None
    """Opens Objects before they are taken, where the publication has to be protected."""

    # --- what is selected and listed ---

    @property
    def manifest(self) -> Manifest | None:
        """The newest manifest that was applied."""
        return self._manifest

    @property
    def complete(self) -> bool:
        """Whether it is whole and the manifest calls every segment of the selection complete."""
        if self._manifest is None or len(self._manifest.segments) < len(self._parts):
            return False
        entries = self._manifest.segments[: len(self._parts)]
        return self.whole and all(
            entry.complete or number in self.replaced for number, entry in enumerate(entries)
        )

    @property
    def octets_here(self) -> int:
        """Tensor octets that have their place: verified, supplied, or waiting for a list.

        Copies and what was rejected have none; what a list denies is owed again.
        """
        return sum(
            lane.layout.octets * (len(row.states) - row.states.count(OWED))
            for lane in self._lanes.values()
            for row in lane.rows.values()
        )

    def add_segment(self, tracks: Sequence[DataTrack], blocks: int) -> None:
        """Select the next segment and the tracks to take it from.

        Segment 0 may be added before a manifest is there: it starts at block 0, and the Anchor Key
        says how many blocks it has.

        Args:
            tracks: the k and the v track of one codec, or one kv track; all of the next segment.
            blocks: all blocks of the segment, also those beyond the selection.

        Raises:
            UsageError: other tracks than that, a codec that is unknown here, a model whose raw
                Objects are above the limit, or a segment that begins beyond the selection.
            PublicationError: the applied manifest describes the segment otherwise.
        """
        number = len(self._parts)
        first_block = sum(part.blocks for part in self._parts)
        components = sorted(track.component for track in tracks)
        expected = ([Component.KV], [Component.K, Component.V])
        if components not in expected or len({track.codec for track in tracks}) != 1:
            names = ", ".join(map(str, tracks))
            raise UsageError(f"select the k and v tracks of one codec or one kv track, not {names}")
        if any(track.segment != number for track in tracks):
            raise UsageError(f"the next segment is {number}, not {tracks[0].segment}")
        if blocks < 1 or first_block >= self.blocks:
            raise UsageError(
                f"segment {number} of {blocks} blocks begins at block {first_block}; blocks"
                f" 0..{self.blocks - 1} are selected"
            )
        ordered = tuple(sorted(tracks))
        codec = codecs.lookup(ordered[0].codec)
        layouts = {track: self.descriptor.layout(track.component) for track in ordered}
        for layout in layouts.values():
            octets = codec.data_octets(layout)
            if octets is not None and octets > self._max_data_octets:
                raise UsageError(
                    f"Objects of {octets} octets are above the limit {self._max_data_octets}"
                )
        wanted = min(blocks, self.blocks - first_block)
        part = Part(first_block, blocks, wanted, ordered, codec)
        if self._manifest is not None:
            part.check(number, self._manifest)
        lanes: dict[DataTrack, Lane] = {}
        for track, layout in layouts.items():
            check = HeaderCheck(track, first_block, self.descriptor, self._max_data_octets)
            octets = codec.data_octets(layout)
            fixed = None if octets is None else HEADER_OCTETS + octets
            lanes[track] = Lane(track, part, layout, check, fixed)
        self._select(part, lanes)

    def apply_manifest(self, manifest: Manifest) -> None:
        """Take a version's lists into account; call it for every version, in order.

        Identity is the caller's to check first, with `Manifest.check_identity`. Objects that wait
        in signed mode are released if they are listed as they came, else dropped and owed again.

        Raises:
            PublicationError: the geometry is not ours, the version changes what a former one
                said, or it lists another digest than that of an Object already released.
        """
        for name in ("layers", "block_tokens"):
            ours, theirs = getattr(self.descriptor, name), getattr(manifest, name)
            if ours != theirs:
                raise PublicationError(f"manifest: {name}: ours {ours}, theirs {theirs}")
        if self._manifest is not None:
            check_succession(self._manifest, manifest)
        for number, part in enumerate(self._parts):
            part.check(number, manifest)
        rows = self._newly_listed(manifest)
        for lane, layer, row, listed in rows:
            for block in row.known():
                if self._is_of_another(lane.track, Location(layer, block)):
                    continue
                if row.states[block] == VERIFIED and row.digest(block) != digest_at(listed, block):
                    raise self._contradiction(lane.track, layer, block, "the manifest lists")
        self._manifest = manifest
        for lane, layer, row, listed in rows:
            row.listed = listed
            for block in row.known():
                if row.states[block] != WAITING:
                    continue
                if row.digest(block) == digest_at(listed, block):
                    self._release(lane, layer, row, block)
                else:
                    row.states[block] = OWED
                    self.counters.rejected["listed"] += 1

    def _newly_listed(self, manifest: Manifest) -> list[tuple[Lane, int, Row, bytes]]:
        """Rows that hold something, with the lists that no former version had."""
        found = []
        for number, part in enumerate(self._parts[: len(manifest.segments)]):
            for track in part.tracks:
                lane = self._lanes[track]
                groups = manifest.segments[number].object_digests.get(track, ())
                for layer in range(self._layers_listed(track), len(groups)):
                    row = lane.rows.get(layer)
                    if row is not None:
                        found.append((lane, layer, row, groups[layer]))
        return found

    def _layers_listed(self, track: DataTrack) -> int:
        if self._manifest is None or track.segment >= len(self._manifest.segments):
            return 0
        return len(self._manifest.segments[track.segment].object_digests.get(track, ()))

    def _list_of(self, track: DataTrack, layer: int) -> bytes | None:
        if layer >= self._layers_listed(track):
            return None
        assert self._manifest is not None  # it lists the layer
        return self._manifest.segments[track.segment].object_digests[track][layer]

    # --- receiving ---

    def begin(self, track: DataTrack, location: Location, payload_length: int) -> Slot | None:
        """Start to receive one Object with a payload.

        Args:
            track: one of `tracks`.
            location: Group ID is the layer, Object ID the block within the segment.
            payload_length: octets of the whole payload, as the stream announced them.

        Returns:
            A slot for the payload's octets, or None: the Object is outside the selection, drop it.

        Raises:
            ObjectError: no such layer or block exists, or the length cannot be right; drop it. It
                is counted.
            UsageError: ``track`` was not selected.
        """
        return self.begin_on(self.lane(track), location, payload_length)

    def begin_on(self, lane: Lane, location: Location, payload_length: int) -> Slot | None:
        """As `begin`, for who has looked the track's lane up before."""
        layer, block = location
        if layer in self.layers and block < lane.part.wanted:
            if payload_length == lane.payload_octets:
                return Slot(self, lane, location, payload_length)
        elif not self.wants(lane.track, location):
            return None
        try:
            check_length(lane.track, self.descriptor, payload_length, self._max_data_octets)
        except ObjectError as exc:
            self.counters.rejected[exc.check] += 1
            raise
        return Slot(self, lane, location, payload_length)

    def wants(self, track: DataTrack, location: Location) -> bool:
        """Whether an Object is in the selection; one that is not is counted.

        Raises:
            ObjectError: no such layer or block exists. It is counted.
            UsageError: ``track`` was not selected.
        """
        part = self.lane(track).part
        layer, block = location
        try:
            if layer >= self.descriptor.layers:
                # Group L carries the End of Track at most, never a payload.
                raise ObjectError(
                    f"{track} {location}: the model has {self.descriptor.layers} layers",
                    check="layer",
                )
            if block >= part.blocks + self._padding(track):
                raise ObjectError(
                    f"{track} {location}: the segment has {part.blocks} blocks", check="block"
                )
        except ObjectError as exc:
            self.counters.rejected[exc.check] += 1
            raise
        if layer in self.layers and block < part.wanted:
            return True
        self.counters.excess += 1
        return False

    def _padding(self, track: DataTrack) -> int:
        """Blocks of zeros behind those of a track's segment, as far as a manifest tells."""
        manifest = self._manifest
        if manifest is None or track.segment >= len(manifest.segments):
            return 0
        return manifest.segments[track.segment].padding_blocks

    def place(self, slot: Slot, header: Octets) -> None:
        """Check an Object's header and say where its Data goes; `Slot.write` calls this.

        Raises:
            ObjectError: a field of the header is wrong.
        """
        lane, location = slot.lane, slot.location
        layer, block = location
        slot.digest = lane.check.digest(header, location, slot.payload_length)
        row = slot.row = self._row(lane, layer)
        if row.states[block] != OWED:
            slot.sink = Nowhere()
        elif row.holders.setdefault(block, slot) is not slot:
            octets = slot.payload_length - HEADER_OCTETS
            if sum(self._aside.values()) + octets > self._max_aside_octets:
                slot.sink = Nowhere()
            else:
                self._aside[slot] = octets
                self._put_aside(slot)
        elif lane.part.codec.in_place:
            sections = self._sections(lane, row, layer, block)
            if len(sections) == 1 or not sections[1]:
                slot.place = sections[0]
            else:
                slot.sink = InPieces(sections)
        else:
            self._put_aside(slot)

    @staticmethod
    def _put_aside(slot: Slot) -> None:
        """Give Data a buffer of its own; its length was checked against a limit."""
        # Not zeroed: a peer that announces much and sends little costs nothing.
        slot.place = byte_view(np.empty(slot.payload_length - HEADER_OCTETS, np.uint8))
        slot.is_aside = True

    def finish(self, slot: Slot) -> Outcome:
        """Check an Object whose last octet came, and release it or drop it.

        Raises:
            ObjectError: a check failed; the Object is dropped, counted and owed again.
            PublicationError: the Object is whole, and its octets are not those of one already
                taken at its Location: the publication cannot be used any more.
            UsageError: the slot has ended before.
        """
        if slot.ended:
            raise UsageError(f"{slot.track} {slot.location}: the slot has ended")
        try:
            return self._finish(slot)
        except ObjectError as exc:
            self.counters.rejected[exc.check] += 1
            raise
        finally:
            self._leave(slot)

    def abandon(self, slot: Slot) -> None:
        """Give an Object up whose stream ended early; it is owed again. Does nothing twice."""
        if not slot.ended:
            self.counters.abandoned += 1
            self._leave(slot)

    def end_of_group(self, track: DataTrack, location: Location) -> None:
        """Note that no Object with this or a larger Object ID exists in the Group.

        A Group L, which only ends the track, is accepted.

        Raises:
            PublicationError: blocks of the segment are said not to exist; the layer is never
                usable from this publication.
            UsageError: ``track`` was not selected.
        """
        part = self.lane(track).part
        if location.group < self.descriptor.layers and location.object < part.blocks:
            self._contradicted.add(location.group)
            raise PublicationError(
                f"{track}: layer {location.group} ends at block {location.object}, the segment has"
                f" {part.blocks} blocks"
            )

    def _finish(self, slot: Slot) -> Outcome:
        lane, row, location = slot.lane, slot.row, slot.location
        if slot.error is not None:
            raise slot.error
        announced = slot.digest
        if announced is None or row is None or slot.received != slot.payload_length:
            raise ObjectError(
                f"{lane.track} {location}: {slot.received} of {slot.payload_length} octets came",
                check="length",
            )
        digest = slot.data_digest()
        if digest != announced:
            compare_digests(location, announced, digest)
        layer, block = location
        if row.states[block] != OWED:
            elsewhere = self._is_of_another(lane.track, location)
            if row.digest(block) != announced and not elsewhere:
                raise self._contradiction(lane.track, layer, block, "a second copy has")
            self.counters.duplicates += 1
            return Outcome.DUPLICATE
        listed = row.listed
        if listed is not None and digest_at(listed, block) != announced:
            raise ObjectError(
                f"{lane.track} {location}: Data Digest is not the one that the manifest lists",
                check="listed",
            )
        if isinstance(slot.sink, Nowhere):
            self.counters.duplicates += 1
            return Outcome.DUPLICATE
        if slot.is_aside:
            self._land(slot, row)
        row.digests[block * DIGEST_OCTETS : (block + 1) * DIGEST_OCTETS] = announced
        if self.signed and listed is None:
            row.states[block] = WAITING
            return Outcome.WAITING
        self._release(lane, layer, row, block)
        return Outcome.VERIFIED

    def _land(self, slot: Slot, row: Row) -> None:
        """Decode Data that was kept aside into its place in the tensors.

        Raises:
            ObjectError: ``codec``: it does not decode to exactly the sections.
        """
        lane, (layer, block) = slot.lane, slot.location
        codec, layout, data = lane.part.codec, lane.layout, slot.place
        assert data is not None  # where it was kept
        try:
            pieces = [memoryview(piece).cast("B") for piece in codec.decode(data, layout)]
        except Exception as exc:
            # Codecs are plug-ins fed with a peer's octets: whatever they raise, the Object is bad.
            raise ObjectError(
                f"{lane.track} {slot.location}: codec {codec.name} failed: {exc}", check="codec"
            ) from exc
        lengths = tuple(len(piece) for piece in pieces)
        if lengths != layout.section_octets:
            raise ObjectError(
                f"{lane.track} {slot.location}: codec {codec.name} gave sections of {lengths}"
                f" octets, expected {layout.section_octets}",
                check="codec",
            )
        row.take_over(block)  # the first copy may still be on its way
        for place, piece in zip(self._sections(lane, row, layer, block), pieces, strict=True):
            place[:] = piece

    def _leave(self, slot: Slot) -> None:
        slot.ended = True
        slot.place = slot.sink = None
        self.counters.octets += slot.received
        if self._aside:
            self._aside.pop(slot, None)
        row, block = slot.row, slot.location.object
        if row is not None and row.holders.get(block) is slot:
            del row.holders[block]

    def _contradiction(
        self, track: DataTrack, layer: int, block: int, who: str
    ) -> PublicationError:
        self._contradicted.add(layer)
        return PublicationError(
            f"{track} {layer}/{block}: {who} another digest than the Object already taken; the"
            " publication contradicts itself"
        )

"""Worlds of streams that bring one track's Objects, and a consumer that they reach either way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from hypothesis import strategies as st

from kvcs.errors import KvcsError, PublicationError, SessionError
from kvcs.kv import Component, DataTrack, Ledger, ProtectionKey, ProtectionRing
from kvcs.kv.arrays import byte_view
from kvcs.kv.protection import ENCRYPTED_PROPERTIES, TAG_OCTETS, Sealer, immutable_properties
from kvcs.kv.unsealing import SealedSlot, Unsealer
from kvcs.moqt.data import (
    FetchEncoder,
    FetchHeader,
    ObjectHeader,
    ObjectStatus,
    SubgroupEncoder,
    SubgroupHeader,
)
from kvcs.moqt.events import Event
from kvcs.moqt.incoming.expected import Expected
from kvcs.moqt.incoming.receiving import DataStreams
from kvcs.moqt.intervals import Span
from kvcs.moqt.limits import EarlyLimits
from kvcs.moqt.names import FullTrackName, GroupOrder, Location, TrackNamespace
from kvcs.moqt.properties import KeyValues, Property
from kvcs.moqt.track.stored import DEFAULT_PRIORITY
from kvcs.moqt.wire import encode_vi64
from kvcs.subscriber.receiver import TrackReceiver
from tests.unit.kv.toy import Toy, deliver, toy_publication

ALIAS, REQUEST, FILL = 7, 4, 6
NAME = FullTrackName(TrackNamespace((b"ns",)), b"track")
BLOCKS, LAYERS, WANTED = 6, 2, 5
UNSEALING_OCTETS = 2000
KEY = ProtectionKey(2**32 + 7, b"\x05" * 32)
NEXT_KEY = ProtectionKey(2**32 + 8, b"\x06" * 32)
STRANGE_KEY = ProtectionKey(2**32 + 9, b"\x07" * 32)
"""The consumer does not have it."""

APART = toy_publication((BLOCKS,), layers=LAYERS)
OTHER = toy_publication((BLOCKS,), layers=LAYERS, seed=1)
JOINT = toy_publication((BLOCKS,), layers=LAYERS, components=[Component.KV])
LATENT = toy_publication((BLOCKS,), layers=LAYERS, components=[Component.KV], v_head_dim=0)

PROPERTIES: dict[str, dict[int, int | bytes]] = {
    "none": {},
    "harmless": {0x1230: 5},
    "gap": {Property.PRIOR_OBJECT_ID_GAP: 1},
}


@dataclass(frozen=True)
class Item:
    """One Object of a stream, most often the one behind the one before."""

    skip: int = 0
    """Blocks that are left out before it."""
    octets: str = "right"
    """Whose octets its payload has, or how many it lacks."""
    damage: int | None = None
    """Octet of the payload in which a bit flips."""
    status: ObjectStatus = ObjectStatus.NORMAL
    properties: str = "none"
    priority: int | None = None
    """Where a fetch stream says so."""
    sealing: str = "right"
    """How it is sealed, where the publication is protected."""


@dataclass(frozen=True)
class Stream:
    """One stream: what is on it, how it is cut and how it ends."""

    fetch: bool
    layer: int
    first: int
    items: tuple[Item, ...]
    subgroup: int | None
    priority: int | None
    with_properties: bool
    end_of_group: bool
    flip: tuple[int, int] | None
    """Octet of the stream behind its header, and bits of it that flip."""
    cuts: tuple[int, ...]
    """Sizes of the pieces, taken again and again."""
    end: str


SEALINGS = ["right", "next key", "strange key", "moved", "reranked", "more", "long length"]
"""Under which key; or for another place or priority; or framed otherwise than most are."""

ACTS = ["supply", "replace", "drop", "crowd"]
"""What others do meanwhile: a block is recomputed, the segment comes from another publication, a
layer that is whole is let go, and a peer announces more sealed octets than there is room for."""

ITEMS = st.one_of(
    st.just(Item()),
    st.just(Item()),
    st.just(Item(properties="harmless")),
    st.builds(
        Item,
        skip=st.sampled_from([0, 0, 0, 1]),
        octets=st.sampled_from(["right", "right", "other", "short", "empty"]),
        damage=st.none() | st.integers(0, 195),
        status=st.sampled_from(
            [ObjectStatus.NORMAL] * 4 + [ObjectStatus.END_OF_GROUP, ObjectStatus.END_OF_TRACK]
        ),
        properties=st.sampled_from(sorted(PROPERTIES)),
        priority=st.none() | st.integers(0, 1),
        sealing=st.sampled_from(SEALINGS),
    ),
    st.builds(Item, damage=st.none() | st.integers(0, 195), sealing=st.sampled_from(SEALINGS)),
)

STREAMS = st.builds(
    Stream,
    fetch=st.booleans(),
    layer=st.integers(0, LAYERS - 1),
    first=st.sampled_from([0, 0, 0, 1, 2]),
    items=st.one_of(
        st.lists(ITEMS, min_size=1, max_size=BLOCKS).map(tuple),
        st.sampled_from(["none", "harmless"]).map(lambda p: (Item(properties=p),) * BLOCKS),
    ),
    subgroup=st.sampled_from([0, 0, 1, None]),
    priority=st.sampled_from([None, 0, 1]),
    with_properties=st.booleans(),
    end_of_group=st.booleans(),
    flip=st.none() | st.none() | st.tuples(st.integers(0, 1300), st.integers(1, 255)),
    cuts=st.lists(
        st.integers(1, 260) | st.integers(130, 195) | st.integers(300, 1300), min_size=1, max_size=5
    ).map(tuple),
    end=st.sampled_from(["fin", "fin alone", "reset", "open"]),
)


@dataclass(frozen=True)
class World:
    """All that happens to one track."""

    toy: str
    streams: tuple[Stream, ...]
    order: tuple[int, ...]
    """Whose turn it is, among the streams that have pieces left."""
    signed: bool
    listed: int
    """Layers that the manifest lists."""
    manifest_at: int
    """Pieces before it is applied."""
    sealed: bool = False
    acts: tuple[tuple[int, str, int], ...] = ()
    """Pieces before something else happens, what it is, and to which block or layer."""


WORLDS = st.builds(
    World,
    toy=st.sampled_from(["apart", "apart", "joint", "latent"]),
    streams=st.lists(STREAMS, min_size=1, max_size=3).map(tuple),
    order=st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple),
    signed=st.booleans(),
    listed=st.integers(0, LAYERS),
    manifest_at=st.integers(0, 30),
    sealed=st.booleans(),
    acts=st.lists(
        st.tuples(st.integers(1, 20), st.sampled_from(ACTS), st.integers(0, WANTED - 1)), max_size=3
    ).map(tuple),
)
TOYS = {"apart": APART, "joint": JOINT, "latent": LATENT}


def track_of(toy: Toy) -> DataTrack:
    return toy.segments[0][0]


def octets_of(world: World, stream: Stream) -> bytes:
    """A stream, behind its header; what an encoder refuses ends it."""
    toy = TOYS[world.toy]
    track = track_of(toy)
    header = header_of(stream)
    encoder: FetchEncoder | SubgroupEncoder = (
        SubgroupEncoder(header)
        if isinstance(header, SubgroupHeader)
        else FetchEncoder(GroupOrder.ASCENDING)
    )
    octets, block, group = b"", stream.first, stream.layer
    for item in stream.items:
        block += item.skip
        normal = item.status is ObjectStatus.NORMAL
        source = OTHER if item.octets == "other" and toy is APART else toy
        payload = bytearray(source.objects.get((track, Location(group, block)), bytes(196)))
        priority = (item.priority or 0) if stream.fetch else stream.priority
        if world.sealed and stream.with_properties:
            payload = sealed(track, Location(group, block), priority, payload, item.sealing)
        if item.damage is not None:
            payload[item.damage % len(payload)] ^= 0x10
        if item.octets == "short":
            del payload[-1]
        if item.octets == "empty" or not normal:
            payload.clear()
        properties = b""
        if normal and stream.with_properties:
            named = PROPERTIES[item.properties]
            if world.sealed:
                key_id = key_of(item.sealing).key_id
                named = named | {Property.IMMUTABLE_PROPERTIES: immutable_properties(key_id)}
            properties = KeyValues.of(named).write()
        made = ObjectHeader(
            group,
            block,
            stream.subgroup,
            priority,
            ObjectStatus.NORMAL if stream.fetch else item.status,
            properties,
            len(payload),
        )
        octets += encoder.object(made) + payload
        block += 1
    if stream.flip is not None and octets:
        at, bits = stream.flip
        flipped = bytearray(octets)
        flipped[at % len(octets)] ^= bits
        octets = bytes(flipped)
    return octets


def key_of(sealing: str) -> ProtectionKey:
    return {"next key": NEXT_KEY, "strange key": STRANGE_KEY}.get(sealing, KEY)


def sealed(
    track: DataTrack, location: Location, priority: int | None, payload: bytes, sealing: str
) -> bytearray:
    """A sealed payload, right or not."""
    effective = DEFAULT_PRIORITY if priority is None else priority
    if sealing == "moved":
        location = Location(location.group, location.object + 1)
    if sealing == "reranked":
        effective ^= 1
    framed = encode_vi64(len(payload)) + payload
    if sealing == "more":
        framed += ENCRYPTED_PROPERTIES.to_bytes(2) + encode_vi64(3) + b"\x02\x40\x09"
    if sealing == "long length":
        framed = b"\xc0" + len(payload).to_bytes(2) + payload
    made = bytearray(len(framed) + TAG_OCTETS)
    sealer = Sealer(key_of(sealing), FullTrackName(NAME.namespace, track.name))
    group_id, object_id = location
    run = sealer.run(group_id, range(object_id, object_id + 1), effective, len(framed))
    run.seal_next(framed, memoryview(made))
    return made


def header_of(stream: Stream) -> SubgroupHeader | FetchHeader:
    if stream.fetch:
        return FetchHeader(FILL)
    return SubgroupHeader(
        ALIAS,
        stream.layer,
        stream.subgroup,
        stream.priority,
        end_of_group=stream.end_of_group,
        first_object=True,
        has_properties=stream.with_properties,
    )


@dataclass
class Log:
    """What the cache is told."""

    told: list[object] = field(default_factory=list)

    def verified(self) -> None:
        pass  # one call for each Object is what the short way saves

    def lost(self, track: DataTrack, span: Span, reason: str, *, late: bool = False) -> None:
        self.told.append((track, span, reason, late))

    def track_changed(self, track: DataTrack) -> None:
        self.told.append(track)

    def failed(self, error: KvcsError) -> None:
        self.told.append(repr(error))


class Consumer:
    """One track's way from streams into a ledger; the host of its streams."""

    def __init__(self, world: World, *, short: bool) -> None:
        toy = TOYS[world.toy]
        self.toy, self.track, self.world = toy, track_of(toy), world
        self.ledger: Ledger = toy.ledger(WANTED, signed=world.signed)
        if world.sealed:
            keys = ProtectionRing([KEY, NEXT_KEY])
            self.ledger.unsealer = Unsealer(
                self.ledger, keys, NAME.namespace, max_octets=UNSEALING_OCTETS
            )
            if not short:
                self.ledger.take_whole = lambda *_: None  # type: ignore[method-assign]
        self.log = Log()
        taker = cast(Any, self.log)
        self.receiver = TrackReceiver(cast(Any, None), self.ledger, self.track, taker)
        self.events: list[Event] = []
        self.stopped: list[tuple[int, int]] = []
        self.failure: object = None
        self.crowding: list[SealedSlot] = []
        self.streams = DataStreams(self, EarlyLimits())
        self.expected = self.streams.expect(REQUEST, NAME, GroupOrder.ASCENDING, filtered=False)
        self.expected.rules.default_priority = 0
        if short:
            self.expected.sink = self.receiver
        self.streams.expect_stream(FILL, self.expected, GroupOrder.ASCENDING)
        self.streams.bind(ALIAS, self.expected)

    # ReceiverHost

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def has_events(self) -> bool:
        return bool(self.events)

    def stop_stream(self, stream_id: int, code: int) -> None:
        self.stopped.append((stream_id, code))

    def track_malformed(self, expected: Expected, reason: str) -> None:
        self.failure = reason
        self.streams.forget(expected, 0)

    def stream_ended(self, expected: Expected) -> None:
        pass

    # Inputs

    def run(self) -> Consumer:
        """Let everything happen, in the world's order, until something breaks a rule."""
        left = {
            2 + 4 * number: self.pieces(stream) for number, stream in enumerate(self.world.streams)
        }
        turn = 0
        while left and self.failure is None:
            if turn == self.world.manifest_at:
                self.apply_manifest()
            for at, act, number in self.world.acts:
                if turn == at:
                    self.act(act, number)
            number = self.world.order[turn % len(self.world.order)]
            turn += 1
            stream_id = list(left)[number % len(left)]
            step = left[stream_id].pop(0)
            if not left[stream_id]:
                del left[stream_id]
            self.take(step, stream_id)
        return self

    def apply_manifest(self) -> None:
        try:
            self.ledger.apply_manifest(self.toy.writer([self.world.listed], False).manifest())
        except PublicationError as exc:
            self.failure = repr(exc)

    def act(self, act: str, number: int) -> None:
        """Something happens that no stream brings."""
        toy, ledger, layer = self.toy, self.ledger, number % LAYERS
        if act == "supply":
            size = toy.descriptor.block_tokens
            rows = slice(number * size, (number + 1) * size)
            k, v = (np.ascontiguousarray(each[layer][rows]) for each in (toy.k, toy.v))
            ledger.supply(layer, number, {Component.K: byte_view(k), Component.V: byte_view(v)})
        elif act == "replace" and not ledger.has_dropped:
            other = toy.ledger(WANTED)
            for (track, location), octets in toy.objects.items():
                if location.object < WANTED:
                    deliver(other, track, location, octets)
            ledger.take_segment(0, other)
        elif act == "drop" and ledger.is_ready(layer):
            ledger.drop(layer)
        elif act == "crowd" and ledger.unsealer is not None:
            crowding = ledger.unsealer.begin(
                self.track, Location(layer, number), 300, priority=0, immutable=None
            )
            assert crowding is not None
            self.crowding.append(crowding)

    def take(self, step: Callable[[int], object], stream_id: int) -> None:
        try:
            step(stream_id)
        except SessionError as exc:
            self.failure = repr(exc), int(exc.code)
        waiting, self.events = self.events, []
        for event in waiting:
            self.receiver.take(event)

    def pieces(self, stream: Stream) -> list[Callable[[int], object]]:
        octets = octets_of(self.world, stream)
        if stream.end == "reset":
            octets = octets[: len(octets) * 2 // 3]
        pieces, at, turn = [header_of(stream).encode()], 0, 0
        while at < len(octets):
            size = stream.cuts[turn % len(stream.cuts)]
            pieces.append(octets[at : at + size])
            at, turn = at + size, turn + 1
        if stream.end == "fin alone":
            pieces.append(b"")
        fin = stream.end.startswith("fin")

        def giving(piece: bytes, last: bool) -> Callable[[int], object]:
            return lambda stream_id: self.streams.receive(stream_id, piece, last, 0.0)

        steps = [giving(p, fin and n == len(pieces)) for n, p in enumerate(pieces, 1)]
        if stream.end == "reset":
            steps.append(lambda stream_id: self.streams.reset(stream_id, 1))
        return steps

    # What came of it

    def state(self) -> dict[str, object]:
        """All that a later input, or a reader, can see."""
        rules, receiver, lane = self.expected.rules, self.receiver, self.ledger.lane(self.track)
        return {
            "failure": self.failure,
            "told": self.log.told,
            "stopped": self.stopped,
            "counters": self.ledger.counters,
            "unsealing": self.unsealing(),
            "ready": self.ledger.take_ready(),
            "missing": self.ledger.missing(),
            "rows": {
                layer: (bytes(row.states), bytes(row.digests), sorted(row.holders))
                for layer, row in lane.rows.items()
            },
            "tensors": [self.usable(layer) for layer in range(LAYERS)],
            "receiver": (receiver.octets, receiver.taken, receiver.filled, receiver.over),
            "on their way": {
                stream_id: (
                    stream.passed,
                    stream.behind,
                    stream.slot and (stream.slot.location, stream.slot.received),
                )
                for stream_id, stream in receiver._streams.items()
            },
            "streams": {
                stream_id: (
                    stream.state,
                    stream.last,
                    stream.subgroup_id,
                    stream.parser and (stream.parser.mid_object, stream.parser.buffered),
                )
                for stream_id, stream in self.streams._streams.items()
            },
            "rules": (
                rules.entries,
                rules._last,
                rules._end,
                rules._final,
                {
                    group_id: (g.runs._bounds, g.gaps._bounds, g.end, g.final, g.gap, g.subgroups)
                    for group_id, g in rules._groups.items()
                },
            ),
        }

    def unsealing(self) -> object:
        unsealer = self.ledger.unsealer
        if unsealer is None:
            return None
        return (
            unsealer.octets,
            [(slot.location, slot.received) for slot in unsealer._arriving],
            unsealer.latest and unsealer.latest.location,
            unsealer.lane(self.track).opener.failures,
            sorted(self.receiver._silent),
            [slot.displaced for slot in self.crowding],
        )

    def usable(self, layer: int) -> list[bytes]:
        if layer in self.ledger._dropped:
            return []
        tensors = self.ledger.layer(layer, self.ledger.usable_tokens(layer))
        return [np.ascontiguousarray(each).tobytes() for each in (tensors.k, tensors.v)]

"""Whatever order, copies, cuts and damage: the ledger holds exactly what passed every check."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcs.errors import ObjectError, PublicationError
from kvcs.kv import Component, DataTrack, Ledger, Outcome, Slot
from kvcs.moqt.names import Location
from tests.unit.kv.toy import Toy, toy_publication

APART = toy_publication((2, 1), layers=2)
JOINT = toy_publication((2, 1), layers=2, components=[Component.KV])
OTHER = toy_publication((2, 1), layers=2, seed=1)
"""The same content with other noise: every Object differs and passes its own checks."""

Key = tuple[DataTrack, Location]


@dataclass(frozen=True)
class Step:
    """One Object of a delivery."""

    choice: int
    """Which Object, modulo their number."""
    cuts: tuple[int, ...]
    """Sizes of the pieces, the last one taken again and again."""
    damage: int | None
    """Octet of the payload in which one bit flips."""
    cut: int | None
    """Octets after which the stream is reset."""
    delay: int
    """How many later Objects begin before this one goes on."""


STEPS = st.lists(
    st.builds(
        Step,
        choice=st.integers(0, 1_000),
        cuts=st.lists(st.integers(1, 200), min_size=1, max_size=4).map(tuple),
        damage=st.none() | st.integers(0, 195),
        cut=st.none() | st.integers(0, 195),
        delay=st.integers(0, 3),
    ),
    max_size=40,
)


def pieces(octets: bytes, sizes: tuple[int, ...]) -> list[bytes]:
    parts, at, turn = [], 0, 0
    while at < len(octets):
        size = sizes[min(turn, len(sizes) - 1)]
        parts.append(octets[at : at + size])
        at, turn = at + size, turn + 1
    return parts


IGNORED = {6, 7, 30, 31}
"""Octets of Flags and Reserved."""


class Delivery:
    """Runs steps against a ledger beside a model that is a plain set."""

    def __init__(self, toy: Toy, ledger: Ledger, signed_layers: int | None) -> None:
        self.toy, self.ledger = toy, ledger
        self.keys = list(toy.objects)
        self.signed_layers = signed_layers
        self.arrived: set[Key] = set()
        self.rejected = self.duplicates = self.abandoned = 0
        self.pending: list[tuple[int, Step, Key, Slot, list[bytes], bool]] = []

    def listed(self, key: Key) -> bool:
        return self.signed_layers is None or key[1].group < self.signed_layers

    def begin(self, number: int, step: Step) -> None:
        key = self.keys[step.choice % len(self.keys)]
        payload = bytearray(self.toy.objects[key])
        damaged = step.damage is not None and step.damage not in IGNORED
        if step.damage is not None:
            payload[step.damage % len(payload)] ^= 0x10
        slot = self.ledger.begin(*key, len(payload))
        assert slot is not None
        whole = step.cut is None
        parts = pieces(bytes(payload[: step.cut]), step.cuts)
        half = len(parts) // 2
        for part in parts[:half]:
            slot.write(part)
        rest = parts[half:]
        self.pending.append((number + step.delay, step, key, slot, rest, damaged and whole))

    def end(self, number: int) -> None:
        due = [entry for entry in self.pending if entry[0] <= number]
        self.pending = [entry for entry in self.pending if entry[0] > number]
        for _, step, key, slot, rest, damaged in due:
            for part in rest:
                slot.write(part)
            if step.cut is not None:
                slot.abandon()
                self.abandoned += 1
                continue
            try:
                outcome = slot.finish()
            except ObjectError:
                assert damaged
                self.rejected += 1
                continue
            assert not damaged
            if key in self.arrived:
                assert outcome is Outcome.DUPLICATE
                self.duplicates += 1
            else:
                assert outcome is (Outcome.VERIFIED if self.listed(key) else Outcome.WAITING)
                self.arrived.add(key)

    def run(self, steps: list[Step]) -> None:
        for number, step in enumerate(steps):
            self.begin(number, step)
            self.end(number)
        self.end(len(steps) + 10)

    def check(self) -> None:
        verified = {key for key in self.arrived if self.listed(key)}
        counters = self.ledger.counters
        assert counters.verified == len(verified)
        assert counters.duplicates == self.duplicates
        assert counters.rejected.total() == self.rejected
        assert counters.abandoned == self.abandoned
        lacking = {
            (run.segment, run.component, run.layer, block)
            for run in self.ledger.missing()
            for block in range(run.first_block, run.last_block + 1)
        }
        assert lacking == {
            (track.segment, track.component, location.group, location.object)
            for track, location in self.keys
            if (track, location) not in verified
        }
        assert lacking == {
            (track.segment, track.component, first.group, block)
            for track in self.ledger.tracks
            for first, last in self.ledger.lacking(track, self.ledger.layers)
            for block in range(first.object, last.object + 1)
        }
        for layer in range(2):
            owed = {key for key in self.keys if key[1].group == layer}
            assert self.ledger.is_ready(layer) == (owed <= verified)
            usable = self.ledger.usable_tokens(layer)
            tensors = self.ledger.layer(layer, usable)
            assert np.array_equal(tensors.k, self.toy.k[layer, :usable])
            assert np.array_equal(tensors.v, self.toy.v[layer, :usable])
        assert self.ledger.filling == 0 and self.ledger._aside == {}


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, joint=st.booleans())
def test_any_order_copies_cuts_and_damage(steps: list[Step], joint: bool) -> None:
    toy = JOINT if joint else APART
    delivery = Delivery(toy, toy.ledger(), None)
    delivery.run(steps)
    delivery.check()


@settings(max_examples=100, deadline=None)
@given(steps=STEPS, layers=st.integers(0, 2), late=st.booleans())
def test_signed_mode_holds_exactly_what_is_listed(
    steps: list[Step], layers: int, late: bool
) -> None:
    ledger = APART.ledger(signed=True)
    manifest = APART.writer((layers, layers)).manifest()
    delivery = Delivery(APART, ledger, 0 if late else layers)
    if not late:
        ledger.apply_manifest(manifest)
    delivery.run(steps)
    delivery.check()
    if late:
        ledger.apply_manifest(manifest)
        delivery.signed_layers = layers
        delivery.check()


@settings(max_examples=100, deadline=None)
@given(
    order=st.permutations([(toy, key) for toy in (APART, OTHER) for key in APART.objects]),
    size=st.integers(0, 24),
)
def test_two_productions_are_never_mixed(order: list[tuple[Toy, Key]], size: int) -> None:
    """Objects of another production under the same names: noticed at the first shared place."""
    ledger = APART.ledger()
    first: dict[Key, Toy] = {}
    for toy, key in order[:size]:
        slot = ledger.begin(*key, len(toy.objects[key]))
        assert slot is not None
        slot.write(toy.objects[key])
        if first.setdefault(key, toy) is toy:
            assert slot.finish() is Outcome.VERIFIED
            continue
        try:
            slot.finish()
        except PublicationError:
            assert not ledger.is_ready(key[1].group)
            continue
        raise AssertionError("other bytes at one Location passed")

"""When an Object takes a short way into its layer, and when the steps are made one by one."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import pytest

from kvcs.errors import ObjectError
from kvcs.kv import HEADER_OCTETS, Component, Ledger, Outcome, Slot
from kvcs.moqt.names import Location
from tests.unit.kv.toy import (
    K0,
    PAYLOAD_OCTETS,
    TOY,
    Toy,
    deliver,
    same_place_other_bytes,
    started,
    toy_publication,
)

A, B = Location(1, 0), Location(1, 1)
CAME = 100
"""Octets of an Object that came before those that end it."""


def begun(ledger: Ledger, payload: bytes = TOY.objects[K0, A], at: Location = A) -> Slot:
    """A slot that lacks the last octets of its Object."""
    slot = started(ledger, payload, at=at)
    slot.write(payload[:CAME])
    return slot


def goes_on(
    ledger: Ledger,
    slot: Slot,
    *,
    first: bytes = TOY.objects[K0, A],
    second: bytes = TOY.objects[K0, B],
    at: Location = B,
    came: int = HEADER_OCTETS + 20,
) -> bool:
    """Whether it does, with the last octets of one Object and the first of another."""
    data = first[CAME:] + b"##" + second[:came]
    stop = len(first) - CAME
    return bool(ledger.go_on(slot, at, memoryview(data), stop, 2, 1))


def test_a_slot_goes_on_with_the_next_object_of_its_layer() -> None:
    ledger = TOY.ledger()
    slot = begun(ledger)
    assert goes_on(ledger, slot)
    counters = ledger.counters
    assert counters.verified == 1 and counters.octets == PAYLOAD_OCTETS and ledger.filling == 1
    assert slot.location == B and not slot.ended
    slot.write(TOY.objects[K0, B][HEADER_OCTETS + 20 :])
    assert slot.finish() is Outcome.VERIFIED
    assert deliver(ledger, K0, Location(1, 2), TOY.objects[K0, Location(1, 2)]) is Outcome.VERIFIED
    assert ledger.filling == 0 and counters.octets == 3 * PAYLOAD_OCTETS
    for block in range(3):
        track_v = TOY.segments[0][1]
        at = Location(1, block)
        deliver(ledger, track_v, at, TOY.objects[track_v, at])
    assert ledger.take_ready() == [1]
    assert np.array_equal(ledger.layer(1).k, TOY.k[1])


JOINT = toy_publication(components=[Component.KV])


def run(toy: Toy, first: int, *, came: int, damaged: int | None = None) -> tuple[bytes, int]:
    """The end of block ``first`` of layer 1 and all blocks behind it, the last of which has not
    ended; and where that first one ends."""
    (track, *_), layer = toy.segments[0], 1
    count = sum(1 for each, at in toy.objects if each == track and at.group == layer)
    payloads = [bytearray(toy.objects[track, Location(layer, n)]) for n in range(first, count)]
    if damaged is not None:
        payloads[damaged - first][-1] ^= 1
    data = bytes(payloads[0][CAME:]) + b"".join(b"##" + bytes(each) for each in payloads[1:])
    return data[: len(data) - len(payloads[-1]) + came], len(payloads[0]) - CAME


@pytest.mark.parametrize("toy", [TOY, JOINT], ids=["apart", "joint"])
@pytest.mark.parametrize("came", [HEADER_OCTETS, HEADER_OCTETS + 20, PAYLOAD_OCTETS - 1])
def test_a_slot_goes_on_over_a_run_of_objects(toy: Toy, came: int) -> None:
    ledger, track = toy.ledger(), toy.segments[0][0]
    payload, last = toy.objects[track, A], toy.objects[track, Location(1, 2)]
    slot = started(ledger, payload, track=track, at=A)
    slot.write(payload[:CAME])
    data, stop = run(toy, 0, came=came)
    assert ledger.go_on(slot, B, memoryview(data), stop, 2, 2) == 2
    counters, row = ledger.counters, ledger.lane(track).rows[1]
    assert counters.verified == 2 and counters.octets == 2 * len(payload)
    assert ledger.filling == 1 and list(row.holders) == [2]
    assert slot.location == Location(1, 2) and slot.received == came
    slot.write(last[came:])
    assert slot.finish() is Outcome.VERIFIED
    for (each, at), octets in toy.objects.items():
        if at.group == 1 and each != track:
            deliver(ledger, each, at, octets)
    assert ledger.take_ready() == [1] and not ledger.filling
    assert np.array_equal(ledger.layer(1).k, toy.k[1])
    assert np.array_equal(ledger.layer(1).v, toy.v[1])


@pytest.mark.parametrize("toy", [TOY, JOINT], ids=["apart", "joint"])
def test_a_run_stops_in_front_of_an_object_that_fails_and_the_steps_go_on_there(toy: Toy) -> None:
    ledger, track = toy.ledger(), toy.segments[0][0]
    payload = toy.objects[track, A]
    slot = started(ledger, payload, track=track, at=A)
    slot.write(payload[:CAME])
    data, stop = run(toy, 0, came=HEADER_OCTETS + 20, damaged=1)
    assert ledger.go_on(slot, B, memoryview(data), stop, 2, 2) == 1
    assert ledger.counters.verified == 1
    assert slot.location == B and slot.received == HEADER_OCTETS
    begin = stop + 2 + HEADER_OCTETS
    slot.write(data[begin : stop + 2 + len(payload)])
    with pytest.raises(ObjectError, match="says"):
        slot.finish()
    assert ledger.filling == 0
    assert deliver(ledger, track, B, toy.objects[track, B]) is Outcome.VERIFIED


def test_a_run_stops_where_another_session_brings_one_of_its_objects() -> None:
    ledger, at = TOY.ledger(), Location(1, 2)
    other = begun(ledger, TOY.objects[K0, at], at)
    data, stop = run(TOY, 0, came=HEADER_OCTETS + 20)
    slot = begun(ledger)
    assert ledger.go_on(slot, B, memoryview(data), stop, 2, 2) == 1
    assert slot.location == B and ledger.counters.verified == 1 and ledger.filling == 2
    other.write(TOY.objects[K0, at][CAME:])
    assert other.finish() is Outcome.VERIFIED


def test_a_run_ends_with_the_selection() -> None:
    ledger = TOY.ledger(blocks=2)
    data, stop = run(TOY, 0, came=HEADER_OCTETS + 20)
    slot = begun(ledger)
    assert ledger.go_on(slot, B, memoryview(data), stop, 2, 2) == 1
    assert slot.location == B and slot.received == HEADER_OCTETS


def test_it_may_be_given_up_in_the_middle_and_the_first_object_stays() -> None:
    ledger = TOY.ledger()
    slot = begun(ledger)
    assert goes_on(ledger, slot)
    slot.abandon()
    assert ledger.filling == 0 and ledger.counters.verified == 1
    assert ledger.counters.octets == PAYLOAD_OCTETS + HEADER_OCTETS + 20
    assert deliver(ledger, K0, A, TOY.objects[K0, A]) is Outcome.DUPLICATE
    assert deliver(ledger, K0, B, TOY.objects[K0, B]) is Outcome.VERIFIED


@pytest.mark.parametrize("listed", [0, 4])
def test_in_signed_mode_what_is_not_listed_waits(listed: int) -> None:
    ledger = TOY.ledger(signed=True)
    ledger.apply_manifest(TOY.writer([listed], False).manifest())
    assert goes_on(ledger, begun(ledger))
    assert ledger.counters.verified == (1 if listed else 0)
    if not listed:
        ledger.apply_manifest(TOY.writer([4], False).manifest())
        assert ledger.counters.verified == 1


def refused(ledger: Ledger, slot: Slot, outcome: bool) -> None:
    """Nothing has happened: the slot still takes the first Object, which is not there."""
    assert not outcome
    assert slot.location == A and not slot.ended and slot.received == CAME
    assert not ledger.counters.rejected and not ledger.counters.octets


def test_not_where_octets_lack_or_the_header_of_the_next_is_not_whole() -> None:
    ledger = TOY.ledger()
    slot = begun(ledger)
    refused(ledger, slot, goes_on(ledger, slot, first=TOY.objects[K0, A][:-1]))
    refused(ledger, slot, goes_on(ledger, slot, came=HEADER_OCTETS - 1))
    refused(ledger, slot, goes_on(ledger, slot, at=Location(1, 2)))
    refused(ledger, slot, goes_on(ledger, slot, second=TOY.objects[K0, Location(1, 2)]))
    assert goes_on(ledger, slot)


def test_not_behind_an_object_that_fails() -> None:
    ledger = TOY.ledger()
    slot = begun(ledger)
    damaged = TOY.objects[K0, A][:-1] + b"\x99"
    refused(ledger, slot, goes_on(ledger, slot, first=damaged))
    other = same_place_other_bytes(TOY.objects[K0, A])
    ledger.apply_manifest(TOY.writer([4], False).manifest())
    slot.abandon()
    ledger.counters = type(ledger.counters)()
    slot = begun(ledger, other)
    refused(ledger, slot, goes_on(ledger, slot, first=other))


def test_not_beyond_the_selection() -> None:
    ledger = TOY.ledger(blocks=1)
    slot = begun(ledger)
    refused(ledger, slot, goes_on(ledger, slot))


def test_not_where_another_session_has_brought_the_next_or_brings_it() -> None:
    ledger = TOY.ledger()
    slot = begun(ledger)
    other = begun(ledger, TOY.objects[K0, B], B)
    refused(ledger, slot, goes_on(ledger, slot))
    other.write(TOY.objects[K0, B][CAME:])
    assert other.finish() is Outcome.VERIFIED
    ledger.counters = copy(ledger.counters)
    ledger.counters.octets = 0
    refused(ledger, slot, goes_on(ledger, slot))


def test_not_for_a_copy_that_another_one_was_faster_than() -> None:
    ledger = TOY.ledger()
    first, second = begun(ledger), begun(ledger)
    assert second.is_aside
    refused(ledger, second, goes_on(ledger, second))
    assert goes_on(ledger, first)
    second.write(TOY.objects[K0, A][CAME:])
    assert second.finish() is Outcome.DUPLICATE
    assert ledger.counters.verified == 1 and ledger.filling == 1


def takes_whole(
    ledger: Ledger, payload: bytes = TOY.objects[K0, B], at: Location = B
) -> Outcome | None:
    return ledger.take_whole(ledger.lane(K0), at, memoryview(payload))


def with_memory(**options: Any) -> Ledger:
    """A ledger in which the first Object of layer 1 is there, so that its memory is."""
    ledger = TOY.ledger(**options)
    deliver(ledger, K0, A, TOY.objects[K0, A])
    return ledger


def test_a_whole_object_is_taken_in_one_step_behind_the_first_of_its_layer() -> None:
    ledger = TOY.ledger()
    assert takes_whole(ledger) is None and not ledger.filling  # there is no memory yet
    deliver(ledger, K0, A, TOY.objects[K0, A])
    assert takes_whole(ledger) is Outcome.VERIFIED
    counters = ledger.counters
    assert counters.verified == 2 and counters.octets == 2 * PAYLOAD_OCTETS and not ledger.filling
    for (track, at), payload in TOY.objects.items():
        if at.group == 1 and (track, at) not in ((K0, A), (K0, B)):
            deliver(ledger, track, at, payload)
    assert ledger.take_ready() == [1]
    assert np.array_equal(ledger.layer(1).k, TOY.k[1])


def test_the_last_object_of_a_layer_may_be_taken_so() -> None:
    ledger = with_memory()
    for (track, at), payload in TOY.objects.items():
        if at.group == 1 and (track, at) not in ((K0, A), (K0, B)):
            deliver(ledger, track, at, payload)
    assert ledger.take_ready() == []
    assert takes_whole(ledger) is Outcome.VERIFIED
    assert ledger.take_ready() == [1]


@pytest.mark.parametrize("listed", [0, 4])
def test_whole_objects_that_are_not_listed_wait_in_signed_mode(listed: int) -> None:
    ledger = with_memory(signed=True)
    ledger.apply_manifest(TOY.writer([listed], False).manifest())
    assert takes_whole(ledger) is (Outcome.VERIFIED if listed else Outcome.WAITING)
    assert ledger.counters.verified == (2 if listed else 0)
    if not listed:
        ledger.apply_manifest(TOY.writer([4], False).manifest())
        assert ledger.counters.verified == 2


DAMAGED = TOY.objects[K0, B][:-1] + bytes([TOY.objects[K0, B][-1] ^ 1])
HEADERS = bytes([TOY.objects[K0, B][0] ^ 1]) + TOY.objects[K0, B][1:]


@pytest.mark.parametrize(
    ("payload", "at"),
    [
        (DAMAGED, B),
        (HEADERS, B),
        (TOY.objects[K0, B][:-1], B),
        (TOY.objects[K0, B] + b"#", B),
        (TOY.objects[K0, B], Location(1, 2)),
        (TOY.objects[K0, A], A),
        (TOY.objects[K0, B], Location(2, 1)),
    ],
)
def test_a_whole_object_with_anything_amiss_goes_the_long_way(payload: bytes, at: Location) -> None:
    ledger = with_memory()
    before = copy(ledger.counters)
    assert takes_whole(ledger, payload, at) is None
    assert ledger.counters == before and not ledger.filling
    assert takes_whole(ledger) is Outcome.VERIFIED


def test_a_whole_object_that_is_not_the_listed_one_goes_the_long_way() -> None:
    ledger = with_memory()
    ledger.apply_manifest(TOY.writer([4], False).manifest())
    assert takes_whole(ledger, same_place_other_bytes(TOY.objects[K0, B])) is None
    assert takes_whole(ledger) is Outcome.VERIFIED


def test_a_whole_object_leaves_the_place_to_who_fills_it() -> None:
    ledger = with_memory()
    other = begun(ledger, TOY.objects[K0, B], B)
    assert takes_whole(ledger) is None
    other.write(TOY.objects[K0, B][CAME:])
    assert other.finish() is Outcome.VERIFIED
    assert takes_whole(ledger) is None


def test_a_whole_object_outside_the_selection_is_not_taken() -> None:
    ledger = with_memory(blocks=1)
    assert takes_whole(ledger) is None
    at = Location(2, 0)
    ledger = TOY.ledger(layers=(1, 1))
    deliver(ledger, K0, A, TOY.objects[K0, A])
    assert takes_whole(ledger, TOY.objects[K0, at], at) is None


def test_two_sections_are_not_one_place() -> None:
    joint = toy_publication(components=[Component.KV])
    ledger, ((track,),) = joint.ledger(), joint.segments
    deliver(ledger, track, A, joint.objects[track, A])
    payload = memoryview(joint.objects[track, B])
    assert ledger.take_whole(ledger.lane(track), B, payload) is None
    latent = toy_publication(components=[Component.KV], v_head_dim=0)
    ledger = latent.ledger()
    deliver(ledger, track, A, latent.objects[track, A])
    payload = memoryview(latent.objects[track, B])
    assert ledger.take_whole(ledger.lane(track), B, payload) is Outcome.VERIFIED

"""When a slot goes on with the next Object of its layer, and when the steps are made one by one."""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest

from kvcs.kv import HEADER_OCTETS, Ledger, Outcome, Slot
from kvcs.moqt.names import Location
from tests.unit.kv.toy import K0, PAYLOAD_OCTETS, TOY, deliver, same_place_other_bytes, started

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
    return ledger.go_on(slot, at, memoryview(data), stop, stop + 2)


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

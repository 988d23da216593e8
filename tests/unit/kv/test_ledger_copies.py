"""Two copies of one Object, one after the other or at once."""

from __future__ import annotations

import numpy as np
import pytest

from kvcs.errors import ObjectError, PublicationError, UsageError
from kvcs.kv import (
    Ledger,
    Outcome,
    Slot,
)
from tests.unit.kv.toy import (
    AT,
    DATA_OCTETS,
    K0,
    PAYLOAD_OCTETS,
    TOY,
    deliver,
    fill,
    same_place_other_bytes,
    started,
    taken_right,
)


def test_a_second_copy_is_counted_and_disturbs_nothing() -> None:
    ledger = TOY.ledger()
    fill(ledger)
    payload = TOY.objects[K0, AT]
    assert deliver(ledger, K0, AT, payload) is Outcome.DUPLICATE
    assert ledger.counters.duplicates == 1
    torn = started(ledger, payload)
    torn.write(payload[:68] + bytes(60))
    torn.abandon()
    damaged = started(ledger, payload)
    damaged.write(payload[:68] + bytes(DATA_OCTETS))
    with pytest.raises(ObjectError):
        damaged.finish()
    assert np.array_equal(ledger.layer(1).k, TOY.k[1])
    assert ledger.counters.verified == 24
    assert ledger.take_ready() == [0, 1, 2, 3]


def test_other_bytes_at_a_verified_place_end_the_publication() -> None:
    ledger = TOY.ledger()
    fill(ledger)
    with pytest.raises(PublicationError, match=r"k\.raw\.s0 1/2: a second copy has another digest"):
        deliver(ledger, K0, AT, same_place_other_bytes(TOY.objects[K0, AT]))
    assert not ledger.is_ready(1)
    assert ledger.take_ready() == [0, 2, 3]
    assert ledger.usable_tokens(1) == 0
    with pytest.raises(UsageError):
        ledger.layer(1)
    assert np.array_equal(ledger.layer(2).k, TOY.k[2])


def two_copies(ledger: Ledger) -> tuple[Slot, Slot, bytes]:
    """A first and a second copy of one Object, both half in."""
    payload = TOY.objects[K0, AT]
    first, second = started(ledger, payload), started(ledger, payload)
    first.write(payload[:100])
    second.write(payload[:130])
    return first, second, payload


def test_fill_and_live_copy_at_once_first_wins() -> None:
    ledger = TOY.ledger()
    first, second, payload = two_copies(ledger)
    first.write(payload[100:])
    assert first.finish() is Outcome.VERIFIED
    second.write(payload[130:])
    assert second.finish() is Outcome.DUPLICATE
    assert taken_right(ledger)


def test_fill_and_live_copy_at_once_second_wins() -> None:
    ledger = TOY.ledger()
    first, second, payload = two_copies(ledger)
    second.write(payload[130:])
    assert second.finish() is Outcome.VERIFIED
    first.write(payload[100:])
    assert first.finish() is Outcome.DUPLICATE
    assert taken_right(ledger)


def test_a_late_first_copy_cannot_spoil_what_the_second_brought() -> None:
    ledger = TOY.ledger()
    first, second, payload = two_copies(ledger)
    second.write(payload[130:])
    second.finish()
    first.write(bytes(PAYLOAD_OCTETS - 100))
    with pytest.raises(ObjectError) as caught:
        first.finish()
    assert caught.value.check == "digest"
    assert taken_right(ledger)


@pytest.mark.parametrize("end", ["reset", "damage"])
def test_the_second_copy_still_wins_when_the_first_fails(end: str) -> None:
    ledger = TOY.ledger()
    first, second, payload = two_copies(ledger)
    if end == "reset":
        first.abandon()
    else:
        first.write(bytes(PAYLOAD_OCTETS - 100))
        with pytest.raises(ObjectError):
            first.finish()
    second.write(payload[130:])
    assert second.finish() is Outcome.VERIFIED
    assert taken_right(ledger)


def test_the_first_copy_still_wins_when_the_second_fails() -> None:
    ledger = TOY.ledger()
    first, second, payload = two_copies(ledger)
    second.write(bytes(PAYLOAD_OCTETS - 130))
    with pytest.raises(ObjectError):
        second.finish()
    first.write(payload[100:])
    assert first.finish() is Outcome.VERIFIED
    assert taken_right(ledger)


def test_two_different_copies_at_once_are_a_contradiction() -> None:
    ledger = TOY.ledger()
    payload = TOY.objects[K0, AT]
    other = same_place_other_bytes(payload)
    first, second = started(ledger, payload), started(ledger, other)
    first.write(payload[:100])
    second.write(other)
    assert second.finish() is Outcome.VERIFIED
    first.write(payload[100:])
    with pytest.raises(PublicationError):
        first.finish()
    assert not ledger.is_ready(1)


def test_copies_aside_are_bounded() -> None:
    ledger = TOY.ledger(max_aside_octets=2 * DATA_OCTETS)
    payload = TOY.objects[K0, AT]
    slots = [started(ledger, payload) for _ in range(4)]
    for slot in slots:
        slot.write(payload)
    assert slots[3].finish() is Outcome.DUPLICATE
    assert slots[2].finish() is Outcome.VERIFIED
    for slot in slots[:2]:
        assert slot.finish() is Outcome.DUPLICATE
    assert ledger._aside == {} and ledger.filling == 0
    assert taken_right(ledger)

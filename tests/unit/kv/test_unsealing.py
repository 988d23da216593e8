"""Sealed Objects on their way in: what opens is taken like any other, what does not is dropped."""

from __future__ import annotations

from typing import Any

import pytest

from kvcs.errors import ObjectError, UsageError
from kvcs.kv import Ledger, Outcome, ProtectionKey, ProtectionRing
from kvcs.kv.protection import (
    TAG_OCTETS,
    Sealer,
    immutable_properties,
    sealed_octets,
)
from kvcs.kv.unsealing import MAX_ENCRYPTED_PROPERTIES, QUIET_CHECKS, SealedSlot, Unsealer
from kvcs.moqt.names import FullTrackName, Location
from tests.unit.kv.toy import K0, V0, same_place_other_bytes, toy_prefix, toy_publication

TOY = toy_publication()
NAMESPACE = toy_prefix().namespace(bytes(16), TOY.blocks[0])
KEY = ProtectionKey(2**32 + 1, b"\x05" * 32)
OTHER = ProtectionKey(2**32 + 2, b"\x06" * 32)
RING = ProtectionRing([KEY])
IMMUTABLE = immutable_properties(KEY.key_id)
HERE = Location(1, 1)
PRIORITY = 48


def ledger(**options: Any) -> Ledger:
    made = Ledger(TOY.descriptor, blocks=sum(TOY.blocks), **options)
    made.add_segment(TOY.segments[0], TOY.blocks[0])
    return made


def sealed(
    payload: bytes | None = None,
    location: Location = HERE,
    *,
    track: Any = K0,
    key: ProtectionKey = KEY,
    namespace: Any = NAMESPACE,
) -> bytes:
    payload = TOY.objects[K0, HERE] if payload is None else payload
    sealer = Sealer(key, FullTrackName(namespace, track.name))
    return bytes(sealer.seal(location, PRIORITY, [payload]))


def begin(unsealer: Unsealer, octets: bytes, **changes: Any) -> SealedSlot:
    options: dict[str, Any] = {"priority": PRIORITY, "immutable": IMMUTABLE} | changes
    track, location = options.pop("track", K0), options.pop("location", HERE)
    slot = unsealer.begin(track, location, len(octets), **options)
    assert slot is not None
    return slot


def taken(unsealer: Unsealer, octets: bytes, **changes: Any) -> Outcome:
    slot = begin(unsealer, octets, **changes)
    for start in range(0, len(octets), 100):
        slot.write(octets[start : start + 100])
    return slot.finish()


def test_what_opens_is_checked_and_taken_like_any_other() -> None:
    keeper = ledger()
    unsealer = Unsealer(keeper, RING, NAMESPACE)
    for (track, location), payload in TOY.objects.items():
        octets = sealed(payload, location, track=track)
        changes = {"track": track, "location": location}
        assert taken(unsealer, octets, **changes) is Outcome.VERIFIED
        assert taken(unsealer, octets, **changes) is Outcome.DUPLICATE
    assert keeper.whole
    assert (unsealer.octets, keeper.counters.rejected) == (0, {})


@pytest.mark.parametrize(
    ("octets", "changes", "check"),
    [
        (sealed()[:-1] + bytes([sealed()[-1] ^ 1]), {}, "seal"),
        (bytes([sealed()[0] ^ 1]) + sealed()[1:], {}, "seal"),
        (sealed()[:-1], {}, "seal"),
        (sealed() + b"\x00", {}, "seal"),
        (sealed(), {"location": Location(1, 0)}, "seal"),
        (sealed(), {"location": Location(0, 1)}, "seal"),
        (sealed(), {"track": V0}, "seal"),
        (sealed(), {"priority": PRIORITY + 1}, "seal"),
        (sealed(), {"immutable": None}, "unprotected"),
        (sealed(), {"immutable": b""}, "unprotected"),
        (sealed(), {"immutable": immutable_properties(OTHER.key_id)}, "key"),
        (sealed(), {"immutable": IMMUTABLE + b"\x02\x00"}, "seal"),
        (sealed(key=ProtectionKey(KEY.key_id, b"\x07" * 32)), {}, "seal"),
        (sealed(namespace=(*NAMESPACE[:-1], b"\x01" * 16)), {}, "seal"),
        (TOY.objects[K0, HERE], {"immutable": None}, "unprotected"),
        (TOY.objects[K0, HERE], {}, "seal"),
    ],
)
def test_what_a_relay_makes_of_it_does_not_open(
    octets: bytes, changes: dict[str, Any], check: str
) -> None:
    keeper = ledger()
    unsealer = Unsealer(keeper, RING, NAMESPACE)
    with pytest.raises(ObjectError) as refused:
        taken(unsealer, octets, **changes)
    assert refused.value.check == check in QUIET_CHECKS
    assert keeper.counters.rejected == {check: 1}
    assert keeper.counters.octets == len(octets)
    assert (keeper.counters.verified, unsealer.octets) == (0, 0)
    assert taken(unsealer, sealed()) is Outcome.VERIFIED  # it is owed still


def test_what_opens_is_not_believed_for_that() -> None:
    """A member of the scope seals nonsense: the checks of every Object follow."""
    keeper = ledger()
    unsealer = Unsealer(keeper, RING, NAMESPACE)
    right = TOY.objects[K0, HERE]
    for payload, check in (
        (right[:-1] + bytes([right[-1] ^ 1]), "digest"),
        (b"KVO2" + right[4:], "magic"),
        (right[:-1], "length"),
        (b"", "length"),
        (TOY.objects[K0, Location(1, 0)], "block"),
    ):
        with pytest.raises(ObjectError) as refused:
            taken(unsealer, sealed(payload))
        assert refused.value.check == check
    assert taken(unsealer, sealed()) is Outcome.VERIFIED


def test_two_payloads_of_one_place_contradict_each_other_after_opening() -> None:
    keeper = ledger()
    unsealer = Unsealer(keeper, RING, NAMESPACE)
    assert taken(unsealer, sealed()) is Outcome.VERIFIED
    with pytest.raises(Exception, match="contradicts itself"):
        taken(unsealer, sealed(same_place_other_bytes(TOY.objects[K0, HERE])))


def test_nothing_outside_the_selection_is_buffered() -> None:
    keeper = ledger(layers=(1, 1))
    unsealer = Unsealer(keeper, RING, NAMESPACE)
    options: dict[str, Any] = {"priority": PRIORITY, "immutable": IMMUTABLE}
    assert unsealer.begin(K0, Location(0, 1), 1000, **options) is None
    assert keeper.counters.excess == 1
    for location, check in ((Location(99, 0), "layer"), (Location(1, 99), "block")):
        with pytest.raises(ObjectError) as refused:
            unsealer.begin(K0, location, 1000, **options)
        assert refused.value.check == check
    assert unsealer.octets == 0


def test_limits_are_on_the_sealed_octets() -> None:
    keeper = ledger(max_data_octets=4096)
    unsealer = Unsealer(keeper, RING, NAMESPACE, max_data_octets=4096, max_octets=2000)
    options: dict[str, Any] = {"priority": PRIORITY, "immutable": IMMUTABLE}
    for octets in (0, TAG_OCTETS, sealed_octets(68 + 4096) + 1):
        with pytest.raises(ObjectError) as refused:
            unsealer.begin(K0, HERE, octets, **options)
        assert refused.value.check == "length"
    first = unsealer.begin(K0, HERE, 1500, **options)
    assert first is not None
    first.abandon()
    first.abandon()
    assert keeper.counters.abandoned == 1 and unsealer.octets == 0
    # One always may be on its way.
    assert unsealer.begin(K0, HERE, sealed_octets(68 + 4096), **options) is not None


def test_what_was_announced_and_does_not_come_keeps_nothing_out() -> None:
    keeper, octets = ledger(), sealed()
    unsealer = Unsealer(keeper, RING, NAMESPACE, max_octets=3 * len(octets))
    silent = [begin(unsealer, octets, location=Location(1, block)) for block in range(2)]
    honest = begin(unsealer, octets)
    honest.write(octets[:50])
    silent.append(begin(unsealer, octets, location=Location(2, 0)))
    silent.append(begin(unsealer, octets, location=Location(2, 1)))
    assert unsealer.octets == 3 * len(octets)
    assert [each.displaced for each in silent] == [True, True, False, False]
    honest.write(octets[50:])
    assert honest.finish() is Outcome.VERIFIED
    silent[0].write(octets)
    silent[0].abandon()
    silent[1].write(octets)
    with pytest.raises(ObjectError) as refused:
        silent[1].finish()
    assert refused.value.check == "room" and keeper.counters.rejected["room"] == 2
    with pytest.raises(UsageError, match="has ended"):
        silent[1].finish()
    for each in silent[2:]:
        each.abandon()
    assert unsealer.octets == 0


def test_no_more_room_is_taken_than_the_codec_needs() -> None:
    unsealer = Unsealer(ledger(), RING, NAMESPACE)
    options: dict[str, Any] = {"priority": PRIORITY, "immutable": IMMUTABLE}
    longest = len(sealed()) + MAX_ENCRYPTED_PROPERTIES
    assert unsealer.begin(K0, HERE, longest, **options) is not None
    with pytest.raises(ObjectError) as refused:
        unsealer.begin(K0, HERE, longest + 1, **options)
    assert refused.value.check == "length"


def test_a_slot_ends_once_and_takes_what_was_announced() -> None:
    keeper = ledger()
    unsealer = Unsealer(keeper, RING, NAMESPACE)
    octets = sealed()
    slot = begin(unsealer, octets)
    slot.write(octets[:50])
    with pytest.raises(ObjectError) as refused:
        slot.finish()
    assert refused.value.check == "length"
    with pytest.raises(UsageError, match="has ended"):
        slot.finish()
    slot = begin(unsealer, octets)
    slot.write(octets)
    slot.write(b"more")
    with pytest.raises(ObjectError):
        slot.finish()


def test_objects_side_by_side_have_buffers_of_their_own() -> None:
    """Buffers are used again: never while somebody else writes there."""
    keeper = ledger()
    unsealer = Unsealer(keeper, RING, NAMESPACE)
    for layer in range(TOY.descriptor.layers):
        objects = {
            place: payload for place, payload in TOY.objects.items() if place[1].group == layer
        }
        slots = []
        for (track, location), payload in objects.items():
            octets = sealed(payload, location, track=track)
            slot = begin(unsealer, octets, track=track, location=location)
            slots.append((slot, octets))
        for start in range(0, max(len(octets) for _, octets in slots), 100):
            for slot, octets in slots:
                slot.write(octets[start : start + 100])
        forged = begin(
            unsealer, slots[0][1], track=slots[0][0].track, location=slots[0][0].location
        )
        forged.write(bytes(len(slots[0][1])))
        with pytest.raises(ObjectError):
            forged.finish()
        assert {slot.finish() for slot, _ in slots} == {Outcome.VERIFIED}
    assert keeper.whole
    for layer in range(TOY.descriptor.layers):
        tensors = keeper.layer(layer)
        assert (tensors.k.tobytes(), tensors.v.tobytes()) == (
            TOY.k[layer].tobytes(),
            TOY.v[layer].tobytes(),
        )


def test_a_forged_object_leaves_no_trace_in_the_tensor() -> None:
    keeper = ledger()
    unsealer = Unsealer(keeper, RING, NAMESPACE)
    assert taken(unsealer, sealed()) is Outcome.VERIFIED
    forged = bytearray(sealed())
    forged[100] ^= 1
    before = [array.tobytes() for array in keeper._layer(1)]
    with pytest.raises(ObjectError):
        taken(unsealer, bytes(forged))
    assert [array.tobytes() for array in keeper._layer(1)] == before

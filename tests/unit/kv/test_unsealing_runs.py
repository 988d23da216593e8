"""Sealed Objects of a layer one behind the other: opened with one slot, from where they lie."""

from __future__ import annotations

from typing import Any

import pytest

from kvcs.errors import ObjectError
from kvcs.kv import Ledger, Outcome, ProtectionKey, ProtectionRing
from kvcs.kv.protection import Sealer, immutable_properties
from kvcs.kv.unsealing import SealedSlot, Unsealer
from kvcs.moqt.names import FullTrackName, Location
from tests.unit.kv.toy import K0, PAYLOAD_OCTETS, toy_prefix, toy_publication

BLOCKS, LAYER, PRIORITY = 6, 1, 48
TOY = toy_publication((BLOCKS,))
NAMESPACE = toy_prefix(BLOCKS).namespace(bytes(16), BLOCKS)
KEY = ProtectionKey(2**32 + 1, b"\x05" * 32)
OTHER = ProtectionKey(2**32 + 2, b"\x06" * 32)
LEAD = b"##"
"""What stands between two Objects of a stream."""

LACKS = 50
"""Octets of Object 1 that have not come."""


def place(block: int) -> Location:
    return Location(LAYER, block)


def sealed(
    block: int,
    payload: bytes | None = None,
    *,
    at: Location | None = None,
    key: ProtectionKey = KEY,
) -> bytes:
    """A sealed block of the layer; other octets, another place or another key where named."""
    payload = TOY.objects[K0, place(block)] if payload is None else payload
    sealer = Sealer(key, FullTrackName(NAMESPACE, K0.name))
    return bytes(sealer.seal(at or place(block), PRIORITY, [payload]))


def begin(unsealer: Unsealer, block: int, octets: bytes) -> SealedSlot:
    slot = unsealer.begin(
        K0,
        place(block),
        len(octets),
        priority=PRIORITY,
        immutable=immutable_properties(KEY.key_id),
    )
    assert slot is not None
    return slot


def taken(unsealer: Unsealer, block: int, octets: bytes) -> Outcome:
    slot = begin(unsealer, block, octets)
    slot.write(octets)
    return slot.finish()


def ready(**options: Any) -> Unsealer:
    """What has opened Object 0 of the layer."""
    keeper = Ledger(TOY.descriptor, blocks=BLOCKS, **options)
    keeper.add_segment(TOY.segments[0], BLOCKS)
    unsealer = Unsealer(keeper, ProtectionRing([KEY]), NAMESPACE)
    taken(unsealer, 0, sealed(0))
    return unsealer


def first_of(unsealer: Unsealer, octets: bytes) -> SealedSlot:
    """A slot for Object 1 that lacks octets."""
    slot = begin(unsealer, 1, octets)
    slot.write(octets[:-LACKS])
    return slot


def goes_on(unsealer: Unsealer, slot: SealedSlot, pieces: list[bytes], came: int) -> int:
    """How many begin where ``came`` octets of the last piece are there."""
    data = pieces[0][-LACKS:] + LEAD + LEAD.join([*pieces[1:-1], pieces[-1][:came]])
    following = Location(slot.location.group, slot.location.object + 1)
    count = len(pieces) - 1
    return unsealer.go_on(slot, following, memoryview(data), LACKS, len(LEAD), count)


def rows(unsealer: Unsealer, blocks: int) -> bytes:
    """What lies in the tensor of the first blocks."""
    tokens = blocks * TOY.descriptor.block_tokens
    return unsealer.ledger._layer(LAYER)[0][:tokens].tobytes()


def meant(blocks: int) -> bytes:
    return TOY.k[LAYER][: blocks * TOY.descriptor.block_tokens].tobytes()


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("came", [1, 68, 150])
@pytest.mark.parametrize("last", [2, 3, 5])
def test_a_slot_goes_on_with_the_next_objects(last: int, came: int, signed: bool) -> None:
    unsealer = ready(signed=signed)
    counters, pieces = unsealer.ledger.counters, [sealed(each) for each in range(1, last + 1)]
    slot = first_of(unsealer, pieces[0])
    held = unsealer.octets
    assert goes_on(unsealer, slot, pieces, came) == last - 1
    assert (slot.location, slot.received, slot.ended) == (place(last), came, False)
    assert (unsealer.octets, unsealer.latest) == (held, slot)
    assert counters.verified == (0 if signed else last)
    assert counters.octets == last * PAYLOAD_OCTETS
    slot.write(pieces[-1][came:])
    assert slot.finish() is (Outcome.WAITING if signed else Outcome.VERIFIED)
    assert unsealer.octets == 0 and not counters.rejected and not counters.duplicates
    assert rows(unsealer, last + 1) == meant(last + 1)
    if signed:
        unsealer.ledger.apply_manifest(TOY.writer().manifest())
        assert counters.verified == last + 1


def test_what_is_all_there_and_has_not_ended_is_begun_alone() -> None:
    unsealer, pieces = ready(), [sealed(each) for each in range(1, BLOCKS)]
    slot = first_of(unsealer, pieces[0])
    assert goes_on(unsealer, slot, pieces, len(pieces[-1])) == BLOCKS - 2
    assert (slot.location, slot.received) == (place(BLOCKS - 1), 0)
    assert unsealer.ledger.counters.verified == BLOCKS - 1
    slot.write(pieces[-1])
    assert slot.finish() is Outcome.VERIFIED
    assert rows(unsealer, BLOCKS) == meant(BLOCKS)


@pytest.mark.parametrize("bad", [1, 2, 4])
@pytest.mark.parametrize("how", ["flipped", "moved", "under another key", "of another digest"])
def test_a_run_ends_before_the_object_that_is_not_right(bad: int, how: str) -> None:
    unsealer = ready()
    keeper, opener = unsealer.ledger, unsealer.lane(K0).opener
    pieces = [sealed(each) for each in range(1, BLOCKS)]
    payload = bytearray(TOY.objects[K0, place(bad)])
    payload[-1] ^= 1
    right = pieces[bad - 1]
    wrong = pieces[bad - 1] = {
        "flipped": right[:9] + bytes((right[9] ^ 1,)) + right[10:],
        "moved": sealed(bad, at=Location(LAYER, 0)),
        "under another key": sealed(bad, key=OTHER),
        "of another digest": sealed(bad, bytes(payload)),
    }[how]
    slot = first_of(unsealer, pieces[0])
    assert goes_on(unsealer, slot, pieces, 7) == bad - 1
    assert keeper.counters.verified == bad and not opener.failures
    assert not keeper.counters.rejected
    # What did not open is not in the tensor, and what has is.
    assert rows(unsealer, bad) == meant(bad)
    if bad == 1:
        assert (slot.location, slot.received) == (place(1), len(wrong) - LACKS)
        slot.write(wrong[-LACKS:])
    else:
        assert (slot.location, slot.received) == (place(bad), 0)
        slot.write(wrong)
    check = "digest" if how == "of another digest" else "seal"
    with pytest.raises(ObjectError) as caught:
        slot.finish()
    assert caught.value.check == check and keeper.counters.rejected[check] == 1
    assert opener.failures == (check == "seal")
    assert taken(unsealer, bad, right) is Outcome.VERIFIED
    assert rows(unsealer, bad + 1) == meant(bad + 1)


def displaced(unsealer: Unsealer, slot: SealedSlot) -> None:
    slot.displace()


def has_the_last(unsealer: Unsealer, slot: SealedSlot) -> None:
    taken(unsealer, 3, sealed(3))


def has_the_first(unsealer: Unsealer, slot: SealedSlot) -> None:
    taken(unsealer, 1, sealed(1))


def is_filled_in_the_clear(unsealer: Unsealer, slot: SealedSlot) -> None:
    payload = TOY.objects[K0, place(2)]
    filling = unsealer.ledger.begin(K0, place(2), len(payload))
    assert filling is not None
    filling.write(payload[:100])


def lacks_more(unsealer: Unsealer, slot: SealedSlot) -> None:
    slot.received -= 1


@pytest.mark.parametrize(
    "amiss", [displaced, has_the_last, has_the_first, is_filled_in_the_clear, lacks_more]
)
def test_where_it_is_not_so_nothing_has_happened(amiss: Any) -> None:
    unsealer, pieces = ready(), [sealed(each) for each in range(1, 4)]
    slot = first_of(unsealer, pieces[0])
    amiss(unsealer, slot)
    counters = unsealer.ledger.counters
    before = (slot.location, slot.received, slot.displaced, counters.verified, counters.octets)
    tensor = rows(unsealer, BLOCKS)
    assert goes_on(unsealer, slot, pieces, 100) == 0
    after = (slot.location, slot.received, slot.displaced, counters.verified, counters.octets)
    assert after == before and rows(unsealer, BLOCKS) == tensor


def test_not_for_the_first_object_of_a_layer_nor_beyond_the_wanted_ones() -> None:
    keeper = Ledger(TOY.descriptor, blocks=3)
    keeper.add_segment(TOY.segments[0], BLOCKS)
    unsealer = Unsealer(keeper, ProtectionRing([KEY]), NAMESPACE)
    pieces = [sealed(each) for each in range(BLOCKS)]
    slot = begin(unsealer, 0, pieces[0])
    slot.write(pieces[0][:-LACKS])
    assert goes_on(unsealer, slot, pieces[:3], 5) == 0  # nothing was opened, no memory is there
    slot.write(pieces[0][-LACKS:])
    assert slot.finish() is Outcome.VERIFIED
    slot = first_of(unsealer, pieces[1])
    assert goes_on(unsealer, slot, pieces[1:], 5) == 1
    assert (slot.location, keeper.counters.verified) == (place(2), 2)
    slot.write(pieces[2][:-LACKS])
    assert goes_on(unsealer, slot, pieces[2:], 5) == 0  # the last one that is wanted
    slot.write(pieces[2][-LACKS:])
    assert slot.finish() is Outcome.VERIFIED

"""Padded publications: what a relay that loses Objects, or looks at their sizes, sees of them."""

from __future__ import annotations

from typing import Any

import pytest

import kvcs
from kvcs.kv import ProtectionKey, ProtectionRing
from kvcs.moqt.events import Event, FetchReceived
from kvcs.moqt.objects import ObjectStatus
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import RELAY_PORT, open_connection
from kvcs.testing.network import Network
from kvcs.trust import SigningKey
from tests.cases.attacking_relay import IMPATIENT, Publication, attacking, published
from tests.unit.kv.toy import K0, toy_prefix, toy_publication
from tests.virtual import virtual

KEY = ProtectionKey(2**32 + 1, b"\x01" * 32)
PAD = 8
KEPT = 3
"""Blocks of layers that the relay has not lost; real ones in every publication."""


async def asked_for(held: Publication, prefix: kvcs.Prefix) -> list[Any]:
    """What a relay is asked to FETCH, in order, until its consumer gives up."""
    network, seen = Network(seed=61), list[Any]()

    def note(connection: Connection, event: Event) -> None:
        if isinstance(event, FetchReceived):
            seen.append((event.full_track_name.name, event.parameters))

    async with attacking(network, held, observer=note):
        with network.host("consumer"):
            session = await open_connection(f"moqt://relay:{RELAY_PORT}")
        subscriber = kvcs.Subscriber(session, settings=IMPATIENT, protection=ProtectionRing([KEY]))
        async with subscriber.open(prefix, deadline=5.0, probe=0) as cache:
            with pytest.raises(kvcs.CacheIncomplete):
                await cache.complete()
        await session.close()
    return seen


@pytest.mark.parametrize("lost", [(1,), (0, 1), (3,), (0, 1, 2, 3)])
@virtual
async def test_what_is_asked_for_again_ends_with_the_padding(lost: tuple[int, ...]) -> None:
    """Whole layers' ends, one layer or several in a row."""
    seen = []
    for blocks in (KEPT + 1, 6, PAD):
        toy, prefix = toy_publication((blocks,)), toy_prefix(blocks)
        held = await published(prefix, toy, protect=KEY, pad_blocks=PAD)
        for place, each in list(held.objects.items()):
            name, location = place
            if name == K0.name and location.group in lost and location.object >= KEPT:
                if each.header.status is ObjectStatus.NORMAL:
                    del held.objects[place]
        seen.append(await asked_for(held, prefix))
    assert seen[0], "nothing was asked for"
    # How often depends on time alone; what, on nothing that is secret.
    short, middle, long = ([*dict.fromkeys(map(repr, each))] for each in seen)
    assert short == middle == long


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("pad", "lengths"), [(4, (1, 3, 4)), (12, (2, 9, 10, 12))])
async def test_publications_of_one_padded_length_look_alike(
    pad: int, lengths: tuple[int, ...], signed: bool
) -> None:
    """To a relay: their Objects, the size of each, and those of the manifest, octet for octet.

    Whole ones, too, which have no padding; and numbers that have another count of digits.
    """
    seen: list[dict[tuple[bytes, Any], int]] = []
    for blocks in lengths:
        toy, prefix = toy_publication((blocks,)), toy_prefix(blocks)
        options = {"sign": SigningKey.generate(scope_id=prefix.scope_id)} if signed else {}
        held = await published(prefix, toy, protect=KEY, pad_blocks=pad, **options)
        seen.append({place: len(each.payload) for place, each in held.objects.items()})
    assert len(seen[0]) > 2 * toy.descriptor.layers * pad  # manifests beside them
    assert all(each == seen[0] for each in seen)

"""Everything that a relay may try, with protection, with signatures, with both and with neither.

Whatever it does, layers that a consumer gets are the producer's, and a cache that is not whole is
not called complete. Two attacks succeed where there is neither protection nor a signature, as
docs/security.md admits; they succeed nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvcs.errors import CacheIncomplete
from kvcs.kv import Prefix, ProtectionKey, ProtectionRing, Scope
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.trust import KeyRing, SigningKey
from tests.builders import same
from tests.cases.attacking_relay import Held, Outcome, Publication, data, published, retrieved
from tests.unit.kv.toy import K0, V0, same_place_other_bytes, toy_prefix, toy_publication
from tests.virtual import virtual

TOY, OTHER_TOY = toy_publication(), toy_publication(seed=1)
PREFIX = toy_prefix()
THEIRS = Prefix(Scope(b"\x07" * 32), TOY.descriptor, PREFIX.token_ids)
"""The same prompt and model in another scope."""
LAYERS = set(range(TOY.descriptor.layers))
KEY = ProtectionKey(2**32 + 1, b"\x01" * 32)
THEIR_KEY = ProtectionKey(KEY.key_id, b"\x77" * 32)
SIGNER = SigningKey.generate(scope_id=PREFIX.scope_id)
THEIR_SIGNER = SigningKey.generate(scope_id=THEIRS.scope_id)

MODES: dict[str, tuple[bool, bool]] = {
    "neither": (False, False),
    "signed": (True, False),
    "protected": (False, True),
    "both": (True, True),
}
"""Whether it is signed, and whether it is protected."""

HERE = data(K0, 1, 1)
"""What is attacked: one Object of layer 1."""

Attack = Callable[[Publication, Publication], None]
"""Changes what the relay serves; it has another publication of the prefix at hand."""


def reading(mode: str) -> dict[str, Any]:
    """What a consumer asks for."""
    signed, protected = MODES[mode]
    options: dict[str, Any] = {}
    if signed:
        options |= {"keys": KeyRing([SIGNER.public]), "require_signed": True}
    if protected:
        options["protection"] = ProtectionRing([KEY])
    return options


async def publications(mode: str) -> tuple[Publication, Publication]:
    """One publication, and another one of the same prefix and producer with other tensors."""
    signed, protected = MODES[mode]
    options = {"sign": SIGNER if signed else None, "protect": KEY if protected else None}
    return await published(PREFIX, TOY, **options), await published(PREFIX, OTHER_TOY, **options)


def put(held: Publication, payload: bytes, place: tuple[bytes, Location] = HERE) -> None:
    """Serve another payload at a place."""
    held.objects[place] = held.objects[place].with_payload(payload)


def flips(held: Publication, other: Publication) -> None:
    payload = held.objects[HERE].payload
    put(held, payload[:-1] + bytes([payload[-1] ^ 1]))


def truncates(held: Publication, other: Publication) -> None:
    put(held, held.objects[HERE].payload[:-1])


def swaps(held: Publication, other: Publication) -> None:
    there = data(K0, 1, 2)
    mine, theirs = held.objects[HERE].payload, held.objects[there].payload
    put(held, theirs)
    put(held, mine, there)


def replays(held: Publication, other: Publication) -> None:
    put(held, held.objects[data(K0, 0, 1)].payload)


def moves_to_another_location(held: Publication, other: Publication) -> None:
    """An Object is said to be elsewhere; its own place stays empty."""
    there = data(K0, 1, 2)
    held.objects[there] = held.objects.pop(HERE).at(there[1])


def moves_to_another_track(held: Publication, other: Publication) -> None:
    put(held, held.objects[data(V0, 1, 1)].payload)


def withholds_an_object(held: Publication, other: Publication) -> None:
    del held.objects[HERE]


def withholds_a_layer(held: Publication, other: Publication) -> None:
    for place in [each for each in held.objects if each[0] == K0.name and each[1].group == 1]:
        del held.objects[place]


def reorders(held: Publication, other: Publication) -> None:
    """The Objects of a layer go out backwards, each said to be where another one is."""
    places = [data(K0, 1, block) for block in range(3)]
    payloads = [held.objects[place].payload for place in places]
    for place, payload in zip(places, reversed(payloads), strict=True):
        put(held, payload, place)


def forges_data_and_digest(held: Publication, other: Publication) -> None:
    """Every field of the header is right, and so is the digest; lists say something else."""
    right = TOY.objects[K0, HERE[1]]
    held.objects[HERE] = held.objects[HERE].with_payload(same_place_other_bytes(right), b"")


def forges_the_manifest_too(held: Publication, other: Publication) -> None:
    """Data, its digest, and the manifest that lists it, in the clear."""
    forges_data_and_digest(held, other)
    forged = held.objects[HERE].payload[36:68]
    octets = TOY.writer().to_json_bytes()
    octets = octets.replace(TOY.digests[K0, HERE[1]].hex().encode(), forged.hex().encode())
    last = held.manifests[-1]
    kept = held.objects[last].with_payload(octets, b"")
    for place in held.manifests:
        del held.objects[place]
    held.objects[b"manifest", last[1]] = kept


def rolls_back(held: Publication, other: Publication) -> None:
    """Only the first versions of the manifest are there."""
    for place in held.manifests[2:]:
        del held.objects[place]


def serves_an_old_version_as_new(held: Publication, other: Publication) -> None:
    *_, former, last = held.manifests
    put(held, held.objects[former].payload, last)
    for place in held.manifests[:-1]:
        del held.objects[place]


def serves_an_object_of_another_publication(held: Publication, other: Publication) -> None:
    held.objects[HERE] = other.objects[HERE]


def serves_another_publication(held: Publication, other: Publication) -> None:
    held.objects = other.objects


def ends_early(held: Publication, other: Publication) -> None:
    """The Tracks are said to end before the third layer."""
    for track in (K0, V0):
        later = [each for each in held.objects if each[0] == track.name and each[1].group >= 2]
        for place in later:
            del held.objects[place]
        header = ObjectHeader(
            group_id=2,
            subgroup_id=0,
            object_id=0,
            publisher_priority=127,
            properties=b"",
            payload_length=0,
            status=ObjectStatus.END_OF_TRACK,
        )
        held.objects[track.name, Location(2, 0)] = Held(header, b"")


def calls_it_complete(held: Publication, other: Publication) -> None:
    """An early manifest with its "complete" turned to true, in place of every later one."""
    withholds_a_layer(held, other)
    first, *later = held.manifests
    payload = held.objects[first].payload
    put(held, payload.replace(b'"complete":false', b'"complete":true'), first)
    for place in later:
        del held.objects[place]


def drops_a_block_from_the_count(held: Publication, other: Publication) -> None:
    """The manifest speaks of two blocks where there are three, and the third does not come."""
    for place in held.manifests:
        payload = held.objects[place].payload
        put(held, payload.replace(b'"blocks":3', b'"blocks":2'), place)
    for place in [each for each in held.objects if each[1].object == 2 and each[0] != b"manifest"]:
        del held.objects[place]


@dataclass(frozen=True)
class Verb:
    """One attack, and what a consumer gets of it."""

    attack: Attack
    layers: set[int] | None = None
    """Layers that come all the same; None: those of the producer, however many."""

    lies_where_neither: bool = False
    """Whether without protection and signatures it succeeds, as docs/security.md admits."""


VERBS = {
    "flips": Verb(flips, LAYERS - {1}),
    "truncates": Verb(truncates, LAYERS - {1}),
    "swaps": Verb(swaps, LAYERS - {1}),
    "replays": Verb(replays, LAYERS - {1}),
    "reorders": Verb(reorders, LAYERS - {1}),
    "moves to another Location": Verb(moves_to_another_location, LAYERS - {1}),
    "moves to another track": Verb(moves_to_another_track, LAYERS - {1}),
    "withholds an Object": Verb(withholds_an_object, LAYERS - {1}),
    "withholds a layer": Verb(withholds_a_layer, LAYERS - {1}),
    "forges data and digest": Verb(forges_data_and_digest, LAYERS - {1}),
    "forges the manifest too": Verb(forges_the_manifest_too, set(), lies_where_neither=True),
    "rolls back": Verb(rolls_back),
    "serves an old version as new": Verb(serves_an_old_version_as_new),
    "serves an Object of another publication": Verb(
        serves_an_object_of_another_publication, LAYERS - {1}
    ),
    "serves another publication": Verb(serves_another_publication, set(), lies_where_neither=True),
    "ends early": Verb(ends_early, {0, 1}),
    "calls it complete": Verb(calls_it_complete),
    "drops a block from the count": Verb(drops_a_block_from_the_count),
}


def right(outcome: Outcome) -> bool:
    """Whether every layer is the producer's."""
    return all(same(layer, TOY) for layer in outcome.layers.values())


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("name", list(VERBS))
@virtual
async def test_nothing_false_is_taken(name: str, mode: str) -> None:
    verb = VERBS[name]
    held, other = await publications(mode)
    verb.attack(held, other)
    outcome = await retrieved(held, PREFIX, deadline=1.0, **reading(mode))
    if verb.lies_where_neither and mode == "neither":
        assert set(outcome.layers) == LAYERS and not right(outcome)
        assert outcome.errors == [] and outcome.rejected == {}
        return
    assert right(outcome)
    assert outcome.errors, "it is not called complete"
    if verb.layers is not None:
        assert set(outcome.layers) == verb.layers
    assert set(outcome.layers) != LAYERS or any(
        isinstance(each, CacheIncomplete) for each in outcome.errors
    )


@pytest.mark.parametrize("mode", list(MODES))
@virtual
async def test_another_scopes_cache_is_never_taken(mode: str) -> None:
    """The relay answers for a scope with what it has of another one."""
    signed, protected = MODES[mode]
    held = await published(
        THEIRS,
        OTHER_TOY,
        sign=THEIR_SIGNER if signed else None,
        protect=THEIR_KEY if protected else None,
    )
    held.namespace = (*PREFIX.namespace(held.namespace[-1])[:4], held.namespace[-1])
    outcome = await retrieved(held, PREFIX, deadline=0.5, **reading(mode))
    assert outcome.layers == {}
    assert outcome.errors


@pytest.mark.parametrize("mode", list(MODES))
@virtual
async def test_layers_that_come_in_another_order_are_not_wrong(mode: str) -> None:
    """Later layers first, by their priorities: slower for a consumer, which a relay always may be.

    A sealed Object's priority is authenticated, so there it does not open.
    """
    held, _ = await publications(mode)
    for place, each in list(held.objects.items()):
        if place not in held.manifests:
            header = replace(each.header, publisher_priority=100 - place[1].group)
            held.objects[place] = replace(each, header=header)
    outcome = await retrieved(held, PREFIX, deadline=1.0, **reading(mode))
    assert right(outcome)
    if MODES[mode][1]:
        assert outcome.layers == {} and outcome.errors
    else:
        assert set(outcome.layers) == LAYERS
        assert outcome.errors == [] and outcome.rejected == {}


@pytest.mark.parametrize("mode", list(MODES))
@virtual
async def test_untouched_all_of_it_is_taken(mode: str) -> None:
    held, _ = await publications(mode)
    outcome = await retrieved(held, PREFIX, **reading(mode))
    assert set(outcome.layers) == LAYERS and right(outcome)
    assert outcome.errors == [] and outcome.rejected == {}

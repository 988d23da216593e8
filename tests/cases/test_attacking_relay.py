"""A relay against its consumers: what it changes is never taken for verified, and what is not
stopped without protection or signatures is shown, too (docs/security.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import kvcs
from kvcs.kv import (
    MANIFEST,
    MANIFEST_COSE,
    Prefix,
    ProtectionKey,
    ProtectionRing,
    Scope,
    manifest_json_bytes,
    parse_manifest,
)
from kvcs.kv.protection import Sealer, immutable_properties, object_properties
from kvcs.moqt.names import FullTrackName, Location
from kvcs.trust import KeyRing, SigningKey
from tests.builders import same
from tests.cases.attacking_relay import (
    Attack,
    Publication,
    data,
    published,
    retrieved,
    watched,
)
from tests.unit.kv.toy import K0, V0, same_place_other_bytes, toy_prefix, toy_publication
from tests.virtual import virtual

TOY, OTHER_TOY = toy_publication(), toy_publication(seed=1)
PREFIX = toy_prefix()
LAYERS = TOY.descriptor.layers
KEY = ProtectionKey(2**32 + 1, b"\x01" * 32)
RING = ProtectionRing([KEY])
SIGNER = SigningKey.generate(scope_id=PREFIX.scope_id)
SIGNED = {"keys": KeyRing([SIGNER.public]), "require_signed": True}

HERE = data(K0, 1, 1)
"""What is attacked: one Object of layer 1."""

RIGHT = TOY.objects[K0, Location(1, 1)]
FORGED = same_place_other_bytes(RIGHT)
"""Other tensors, with every field of the header right and the digest to go with them."""


def on_payload(change: Callable[[bytes], bytes]) -> Attack:
    def attack(held: Publication) -> None:
        held.objects[HERE] = held.objects[HERE].with_payload(change(held.objects[HERE].payload))

    return attack


def exchange(other: tuple[bytes, Location], *, both: bool = True) -> Attack:
    def attack(held: Publication) -> None:
        mine, theirs = held.objects[HERE], held.objects[other]
        held.objects[HERE] = mine.with_payload(theirs.payload)
        if both:
            held.objects[other] = theirs.with_payload(mine.payload)

    return attack


def put_instead(payload: bytes, properties: bytes) -> Attack:
    def attack(held: Publication) -> None:
        held.objects[HERE] = held.objects[HERE].with_payload(payload, properties)

    return attack


def withhold(held: Publication) -> None:
    del held.objects[HERE]


def withhold_layer(held: Publication) -> None:
    for place in list(held.objects):
        if place[0] == K0.name and place[1].group == 1:
            del held.objects[place]


def other_priority(held: Publication) -> None:
    for (name, location), each in list(held.objects.items()):
        if name == K0.name and location.group == 1:
            header = replace(each.header, publisher_priority=7)
            held.objects[name, location] = replace(each, header=header)


def sealed_by(key: ProtectionKey) -> Attack:
    """An outsider seals under the Key ID of the scope's key."""

    def attack(held: Publication) -> None:
        name = FullTrackName(held.namespace, HERE[0])
        header = held.objects[HERE].header
        assert header.publisher_priority is not None
        sealed = Sealer(key, name).seal(HERE[1], header.publisher_priority, [RIGHT])
        held.objects[HERE] = held.objects[HERE].with_payload(bytes(sealed))

    return attack


PROPERTIES = object_properties(KEY.key_id)
UNKNOWN = object_properties(KEY.key_id + 1)
IN_THE_OPEN = immutable_properties(KEY.key_id)
"""The Key ID where relays may change it."""

SEALED_ATTACKS: dict[str, tuple[Attack, str | None]] = {
    "flips the last octet": (on_payload(lambda p: p[:-1] + bytes([p[-1] ^ 1])), "seal"),
    "flips the first octet": (on_payload(lambda p: bytes([p[0] ^ 1]) + p[1:]), "seal"),
    "truncates": (on_payload(lambda p: p[:-1]), "seal"),
    "truncates below a tag": (on_payload(lambda p: p[:9]), "length"),
    "lengthens": (on_payload(lambda p: p + b"\x00"), "seal"),
    "swaps blocks": (exchange(data(K0, 1, 2)), "seal"),
    "replays another layer": (exchange(data(K0, 0, 1), both=False), "seal"),
    "moves an object to another track": (exchange(data(V0, 1, 1), both=False), "seal"),
    "strips the seal": (put_instead(RIGHT, b""), "unprotected"),
    "forges without a seal": (put_instead(FORGED, b""), "unprotected"),
    "forges what looks sealed": (put_instead(FORGED, PROPERTIES), "seal"),
    "names a key that nobody has": (put_instead(FORGED, UNKNOWN), "key"),
    "names the key in the open": (put_instead(FORGED, IN_THE_OPEN), "unprotected"),
    "seals with a key of its own": (
        sealed_by(ProtectionKey(KEY.key_id, b"\x66" * 32)),
        "seal",
    ),
    "changes a priority": (other_priority, "seal"),
    "withholds an object": (withhold, None),
    "withholds a layer": (withhold_layer, None),
}


@pytest.mark.parametrize("name", SEALED_ATTACKS)
@virtual
async def test_nothing_that_was_changed_is_taken(name: str) -> None:
    attack, check = SEALED_ATTACKS[name]
    held = await published(PREFIX, TOY, protect=KEY)
    attack(held)
    outcome = await retrieved(held, PREFIX, protection=RING)
    assert set(outcome.layers) == set(range(LAYERS)) - {1}
    assert all(same(layer, TOY) for layer in outcome.layers.values())
    assert "incomplete" in outcome.error
    assert set(outcome.rejected) == (set() if check is None else {check})


@virtual
async def test_untouched_all_of_it_is_taken() -> None:
    """The same way without an attack: what the other tests miss is not lost by their ways."""
    for options, reading in (
        ({"protect": KEY}, {"protection": RING}),
        ({"protect": KEY, "sign": SIGNER}, {"protection": RING, **SIGNED}),
        ({"sign": SIGNER}, SIGNED),
        ({}, {}),
    ):
        held = await published(PREFIX, TOY, **options)
        outcome = await retrieved(held, PREFIX, **reading)
        assert [same(outcome.layers[layer], TOY) for layer in range(LAYERS)] == [True] * LAYERS
        assert (outcome.errors, outcome.rejected) == ([], {})


@pytest.mark.parametrize("seed", [0, 1])
@virtual
async def test_objects_of_another_publication_are_not_taken(seed: int) -> None:
    """Not even where they hold the very same tensors, under the same key."""
    toy = TOY if seed == 0 else OTHER_TOY
    held, other = [await published(PREFIX, each, protect=KEY) for each in (TOY, toy)]
    held.objects[HERE] = other.objects[HERE]
    outcome = await retrieved(held, PREFIX, protection=RING)
    assert set(outcome.layers) == {0, 2, 3}
    assert outcome.rejected.keys() == {"seal"}


@virtual
async def test_a_whole_publication_under_the_name_of_another() -> None:
    held, other = [await published(PREFIX, each, protect=KEY) for each in (TOY, OTHER_TOY)]
    held.objects = other.objects
    outcome = await retrieved(held, PREFIX, deadline=0.5, protection=RING)
    assert outcome.layers == {}
    assert outcome.rejected.keys() == {"seal"}


@pytest.mark.parametrize("protected", [False, True])
@virtual
async def test_an_answer_from_another_scope(protected: bool) -> None:
    """The same prompt and model in another scope, served under this scope's name."""
    theirs = Prefix(Scope(b"\x07" * 32), TOY.descriptor, PREFIX.token_ids)
    key = ProtectionKey(KEY.key_id, b"\x77" * 32)
    held = await published(theirs, OTHER_TOY, protect=key if protected else None)
    held.namespace = (*PREFIX.namespace(held.namespace[-1])[:4], held.namespace[-1])
    outcome = await retrieved(held, PREFIX, deadline=0.5, protection=RING if protected else None)
    assert outcome.layers == {}
    assert ("seal" in outcome.rejected) is protected
    assert outcome.errors


@pytest.mark.parametrize(
    "name", ["flips the last octet", "strips the seal", "replays another layer"]
)
@virtual
async def test_what_does_not_open_shows_nothing(name: str) -> None:
    """While a publication goes on, a relay sees the same of a consumer whatever became of it."""
    seen: list[list[str]] = []
    for attack in (lambda held: None, SEALED_ATTACKS[name][0]):
        held = await published(PREFIX, TOY, protect=KEY)
        attack(held)
        first = held.manifests[0]
        held.objects = {
            place: each
            for place, each in held.objects.items()
            if place == first or (place not in held.manifests and place[1].group <= 1)
        }
        seen.append(await watched(held, PREFIX, protection=RING))
    right, wrong = seen
    assert right == wrong
    assert right.count("SubscribeReceived") >= 3


# --- the manifest ---


def newest(held: Publication) -> tuple[bytes, Location]:
    return held.manifests[-1]


def flip_manifest(held: Publication) -> None:
    place = newest(held)
    payload = held.objects[place].payload
    held.objects[place] = held.objects[place].with_payload(payload[:-1] + bytes([payload[-1] ^ 1]))


def plain_manifest(held: Publication) -> None:
    writer = OTHER_TOY.writer()
    place = newest(held)
    held.objects[place] = held.objects[place].with_payload(writer.to_json_bytes(), b"")


def older_in_place_of_newer(held: Publication) -> None:
    place, former = newest(held), held.manifests[-2]
    held.objects[place] = held.objects[place].with_payload(held.objects[former].payload)


def data_as_manifest(held: Publication) -> None:
    place = newest(held)
    held.objects[place] = held.objects[place].with_payload(held.objects[HERE].payload)


MANIFEST_ATTACKS = {
    "flips": (flip_manifest, "seal"),
    "forges it without a seal": (plain_manifest, "unprotected"),
    "serves a former version as a newer one": (older_in_place_of_newer, "seal"),
    "serves data as a manifest": (data_as_manifest, "seal"),
}


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", MANIFEST_ATTACKS)
@virtual
async def test_a_manifest_that_was_changed_is_not_read(name: str, signed: bool) -> None:
    attack, check = MANIFEST_ATTACKS[name]
    held = await published(PREFIX, TOY, protect=KEY, sign=SIGNER if signed else None)
    attack(held)
    options = SIGNED if signed else {}
    outcome = await retrieved(held, PREFIX, deadline=0.5, protection=RING, **options)
    assert outcome.layers == {}
    assert outcome.errors
    assert outcome.rejected.keys() == {check}


@pytest.mark.parametrize("signed", [False, True])
@virtual
async def test_a_manifest_that_is_rolled_back_makes_less_of_the_cache_and_nothing_wrong(
    signed: bool,
) -> None:
    """A relay may always be behind: what it cannot do is to make other tensors of it."""
    held = await published(PREFIX, TOY, protect=KEY, sign=SIGNER if signed else None)
    for place in held.manifests[2:]:
        del held.objects[place]
    options = SIGNED if signed else {}
    outcome = await retrieved(held, PREFIX, deadline=1.0, protection=RING, **options)
    assert all(same(layer, TOY) for layer in outcome.layers.values())
    assert "incomplete" in outcome.error
    if signed:  # what no list names is not released
        assert len(outcome.layers) < LAYERS


# --- without protection: what a relay can and cannot do ---

PLAIN_ATTACKS: dict[str, tuple[Attack, set[str]]] = {
    "flips the last octet": (SEALED_ATTACKS["flips the last octet"][0], {"digest"}),
    "flips the first octet": (SEALED_ATTACKS["flips the first octet"][0], {"magic"}),
    "truncates": (SEALED_ATTACKS["truncates"][0], {"length"}),
    "swaps blocks": (SEALED_ATTACKS["swaps blocks"][0], {"block"}),
    "replays another layer": (SEALED_ATTACKS["replays another layer"][0], {"layer"}),
    "moves an object to another track": (
        SEALED_ATTACKS["moves an object to another track"][0],
        {"component"},
    ),
    "forges data and digest": (put_instead(FORGED, b""), {"listed"}),
    "withholds an object": (withhold, set()),
}


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", PLAIN_ATTACKS)
@virtual
async def test_without_protection_what_does_not_fit_is_dropped(name: str, signed: bool) -> None:
    attack, checks = PLAIN_ATTACKS[name]
    held = await published(PREFIX, TOY, sign=SIGNER if signed else None)
    attack(held)
    outcome = await retrieved(held, PREFIX, **(SIGNED if signed else {}))
    assert set(outcome.layers) == {0, 2, 3}
    assert all(same(layer, TOY) for layer in outcome.layers.values())
    assert set(outcome.rejected) == checks


def forge_everything(held: Publication) -> None:
    """Data, its digest, and the manifest that lists it: whoever can write all three can lie."""
    held.objects[HERE] = held.objects[HERE].with_payload(FORGED)
    place = (MANIFEST, newest(held)[1])
    held.objects = {
        each: value for each, value in held.objects.items() if not each[0].startswith(b"manifest")
    } | {place: held.objects[newest(held)]}
    right = TOY.digests[K0, Location(1, 1)]
    forged = FORGED[36:68]
    octets = TOY.writer().to_json_bytes().replace(right.hex().encode(), forged.hex().encode())
    assert manifest_json_bytes(parse_manifest(octets)) == octets
    held.objects[place] = held.objects[place].with_payload(octets, b"")


@virtual
async def test_without_protection_and_signatures_a_relay_can_lie() -> None:
    """What docs/security.md admits: digests alone show accidents, not attacks."""
    held = await published(PREFIX, TOY)
    forge_everything(held)
    outcome = await retrieved(held, PREFIX)
    assert set(outcome.layers) == set(range(LAYERS))
    assert not same(outcome.layers[1], TOY)
    assert outcome.rejected == {}


@pytest.mark.parametrize("kind", ["signed", "protected", "both"])
@virtual
async def test_with_either_it_cannot(kind: str) -> None:
    signed, protected = kind != "protected", kind != "signed"
    held = await published(
        PREFIX, TOY, sign=SIGNER if signed else None, protect=KEY if protected else None
    )
    forge_everything(held)
    outcome = await retrieved(
        held,
        PREFIX,
        deadline=0.5,
        protection=RING if protected else None,
        **(SIGNED if signed else {}),
    )
    assert outcome.layers == {}
    assert outcome.rejected == {"unsigned": 1} if signed else {"unprotected": 1}


@virtual
async def test_a_member_of_the_scope_can_lie_where_nothing_is_signed() -> None:
    """Protection shows membership, not who it was: that takes a signature."""
    poisoned = await published(PREFIX, OTHER_TOY, protect=KEY)
    outcome = await retrieved(poisoned, PREFIX, protection=RING)
    assert set(outcome.layers) == set(range(LAYERS))
    assert all(same(layer, OTHER_TOY) for layer in outcome.layers.values())
    refused = await retrieved(poisoned, PREFIX, deadline=0.5, protection=RING, **SIGNED)
    assert (refused.layers, refused.rejected) == ({}, {"unsigned": 1})


@virtual
async def test_a_signature_without_lists_is_refused() -> None:
    """Signed, but nothing says what the objects should be."""
    held = await published(PREFIX, TOY, sign=SIGNER)
    place = newest(held)
    unlisted = TOY.writer([0]).to_json_bytes()
    octets = unlisted.replace(b'"complete":false', b'"complete":true')
    name = kvcs.PublicationNamespace.parse(held.namespace)
    signed = kvcs.kv.sign_manifest(octets, SIGNER, name, place[1].group)
    held.objects[place] = held.objects[place].with_payload(signed)
    outcome = await retrieved(held, PREFIX, deadline=0.5, **SIGNED)
    assert outcome.layers == {}
    assert outcome.errors
    assert MANIFEST_COSE == place[0]

"""The manifest: what is read, what is refused, and what may follow what."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvcs.errors import PublicationError
from kvcs.kv import (
    DataTrack,
    KvcsScheme,
    Manifest,
    ManifestLimits,
    SegmentEntry,
    check_succession,
    manifest_json_bytes,
    parse_manifest,
)
from tests.unit.kv.toy import K0, V0, Toy, toy_descriptor, toy_prefix, toy_publication

TOY = toy_publication((3, 2))

DRAFT_EXAMPLE = {
    "kvcs": 1,
    "compat": {"anything": ["a", {"b": 1}]},
    "layers": 32,
    "block_tokens": 16,
    "deterministic": False,
    "segments": [
        {
            "segment": 0,
            "first_block": 0,
            "blocks": 64,
            "block_keys_sha256": "ab" * 32,
            "tracks": ["k.raw.s0", "v.raw.s0"],
            "complete": True,
        },
        {
            "segment": 1,
            "first_block": 64,
            "blocks": 3,
            "block_keys_sha256": "cd" * 32,
            "tracks": ["k.raw.s1", "v.raw.s1"],
            "complete": False,
        },
    ],
}
"""The shape of KVCS "Manifest Track", which has no object_digests."""


def document(toy: Toy = TOY) -> Any:
    """A whole manifest as parsed JSON, to be damaged."""
    return json.loads(toy.writer().to_json_bytes())


def parse(value: Any, limits: ManifestLimits | None = None) -> Manifest:
    octets = json.dumps(value).encode()
    return parse_manifest(octets) if limits is None else parse_manifest(octets, limits)


def test_the_drafts_example() -> None:
    manifest = parse(DRAFT_EXAMPLE)
    assert manifest.compat == {"anything": ["a", {"b": 1}]}
    assert (manifest.layers, manifest.block_tokens, manifest.deterministic) == (32, 16, False)
    first, second = manifest.segments
    assert first.block_keys_sha256 == b"\xab" * 32
    assert first.tracks == (K0, V0)
    assert first.complete and not second.complete and not manifest.complete
    assert (second.segment, second.first_block, second.blocks) == (1, 64, 3)
    assert manifest.blocks == 67
    assert first.digest(K0, 0, 0) is None
    assert first.layers_listed() == 0


def test_what_is_written_is_read_back() -> None:
    writer = TOY.writer()
    manifest = parse_manifest(writer.to_json_bytes())
    assert manifest == writer.manifest()
    assert manifest_json_bytes(manifest) == writer.to_json_bytes()
    assert manifest_json_bytes(parse(DRAFT_EXAMPLE)) == manifest_json_bytes(
        parse_manifest(manifest_json_bytes(parse(DRAFT_EXAMPLE)))
    )
    assert manifest.complete
    for (track, location), digest in TOY.digests.items():
        entry = manifest.segments[track.segment]
        assert entry.digest(track, location.group, location.object) == digest
    entry = manifest.segments[0]
    for track, layer, block in ((K0, 4, 0), (K0, 0, 3), (K0, -1, 0), (K0, 0, -1)):
        assert entry.digest(track, layer, block) is None
    assert entry.digest(DataTrack.parse("kv.raw.s0"), 0, 0) is None


def test_json_has_the_drafts_form() -> None:
    value = document()
    assert set(value) == {"kvcs", "compat", "layers", "block_tokens", "deterministic", "segments"}
    assert value["kvcs"] == 1
    assert value["compat"] == toy_descriptor().to_json()
    entry = value["segments"][1]
    assert entry["first_block"] == 3
    assert entry["tracks"] == ["k.raw.s1", "v.raw.s1"]
    assert [len(group) for group in entry["object_digests"]["v.raw.s1"]] == [2] * 4
    assert entry["object_digests"]["k.raw.s1"][2][1] == next(
        digest.hex()
        for (track, location), digest in TOY.digests.items()
        if str(track) == "k.raw.s1" and location == (2, 1)
    )


def test_unknown_members_are_ignored_everywhere() -> None:
    value = document()
    value["note"] = {"deep": [None, "x", {}]}
    value["segments"][0]["note"] = [1, 2, 3]
    assert parse(value) == parse(document())


Damage = Callable[[Any], object]


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda m: m.update(kvcs=2), "kvcs is 2, this side reads 1"),
        (lambda m: m.update(kvcs=True), "kvcs is of kind boolean"),
        (lambda m: m.update(kvcs=-1), "kvcs is -1"),
        (lambda m: m.update(kvcs=10**400), "beyond 64 bits"),
        (lambda m: m.pop("kvcs"), "kvcs is missing"),
        (lambda m: m.update(compat=None), "compat is of kind null"),
        (lambda m: m.update(compat=[]), "compat is of kind array"),
        (lambda m: m.pop("compat"), "compat is missing"),
        (lambda m: m["compat"].update(deep=json.loads("[" * 17 + "]" * 17)), "nested more than 16"),
        (lambda m: m.update(layers="4"), "layers is of kind string"),
        (lambda m: m.update(layers=0), "layers is 0"),
        (lambda m: m.update(layers=5), "layers is 5, its compat says 4"),
        (lambda m: m.update(layers=4.0), "4.0 is not an integer"),
        (lambda m: m.update(block_tokens=8), "block_tokens is 8, its compat says 4"),
        (lambda m: m.update(deterministic=0), "deterministic is of kind integer"),
        (lambda m: m.pop("deterministic"), "deterministic is missing"),
        (lambda m: m.update(segments={}), "segments is of kind object"),
        (lambda m: m.pop("segments"), "segments is missing"),
        (lambda m: m["segments"].insert(0, []), "segment 0: expected an object, got array"),
        (lambda m: m["segments"].reverse(), "segment 0: numbered 1"),
        (lambda m: m["segments"].pop(0), "segment 0: numbered 1"),
    ],
)
def test_a_wrong_manifest_is_refused_by_member(damage: Damage, match: str) -> None:
    value = document()
    damage(value)
    with pytest.raises(PublicationError, match=match):
        parse(value)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda s: s.update(segment=True), "segment is of kind boolean"),
        (lambda s: s.update(segment=0), "numbered 0"),
        (lambda s: s.update(first_block=2), "first_block is 2, expected 3"),
        (lambda s: s.update(first_block=4), "first_block is 4, expected 3"),
        (lambda s: s.update(first_block=2**32), "first_block is 4294967296"),
        (lambda s: s.update(blocks=0), "blocks is 0"),
        (lambda s: s.update(blocks=2**32 + 1), "blocks is 4294967297"),
        (lambda s: s.update(blocks=3), "expected an array of 3 digests"),
        (lambda s: s.update(block_keys_sha256="ab"), "block_keys_sha256: a digest is not 64"),
        (lambda s: s.update(block_keys_sha256=7), "block_keys_sha256 is of kind integer"),
        (lambda s: s.pop("block_keys_sha256"), "block_keys_sha256 is missing"),
        (lambda s: s.update(tracks="k.raw.s1"), "tracks is of kind string"),
        (lambda s: s["tracks"].append(7), "a track name is of kind integer"),
        (lambda s: s["tracks"].append("manifest"), "not component.codec.sN"),
        (lambda s: s["tracks"].append("k.raw.s01"), "not component.codec.sN"),
        (lambda s: s["tracks"].append("kv.raw.s0"), "track kv.raw.s0 is of another segment"),
        (lambda s: s["tracks"].append("k.raw.s1"), "a track is named twice"),
        (lambda s: s["tracks"].pop(), "object_digests names v.raw.s1, tracks does not"),
        (lambda s: s.update(tracks=["kv.raw.s1"] * 65), "65 tracks, limit 64"),
        (lambda s: s.pop("tracks"), "tracks is missing"),
        (lambda s: s.update(complete=1), "complete is of kind integer"),
        (lambda s: s.pop("complete"), "complete is missing"),
        (lambda s: s.update(object_digests=[]), "object_digests is of kind array"),
        (lambda s: s.update(object_digests={"k.raw.s1": {}}), "is no array"),
        (lambda s: s.update(object_digests={"nonsense": []}), "not component.codec.sN"),
        (lambda s: s["object_digests"]["k.raw.s1"].pop(), "complete, but k.raw.s1 lists 3 of 4"),
        (
            lambda s: s["object_digests"]["k.raw.s1"].append(["00" * 32] * 2),
            "k.raw.s1 lists 5 of 4 layers",
        ),
    ],
)
def test_a_wrong_segment_is_refused_by_member(damage: Damage, match: str) -> None:
    value = document()
    damage(value["segments"][1])
    with pytest.raises(PublicationError, match=match):
        parse(value)


@pytest.mark.parametrize(
    "group",
    [
        None,
        {},
        "00" * 64,
        [],
        ["00" * 32],
        ["00" * 32] * 3,
        ["00" * 32, "00" * 31],
        ["00" * 31, "00" * 33],
        ["00" * 32, "AB" * 32],
        ["00" * 32, " " * 2 + "0" * 62],
        ["00" * 32, "0" * 63 + "g"],
        ["00" * 32, "0" * 63 + "\u0660"],
        ["00" * 32, 7],
        ["00" * 32, None],
        ["00" * 32, ["00" * 32]],
    ],
)
def test_a_group_of_digests_is_64_lower_case_hex_digits_each(group: Any) -> None:
    value = document()
    value["segments"][1]["object_digests"]["k.raw.s1"][2] = group
    with pytest.raises(PublicationError, match=r"segment 1: k\.raw\.s1 layer 2"):
        parse(value)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"", "not JSON"),
        (b"[]", "expected an object, got array"),
        (b"7", "expected an object, got integer"),
        (b'{"kvcs":1', "not JSON"),
        (b'{"kvcs":1,"kvcs":1}', "member 'kvcs' appears twice"),
        (b'{"note":{"a":1,"a":2}}', "member 'a' appears twice"),
        (b'{"note":1.5}', "floats are not allowed"),
        (b'{"note":1e5}', "floats are not allowed"),
        (b'{"note":-Infinity}', "floats are not allowed"),
        (b'{"note":' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nested too deeply"),
        (b'{"note":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", "nested too deeply"),
        (b'{"note":"\xff"}', "not UTF-8"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"note":' + b"9" * 5_000 + b"}", "not JSON"),
    ],
)
def test_a_text_that_is_no_manifest(text: bytes, match: str) -> None:
    with pytest.raises(PublicationError, match=match):
        parse_manifest(text)


def test_limits() -> None:
    octets = TOY.writer().to_json_bytes()
    parse_manifest(octets, ManifestLimits(octets=len(octets)))
    for limits in (
        ManifestLimits(octets=len(octets) - 1),
        ManifestLimits(containers=10),
        ManifestLimits(segments=1),
        ManifestLimits(tracks=1),
    ):
        with pytest.raises(PublicationError, match="limit"):
            parse_manifest(octets, limits)


def test_identity_is_computed_from_compat() -> None:
    manifest = TOY.writer().manifest()
    manifest.check_identity(toy_prefix())
    with pytest.raises(PublicationError, match="dtype: ours float16, theirs bfloat16"):
        manifest.check_identity(toy_prefix(descriptor=toy_descriptor(dtype="float16")))
    with pytest.raises(PublicationError, match="compat is not a descriptor"):
        parse(DRAFT_EXAMPLE).check_identity(toy_prefix())


def test_identity_holds_geometry_too_where_a_scheme_does_not() -> None:
    class Blind:
        name = "blind"

        def __getattr__(self, name: str) -> Any:
            return getattr(toy_prefix().scheme, name)

        def compat_id(self, compat: Any) -> bytes:
            return bytes(32)

    prefix = toy_prefix(scheme=Blind())
    manifest = Manifest({}, layers=5, block_tokens=4)
    with pytest.raises(PublicationError, match="layers: ours 4, theirs 5"):
        manifest.check_identity(prefix)


def test_differences_that_only_a_scheme_can_see_are_said_so() -> None:
    class Keyed(KvcsScheme):
        def compat_id(self, compat: Any) -> bytes:
            return bytes([len(compat.get("note", ""))]) * 32

    manifest = TOY.writer().manifest()
    noted = dataclasses.replace(manifest, compat={**manifest.compat, "note": "x"})
    with pytest.raises(PublicationError, match="unknown member 'note'"):
        noted.check_identity(toy_prefix(scheme=Keyed()))

    class Turning(KvcsScheme):
        turns = 0

        def compat_id(self, compat: Any) -> bytes:
            self.turns += 1
            return bytes([self.turns]) * 32

    with pytest.raises(PublicationError, match="members of its scheme differ"):
        manifest.check_identity(toy_prefix(scheme=Turning()))


def test_a_compat_of_another_scheme_is_written_back_whatever_it_holds() -> None:
    compat = {"huge": 2**200, "half a pair": "\ud800", "list": [None, True]}
    manifest = Manifest(compat, layers=1, block_tokens=1)
    assert parse_manifest(manifest_json_bytes(manifest)) == manifest


def test_covering_takes_leading_segments_of_our_tokens() -> None:
    manifest = TOY.writer().manifest()
    first, second = manifest.segments
    assert manifest.covering(toy_prefix(3)) == (first,)
    assert manifest.covering(toy_prefix(4)) == (first,)
    assert manifest.covering(toy_prefix(4), vouched=True) == (first, second)
    assert manifest.covering(toy_prefix(5)) == (first, second)
    assert manifest.covering(toy_prefix(9)) == (first, second)
    assert manifest.covering(toy_prefix(2)) == ()
    assert manifest.covering(toy_prefix(2), vouched=True) == (first,)


def test_covering_stops_where_the_tokens_part() -> None:
    manifest = TOY.writer().manifest()
    first, second = manifest.segments
    other = dataclasses.replace(second, block_keys_sha256=bytes(32))
    assert dataclasses.replace(manifest, segments=(first, other)).covering(toy_prefix(5)) == (
        first,
    )
    wrong = dataclasses.replace(first, block_keys_sha256=bytes(32))
    lying = dataclasses.replace(manifest, segments=(wrong, second))
    with pytest.raises(PublicationError, match="not that of our first 3 blocks"):
        lying.covering(toy_prefix(5))
    assert lying.covering(toy_prefix(5), vouched=True) == ()


def test_versions_may_only_grow() -> None:
    versions = [
        Manifest(toy_prefix().compat, 4, 4),
        TOY.writer((0, 0)).manifest(),
        TOY.writer((2, 0)).manifest(),
        TOY.writer((4, 0)).manifest(),
        TOY.writer((4, 3)).manifest(),
        TOY.writer().manifest(),
    ]
    for older, old in enumerate(versions):
        for newer, new in enumerate(versions):
            if older <= newer:
                check_succession(old, new)
            else:
                with pytest.raises(PublicationError):
                    check_succession(old, new)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"first_block": 0, "blocks": 4}, "blocks changed"),
        ({"blocks": 2}, "blocks changed"),
        ({"block_keys_sha256": bytes(32)}, "block_keys_sha256 changed"),
        ({"complete": False}, "was complete and is no longer"),
        ({"tracks": (K0,)}, r"track v\.raw\.s0 is gone"),
        ({"digest": True}, r"digests of k\.raw\.s0 layer 1 changed"),
        ({"shorter": True}, r"k\.raw\.s0 went back from 4 listed layers to 3"),
    ],
)
def test_what_was_said_stays(changes: dict[str, Any], match: str) -> None:
    old = toy_publication().writer().manifest()
    entry = old.segments[0]
    lists = {track: list(groups) for track, groups in entry.object_digests.items()}
    if changes.pop("digest", False):
        lists[K0][1] = lists[K0][2]
    if changes.pop("shorter", False):
        lists[K0].pop()
        changes["complete"] = False
        old = dataclasses.replace(old, segments=(dataclasses.replace(entry, complete=False),))
    if "tracks" in changes:
        del lists[V0]
    if "blocks" in changes:
        lists = {}
    new_entry = dataclasses.replace(
        entry, object_digests={track: tuple(groups) for track, groups in lists.items()}, **changes
    )
    with pytest.raises(PublicationError, match=match):
        check_succession(old, dataclasses.replace(old, segments=(new_entry,)))


def test_the_head_stays_too() -> None:
    old = TOY.writer().manifest()
    with pytest.raises(PublicationError, match="deterministic changed"):
        check_succession(old, dataclasses.replace(old, deterministic=True))
    compat = toy_descriptor(model="other").to_json()
    with pytest.raises(PublicationError, match="compat changed"):
        check_succession(old, dataclasses.replace(old, compat=compat))
    blank = dataclasses.replace(old, compat={}, segments=())
    with pytest.raises(PublicationError, match="layers changed"):
        check_succession(blank, dataclasses.replace(blank, layers=5))


def test_a_segment_may_gain_another_encoding() -> None:
    old = toy_publication().writer().manifest()
    entry = old.segments[0]
    more = dataclasses.replace(entry, tracks=(*entry.tracks, DataTrack.parse("kv.raw.s0")))
    check_succession(old, dataclasses.replace(old, segments=(more,)))


def test_an_entry_checks_its_lengths() -> None:
    entry = SegmentEntry(0, 0, 3, bytes(32), (K0,), False, {K0: (bytes(95),)})
    with pytest.raises(PublicationError, match=r"lists 2\.96875 digests for 3 blocks"):
        Manifest({}, 4, 4, (entry,))
    with pytest.raises(PublicationError, match="block_keys_sha256 is not 32 octets"):
        Manifest({}, 4, 4, (SegmentEntry(0, 0, 3, bytes(31), (K0,)),))


def test_padding_blocks_are_told_beside_the_real_ones() -> None:
    value = document()
    value["segments"][0]["padding_blocks"] = 5
    padded = parse(value)
    assert [entry.padding_blocks for entry in padded.segments] == [5, 0]
    assert [entry.blocks for entry in padded.segments] == [3, 2]
    assert parse_manifest(manifest_json_bytes(padded)) == padded
    check_succession(padded, padded)
    with pytest.raises(PublicationError, match="padding_blocks changed"):
        check_succession(padded, parse(document()))


@pytest.mark.parametrize("blocks", [-1, 2**32, "5", True, None])
def test_padding_that_is_no_number_of_blocks(blocks: Any) -> None:
    value = document()
    value["segments"][0]["padding_blocks"] = blocks
    with pytest.raises(PublicationError, match="padding_blocks"):
        parse(value)

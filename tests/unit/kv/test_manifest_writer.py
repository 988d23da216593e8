"""The manifest as it grows, version by version."""

from __future__ import annotations

from typing import Any

import pytest

from kvcs.errors import UsageError
from kvcs.kv import (
    DataTrack,
    ManifestWriter,
    check_succession,
    parse_manifest,
)
from tests.unit.kv.toy import K0, V0, toy_prefix


def toy_writer(**options: Any) -> ManifestWriter:
    return ManifestWriter(toy_prefix().compat, layers=4, block_tokens=4, **options)


def test_every_version_is_readable_and_its_size_is_known() -> None:
    writer = toy_writer(deterministic=True)
    former = parse_manifest(writer.to_json_bytes())
    assert former.deterministic and not former.segments

    def version() -> None:
        nonlocal former
        octets = writer.to_json_bytes()
        assert len(octets) == writer.octets
        manifest = parse_manifest(octets)
        assert manifest == writer.manifest()
        check_succession(former, manifest)
        former = manifest

    for segment, blocks in enumerate((1, 2)):
        tracks = [DataTrack.parse(f"{component}.raw.s{segment}") for component in "kv"]
        assert writer.add_segment(blocks, bytes(32), tracks) == segment
        version()
        for layer in range(4):
            for track in tracks:
                assert writer.layers_listed(segment) == layer
                assert writer.add_group(track, [bytes([layer]) * 32] * blocks) == layer
                version()
        writer.complete(segment)
        version()
        writer.complete(segment)
    assert writer.blocks == 3
    assert former.complete


def test_pieces_of_former_versions_are_shared() -> None:
    writer = toy_writer()
    writer.add_segment(1, bytes(32), [K0])
    writer.add_group(K0, [bytes(32)])
    first = {id(piece) for piece in writer.parts() if len(piece) > 60}
    writer.add_group(K0, [bytes(32)])
    second = {id(piece) for piece in writer.parts() if len(piece) > 60}
    assert first and first <= second


def test_nothing_is_complete_before_all_of_it_is_listed() -> None:
    writer = toy_writer()
    writer.add_segment(1, bytes(32), [K0, V0])
    for _ in range(4):
        writer.add_group(K0, [bytes(32)])
    with pytest.raises(UsageError, match=r"not complete: v\.raw\.s0 has 0 of 4 layers"):
        writer.complete(0)
    assert not writer.manifest().segments[0].complete


def test_the_writer_refuses_what_a_reader_would() -> None:
    writer = toy_writer()
    with pytest.raises(UsageError, match="there is no segment 0"):
        writer.complete(0)
    with pytest.raises(UsageError, match="there is no segment 0"):
        writer.add_group(K0, [bytes(32)])
    for arguments in (
        (0, bytes(32), [K0]),
        (1, bytes(31), [K0]),
        (1, bytes(32), [K0, K0]),
        (1, bytes(32), [DataTrack.parse("k.raw.s1")]),
    ):
        with pytest.raises(UsageError):
            writer.add_segment(*arguments)
    writer.add_segment(2, bytes(32), [K0])
    with pytest.raises(UsageError, match=r"no track v\.raw\.s0"):
        writer.add_group(V0, [bytes(32)] * 2)
    for digests in ([], [bytes(32)], [bytes(32)] * 3, [bytes(31), bytes(33)]):
        with pytest.raises(UsageError, match="needs 2 digests of 32 octets"):
            writer.add_group(K0, digests)
    for _ in range(4):
        writer.add_group(K0, [bytes(32)] * 2)
    with pytest.raises(UsageError, match="all 4 layers"):
        writer.add_group(K0, [bytes(32)] * 2)


def test_a_manifest_above_the_limit_is_not_begun() -> None:
    probe = toy_writer()
    probe.add_segment(2, bytes(32), [K0])
    writer = toy_writer(max_octets=probe.octets + 200)
    writer.add_segment(2, bytes(32), [K0])
    writer.add_group(K0, [bytes(32)] * 2)
    before = writer.to_json_bytes()
    with pytest.raises(UsageError, match="use larger blocks"):
        writer.add_group(K0, [bytes(32)] * 2)
    with pytest.raises(UsageError, match="use larger blocks"):
        writer.add_segment(2, bytes(32), [DataTrack.parse("k.raw.s1")])
    assert writer.to_json_bytes() == before
    assert len(before) == writer.octets


@pytest.mark.parametrize("layers", [0, 3])
def test_padded_manifests_tell_nothing_of_what_is_real_by_their_length(layers: int) -> None:
    """Padding that nothing needs, digits, and where the segment behind begins included."""
    lengths = set()
    for blocks in (1, 9, 10, 99, 100, 120):
        writer = toy_writer()
        for segment in range(2):
            track = DataTrack.parse(f"k.raw.s{segment}")
            writer.add_segment(blocks, bytes(32), [track], padding_blocks=120 - blocks)
            for _ in range(layers):
                writer.add_group(track, [bytes(32)] * blocks)
        lengths.add(writer.octets + writer.padding_octets)
    assert len(lengths) == 1


def test_what_is_not_padded_takes_no_more_room() -> None:
    writer = toy_writer()
    writer.add_segment(1, bytes(32), [K0])
    assert not writer.padding_octets

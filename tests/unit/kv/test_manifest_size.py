"""A manifest of a long prompt: 80 layers, 128k tokens in blocks of 16, two tracks."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from time import process_time

import pytest

from kvcs.errors import PublicationError
from kvcs.kv import DataTrack, ManifestLimits, ManifestWriter, check_succession, parse_manifest
from kvcs.kv.manifest_json import FREE_VALUES, OCTETS_A_VALUE
from tests.unit.kv.toy import toy_descriptor

LAYERS, BLOCKS = 80, 8_192


def written(layers: int, blocks: int = BLOCKS) -> ManifestWriter:
    """A manifest that lists so many layers, with digests that differ."""
    tracks = [DataTrack.parse("k.raw.s0"), DataTrack.parse("v.raw.s0")]
    compat = toy_descriptor(layers=LAYERS, block_tokens=16).to_json()
    writer = ManifestWriter(compat, layers=LAYERS, block_tokens=16)
    writer.add_segment(blocks, bytes(32), tracks)
    for layer in range(layers):
        for track in tracks:
            seed = hashlib.shake_256(f"{track}{layer}".encode()).digest(32 * blocks)
            writer.add_group(track, [seed[at : at + 32] for at in range(0, len(seed), 32)])
    return writer


@pytest.mark.slow
def test_eighty_eight_megabytes_are_read_in_seconds() -> None:
    writer = written(LAYERS)
    before = writer.manifest()
    writer.complete(0)
    octets = writer.to_json_bytes()
    assert 87e6 < len(octets) < 90e6
    begin = process_time()  # what other processes take does not count
    manifest = parse_manifest(octets)
    check_succession(before, manifest)
    assert process_time() - begin < 20
    assert manifest == writer.manifest()


def test_a_version_costs_what_is_new() -> None:
    """Thirty versions of a growing manifest; each former digest is encoded once in its life."""
    writer = written(0, blocks=64)
    versions = []
    for layer in range(30):
        for component in "kv":
            writer.add_group(DataTrack.parse(f"{component}.raw.s0"), [bytes([layer]) * 32] * 64)
        versions.append(writer.parts())
    distinct = {id(piece): len(piece) for parts in versions for piece in parts if len(piece) > 999}
    assert len(distinct) == 2 * 30
    assert sum(distinct.values()) < len(writer.to_json_bytes())


@pytest.mark.parametrize(
    "piece", [b"[],", b"{},", b'{"":1},', b"1,", b'"xx",', b"[[]],", '"\U0001f600",'.encode()]
)
def test_hostile_text_costs_a_bounded_multiple_of_its_size(piece: bytes) -> None:
    text = b'{"x":[' + piece * (2**20 // len(piece)) + b"0]"
    limits = ManifestLimits(containers=2**30)
    tracemalloc.start()
    try:
        with pytest.raises(PublicationError):
            parse_manifest(text, limits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 * len(text) + 2**20


def test_short_values_by_the_million_are_refused_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = b"[" + b"1," * 2**24 + b"0]"
    monkeypatch.delattr(json, "loads")
    with pytest.raises(PublicationError, match="16777217 values, limit"):
        parse_manifest(text)


def test_a_list_of_digests_alone_stays_far_below_the_limit_of_values() -> None:
    octets = written(4).to_json_bytes()
    limit = FREE_VALUES + len(octets) // OCTETS_A_VALUE
    assert octets.count(b",") * 4 < limit
    assert octets.count(b",") * 1.9 < len(octets) // OCTETS_A_VALUE
    parse_manifest(octets)

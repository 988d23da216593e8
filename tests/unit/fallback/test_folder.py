"""Publications as folders: what is written, and what is refused when it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcs.errors import FileError, UsageError
from kvcs.fallback.folder import (
    INDEX,
    SavedPublication,
    SavedTrack,
    folder_of,
    namespace_of,
    publications,
    read_index,
    save_tracks,
)
from kvcs.kv import MANIFEST, DataTrack
from kvcs.kv.tracks import PublicationNamespace
from kvcs.moqt.names import FullTrackName, Location
from kvcs.moqt.objects import ObjectHeader, ObjectStatus
from kvcs.moqt.track.store import Track
from tests.unit.kv.toy import Toy, toy_prefix, toy_publication

K0 = DataTrack.parse("k.raw.s0")


class Saved:
    """A toy publication in Tracks, as a publisher has them."""

    def __init__(self, **shape: Any) -> None:
        self.toy: Toy = toy_publication(**shape)
        self.prefix = toy_prefix(sum(self.toy.blocks), descriptor=self.toy.descriptor)
        self.namespace = self.prefix.namespace(bytes(range(16)), self.toy.blocks[0])
        self.named = PublicationNamespace.parse(self.namespace)
        self.manifest = self.track(MANIFEST)
        layers = self.toy.descriptor.layers
        octets = self.toy.writer([layers] * len(self.toy.blocks)).to_json_bytes()
        self.put(self.manifest, Location(0, 0), b"an older version")
        self.put(self.manifest, Location(1, 0), octets)
        self.tracks = {name: self.track(name.name) for names in self.toy.segments for name in names}
        for (name, location), payload in self.toy.objects.items():
            self.put(self.tracks[name], location, payload)

    def track(self, name: bytes) -> Track:
        return Track(FullTrackName(self.namespace, name), authoritative=True)

    @staticmethod
    def put(track: Track, location: Location, payload: bytes) -> None:
        header = ObjectHeader(*location, 0, 0, ObjectStatus.NORMAL, b"", len(payload))
        track.publish(header, (memoryview(payload),), 0.0, end_of_group=True)

    def save(self, root: Path) -> Path:
        return save_tracks(
            root,
            self.namespace,
            self.manifest,
            self.tracks,
            segments=self.toy.blocks,
            block_keys=self.prefix.block_keys,
            layers=self.toy.descriptor.layers,
        )


def test_everything_is_written_as_it_was_published(tmp_path: Path) -> None:
    saved = Saved()
    folder = saved.save(tmp_path)
    assert folder == folder_of(tmp_path, saved.named)
    index = read_index(folder)
    assert (index.manifest, index.version) == (MANIFEST, 1)
    assert json.loads((folder / "manifest").read_bytes())["kvcs"] == 1
    assert index.block_keys == tuple(saved.prefix.block_keys)
    for (name, (layer, block)), payload in saved.toy.objects.items():
        octets = (folder / str(name) / str(layer)).read_bytes()
        start, size = index.tracks[name].offset(layer, block), index.tracks[name].size(layer, block)
        assert octets[start : start + size] == payload
    assert index.find(saved.prefix.block_keys[1]) == (0, 1)
    assert index.find(bytes(32)) is None


def test_it_is_found_by_its_prefix_and_nothing_else_is(tmp_path: Path) -> None:
    saved = Saved()
    scope, compat, anchor, publication_id = saved.named
    assert publications(tmp_path, scope, compat, anchor) == []
    saved.save(tmp_path)
    (tmp_path / ".half-made").mkdir()
    folder_of(tmp_path, saved.named).parent.joinpath("not a publication").mkdir()
    assert publications(tmp_path, scope, compat, anchor) == [publication_id]


def test_nothing_is_seen_where_an_object_lacks(tmp_path: Path) -> None:
    saved = Saved()
    saved.tracks[K0] = saved.track(K0.name)
    with pytest.raises(UsageError, match=r"k\.raw\.s0"):
        saved.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_publication_is_never_replaced(tmp_path: Path) -> None:
    saved = Saved()
    folder = saved.save(tmp_path)
    before = (folder / INDEX).read_bytes()
    with pytest.raises(FileError, match="not saved"):
        saved.save(tmp_path)
    assert (folder / INDEX).read_bytes() == before
    assert [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


TWO_KEYS = (bytes(32), bytes([1] * 32))
INDEX_OF_TWO = SavedPublication(
    MANIFEST, 3, b"", 2, (2,), TWO_KEYS, {K0: SavedTrack(b"p", ((1, 2), (3, 4)))}
)


def test_sizes_that_differ_are_kept_one_by_one() -> None:
    read = SavedPublication.from_json(INDEX_OF_TWO.to_json())
    assert read == INDEX_OF_TWO
    assert (read.tracks[K0].offset(1, 1), read.tracks[K0].size(1, 1)) == (3, 4)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("kvcs_folder", 2),
        ("manifest", "../manifest"),
        ("version", -1),
        ("version", True),
        ("properties", "xx"),
        ("layers", 0),
        ("layers", 1 << 40),
        ("segments", []),
        ("segments", [3]),
        ("segments", [-1, 3]),
        ("block_keys", ["00"]),
        ("tracks", {"../k.raw.s0": {"properties": "", "octets": 1}}),
        ("tracks", {"k.raw.s1": {"properties": "", "octets": 1}}),
        ("tracks", {"k.raw.s0": {"properties": "", "octets": 0}}),
        ("tracks", {"k.raw.s0": {"properties": "", "octets": [[1, 1]]}}),
        ("tracks", {"k.raw.s0": {"properties": "00" * 5000, "octets": 1}}),
        ("tracks", {"k.raw.s0": 1}),
        ("tracks", []),
    ],
)
def test_an_index_that_is_wrong_is_refused(member: str, value: object) -> None:
    document = json.loads(INDEX_OF_TWO.to_json())
    document[member] = value
    with pytest.raises(FileError, match=r"publication\.json"):
        SavedPublication.from_json(json.dumps(document).encode())


@pytest.mark.parametrize("octets", [b"", b"[]", b"1", b"{}", b'{"kvcs_folder":1.0}', b"\xff"])
def test_what_is_no_index_is_refused(octets: bytes) -> None:
    with pytest.raises(FileError):
        SavedPublication.from_json(octets)


def test_a_path_names_a_publication_in_one_way_only() -> None:
    parts = [octets.hex() for octets in (bytes(16), bytes(32), bytes(32), bytes(16))]
    assert namespace_of(parts) is not None
    for number in range(4):
        for wrong in ("..", "", ".", parts[number][:-1] + "/", "AB" * 16, parts[number] + "00"):
            assert namespace_of([*parts[:number], wrong, *parts[number + 1 :]]) is None

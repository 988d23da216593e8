"""Publications as folders: what `kvcs publish --save` writes and `kvcs serve-http` serves.

    DIR/<scope>/<compat>/<anchor>/<publication>/     four fields of the namespace in lower-case hex
        publication.json     what is here: sizes, Block Keys, Object properties
        manifest             or manifest.cose: the payload of the newest version
        k.raw.s0/0           one file a track and layer: the payloads of its Objects, end to end

A publication is written below a name that begins with a dot and renamed once it is whole: it is
never seen half-made. All names in it are made here from numbers and hexadecimal digits.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvcs.errors import FileError, PublicationError, UsageError
from kvcs.kv import MANIFEST, MANIFEST_COSE, DataTrack
from kvcs.kv.strict_json import load
from kvcs.kv.tracks import APPLICATION, PublicationNamespace
from kvcs.moqt.names import Location
from kvcs.moqt.track.store import Track

INDEX: Final = "publication.json"
"""Describes a publication's folder."""

VERSION: Final = 1
"""Of this format."""

MAX_INDEX_OCTETS: Final = 16 * 2**20
"""Longest `publication.json`."""

MAX_PROPERTIES: Final = 4096
"""Longest Object properties."""

MAX_LAYERS: Final = 4096
MAX_BLOCKS: Final = 1 << 20
MAX_SIZE: Final = 1 << 31

_HEX: Final = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class SavedTrack:
    """What is stored of one data track."""

    properties: bytes
    """Object properties of every payload."""

    sizes: int | tuple[tuple[int, ...], ...]
    """Octets of each payload, by layer and block; one number where all are as long."""

    def size(self, layer: int, block: int) -> int:
        """Octets of one payload."""
        return self.sizes if isinstance(self.sizes, int) else self.sizes[layer][block]

    def offset(self, layer: int, block: int) -> int:
        """Where it begins in the file of its layer."""
        if isinstance(self.sizes, int):
            return self.sizes * block
        return sum(self.sizes[layer][:block])


@dataclass(frozen=True, slots=True)
class SavedPublication:
    """What a publication's folder holds: the content of `publication.json`."""

    manifest: bytes
    """Track Name of its manifest."""

    version: int
    """Group ID of the version that is stored."""

    properties: bytes
    """Object properties of that version."""

    layers: int
    """Layers of every track."""

    segments: tuple[int, ...]
    """Blocks of each segment."""

    block_keys: tuple[bytes, ...]
    """Block Key of each block, over all segments."""

    tracks: Mapping[DataTrack, SavedTrack]
    """The data tracks."""

    def to_json(self) -> bytes:
        """As it is stored."""
        document: dict[str, Any] = {
            "kvcs_folder": VERSION,
            "manifest": self.manifest.decode(),
            "version": self.version,
            "properties": self.properties.hex(),
            "layers": self.layers,
            "segments": list(self.segments),
            "block_keys": [key.hex() for key in self.block_keys],
            "tracks": {
                str(name): {"properties": track.properties.hex(), "octets": track.sizes}
                for name, track in self.tracks.items()
            },
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, octets: bytes) -> SavedPublication:
        """Read what `to_json` gives, or what a server says it is.

        Raises:
            FileError: it is none of this format.
        """
        try:
            return _read(load(octets, max_octets=MAX_INDEX_OCTETS))
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise FileError(f"{INDEX}: {exc or type(exc).__name__}") from exc

    def find(self, block_key: bytes) -> tuple[int, int] | None:
        """Segment, and index within it, of the block that a Block Key names."""
        try:
            block = self.block_keys.index(block_key)
        except ValueError:
            return None
        for segment, blocks in enumerate(self.segments):
            if block < blocks:
                return segment, block
            block -= blocks
        return None


def _read(document: Any) -> SavedPublication:
    if document["kvcs_folder"] != VERSION:
        raise UsageError(f"format {document['kvcs_folder']!r}, expected {VERSION}")
    manifest = document["manifest"].encode()
    if manifest not in (MANIFEST, MANIFEST_COSE):
        raise UsageError("manifest is neither manifest nor manifest.cose")
    layers = _count(document["layers"], MAX_LAYERS)
    segments = tuple(_count(blocks, MAX_BLOCKS) for blocks in document["segments"])
    block_keys = tuple(bytes.fromhex(key) for key in document["block_keys"])
    if not segments or sum(segments) != len(block_keys) or len(block_keys) > MAX_BLOCKS:
        raise UsageError(f"{len(block_keys)} Block Keys for {sum(segments)} blocks")
    tracks = {}
    for text, entry in document["tracks"].items():
        name = DataTrack.parse(text)
        if name.segment >= len(segments):
            raise UsageError(f"{text}: there are {len(segments)} segments")
        sizes = _sizes(entry["octets"], layers, segments[name.segment])
        tracks[name] = SavedTrack(_properties(entry["properties"]), sizes)
    version = document["version"]
    if type(version) is not int or not 0 <= version < MAX_SIZE:
        raise UsageError("version is no number")
    properties = _properties(document["properties"])
    return SavedPublication(manifest, version, properties, layers, segments, block_keys, tracks)


def _count(value: Any, limit: int) -> int:
    if type(value) is not int or not 1 <= value <= limit:
        raise UsageError(f"{value!r:.40} is no number from 1 to {limit}")
    return value


def _sizes(value: Any, layers: int, blocks: int) -> int | tuple[tuple[int, ...], ...]:
    if type(value) is int:
        return _count(value, MAX_SIZE)
    found = tuple(tuple(_count(size, MAX_SIZE) for size in layer) for layer in value)
    if len(found) != layers or any(len(layer) != blocks for layer in found):
        raise UsageError(f"sizes are not those of {layers} layers with {blocks} blocks")
    return found


def _properties(text: str) -> bytes:
    octets = bytes.fromhex(text)
    if len(octets) > MAX_PROPERTIES:
        raise UsageError(f"properties of {len(octets)} octets, limit {MAX_PROPERTIES}")
    return octets


# Where things lie


def folder_of(root: Path, namespace: PublicationNamespace) -> Path:
    """Folder of a publication, whether it is there or not."""
    return root.joinpath(*(field.hex() for field in namespace))


def publications(root: Path, scope: bytes, compat: bytes, anchor: bytes) -> list[bytes]:
    """Publication IDs of a token prefix that are stored, ascending."""
    found = []
    try:
        with os.scandir(root.joinpath(scope.hex(), compat.hex(), anchor.hex())) as entries:
            for entry in entries:
                if _HEX.fullmatch(entry.name) and len(entry.name) == 32:
                    found.append(bytes.fromhex(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found)


def read_index(folder: Path) -> SavedPublication:
    """Read `publication.json` of a publication's folder.

    Raises:
        FileError: it is not there, or is none.
    """
    try:
        with (folder / INDEX).open("rb") as file:
            octets = file.read(MAX_INDEX_OCTETS + 1)
    except OSError as exc:
        raise FileError(f"{folder}: {exc.strerror}") from exc
    return SavedPublication.from_json(octets)


# Writing


def save_tracks(
    root: str | os.PathLike[str],
    namespace: tuple[bytes, ...],
    manifest: Track,
    tracks: Mapping[DataTrack, Track],
    *,
    segments: Sequence[int],
    block_keys: Sequence[bytes],
    layers: int,
) -> Path:
    """Write a publication that is whole; it blocks for as long as the disk takes.

    Args:
        root: the folder of all publications; it is made if need be.
        namespace: the five Track Namespace Fields.
        manifest: the manifest track.
        tracks: the data tracks, with every Object.
        segments: blocks of each segment.
        block_keys: Block Key of each block.
        layers: layers of every track.

    Returns:
        The publication's folder.

    Raises:
        FileError: it cannot be written, or is there already.
        UsageError: an Object lacks.
    """
    named = PublicationNamespace.parse(namespace)
    version = max(manifest.group_ids(), default=0)
    final = folder_of(Path(root), named)
    half = Path(root) / f".{named.publication_id.hex()}.{secrets.token_hex(8)}"
    try:
        half.mkdir(parents=True)
        payload, properties = _object(manifest, Location(version, 0))
        _write(half / manifest.name.name.decode(), payload)
        saved = {
            name: _save_track(half / str(name), track, layers, segments[name.segment])
            for name, track in tracks.items()
        }
        index = SavedPublication(
            manifest.name.name,
            version,
            properties,
            layers,
            tuple(segments),
            tuple(block_keys),
            saved,
        )
        _write(half / INDEX, [memoryview(index.to_json())])
        final.parent.mkdir(parents=True, exist_ok=True)
        # Never onto one that is there: a folder that is not empty is not replaced.
        half.rename(final)
    except OSError as exc:
        raise FileError(f"{final}: the publication was not saved: {exc.strerror}") from exc
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return final


def _save_track(folder: Path, track: Track, layers: int, blocks: int) -> SavedTrack:
    folder.mkdir()
    sizes, found = [], b""
    for layer in range(layers):
        objects = [_object(track, Location(layer, block)) for block in range(blocks)]
        _write(folder / str(layer), [part for parts, _ in objects for part in parts])
        sizes.append(tuple(sum(map(len, parts)) for parts, _ in objects))
        found = objects[0][1]
    different = {size for layer in sizes for size in layer}
    return SavedTrack(found, different.pop() if len(different) == 1 else tuple(sizes))


def _object(track: Track, location: Location) -> tuple[list[memoryview], bytes]:
    stored = track.get(location)
    if stored is None or not stored.complete:
        raise UsageError(f"{track.name.name.decode()} {location} is not there: nothing was saved")
    length = stored.header.payload_length
    return list(stored.views(0, length)), bytes(stored.header.properties)


def _write(path: Path, parts: Sequence[memoryview]) -> None:
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def namespace_of(parts: Sequence[str]) -> PublicationNamespace | None:
    """The namespace that four parts of a path name; None where they name none.

    Only lower-case hexadecimal digits count: a name has one form, and no path leads elsewhere.
    """
    if not all(_HEX.fullmatch(part) and len(part) % 2 == 0 for part in parts):
        return None
    try:
        return PublicationNamespace.parse((APPLICATION, *map(bytes.fromhex, parts)))
    except PublicationError:
        return None

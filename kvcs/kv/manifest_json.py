"""The manifest's JSON form: strict reading, incremental writing (KVCS "Manifest Track").

Every version repeats all digests of the former ones. So the writer keeps each Group's encoded list,
and a version costs what is new since the last one plus the joining.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, cast

from kvcs.errors import PublicationError, UsageError
from kvcs.kv import strict_json
from kvcs.kv.manifest import Manifest, SegmentEntry, check_entry
from kvcs.kv.payload import DIGEST_OCTETS
from kvcs.kv.strict_json import Json, Octets
from kvcs.kv.tracks import MAX_BLOCK, DataTrack

MANIFEST_VERSION: Final = 1
"""Value of the member "kvcs"."""

MAX_COMPAT_DEPTH: Final = 16
"""Deepest nesting in a ``compat`` object."""

FREE_VALUES: Final = 2**18
"""Values that a manifest may have however short they are: most are digests of 64 digits."""

OCTETS_A_VALUE: Final = 32
"""Beyond `FREE_VALUES` there is one for so many octets. Short integers by the million would cost 20
times their text, and hold up the whole process while they are parsed."""


@dataclass(frozen=True, slots=True)
class ManifestLimits:
    """What a peer's manifest may cost."""

    octets: int = 128 * 2**20
    """Longest JSON text."""

    containers: int = strict_json.MAX_CONTAINERS
    """Most arrays and objects, one per listed layer and track, whatever member they stand in."""

    segments: int = 65_536
    """Most segments."""

    tracks: int = 64
    """Most data tracks of one segment."""


DEFAULT_LIMITS: Final = ManifestLimits()


def parse_manifest(data: Octets, limits: ManifestLimits = DEFAULT_LIMITS) -> Manifest:
    """Read one version of a manifest. Members that the draft does not define are ignored.

    Args:
        data: the JSON text: the payload of "manifest", or the signed payload of "manifest.cose".
        limits: what it may cost.

    Raises:
        PublicationError: not JSON, beyond a limit, a duplicate member or a float anywhere, a
            member missing, of the wrong type or out of bounds, or parts that contradict each
            other. The message names the member.
    """
    try:
        value = strict_json.load(
            data,
            max_octets=limits.octets,
            max_containers=limits.containers,
            max_values=FREE_VALUES + len(data) // OCTETS_A_VALUE,
        )
    except UsageError as exc:
        raise PublicationError(f"manifest: {exc}") from exc
    if not isinstance(value, dict):
        raise PublicationError(f"manifest: expected an object, got {strict_json.kind(value)}")
    version = _integer(value, "kvcs", "manifest", 0, 2**63)
    if version != MANIFEST_VERSION:
        raise PublicationError(f"manifest: kvcs is {version}, this side reads {MANIFEST_VERSION}")
    compat = _member(value, "compat", dict, "manifest")
    _check_depth(compat)
    layers = _integer(value, "layers", "manifest", 1, 2**32 - 1)
    block_tokens = _integer(value, "block_tokens", "manifest", 1, 2**32 - 1)
    deterministic = _member(value, "deterministic", bool, "manifest")
    entries = _member(value, "segments", list, "manifest")
    if len(entries) > limits.segments:
        raise PublicationError(f"manifest: {len(entries)} segments, limit {limits.segments}")
    return Manifest(
        compat=MappingProxyType(compat),
        layers=layers,
        block_tokens=block_tokens,
        deterministic=deterministic,
        segments=tuple(
            _entry(entry, f"manifest: segment {number}", limits)
            for number, entry in enumerate(entries)
        ),
    )


def _check_depth(compat: dict[str, Json]) -> None:
    """Bound the nesting of the one member that is kept as it came, and compared by recursion."""
    level: list[Json] = [compat]
    for _ in range(MAX_COMPAT_DEPTH):
        inner: list[Json] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        if not inner:
            return
        level = inner
    raise PublicationError(f"manifest: compat is nested more than {MAX_COMPAT_DEPTH} deep")


def _member(members: Mapping[str, Json], name: str, kind: type, where: str) -> Any:
    if name not in members:
        raise PublicationError(f"{where}: {name} is missing")
    value = members[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise PublicationError(f"{where}: {name} is of kind {strict_json.kind(value)}")
    return value


def _integer(members: Mapping[str, Json], name: str, where: str, low: int, high: int) -> int:
    value: int = _member(members, name, int, where)
    if not low <= value <= high:
        shown = str(value) if abs(value) < 2**64 else "a number beyond 64 bits"
        raise PublicationError(f"{where}: {name} is {shown}, expected {low}..{high}")
    return value


def _entry(members: Json, where: str, limits: ManifestLimits) -> SegmentEntry:
    if not isinstance(members, dict):
        raise PublicationError(f"{where}: expected an object, got {strict_json.kind(members)}")
    names = _member(members, "tracks", list, where)
    if len(names) > limits.tracks:
        raise PublicationError(f"{where}: {len(names)} tracks, limit {limits.tracks}")
    tracks = tuple(_track(name, where) for name in names)
    blocks = _integer(members, "blocks", where, 1, MAX_BLOCK + 1)
    lists: dict[DataTrack, tuple[bytes, ...]] = {}
    if "object_digests" in members:
        for name, groups in _member(members, "object_digests", dict, where).items():
            if not isinstance(groups, list):
                raise PublicationError(f"{where}: object_digests of {name[:64]!r} is no array")
            lists[_track(name, where)] = tuple(
                _group(group, blocks, f"{where}: {name} layer {layer}")
                for layer, group in enumerate(groups)
            )
    return SegmentEntry(
        segment=_integer(members, "segment", where, 0, 2**32 - 1),
        first_block=_integer(members, "first_block", where, 0, MAX_BLOCK),
        blocks=blocks,
        block_keys_sha256=_group(
            [_member(members, "block_keys_sha256", str, where)], 1, f"{where}: block_keys_sha256"
        ),
        tracks=tracks,
        complete=_member(members, "complete", bool, where),
        object_digests=MappingProxyType(lists),
        padding_blocks=_integer(members, "padding_blocks", where, 0, MAX_BLOCK)
        if "padding_blocks" in members
        else 0,
    )


def _track(name: Json, where: str) -> DataTrack:
    if not isinstance(name, str):
        raise PublicationError(f"{where}: a track name is of kind {strict_json.kind(name)}")
    try:
        return DataTrack.parse(name)
    except UsageError as exc:
        raise PublicationError(f"{where}: {exc}") from exc


def _group(digests: Json, blocks: int, where: str) -> bytes:
    """Octets of one Group's digests; whole lists at a time, since there are millions of digests."""
    if not isinstance(digests, list) or len(digests) != blocks:
        raise PublicationError(f"{where}: expected an array of {blocks} digests")
    texts = cast(list[str], digests)  # a join of anything else raises
    try:
        text = "".join(texts)
        octets = bytes.fromhex(text)
    except (TypeError, ValueError):
        raise PublicationError(f"{where}: a digest is not 64 lower-case hex digits") from None
    # fromhex also takes capitals and spaces, and a join hides where one digest ends.
    if octets.hex() != text or set(map(len, texts)) != {64}:
        raise PublicationError(f"{where}: a digest is not 64 lower-case hex digits")
    return octets


def _encode_group(digests: bytes) -> bytes:
    """One Group's list as JSON."""
    return b'["' + digests.hex(",", DIGEST_OCTETS).replace(",", '","').encode("ascii") + b'"]'


def _list_octets(blocks: int) -> int:
    """Size of one Group's list behind another one."""
    # 64 hex digits, two quotes and a comma each, brackets around them, a comma before the list.
    return 67 * blocks + 2


class _Track:
    """One track's Groups, as octets and as JSON that never changes again."""

    def __init__(self) -> None:
        self.groups: list[bytes] = []
        self.encoded: list[bytes] = []
        self.octets = 0

    def add(self, digests: bytes) -> None:
        fragment = _encode_group(digests)
        if self.encoded:
            fragment = b"," + fragment
        self.groups.append(digests)
        self.encoded.append(fragment)
        self.octets += len(fragment)


class _Segment:
    def __init__(self, entry: SegmentEntry, padded: bool) -> None:
        self.entry = entry
        self.head = _segment_head(entry)
        self.hidden = 0
        """Octets by which numbers of blocks are shorter than the longest ones, where that tells."""
        if padded:
            most = replace(entry, blocks=MAX_BLOCK, first_block=MAX_BLOCK, padding_blocks=MAX_BLOCK)
            self.hidden = len(_segment_head(most)) - len(self.head)
        self.complete = False
        self.tracks = {track: _Track() for track in entry.tracks}

    def parts(self) -> list[bytes]:
        lists = {track: digests.encoded for track, digests in self.tracks.items()}
        return [self.head, *_segment_tail(self.complete, lists)]


def _open_object(members: dict[str, Any]) -> bytes:
    """An object as JSON, without its closing brace."""
    # Not canonical JSON: that is for identity, and it has no place for some numbers of a peer.
    return json.dumps(members, sort_keys=True, separators=(",", ":")).encode("ascii")[:-1]


def _manifest_head(manifest: Manifest) -> bytes:
    members: dict[str, Any] = {
        "block_tokens": manifest.block_tokens,
        "compat": dict(manifest.compat),
        "deterministic": manifest.deterministic,
        "kvcs": MANIFEST_VERSION,
        "layers": manifest.layers,
    }
    return _open_object(members) + b',"segments":['


def _segment_head(entry: SegmentEntry) -> bytes:
    members: dict[str, Any] = {
        "block_keys_sha256": entry.block_keys_sha256.hex(),
        "blocks": entry.blocks,
        "first_block": entry.first_block,
        "segment": entry.segment,
        "tracks": [str(track) for track in entry.tracks],
    }
    if entry.padding_blocks:
        members["padding_blocks"] = entry.padding_blocks
    return (b"," if entry.segment else b"") + _open_object(members)


def _segment_tail(complete: bool, lists: Mapping[DataTrack, Sequence[bytes]]) -> list[bytes]:
    pieces = [b',"complete":true' if complete else b',"complete":false']
    start = b',"object_digests":{"'
    for track, encoded in lists.items():
        pieces += [start + track.name + b'":[', *encoded, b"]"]
        start = b',"'
    pieces.append(b"}}" if lists else b"}")
    return pieces


class ManifestWriter:
    """A publication's manifest as it grows; `parts` gives each version.

    Args:
        compat: the ``compat`` object, `Prefix.compat`.
        layers: layers of the model.
        block_tokens: tokens per block.
        deterministic: whether any publication of the content has bit-identical Objects.
        max_octets: largest version; beyond it nothing more can be added.
    """

    def __init__(
        self,
        compat: Mapping[str, Json],
        *,
        layers: int,
        block_tokens: int,
        deterministic: bool = False,
        max_octets: int = DEFAULT_LIMITS.octets,
    ) -> None:
        self._base = Manifest(compat, layers, block_tokens, (), deterministic)
        self._segments: list[_Segment] = []
        self._max_octets = max_octets
        self._head = _manifest_head(self._base)
        self._octets = len(self._head) + len(b"]}")

    @property
    def octets(self) -> int:
        """Size of the version that `parts` would give now."""
        return self._octets

    def add_segment(
        self,
        blocks: int,
        block_keys_sha256: bytes,
        tracks: Sequence[DataTrack],
        *,
        whole: bool = False,
        padding_blocks: int | None = None,
    ) -> int:
        """Add a segment after the last one.

        Args:
            blocks: how many blocks it has.
            block_keys_sha256: `Prefix.block_keys_digest` of them.
            tracks: its data tracks.
            whole: also hold all its lists, and those still to come of former segments, to the
                limit: once its Objects are out, a list that does not fit comes too late.
            padding_blocks: blocks of zeros behind them; None where segments are not padded.

        Returns:
            The segment's number.

        Raises:
            UsageError: the entry contradicts itself or the manifest would become too large.
        """
        number = len(self._segments)
        entry = SegmentEntry(
            number,
            self.blocks,
            blocks,
            block_keys_sha256,
            tuple(tracks),
            padding_blocks=padding_blocks or 0,
        )
        try:
            check_entry(entry, number, self.blocks, self._base.layers)
        except PublicationError as exc:
            raise UsageError(str(exc)) from exc
        segment = _Segment(entry, padding_blocks is not None)
        octets = sum(map(len, segment.parts()))
        if whole:
            to_come = sum(self._to_come(each) for each in (*self._segments, segment))
            self._check_room(octets + to_come)
        self._grow(octets)
        self._segments.append(segment)
        return number

    @property
    def padding_octets(self) -> int:
        """Octets by which it is shorter than if padding blocks were listed, too, and every number
        of blocks had as many digits as the longest."""
        return sum(
            each.hidden
            + (_list_octets(each.entry.padding_blocks) - _list_octets(0))
            * sum(len(track.groups) for track in each.tracks.values())
            for each in self._segments
        )

    def _to_come(self, segment: _Segment) -> int:
        """Octets of the lists that a segment does not have yet."""
        lists = sum(self._base.layers - len(each.groups) for each in segment.tracks.values())
        return lists * _list_octets(segment.entry.blocks)

    @property
    def blocks(self) -> int:
        """Blocks of all segments."""
        return sum(segment.entry.blocks for segment in self._segments)

    def add_group(self, track: DataTrack, digests: Sequence[bytes]) -> int:
        """List the Data Digests of a track's next completed Group, in Object order.

        Returns:
            The layer that they were listed for.

        Raises:
            UsageError: unknown track, all its layers are listed, one digest per block is not
                what came, or the manifest would become too large.
        """
        segment = self._segment(track.segment)
        lists = segment.tracks.get(track)
        if lists is None:
            raise UsageError(f"manifest: segment {track.segment} has no track {track}")
        layer = len(lists.groups)
        if layer >= self._base.layers:
            raise UsageError(f"manifest: all {layer} layers of {track} are listed")
        joined = b"".join(digests)
        blocks = segment.entry.blocks
        if len(digests) != blocks or any(len(digest) != DIGEST_OCTETS for digest in digests):
            raise UsageError(f"manifest: {track} layer {layer} needs {blocks} digests of 32 octets")
        self._grow(_list_octets(blocks) - (layer == 0))
        lists.add(joined)
        return layer

    def layers_listed(self, segment: int) -> int:
        """Leading layers that are listed on every track of a segment."""
        tracks = self._segment(segment).tracks.values()
        return min((len(track.groups) for track in tracks), default=0)

    def complete(self, segment: int) -> None:
        """Mark a segment complete.

        Raises:
            UsageError: a track lacks layers; nothing is ever called complete on trust.
        """
        entry = self._segment(segment)
        for track, lists in entry.tracks.items():
            if len(lists.groups) != self._base.layers:
                raise UsageError(
                    f"manifest: segment {segment} is not complete: {track} has"
                    f" {len(lists.groups)} of {self._base.layers} layers"
                )
        if not entry.complete:
            entry.complete = True
            self._octets -= len(b"false") - len(b"true")

    def parts(self) -> list[bytes]:
        """The current version as pieces of JSON; pieces of former versions are shared."""
        pieces = [self._head]
        for segment in self._segments:
            pieces += segment.parts()
        pieces.append(b"]}")
        return pieces

    def to_json_bytes(self) -> bytes:
        """The current version as one piece."""
        return b"".join(self.parts())

    def manifest(self) -> Manifest:
        """The current version as a value."""
        base = self._base
        entries = (
            SegmentEntry(
                segment.entry.segment,
                segment.entry.first_block,
                segment.entry.blocks,
                segment.entry.block_keys_sha256,
                segment.entry.tracks,
                segment.complete,
                MappingProxyType(
                    {track: tuple(lists.groups) for track, lists in segment.tracks.items()}
                ),
            )
            for segment in self._segments
        )
        return Manifest(
            base.compat, base.layers, base.block_tokens, tuple(entries), base.deterministic
        )

    def _segment(self, number: int) -> _Segment:
        if not 0 <= number < len(self._segments):
            raise UsageError(f"manifest: there is no segment {number}")
        return self._segments[number]

    def _check_room(self, octets: int) -> None:
        if self._octets + octets > self._max_octets:
            raise UsageError(
                f"manifest would have {self._octets + octets} octets, limit {self._max_octets};"
                " use larger blocks"
            )

    def _grow(self, octets: int) -> None:
        self._check_room(octets)
        self._octets += octets


def manifest_json_bytes(manifest: Manifest) -> bytes:
    """JSON text of a manifest value; a publisher uses `ManifestWriter`, which repeats no work."""
    pieces = [_manifest_head(manifest)]
    for entry in manifest.segments:
        lists = {}
        for track, groups in entry.object_digests.items():
            digests = _Track()
            for group in groups:
                digests.add(group)
            lists[track] = digests.encoded
        pieces += [_segment_head(entry), *_segment_tail(entry.complete, lists)]
    return b"".join([*pieces, b"]}"])

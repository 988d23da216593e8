"""The manifest: what a publication holds, and the digests of its Objects (KVCS "Manifest Track").

The JSON form is in `kvcs.kv.manifest_json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvcs.errors import PublicationError, UsageError
from kvcs.kv.descriptor import Descriptor
from kvcs.kv.identity import Prefix
from kvcs.kv.payload import DIGEST_OCTETS
from kvcs.kv.strict_json import Json
from kvcs.kv.tracks import MAX_BLOCK, DataTrack


def _no_digests() -> Mapping[DataTrack, tuple[bytes, ...]]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """One segment as a manifest describes it."""

    segment: int
    """Segment number; equals the entry's place in the manifest."""

    first_block: int
    """Absolute index of the segment's first block."""

    blocks: int
    """Blocks in the segment, 1 or more; never changes between versions."""

    block_keys_sha256: bytes
    """SHA-256 of the segment's concatenated Block Keys, 32 octets."""

    tracks: tuple[DataTrack, ...]
    """Data tracks that carry the segment."""

    complete: bool = False
    """Whether every Object of the segment has been published."""

    object_digests: Mapping[DataTrack, tuple[bytes, ...]] = field(default_factory=_no_digests)
    """Per track, for each completed Group in Group order, the Data Digests of its Objects in Object
    order, 32 octets each, in one piece."""

    padding_blocks: int = 0
    """Blocks of zeros that every Group has behind the real ones, so that relays do not see how long
    the context is (KVCS "Privacy Considerations"); never changes between versions."""

    def digest(self, track: DataTrack, layer: int, block: int) -> bytes | None:
        """Listed Data Digest of one Object, or None where it is not listed (yet)."""
        groups = self.object_digests.get(track)
        if groups is None or not 0 <= layer < len(groups) or not 0 <= block < self.blocks:
            return None
        return groups[layer][block * DIGEST_OCTETS : (block + 1) * DIGEST_OCTETS]

    def layers_listed(self) -> int:
        """Leading layers whose digests are listed on every track of the segment."""
        return min((len(self.object_digests.get(track, ())) for track in self.tracks), default=0)


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of a publication's manifest.

    Raises:
        PublicationError: the parts contradict each other.
    """

    compat: Mapping[str, Json]
    """The Compatibility Descriptor as the publication's scheme writes it."""

    layers: int
    """Layers of the model."""

    block_tokens: int
    """Tokens per block."""

    segments: tuple[SegmentEntry, ...] = ()
    """Segments in order; contiguous."""

    deterministic: bool = False
    """Whether any publication of the same content has bit-identical Objects."""

    def __post_init__(self) -> None:
        for name, value in (("layers", self.layers), ("block_tokens", self.block_tokens)):
            # A scheme may name its members otherwise; where it has these they must agree.
            if name in self.compat and self.compat[name] != value:
                raise PublicationError(
                    f"manifest: {name} is {value}, its compat says {str(self.compat[name])[:32]}"
                )
        next_block = 0
        for number, entry in enumerate(self.segments):
            check_entry(entry, number, next_block, self.layers)
            next_block += entry.blocks

    @property
    def blocks(self) -> int:
        """Blocks of all segments."""
        return sum(entry.blocks for entry in self.segments)

    @property
    def complete(self) -> bool:
        """Whether there are segments and all are complete."""
        return bool(self.segments) and all(entry.complete for entry in self.segments)

    def check_identity(self, prefix: Prefix) -> None:
        """Hold the manifest to the consumer's own prefix (KVCS "Manifest Track").

        The Compatibility ID of ``compat`` is computed with the prefix's scheme and must be the
        one of the namespace, which is the prefix's own.

        Raises:
            PublicationError: it differs, and the message names the members that do; or layers or
                block_tokens are not those of the prefix's descriptor.
        """
        try:
            compat_id = prefix.scheme.compat_id(self.compat)
        except UsageError as exc:
            raise PublicationError(f"manifest: compat is not a descriptor: {exc}") from exc
        if compat_id != prefix.compat_id:
            raise PublicationError(
                "manifest: compat has another Compatibility ID than the namespace: "
                + _differences(prefix.descriptor, self.compat)
            )
        for name in ("layers", "block_tokens"):
            ours, theirs = getattr(prefix.descriptor, name), getattr(self, name)
            if ours != theirs:
                raise PublicationError(f"manifest: {name}: ours {ours}, theirs {theirs}")

    def covering(self, prefix: Prefix, *, vouched: bool = False) -> tuple[SegmentEntry, ...]:
        """Leading segments that hold blocks of ``prefix``.

        A segment counts if the prefix has all its blocks and the digest of their Block Keys is the
        listed one. The first segment that does not ends the search: what follows depends on it.

        Args:
            prefix: the consumer's prefix.
            vouched: says that an index named this publication for the prefix's last Block Key.
                Then a segment that reaches beyond the prefix counts too, for its first blocks.

        Raises:
            PublicationError: the prefix has all of segment 0's blocks under the publication's own
                Anchor Key, yet the digest differs. Not raised when ``vouched``.
        """
        entries: list[SegmentEntry] = []
        for entry in self.segments:
            if entry.first_block >= prefix.blocks:
                break
            if entry.first_block + entry.blocks > prefix.blocks:
                if vouched:
                    entries.append(entry)
                break
            if prefix.block_keys_digest(entry.first_block, entry.blocks) != entry.block_keys_sha256:
                if entry.segment == 0 and not vouched:
                    raise PublicationError(
                        f"manifest: block_keys_sha256 of segment 0 is not that of our"
                        f" first {entry.blocks} blocks"
                    )
                break
            entries.append(entry)
        return tuple(entries)


def check_entry(entry: SegmentEntry, number: int, first_block: int, layers: int) -> None:
    """Check one entry against its place and its parts against each other.

    Raises:
        PublicationError: they do not fit.
    """
    where = f"manifest: segment {number}"
    if entry.segment != number:
        raise PublicationError(f"{where}: numbered {entry.segment}")
    if entry.first_block != first_block:
        raise PublicationError(
            f"{where}: first_block is {entry.first_block}, expected {first_block}"
        )
    if entry.blocks < 1 or entry.first_block + entry.blocks - 1 > MAX_BLOCK:
        raise PublicationError(f"{where}: blocks is {entry.blocks}")
    if not 0 <= entry.padding_blocks <= MAX_BLOCK + 1 - entry.first_block - entry.blocks:
        raise PublicationError(f"{where}: padding_blocks is {entry.padding_blocks}")
    if len(entry.block_keys_sha256) != DIGEST_OCTETS:
        raise PublicationError(f"{where}: block_keys_sha256 is not 32 octets")
    if len(set(entry.tracks)) != len(entry.tracks):
        raise PublicationError(f"{where}: a track is named twice")
    for track in entry.tracks:
        if track.segment != number:
            raise PublicationError(f"{where}: track {track} is of another segment")
    for track, groups in entry.object_digests.items():
        if track not in entry.tracks:
            raise PublicationError(f"{where}: object_digests names {track}, tracks does not")
        if len(groups) > layers:
            raise PublicationError(f"{where}: {track} lists {len(groups)} of {layers} layers")
        for layer, group in enumerate(groups):
            if len(group) != entry.blocks * DIGEST_OCTETS:
                raise PublicationError(
                    f"{where}: {track} layer {layer} lists {len(group) / DIGEST_OCTETS:g} digests"
                    f" for {entry.blocks} blocks"
                )
        if entry.complete and len(groups) != layers:
            raise PublicationError(
                f"{where}: complete, but {track} lists {len(groups)} of {layers} layers"
            )


def _differences(descriptor: Descriptor, compat: Mapping[str, Json]) -> str:
    try:
        texts = descriptor.differences(Descriptor.from_json(compat))
    except UsageError as exc:
        return str(exc)
    return "; ".join(texts)[:1_000] or "members of its scheme differ"


def check_succession(old: Manifest, new: Manifest) -> None:
    """Check that a newer version only adds to an older one.

    Segments, tracks and lists of digests may grow and ``complete`` may become true; nothing that
    was said may change.

    Raises:
        PublicationError: something did, and the message says what.
    """
    for name in ("layers", "block_tokens", "deterministic"):
        if getattr(old, name) != getattr(new, name):
            raise PublicationError(
                f"manifest: {name} changed from {getattr(old, name)} to {getattr(new, name)}"
            )
    if dict(old.compat) != dict(new.compat):
        raise PublicationError("manifest: compat changed between versions")
    if len(new.segments) < len(old.segments):
        raise PublicationError(
            f"manifest: went back from {len(old.segments)} segments to {len(new.segments)}"
        )
    for before, after in zip(old.segments, new.segments, strict=False):
        _check_entry_succession(before, after)


def _check_entry_succession(before: SegmentEntry, after: SegmentEntry) -> None:
    where = f"manifest: segment {before.segment}"
    for name in ("first_block", "blocks", "block_keys_sha256", "padding_blocks"):
        if getattr(before, name) != getattr(after, name):
            raise PublicationError(f"{where}: {name} changed between versions")
    if before.complete and not after.complete:
        raise PublicationError(f"{where}: was complete and is no longer")
    gone = [str(track) for track in before.tracks if track not in after.tracks]
    if gone:
        raise PublicationError(f"{where}: track {gone[0]} is gone")
    for track, groups in before.object_digests.items():
        now = after.object_digests.get(track, ())
        if len(now) < len(groups):
            raise PublicationError(
                f"{where}: {track} went back from {len(groups)} listed layers to {len(now)}"
            )
        for layer, (old, new) in enumerate(zip(groups, now, strict=False)):
            if old != new:
                raise PublicationError(f"{where}: digests of {track} layer {layer} changed")

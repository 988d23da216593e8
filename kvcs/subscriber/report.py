"""How far a retrieval is and what it was: numbers for logs, tables and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from kvcs.errors import NotAuthentic
from kvcs.kv import Manifest
from kvcs.kv.tracks import PublicationNamespace
from kvcs.trust import PublicKey


@dataclass(frozen=True, slots=True)
class CacheProgress:
    """How far a retrieval is."""

    layers_ready: int
    """Layers that are whole and verified."""

    layers: int
    """Layers selected."""

    objects_verified: int
    """Objects that passed every check."""

    objects: int
    """Objects selected, as far as segments are known."""

    octets: int
    """Payload octets received, whatever became of them."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What a retrieval was; numbers for logs, tables and metrics."""

    publication: PublicationNamespace
    """Which publication."""

    tracks: tuple[str, ...]
    """Data tracks that were taken; each name tells its codec."""

    prefix_tokens: int
    """Tokens of the consumer's prefix, in whole blocks; what lies beyond `tokens` is to be
    computed."""

    believed: bool
    """Whether a segment was taken on an index's word, without a hash over all its Block Keys."""

    codecs: tuple[str, ...]
    """Names of the codecs used."""

    error_bounds: dict[str, float]
    """For each lossy codec that states one, the largest error of an element."""

    lossless: bool
    """Whether every codec used gives back the producer's bits."""

    tokens: int
    """Tokens verified in every selected layer."""

    layers: int
    """Layers that are whole and verified."""

    objects: int
    """Objects verified."""

    octets: int
    """Payload octets received."""

    tensor_octets: int
    """Tensor octets verified."""

    duplicates: int
    """Objects that came again and were dropped."""

    rejected: dict[str, int]
    """Objects that failed a check, by check."""

    signed_by: bytes | None
    """Identifier of the key that signed the lists; None where the publication is not signed. Where
    it is, segments from another publication are verified against that one's signed lists."""

    manifest_versions: int
    """Manifest versions read."""

    refetches: int
    """FETCHes made in recovery."""

    moves: int
    """Times that it went on over another session, or anew over the same one."""

    from_other_publications: int
    """Objects that were fetched of another publication, both being deterministic."""

    fetched_over_http: int
    """Objects that came from the fallback."""

    recomputed: int
    """Objects that the caller has recomputed."""

    segments_from: dict[int, PublicationNamespace]
    """Segments that came whole from another publication, and from which one."""

    open_seconds: float
    """From `open` to the first manifest."""

    first_layer_seconds: float | None
    """From `open` to the first whole layer."""

    last_layer_seconds: float | None
    """From `open` to the last whole layer."""


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """A manifest that was looked at, and how it is signed."""

    manifest: Manifest
    """What it says."""

    kid: bytes | None
    """Identifier of the key that it names as its signer's; None where it is not signed."""

    key: PublicKey | None
    """The key whose signature was verified; None where none was."""

    doubt: NotAuthentic | None
    """Why the signature does not count; None where it does, or could not be looked at for lack of
    keys."""

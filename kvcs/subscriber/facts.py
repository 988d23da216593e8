"""The numbers of a retrieval, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.errors import KvcsError
from kvcs.kv import lookup
from kvcs.kv.tracks import PublicationNamespace
from kvcs.observe import get_logger, metrics
from kvcs.subscriber.report import CacheProgress, CacheReport

if TYPE_CHECKING:
    from kvcs.subscriber.retrieval import Retrieval

_log = get_logger("kvcs.subscriber")


def progress_of(retrieval: Retrieval) -> CacheProgress:
    """How far a retrieval is."""
    ledger = retrieval.ledger
    per_layer = sum(
        retrieval.passage.leg.reception.blocks_wanted(retrieval.manifest.segments[track.segment])
        for track in ledger.tracks
    )
    return CacheProgress(
        sum(1 for index in ledger.layers if ledger.is_ready(index)),
        len(ledger.layers),
        ledger.counters.verified,
        per_layer * len(ledger.layers),
        ledger.counters.octets,
    )


def report_of(retrieval: Retrieval) -> CacheReport:
    """What a retrieval was, so far."""
    ledger, counters = retrieval.ledger, retrieval.ledger.counters
    tracks, follower = ledger.sources, retrieval.follower

    def since(when: float | None) -> float | None:
        return None if when is None else when - retrieval.opened_at

    codecs = tuple(sorted({track.codec for track in tracks}))
    return CacheReport(
        publication=PublicationNamespace.parse(retrieval.namespace),
        tracks=tuple(str(track) for track in tracks),
        prefix_tokens=retrieval.prefix.blocks * retrieval.prefix.descriptor.block_tokens,
        believed=follower.coverage is not None and follower.coverage.believed,
        codecs=codecs,
        error_bounds={
            codec: float(bound)
            for codec in codecs
            if (bound := getattr(lookup(codec), "error_bound", None)) is not None
        },
        lossless=all(lookup(codec).lossless for codec in codecs),
        tokens=ledger.usable_tokens(),
        layers=sum(1 for index in ledger.layers if ledger.is_ready(index)),
        objects=counters.verified,
        octets=counters.octets,
        tensor_octets=counters.verified_octets,
        duplicates=counters.duplicates,
        rejected=dict(counters.rejected),
        signed_by=None if follower.signed is None else follower.signed.kid,
        manifest_versions=follower.versions,
        refetches=retrieval.refetches,
        moves=retrieval.passage.moves,
        from_other_publications=retrieval.from_other_publications,
        fetched_over_http=retrieval.fetched_elsewhere,
        recomputed=counters.supplied,
        segments_from=dict(retrieval.replacements.taken),
        open_seconds=retrieval.manifest_at - retrieval.opened_at,
        first_layer_seconds=since(retrieval.first_at),
        last_layer_seconds=since(retrieval.last_at),
    )


def log_end(retrieval: Retrieval, outcome_is_complete: bool, error: KvcsError | None) -> None:
    """Log and count what a retrieval was."""
    report = report_of(retrieval)
    metrics.retrieved(
        outcome="complete" if outcome_is_complete else "partial" if report.tokens else "failed",
        seconds=retrieval.seconds,
        objects=report.objects,
        octets=report.octets,
        duplicates=report.duplicates,
        rejected=report.rejected,
        refetches=report.refetches,
        moves=report.moves,
        manifest_versions=report.manifest_versions,
        first_layer_seconds=report.first_layer_seconds,
    )
    _log.info(
        "retrieval_ended",
        publication=report.publication.publication_id.hex(),
        outcome="complete" if outcome_is_complete else "incomplete",
        error=None if error is None else str(error),
        tokens=report.tokens,
        layers=report.layers,
        objects=report.objects,
        octets=report.octets,
        duplicates=report.duplicates,
        rejected=report.rejected,
        refetches=report.refetches,
        first_layer_seconds=report.first_layer_seconds,
        last_layer_seconds=report.last_layer_seconds,
    )

"""Looks inside a session core for state that outlived what it was for."""

from __future__ import annotations

from collections.abc import Sized

from kvcs.moqt.session import Session
from kvcs.moqt.track.store import Track

_TABLES = {
    "requests": ("_by_id", "_by_stream", "_arriving", "_waiting", "_unended", "_given_up"),
    "responder": ("_fetch_requests",),
    "updates": ("_held", "_asked", "_unready"),
    "offers": ("_ended_early",),
    "deliveries": ("_subscriptions", "_fetches"),
    "receptions": ("_expected", "_done", "_fetch_finished"),
    "asked_prefixes": ("_prefixes", "_namespaces", "_settings", "_offers"),
    "watched_prefixes": ("_prefixes", "_namespaces", "_octets", "_filters", "_changes"),
    "data_streams": ("_streams", "_aliases", "_fetches", "_early", "_rules", "_unended"),
}


def residue(session: Session, *tracks: Track) -> dict[str, int]:
    """Tables that are not empty, with their sizes; empty when the session has nothing to do.

    This is the one place where tests read private state, so that a new table is added here once.

    Args:
        session: the core.
        tracks: Tracks that were delivered on it, which must not know it any more.
    """
    sizes: dict[str, int] = {}
    for part, names in _TABLES.items():
        owner = getattr(session, part)
        for name in names:
            table: Sized = getattr(owner, name)
            sizes[f"{part}.{name}"] = len(table)
    sizes["scheduler"] = len(session.scheduler)
    sizes["senders"] = len(session._senders)
    sizes["load._open"] = session.load._open
    sizes["load._octets"] = session.load.octets
    sizes["requests._partial_octets"] = session.requests._partial_octets
    sizes["data_streams._early_octets"] = session.data_streams._early_octets
    for track in tracks:
        sizes[f"{track.name}.listeners"] = len(track.listeners)
        sizes[f"{track.name}._watchers"] = len(track._watchers)
    return {name: size for name, size in sizes.items() if size}

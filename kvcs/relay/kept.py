"""Publications that lie whole on the cache's shelf are named, though nobody announces them.

Their producer has left before the relay was started again, so nobody else tells of them. Each is
named from the start until something of it has left the shelf, which happens at the latest when its
MAX_CACHE_DURATION is over. Who may hear of it is decided as for every other namespace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvcs.moqt.names import FullTrackName, Location, TrackNamespace
from kvcs.moqt.track.store import Track
from kvcs.relay.cache import CachedTrack
from kvcs.relay.hub import Hub
from kvcs.relay.shelf import Shelf, restore
from kvcs.trust.rights import KVCS_ROOT

SHELF_KEY = -1
"""Stands for the shelf where sessions are told apart."""

MANIFESTS = frozenset({b"manifest", b"manifest.cose"})
"""Tracks without one of which nobody can use a publication (KVCS "Manifest Track")."""

LATE = 0.01
"""Seconds behind an expiry for it to be over, whatever the clocks' grain."""

Heard = Callable[[int, TrackNamespace, bool, float], None]
"""Told that a namespace can be had from a session, or no longer."""


class Kept:
    """Names what is whole on the shelf.

    Args:
        hub: the relay's core.
        heard: see `Heard`.
    """

    def __init__(self, hub: Hub, heard: Heard) -> None:
        self._hub = hub
        self._heard = heard
        self._names: dict[TrackNamespace, None] = {}

    def open(self, now: float) -> None:
        """The shelf has been read: name what is whole on it."""
        shelf = self._hub.cache.shelf
        if shelf is None:
            return
        tracks: dict[TrackNamespace, list[FullTrackName]] = {}
        for name in shelf.names():
            tracks.setdefault(name.namespace, []).append(name)
        found = Counter[bool]()
        for namespace, names in tracks.items():
            whole = _has_manifest(names) and all(_is_whole(shelf, name) for name in names)
            found[whole] += 1
            if whole:
                self._names[namespace] = None
                self._heard(SHELF_KEY, namespace, True, now)
                self._watch(shelf, namespace, names, now)
        shelf.on_lost = self._lost
        self._hub.report("kept", publications=found[True], incomplete=found[False])

    def _watch(
        self, shelf: Shelf, namespace: TrackNamespace, names: list[FullTrackName], now: float
    ) -> None:
        """Look for what has expired when the first of it has."""
        lasts = [left for name in names if (left := shelf.seconds_left(name)) is not None]

        def look(later: float) -> None:
            if namespace in self._names:
                for name in names:
                    shelf.groups(name)  # tells `on_lost` of what has expired
                if namespace in self._names:  # the wall clock went back
                    self._watch(shelf, namespace, names, later)

        if lasts:
            self._hub.at(now + min(lasts) + LATE, look)

    def _lost(self, name: FullTrackName) -> None:
        """Something of a Track has left the shelf."""
        if name.namespace in self._names:
            del self._names[name.namespace]
            self._hub.soon(lambda now: self._heard(SHELF_KEY, name.namespace, False, now))


def _has_manifest(names: list[FullTrackName]) -> bool:
    """Whether a publication can be read; other namespaces than those of KVCS need no manifest."""
    return names[0].namespace[:1] != (KVCS_ROOT,) or any(name.name in MANIFESTS for name in names)


def _is_whole(shelf: Shelf, name: FullTrackName) -> bool:
    """Whether a Track has ended and all of it is there; of a manifest its last version."""
    held = shelf.track(name)
    if held is None:
        return False
    track = Track(name, authoritative=False)
    restore(track, held)
    entry = CachedTrack(track, shelf)
    if name.name not in MANIFESTS or track.largest is None:
        return entry.whole
    return entry.finished and not entry.lacks(Location(track.largest.group, 0), track.largest)

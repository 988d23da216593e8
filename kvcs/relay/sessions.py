"""The sessions of a relay: what each has under way, and whose turn it is to FETCH on it."""

from __future__ import annotations

from kvcs.access.permits import Place
from kvcs.moqt.names import FullTrackName
from kvcs.moqt.session import Session
from kvcs.relay.peers import Peer
from kvcs.relay.settings import RelayLimits
from kvcs.relay.timers import Callback
from kvcs.relay.tracks import RelayTrack


class Sessions:
    """Sessions by their keys.

    Args:
        limits: see `RelayLimits`.
    """

    def __init__(self, limits: RelayLimits) -> None:
        self.limits = limits
        self._peers: dict[int, Peer] = {}

    def session(self, key: int) -> Session | None:
        """An open session by its key."""
        peer = self._peers.get(key)
        return None if peer is None or peer.core.closed else peer.core

    def is_leaving(self, key: int) -> bool:
        """Whether a session is gone, or its peer said that it will close it (§9.2)."""
        peer = self._peers.get(key)
        return peer is None or peer.core.closed or peer.going_away

    def ban(self, key: int, name: FullTrackName) -> None:
        """Never ask a session for a Track again."""
        peer = self._peers.get(key)
        if peer is not None and len(peer.banned) < self.limits.max_tracks:
            peer.banned.add(name)

    def bind(self, place: Place, track: RelayTrack) -> None:
        """Events of a request of ours concern ``track``."""
        peer = self._peers.get(place.session)
        if peer is not None:
            peer.upstream[place.request_id] = track

    def bind_downstream(self, place: Place, track: RelayTrack) -> None:
        """A PUBLISH of ours is served from ``track``."""
        peer = self._peers.get(place.session)
        if peer is not None:
            peer.downstream[place.request_id] = track

    def unbind(self, place: Place) -> None:
        """A request, of ours or of the peer, is over."""
        peer = self._peers.get(place.session)
        if peer is not None:
            peer.upstream.pop(place.request_id, None)
            peer.downstream.pop(place.request_id, None)
            peer.published.discard(place.request_id)

    def take_slot(self, key: int, start: Callback, now: float) -> None:
        """Call ``start`` once a FETCH may run on a session."""
        peer = self._peers.get(key)
        if peer is None:
            start(now)
        else:
            peer.take_slot(start, self.limits.max_upstream_fetches, now)

    def free_slot(self, key: int, now: float) -> None:
        """A FETCH on a session has ended; the next one begins."""
        peer = self._peers.get(key)
        if peer is not None:
            peer.free_slot(self.limits.max_upstream_fetches, now)

    def leave_queue(self, key: int, start: Callback) -> None:
        """A FETCH that waits for its turn is not wanted any more; quiet where it has begun."""
        peer = self._peers.get(key)
        if peer is not None and start in peer.queue:
            peer.queue.remove(start)

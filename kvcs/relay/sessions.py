"""The sessions of a relay: what each has under way, and whose turn it is to FETCH on it."""

from __future__ import annotations

from weakref import WeakSet

from kvcs.access.permits import Place
from kvcs.errors import RequestError
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.names import FullTrackName
from kvcs.moqt.session import Session
from kvcs.relay.cache import RETRY_MS
from kvcs.relay.peers import Peer
from kvcs.relay.settings import RelayLimits
from kvcs.relay.stats import RelayStats
from kvcs.relay.timers import Callback
from kvcs.relay.tracks import RelayTrack
from kvcs.relay.turns import Owner, Turns


class Sessions:
    """Sessions by their keys.

    Args:
        limits: see `RelayLimits`.
    """

    def __init__(self, limits: RelayLimits) -> None:
        self.limits = limits
        self.stats = RelayStats()
        self._peers: dict[int, Peer] = {}

    def session(self, key: int) -> Session | None:
        """An open session by its key."""
        peer = self._peers.get(key)
        return None if peer is None or peer.core.closed else peer.core

    def is_open(self, place: Place) -> bool:
        """Whether a request is not over, nor its session."""
        session = self.session(place.session)
        return session is not None and session.requests.get(place.request_id) is not None

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
            if peer.upstream.pop(place.request_id, None) is not None:
                peer.core.receptions.sink_to(place.request_id, None)
            peer.downstream.pop(place.request_id, None)
            peer.published.discard(place.request_id)

    def take_slot(self, key: int, owner: Owner, start: Callback, now: float) -> None:
        """Call ``start`` once a FETCH for ``owner`` may run on a session."""
        peer = self._peers.get(key)
        if peer is None:
            start(now)
            return
        if peer.turns is None:
            limits = self.limits
            peer.turns = Turns(limits.max_upstream_fetches, limits.max_caused_fetches_per_session)
        peer.turns.take(owner, start, now)

    def free_slot(self, key: int, owner: Owner, now: float) -> None:
        """A FETCH for ``owner`` on a session has ended; the next one begins."""
        peer = self._peers.get(key)
        if peer is not None and peer.turns is not None:
            peer.turns.free(owner, now)

    def leave_queue(self, key: int, start: Callback) -> None:
        """A FETCH that waits for its turn is not wanted any more; quiet where it has begun."""
        peer = self._peers.get(key)
        if peer is not None and peer.turns is not None:
            peer.turns.leave(start)

    def cause(self, key: int, track: RelayTrack) -> None:
        """A Track is asked for elsewhere, since a session wants it and nobody did before.

        Raises:
            RequestError: EXCESSIVE_LOAD: the session has caused too much that is still wanted.
        """
        peer = self._peers.get(key)
        if peer is None or track in peer.caused:
            return
        most = self.limits.max_caused_per_session
        if len(peer.caused) >= most:
            kept = [each for each in peer.caused if each.caused_by == key and each.sources]
            peer.caused = WeakSet(kept)
            if len(kept) >= most:
                self.stats.upstream_share_refused += 1
                raise RequestError(
                    "this session asks for too many tracks from elsewhere",
                    RequestCode.EXCESSIVE_LOAD,
                    RETRY_MS,
                )
        peer.caused.add(track)
        track.caused_by = key

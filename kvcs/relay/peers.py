"""One session, as the relay sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcs.moqt.names import FullTrackName, TrackNamespace
from kvcs.moqt.session import Session
from kvcs.relay.timers import Callback
from kvcs.relay.tracks import RelayTrack


@dataclass(slots=True)
class Peer:
    """One session, as the relay sees it."""

    core: Session
    opened_at: float
    rank: int | None = None
    """Where it is an upstream, how many others are asked before it."""

    queued: Callable[[], int] = int
    """Octets that were handed over for it and wait below."""

    lag_octets: int = 0
    """Octets of the cache that its subscriptions are owed, when they were looked at last."""

    announced: set[int] = field(default_factory=set)
    """Request IDs of its PUBLISH_NAMESPACEs."""

    interests: dict[int, TrackNamespace] = field(default_factory=dict)
    """Its SUBSCRIBE_NAMESPACEs: Request IDs and prefixes."""

    track_interests: set[int] = field(default_factory=set)
    """Request IDs of its SUBSCRIBE_TRACKS."""

    published: set[int] = field(default_factory=set)
    """Request IDs of its PUBLISHes."""

    downstream: dict[int, RelayTrack] = field(default_factory=dict)
    """Its SUBSCRIBEs, FETCHes and TRACK_STATUSes, and their Tracks."""

    upstream: dict[int, RelayTrack] = field(default_factory=dict)
    """Requests that we made on it and PUBLISHes of its own, and their Tracks."""

    banned: set[FullTrackName] = field(default_factory=set)
    """Tracks of which it sent what is malformed."""

    going_away: bool = False
    fetching: int = 0
    """FETCHes of ours that run on it."""

    queue: deque[Callback] = field(default_factory=deque)
    """FETCHes of ours that wait for their turn."""

    starting: bool = False
    """Whether they are being started."""

    requests: int = 0
    """Requests it has made so far."""

    @property
    def serving(self) -> int:
        """How many of `downstream` are not over: those that are leave it a while later."""
        return sum(self.core.requests.get(each) is not None for each in self.downstream)

    def take_slot(self, start: Callback, limit: int, now: float) -> None:
        """Call ``start`` once fewer than ``limit`` FETCHes of ours run on it."""
        if self.fetching < limit:
            self.fetching += 1
            start(now)
        else:
            self.queue.append(start)

    def free_slot(self, limit: int, now: float) -> None:
        """A FETCH on it has ended; the next one begins."""
        self.fetching -= 1
        if self.starting:
            return  # one that was started has ended at once: the loop below goes on
        self.starting = True
        try:
            while self.queue and self.fetching < limit:
                self.fetching += 1
                self.queue.popleft()(now)
        finally:
            self.starting = False

"""One session, as the relay sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakSet

from kvcs.moqt.names import FullTrackName, TrackNamespace
from kvcs.moqt.session import Session
from kvcs.relay.stats import Fact
from kvcs.relay.tracks import RelayTrack
from kvcs.relay.turns import Turns


@dataclass(slots=True)
class Peer:
    """One session, as the relay sees it."""

    core: Session
    opened_at: float
    rank: int | None = None
    """Where it is an upstream, how many others are asked before it."""

    queued: Callable[[], int] = int
    """Octets that were handed over for it and wait below."""

    facts: Callable[[], dict[str, Fact]] = dict
    """What the log is to tell of it when it is over."""

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
    turns: Turns | None = None
    """FETCHes of ours on it, once there was one."""

    caused: WeakSet[RelayTrack] = field(default_factory=WeakSet)
    """Tracks that were asked for elsewhere because it was the first to want them."""

    requests: int = 0
    """Requests it has made so far."""

    @property
    def serving(self) -> int:
        """How many of `downstream` are not over: those that are leave it a while later."""
        return sum(self.core.requests.get(each) is not None for each in self.downstream)

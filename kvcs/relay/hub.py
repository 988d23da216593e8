"""What the relay's core offers to the Tracks that it carries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvcs.access.permits import Place
from kvcs.moqt.names import FullTrackName
from kvcs.moqt.session import Session
from kvcs.relay.cache import CachedTrack, RelayCache
from kvcs.relay.scopes import Scopes
from kvcs.relay.settings import RelayLimits
from kvcs.relay.stats import Fact, RelayStats
from kvcs.relay.timers import Callback, Timer
from kvcs.relay.turns import Owner

if TYPE_CHECKING:
    from kvcs.relay.tracks import RelayTrack


class Hub(Protocol):
    """The core, as a Track sees it."""

    limits: RelayLimits
    stats: RelayStats
    cache: RelayCache
    scopes: Scopes

    def session(self, key: int) -> Session | None:
        """An open session by its key."""

    def is_open(self, place: Place) -> bool:
        """Whether a request is not over, nor its session."""

    def is_leaving(self, key: int) -> bool:
        """Whether a session is gone or will be closed, so that nothing new is begun on it."""

    def publishers(self, name: FullTrackName) -> list[int]:
        """Sessions that announced a Track's namespace or PUBLISH it, best first."""

    def upstreams(self, name: FullTrackName) -> list[int]:
        """Upstream sessions that may be asked for a Track that nobody announced, best first."""

    def askable(self, name: FullTrackName) -> list[int]:
        """`publishers`, or where there are none `upstreams`."""

    def from_elsewhere(self, key: int, sources: list[int]) -> bool:
        """Whether one of ``sources`` is not the relay at the other end of ``key``."""

    def expires_ms(self, place: Place) -> int | None:
        """Milliseconds after which a request of a peer will be ended; None where nothing does."""

    def ban(self, key: int, name: FullTrackName) -> None:
        """Never ask a session for a Track again: what it sent was malformed."""

    def bind(self, place: Place, track: RelayTrack) -> None:
        """Events of this request concern ``track``, until `unbind`."""

    def bind_downstream(self, place: Place, track: RelayTrack) -> None:
        """A PUBLISH of ours is served from ``track``, until `unbind`."""

    def unbind(self, place: Place) -> None:
        """The request is over."""

    def watch(self, now: float) -> None:
        """Something is served: look from now on at what its peer does not take."""

    def at(self, when: float, callback: Callback) -> Timer:
        """Call ``callback`` at ``when`` or soon after, unless the timer is cancelled."""

    def soon(self, callback: Callback) -> None:
        """Call ``callback`` with the time, with the next input or timer."""

    def run_soon(self, now: float) -> None:
        """An input was taken: call what `soon` was given."""

    def cause(self, key: int, track: RelayTrack) -> None:
        """A Track is asked for elsewhere since a session wants it; `RequestError` where it is one
        too many."""

    def take_slot(self, key: int, owner: Owner, start: Callback, now: float) -> None:
        """Call ``start`` once a FETCH for ``owner`` may run on a session; also when the session is
        gone."""

    def free_slot(self, key: int, owner: Owner, now: float) -> None:
        """A FETCH for ``owner`` on a session has ended."""

    def leave_queue(self, key: int, start: Callback) -> None:
        """``start``, which `take_slot` got, is not to be called any more."""

    def reopen(self, name: FullTrackName) -> CachedTrack:
        """Begin a Track anew: what was cached of it is of an earlier publication."""

    def release(self, track: RelayTrack) -> None:
        """Nobody needs a Track any more; its Objects may stay cached."""

    def report(self, event: str, **facts: Fact) -> None:
        """Write a line to the log."""

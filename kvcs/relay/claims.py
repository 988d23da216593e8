"""Largest Objects that one of several publishers names and nobody else knows of (MOQT §7).

What is told downstream is the maximum of what upstreams name. So one of several publishers of a
Track that names a Location far ahead would keep everybody from what the others publish: it lies
behind the start of every subscription that begins with the next Object. Such a publisher is asked
for that Object first, and counts once it has sent one; one that cannot is no publisher of the
Track. Where there is nobody else, what it says is taken for true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcs.access.permits import Place
from kvcs.errors import UsageError
from kvcs.moqt import events
from kvcs.moqt.errors import StreamCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from kvcs.moqt.objects import ObjectStarted
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.relay.hub import Hub
from kvcs.relay.timers import Timer
from kvcs.relay.upstream import Upstream

if TYPE_CHECKING:
    from kvcs.relay.tracks import RelayTrack

PAUSE = 0.25
"""Seconds between looks whether other publishers have answered, where one cannot show what it
names."""

Verdict = Callable[[bool, float], None]
"""Told whether an Object came, and when."""


@dataclass(slots=True, eq=False)
class _Check:
    """One publisher that is asked."""

    upstream: Upstream
    claim: Location
    verdict: Verdict
    place: Place | None = None
    """The FETCH."""

    stream: tuple[int, int] | None = None
    """Session and ID of its stream."""

    timer: Timer | None = None


class Claims:
    """What publishers of one Track say of its Largest Object, while that is checked.

    Args:
        hub: the relay's core.
        owner: the Track.
    """

    def __init__(self, hub: Hub, owner: RelayTrack) -> None:
        self._hub = hub
        self._owner = owner
        self._checks: dict[Upstream, _Check] = {}

    def named(
        self,
        upstream: Upstream,
        largest: Location | None,
        properties: KeyValues,
        establish: Callable[[Upstream, Location | None, KeyValues, float], None],
        refuse: Callable[[Upstream, float], None],
        now: float,
    ) -> None:
        """A SUBSCRIBE was accepted, a PUBLISH came, or one that was paused goes on.

        Args:
            upstream: the subscription.
            largest: the Largest Object that its publisher names.
            properties: the Track Properties that came along.
            establish: called where what it names may be counted, at once or soon.
            refuse: called where it has not what it names, and others serve the Track.
            now: the time.
        """
        if largest is None or not self._doubts(upstream, largest):
            establish(upstream, largest, properties, now)
            self._confirm(now)
            return
        sources = self._owner.sources
        patience = now + self._hub.limits.upstream_wait

        def verdict(true: bool, later: float) -> None:
            if sources.find(upstream.place) is not upstream:
                return
            if not true and any(each is not upstream for each in sources.subscriptions()):
                self._drop(upstream)
                refuse(upstream, later)
            elif true or len(sources.sessions()) < 2 or later >= patience:
                establish(upstream, largest, properties, later)
                self._confirm(later)
            else:  # the others have not answered yet
                self._hub.at(later + PAUSE, lambda then: verdict(False, then))

        self._check(upstream, largest, verdict, now)

    def _confirm(self, now: float) -> None:
        """What somebody else has shown, or has sent meanwhile, need not be shown."""
        known = self._owner.track.largest
        for check in list(self._checks.values()):
            if known is not None and check.claim <= known:
                self._settle(check, True, now)

    def noted(self, upstream: Upstream, largest: Location) -> None:
        """A publisher names another Largest Object in passing: it counts where there is nobody
        else who would be kept from anything."""
        if not self._doubts(upstream, largest):
            self._owner.track.note_largest(largest)

    def _drop(self, upstream: Upstream) -> None:
        """Ask a publisher for nothing of the Track any more."""
        place, name = upstream.place, self._owner.name
        self._hub.stats.largest_not_there += 1
        self._hub.report("largest_not_there", track=str(name), session=place.session)
        self._hub.ban(place.session, name)
        session = self._hub.session(place.session)
        if session is not None:
            session.requester.cancel(place.request_id, StreamCode.CANCELLED)

    def _doubts(self, upstream: Upstream, claim: Location) -> bool:
        """Whether a publisher has to show what it names before that counts."""
        known = self._owner.track.largest
        others = len(self._owner.sources.sessions()) > 1 and not upstream.tried
        # That another one names the same is no sign: both may be one and the same.
        return others and (known is None or claim > known)

    def _check(self, upstream: Upstream, claim: Location, verdict: Verdict, now: float) -> None:
        """Ask a publisher for what it names; ``verdict`` is told once, soon."""
        check = self._checks[upstream] = _Check(upstream, claim, verdict)
        # Statuses do not travel on fetch streams: one that comes before them will do.
        start = Location(claim.group, claim.object - 1)
        if not claim.object:
            start = Location(max(claim.group - 1, 0), 0)
        chosen = LocationFilter.between(start, claim)
        key = upstream.place.session
        session = self._hub.session(key)
        try:
            if session is not None:
                request_id = session.requester.fetch(
                    self._owner.name, Parameters.of(location_filter=chosen)
                )
                check.place = Place(key, request_id)
                self._hub.bind(check.place, self._owner)
                self._hub.stats.upstream_fetches += 1
        except UsageError:
            pass  # it takes no more requests
        wait = 0.0 if check.place is None else self._hub.limits.fill_wait
        check.timer = self._hub.at(now + wait, lambda later: self._settle(check, False, later))

    def left(self, upstream: Upstream) -> None:
        """A publisher is gone; its verdict is not told."""
        check = self._checks.pop(upstream, None)
        if check is not None:
            self._end(check)

    def event(self, place: Place, event: events.Event, now: float) -> bool:
        """An event of a request; False where it is of no FETCH that was made here."""
        check = next((one for one in self._checks.values() if one.place == place), None)
        if check is None:
            return False
        if isinstance(event, events.DataStreamOpened):
            check.stream = place.session, event.stream_id
        elif isinstance(event, events.RequestRefused | events.RequestCancelled):
            self._settle(check, False, now)
        return True

    def stream_event(self, stream: tuple[int, int], event: events.Event, now: float) -> None:
        """An event of a data stream that nobody else takes."""
        check = next((one for one in self._checks.values() if one.stream == stream), None)
        if check is None:
            return
        if isinstance(event, events.ObjectsReceived):
            if any(isinstance(item, ObjectStarted) for item in event.items):
                self._settle(check, True, now)
        elif isinstance(event, events.DataStreamEnded):
            self._settle(check, False, now)

    def _settle(self, check: _Check, came: bool, now: float) -> None:
        if self._checks.get(check.upstream) is not check:
            return
        del self._checks[check.upstream]
        self._end(check)
        check.verdict(came, now)

    def _end(self, check: _Check) -> None:
        if check.timer is not None:
            check.timer.cancel()
        if check.place is None:
            return
        self._hub.unbind(check.place)
        session = self._hub.session(check.place.session)
        if session is not None:
            session.requester.cancel(check.place.request_id, StreamCode.CANCELLED)

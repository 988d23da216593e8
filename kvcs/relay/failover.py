"""A Track whose upstream is gone goes on from another one (MOQT §7, §18.2).

Subscriptions downstream stay as they are, and so do their streams. The next upstream is asked as
for a new Track, with a fill from the first Location that subscribers lack; what it brings is
delivered live, in order and once. Where no other upstream has the Track, or what lacks cannot be
got, the subscriptions end as they would have without all this: nothing is missing without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcs.errors import RequestError
from kvcs.moqt.errors import PublishDoneCode, StreamCode
from kvcs.moqt.names import Location
from kvcs.moqt.track.bridge import Bridge
from kvcs.moqt.track.stored import StoredObject
from kvcs.relay.hub import Hub
from kvcs.relay.timers import Timer
from kvcs.relay.upstream import Retrieval, Upstream

if TYPE_CHECKING:
    from kvcs.relay.tracks import RelayTrack


@dataclass(frozen=True, slots=True)
class End:
    """Why an upstream subscription is over."""

    status: int
    """Of the PUBLISH_DONE that goes downstream."""

    reason: str
    """The same."""

    error: RequestError
    """What requests get that wait."""


class Failover:
    """Changes the source of one Track.

    Args:
        hub: the relay's core.
        owner: the Track.
    """

    def __init__(self, hub: Hub, owner: RelayTrack) -> None:
        self._hub = hub
        self._owner = owner
        self._bridge: Bridge | None = None
        self._missing: Location | None = None
        self._range: Retrieval | None = None
        """What lacks, while it comes from the next source."""
        self._why: End | None = None
        self._then: End | None = None
        """How the Track ends once what lacks is here: its next source has ended it already."""
        self._left: set[int] = set()
        """Sessions that have let us down a short time ago: they are not asked again so soon."""
        self._timer: Timer | None = None
        self.asking = False
        """Whether a next source is looked for."""

    @property
    def bridge(self) -> Bridge | None:
        """Takes what the next source is asked for; None while none is looked for."""
        return self._bridge if self.asking else None

    @property
    def missing(self) -> Location | None:
        """The first Location that subscribers lack."""
        return self._missing

    def keeps(self, stored: StoredObject) -> bool:
        """Keep an Object that `kvcs.moqt.track.bridge.hold` gave: its rest may yet come live.

        Returns:
            False where no source was lost a short time ago.
        """
        if self._bridge is not None:
            self._bridge.keep(stored)
        return self._bridge is not None

    def goes_on(self, upstream: Upstream, end: End, now: float) -> bool:
        """The last upstream subscription of a Track is over: look for the next one.

        Args:
            upstream: what is over; it has no place among the sources any more.
            end: why.
            now: the caller's clock, seconds.

        Returns:
            False where the Track ends: it is whole, nobody follows it, or nobody else has it.
        """
        owner = self._owner
        track = owner.track
        if end.status == PublishDoneCode.TRACK_ENDED:
            return self._ends_behind(upstream, end, now)
        if end.status == PublishDoneCode.MALFORMED_TRACK or owner.whole:
            return False
        if track.ended is not None or not track.listeners:
            return False
        self._left.add(upstream.place.session)
        keys = self._candidates()
        if not keys and not owner.sources.established:
            return False
        bridge = self._bridge
        if bridge is None:
            bridge = self._bridge = Bridge(track)
        bridge.resume()
        owner.forget_streams(upstream)
        for stored in upstream.part_streams():
            bridge.keep(stored)
        owner.sources.end_fill(upstream, now)
        self._drop_range(now)
        self._missing = bridge.first_missing(owner.sources.live_from)
        self._why, self._then = end, None
        self._hub.report(
            "upstream_lost",
            track=str(owner.name),
            session=upstream.place.session,
            reason=end.reason,
            missing=None if self._missing is None else str(self._missing),
        )
        if owner.sources.established:
            self._get_range(now)  # the others began behind what lacks
        else:
            self.asking = True
            self._limit(now)
            owner.sources.try_upstreams(keys, now)
        return True

    def _candidates(self) -> list[int]:
        """Sessions that may be asked: not those that gave up, nor the relays that are served."""
        name, hub = self._owner.name, self._hub
        served = self._owner.consumers.sessions()
        keys = dict.fromkeys((*hub.publishers(name), *hub.upstreams(name)))
        return [
            key
            for key in keys
            if key not in self._left and any(hub.from_elsewhere(one, [key]) for one in served)
        ]

    def _ends_behind(self, upstream: Upstream, end: End, now: float) -> bool:
        """The next source says that the Track has ended, and what lacks is still on its way."""
        owner, lacking = self._owner, self._range
        if lacking is None:
            return False
        owner.forget_streams(upstream)
        upstream.close_streams(StreamCode.INTERNAL_ERROR)
        owner.finished_by(upstream.place.session)
        self._then = end
        fill, upstream.fill = upstream.fill, None
        if fill is lacking and fill.place == upstream.place:
            owner.retriever.failed(fill, now)  # the rest comes by FETCH
        return True

    def _limit(self, now: float) -> None:
        def check(later: float) -> None:
            self._timer = None
            if self.asking:
                self.fail(later)
            else:
                self.abort(later)

        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._hub.at(now + self._hub.limits.upstream_wait, check)

    # The next source

    def accepted(self, upstream: Upstream, now: float) -> None:
        """A next source has accepted; what lacks follows as its fill."""
        self.asking = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        fill = upstream.fill
        self._hub.stats.failovers += 1
        self._hub.report(
            "upstream_replaced", track=str(self._owner.name), session=upstream.place.session
        )
        if fill is not None and fill.bridge is not None:
            self._range = fill
        else:
            self._get_range(now)  # it was asked before what lacks was known

    def _get_range(self, now: float) -> None:
        """Get what lacks by FETCH, up to the Largest Object."""
        owner, missing = self._owner, self._missing
        largest = owner.track.largest
        if missing is None or largest is None or largest < missing:
            self._settle(now)
            return
        assert self._bridge is not None  # it is open since the source was lost
        self._range = owner.retriever.begin_range(missing, largest, self._bridge, now)
        if self._range is None:
            self.fail(now)

    def range_over(self, retrieval: Retrieval, now: float, *, whole: bool) -> None:
        """What lacks has come, or nobody could bring all of it."""
        if retrieval is not self._range:
            return
        self._range = None
        if whole:
            self._settle(now)
        else:
            self.fail(now)

    def _settle(self, now: float) -> None:
        owner, bridge, then = self._owner, self._bridge, self._then
        assert bridge is not None  # it is open since the source was lost
        bridge.settle()
        # Streams of the next source may yet go on with what has begun on the last one's.
        self._limit(now)
        if then is not None:
            self.abort(now)
            if not owner.sources:
                owner.sources.end_subgroups(then.status)
                owner.track.end(then.status, then.reason)
                owner.consumers.publication_over(then.error)
                owner.check_idle(now)

    def fail(self, now: float) -> None:
        """No other source has the Track, or not all of it: it ends downstream after all."""
        owner, why = self._owner, self._why
        assert why is not None  # a source was lost
        self._hub.stats.failovers_failed += 1
        self._hub.report("upstream_not_replaced", track=str(owner.name), reason=why.reason)
        self.abort(now)
        owner.sources.cancel(StreamCode.CANCELLED, published=False)
        # Where it is reopened at once, who followed it has to be told before: else what comes next
        # would reach them as if nothing lacked before it.
        owner.track.end(why.status, why.reason, abandoned=bool(owner.sources))
        if owner.sources:
            owner.track.reopen()  # for whoever asks next
        else:
            owner.consumers.publication_over(why.error)
        owner.check_idle(now)

    def abort(self, now: float) -> None:
        """Hold nothing any more; quiet where no source was lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.asking, self._then = False, None
        self._left.clear()
        bridge, self._bridge = self._bridge, None
        self._drop_range(now)
        if bridge is not None:
            bridge.release()

    def _drop_range(self, now: float) -> None:
        lacking, self._range = self._range, None
        if lacking is not None:
            self._owner.retriever.drop(lacking, now)

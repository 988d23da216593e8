"""Publishers of one Track that are paused, and that go on, as it is needed downstream (MOQT §7)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvcs.errors import UsageError
from kvcs.moqt import events
from kvcs.moqt.intervals import FIRST, LAST, following
from kvcs.moqt.messages import RequestOk
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import KeyValues
from kvcs.relay.hub import Hub
from kvcs.relay.upstream import Upstream

if TYPE_CHECKING:
    from kvcs.relay.sources import Sources
    from kvcs.relay.tracks import RelayTrack


class Steering:
    """The Forward States of what PUBLISHes have begun.

    Args:
        hub: the relay's core.
        owner: the Track.
        sources: its upstream subscriptions.
    """

    def __init__(self, hub: Hub, owner: RelayTrack, sources: Sources) -> None:
        self._hub = hub
        self._owner = owner
        self._sources = sources

    def steer(self, upstream: Upstream, *, forward: bool, now: float) -> None:
        """Ask a publisher to send, or to pause."""
        upstream.wanted = forward
        if upstream.update_id is not None or upstream.forward == forward:
            return  # where an answer is out, it is looked at again with that
        session = self._hub.session(upstream.place.session)
        if session is None:
            return
        try:
            upstream.asked = forward
            upstream.update_id = session.requester.update(
                upstream.place.request_id, Parameters.of(forward=int(forward))
            )
        except UsageError:
            return  # it has ended: what says so is on its way to us
        if not forward:
            upstream.forward = False  # what is published from here on may be missing
        if forward:
            self._owner.consumers.publisher_asked(now)

    def answered(self, upstream: Upstream, event: events.RequestUpdateAnswered, now: float) -> None:
        """A publisher has answered a REQUEST_UPDATE.

        One that sends again counts once it has shown its Largest Object, where that is in doubt.
        """
        if event.update_id != upstream.update_id:
            return
        if not isinstance(event.reply, RequestOk):
            upstream.update_id = None
            return  # PUBLISH_DONE follows
        largest = event.reply.parameters.get(ParameterType.LARGEST_OBJECT)
        if upstream.asked:
            resumed = partial(self._resumed, self._owner.track.largest)
            self._sources.claims.named(
                upstream, largest, KeyValues(), resumed, self._sources.not_there, now
            )
            return
        if largest is not None:
            self._sources.claims.noted(upstream, largest)
        self._look_again(upstream, now)

    def _resumed(
        self,
        known: Location | None,
        upstream: Upstream,
        largest: Location | None,
        _: KeyValues,
        now: float,
    ) -> None:
        """A publisher sends again, and what it names counts; ``known`` was the Largest Object."""
        at = known if largest is None else largest if known is None else max(known, largest)
        if at is not None:
            self._owner.track.note_largest(at)
        if not self._sources.flowing:
            self._sources.live_from = FIRST if at is None else following(at) or LAST
        elif known is not None and at is not None and known < at:
            upstream.before = known, at
        self._look_again(upstream, now)

    def _look_again(self, upstream: Upstream, now: float) -> None:
        """A publisher has done what it was asked for last; something else may be wanted now."""
        upstream.update_id = None
        upstream.forward = upstream.asked
        if upstream.forward != upstream.wanted:
            self.steer(upstream, forward=upstream.wanted, now=now)
        elif upstream.flowing:
            self._owner.consumers.answer_waiting(now)

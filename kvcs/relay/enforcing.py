"""Holds requests of peers to what is allowed, and ends them when it is not (KVCS "Relay
Considerations").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvcs.access.permits import Permits, Place
from kvcs.access.policy import Policy, Request
from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, StreamCode
from kvcs.moqt.requests import State
from kvcs.relay.hub import Hub
from kvcs.relay.peers import Peer
from kvcs.relay.routing import Routing


class Core(Hub, Protocol):
    """The relay's core, as this sees it."""

    def peer(self, key: int) -> Peer | None:
        """What is held of a session that is open."""

    def cancelled(self, place: Place, peer: Peer, now: float) -> None:
        """A request of a peer is over before its time."""


class Enforcer:
    """What is allowed to whom, and until when.

    Args:
        core: the relay's core.
        routing: announcements and interests.
        policy: who may do what.
    """

    def __init__(self, core: Core, routing: Routing, policy: Policy) -> None:
        self._core = core
        self._routing = routing
        self.permits = Permits(policy, core.at, core.is_open, self._end)
        self._curtailed: set[int] = set()
        """Sessions whose announcements have just ended, some of them, with their token."""

    def check(self, place: Place, event: Request, now: float) -> None:
        """Authorize a request: each kind of each peer passes here before anything else.

        Raises:
            RequestError: it is refused.
        """
        self._counted(place, event, lambda: self.permits.check(place, event, now))

    def check_update(self, place: Place, event: events.RequestUpdateReceived, now: float) -> None:
        """Authorize a REQUEST_UPDATE.

        Raises:
            RequestError: it is refused, and its request ends.
        """
        self._counted(place, event, lambda: self.permits.check_update(place, event, now))

    def _counted(
        self,
        place: Place,
        event: Request | events.RequestUpdateReceived,
        check: Callable[[], None],
    ) -> None:
        try:
            check()
        except RequestError as exc:
            self._core.stats.unauthorized += 1
            self._core.report(
                "unauthorized",
                session=place.session,
                request=type(event).__name__.removesuffix("Received"),
                code=int(exc.code),
                reason=exc.reason,
            )
            raise

    def _end(self, place: Place, error: RequestError, now: float) -> None:
        """End a request of a peer that is allowed no longer, and what it has brought about."""
        core = self._core
        peer = core.peer(place.session)
        if peer is None:
            return
        request_id, responder = place.request_id, peer.core.responder
        core.report("permit_ended", session=place.session, reason=error.reason)
        core.stats.permits_ended += 1
        self._routing.forbid(place, error.reason)
        track = peer.downstream.get(request_id)
        request = peer.core.requests.get(request_id)
        if request is not None and request.state is State.PENDING:
            responder.refuse(request_id, error)
        elif track is not None:
            responder.end_subscription(request_id, PublishDoneCode.UNAUTHORIZED, error.reason)
            responder.fail_fetch(request_id, StreamCode.EXPIRED_AUTH_TOKEN)
        else:
            responder.revoke(request_id, StreamCode.EXPIRED_AUTH_TOKEN)
        announced = request_id in peer.announced
        core.cancelled(place, peer, now)
        if announced and place.session not in self._curtailed:
            # Once, however many announcements end in this instant.
            self._curtailed.add(place.session)
            core.soon(lambda later: self._drop_upstreams(place.session, later))

    def _drop_upstreams(self, key: int, now: float) -> None:
        """Take nothing from a session of Tracks that it announces no longer.

        A PUBLISH of it has a permit of its own.
        """
        self._curtailed.discard(key)
        peer = self._core.peer(key)
        if peer is None:
            return
        for request_id, track in list(peer.upstream.items()):
            if request_id in peer.published:
                continue
            if key not in self._routing.namespaces.publishers(track.name.namespace):
                code = StreamCode.EXPIRED_AUTH_TOKEN
                peer.core.requester.cancel(request_id, code)
                ended = events.RequestCancelled(request_id, True, code)
                track.event(Place(key, request_id), ended, now)

"""What each session is allowed, and until when.

A request that is allowed by a token ends with it, unless the session or a REQUEST_UPDATE has
brought another one. When the issuers' keys change, every request is looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvcs.access.policy import Policy, Request
from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.tokens import ResolvedToken
from kvcs.trust import Asked, Grant, Permit

SWEEP_AT = 64
"""Permits of a session, before those whose request is over are looked for among them."""

LATEST = 1e9
"""Longest that a timer is set for, seconds."""


Callback = Callable[[float], None]
"""Called with the time."""


class Timer(Protocol):
    """A call to come."""

    def cancel(self) -> None:
        """Call nothing."""


class Place(NamedTuple):
    """A request of a peer: the session's key, and the Request ID."""

    session: int
    """Key of the session."""

    request_id: int
    """Request ID on that session."""


@dataclass(slots=True)
class _Bearer:
    """One session."""

    held: tuple[Grant, ...]
    """What the tokens of its SETUP allow."""

    permits: dict[int, Permit] = field(default_factory=dict)
    """Its requests that have an end, by Request ID."""

    sweep_at: int = SWEEP_AT
    timer: Timer | None = None
    due: float = 0.0
    """Unix seconds for which the timer is set."""


class Permits:
    """Keeps what was allowed and ends it in time.

    Args:
        policy: decides.
        at: calls back at a time of the endpoint's clock.
        alive: whether a request is not over.
        end: ends a request that is allowed no longer.
    """

    def __init__(
        self,
        policy: Policy,
        at: Callable[[float, Callback], Timer],
        alive: Callable[[Place], bool],
        end: Callable[[Place, RequestError, float], None],
    ) -> None:
        self._policy = policy
        self._at = at
        self._alive = alive
        self._end = end
        self._bearers: dict[int, _Bearer] = {}

    def __len__(self) -> int:
        """Requests that have an end."""
        return sum(len(bearer.permits) for bearer in self._bearers.values())

    def open(self, key: int, tokens: Sequence[ResolvedToken]) -> None:
        """A session has shown its tokens.

        Raises:
            SessionError: it is to be closed.
        """
        self._bearers[key] = _Bearer(self._policy.admit(tokens))

    def close(self, key: int) -> None:
        """A session is over."""
        bearer = self._bearers.pop(key, None)
        if bearer is not None and bearer.timer is not None:
            bearer.timer.cancel()

    def check(self, place: Place, request: Request, now: float) -> None:
        """Check a request: every kind of request passes here, before anything is done for it.

        Raises:
            RequestError: it is refused.
        """
        bearer = self._bearer(place.session)
        self._note(bearer, place, self._policy.authorize(request, bearer.held), now)

    def expires_ms(self, place: Place) -> int | None:
        """Milliseconds after which a request will end, for EXPIRES; None where nothing ends it."""
        bearer = self._bearers.get(place.session)
        permit = None if bearer is None else bearer.permits.get(place.request_id)
        if permit is None:
            return None
        return max(1, round((permit.until - self._policy.clock()) * 1000))

    def may(self, key: int, wanted: Asked) -> bool:
        """Whether what a session has shown allows something that it has not asked for."""
        bearer = self._bearers.get(key)
        return bearer is not None and self._policy.allows(wanted, bearer.held)

    def check_update(self, place: Place, update: events.RequestUpdateReceived, now: float) -> None:
        """Check a REQUEST_UPDATE; fresh tokens prolong the request.

        Raises:
            RequestError: it is refused, and its request ends.
        """
        bearer = self._bearer(place.session)
        permit = bearer.permits.get(place.request_id)
        if permit is None:
            if self._policy.serves_anyone:
                return
            raise RequestError("the request is not allowed any more", RequestCode.UNAUTHORIZED)
        self._note(bearer, place, self._policy.authorize_update(permit, update, bearer.held), now)

    def forget(self, place: Place) -> None:
        """A request is over."""
        bearer = self._bearers.get(place.session)
        if bearer is not None:
            bearer.permits.pop(place.request_id, None)

    def look_again(self, now: float) -> None:
        """The issuers have changed: end what is allowed no longer."""
        for key in list(self._bearers):
            self._review(key, now, everything=True)

    def _bearer(self, key: int) -> _Bearer:
        return self._bearers.setdefault(key, _Bearer(()))

    def _note(self, bearer: _Bearer, place: Place, permit: Permit | None, now: float) -> None:
        if permit is None:
            return
        if len(bearer.permits) >= bearer.sweep_at:
            key = place.session
            bearer.permits = {
                request_id: kept
                for request_id, kept in bearer.permits.items()
                if self._alive(Place(key, request_id))
            }
            bearer.sweep_at = 2 * len(bearer.permits) + SWEEP_AT
        bearer.permits[place.request_id] = permit
        if bearer.timer is None or permit.until < bearer.due:
            self._arm(place.session, bearer, permit.until, now)

    def _arm(self, key: int, bearer: _Bearer, due: float, now: float) -> None:
        if bearer.timer is not None:
            bearer.timer.cancel()
        bearer.due = due
        wait = min(max(0.0, due - self._policy.clock()), LATEST)
        bearer.timer = self._at(now + wait, lambda later: self._review(key, later))

    def _review(self, key: int, now: float, *, everything: bool = False) -> None:
        """End requests of a session whose time is up, and look when the next one's will be."""
        bearer = self._bearers.get(key)
        if bearer is None:
            return
        if bearer.timer is not None:
            bearer.timer.cancel()
            bearer.timer = None
        wall = self._policy.clock()
        for request_id, permit in list(bearer.permits.items()):
            place = Place(key, request_id)
            if not self._alive(place):
                bearer.permits.pop(request_id, None)
            elif everything or permit.until <= wall:
                self._renew(bearer, place, permit, now)
        ends = [permit.until for permit in bearer.permits.values()]
        if ends and self._bearers.get(key) is bearer:
            self._arm(key, bearer, min(ends), now)

    def _renew(self, bearer: _Bearer, place: Place, permit: Permit, now: float) -> None:
        try:
            renewed = self._policy.renew(permit, bearer.held)
        except RequestError as exc:
            bearer.permits.pop(place.request_id, None)
            self._end(place, exc, now)
            return
        if renewed is not None:
            bearer.permits[place.request_id] = renewed

"""What the requests of a peer weigh, and how many come: beyond limits EXCESSIVE_LOAD (§9.4)."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from kvcs.errors import RequestError
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.limits import Limit, Rate
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.requests import Request

if TYPE_CHECKING:
    from kvcs.moqt.session import Session

RETRY_LOAD_MS = 1000
"""Retry Interval that goes with EXCESSIVE_LOAD."""

STREAMS_A_REQUEST = 8
"""Streams that take about as much time to look at as a request does."""

_VALUE_OCTETS = 48
"""What one value of a message takes beside its content: about an object and its place."""


def weigh(value: Any) -> int:
    """Estimate the octets of memory that a message or a field of it takes."""
    if isinstance(value, bytes):
        return _VALUE_OCTETS + len(value)
    if isinstance(value, tuple):
        return _VALUE_OCTETS + sum(map(weigh, value))
    if is_dataclass(value):
        return _VALUE_OCTETS + sum(weigh(getattr(value, one.name)) for one in fields(value))
    return _VALUE_OCTETS


def overloaded(reason: str) -> RequestError:
    """The refusal of what is too much now."""
    return RequestError(reason, RequestCode.EXCESSIVE_LOAD, RETRY_LOAD_MS)


class RequestLoad:
    """Holds the requests of one peer to the limits of the session's settings.

    Args:
        session: the session that they belong to.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        settings = session.settings
        self._rate = Rate(settings.max_requests_per_second, settings.request_burst)
        self._matches = Rate(settings.max_matches_per_second, settings.matches_burst)
        self._open = 0
        self._octets = 0

    @property
    def octets(self) -> int:
        """What the messages of the peer's open requests take."""
        return self._octets

    def enter(self, request: Request) -> None:
        """A request of the peer begins; `leave` has to follow."""
        request.weight = weigh(request.message)
        self._open += 1
        self._octets += request.weight

    def check(self, request: Request) -> None:
        """Whether a request that has entered may go on.

        Raises:
            RequestError: it is one too many.
        """
        settings = self._session.settings
        self.check_rate()
        if self._open > settings.max_peer_requests:
            raise self._refusal(Limit.OPEN_REQUESTS, "too many open requests")
        if self._octets > settings.max_request_octets:
            raise self._refusal(Limit.REQUEST_OCTETS, "the open requests are too large")
        self.check_tokens(request.parameters)

    def check_rate(self) -> None:
        """Count one request or update.

        Raises:
            RequestError: too many came in a short time.
        """
        if not self._rate.take(self._session.now):
            raise self._refusal(Limit.REQUEST_RATE, "too many requests in a short time")

    def looked_at(self, streams: int) -> None:
        """An update of the peer made us look at that many streams; some count as one request."""
        self._rate.owe(self._session.now, streams // STREAMS_A_REQUEST)

    def matched(self, count: int = 1) -> None:
        """A request of the peer for a prefix made us look at that many things below it."""
        self._matches.owe(self._session.now, count)

    def check_matches(self) -> None:
        """Whether the peer may ask for a prefix now: one request can cost as much as thousands.

        Raises:
            RequestError: what it has asked for matched too much in a short time.
        """
        if self._matches.spent(self._session.now):
            raise self._refusal(Limit.PREFIX_MATCHES, "the prefixes match too much in a short time")

    def check_tokens(self, parameters: Parameters) -> None:
        """Hold the tokens of a message to their number.

        Raises:
            RequestError: there are too many.
        """
        tokens = len(parameters.all(ParameterType.AUTHORIZATION_TOKEN))
        if tokens > self._session.settings.max_tokens:
            raise self._refusal(Limit.TOKENS, f"{tokens} tokens in one message")

    def leave(self, request: Request) -> None:
        """A request is over; quiet for one of ours."""
        if request.weight:
            self._open -= 1
            self._octets -= request.weight
            request.weight = 0

    def _refusal(self, limit: Limit, reason: str) -> RequestError:
        self._session.limits.reached(limit)
        return overloaded(reason)

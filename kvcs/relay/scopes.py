"""What the requests of one scope take, over all sessions, and where that ends (MOQT §7, "Relay
Considerations" of KVCS).

A scope is a tenant: what one of them asks for must not leave the others without. So what a relay
holds is counted for each scope beside each session, and what is beyond a scope's limit is refused
with EXCESSIVE_LOAD, to that scope alone. An outsider does not use it up: a request is counted after
it was authorized.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvcs.access.permits import Place
from kvcs.access.policy import SCOPE_FIELDS
from kvcs.errors import RequestError
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.limits import Rate
from kvcs.moqt.names import TrackNamespace, namespace_text
from kvcs.relay.cache import RETRY_MS
from kvcs.relay.settings import RelayLimits
from kvcs.relay.stats import Fact, RelayStats, ScopeStats
from kvcs.trust.rights import KVCS_ROOT, Action

MAX_IDLE = 256
"""Scopes of which nothing is open that are remembered, for their rate and their number."""


class Share(StrEnum):
    """What is counted of a scope."""

    SUBSCRIPTIONS = "subscriptions"
    """SUBSCRIBE, SUBSCRIBE_NAMESPACE and SUBSCRIBE_TRACKS of peers, and PUBLISHes to them."""

    FETCHES = "fetches"
    """FETCHes of peers."""

    NAMESPACES = "namespaces"
    """PUBLISH_NAMESPACEs and PUBLISHes of peers."""

    RATE = "rate"
    """Requests in a time."""

    QUEUED = "queued"
    """Octets that wait below the cache for its readers."""


SHARES: dict[Action, Share | None] = {
    Action.SUBSCRIBE: Share.SUBSCRIPTIONS,
    Action.SUBSCRIBE_NAMESPACE: Share.SUBSCRIPTIONS,
    Action.SUBSCRIBE_TRACKS: Share.SUBSCRIPTIONS,
    Action.FETCH: Share.FETCHES,
    Action.PUBLISH_NAMESPACE: Share.NAMESPACES,
    Action.PUBLISH: Share.NAMESPACES,
    Action.TRACK_STATUS: None,
}
"""As what a request counts while it is open; None where it is over with its answer."""


def scope_of(namespace: TrackNamespace) -> TrackNamespace:
    """The scope of a namespace or prefix: root and Scope ID of KVCS, else its first field."""
    return namespace[: SCOPE_FIELDS if namespace[:1] == (KVCS_ROOT,) else 1]


@dataclass(slots=True, eq=False)
class _Account:
    """One scope."""

    name: TrackNamespace
    number: int
    rate: Rate
    open: Counter[Share] = field(default_factory=Counter)
    """Requests that are open."""

    refused: Counter[Share] = field(default_factory=Counter)
    """Requests that were refused at each limit."""

    queued: int = 0
    """Octets that wait for its readers, when they were looked at last."""


@dataclass(slots=True, eq=False)
class _Asker:
    """One session."""

    requests: dict[int, tuple[_Account, Share]] = field(default_factory=dict)
    """What is open, by Request ID."""

    scopes: Counter[TrackNamespace] = field(default_factory=Counter)
    """How many of them are of each scope."""


Reporter = Callable[..., None]
"""Writes a line to the log; see `kvcs.relay.hub.Hub.report`."""


class Scopes:
    """Counts the open requests of each scope, and refuses what is beyond its limits.

    Args:
        limits: see `RelayLimits`.
        stats: counts what is refused.
        report: writes a line to the log.
    """

    def __init__(self, limits: RelayLimits, stats: RelayStats, report: Reporter) -> None:
        self._limits = limits
        self._stats = stats
        self._report = report
        self._accounts: dict[TrackNamespace, _Account] = {}
        self._idle: dict[TrackNamespace, None] = {}
        self._sessions: dict[int, _Asker] = {}
        self._next_number = 0
        self._most = {
            Share.SUBSCRIPTIONS: limits.scope_subscriptions,
            Share.FETCHES: limits.scope_fetches,
            Share.NAMESPACES: limits.scope_namespaces,
        }

    def __len__(self) -> int:
        """Scopes that something is open of, and some of those that were."""
        return len(self._accounts)

    def enter(
        self, place: Place, namespace: TrackNamespace, share: Share | None, now: float
    ) -> None:
        """A request of a peer begins; `over` ends it.

        Args:
            place: the request.
            namespace: what it is for.
            share: what it counts as; None where it is over with its answer.
            now: the time.

        Raises:
            RequestError: EXCESSIVE_LOAD: its scope has reached a limit.
        """
        account = self._account(scope_of(namespace))
        try:
            if not account.rate.take(now):
                raise self._refusal(account, Share.RATE, "too many requests in a short time")
            self._check(account, share)
        finally:
            self._check_idle(account)
        if share is not None:
            self._count(place, account, share)

    def offer(self, place: Place, namespace: TrackNamespace) -> None:
        """A PUBLISH of ours has begun, for a SUBSCRIBE_TRACKS; `over` ends it."""
        self._count(place, self._account(scope_of(namespace)), Share.SUBSCRIPTIONS)

    def may_offer(self, namespace: TrackNamespace) -> bool:
        """Whether one more PUBLISH of ours fits into a scope."""
        account = self._account(scope_of(namespace))
        try:
            self._check(account, Share.SUBSCRIPTIONS)
        except RequestError:
            return False
        finally:
            self._check_idle(account)
        return True

    def over(self, place: Place) -> None:
        """A request is over; quiet where it was not counted."""
        asker = self._sessions.get(place.session)
        found = None if asker is None else asker.requests.pop(place.request_id, None)
        if asker is None or found is None:
            return
        account, share = found
        account.open[share] -= 1
        asker.scopes[account.name] -= 1
        if not asker.scopes[account.name]:
            del asker.scopes[account.name]
            if not asker.scopes:
                del self._sessions[place.session]
        self._check_idle(account)

    def session_closed(self, key: int) -> None:
        """A session is over, and every request on it."""
        asker = self._sessions.get(key)
        for request_id in [] if asker is None else list(asker.requests):
            self.over(Place(key, request_id))

    def shares(self, key: int) -> Mapping[TrackNamespace, int]:
        """Open requests of a session by their scope."""
        asker = self._sessions.get(key)
        return {} if asker is None else asker.scopes

    def set_queued(self, queued: Mapping[TrackNamespace, float]) -> Iterator[TrackNamespace]:
        """Take over what waits for the readers of each scope; gives those beyond their limit."""
        for name, account in list(self._accounts.items()):
            account.queued = round(queued.get(name, 0))
            if account.queued > self._limits.scope_queued_octets:
                yield name

    def status(self, most: int) -> tuple[ScopeStats, ...]:
        """The ``most`` scopes of which most is open; without their names."""
        largest = sorted(self._accounts.values(), key=lambda each: -each.open.total())[:most]
        return tuple(
            ScopeStats(
                scope=each.number,
                subscriptions=each.open[Share.SUBSCRIPTIONS],
                fetches=each.open[Share.FETCHES],
                namespaces=each.open[Share.NAMESPACES],
                queued_octets=each.queued,
                refused=each.refused.total(),
            )
            for each in largest
        )

    # Inner workings

    def _account(self, name: TrackNamespace) -> _Account:
        account = self._accounts.get(name)
        if account is None:
            self._next_number += 1
            limits = self._limits
            rate = Rate(limits.scope_requests_per_second, limits.scope_request_burst)
            account = self._accounts[name] = _Account(name, self._next_number, rate)
        self._idle.pop(name, None)
        return account

    def _check_idle(self, account: _Account) -> None:
        """Remember a scope of which nothing is open for a while, not for ever."""
        if account.open.total():
            return
        self._idle[account.name] = None
        while len(self._idle) > MAX_IDLE:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            del self._accounts[oldest]

    def _count(self, place: Place, account: _Account, share: Share) -> None:
        asker = self._sessions.setdefault(place.session, _Asker())
        asker.requests[place.request_id] = (account, share)
        asker.scopes[account.name] += 1
        account.open[share] += 1
        self._idle.pop(account.name, None)

    def _check(self, account: _Account, share: Share | None) -> None:
        if share is None:
            return
        if account.open[share] >= self._most[share]:
            raise self._refusal(account, share, f"too many {share} of this scope")
        waits = share in (Share.SUBSCRIPTIONS, Share.FETCHES)
        if waits and account.queued > self._limits.scope_queued_octets:
            raise self._refusal(account, Share.QUEUED, "too much waits for readers of this scope")

    def _refusal(self, account: _Account, limit: Share, reason: str) -> RequestError:
        account.refused[limit] += 1
        member = f"scope_refused_{limit}"
        setattr(self._stats, member, getattr(self._stats, member) + 1)
        if account.refused[limit] == 1:
            facts: dict[str, Fact] = {"scope": account.number, "limit": limit.value}
            name = namespace_text(account.name)
            self._report("scope_limit_reached", namespace=name, **facts)
        return RequestError(reason, RequestCode.EXCESSIVE_LOAD, RETRY_MS)

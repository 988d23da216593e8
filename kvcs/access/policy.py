"""Who may do what at a relay, or at a producer that listens: the one check that every request of a
peer passes (KVCS "Relay Considerations").

First the shape of KVCS namespaces, which holds for everyone; other namespaces are free. Then the
tokens of the session and of the request, unless the endpoint is open to anyone. The check comes
before anything is looked up, so what an outsider is told does not depend on what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcs.errors import RequestError, SessionError, TrustError
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode, SessionCode
from kvcs.moqt.names import TrackNamespace
from kvcs.moqt.parameters import ParameterType
from kvcs.moqt.tokens import ResolvedToken
from kvcs.trust import Action, Asked, Authority, Grant, Permit
from kvcs.trust.rights import KVCS_ROOT

KVCS_FIELDS = (len(KVCS_ROOT), 16, 32, 32, 16)
"""Octets of the fields: root, Scope ID, Compatibility ID, Anchor Key, Publication ID."""

SCOPE_FIELDS = 2
"""Fields of the shortest prefix that stays in one scope."""

Request = (
    events.SubscribeReceived
    | events.FetchReceived
    | events.TrackStatusReceived
    | events.PublishNamespaceReceived
    | events.SubscribeNamespaceReceived
    | events.SubscribeTracksReceived
    | events.PublishReceived
)
"""Requests of a peer."""

_TRACK_ACTIONS: dict[type[Request], Action] = {
    events.SubscribeReceived: Action.SUBSCRIBE,
    events.FetchReceived: Action.FETCH,
    events.TrackStatusReceived: Action.TRACK_STATUS,
    events.PublishReceived: Action.PUBLISH,
}


def asked(request: Request) -> Asked:
    """What a request wants to do, and with which name (CAT-4-MOQT)."""
    if isinstance(request, events.PublishNamespaceReceived):
        return Asked(Action.PUBLISH_NAMESPACE, request.track_namespace)
    if isinstance(request, events.SubscribeNamespaceReceived):
        return Asked(Action.SUBSCRIBE_NAMESPACE, request.track_namespace_prefix)
    if isinstance(request, events.SubscribeTracksReceived):
        return Asked(Action.SUBSCRIBE_TRACKS, request.track_namespace_prefix)
    name = request.full_track_name
    return Asked(_TRACK_ACTIONS[type(request)], name.namespace, name.name)


class Policy:
    """Decides for one endpoint.

    Args:
        authority: verifies tokens and knows what they allow; None serves anyone.
        clock: Unix seconds.
    """

    def __init__(
        self, authority: Authority | None = None, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._authority = authority
        self.clock = clock
        """Unix seconds."""

    @property
    def serves_anyone(self) -> bool:
        """Whether no tokens are asked for."""
        return self._authority is None

    def admit(self, tokens: Sequence[ResolvedToken]) -> tuple[Grant, ...]:
        """Take the tokens of a peer's SETUP; they hold for its requests.

        Raises:
            SessionError: one of them does not count: the session is closed.
        """
        if self._authority is None:
            return ()
        try:
            return self._authority.admit(tokens, self.clock())
        except TrustError as exc:
            raise SessionError(str(exc), _SESSION_CODES.get(_request_code(exc))) from exc

    def authorize(self, request: Request, held: Sequence[Grant]) -> Permit | None:
        """Check one request, whatever it is for and whoever else is served the same.

        Args:
            request: what the peer asks.
            held: what the tokens of its session allow.

        Returns:
            Until when it is allowed, and by what; None where that has no end.

        Raises:
            RequestError: UNAUTHORIZED, MALFORMED_AUTH_TOKEN or EXPIRED_AUTH_TOKEN.
        """
        wanted = asked(request)
        check_shape(wanted)
        return self._decide(wanted, held, request.tokens)

    def authorize_update(
        self, permit: Permit, update: events.RequestUpdateReceived, held: Sequence[Grant]
    ) -> Permit | None:
        """Check a REQUEST_UPDATE: it is a right of its own, and its tokens may prolong the request.

        Args:
            permit: that of the request so far.
            update: what the peer asks.
            held: what the tokens of its session allow.

        Returns:
            The request's permit from now on.

        Raises:
            RequestError: as `authorize`; the request ends with it (MOQT 9.5).
        """
        before = permit.asked
        prefix: TrackNamespace | None = update.parameters.get(ParameterType.TRACK_NAMESPACE_PREFIX)
        wanted = before
        if prefix is not None:
            wanted = Asked(before.action, prefix, before.track)
            check_shape(wanted)
        grants = (*permit.grants, *held)
        self._decide(
            Asked(Action.REQUEST_UPDATE, before.namespace, before.track), grants, update.tokens
        )
        return self._decide(wanted, grants, update.tokens)

    def renew(self, permit: Permit, held: Sequence[Grant]) -> Permit | None:
        """Check a request again: its time is up, or the issuers have changed.

        Raises:
            RequestError: it is allowed no longer.
        """
        return self._decide(permit.asked, (*permit.grants, *held), ())

    def allows(self, wanted: Asked, held: Sequence[Grant]) -> bool:
        """Whether what a session has shown allows something now."""
        try:
            self._decide(wanted, held, ())
        except RequestError:
            return False
        return True

    def _decide(
        self, wanted: Asked, held: Sequence[Grant], tokens: Sequence[ResolvedToken]
    ) -> Permit | None:
        if self._authority is None:
            return None
        now = self.clock()
        try:
            shown = self._authority.verify(tokens, now)
            return self._authority.decide(wanted, (*held, *shown), now)
        except TrustError as exc:
            raise RequestError(str(exc), _request_code(exc)) from exc


def check_shape(wanted: Asked) -> None:
    """Hold a request to the shape of KVCS namespaces.

    Raises:
        RequestError: UNAUTHORIZED.
    """
    if wanted.action in (Action.PUBLISH_NAMESPACE, Action.PUBLISH):
        check_announcement(wanted.namespace)
    elif wanted.action in (Action.SUBSCRIBE_NAMESPACE, Action.SUBSCRIBE_TRACKS):
        check_interest(wanted.namespace)


def check_announcement(namespace: TrackNamespace) -> None:
    """Hold what is published to the shape of a publication.

    Raises:
        RequestError: UNAUTHORIZED, for a namespace that would attract requests of other
            publications: no field at all, or below `KVCS_ROOT` other than five fields of
            `KVCS_FIELDS` octets.
    """
    if namespace and namespace[0] != KVCS_ROOT:
        return
    if tuple(map(len, namespace)) != KVCS_FIELDS:
        raise RequestError(
            "a namespace below kvcs-1 has five fields of 6, 16, 32, 32 and 16 octets",
            RequestCode.UNAUTHORIZED,
        )


def check_interest(prefix: TrackNamespace) -> None:
    """Hold a prefix that somebody wants to hear of to one scope.

    Raises:
        RequestError: UNAUTHORIZED, for a prefix that matches publications of several scopes.
    """
    if len(prefix) < SCOPE_FIELDS and prefix[:1] in ((), (KVCS_ROOT,)):
        raise RequestError(
            "a prefix that covers kvcs-1 names a scope: at least two fields",
            RequestCode.UNAUTHORIZED,
        )


_SESSION_CODES: dict[int, SessionCode] = {
    RequestCode.UNAUTHORIZED: SessionCode.UNAUTHORIZED,
    RequestCode.MALFORMED_AUTH_TOKEN: SessionCode.MALFORMED_AUTH_TOKEN,
    RequestCode.EXPIRED_AUTH_TOKEN: SessionCode.EXPIRED_AUTH_TOKEN,
}
"""Session codes for what is wrong with a token of SETUP (MOQT 8.9)."""


def _request_code(error: TrustError) -> RequestCode:
    if error.check == "denied":
        return RequestCode.UNAUTHORIZED
    if error.check == "expired":
        return RequestCode.EXPIRED_AUTH_TOKEN
    return RequestCode.MALFORMED_AUTH_TOKEN

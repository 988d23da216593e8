"""A relay that asks for tokens, its peers, and one request of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcs.access.policy import Policy
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.names import TrackNamespace
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.settings import SessionSettings
from kvcs.moqt.tokens import ResolvedToken, Token
from kvcs.moqt.track.store import Track
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import PUBLICATION, SCOPE, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.trust import (
    CONSUMER,
    PRODUCER,
    TOKEN_TYPE,
    Action,
    Authority,
    KeyRing,
    KeyUse,
    SigningKey,
    TokenVerifier,
    issue,
    scope_rule,
)

SCOPE_ID, OTHER_ID = SCOPE[1], b"O" * 16
ELSEWHERE: TrackNamespace = (b"kvcs-1", OTHER_ID, *PUBLICATION[2:])
BASE = 1_000_000
"""Unix seconds at the hub's time 0."""

ISSUER = SigningKey.generate(use=KeyUse.TOKEN, name="issuer", scope_id=SCOPE_ID)
OTHER = SigningKey.generate(use=KeyUse.TOKEN, name="other issuer", scope_id=OTHER_ID)


def token(
    actions: frozenset[Action] = PRODUCER | CONSUMER,
    key: SigningKey = ISSUER,
    *,
    scope_id: bytes = SCOPE_ID,
    at: int = 0,
    lifetime: int = 600,
    **options: Any,
) -> ResolvedToken:
    value = issue(
        key,
        audience=["relay"],
        rules=[scope_rule(scope_id, actions)],
        issued_at=BASE + at,
        lifetime=lifetime,
        token_id=bytes(8),
        **options,
    )
    return ResolvedToken(TOKEN_TYPE, value)


def other_token(*, at: int = 0, lifetime: int = 600) -> ResolvedToken:
    """A token for everything in the other scope."""
    return token(key=OTHER, scope_id=OTHER_ID, at=at, lifetime=lifetime)


def shows(*tokens: ResolvedToken) -> SessionSettings:
    """Settings of a session that shows tokens."""
    return SessionSettings(tokens=tokens)


class Guarded(Hub):
    """A relay that asks for tokens."""

    def __init__(self, limits: RelayLimits | None = None, *, relay_id: bytes = b"") -> None:
        self.issuers = KeyRing([ISSUER.public, OTHER.public], use=KeyUse.TOKEN)
        policy = Policy(
            Authority(TokenVerifier(self.issuers, ["relay"], skew=0)), lambda: BASE + self.now
        )
        super().__init__(limits, policy=policy, relay_id=relay_id)


def consumer(hub: Hub, *tokens: ResolvedToken) -> ConsumerPeer:
    return ConsumerPeer(hub, shows(*tokens))


def publisher(hub: Hub, *tokens: ResolvedToken, announce: bool = True) -> PublisherPeer:
    peer = PublisherPeer(hub, None, shows(*tokens))
    if announce:
        peer.announce(PUBLICATION)
    return peer


def shown(token: ResolvedToken) -> Parameters:
    return Parameters.of(authorization_token=Token.use_value(token.value, token.token_type))


ASK: dict[Action, Callable[[ConsumerPeer, TrackNamespace], int]] = {
    Action.SUBSCRIBE: lambda peer, name: peer.subscribe(full_name(namespace=name)),
    Action.FETCH: lambda peer, name: peer.fetch(full_name(namespace=name)),
    Action.TRACK_STATUS: lambda peer, name: peer.end.core.requester.track_status(
        full_name(namespace=name)
    ),
    Action.PUBLISH_NAMESPACE: lambda peer, name: peer.end.core.requester.publish_namespace(name),
    Action.SUBSCRIBE_NAMESPACE: lambda peer, name: peer.end.core.requester.subscribe_namespace(
        name[:2]
    ),
    Action.SUBSCRIBE_TRACKS: lambda peer, name: peer.end.core.requester.subscribe_tracks(
        name[:2], Parameters()
    ),
    Action.PUBLISH: lambda peer, name: peer.end.core.requester.publish(
        Track(full_name(namespace=name), authoritative=True), Parameters()
    ),
}


def ask(peer: ConsumerPeer, action: Action, namespace: TrackNamespace = PUBLICATION) -> int | None:
    """Make a request of a kind; the code with which it was refused, if it was."""
    request_id = ASK[action](peer, namespace)
    peer.hub.run()
    return peer.refused(request_id)


DENIED = RequestCode.UNAUTHORIZED

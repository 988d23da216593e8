"""Authorization at the relay: every kind of request, for each peer, until its token ends."""

from __future__ import annotations

import pytest

from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode, SessionCode
from kvcs.moqt.names import TrackNamespace
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.settings import SessionSettings
from kvcs.moqt.tokens import ResolvedToken, Token
from kvcs.testing.actors import SCOPE, ConsumerPeer, full_name
from kvcs.testing.tracks import put_group
from kvcs.trust import (
    TOKEN_TYPE,
    Action,
    KeyUse,
    SigningKey,
)
from tests.unit.relay.guarded import (
    ASK,
    DENIED,
    ELSEWHERE,
    OTHER,
    OTHER_ID,
    Guarded,
    ask,
    consumer,
    publisher,
    token,
)


@pytest.mark.parametrize("action", list(ASK))
def test_nobody_without_a_token_gets_anything(action: Action) -> None:
    hub = Guarded()
    put_group(publisher(hub, token()).track(), 0, 1)
    assert ask(consumer(hub), action) == DENIED
    assert hub.core.stats.unauthorized == 1


@pytest.mark.parametrize("action", list(ASK))
def test_what_a_token_names_is_allowed_and_nothing_else(action: Action) -> None:
    hub = Guarded()
    put_group(publisher(hub, token()).track(), 0, 1)
    every = frozenset(ASK)
    assert ask(consumer(hub, token(frozenset({action}))), action) != DENIED
    assert ask(consumer(hub, token(every - {action})), action) == DENIED


@pytest.mark.parametrize("action", list(ASK))
def test_a_member_of_one_scope_is_an_outsider_of_another(action: Action) -> None:
    """The answers for what is there and for what is not are the same, to the octet."""
    hub = Guarded()
    theirs = publisher(hub, token(key=OTHER, scope_id=OTHER_ID), announce=False)
    theirs.announce(ELSEWHERE)
    put_group(theirs.track(full_name(namespace=ELSEWHERE)), 0, 1)
    peer = consumer(hub, token())
    nowhere = (*ELSEWHERE[:4], b"N" * 16)
    answers = []
    for namespace in (ELSEWHERE, nowhere):
        assert ask(peer, action, namespace) == DENIED
        refusal = peer.end.of(events.RequestRefused)[-1].error
        answers.append((refusal.error_code, refusal.reason, refusal.retry_interval))
    assert answers[0] == answers[1]
    assert not theirs.subscribes and not theirs.fetches


def test_a_cache_hit_is_no_way_around() -> None:
    hub = Guarded()
    put_group(publisher(hub, token()).track(), 0, 1)
    reader = consumer(hub, token())
    assert reader.locations(reader.subscribe()) == [(0, 0)]
    outsider = consumer(hub, token(key=OTHER, scope_id=OTHER_ID))
    assert ask(outsider, Action.SUBSCRIBE) == DENIED
    assert ask(outsider, Action.FETCH) == DENIED


def test_who_joins_what_others_receive_is_checked_too() -> None:
    hub = Guarded()
    origin = publisher(hub, token())
    put_group(origin.track(), 0, 1)
    members = [consumer(hub, token()) for _ in range(3)]
    for member in members:
        member.subscribe()
    joined = consumer(hub)
    assert ask(joined, Action.SUBSCRIBE) == DENIED
    assert len(origin.subscribes) == 1
    assert all(member.locations() == [(0, 0)] for member in members)


@pytest.mark.parametrize("prefix", [(), (b"kvcs-1",), (b"kvcs-1", OTHER_ID)])
def test_no_prefix_reaches_beyond_the_scope(prefix: TrackNamespace) -> None:
    hub = Guarded()
    peer = consumer(hub, token())
    for asks in (
        lambda: peer.end.core.requester.subscribe_namespace(prefix),
        lambda: peer.end.core.requester.subscribe_tracks(prefix, Parameters()),
    ):
        request_id = asks()
        hub.run()
        assert peer.refused(request_id) == DENIED


def test_a_token_of_a_request_adds_to_those_of_the_session() -> None:
    hub = Guarded()
    put_group(publisher(hub, token()).track(), 0, 1)
    peer = consumer(hub, token(frozenset({Action.SUBSCRIBE_NAMESPACE})))
    assert ask(peer, Action.SUBSCRIBE) == DENIED
    peer.end.core.credentials.token = token(frozenset({Action.SUBSCRIBE}))
    assert ask(peer, Action.SUBSCRIBE) is None
    assert ask(peer, Action.FETCH) == DENIED
    assert ask(peer, Action.SUBSCRIBE_NAMESPACE) is None


@pytest.mark.parametrize(
    ("shown", "code"),
    [
        (ResolvedToken(TOKEN_TYPE, b"junk"), RequestCode.MALFORMED_AUTH_TOKEN),
        (token(at=-700), RequestCode.EXPIRED_AUTH_TOKEN),
        (token(key=SigningKey.generate(use=KeyUse.TOKEN, name="x")), 0x4),
        (ResolvedToken(0, b"password"), DENIED),
        (ResolvedToken(0x9D, b"grease"), DENIED),
    ],
)
def test_a_token_that_does_not_count_refuses_the_request(shown: ResolvedToken, code: int) -> None:
    hub = Guarded()
    peer = consumer(hub)
    peer.end.core.credentials.token = shown
    assert ask(peer, Action.SUBSCRIBE) == code
    assert not peer.end.of(events.SessionClosed)


@pytest.mark.parametrize(
    ("shown", "code"),
    [
        (ResolvedToken(TOKEN_TYPE, b"junk"), SessionCode.MALFORMED_AUTH_TOKEN),
        (token(at=-700), SessionCode.EXPIRED_AUTH_TOKEN),
        (token(with_setup=False), SessionCode.UNAUTHORIZED),
        (ResolvedToken(0, b"password"), SessionCode.UNAUTHORIZED),
    ],
)
def test_a_token_that_does_not_count_closes_the_session(shown: ResolvedToken, code: int) -> None:
    hub = Guarded()
    peer = consumer(hub, shown)
    [closed] = peer.end.of(events.SessionClosed)
    assert closed.code == code
    assert hub.core.stats.sessions_refused == 1


def test_grease_opens_a_session_and_nothing_more() -> None:
    hub = Guarded()
    peer = consumer(hub, ResolvedToken(0x9D, b"grease"))
    assert not peer.end.of(events.SessionClosed)
    assert ask(peer, Action.SUBSCRIBE) == DENIED


def test_a_registered_token_is_named_by_its_alias() -> None:
    hub = Guarded()
    put_group(publisher(hub, token()).track(), 0, 1)
    server = SessionSettings(max_auth_token_cache_size=16_384)
    peer = ConsumerPeer(hub, server=server)
    requester = peer.end.core.requester
    whole = token()
    registered = Parameters.of(authorization_token=Token.register(5, whole.value, whole.token_type))
    by_alias = Parameters.of(authorization_token=Token.use_alias(5))
    first = requester.subscribe_namespace(SCOPE, registered)
    hub.run()
    second = requester.track_status(full_name(), by_alias)
    third = requester.track_status(full_name())
    hub.run()
    assert peer.refused(first) is None and peer.accepted(second) is not None
    assert peer.refused(third) == DENIED

"""Authorization at the relay: every kind of request, for each peer, until its token ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, RequestCode, SessionCode, StreamCode
from kvcs.moqt.messages import FetchOk, RequestOk
from kvcs.moqt.names import TrackNamespace
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.settings import SessionSettings
from kvcs.moqt.store import Track
from kvcs.moqt.tokens import ResolvedToken, Token
from kvcs.relay.namespaces import Place
from kvcs.relay.permits import SWEEP_AT
from kvcs.relay.policy import Policy
from kvcs.testing.actors import PUBLICATION, SCOPE, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import put_group
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


class Guarded(Hub):
    """A relay that asks for tokens."""

    def __init__(self) -> None:
        self.issuers = KeyRing([ISSUER.public, OTHER.public], use=KeyUse.TOKEN)
        verifier = TokenVerifier(self.issuers, ["relay"], skew=0)
        super().__init__(policy=Policy(Authority(verifier), lambda: BASE + self.now))


def consumer(hub: Hub, *tokens: ResolvedToken) -> ConsumerPeer:
    return ConsumerPeer(hub, SessionSettings(tokens=tokens))


def publisher(hub: Hub, *tokens: ResolvedToken, announce: bool = True) -> PublisherPeer:
    peer = PublisherPeer(hub, None, SessionSettings(tokens=tokens))
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


# --- expiry ---


def test_a_subscription_ends_with_its_token() -> None:
    hub = Guarded()
    put_group(publisher(hub, token()).track(), 0, 1)
    peer = consumer(hub, token(lifetime=60))
    request_id = peer.subscribe()
    hub.advance(59)
    assert peer.done(request_id) is None
    hub.advance(2)
    done = peer.done(request_id)
    assert done is not None and done.status == PublishDoneCode.UNAUTHORIZED
    assert ask(peer, Action.SUBSCRIBE) == RequestCode.EXPIRED_AUTH_TOKEN
    assert hub.core.stats.permits_ended == 1


def test_a_namespace_subscription_ends_with_its_token() -> None:
    hub = Guarded()
    peer = consumer(hub, token(lifetime=60))
    request_id = peer.end.core.requester.subscribe_namespace(SCOPE)
    hub.advance(61)
    publisher(hub, token(at=61))
    assert not peer.end.of(events.NamespaceAnnounced)
    [ended] = [
        event for event in peer.end.of(events.RequestCancelled) if event.request_id == request_id
    ]
    assert ended.code == StreamCode.EXPIRED_AUTH_TOKEN


def test_an_announcement_ends_with_its_token_and_so_does_what_came_of_it() -> None:
    hub = Guarded()
    origin = publisher(hub, token(lifetime=60))
    put_group(origin.track(), 0, 1)
    watcher = consumer(hub, token())
    watcher.end.core.requester.subscribe_namespace(SCOPE)
    request_id = watcher.subscribe()
    assert watcher.locations(request_id) == [(0, 0)]
    hub.advance(61)
    assert len(watcher.end.of(events.NamespaceWithdrawn)) == 1
    put_group(origin.tracks[full_name()], 1, 1)
    hub.advance(1)
    assert watcher.locations(request_id) == [(0, 0)]
    cancelled = [event for event in origin.end.of(events.RequestCancelled) if not event.ours]
    assert cancelled, "the relay has left the publisher's track"


def test_a_fetch_that_waits_ends_with_its_token() -> None:
    hub = Guarded()
    origin = publisher(hub, token())
    origin.silent = True
    peer = consumer(hub, token(lifetime=3))
    request_id = peer.fetch()
    hub.advance(4)
    assert peer.refused(request_id) == RequestCode.EXPIRED_AUTH_TOKEN


def test_others_go_on_when_one_s_token_ends() -> None:
    hub = Guarded()
    origin = publisher(hub, token())
    put_group(origin.track(), 0, 1)
    short, long = consumer(hub, token(lifetime=60)), consumer(hub, token())
    first, second = short.subscribe(), long.subscribe()
    hub.advance(61)
    put_group(origin.tracks[full_name()], 1, 1)
    hub.run()
    assert short.locations(first) == [(0, 0)]
    assert long.locations(second) == [(0, 0), (1, 0)]


def test_a_fresh_token_in_an_update_prolongs_the_request() -> None:
    hub = Guarded()
    origin = publisher(hub, token())
    put_group(origin.track(), 0, 1)
    peer = consumer(hub, token(lifetime=60))
    request_id = peer.subscribe()
    hub.advance(50)
    peer.end.core.requester.update(request_id, shown(token(at=50, lifetime=60)))
    hub.advance(20)
    [answer] = peer.end.of(events.RequestUpdateAnswered)
    assert isinstance(answer.reply, RequestOk)
    put_group(origin.tracks[full_name()], 1, 1)
    hub.run()
    assert peer.done(request_id) is None
    assert peer.locations(request_id) == [(0, 0), (1, 0)]
    hub.advance(50)
    assert peer.done(request_id) is not None


def test_an_announcement_is_prolonged_too() -> None:
    hub = Guarded()
    origin = publisher(hub, token(lifetime=60))
    hub.advance(50)
    [request_id] = origin.announcements
    origin.end.core.requester.update(request_id, shown(token(at=50)))
    hub.advance(60)
    watcher = consumer(hub, token(at=50))
    watcher.end.core.requester.subscribe_namespace(SCOPE)
    hub.run()
    assert len(watcher.end.of(events.NamespaceAnnounced)) == 1


@pytest.mark.parametrize(
    "fresh",
    [
        token(frozenset({Action.SUBSCRIBE})),
        token(key=OTHER, scope_id=OTHER_ID),
        ResolvedToken(TOKEN_TYPE, b"junk"),
    ],
)
def test_an_update_without_the_right_ends_the_request(fresh: ResolvedToken) -> None:
    hub = Guarded()
    put_group(publisher(hub, token()).track(), 0, 1)
    peer = consumer(hub, token(frozenset({Action.SUBSCRIBE})))
    request_id = peer.subscribe()
    peer.end.core.requester.update(request_id, shown(fresh))
    hub.run()
    done = peer.done(request_id)
    assert done is not None and done.status == PublishDoneCode.UPDATE_FAILED


def expires_ms(peer: ConsumerPeer, request_id: int) -> int | None:
    """EXPIRES of the OK of a request."""
    accepted = peer.accepted(request_id)
    assert accepted is not None and not isinstance(accepted.reply, FetchOk)
    found: int | None = accepted.reply.parameters.get(ParameterType.EXPIRES)
    return found


@pytest.mark.parametrize(
    "action", [each for each in ASK if each not in (Action.FETCH, Action.TRACK_STATUS)]
)
def test_the_answer_says_when_it_will_end(action: Action) -> None:
    hub = Guarded()
    put_group(publisher(hub, token()).track(), 0, 1)
    peer = consumer(hub, token(lifetime=60))
    hub.advance(10)
    request_id = ASK[action](peer, PUBLICATION)
    hub.run()
    assert expires_ms(peer, request_id) == 50_000


def test_an_answer_to_an_update_says_it_anew() -> None:
    hub = Guarded()
    put_group(publisher(hub, token()).track(), 0, 1)
    peer = consumer(hub, token(lifetime=60))
    request_id = peer.subscribe()
    peer.end.core.requester.update(request_id, shown(token(lifetime=300)))
    hub.run()
    [answer] = peer.end.of(events.RequestUpdateAnswered)
    assert isinstance(answer.reply, RequestOk)
    assert answer.reply.parameters.get(ParameterType.EXPIRES) == 300_000


def test_what_is_published_ends_with_its_token() -> None:
    """A PUBLISH of a producer, and those that a SUBSCRIBE_TRACKS has led to."""
    hub = Guarded()
    origin = publisher(hub, token(lifetime=60), announce=False)
    track = origin.track()
    pushed = origin.end.core.requester.publish(track, Parameters())
    hub.run()
    takers = [consumer(hub, token(lifetime=lifetime)) for lifetime in (30, 600)]
    for taker in takers:
        taker.end.on_event = taking(taker)
        taker.end.core.requester.subscribe_tracks(SCOPE, Parameters())
    hub.run()
    put_group(track, 0, 1)
    hub.run()
    assert [len(taker.locations()) for taker in takers] == [1, 1]
    hub.advance(31)
    put_group(track, 1, 1)
    hub.advance(1)
    assert [len(taker.locations()) for taker in takers] == [1, 2]
    hub.advance(30)
    put_group(track, 2, 1)
    hub.advance(1)
    assert [len(taker.locations()) for taker in takers] == [1, 2]
    [ended] = [e for e in origin.end.of(events.RequestCancelled) if e.request_id == pushed]
    assert ended.code == StreamCode.EXPIRED_AUTH_TOKEN


def taking(peer: ConsumerPeer) -> Callable[[events.Event], None]:
    """Accepts whatever is published to a peer."""

    def take(event: events.Event) -> None:
        if isinstance(event, events.PublishReceived):
            peer.end.core.responder.accept_publish(event.request_id)

    return take


# --- issuers come and go ---


def test_a_revoked_issuer_ends_what_its_tokens_allowed() -> None:
    hub = Guarded()
    origin = publisher(hub, token())
    put_group(origin.track(), 0, 1)
    peer = consumer(hub, token())
    request_id = peer.subscribe()
    hub.issuers.remove(ISSUER.kid)
    hub.core.issuers_changed(hub.now)
    hub.run()
    done = peer.done(request_id)
    assert done is not None and done.status == PublishDoneCode.UNAUTHORIZED
    assert ask(peer, Action.FETCH) == DENIED
    assert hub.core.snapshot().namespaces == 0


def test_rotation_ends_nothing() -> None:
    hub = Guarded()
    origin = publisher(hub, token())
    put_group(origin.track(), 0, 1)
    peer = consumer(hub, token())
    request_id = peer.subscribe()
    fresh = SigningKey.generate(use=KeyUse.TOKEN, name="issuer", scope_id=SCOPE_ID)
    hub.issuers.add(fresh.public)
    hub.core.issuers_changed(hub.now)
    hub.run()
    assert peer.done(request_id) is None
    assert ask(consumer(hub, token(key=fresh)), Action.SUBSCRIBE) is None


# --- bookkeeping ---


def test_permits_of_requests_that_are_over_are_not_kept() -> None:
    hub = Guarded()
    put_group(publisher(hub, token()).track(), 0, 1)
    peer = consumer(hub, token())
    for _ in range(3 * SWEEP_AT):
        peer.fetch()
    assert len(hub.core._permits) <= 2 * SWEEP_AT
    peer.end.core.close()
    hub.run()
    assert len(hub.core._permits) == 1  # the publisher's


def test_timers_of_sessions_that_are_gone_do_nothing() -> None:
    hub = Guarded()
    peer = consumer(hub, token(lifetime=60))
    peer.end.core.requester.subscribe_namespace(SCOPE)
    hub.run()
    hub.disconnect(peer.spoke)
    hub.advance(100)
    hub.core.issuers_changed(hub.now)
    assert hub.core.stats.permits_ended == 0
    assert not hub.core._is_alive(Place(peer.spoke.key, 0))


def test_what_is_reported_holds_no_token() -> None:
    hub = Guarded()
    peer = consumer(hub, token())
    ask(peer, Action.SUBSCRIBE, ELSEWHERE)
    reports = []
    while (report := hub.core.next_report()) is not None:
        reports.append(repr(report))
    assert any("unauthorized" in text for text in reports)
    assert token().value.hex() not in "".join(reports)


def test_an_open_relay_asks_for_nothing_and_ends_nothing() -> None:
    hub = Hub()
    put_group(PublisherPeer(hub).track(), 0, 1)
    peer = consumer(hub, ResolvedToken(0, b"anything"))
    request_id = peer.subscribe()
    peer.end.core.requester.update(request_id, shown(token()))
    hub.advance(5000)
    assert peer.locations(request_id) == [(0, 0)]
    assert len(hub.core._permits) == 0

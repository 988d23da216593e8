"""What was allowed ends with its token, or with its issuer's key, and not before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcs.access.permits import SWEEP_AT, Place
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, RequestCode, StreamCode
from kvcs.moqt.messages import FetchOk, RequestOk
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.tokens import ResolvedToken
from kvcs.testing.actors import PUBLICATION, SCOPE, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import put_group
from kvcs.trust import (
    TOKEN_TYPE,
    Action,
    KeyUse,
    Permit,
    SigningKey,
)
from kvcs.trust.policy import MAX_GRANTS
from tests.unit.relay.guarded import (
    ASK,
    BASE,
    DENIED,
    ELSEWHERE,
    ISSUER,
    OTHER,
    OTHER_ID,
    SCOPE_ID,
    Guarded,
    ask,
    consumer,
    publisher,
    shown,
    token,
)

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


@pytest.mark.parametrize("how", ["PUBLISH", "PUBLISH_NAMESPACE"])
def test_an_announcement_that_ends_leaves_what_another_token_allows(how: str) -> None:
    hub = Guarded()
    origin = publisher(hub, token(lifetime=60))
    track, requester = origin.track(), origin.end.core.requester
    if how == "PUBLISH":
        requester.publish(track, shown(token(lifetime=600)))
    else:
        requester.publish_namespace(PUBLICATION, shown(token(lifetime=600)))
    hub.run()
    peer = consumer(hub, token(lifetime=600))
    request_id = peer.subscribe()
    hub.advance(61)
    assert hub.core.stats.permits_ended == 1
    put_group(track, 0, 1)
    hub.run()
    assert len(peer.locations(request_id)) == 1 and peer.done(request_id) is None


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
    assert len(hub.core._enforcer.permits) <= 2 * SWEEP_AT
    peer.end.core.close()
    hub.run()
    assert len(hub.core._enforcer.permits) == 1  # the publisher's


def test_timers_of_sessions_that_are_gone_do_nothing() -> None:
    hub = Guarded()
    peer = consumer(hub, token(lifetime=60))
    peer.end.core.requester.subscribe_namespace(SCOPE)
    hub.run()
    hub.disconnect(peer.spoke)
    hub.advance(100)
    hub.core.issuers_changed(hub.now)
    assert hub.core.stats.permits_ended == 0
    assert not hub.core.is_open(Place(peer.spoke.key, 0))


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
    assert len(hub.core._enforcer.permits) == 0


# --- what is kept ---


def test_updates_without_end_make_no_permit_grow() -> None:
    hub = Guarded()
    peer = consumer(hub, token(), token(lifetime=500))
    request_id = peer.end.core.requester.subscribe_namespace(SCOPE)
    hub.run()
    for number in range(3 * MAX_GRANTS):
        peer.end.core.requester.update(request_id, shown(token(lifetime=300)))
        if number % 2:  # the same ones again, and others
            peer.end.core.requester.update(request_id, shown(token(lifetime=300 + number)))
        hub.run()
        [permit] = _permits(hub)
        assert len(permit.grants) <= MAX_GRANTS
    assert peer.refused(request_id) is None
    assert permit.until == BASE + 600


def test_the_same_token_again_is_kept_once() -> None:
    hub = Guarded()
    peer = consumer(hub, token())
    request_id = peer.end.core.requester.subscribe_namespace(SCOPE)
    hub.run()
    for _ in range(5):
        peer.end.core.requester.update(request_id, shown(token(lifetime=300)))
        hub.run()
    [permit] = _permits(hub)
    assert len(permit.grants) == 2


def test_many_announcements_that_end_at_once_are_looked_through_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = Guarded()
    origin = publisher(hub, token(lifetime=60), announce=False)
    names = [(*PUBLICATION[:4], b"%016d" % number) for number in range(20)]
    for name in names:
        put_group(origin.track(full_name(namespace=name)), 0, 1)
        origin.announce(name)
    peer = consumer(hub, token())
    asked = [peer.subscribe(full_name(namespace=name)) for name in names]
    looks = []
    real = hub.core._enforcer._drop_upstreams
    monkeypatch.setattr(
        hub.core._enforcer, "_drop_upstreams", lambda key, now: (looks.append(key), real(key, now))
    )
    hub.advance(61)
    assert len(looks) == 1
    assert all(peer.done(request_id) is not None for request_id in asked)
    assert not hub.core._enforcer._curtailed


def _permits(hub: Hub) -> list[Permit]:
    bearers = hub.core._enforcer.permits._bearers.values()
    return [permit for bearer in bearers for permit in bearer.permits.values()]

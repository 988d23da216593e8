"""Limits of one scope over all its sessions: they are reached by it, and by nobody else."""

from __future__ import annotations

import pytest

from kvcs.access.permits import Place
from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.names import TrackNamespace
from kvcs.moqt.parameters import Parameters
from kvcs.relay.scopes import MAX_IDLE, Scopes, Share, scope_of
from kvcs.relay.settings import RelayLimits
from kvcs.relay.stats import Fact, RelayStats
from kvcs.testing.actors import PUBLICATION, SCOPE, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import put
from tests.unit.relay.guarded import OTHER, OTHER_ID, Guarded, consumer, publisher, token

ELSEWHERE: TrackNamespace = (b"kvcs-1", b"2" * 16, *PUBLICATION[2:])
OVER = RequestCode.EXCESSIVE_LOAD


def other(number: int, scope: TrackNamespace = SCOPE) -> TrackNamespace:
    """Another publication of a scope."""
    return (*scope, *PUBLICATION[2:4], b"%016d" % number)


def two_scopes(limits: RelayLimits) -> Hub:
    """A relay with a publisher of one track in each of two scopes."""
    hub = Hub(limits)
    for namespace in (PUBLICATION, ELSEWHERE):
        put(PublisherPeer(hub, namespace).track(full_name(namespace=namespace)), 0, 0)
    return hub


@pytest.mark.parametrize(
    ("namespace", "scope"),
    [
        (PUBLICATION, SCOPE),
        (SCOPE, SCOPE),
        ((b"kvcs-1",), (b"kvcs-1",)),
        ((b"other", b"a", b"b"), (b"other",)),
        ((), ()),
    ],
)
def test_a_scope_is_what_a_token_may_be_for(
    namespace: TrackNamespace, scope: TrackNamespace
) -> None:
    assert scope_of(namespace) == scope


def test_subscriptions_of_a_scope_are_counted_over_its_sessions() -> None:
    hub = two_scopes(RelayLimits(scope_subscriptions=3))
    peers = [ConsumerPeer(hub) for _ in range(4)]
    asked = [peer.subscribe() for peer in peers]
    refused = [peer.refused(each) for peer, each in zip(peers, asked, strict=True)]
    assert refused == [None, None, None, OVER]
    [error] = [event.error for event in peers[3].end.of(events.RequestRefused)]
    assert error.retry_interval > 1
    elsewhere = peers[3].subscribe(full_name(namespace=ELSEWHERE))
    assert peers[3].refused(elsewhere) is None and len(peers[3].objects(elsewhere)) == 1
    peers[0].cancel(asked[0])
    again = peers[3].subscribe()
    assert peers[3].refused(again) is None and len(peers[3].objects(again)) == 1
    assert hub.core.stats.scope_refused_subscriptions == 1


def test_what_has_ended_by_itself_counts_no_longer() -> None:
    hub = Hub(RelayLimits(scope_fetches=1, scope_subscriptions=1))
    origin = PublisherPeer(hub)
    put(origin.track(), 0, 0)
    peer = ConsumerPeer(hub)
    for _ in range(5):
        assert peer.refused(peer.fetch()) is None
    subscribed = peer.subscribe()
    assert peer.refused(peer.subscribe()) == OVER
    origin.tracks[full_name()].end()
    hub.advance(5)
    assert peer.done(subscribed) is not None
    assert peer.refused(peer.subscribe()) is None


@pytest.mark.parametrize("how", ["lost", "closed"])
def test_requests_of_a_session_that_is_over_count_no_longer(how: str) -> None:
    hub = two_scopes(RelayLimits(scope_subscriptions=2))
    first, second = ConsumerPeer(hub), ConsumerPeer(hub)
    nobody = full_name(namespace=other(7))
    asked = [first.subscribe(), first.subscribe(nobody, rendezvous_timeout=9000)]
    assert second.refused(second.subscribe()) == OVER
    assert first.refused(asked[1]) is None
    if how == "lost":
        hub.disconnect(first.spoke)
    else:
        first.end.core.close()
    hub.run()
    assert second.refused(second.subscribe()) is None


def test_a_request_that_is_cancelled_before_it_was_looked_at_does_not_stay_counted() -> None:
    hub = two_scopes(RelayLimits(scope_subscriptions=1))
    peer = ConsumerPeer(hub)
    place = Place(peer.spoke.key, 0)
    relay = hub.core.peer(peer.spoke.key)
    assert relay is not None
    # What the session has queued reaches the relay after its request is over.
    hub.core.scopes.enter(place, PUBLICATION, Share.SUBSCRIPTIONS, hub.now)
    hub.core.cancelled(place, relay, hub.now)
    assert peer.refused(peer.subscribe()) is None


def test_fetches_of_a_scope_wait_for_nobody_elsewhere() -> None:
    hub = two_scopes(RelayLimits(scope_fetches=2))
    stalled = ConsumerPeer(hub)
    stalled.spoke.relay.credit.object_octets = 0
    for _ in range(2):
        assert stalled.refused(stalled.fetch()) is None
    beside = ConsumerPeer(hub)
    assert beside.refused(beside.fetch()) == OVER
    elsewhere = beside.fetch(full_name(namespace=ELSEWHERE))
    assert len(beside.objects(elsewhere)) == 1
    assert hub.core.stats.scope_refused_fetches == 1


def test_namespaces_and_published_tracks_of_a_scope_are_bounded_together() -> None:
    hub = Hub(RelayLimits(scope_namespaces=3))
    first, second = PublisherPeer(hub, None), PublisherPeer(hub, None)
    asked = [first.announce(other(0)), second.announce(other(1))]
    second.end.core.requester.publish(second.track(), Parameters())
    hub.run()
    asked.append(first.announce(other(2)))
    refused = {event.request_id: event for event in first.end.of(events.RequestRefused)}
    assert refused[asked[2]].error.error_code == OVER
    assert not second.end.of(events.RequestRefused)
    elsewhere = first.announce(other(0, (b"kvcs-1", b"2" * 16)))
    assert elsewhere not in {event.request_id for event in first.end.of(events.RequestRefused)}
    second.withdraw()
    assert first.announce(other(2)) not in {
        event.request_id for event in first.end.of(events.RequestRefused)
    }


def test_the_rate_of_a_scope_is_that_of_all_its_sessions() -> None:
    hub = two_scopes(RelayLimits(scope_requests_per_second=2, scope_request_burst=10))
    peers = [ConsumerPeer(hub) for _ in range(3)]
    # The announcement has taken one.
    codes = [peer.refused(peer.fetch()) for _ in range(3) for peer in peers]
    assert codes == [None] * 9
    assert peers[0].refused(peers[0].fetch()) == OVER
    assert len(peers[0].objects(peers[0].fetch(full_name(namespace=ELSEWHERE)))) == 1
    hub.advance(1)
    codes = [peer.refused(peer.fetch()) for peer in peers]
    assert codes == [None, None, OVER]


def test_outsiders_do_not_use_up_a_scope() -> None:
    hub = Guarded(RelayLimits(scope_requests_per_second=1, scope_request_burst=4))
    put(publisher(hub, token()).track(), 0, 0)
    outsider = consumer(hub, token(key=OTHER, scope_id=OTHER_ID))
    for _ in range(50):
        assert outsider.refused(outsider.fetch()) == RequestCode.UNAUTHORIZED
    member = consumer(hub, token())
    assert len(member.objects(member.fetch())) == 1
    assert hub.core.stats.scope_refused_rate == 0


def test_a_publish_that_is_one_too_many_is_skipped() -> None:
    hub = Hub(RelayLimits(scope_subscriptions=2))
    listener = ConsumerPeer(hub)
    listener.end.core.requester.subscribe_tracks(SCOPE)
    hub.run()
    origin = PublisherPeer(hub, None)
    for name in (b"a", b"b"):
        origin.end.core.requester.publish(origin.track(full_name(name)), Parameters())
        hub.run()
    assert len(listener.end.of(events.PublishReceived)) == 1
    [skipped] = listener.end.of(events.TrackSkipped)
    assert skipped.full_track_name == full_name(b"b")


def queued(hub: Hub, amounts: list[tuple[ConsumerPeer, int]]) -> None:
    for peer, octets in amounts:
        peer.spoke.queued = octets
    hub.advance(1.1)


def test_readers_of_a_scope_for_which_too_much_waits_are_refused_until_it_has_gone() -> None:
    hub = two_scopes(RelayLimits(scope_queued_octets=1000))
    reader, beside = ConsumerPeer(hub), ConsumerPeer(hub)
    reader.subscribe()
    queued(hub, [(reader, 1001)])
    assert beside.refused(beside.subscribe()) == OVER
    assert beside.refused(beside.fetch()) == OVER
    assert len(beside.objects(beside.fetch(full_name(namespace=ELSEWHERE)))) == 1
    assert hub.core.stats.scope_refused_queued == 2
    queued(hub, [(reader, 1000)])
    assert beside.refused(beside.subscribe()) is None


def test_what_waits_for_a_session_of_two_scopes_is_divided() -> None:
    hub = two_scopes(RelayLimits(scope_queued_octets=1000))
    reader, beside = ConsumerPeer(hub), ConsumerPeer(hub)
    for namespace, count in ((PUBLICATION, 3), (ELSEWHERE, 1)):
        for _ in range(count):
            reader.subscribe(full_name(namespace=namespace))
    queued(hub, [(reader, 2000)])
    assert beside.refused(beside.subscribe()) == OVER
    assert beside.refused(beside.subscribe(full_name(namespace=ELSEWHERE))) is None
    first, second = hub.core.scopes.status(2)
    assert (first.queued_octets, second.queued_octets) == (1500, 500)
    assert (first.subscriptions, first.refused) == (3, 1)
    assert (second.subscriptions, second.refused) == (2, 0)


def scopes(limits: RelayLimits | None = None) -> tuple[Scopes, list[str]]:
    told: list[str] = []

    def report(event: str, **facts: Fact) -> None:
        told.append(f"{event} {facts}")

    return Scopes(limits or RelayLimits(), RelayStats(), report), told


def test_scopes_that_nothing_is_open_of_are_not_remembered_for_ever() -> None:
    held, told = scopes()
    held.enter(Place(1, 0), (b"kvcs-1", b"kept"), Share.FETCHES, 0.0)
    for number in range(10 * MAX_IDLE):
        name = (b"kvcs-1", b"%d" % number)
        held.enter(Place(2, number), name, Share.SUBSCRIPTIONS, 0.0)
        held.over(Place(2, number))
        assert held.may_offer((b"kvcs-1", b"o%d" % number))
    assert len(held) == MAX_IDLE + 1 and not told
    assert held.status(1)[0].fetches == 1
    held.session_closed(1)
    held.session_closed(1)
    assert len(held) == MAX_IDLE


def test_a_limit_is_told_once_and_without_the_name_in_the_status() -> None:
    held, told = scopes(RelayLimits(scope_fetches=1))
    for number in range(3):
        if number == 0:
            held.enter(Place(1, number), SCOPE, Share.FETCHES, 0.0)
            continue
        with pytest.raises(RequestError) as caught:
            held.enter(Place(1, number), SCOPE, Share.FETCHES, 0.0)
        assert caught.value.code == OVER
    assert len(told) == 1 and "'limit': 'fetches'" in told[0]
    [status] = held.status(9)
    assert (status.scope, status.fetches, status.refused) == (1, 1, 2)

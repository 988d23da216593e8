"""Nothing that one session does stops another: each attack beside somebody who behaves.

The one who behaves follows a Track and fetches its past meanwhile, and gets all of it; what
the attack has left behind goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import PUBLICATION, SCOPE, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import put_group
from tests.unit.relay.chains import A, B, locations, named, subscribe_namespace

GROUPS = 12
MANY = 10_000
"""Requests of a long attack."""

FEW = 400
"""Those of a short one, of the same kind."""

BATCH = 100
"""Requests in one flight."""

Attack = Callable[[ConsumerPeer, int], Iterator[None]]
"""Attacks with so many requests, in as many pieces as it likes."""


def open_and_cancel(attacker: ConsumerPeer, count: int) -> Iterator[None]:
    """Requests of every kind, each cancelled in the flight in which it was made."""
    requester = attacker.end.core.requester
    for start in range(0, count, BATCH):
        asked = []
        for number in range(start, start + BATCH):
            name = full_name() if number % 4 else full_name(b"%d" % number)
            kind = number % 3
            if kind == 0:
                asked.append(attacker.subscribe(name, run=False))
            elif kind == 1:
                asked.append(attacker.fetch(name, run=False))
            else:
                asked.append(requester.subscribe_namespace((*SCOPE, b"%032d" % number)))
        for request_id in asked:
            requester.cancel(request_id)
        yield


def open_and_forget(attacker: ConsumerPeer, count: int) -> Iterator[None]:
    """Requests that stay open, until it is told that they are too many."""
    for start in range(0, count, BATCH):
        for number in range(start, start + BATCH):
            ask = attacker.subscribe if number % 2 else attacker.fetch
            ask(full_name(b"%d" % number if number % 4 else b"k.raw.s0"), run=False)
        yield
    refused = [event.error.error_code for event in attacker.end.of(events.RequestRefused)]
    assert refused.count(RequestCode.EXCESSIVE_LOAD) > count // 10


def stop_reading(attacker: ConsumerPeer, count: int) -> Iterator[None]:
    """Subscribes and fetches as often as it may, and takes nothing of it."""
    attacker.spoke.relay.credit.object_octets = 0
    for _ in range(count // 10):
        attacker.subscribe(run=False)
        attacker.fetch(run=False)
    yield from ()


def flood_namespaces(attacker: ConsumerPeer, count: int) -> Iterator[None]:
    """Announces as many as it may, and takes every one back, again and again."""
    requester = attacker.end.core.requester
    for start in range(0, count, BATCH):
        announced = [
            requester.publish_namespace((*PUBLICATION[:4], b"%016d" % number))
            for number in range(start, start + BATCH)
        ]
        yield
        if start % (4 * BATCH) == 0:
            for request_id in announced:
                requester.cancel(request_id)
            yield


def stop_streams(attacker: ConsumerPeer, count: int) -> Iterator[None]:
    """Stops every stream that it gets, and asks for it again."""
    for _ in range(count // 10):
        for request_id in [attacker.subscribe(run=False), attacker.fetch(run=False)]:
            for event in attacker.end.of(events.DataStreamOpened)[-2:]:
                attacker.end.core.requester.stop_stream(event.stream_id, 1)
            if request_id % 8 == 0:
                attacker.end.core.requester.cancel(request_id)
        yield


ATTACKS = [open_and_cancel, open_and_forget, stop_reading, flood_namespaces, stop_streams]


@pytest.mark.parametrize("chained", [False, True], ids=["relay", "chain"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_whoever_behaves_gets_everything(attack: Attack, chained: bool) -> None:
    attacked(attack, FEW, chained)


@pytest.mark.slow
@pytest.mark.parametrize("attack", [open_and_cancel, flood_namespaces])
def test_so_it_does_beside_ten_thousand_requests(attack: Attack) -> None:
    attacked(attack, MANY, chained=False)


def attacked(attack: Attack, count: int, chained: bool) -> None:
    """Attack a relay, or one below another; see above."""
    lower = Hub(RelayLimits(fetch_wait=1e6), relay_id=B)
    upper = Hub(relay_id=A) if chained else lower
    if chained:
        lower.link(upper)
    origin = PublisherPeer(upper)
    track = origin.track()
    put_group(track, 0, 3)
    attacker, behaved = ConsumerPeer(lower), ConsumerPeer(lower)
    heard = subscribe_namespace(behaved)
    followed = behaved.subscribe()
    pieces = attack(attacker, count)
    for group in range(1, GROUPS):
        next(pieces, None)
        put_group(track, group, 3)
        lower.run()
    for _ in pieces:
        lower.run()
    late = ConsumerPeer(lower)
    fetched = late.fetch(chosen=LocationFilter.none())
    joined = late.subscribe()
    lower.advance(3)
    for peer, request_id in ((behaved, followed), (late, fetched), (late, joined)):
        assert sorted(peer.locations(request_id)) == locations(range(GROUPS))
        assert peer.refused(request_id) is None and peer.done(request_id) is None
    assert not behaved.end.of(events.RequestRefused) and behaved.accepted(heard) is not None
    assert PUBLICATION[2:] in named(behaved)
    for hub in {upper, lower}:
        assert all(spoke.relay.core.failure is None for spoke in hub.spokes)
    left(lower, attacker)


def left(hub: Hub, attacker: ConsumerPeer) -> None:
    """What the attack has left behind is gone a while after it."""
    hub.disconnect(attacker.spoke)
    hub.run()
    hub.advance(20)
    core = hub.core
    assert {track.name for track in core._tracks} <= {full_name()}
    assert sum(status.subscriptions for status in core.scopes.status(99)) <= 3
    assert core.snapshot().namespaces <= 1
    assert len(core._timers) < 200


def test_limits_of_a_session_leave_others_of_its_scope_room() -> None:
    """Whatever one session may hold is a part of what its scope may."""
    limits = RelayLimits()
    hub = Hub()
    sessions = hub.connect().relay.core.settings
    assert 8 * sessions.max_peer_requests <= limits.scope_subscriptions
    assert 8 * sessions.max_concurrent_fetches <= limits.scope_fetches
    assert 8 * limits.max_namespaces_per_session <= limits.scope_namespaces
    assert 8 * sessions.max_requests_per_second <= limits.scope_requests_per_second
    assert 8 * sessions.request_burst <= limits.scope_request_burst
    assert 4 * limits.max_caused_per_session <= sessions.max_peer_requests
    assert 2 * limits.max_caused_fetches_per_session <= limits.max_upstream_fetches
    assert 2 * limits.scope_queued_octets <= limits.max_queued_octets


def test_a_track_name_is_kept_for_nobody_that_has_only_asked() -> None:
    hub = Hub()
    PublisherPeer(hub)
    attacker = ConsumerPeer(hub)
    for number in range(200):
        attacker.subscribe(FullTrackName(PUBLICATION, b"%d" % number), run=False)
    hub.run()
    hub.advance(20)
    assert not list(hub.core._tracks) and not len(hub.core.cache)

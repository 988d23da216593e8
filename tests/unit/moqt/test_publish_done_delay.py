"""When PUBLISH_DONE follows the end of a Track (MOQT §9.9): not while it may overtake the past."""

from __future__ import annotations

from kvcs.moqt import events
from kvcs.moqt.events import FetchReceived, SubscribeReceived
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.settings import SessionSettings
from kvcs.testing.pair import SessionPair
from kvcs.testing.tracks import NAME, end_track, locations, put_group, track

DELAY = SessionSettings().done_delay
SUBSCRIBER = Parameters.of(location_filter=LocationFilter.next_object())
RANGE = Parameters.of(location_filter=LocationFilter.group_end(0, 0, 2))


def ended_pair() -> SessionPair:
    """A server that answers every request with a Track that has ended."""
    pair = SessionPair()
    offered = track()
    for group in range(3):
        put_group(offered, group, 2, octets=1000)
    end_track(offered, 3)
    responder = pair.server.core.responder

    def answer(event: events.Event) -> None:
        if isinstance(event, SubscribeReceived):
            responder.accept_subscribe(event.request_id, offered, pair.now)
        elif isinstance(event, FetchReceived):
            responder.accept_fetch(event.request_id, offered, pair.now)

    pair.server.on_event = answer
    return pair


def done(pair: SessionPair) -> int:
    """Subscriptions that the client knows to have ended."""
    return len(pair.client.of(events.SubscriptionEnded))


def fetch_held(pair: SessionPair) -> int:
    """Subscribe and fetch at once; the fetch's stream has no credit yet."""
    requester = pair.client.core.requester
    requester.subscribe(NAME, SUBSCRIBER)
    pair.server.credit.object_octets = 0
    request_id = requester.fetch(NAME, RANGE)
    pair.run()
    return request_id


def test_it_comes_a_little_after_subscribe_ok() -> None:
    pair = ended_pair()
    pair.client.core.requester.subscribe(NAME, SUBSCRIBER)
    pair.run()
    pair.advance(DELAY * 0.9)
    assert done(pair) == 0
    pair.advance(DELAY * 0.2)
    assert done(pair) == 1


def test_it_waits_for_a_fetch_of_the_track() -> None:
    pair = ended_pair()
    request_id = fetch_held(pair)
    pair.advance(DELAY * 10)
    assert done(pair) == 0
    pair.server.credit.object_octets = 1 << 20
    pair.run()
    assert len(locations(pair.client.events, request_id)) == 6
    pair.advance(DELAY * 0.9)
    assert done(pair) == 0
    pair.advance(DELAY * 0.2)
    assert done(pair) == 1


def test_the_delay_counts_from_the_end_of_the_fetch() -> None:
    pair = ended_pair()
    fetch_held(pair)
    pair.advance(DELAY * 0.9)
    pair.server.credit.object_octets = 1 << 20
    pair.run()
    pair.advance(DELAY * 0.9)
    assert done(pair) == 0
    pair.advance(DELAY * 0.2)
    assert done(pair) == 1


def test_a_cancelled_fetch_does_not_hold_it_back() -> None:
    pair = ended_pair()
    request_id = fetch_held(pair)
    pair.advance(DELAY * 2)
    pair.client.core.requester.cancel(request_id)
    pair.run()
    pair.advance(DELAY * 1.1)
    assert done(pair) == 1

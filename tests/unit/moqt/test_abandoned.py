"""A Track that ends before its time, and one that knows who still reads it."""

from __future__ import annotations

import pytest

from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, StreamCode
from kvcs.moqt.events import FetchReceived, SubscribeReceived
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.track.store import Track
from kvcs.testing.pair import SessionPair
from kvcs.testing.residue import residue
from kvcs.testing.tracks import NAME, put, put_group, track

EVERYTHING = Parameters.of(
    location_filter=LocationFilter.next_object(),
    fill_parameters=Parameters.of(location_filter=LocationFilter.absolute_start(0, 0)),
)


def serving(target: Track) -> SessionPair:
    """A pair whose server answers everything from one Track."""
    pair = SessionPair()

    def answer(event: events.Event) -> None:
        responder = pair.server.core.responder
        if isinstance(event, SubscribeReceived):
            responder.accept_subscribe(event.request_id, target, pair.now)
        elif isinstance(event, FetchReceived):
            responder.accept_fetch(event.request_id, target, pair.now)

    pair.server.on_event = answer
    return pair


def test_an_abandoned_track_tells_its_subscribers_at_once_and_why() -> None:
    target = track()
    pair = serving(target)
    pair.client.core.requester.subscribe(NAME, EVERYTHING)
    pair.run()
    pair.server.credit.object_octets = 0  # a subscriber that is far behind
    put_group(target, 0, 2)
    put(target, 1, 0)
    target.end(PublishDoneCode.INTERNAL_ERROR, "input too long", abandoned=True)
    pair.run()
    (ended,) = pair.client.of(events.SubscriptionEnded)
    assert (ended.status, ended.reason) == (PublishDoneCode.INTERNAL_ERROR, "input too long")
    assert not pair.client.of(events.ObjectStarted)
    pair.server.credit.object_octets = 1 << 60
    pair.run()
    assert residue(pair.server.core, target) == {}


def test_streams_of_an_abandoned_track_are_reset() -> None:
    target = track()
    pair = serving(target)
    pair.client.core.requester.subscribe(NAME, EVERYTHING)
    pair.run()
    put(target, 0, 0)
    pair.run()
    target.end(PublishDoneCode.INTERNAL_ERROR, "no more", abandoned=True)
    pair.run()
    (stream,) = pair.client.of(events.DataStreamEnded)
    assert stream.reset_code == StreamCode.INTERNAL_ERROR
    (ended,) = pair.client.of(events.SubscriptionEnded)
    assert ended.reason == "no more"


def test_a_late_subscriber_of_an_abandoned_track_gets_what_there_is_and_the_reason() -> None:
    target = track()
    put_group(target, 0, 2)
    target.end(PublishDoneCode.INTERNAL_ERROR, "input too long", abandoned=True)
    pair = serving(target)
    pair.client.core.requester.subscribe(NAME, EVERYTHING)
    pair.run()
    pair.advance(1.0)
    (ended,) = pair.client.of(events.SubscriptionEnded)
    assert ended.reason == "input too long"
    assert len(pair.client.of(events.ObjectEnded)) == 2


def test_a_track_that_ends_in_good_order_is_delivered_first() -> None:
    target = track()
    pair = serving(target)
    pair.client.core.requester.subscribe(NAME, EVERYTHING)
    pair.run()
    pair.server.credit.object_octets = 0
    put_group(target, 0, 2)
    target.end()
    pair.advance(1.0)
    assert not pair.client.of(events.SubscriptionEnded)
    pair.server.credit.object_octets = 1 << 60
    pair.run()
    pair.advance(1.0)
    (ended,) = pair.client.of(events.SubscriptionEnded)
    assert ended.status == PublishDoneCode.TRACK_ENDED
    assert len([e for e in pair.client.of(events.ObjectStarted) if e.header.payload_length]) == 2


@pytest.mark.parametrize("ending", ["whole", "cancelled", "session closed"])
@pytest.mark.parametrize("fill", [True, False])
def test_a_track_knows_who_reads_it(fill: bool, ending: str) -> None:
    target = track()
    put_group(target, 0, 2)
    left: list[bool] = []
    target.on_unfollowed = lambda: left.append(target.followed)
    pair = serving(target)
    pair.server.credit.object_octets = 0
    requester = pair.client.core.requester
    whole = Parameters.of(location_filter=LocationFilter.absolute_start(0, 0))
    if fill:
        request_id = requester.subscribe(NAME, EVERYTHING)
    else:
        request_id = requester.fetch(NAME, whole)
    pair.run()
    assert (target.followed, target.readers, left) == (True, 1, [])
    if ending == "whole":
        pair.server.credit.object_octets = 1 << 60
        target.end()
        pair.run()
        pair.advance(1.0)
    elif ending == "cancelled":
        requester.cancel(request_id)
        pair.run()
    else:
        pair.client.core.close()
        pair.run()
    assert (target.followed, target.readers, left[-1]) == (False, 0, False)
